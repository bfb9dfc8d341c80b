"""Local differential privacy of what leaves a client, as mods around a ClientApp.

``PrivateReplies`` is Flower's ``LocalDpMod`` for replies of one client: weights, or embeddings next
to the means that the client was given. ``PrivateRows`` is for replies with one row a client: the
latent vectors of nFedGNN. In both a client sends what was known before, plus a vector of length at
most ``clipping_norm`` C and Gaussian noise. Other data give another vector of at most that length,
so the sensitivity is 2 C.

Flower's own formula, from the mod's epsilon to the noise, is proven for an epsilon below 1 only,
and for one round. So the noise is chosen from the budget of the whole run (``privacy_account``),
and the mod is given the epsilon with which its formula gives that noise.

``LocalDpMod`` treats a reply as one client's. Where a SuperNode hosts many clients, ``ClientNoise``
clips each client's vector and adds noise to it, with the functions that the mod calls.

NumPy draws the noise, as in Flower. The operating system seeds its generator afresh before each
draw: the server knows the run's seed, and must not know the noise.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.mod import LocalDpMod
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


@dataclass(frozen=True)
class ClientNoise:
    """Noise on each client's vectors."""

    clipping_norm: float  # Largest length of a vector before the noise
    deviation: float  # Standard deviation of the noise on each of its numbers
    releases: int  # How many messages the clients of a SuperNode may send
    withholds: bool = True  # Whether clients send no measurements

    def protect(self, vectors: NDArray[np.generic]) -> NDArray[np.generic]:
        # vectors [p, ...]
        refuse_infinite(vectors)
        result = np.array(vectors, order="C")  # a copy: it is clipped in place
        rows = result.reshape(result.shape[0], -1)
        # Flower's function takes one client at a time, and cannot divide by a length of 0. It
        # leaves short vectors as they are, so only the others are worth a call.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        for row in np.flatnonzero(lengths > self.clipping_norm):
            clip_inputs_inplace([rows[row]], self.clipping_norm)
        with fresh_noise():
            add_gaussian_noise_inplace([rows], self.deviation)
        return result

    def count(self, state: RecordDict) -> None:
        """Count one more reply of the clients here; ``RefusedError`` once the budget is spent."""
        # Counted before sending: a reply that is lost on its way counts too.
        count_release(state, self.releases)


def client_noise(privacy: PrivacyConfig, rounds: int) -> ClientNoise | None:
    """Return the noise of a run."""
    if not privacy.is_local:
        return None
    deviation = 2 * privacy.clipping_norm * multiplier_of(privacy, rounds)
    return ClientNoise(privacy.clipping_norm, deviation, rounds, privacy.withholds)


@contextmanager
def fresh_noise() -> Iterator[None]:
    """Seed NumPy's generator by the operating system in this block; restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(np.frombuffer(os.urandom(4 * SEED_WORDS), np.uint32))
    try:
        yield
    finally:
        np.random.set_state(before)


def count_release(state: RecordDict, releases: int) -> None:
    """Count a reply in a ``Context.state``; ``RefusedError`` once the budget is spent."""
    kept = state.config_records.get(RELEASES, ConfigRecord())
    sent = kept.get(RELEASES, 0)
    assert isinstance(sent, int)
    if sent >= releases:
        raise RefusedError(f"the privacy budget is spent: {sent} of {releases} replies")
    state[RELEASES] = ConfigRecord({RELEASES: sent + 1})


def refuse_infinite(values: NDArray[np.generic]) -> None:
    """Refuse numbers that cannot be clipped; ``RefusedError``."""
    if not np.isfinite(values).all():
        raise RefusedError("its numbers are not finite: they cannot be clipped")


class PrivateReplies:
    """A Flower mod: ``LocalDpMod`` with the checks that its promise needs."""

    # The noise is drawn anew from the operating system, whatever seeds the run has; an array that
    # is not finite, which clipping would let through, is refused; so is more than one client behind
    # one reply, which would be clipped and noised as if they were one; what the client measured is
    # withheld; and after ``releases`` replies nothing more is sent, whatever the server asks.

    def __init__(
        self,
        clipping_norm: float,
        noise_multiplier: float,
        delta: float,
        releases: int,
        *,
        withholds: bool = True,
    ) -> None:
        self.releases, self.withholds = releases, withholds
        # The inverse of the mod's formula.
        epsilon = math.sqrt(2 * math.log(1.25 / delta)) / noise_multiplier
        self._mod = LocalDpMod(clipping_norm, 2 * clipping_norm, epsilon, delta)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != PROTECTED:
            return _without_arrays(message, call_next(message, context))
        clients = _entry(message, CLIENTS)
        if isinstance(clients, list) and len(clients) != 1:
            raise RefusedError(_shared(clients))
        count_release(context.state, self.releases)
        with ExitStack() as stack:

            def answer(message: Message, context: Context) -> Message:
                reply = _checked(message, call_next(message, context))
                # After the client: it may have seeded NumPy itself, with what the server knows.
                stack.enter_context(fresh_noise())
                return reply

            reply = self._mod(message, context, answer)
        return _silent(reply) if self.withholds else reply


class PrivateRows:
    """A Flower mod for replies with one array, whose rows are of one client each."""

    # What ``PrivateReplies`` does to a reply it does to each row, with Flower's functions, so that
    # a SuperNode may host any number of clients. A row is clipped as it is, not by its distance to
    # what the server sent: that is a gradient, and no guess of the row.

    def __init__(self, noise: ClientNoise) -> None:
        self.noise = noise

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type != PROTECTED:
            return _without_arrays(message, call_next(message, context))
        users = _entry(message, USERS)
        named = unpack_integers(users, USERS) if isinstance(users, bytes) else np.zeros(0)
        if np.unique(named).size != named.size:
            raise RefusedError("the message names a client twice, which would send two vectors")
        self.noise.count(context.state)
        reply = call_next(message, context)
        if reply.has_content():
            self._protect(reply)
        return reply

    def _protect(self, reply: Message) -> None:
        records = reply.content.array_records
        places = [(name, key) for name, record in records.items() for key in record]
        if len(places) != 1:
            raise RefusedError(f"arrays {places!s:.80}: only one, with a row a client, has noise")
        ((name, key),) = places
        rows = self.noise.protect(records[name][key].numpy())
        reply.content[name] = ArrayRecord({key: Array(rows)})


def withhold_measurements(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Reduce the answer to ``evaluate`` to the weight, as a Flower mod."""
    # Other messages pass as they are: their replies are another mod's to protect.
    reply = call_next(message, context)
    if message.metadata.message_type == "evaluate" and reply.has_content():
        for record in reply.content.metric_records.values():
            # The keys are removed, since a server refuses measurements that are not numbers.
            for key in record.keys() - KEPT:
                del record[key]
        _drop_counts(reply)
    return reply


