"""Central differential privacy of averaged weights, by Flower's wrapper around the averaging.

The server is trusted: it sees the clients' arrays, clips each client's change to ``clipping_norm``
C, averages with equal weights, and adds Gaussian noise to the mean before anybody gets it. Another
client's data moves the mean of n clients by at most 2 C / n.

Flower's ``DifferentialPrivacyServerSideFixedClipping`` skips a round in which one client fails, and
its noise is for the number of clients that were asked. Here it is made anew in each round, for the
replies that can be averaged, so that the noise fits the clients that are really in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flower_graph.config.common import PrivacyConfig
from flower_graph.privacy.accountant import multiplier_of
from flower_graph.privacy.local import fresh_noise
from flower_graph.wire.keys import NUM_EXAMPLES

Averaged = tuple[ArrayRecord | None, MetricRecord | None]
Average = Callable[[int, Iterable[Message]], Averaged]


class CentralNoise:
    """Clips what each client sends, and adds noise to the mean."""

    def __init__(self, clipping_norm: float, noise_multiplier: float) -> None:
        self.clipping_norm, self.noise_multiplier = clipping_norm, noise_multiplier

    def average(
        self, server_round: int, model: ArrayRecord, replies: Sequence[Message], average: Average
    ) -> Averaged:
        for reply in replies:
            # Each client counts once, however many nodes it has; otherwise one could dominate the
            # mean.
            for record in reply.content.metric_records.values():
                record[NUM_EXAMPLES] = 1
            _move_at_all(reply, model)
        # Flower's multiplier refers to the clipping norm, ours to the sensitivity.
        wrapper = DifferentialPrivacyServerSideFixedClipping(
            _Averaging(average), 2 * self.noise_multiplier, self.clipping_norm, len(replies)
        )
        wrapper.current_arrays = model
        with fresh_noise():
            return wrapper.aggregate_train(server_round, replies)


def _move_at_all(reply: Message, model: ArrayRecord) -> None:
    """Change the last bit of a reply that equals the model: Flower divides by the length."""
    ((name, record),) = reply.content.array_records.items()
    if all(np.array_equal(record[key].numpy(), model[key].numpy()) for key in model):
        first = next(iter(record))
        values = record[first].numpy().copy()
        values.flat[0] = np.nextafter(values.flat[0], np.inf, dtype=values.dtype)
        reply.content[name] = ArrayRecord({**record, first: Array(values)})


class _Averaging(FedAvg):
    """A stand-in for a strategy: Flower's wrapper needs only its averaging."""

    def __init__(self, average: Average) -> None:
        super().__init__()
        self._average = average

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Averaged:
        return self._average(server_round, replies)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> NoReturn:
        raise AssertionError("the strategy asks the clients itself")


def central_noise(privacy: PrivacyConfig, rounds: int) -> CentralNoise | None:
    """Return the noise of a run; None if the server adds none."""
    if not privacy.is_central:
        return None
    return CentralNoise(privacy.clipping_norm, multiplier_of(privacy, rounds))
