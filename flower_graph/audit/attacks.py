"""The audit's interface to a method, and a grid that records every message as a server sees it."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from flower_graph.audit.deviating import Deviation
from flower_graph.audit.scores import Finding, Floats, ranking
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.ops.peers import cosine_similarities
from flower_graph.rng import derive_seed
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import decode_array
from flower_graph.wire.keys import CONFIG

C = TypeVar("C", bound=RunConfig, contravariant=True)  # the method's schema
NO_NOISE = "privacy.epsilon=null"


class Exchange(NamedTuple):
    """One message and its reply."""

    kind: str  # Flower's message type, such as ``train`` or ``query``
    node: int  # Id of the SuperNode
    request: RecordDict
    reply: RecordDict


class RecordingGrid(InProcessGrid):
    """The in-process grid, with a list of all answered exchanges."""

    # Without TLS, anybody that reads the traffic of all SuperNodes has the same list.

    @cached_property
    def exchanges(self) -> list[Exchange]:
        return []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent: list[str] = []
        for message in messages:
            # One at a time: strategies may hand over a generator that makes messages as they go.
            (number,) = super().push_messages([message])
            reply, to = self._replies[number], message.metadata
            if not reply.has_error():
                one = Exchange(to.message_type, to.dst_node_id, message.content, reply.content)
                self.exchanges.append(one)
            sent.append(number)
        return sent


def of_kind(exchanges: Iterable[Exchange], kind: str) -> Iterator[Exchange]:
    """Yield the exchanges of one message type, in order."""
    return (one for one in exchanges if one.kind == kind)


def config_of(content: RecordDict) -> dict[str, Any]:
    """Return the config entries of a recorded message; empty where it has none."""
    return dict(content.config_records.get(CONFIG, ConfigRecord()))


def array_of(content: RecordDict, record: str, key: str) -> NDArray[Any]:
    """Read one array of a recorded message."""
    arrays = content.array_records.get(record)
    if arrays is None or key not in arrays:
        raise ValueError(f"the message has no array {record}/{key}; it has {sorted(content)}")
    return decode_array(f"{record}/{key}", arrays[key])


def alike(attack: str, rows: Floats, truth: NDArray[np.bool_]) -> Finding:
    """Guess the pairs of rows for which something holds by their cosines."""
    # rows [n, d]; truth: of each pair, as ``np.triu_indices(n, 1)`` has them
    pairs = np.triu_indices(len(rows), 1)
    return ranking(attack, cosine_similarities(rows)[pairs], truth)


class Audit(Generic[C]):
    """The attacks on one method; a method overrides the defaults."""

    rounds = 5  # that are recorded: enough for the attacks; more add time and hardly anything else
    notes: Sequence[str] = ()  # what an attacker needs besides the messages, and others for readers
    audited: Sequence[str] = ()  # strategies whose messages the attacks read; empty: all of them
    shorter: Sequence[str] = ()  # overrides that leave out slow parts that no attack reads
    one_supernode = False  # whether one hosts all clients; else each has its own, as when deployed

    def refuse(self, config: C) -> None:
        """Raise ``ConfigError`` for settings whose messages no attack here reads."""
        name, names = config.strategy.name, ", ".join(self.audited)
        if names and name not in self.audited:
            raise ConfigError(f"strategy.name: {name} has no audit; must be one of {names}")

    def counterparts(self, config: C, noisy: Sequence[list[str]]) -> list[list[str]]:
        """Return each run's overrides, the config's own first; `noisy` are those with noise."""
        return [[], [NO_NOISE], *noisy]

    def label(self, config: C) -> str:
        budget = config.privacy.epsilon
        return "no noise" if budget is None else f"noise, epsilon {budget:g}"

    def deviations(self, config: C, method: Any) -> Sequence[Deviation]:
        """Return the lies of a deviating server about a run's hidden values, if there are any."""
        return ()

    def attack(self, config: C, grid: RecordingGrid, method: Any) -> list[Finding]:
        """Attack the recorded messages; `method`, which was run, knows its clients' data."""
        raise NotImplementedError


def audit_rng(config: RunConfig) -> np.random.Generator:
    """Make the generator of an attack's draws."""
    return np.random.default_rng(derive_seed(config.seed, "audit"))