def privacy_mods(privacy: PrivacyConfig, rounds: int) -> list[Mod]:
    """Build the ``train_mods`` of a ClientApp whose replies are of one client each."""
    if privacy.is_central and privacy.withholds:
        return [_withhold_losses]
    if not privacy.is_local:
        return []
    multiplier = multiplier_of(privacy, rounds)
    norm, withholds = privacy.clipping_norm, privacy.withholds
    return [PrivateReplies(norm, multiplier, privacy.delta, rounds, withholds=withholds)]


def require_one_client(privacy: PrivacyConfig, clients: Sequence[int]) -> None:
    """Refuse several clients on one SuperNode if replies get noise; ``ConfigError``."""
    if privacy.epsilon is not None and len(clients) != 1:
        raise ConfigError(f"privacy.epsilon: {privacy.epsilon:g}: {_shared(clients)}")


def _withhold_losses(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Withhold the measurements of training; the server adds the noise to its arrays."""
    return _silent(call_next(message, context))


def _checked(request: Message, reply: Message) -> Message:
    """Refuse arrays that the mod cannot scale, or would treat as one client's."""
    if reply.has_content():
        clients = reply.content.metric_records.get(METRICS, MetricRecord()).get(CLIENTS, 1)
        if clients != 1:
            raise RefusedError(f"it speaks for {brief(clients, 20)} clients; {_ONE_EACH}")
        before, after = _numbers(request), _numbers(reply)
        refuse_infinite(after)
        if np.array_equal(before, after):
            raise RefusedError("nothing changed: Flower's mod divides by the length of the change")
    return reply


def _without_arrays(message: Message, reply: Message) -> Message:
    if reply.has_content() and _numbers(reply).any():
        raise RefusedError(f"{message.metadata.message_type}: its arrays have no noise")
    return reply


def _drop_counts(reply: Message) -> None:
    """Withhold counts of predictions, whatever the server has asked."""
    for record in reply.content.config_records.values():
        record.pop(COUNTED, None)


def _silent(reply: Message) -> Message:
    if reply.has_content():
        _drop_counts(reply)
        metrics = reply.content.metric_records.get(METRICS, MetricRecord())
        for key in metrics.keys() - KEPT:
            value = metrics[key]
            metrics[key] = [math.nan] * len(value) if isinstance(value, list) else math.nan
    return reply


def _numbers(message: Message) -> NDArray[np.generic]:
    records = message.content.array_records.values()
    result = [array.numpy().ravel() for record in records for array in record.values()]
    return np.concatenate(result) if result else np.zeros(0)


def _entry(message: Message, key: str) -> object:
    return message.content.config_records.get(CONFIG, ConfigRecord()).get(key)


_ONE_EACH = "give each client a SuperNode of its own"


def _shared(clients: Sequence[object]) -> str:
    return f"clients {list(clients)!s:.60} share a SuperNode; {_ONE_EACH}"
