"""Differential privacy: from a budget to the noise, and the noise at clients or at the server.

**The budget.** All data of one client are protected, over the whole run: two data sets are
neighbours if they differ in one client's data. Flower's accountant composes rounds as Renyi
differential privacy; a client counts as asked in every round, and no amplification by sampling is
claimed. Flower's formula for ``LocalDpMod`` is proven for an epsilon below 1 only, and for one
round.

**Local noise**, as mods around a ClientApp. A client sends what was known before, plus a vector of
length at most ``clipping_norm`` C and Gaussian noise. Other data give another vector of at most
that length, so the sensitivity is 2 C. ``PrivateReplies`` is for replies of one client: weights, or
embeddings next to the means that the client was given; the vector is the change. ``PrivateRows`` is
for replies with one row a client: the latent vectors of nFedGNN.

**Central noise.** The server is trusted: it sees the clients' arrays, clips each client's change to
C, averages with equal weights, and adds noise to the mean before anybody gets it. Another client's
data move the mean of n clients by at most 2 C / n. Flower's
``DifferentialPrivacyServerSideFixedClipping`` skips a round in which one client fails, and its
noise is for the number of clients that were asked; here the noise fits the clients in the mean.

Clipping and noise are Flower's functions. NumPy draws the noise, and the operating system seeds its
generator afresh before each draw: the server knows the run's seed, and must not know the noise.
"""

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.config.common import REPORT, PrivacyConfig, RunConfig
from flower_graph.errors import ConfigError, RefusedError, brief
from flower_graph.flower_compat import (
    ClientAppCallable,
    Mod,
    add_gaussian_noise_inplace,
    clip_inputs_inplace,
)
from flower_graph.records.rounds import RoundReport
from flower_graph.wire import keys
from flower_graph.wire.arrays import unpack_integers

LOG = logging.getLogger(__name__)
LEAST, MOST = 1e-7, 1e6  # range of noise multipliers that is searched
HALVINGS = 60
ACCURACIES = "accuracies and losses that clients measure on their own data"
PROTECTED = "train"  # the kind of message whose reply has the arrays
# Entries of replies that do not depend on the data; all others do.
KEPT = {keys.NUM_EXAMPLES, keys.CLIENTS, keys.SERVER_ROUND, keys.WITH_TARGETS}
RELEASES = "private-releases"  # in Context.state: how often clients have sent something
SEED_WORDS = 8  # of 32 bits, for NumPy's generator
ONE_EACH = "give each client a SuperNode of its own"


# The budget --------------------------------------------------------------------------------------


def spent(config: RunConfig) -> dict[str, object]:
    """Return the budget that the finished rounds have spent, for ``result.json``."""
    privacy, rounds = config.privacy, config.rounds
    if config.sends_once:
        return {"epsilon": privacy.epsilon, "delta": 0.0, "form": privacy.form}
    multiplier = multiplier_of(privacy, rounds)
    result: dict[str, object] = {
        "epsilon": accounted(multiplier, privacy.delta, rounds),
        "epsilon-of-a-round": accounted(multiplier, privacy.delta, 1),
        "delta": privacy.delta,
        "form": privacy.form,
        "clipping-norm": privacy.clipping_norm,
        "noise-multiplier": multiplier,
        "noise": 2 * privacy.clipping_norm * multiplier,
        "measurements": privacy.measurements,
    }
    return result | ({"not-covered": ACCURACIES} if privacy.measurements == REPORT else {})


def multiplier_of(privacy: PrivacyConfig, rounds: int) -> float:
    """Return noise over sensitivity for a budget; raises as ``noise_multiplier``."""
    assert privacy.epsilon is not None
    return noise_multiplier(privacy.epsilon, privacy.delta, rounds)


@lru_cache(maxsize=16)
def noise_multiplier(epsilon: float, delta: float, rounds: int) -> float:
    """Find the least noise with which Flower's accountant stays within a budget."""
    least, most = LEAST, MOST
    lowest = accounted(most, delta, rounds)
    if lowest > epsilon:
        words = f"privacy.epsilon: {epsilon:g} cannot be proven at privacy.delta: {delta:g}"
        raise ConfigError(f"{words}; at least {lowest:.2g}")
    for _ in range(HALVINGS):
        middle = math.sqrt(least * most)
        if accounted(middle, delta, rounds) > epsilon:
            least = middle
        else:
            most = middle
    return most


