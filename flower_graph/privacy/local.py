"""Local differential privacy of what leaves a client, as mods around a ClientApp.

A client sends what was known before, plus a vector of length at most ``clipping_norm`` C and
Gaussian noise. Other data give another vector of at most that length, so the sensitivity is 2 C.
``PrivateReplies`` is for replies of one client: weights, or embeddings next to the means that the
client was given; the vector is the change. ``PrivateRows`` is for replies with one row a client:
the latent vectors of nFedGNN.

Clipping and noise are the functions of Flower's ``LocalDpMod``. That mod's formula, from its
epsilon to the noise, is proven for an epsilon below 1 only, and for one round; so the noise is
chosen from the budget of the whole run (``accountant.py``).

NumPy draws the noise, as in Flower. The operating system seeds its generator afresh before each
draw: the server knows the run's seed, and must not know the noise.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.config.common import PrivacyConfig
from flower_graph.errors import ConfigError, RefusedError, brief
from flower_graph.flower_compat import (
    ClientAppCallable,
    Mod,
    add_gaussian_noise_inplace,
    clip_inputs_inplace,
)
from flower_graph.privacy.accountant import multiplier_of
from flower_graph.wire.arrays import unpack_integers
from flower_graph.wire.keys import (
    CLIENTS,
    CONFIG,
    COUNTED,
    METRICS,
    NUM_EXAMPLES,
    SERVER_ROUND,
    USERS,
    WITH_TARGETS,
)

PROTECTED = "train"  # the kind of message whose reply has the arrays
# Entries of replies that do not depend on the data; all others do.
KEPT = {NUM_EXAMPLES, CLIENTS, SERVER_ROUND, WITH_TARGETS}
RELEASES = "private-releases"  # in Context.state: how often clients have sent something
SEED_WORDS = 8  # of 32 bits, for NumPy's generator
ONE_EACH = "give each client a SuperNode of its own"


@dataclass(frozen=True)
class ClientNoise:
    """Noise on each client's vectors."""

    clipping_norm: float  # Largest length of a vector before the noise
    deviation: float  # Standard deviation of the noise on each of its numbers
    releases: int  # How many messages the clients of a SuperNode may send
    withholds: bool = True  # Whether clients send no measurements

    def protect(self, vectors: NDArray[np.generic]) -> NDArray[np.generic]:
        """Clip each client's vector ``[p, ...]``, and add the noise."""
        result = clipped(vectors, self.clipping_norm)
        add_fresh_noise(result, self.deviation)
        return result

    def count(self, state: RecordDict) -> None:
        """Count one more reply of the clients here; ``RefusedError`` once the budget is spent."""
        # Counted before sending: a reply that is lost on its way counts too.
        sent = state.config_records.get(RELEASES, ConfigRecord()).get(RELEASES, 0)
        assert isinstance(sent, int)
        if sent >= self.releases:
            raise RefusedError(f"the privacy budget is spent: {sent} of {self.releases} replies")
        state[RELEASES] = ConfigRecord({RELEASES: sent + 1})


def clipped(vectors: NDArray[np.generic], norm: float) -> NDArray[np.generic]:
    """Return a copy of vectors ``[p, ...]``, none longer than ``norm``."""
    if not np.isfinite(vectors).all():
        raise RefusedError("its numbers are not finite: they cannot be clipped")
    result = np.array(vectors, order="C")
    rows = result.reshape(result.shape[0], -1)
    # Flower's function takes one client at a time, and cannot divide by a length of 0. It leaves
    # short vectors as they are, so only the others are worth a call.
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    for row in np.flatnonzero(lengths > norm):
        clip_inputs_inplace([rows[row]], norm)
    return result


def add_fresh_noise(values: NDArray[np.generic], deviation: float) -> None:
    """Add Gaussian noise in place, by a seed of the operating system's."""
    before = np.random.get_state()
    np.random.seed(np.frombuffer(os.urandom(4 * SEED_WORDS), np.uint32))
    try:
        add_gaussian_noise_inplace([values], deviation)
    finally:
        np.random.set_state(before)


def client_noise(privacy: PrivacyConfig, rounds: int) -> ClientNoise | None:
    """Return the noise of a run."""
    if not privacy.is_local:
        return None
    deviation = 2 * privacy.clipping_norm * multiplier_of(privacy, rounds)
    return ClientNoise(privacy.clipping_norm, deviation, rounds, privacy.withholds)


