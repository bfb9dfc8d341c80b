"""The server's state with one first layer: the last step of each SuperNode, and bytes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.common_layer import CommonSettings
from flower_graph.strategies.nfedgnn.common_messages import (
    Advance,
    CommonEnrolment,
    CommonQuestion,
    HiddenSum,
    LatentRequest,
)
from flower_graph.strategies.nfedgnn.messages import EnrolmentReply
from flower_graph.strategies.nfedgnn.server_state import (
    ANSWERED,
    DOWN,
    UP,
    RelayBook,
    RelayMembership,
    Roster,
)
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.exchange import Rejected
from flower_graph.wire.fields import Bytes, Resume

LOG = logging.getLogger(__name__)
NUMBER = 4  # bytes of one
NEVER = -1  # the round of no step
MOST_STOPPED = 2  # steps that a SuperNode may stop before it is left out


@dataclass
class Latents:
    """The latent vectors of one round, asked for and received."""

    server_round: int = 0
    asked: dict[int, IntArray] = field(default_factory=dict)  # users of each SuperNode
    came: dict[int, FloatArray] = field(default_factory=dict)  # [p, h], in the same order
    apart: set[int] = field(default_factory=set)  # SuperNodes that also sent vectors to be measured
    rejected: list[Rejected] = field(default_factory=list)

    def keep(self, nodes: Sequence[int]) -> None:
        self.asked = {node: users for node, users in self.asked.items() if node in nodes}
        self.came = {node: latent for node, latent in self.came.items() if node in nodes}


class Void(Enum):
    """The kind of reason for a round without a step."""

    UNANSWERED = "SuperNodes did not answer with their sums"
    SKIPPED = "the secure sum was skipped"
    LEFT_OUT = "SuperNodes were left out of the secure sum"


@dataclass(frozen=True)
class NoSum:
    """The reason why a round has no sum of gradients, so that nobody steps."""

    kind: Void
    text: str  # One line for a person
    nodes: tuple[int, ...] = ()  # SuperNodes that it is for want of, as far as they are known

    def __str__(self) -> str:
        return f"no sum of gradients: {self.text}"

    @classmethod
    def unanswered(cls, nodes: Sequence[int]) -> NoSum:
        count = f"{len(nodes)} SuperNode{'' if len(nodes) == 1 else 's'}"
        return cls(Void.UNANSWERED, f"missing from {count}", tuple(nodes))


class CommonBook(RelayBook):
    """Users, the last step of their layer, and which SuperNodes have taken it."""

    settings: CommonSettings

    def __init__(self, num_users: int, settings: CommonSettings) -> None:
        super().__init__(num_users)
        self.settings = settings
        self.last, self.before = 0, NEVER  # rounds of the last two steps; 0: the first weights
        # [f, w] that the last was taken with, or the same under pads
        self.total: FloatArray | HiddenSum | None = None
        self._learning_rate = 0.0  # of it
        self.at: dict[int, int] = {}  # round of the last step of each SuperNode's layer

    def _begin(self, roster: Roster) -> None:
        super()._begin(roster)
        self._has_answered = np.zeros(roster.size, bool)

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        had = bool(self._has_answered[users].any())
        self._has_answered[users] = False
        return had

    # The last step

    def made(self, server_round: int, total: FloatArray | HiddenSum, learning_rate: float) -> None:
        self.last, self.before = server_round, self.last
        self.total, self._learning_rate = total, learning_rate

    def can_go_on(self, node: int) -> bool:
        """Whether a SuperNode has the last step, or can take it with the sum."""
        at = self.at.get(node, 0)
        return at == self.last or (at == self.before and self.total is not None)

    def go_back(self, nodes: Collection[int]) -> None:
        newest = max(self.at.get(node, 0) for node in nodes)
        LOG.warning(
            "nobody who is there has the users' layer of round %d: they go on from that of round "
            "%d",
            self.last,
            newest,
        )
        self.last, self.before, self.total = newest, NEVER, None

    def advance(self, node: int, copied: int = NEVER, copy: Bytes | None = None) -> Advance:
        at = self.at.get(node, 0)
        copy = None if self.can_go_on(node) else copy
        result = Advance(self.last, self.before, self._learning_rate, copy=copy)
        if at == self.last or self.before not in (at, copied):
            return result
        if isinstance(self.total, HiddenSum):
            return replace(result, hidden=self.total)
        return replace(result, has_total=self.total is not None, total=self.total)

    # What travelled

    def took_step(self, node: int, request: LatentRequest) -> None:
        advance, size = request.advance, self.settings.latent_size * NUMBER
        self.at[node] = advance.layer_round
        users, measured = request.users, request.measured
        self._has_answered[users] = self._has_answered[measured] = True
        total = advance.hidden if advance.total is None else advance.total
        for kind, sent in (("sum", total), ("copy", advance.copy)):
            if sent is not None:
                self.ledger.count("down", kind, sent.nbytes)
                self.traffic[measured, DOWN] += sent.nbytes // max(1, measured.size)
        if measured.size:
            self.ledger.count("up", "measured", measured.size * size)
            self.traffic[measured, UP] += size

    def used(self, users: IntArray, *, apart: bool) -> None:
        # apart: vectors to be measured were sent too, and are counted already
        size = self.settings.latent_size * NUMBER
        if apart:
            self.ledger.count("up", "latent", users.size * size)
            self.traffic[users, UP] += size
        self.ledger.count("down", "gradient", users.size * size)
        self.traffic[users, ANSWERED] += 1
        self.traffic[users, DOWN] += size

    def added_up(self, users: IntArray, nbytes: int) -> None:
        self.ledger.count("up", "sum", nbytes)
        self.traffic[users, UP] += nbytes // users.size

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"layer-round": self.last}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned: every SuperNode has the last step."""
        super().load_state_dict(state)
        self.last, self.before, self.total = int(state["layer-round"]), NEVER, None

    def ended(self, server_round: int) -> None:
        self._round = server_round


class CommonMembership(RelayMembership):
    """The users of each SuperNode, and the round of its layer."""

    state: CommonBook

    def __init__(self, state: CommonBook) -> None:
        super().__init__(state)
        self._stopped = Counter[int]()  # steps that SuperNodes stopped, by their users

    def stopped(self, nodes: Collection[int], asked: Collection[int]) -> None:
        # If most of them have, it is no fault of theirs.
        for node in nodes if 2 * len(nodes) < len(asked) else ():
            self._stopped.update(self.clients[node])
            if why := self._refused_for(self.clients[node]):
                LOG.warning("node %d and its %d users: %s", node, len(self.clients[node]), why)
                self.forget(node)

    def refusal(self, answer: EnrolmentReply) -> str:
        """Refuse a SuperNode that stops steps, even under another id."""
        return self._refused_for(answer.users.tolist()) or super().refusal(answer)

    def _refused_for(self, users: Iterable[int]) -> str:
        if max((self._stopped[user] for user in users), default=0) < MOST_STOPPED:
            return ""
        return f"it stopped {MOST_STOPPED} steps of all: left out until another SuperNode joins"

    def question(self, resume: Resume) -> RecordDict:
        before = self.state.roster.before if resume.server_round else None
        return CommonQuestion(self.state.settings, resume, before).to_record()

    def read(self, node: int, content: RecordDict) -> CommonEnrolment:
        return CommonEnrolment.read(content, num_nodes=self.state.roster.size)

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        super().enrolled(node, answer)
        assert isinstance(answer, CommonEnrolment)
        self._stopped.clear()
        self.state.at[node] = answer.layer_round