def accounted(multiplier: float, delta: float, rounds: int) -> float:
    """Ask Flower's accountant for the epsilon of some rounds with the same noise."""
    # Its figure for a Gaussian release depends on noise over sensitivity alone, and we give it the
    # sensitivity to another client's data. "Replace one" it takes with sampling only, without which
    # the kind of neighbours does not matter.
    from flwr.serverapp import (
        GaussianPrivacyEvent,
        NeighboringRelation,
        RdpAccountant,
        SamplingMethod,
    )
    from flwr.serverapp import PrivacyConfig as AccountantConfig

    config = AccountantConfig(
        target_delta=delta,
        population_size=1,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    )
    try:
        accountant = RdpAccountant(config)
    except ImportError as error:
        raise ConfigError(
            "privacy.epsilon: Flower's accountant is not installed; "
            "pip install 'flower-graph[dp]', or set privacy.epsilon=null"
        ) from error
    event = GaussianPrivacyEvent(multiplier, sample_size=1, population_size=1)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


def announce_privacy(config: RunConfig) -> None:
    """Log the budget once, and which figures of clients the run will lack."""
    privacy = config.privacy
    if privacy.is_on and config.sends_once:
        LOG.info("privacy: epsilon %g, for what each client sends once", privacy.epsilon)
    elif privacy.is_on:
        LOG.info(
            "privacy: epsilon %g at delta %g, %s", privacy.epsilon, privacy.delta, privacy.form
        )
    if privacy.withholds and not config.server_measures:
        LOG.warning(
            "privacy.measurements=withhold: clients keep accuracies and losses to themselves, and "
            "reports have null for them; privacy.measurements=report sends them without noise"
        )


def note_privacy(config: RunConfig, report: RoundReport) -> None:
    """Add the budget spent so far to a report, if there is a budget."""
    if config.privacy.is_on and config.sends_once:
        report.privacy = {"epsilon": config.privacy.epsilon or 0.0, "delta": 0.0}
    elif config.privacy.is_on:
        delta, multiplier = config.privacy.delta, multiplier_of(config.privacy, config.rounds)
        epsilon = accounted(multiplier, delta, report.round)
        report.privacy = {"epsilon": epsilon, "delta": delta}


# Clipping and noise ------------------------------------------------------------------------------


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


def fresh_chances(*shape: int) -> NDArray[np.float64]:
    """Draw uniform numbers from 0 on and below 1 from the operating system's generator."""
    bits = np.frombuffer(os.urandom(8 * math.prod(shape)), np.uint64) >> np.uint64(11)
    result: NDArray[np.float64] = np.multiply(bits, 2.0**-53, dtype=np.float64).reshape(shape)
    return result


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


def client_noise(privacy: PrivacyConfig, rounds: int) -> ClientNoise | None:
    """Return the noise of a run's clients; None if they add none."""
    if not privacy.is_local:
        return None
    deviation = 2 * privacy.clipping_norm * multiplier_of(privacy, rounds)
    return ClientNoise(privacy.clipping_norm, deviation, rounds, privacy.withholds)


@dataclass(frozen=True)
class CentralNoise:
    """Clips what each client sends, and adds noise to the mean."""

    clipping_norm: float
    noise_multiplier: float  # noise over sensitivity

    def clip(self, model: ArrayRecord, replies: Sequence[Message]) -> None:
        """Clip each client's change of the model, and let each client count once."""
        before = flat([model])
        for reply in replies:
            # However many nodes a client has: otherwise one could dominate the mean.
            for record in reply.content.metric_records.values():
                record[keys.NUM_EXAMPLES] = 1
            (sent,) = reply.content.array_records.values()
            change = (flat([sent]) - before)[None]
            put_numbers(reply, before + clipped(change, self.clipping_norm)[0])

    def blur(self, mean: ArrayRecord, clients: int) -> None:
        """Add noise to the mean of so many clients."""
        for name, array in list(mean.items()):
            values = array.numpy().copy()
            add_fresh_noise(values, 2 * self.clipping_norm * self.noise_multiplier / clients)
            mean[name] = Array(values)


def central_noise(privacy: PrivacyConfig, rounds: int) -> CentralNoise | None:
    """Return the noise of a run's server; None if it adds none."""
    if not privacy.is_central:
        return None
    return CentralNoise(privacy.clipping_norm, multiplier_of(privacy, rounds))