class PrivateRows:
    """A Flower mod for replies with one array, whose rows are of one client each.

    A SuperNode may host any number of clients. A row is clipped as it is, not by its distance to
    what the server sent: that is a gradient, and no guess of the row.

    Parameters
    ----------
    noise : ClientNoise
        Length of a vector, noise, and how many replies there may be.
    """

    def __init__(self, noise: ClientNoise) -> None:
        self.noise = noise

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != PROTECTED:
            reply = call_next(message, context)
            if reply.has_content() and _numbers(reply).any():
                raise RefusedError(f"{message.metadata.message_type}: its arrays have no noise")
            return reply
        self.check(message)
        self.noise.count(context.state)
        reply = call_next(message, context)
        if reply.has_content():
            self.protect(message, reply)
        return reply

    def check(self, message: Message) -> None:
        """Refuse a request whose reply could not be protected."""
        users = _entry(message, USERS)
        named = unpack_integers(users, USERS) if isinstance(users, bytes) else np.zeros(0)
        if np.unique(named).size != named.size:
            raise RefusedError("the message names a client twice, which would send two vectors")

    def protect(self, message: Message, reply: Message) -> None:
        """Add the noise to a reply."""
        records = reply.content.array_records
        places = [(name, key) for name, record in records.items() for key in record]
        if len(places) != 1:
            raise RefusedError(f"arrays {places!s:.80}: only one, with a row a client, has noise")
        ((name, key),) = places
        rows = self.noise.protect(records[name][key].numpy())
        reply.content[name] = ArrayRecord({key: Array(rows)})


class PrivateReplies(PrivateRows):
    """A Flower mod for replies of one client: noise on how far its arrays are from the server's.

    What the client measured is withheld, if the noise says so. More than one client behind one
    reply is refused: they would be clipped and get noise as if they were one.

    Parameters
    ----------
    noise : ClientNoise
        As of ``PrivateRows``.
    """

    def check(self, message: Message) -> None:
        clients = _entry(message, CLIENTS)
        if isinstance(clients, list) and len(clients) != 1:
            raise RefusedError(_shared(clients))

    def protect(self, message: Message, reply: Message) -> None:
        clients = reply.content.metric_records.get(METRICS, MetricRecord()).get(CLIENTS, 1)
        if clients != 1:
            raise RefusedError(f"it speaks for {brief(clients, 20)} clients; {ONE_EACH}")
        before, after = _numbers(message), _numbers(reply)
        if before.shape != after.shape:
            raise RefusedError(f"{after.size} numbers for the {before.size} that came")
        change = self.noise.protect((after - before)[None])[0]
        put_numbers(reply, before + change)
        if self.noise.withholds:
            _silence(reply)


def put_numbers(message: Message, values: NDArray[np.generic]) -> None:
    """Replace the numbers of all arrays, in their order and types."""
    done = 0
    for name, record in list(message.content.array_records.items()):
        new = ArrayRecord()
        for key, array in record.items():
            held = array.numpy()
            own = values[done : done + held.size].reshape(held.shape)
            new[key], done = Array(np.asarray(own, held.dtype)), done + held.size
        message.content[name] = new


def withhold_measurements(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Reduce the answer to ``evaluate`` to the weight, as a Flower mod."""
    # Other messages pass as they are: their replies are another mod's to protect.
    reply = call_next(message, context)
    if message.metadata.message_type == "evaluate":
        # The keys are removed, since a server refuses measurements that are not numbers.
        _silence(reply, are_removed=True)
    return reply


def privacy_mods(privacy: PrivacyConfig, rounds: int) -> list[Mod]:
    """Build the ``train_mods`` of a ClientApp whose replies are of one client each."""
    if privacy.is_central and privacy.withholds:
        return [_withhold_losses]
    noise = client_noise(privacy, rounds)
    return [] if noise is None else [PrivateReplies(noise)]


def require_one_client(privacy: PrivacyConfig, clients: Sequence[int]) -> None:
    """Refuse several clients on one SuperNode if replies get noise; ``ConfigError``."""
    if privacy.epsilon is not None and len(clients) != 1:
        raise ConfigError(f"privacy.epsilon: {privacy.epsilon:g}: {_shared(clients)}")


def _withhold_losses(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Withhold the measurements of training; the server adds the noise to its arrays."""
    reply = call_next(message, context)
    _silence(reply)
    return reply


def _silence(reply: Message, *, are_removed: bool = False) -> None:
    """Withhold measurements, and counts of predictions, whatever the server has asked."""
    if not reply.has_content():
        return
    for record in reply.content.config_records.values():
        record.pop(COUNTED, None)
    for metrics in reply.content.metric_records.values():
        for key in metrics.keys() - KEPT:
            value = metrics[key]
            if are_removed:
                del metrics[key]
            else:
                metrics[key] = [math.nan] * len(value) if isinstance(value, list) else math.nan


def _numbers(message: Message) -> NDArray[np.float64]:
    return flat(array for one in message.content.array_records.values() for array in one.values())


def flat(arrays: Iterable[Array]) -> NDArray[np.float64]:
    """Return the numbers of some arrays as one vector."""
    result = [np.asarray(array.numpy(), np.float64).ravel() for array in arrays]
    return np.concatenate([np.zeros(0), *result])


def _entry(message: Message, key: str) -> object:
    return message.content.config_records.get(CONFIG, ConfigRecord()).get(key)


def _shared(clients: Sequence[object]) -> str:
    return f"clients {list(clients)!s:.60} share a SuperNode; {ONE_EACH}"
