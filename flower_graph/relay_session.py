"""The relaying server's talk with its clients: who is there, messages and replies, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict

from flower_graph import checkpoint
from flower_graph.errors import CheckpointError, NoClientsError
from flower_graph.exchange import Rejected, Replies
from flower_graph.open_session import OpenSession
from flower_graph.records.relay import Hello, HelloReply, RelayReply, RelayRequest
from flower_graph.relay import RelayServer
from flower_graph.relay_book import RelayBook

LOG = logging.getLogger(__name__)


class RelaySession(OpenSession):
    """One run's exchanges over a grid.

    Parameters
    ----------
    server : RelayServer
        What the server computes with; goes into checkpoints.
    book : RelayBook
        What waits for the users; goes into checkpoints.
    min_nodes : int
        SuperNodes to wait for before a round.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where and every how many rounds to save everything; 0 for never.
    """

    def __init__(
        self,
        server: RelayServer,
        book: RelayBook,
        *,
        min_nodes: int,
        checkpoint_dir: Path | None,
        checkpoint_every: int,
    ) -> None:
        super().__init__()
        if min_nodes < 1:
            raise ValueError(f"min_nodes: {min_nodes} is not at least 1")
        checkpoint.check(checkpoint_dir, checkpoint_every)
        self.server, self.book, self.min_nodes = server, book, min_nodes
        self.checkpoint_dir, self.checkpoint_every = checkpoint_dir, checkpoint_every
        self.requests: dict[int, RelayRequest] = {}  # of the current round, by SuperNode
        self._missing = 0  # SuperNodes without a usable answer in this round
        self._unsaved = False  # whether a checkpoint is due that could not be completed
        self._resume_round = 0  # of the checkpoint that this run goes on from

    def plan(self, server_round: int) -> dict[int, RelayRequest]:
        """Wait for SuperNodes, enrol new ones, and write the round's requests."""
        connected = self.exchange.nodes(self.min_nodes, self.timeout)
        rejected = self._enroll(connected)
        if not self.book.nodes:
            reasons = "; ".join(sorted({entry.reason for entry in rejected}))
            raise NoClientsError(f"no SuperNode hosts users of this graph: {reasons}")
        every = self.checkpoint_every
        due = bool(every) and (server_round % every == 0 or server_round == self.rounds)
        save = due or self._unsaved
        self.requests = self.book.requests(server_round, connected, checkpoint=save)
        if not self.requests:
            raise NoClientsError(
                f"round {server_round}: no connected SuperNode hosts a user who takes part"
            )
        return self.requests

    def send(self, server_round: int, contents: Mapping[int, RecordDict]) -> Replies[RelayReply]:
        """Send the round's messages and gather what is usable of the replies."""
        return self.exchange.send(
            contents, server_round=server_round, timeout=self.timeout, read=self._read
        )

    def read(self, server_round: int, messages: Iterable[Message]) -> Replies[RelayReply]:
        """Read replies that Flower's own round loop gathered."""
        replies: Replies[RelayReply] = Replies()
        for message in messages:
            node = message.metadata.src_node_id
            try:
                if message.has_error():
                    raise ValueError(message.error.reason)
                if node not in self.requests:
                    raise ValueError("it was not asked")
                replies.values[node] = self._read(node, message.content)
            except ValueError as error:
                LOG.warning("round %d: left out node %d: %s", server_round, node, error)
                replies.rejected.append(Rejected(node, str(error)))
        return replies

    def answered(self, server_round: int, nodes: Iterable[int]) -> dict[int, RelayRequest]:
        """Return the requests of the SuperNodes that answered; refuse to go on without any."""
        found = {node: self.requests[node] for node in nodes}
        if not found:
            raise NoClientsError(
                f"round {server_round}: none of {len(self.requests)} SuperNodes gave a usable "
                f"answer within {self.timeout:g} s; the log names the reasons"
            )
        self._missing = len(self.requests) - len(found)
        return found

    def finish(self, server_round: int) -> None:
        """Deliver the last gradients, and let the clients forget the run."""
        connected = sorted(self.exchange.grid.get_node_ids())
        self.requests = self.book.requests(server_round, connected, last=True)
        replies = self.exchange.send(
            {node: request.to_record() for node, request in self.requests.items()},
            message_type="train.finish",
            server_round=server_round,
            timeout=self.timeout,
            read=self._read,
        )
        self.book.delivered({node: self.requests[node] for node in replies.values})

    def save(self, server_round: int) -> None:
        """Complete the round's checkpoint, if one is due and every client has written its part."""
        if not any(request.checkpoint for request in self.requests.values()):
            return
        assert self.checkpoint_dir is not None
        self._unsaved = self._missing > 0
        if self._unsaved:
            LOG.warning(
                "round %d: no checkpoint, %d SuperNodes did not answer; the next round tries again",
                server_round,
                self._missing,
            )
            return
        state = {
            "settings": self._settings(),
            "server": self.server.state_dict(),
            "book": self.book.state_dict(),
            "wire": self.exchange.ledger.state_dict(),
        }
        checkpoint.save_server(self.checkpoint_dir, server_round, state)

    def resume(self) -> int:
        """Load the last complete checkpoint here and at the clients; return its round."""
        if self.checkpoint_dir is None:
            raise CheckpointError("resume: a checkpoint_dir is needed")
        server_round = checkpoint.last_round(self.checkpoint_dir)
        if server_round > self.rounds:
            raise CheckpointError(
                f"num_rounds: {self.rounds} is less than round {server_round} of the checkpoint"
            )
        state = checkpoint.load_server(self.checkpoint_dir, server_round)
        try:
            _check_same(state["settings"], self._settings())
            self.server.load_state_dict(state["server"])
            self.book.load_state_dict(state["book"])
            self.exchange.ledger.load_state_dict(state["wire"])
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            folder = checkpoint.round_folder(self.checkpoint_dir, server_round)
            raise CheckpointError(f"{folder}: does not fit this run: {error}") from error
        self.book.nodes.clear()  # every client has to load its part
        self._resume_round = server_round
        if rejected := self._enroll(self.exchange.nodes(self.min_nodes, self.timeout)):
            reasons = "; ".join(f"node {entry.node_id}: {entry.reason}" for entry in rejected)
            raise CheckpointError(f"cannot resume from round {server_round}: {reasons}")
        # Not counted: the clients were asked who they are in the run's first part already.
        self.exchange.ledger.load_state_dict(state["wire"])
        return server_round

    def _enroll(self, connected: list[int]) -> list[Rejected]:
        """Ask SuperNodes that are new which users they host; return those that did not say."""
        new = [node for node in connected if node not in self.book.nodes]
        if not new:
            return []
        hello = Hello(self.book.settings, self._resume_round).to_record()
        replies = self.exchange.send(
            dict.fromkeys(new, hello),
            message_type="query",
            server_round=self._resume_round,
            timeout=self.timeout,
            read=lambda _, content: HelloReply.from_record(content, self.book.num_users),
        )
        for node, reply in sorted(replies.values.items()):
            if refused := self.book.enroll(node, reply, connected):
                LOG.warning("node %d takes no part: %s", node, refused)
        return list(replies.rejected)

    def _read(self, node: int, content: RecordDict) -> RelayReply:
        return RelayReply.from_record(content, self.requests[node], self.book.weight_shape)

    def _settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        return {"num_users": self.book.num_users, **self.book.settings._asdict()}


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with users whose weights were made under other settings."""
    for name, value in wanted.items():
        if found[name] != value:
            raise ValueError(f"its {name} is {found[name]}, this run's is {value}")