# Mods of clients ---------------------------------------------------------------------------------


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
            if reply.has_content() and flat(reply.content.array_records.values()).any():
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
        users = _entry(message, keys.USERS)
        named = unpack_integers(users, keys.USERS) if isinstance(users, bytes) else np.zeros(0)
        if np.unique(named).size != named.size:
            raise RefusedError("the message names a client twice, which would send two vectors")

    def protect(self, message: Message, reply: Message) -> None:
        """Add the noise to a reply."""
        records = reply.content.array_records
        places = [(name, key) for name, record in records.items() for key in record]
        if len(places) != 1:
            raise RefusedError(f"arrays {brief(places)}: only one, with a row a client, has noise")
        ((name, key),) = places
        rows = self.noise.protect(records[name][key].numpy())
        reply.content[name] = ArrayRecord({key: Array(rows)})


class PrivateReplies(PrivateRows):
    """A Flower mod for replies of one client: noise on how far its arrays are from the server's.

    What the client measured is withheld, if the noise says so. More than one client behind one
    reply is refused: they would be clipped and get noise as if they were one. The argument is that
    of ``PrivateRows``.
    """

    def check(self, message: Message) -> None:
        clients = _entry(message, keys.CLIENTS)
        if isinstance(clients, list) and len(clients) != 1:
            raise RefusedError(_shared(clients))

    def protect(self, message: Message, reply: Message) -> None:
        metrics = reply.content.metric_records.get(keys.METRICS, MetricRecord())
        clients = metrics.get(keys.CLIENTS, 1)
        if clients != 1:
            raise RefusedError(f"it speaks for {brief(clients, 20)} clients; {ONE_EACH}")
        before, after = (flat(one.content.array_records.values()) for one in (message, reply))
        if before.shape != after.shape:
            raise RefusedError(f"{after.size} numbers for the {before.size} that came")
        change = self.noise.protect((after - before)[None])[0]
        put_numbers(reply, before + change)
        if self.noise.withholds:
            _silence(reply)


def withhold_measurements(
    message: Message, context: Context, call_next: ClientAppCallable
) -> Message:
    """Reduce the answer to ``evaluate`` to the weight, as a Flower mod."""
    # Other messages pass as they are: their replies are another mod's to protect.
    reply = call_next(message, context)
    # The keys are removed, since a server refuses measurements that are not numbers.
    is_measured = message.metadata.message_type == "evaluate"
    return _silence(reply, are_removed=True) if is_measured else reply


def privacy_mods(privacy: PrivacyConfig, rounds: int) -> list[Mod]:
    """Build the ``train_mods`` of a ClientApp whose replies are of one client each."""
    if privacy.is_central and privacy.withholds:
        # The server adds the noise to the arrays
        return [lambda message, context, call_next: _silence(call_next(message, context))]
    noise = client_noise(privacy, rounds)
    return [] if noise is None else [PrivateReplies(noise)]


def require_one_client(privacy: PrivacyConfig, clients: Sequence[int]) -> None:
    """Refuse several clients on one SuperNode if replies get noise; ``ConfigError``."""
    if privacy.epsilon is not None and len(clients) != 1:
        raise ConfigError(f"privacy.epsilon: {privacy.epsilon:g}: {_shared(clients)}")


def _silence(reply: Message, *, are_removed: bool = False) -> Message:
    """Withhold measurements, and counts of predictions, whatever the server has asked."""
    content = reply.content if reply.has_content() else RecordDict()
    for record in content.config_records.values():
        record.pop(keys.COUNTED, None)
    for metrics in content.metric_records.values():
        for key in metrics.keys() - KEPT:
            value = metrics[key]
            if are_removed:
                del metrics[key]
            else:
                metrics[key] = [math.nan] * len(value) if isinstance(value, list) else math.nan
    return reply


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


def flat(records: Iterable[ArrayRecord]) -> NDArray[np.float64]:
    """Return the numbers of all arrays of some records as one vector."""
    arrays = (array.numpy() for record in records for array in record.values())
    return np.concatenate([np.zeros(0), *(np.asarray(one, np.float64).ravel() for one in arrays)])


def _entry(message: Message, key: str) -> object:
    return message.content.config_records.get(keys.CONFIG, ConfigRecord()).get(key)


def _shared(clients: Sequence[object]) -> str:
    return f"clients {brief([*clients])} share a SuperNode; {ONE_EACH}"
