"""A run's session with its clients: which are connected, asked, and answered.

A round calls `gather` (wait, enrol newcomers), `draw` if only some clients take part, `send`, and
`participation`, which tells the outcome for every client. Between rounds the session holds the
clients of each SuperNode (`members`), the exchange with its byte ledger, and the checkpoints.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flower_graph.config.common import StrategySection
from flower_graph.config.rules import at_least, require
from flower_graph.config.schema import check_settings
from flower_graph.errors import NoClientsError
from flower_graph.flower_compat import replace_dead_actors
from flower_graph.records.participation import (
    NOT_CONNECTED,
    NOT_DRAWN,
    Participation,
    flat,
    integers,
    last_of_each,
    ranges,
)
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator
from flower_graph.server.membership import Membership
from flower_graph.storage import checkpoint
from flower_graph.storage.reading import StateDict
from flower_graph.wire.codec import read_not_saved
from flower_graph.wire.exchange import Exchange, Rejected, Replies, few, reasons_of
from flower_graph.wire.ledger import ByteLedger, reply_bytes

LOG = logging.getLogger(__name__)
T = TypeVar("T")
NOBODY = "no SuperNode hosts clients of this run"


def unsaved(asked: Iterable[int], said: Mapping[int, str]) -> dict[int, str]:
    """Return the SuperNodes that have not saved a checkpoint, and why; ``said`` is "" if done."""
    reasons = {node: said.get(node, "it did not answer") for node in asked}
    return {node: why for node, why in reasons.items() if why}


def check_same(saved: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Refuse a checkpoint that was made under other settings."""
    for name, value in wanted.items():
        # A setting that the checkpoint lacks is newer than the checkpoint, and had no effect then
        if saved.get(name, value) != value:
            raise ValueError(f"its {name} is {saved[name]}, this run's is {value}")


