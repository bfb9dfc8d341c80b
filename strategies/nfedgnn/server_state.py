"""The server's table of users: who hosts them, what waits for them, and what they were sent."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.config.rules import at_least, choice
from flower_graph.records.participation import Reasons
from flower_graph.server.membership import Membership
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.messages import (
    Advance,
    CommonEnrolment,
    CommonQuestion,
    EnrolmentReply,
    EnrolmentRequest,
    HiddenSum,
    LatentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.fields import Bytes, Resume
from flower_graph.wire.ledger import NUMBER, ROOM, ByteLedger

LOG = logging.getLogger(__name__)
ANSWERED, UP, DOWN = range(3)  # columns of the traffic
FLOAT = 4  # bytes of a number
NEVER = -1  # the round of no step
MOST_STOPPED = 2  # steps that a SuperNode may stop before it is left out


@dataclass(frozen=True)
class Roster:
    """The users of a run by number: when each came, and which users have left."""

    joined: NDArray[np.int64]  # [n] the round after which each joined; 0: there from the start
    left: NDArray[np.bool_]  # [n]
    alone: int = 0  # rounds in which only the last newcomers train
    # How many users the checkpoint has that the run goes on from; None where nobody may come or go
    before: int | None = None
    is_change: bool = False  # whether users came or went since that checkpoint

    @classmethod
    def of(
        cls, count: int, left: Sequence[int] = (), alone: int = 0, before: int | None = None
    ) -> Roster:
        """Return users of whom some have left."""
        result = cls(np.zeros(count, np.int64), np.zeros(count, bool), alone, before)
        result.left[list(left)] = True
        return result

    @property
    def size(self) -> int:
        """The number of users there ever were."""
        return self.joined.size

    def resumed(
        self, joined: NDArray[np.int64], left: NDArray[np.bool_], server_round: int
    ) -> Roster:
        """Return these users as they go on after a round whose checkpoint has other users."""
        known = joined.size
        if known > self.size or (known < self.size and self.before is None):
            raise ValueError(f"its num_users is {known}, this run's is {self.size}")
        now, gone = np.full(self.size, server_round), np.zeros(self.size, bool)
        now[:known], gone[:known] = joined, left
        now[self.left] = 0
        # A checkpoint that was rewritten without departed users names its newcomers already.
        is_new = now == server_round
        return replace(
            self,
            joined=now,
            before=None if self.before is None else int((~is_new).sum()),
            is_change=bool(is_new.any() or (self.left & ~gone).any()),
        )

    def is_alone(self, server_round: int) -> bool:
        last = int(self.joined.max())
        return last > 0 and server_round <= last + self.alone

    def pool(self, server_round: int) -> NDArray[np.int64]:
        if self.is_alone(server_round):
            return np.flatnonzero((self.joined == self.joined.max()) & ~self.left)
        return np.flatnonzero(~self.left)


class UserTable:
    """The users' part of the server's state in all forms: who is there, and bytes."""

    def __init__(self, num_users: int, settings: UserSettings) -> None:
        self.settings = settings
        self.weight_shape = (0, 0)
        self.ledger = ByteLedger()
        self.round = 0  # the last
        self._begin(Roster.of(num_users))

    def _begin(self, roster: Roster) -> None:
        self.roster = roster
        # Of each user: rounds that it answered, and its payload up and down
        self.traffic = np.zeros((roster.size, 3), np.int64)

    def grow(self, roster: Roster) -> None:
        self._begin(roster)

    def rows(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has of each user."""
        return {"traffic": self.traffic}

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        """Forget what waits for users that have lost their state; return whether they had any."""
        return bool(self.traffic[users, ANSWERED].any())

    def count(self, way: str, kind: str, users: IntArray, nbytes: int) -> None:
        """Count the bytes that each of some users sent or was sent."""
        self.ledger.count(way, kind, users.size * nbytes)
        self.traffic[users, UP if way == "up" else DOWN] += nbytes

    def unhosted(self, hosted: Mapping[int, IntArray]) -> Reasons:
        nobody = ~self.roster.left
        for users in hosted.values():
            nobody[users] = False
        return Reasons({"no SuperNode hosts it": np.flatnonzero(nobody)})

    def state_dict(self) -> dict[str, object]:
        return {
            "round": self.round,
            "joined": torch.from_numpy(self.roster.joined),
            "left": torch.from_numpy(self.roster.left),
            "ledger": self.ledger.state_dict(),
            **{name: torch.from_numpy(held) for name, held in self.rows().items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned; nothing waits for new or departed users."""
        self.round = int(state["round"])
        joined, left = state["joined"].numpy(), state["left"].numpy()
        self._begin(self.roster.resumed(joined, left, self.round))
        for name, held in self.rows().items():
            held[: len(state[name])] = state[name].numpy()
            held[self.roster.left] = 0
        self.ledger.load_state_dict(state["ledger"])


class OwnTable(UserTable):
    """Users, gradients and averaged weights between two rounds."""

    def __init__(self, num_users: int, settings: UserSettings, average_every: int) -> None:
        at_least(0).check("average_every", average_every)
        choice("holders", "all").check("average_over", settings.average_over)
        if not average_every:  # nobody needs the inactive rows that "all" keeps
            settings = settings._replace(average_over="holders")
        self.average_every = average_every
        self._learning_rate = 0.0  # with which users take their gradients: of the last round
        self._average: NDArray[np.float32] | None = None
        self._average_round = 0
        super().__init__(num_users, settings)

    def _begin(self, roster: Roster) -> None:
        super()._begin(roster)
        count = roster.size
        self._gradient = np.zeros((count, self.settings.latent_size), np.float32)
        self._gradient_round = np.zeros(count, np.int64)  # 0: none waits
        self._has_average = np.zeros(count, np.int64)  # round of the mean each user has

    def rows(self) -> dict[str, NDArray[Any]]:
        return {
            **super().rows(),
            "gradient": self._gradient,
            "gradient-round": self._gradient_round,
            "has-average": self._has_average,
        }

    def grow(self, roster: Roster) -> None:
        if self.settings.average_over == "all":
            raise ValueError(
                "average_over: 'all' moves all users' weights together from the first round on; "
                "let nobody join or leave, or average over 'holders'"
            )
        super().grow(roster)

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        # Their gradients belong to weights that are no more; averaged weights are sent again.
        self._gradient_round[users] = self._has_average[users] = 0
        return super().begin_anew(users)

    def requests(
        self,
        server_round: int,
        hosted: Mapping[int, IntArray],
        drawn: IntArray | None = None,
        *,
        checkpoint: bool = False,
        run: str = "",
    ) -> dict[int, RelayRequest]:
        """Write the request to each SuperNode with a drawn user; without draw, the last one."""
        every = self.average_every
        is_due = bool(every) and server_round % every == 0
        # A mean of the newcomers alone would become everybody's.
        send_weights = is_due and drawn is not None and not self.roster.is_alone(server_round)
        asked = np.zeros(self.roster.size, bool)
        asked[~self.roster.left if drawn is None else drawn] = True
        requests = {}
        for node, local in hosted.items():
            users = np.asarray(local, np.int64)
            # For a checkpoint every host is asked, even if none of its users takes part.
            if not checkpoint and not asked[users].any():
                continue
            users = users[asked[users]]
            due = bool((self._has_average[users] < self._average_round).any())
            requests[node] = RelayRequest(
                server_round,
                users,
                self._gradient[users],
                self._gradient_round[users],
                self._learning_rate,
                self.settings,
                self._average if due else None,
                self._average_round if due else 0,
                send_weights,
                checkpoint,
                run,
            )
        return requests

    def delivered(self, answered: Mapping[int, RelayRequest]) -> None:
        # Payload is what a user alone would be sent, whatever its cohort shares: its gradient, and
        # the averaged weights in full.
        for request in answered.values():
            users = request.users
            waited = users[request.gradient_round > 0]
            self.count("down", "gradient", waited, self.settings.latent_size * FLOAT)
            self._gradient_round[users] = 0
            if request.average is not None:
                lacking = users[self._has_average[users] < request.average_round]
                self.count("down", "weights", lacking, request.average.size * FLOAT)
                self._has_average[users] = request.average_round

    def keep_gradients(
        self,
        server_round: int,
        answered: Mapping[int, RelayRequest],
        gradient: NDArray[np.generic],
        learning_rate: float,
    ) -> None:
        self.round, self._learning_rate = server_round, learning_rate
        for request in answered.values():
            users = request.users
            self._gradient[users] = gradient[users]
            self._gradient_round[users] = server_round
            self.traffic[users, ANSWERED] += 1
            self.count("up", "latent", users, self.settings.latent_size * FLOAT)
            if request.send_weights:
                self.count("up", "weights", users, math.prod(self.weight_shape) * FLOAT)

    def average(self, server_round: int, replies: list[RelayReply]) -> None:
        """Average the weights of the replies; rows that nobody holds are NaN."""
        sent = [reply for reply in replies if reply.weight_sum is not None]
        if not sent:
            return
        total, count = np.zeros(self.weight_shape), np.zeros((self.weight_shape[0], 1), np.int64)
        for reply in sent:
            assert reply.weight_sum is not None and reply.holders is not None
            total += reply.weight_sum
            count += reply.holders.astype(np.int64)[:, None]
        mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        self._average, self._average_round = mean.astype(np.float32), server_round

    def state_dict(self) -> dict[str, object]:
        average = self._average
        return super().state_dict() | {
            "learning-rate": self._learning_rate,
            "average": None if average is None else torch.from_numpy(average),
            "average-round": self._average_round,
        }

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._learning_rate = float(state["learning-rate"])
        self._average = None if state["average"] is None else state["average"].numpy()
        self._average_round = int(state["average-round"])


class RelayMembership(Membership):
    """The users of each SuperNode; their weights have one shape."""

    question_type: ClassVar[type[EnrolmentRequest]] = EnrolmentRequest
    answer_type: ClassVar[type[EnrolmentReply]] = EnrolmentReply

    def __init__(self, state: UserTable) -> None:
        super().__init__()
        self.state = state

    def question(self, resume: Resume) -> RecordDict:
        before = self.state.roster.before if resume.server_round else None
        return self.question_type(self.state.settings, resume, before).to_record()

    def enrolment_round(self, server_round: int) -> int:
        """Return the round after which the run was resumed, whenever newcomers come."""
        return self.resume.server_round

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        return self.answer_type.read(content, num_nodes=self.state.roster.size)

    def most_bytes(self) -> int:
        return max(super().most_bytes(), ROOM + NUMBER * self.state.roster.size)

    def unasked(self) -> None:
        """Leave out SuperNodes that do not name their users."""

    def in_order(self, answers: Mapping[int, EnrolmentReply]) -> list[tuple[int, EnrolmentReply]]:
        """Enrol first the SuperNodes whose weights have the commonest shape."""
        # The first SuperNode must not decide for all how large weights are.
        shapes = Counter(answer.shape for answer in answers.values())
        commonest = max(shapes, key=lambda shape: (shapes[shape], shape), default=(0, 0))
        return sorted(answers.items(), key=lambda item: (item[1].shape != commonest, item[0]))

    def refusal(self, answer: EnrolmentReply) -> str:
        if self.clients and answer.shape != self.state.weight_shape:
            return f"its weights are {answer.shape}, others have {self.state.weight_shape}"
        return ""

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        self.state.weight_shape = answer.shape
        if answer.handled == 0 and self.state.begin_anew(answer.users):
            LOG.warning("node %d has lost its state: its users begin anew", node)


# One layer for all -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoSum:
    """The reason why a round has no sum of gradients, so that nobody steps."""

    text: str  # One line for a person
    nodes: tuple[int, ...] = ()  # SuperNodes that it is for want of, as far as they are known

    def __str__(self) -> str:
        return f"no sum of gradients: {self.text}"

    @classmethod
    def unanswered(cls, nodes: Sequence[int]) -> NoSum:
        count = f"{len(nodes)} SuperNode{'' if len(nodes) == 1 else 's'}"
        return cls(f"missing from {count}", tuple(nodes))


class CommonTable(UserTable):
    """Users, the last step of their layer, and which SuperNodes have taken it."""

    def __init__(self, num_users: int, settings: UserSettings) -> None:
        super().__init__(num_users, settings)
        self.last, self.before = 0, NEVER  # rounds of the last two steps; 0: the first weights
        # [f, w] that the last was taken with, or the same under pads
        self.total: FloatArray | HiddenSum | None = None
        self._learning_rate = 0.0  # of it
        self.at: dict[int, int] = {}  # round of the last step of each SuperNode's layer

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
        advance = request.advance
        self.at[node] = advance.layer_round
        measured = request.measured
        total = advance.hidden if advance.total is None else advance.total
        for kind, sent in (("sum", total), ("copy", advance.copy)):
            if sent is not None:
                self.ledger.count("down", kind, sent.nbytes)
                self.traffic[measured, DOWN] += sent.nbytes // max(1, measured.size)
        if measured.size:
            self.count("up", "measured", measured, self.settings.latent_size * FLOAT)

    def used(self, users: IntArray, *, apart: bool) -> None:
        # apart: vectors to be measured were sent too, and are counted already
        size = self.settings.latent_size * FLOAT
        if apart:
            self.count("up", "latent", users, size)
        self.traffic[users, ANSWERED] += 1
        self.count("down", "gradient", users, size)

    def added_up(self, users: IntArray, nbytes: int) -> None:
        self.ledger.count("up", "sum", nbytes)
        self.traffic[users, UP] += nbytes // users.size

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"layer-round": self.last}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned: every SuperNode has the last step."""
        super().load_state_dict(state)
        self.last, self.before, self.total = int(state["layer-round"]), NEVER, None


class CommonMembership(RelayMembership):
    """The users of each SuperNode, and the round of its layer."""

    question_type = CommonQuestion
    answer_type = CommonEnrolment
    state: CommonTable

    def __init__(self, state: CommonTable) -> None:
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

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        super().enrolled(node, answer)
        assert isinstance(answer, CommonEnrolment)
        self._stopped.clear()
        self.state.at[node] = answer.layer_round
