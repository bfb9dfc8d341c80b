"""The relaying server's talk with its clients: who is there, messages and replies, checkpoints."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict

from flower_graph.errors import NoClientsError, says_lost
from flower_graph.exchange import Rejected, Replies
from flower_graph.open_session import OpenSession
from flower_graph.participation import Participation, roll_call
from flower_graph.records.relay import Hello, HelloReply, RelayReply, RelayRequest
from flower_graph.relay import RelayServer
from flower_graph.relay_book import RelayBook
from flower_graph.reply_limits import reply_bytes, setup_bytes
from flower_graph.run_checkpoints import RunCheckpoints

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
        self.checkpoints = RunCheckpoints(checkpoint_dir, checkpoint_every)
        self.server, self.book, self.min_nodes = server, book, min_nodes
        self.requests: dict[int, RelayRequest] = {}  # of the current round, by SuperNode
        self.connected: list[int] = []  # SuperNodes at the beginning of the round
        self.refused: list[Rejected] = []  # SuperNodes that could not be enrolled in this round
        self._unsaved: dict[int, str] = {}  # SuperNodes without this round's checkpoint, and why
        self._lost: set[int] = set()  # SuperNodes that said that their state is lost

    def plan(self, server_round: int) -> dict[int, RelayRequest]:
        """Wait for SuperNodes, enrol new ones, and write the round's requests."""
        connected = self.connected = self.exchange.nodes(self.min_nodes, self.timeout)
        self.refused = []
        for node in self._lost:
            self.book.nodes.pop(node, None)  # asked again who it is, and whether it has anything
        self._lost.clear()
        rejected = self._enroll(connected)
        if not self.book.nodes:
            reasons = "; ".join(sorted({entry.reason for entry in rejected}))
            raise NoClientsError(f"no SuperNode hosts users of this graph: {reasons}")
        save = self.checkpoints.is_due(server_round, self.rounds)
        self.requests = self.book.requests(
            server_round, connected, checkpoint=save, run=self.checkpoints.run
        )
        self._unsaved = {}
        if not self.requests:
            raise NoClientsError(
                f"round {server_round}: no connected SuperNode hosts a user who takes part"
            )
        return self.requests

    def send(self, server_round: int, contents: Mapping[int, RecordDict]) -> Replies[RelayReply]:
        """Send the round's messages and gather what is usable of the replies."""
        replies = self.exchange.send(
            contents,
            server_round=server_round,
            timeout=self.timeout,
            read=self._read,
            max_reply_bytes=self._reply_bytes(),
        )
        self._note(replies)
        return replies

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
        self._note(replies)
        return replies

    def _note(self, replies: Replies[RelayReply]) -> None:
        """Note who has not saved what it was asked to, and who has nothing left to go on with."""
        self._lost |= {entry.node_id for entry in replies.rejected if says_lost(entry.reason)}
        came = {node: reply.not_saved for node, reply in replies.values.items()}
        said = {node: came.get(node, "it did not answer") for node in self.requests}
        self._unsaved = {node: why for node, why in said.items() if why}

    def answered(self, server_round: int, replies: Replies[RelayReply]) -> dict[int, RelayRequest]:
        """Return the requests of the SuperNodes that answered; refuse to go on without any."""
        found = {node: self.requests[node] for node in replies.values}
        if not found:
            reasons = sorted({entry.reason for entry in replies.rejected})
            raise NoClientsError(
                f"round {server_round}: none of {len(self.requests)} SuperNodes gave a usable "
                f"answer within {self.timeout:g} s: {'; '.join(reasons[:3])}"
            )
        return found

    def participation(self, replies: Replies[RelayReply]) -> Participation:
        """Say what became of every user of the graph in this round."""
        asked = {node: request.users.tolist() for node, request in self.requests.items()}
        hosted = {node: users.tolist() for node, users in self.book.nodes.items()}
        homeless = set(range(self.book.num_users)).difference(*hosted.values())
        return roll_call(
            hosted,
            self.connected,
            asked,
            {user for node in replies.values for user in asked[node]},
            silent={entry.node_id: entry.reason for entry in replies.rejected},
            left_out=dict.fromkeys(homeless, "no SuperNode hosts it"),
        )

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
            max_reply_bytes=self._reply_bytes(),
        )
        self.book.delivered({node: self.requests[node] for node in replies.values})

    def save(self, server_round: int) -> None:
        """Complete the round's checkpoint, if one is due and every client has written its part."""
        if not any(request.checkpoint for request in self.requests.values()):
            return
        state = {
            "settings": self._settings(),
            "server": self.server.state_dict(),
            "book": self.book.state_dict(),
            "wire": self.exchange.ledger.state_dict(),
        }
        self.checkpoints.save(server_round, state, self._unsaved)

    def resume(self) -> int:
        """Go on from the newest checkpoint that is here and at the clients; return its round."""
        wire: dict[str, Any] = {}

        def load(state: Mapping[str, Any]) -> None:
            self.server.load_state_dict(state["server"])
            self.book.load_state_dict(state["book"])
            self.exchange.ledger.load_state_dict(state["wire"])
            wire.update(state["wire"])

        def ask(server_round: int) -> list[str]:
            self.book.nodes.clear()  # every client has to load its part
            rejected = self._enroll(self.exchange.nodes(self.min_nodes, self.timeout))
            return [f"node {entry.node_id}: {entry.reason}" for entry in rejected]

        server_round = self.checkpoints.go_on(self.rounds, self._settings(), load, ask)
        # Not counted: the clients were asked who they are in the run's first part already.
        self.exchange.ledger.load_state_dict(wire)
        return server_round

    def _enroll(self, connected: list[int]) -> list[Rejected]:
        """Ask SuperNodes that are new which users they host; return those that did not say."""
        new = [node for node in connected if node not in self.book.nodes]
        if not new:
            return []
        hello = Hello(self.book.settings, self.checkpoints.resume).to_record()
        replies = self.exchange.send(
            dict.fromkeys(new, hello),
            message_type="query",
            server_round=self.checkpoints.resume.server_round,
            timeout=self.timeout,
            read=lambda _, content: HelloReply.from_record(content, self.book.num_users),
            max_reply_bytes=setup_bytes(),
        )
        # Whoever comes first must not decide for all how large weights are.
        shapes = Counter(reply.weight_shape for reply in replies.values.values())
        commonest = max(shapes, key=lambda shape: (shapes[shape], shape), default=(0, 0))
        order = sorted(
            replies.values.items(), key=lambda item: (item[1].weight_shape != commonest, item[0])
        )
        for node, reply in order:
            if refused := self.book.enroll(node, reply, connected):
                LOG.warning("node %d takes no part: %s", node, refused)
                self.refused.append(Rejected(node, refused))
            elif reply.handled == 0 and self.book.begin_anew(reply.users):
                LOG.warning("node %d has lost its state: its users begin anew", node)
        self.refused += replies.rejected
        return list(replies.rejected)

    def _read(self, node: int, content: RecordDict) -> RelayReply:
        return RelayReply.from_record(content, self.requests[node], self.book.weight_shape)

    def _reply_bytes(self) -> int:
        """Return the most bytes that a reply to this round's requests may have."""
        latent = max((request.gradient.size for request in self.requests.values()), default=0)
        averages = any(request.send_weights for request in self.requests.values())
        weights = math.prod(self.book.weight_shape) + self.book.weight_shape[0] if averages else 0
        return reply_bytes(latent + weights)

    def _settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        return {"num_users": self.book.num_users, **self.book.settings._asdict()}