class Session:
    """Members, exchange, checkpoints, and the current round.

    The section says how many SuperNodes to wait for, and which share of the clients to ask. With
    checkpoints, every ``checkpoint_every`` rounds and the last round are saved.
    """

    exchange: Exchange  # once the session is open

    def __init__(
        self,
        members: Membership,
        section: StrategySection,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        check_settings(section)
        self.members, self.min_nodes = members, section.fewest_nodes
        self.share, self.seed = section.participation, seed
        at_least(0).check("checkpoint_every", checkpoint_every)
        has_folder = not checkpoint_every or checkpoint_dir is not None
        require(has_folder, "checkpoint_every", checkpoint_every, "0 without checkpoint_dir")
        self.folder, self.every = checkpoint_dir, checkpoint_every  # of checkpoints
        self._is_late = False  # whether a checkpoint is overdue
        self.timeout, self.rounds = 600.0, 0
        self.early_stop_at = 0  # the round after which the run ends unless accuracy improves
        self.connected: list[int] = []  # SuperNodes at the beginning of the round
        # SuperNode to the clients this round asks
        self.asked: dict[int, Collection[int] | NDArray[np.int64]] = {}
        self.rejected: list[Rejected] = []  # SuperNodes left out in this round
        self.is_open, self.ledger = False, ByteLedger()

    def open(self, grid: Grid, timeout: float, rounds: int = 0) -> None:
        """Set the grid, the seconds that an exchange may take, and the rounds if known."""
        self.exchange, self.timeout, self.rounds = Exchange(grid), timeout, rounds
        self.ledger, self.is_open = self.exchange.ledger, True
        replace_dead_actors()

    # Whom to ask

    def gather(self, server_round: int, nobody: str = NOBODY) -> dict[int, list[int]]:
        self.enrol(server_round)
        return self.hosted(nobody)

    def enrol(self, server_round: int) -> None:
        self.connected = self.exchange.nodes(self.min_nodes, self.timeout)
        members, timeout = self.members, self.timeout
        self.rejected = members.ask(self.exchange, self.connected, server_round, timeout)

    def hosted(self, nobody: str = NOBODY) -> dict[int, list[int]]:
        """Return the clients of the SuperNodes that were connected when the round began."""
        clients = self.members.clients
        present = {node: clients[node] for node in self.connected if node in clients}
        if not present:
            raise NoClientsError(f"{nobody}: {reasons_of(self.rejected)}")
        return present

    def draw(self, size: int, server_round: int, least: int = 1) -> NDArray[np.int64]:
        count = min(size, max(least, round(self.share * size)))
        if count == size:
            return np.arange(size)
        rng = generator(self.seed, "participants", server_round)
        return np.sort(torch.randperm(size, generator=rng)[:count].numpy())

    def participants(
        self, server_round: int, hosted: Mapping[int, Sequence[int]]
    ) -> dict[int, list[int]]:
        """Draw a round's clients, independently of their SuperNodes; return each SuperNode's."""
        # In the order of the clients; a SuperNode that names none is one, at the end
        everyone = [(False, client, node) for node, local in hosted.items() for client in local]
        everyone += [(True, node, node) for node, local in hosted.items() if not local]
        everyone.sort()
        result = dict[int, list[int]]()
        for index in self.draw(len(everyone), server_round):
            is_unnamed, client, node = everyone[index]
            result.setdefault(node, []).extend([] if is_unnamed else [client])
        return result

    def is_due(self, server_round: int) -> bool:
        if not self.every or server_round < 1:
            return False
        # Clients save before the round's accuracy is known
        is_last = server_round == self.rounds or self.stops_early(server_round)
        return self._is_late or server_round % self.every == 0 or is_last

    def stops_early(self, server_round: int) -> bool:
        """Whether the run ends after this round unless it is the best so far."""
        return 0 < self.early_stop_at <= server_round

    # Messages

    def send(
        self,
        requests: Mapping[int, RecordDict],
        server_round: int,
        read: Callable[[int, RecordDict], T],
        *,
        max_reply_bytes: int,
        message_type: str = "train",
    ) -> Replies[T]:
        """Send one message to each SuperNode; leave out those without a good reply."""
        replies = self.exchange.send(
            requests,
            message_type=message_type,
            server_round=server_round,
            timeout=self.timeout,
            read=read,
            max_reply_bytes=max_reply_bytes,
        )
        self.leave_out(replies.rejected)
        return replies

    def must_have(self, server_round: int, replies: Replies[T]) -> None:
        if not replies.values:
            none = f"none of {len(self.asked)} SuperNodes gave a usable answer"
            reasons = reasons_of(replies.rejected)
            raise NoClientsError(f"round {server_round}: {none}: {reasons}")

    def tell_all(
        self,
        server_round: int,
        content: RecordDict,
        message_type: str,
        but: Collection[int] = (),
    ) -> Replies[str]:
        """Send one message to all connected clients; return why those that say so did not save."""
        return self.send(
            dict.fromkeys([node for node in self.present() if node not in but], content),
            server_round,
            lambda _, reply: read_not_saved(reply),
            message_type=message_type,
            max_reply_bytes=reply_bytes(),
        )

    def clients_of(self, nodes: Iterable[int]) -> NDArray[np.int64]:
        local = [np.asarray(self.asked[node], np.int64) for node in nodes]
        return np.concatenate(local) if local else np.zeros(0, np.int64)

    def participation(
        self,
        answered: Collection[int] | NDArray[np.int64],
        *,
        failed: Mapping[int, str] | None = None,
        left_out: Mapping[str, NDArray[np.int64]] | None = None,
        idle: str = NOT_DRAWN,
        no_use: str = "",
    ) -> Participation:
        """Return each client's outcome in this round; ``failed`` has reasons by client."""
        where, asker = flat(self.asked)
        named = last_of_each(where, where)[0]
        used = named[np.isin(named, integers(answered))]
        nodes, failed = list(self.asked), failed or {}
        silent = {entry.node_id: entry.reason for entry in reversed(self.rejected)}
        otherwise, silence = no_use or "its answer was not used", ~np.isin(where, used)
        lost = {
            client: failed.get(client) or silent.get(nodes[at]) or otherwise
            for client, at in zip(where[silence].tolist(), asker[silence].tolist(), strict=True)
        }
        groups = {
            why: np.setdiff1d(clients, named, assume_unique=True)
            for why, clients in (left_out or {}).items()
        }
        hosted, online = self.members.numbers(), set(self.connected)
        everyone, at = last_of_each(*flat(hosted))
        idle_ones = ~np.isin(everyone, np.concatenate([named, *groups.values()]))
        is_online = np.array([node in online for node in hosted], bool)[at]
        for reason, which in ((idle, is_online), (NOT_CONNECTED, ~is_online)):
            clients = everyone[idle_ones & which]
            groups[reason] = np.sort(np.append(groups.get(reason, clients[:0]), clients))
        return Participation(used, lost, {r: one for r, one in groups.items() if one.size})

    # Any: fields of ``RoundReport``
    def report(self, server_round: int, who: Participation, **figures: Any) -> RoundReport:
        members, local = self.members, self.members.clients.values()
        counts = {"asked": sum(map(len, self.asked.values())), "answered": len(who.answered)}
        return RoundReport(
            round=server_round,
            rejected=[{"node": one.node_id, "reason": one.reason} for one in few(self.rejected)],
            wire_bytes=self.ledger.wire,
            participation=who.to_record() if members.absent or any(local) else {},
            **{**counts, **figures},
        )

    # Checkpoints

    @property
    def run(self) -> str:
        return self.members.resume.run

    def save(self, server_round: int, state: StateDict, missing: Mapping[int, str]) -> bool:
        assert self.folder is not None
        for node, why in missing.items():
            LOG.warning("round %d: no checkpoint: node %d: %s", server_round, node, why)
        saved = {"run": self.run, **state}
        self._is_late = bool(missing) or not checkpoint.save_server(
            self.folder, server_round, saved
        )
        return not self._is_late

    def rewrite(self, server_round: int, state: StateDict) -> None:
        """Replace the checkpoint that the run resumes from, and remove earlier ones."""
        assert self.folder is not None
        self.save(server_round, state, {})
        checkpoint.keep_rounds(self.folder, (server_round,))

    def have_saved(
        self,
        server_round: int,
        content: RecordDict,
        saved: Mapping[int, str],
        message_type: str = "train.save",
    ) -> dict[int, str]:
        """Have SuperNodes save a round in a message of its own; return failures by node."""
        # saved: SuperNodes that the request asked to save, and why they failed
        replies = self.tell_all(server_round, content, message_type, saved)
        missing = unsaved(said := {**saved, **replies.values}, said)
        return missing | {entry.node_id: entry.reason for entry in replies.rejected}

    def rejoin(self) -> list[str]:
        """Have all clients load the checkpoint of the resumed run; return why some cannot."""
        for node in [*self.members.clients]:
            self.members.forget(node)
        connected = self.exchange.nodes(self.min_nodes, self.timeout)
        number = self.members.resume.server_round
        refused = self.members.ask(self.exchange, connected, number, self.timeout)
        if self.members.absent and not refused:
            LOG.warning("clients %s are not connected", ranges(self.members.absent))
        lacking = [entry for entry in refused if entry.node_id not in self.members.strangers]
        return [f"node {entry.node_id}: {entry.reason}" for entry in lacking]

    def present(self) -> dict[int, list[int]]:
        connected, clients = sorted(self.exchange.grid.get_node_ids()), self.members.clients
        return {node: clients[node] for node in connected if node in clients}

    def leave_out(self, rejected: Collection[Rejected]) -> None:
        """Record the SuperNodes that are left out, and those that have lost their state."""
        self.rejected += few(rejected)
        self.members.note(rejected)
