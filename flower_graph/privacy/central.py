"""Central differential privacy of averaged weights: the server clips, averages and adds noise.

The server is trusted: it sees the clients' arrays, clips each client's change to ``clipping_norm``
C, averages with equal weights, and adds Gaussian noise to the mean before anybody gets it. Another
client's data moves the mean of n clients by at most 2 C / n.

Clipping and noise are the functions of Flower's ``DifferentialPrivacyServerSideFixedClipping``.
That strategy skips a round in which one client fails, and its noise is for the number of clients
that were asked; here the noise fits the clients that are really in the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, Message

from flower_graph.config.common import PrivacyConfig
from flower_graph.privacy.accountant import multiplier_of
from flower_graph.privacy.local import add_fresh_noise, clipped, flat, put_numbers
from flower_graph.wire.keys import NUM_EXAMPLES


@dataclass(frozen=True)
class CentralNoise:
    """Clips what each client sends, and adds noise to the mean."""

    clipping_norm: float
    noise_multiplier: float  # noise over sensitivity

    def clip(self, model: ArrayRecord, replies: Sequence[Message]) -> None:
        """Clip each client's change of the model, and let each client count once."""
        before = flat(model.values())
        for reply in replies:
            # However many nodes a client has: otherwise one could dominate the mean.
            for record in reply.content.metric_records.values():
                record[NUM_EXAMPLES] = 1
            (sent,) = reply.content.array_records.values()
            change = (flat(sent.values()) - before)[None]
            put_numbers(reply, before + clipped(change, self.clipping_norm)[0])

    def blur(self, mean: ArrayRecord, clients: int) -> None:
        """Add noise to the mean of so many clients."""
        for name, array in list(mean.items()):
            values = array.numpy().copy()
            add_fresh_noise(values, 2 * self.clipping_norm * self.noise_multiplier / clients)
            mean[name] = Array(values)


def central_noise(privacy: PrivacyConfig, rounds: int) -> CentralNoise | None:
    """Return the noise of a run; None if the server adds none."""
    if not privacy.is_central:
        return None
    return CentralNoise(privacy.clipping_norm, multiplier_of(privacy, rounds))
