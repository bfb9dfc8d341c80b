"""The relaying server's state: the users of each SuperNode, and what waits for each user."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.config.rules import at_least, choice
from flower_graph.records.participation import Reasons
from flower_graph.server.membership import Membership
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.messages import (
    EnrolmentReply,
    EnrolmentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.fields import Resume
from flower_graph.wire.ledger import NUMBER, ROOM, ByteLedger, reply_bytes

LOG = logging.getLogger(__name__)
ANSWERED, UP, DOWN = range(3)  # columns of the traffic


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
    def of(cls, count: int) -> Roster:
        return cls(np.zeros(count, np.int64), np.zeros(count, bool))

    @classmethod
    def grown(cls, count: int, left: Sequence[int], alone: int) -> Roster:
        """Return a grown list of users; some have left, and a checkpoint may have other users."""
        roster = cls.of(count)
        roster.left[list(left)] = True
        return replace(roster, alone=alone, before=count)

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


class RelayBook:
    """The users' part of the server's state in all forms: who is there, and bytes."""

    settings: Any  # what every user is told, ``latent_size`` among it

    def __init__(self, num_users: int) -> None:
        self.weight_shape = (0, 0)
        self.ledger = ByteLedger()
        self._round = 0  # the last
        self._begin(Roster.of(num_users))

    def _begin(self, roster: Roster) -> None:
        self.roster = roster
        # Of each user: rounds that it answered, and its payload up and down
        self.traffic = np.zeros((roster.size, 3), np.int64)

    def grow(self, roster: Roster) -> None:
        self._begin(roster)

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        """Forget what waits for users that have lost their state; return whether they had any."""
        raise NotImplementedError

    def unhosted(self, hosted: Mapping[int, IntArray]) -> Reasons:
        nobody = ~self.roster.left
        for users in hosted.values():
            nobody[users] = False
        return Reasons({"no SuperNode hosts it": np.flatnonzero(nobody)})

    def state_dict(self) -> dict[str, object]:
        return {
            "round": self._round,
            "joined": torch.from_numpy(self.roster.joined),
            "left": torch.from_numpy(self.roster.left),
            "traffic": torch.from_numpy(self.traffic),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned; nothing waits for new or departed users."""
        self._round = int(state["round"])
        joined, left = state["joined"].numpy(), state["left"].numpy()
        self._begin(self.roster.resumed(joined, left, self._round))
        self._restore(self.traffic, state["traffic"])
        self.ledger.load_state_dict(state["ledger"])

    def _restore(self, held: NDArray[np.generic], saved: torch.Tensor) -> None:
        held[: len(saved)] = saved.numpy()
        held[self.roster.left] = 0


class RelayServerState(RelayBook):
    """Users, gradients and averaged weights between two rounds."""

    settings: UserSettings

    def __init__(
        self, num_users: int, settings: UserSettings, *, participation: float, average_every: int
    ) -> None:
        at_least(0).check("average_every", average_every)
        choice("holders", "all").check("average_over", settings.average_over)
        if not average_every:  # nobody needs the inactive rows that "all" keeps
            settings = settings._replace(average_over="holders")
        if settings.average_over == "all" and participation < 1:
            raise ValueError("average_over: 'all' needs participation 1, all users step together")
        self.settings, self.average_every = settings, average_every
        self._learning_rate = 0.0  # with which users take their gradients: of the last round
        self._average: NDArray[np.float32] | None = None
        self._average_round = 0
        super().__init__(num_users)

    def _begin(self, roster: Roster) -> None:
        super()._begin(roster)
        count = roster.size
        self._gradient = np.zeros((count, self.settings.latent_size), np.float32)
        self._gradient_round = np.zeros(count, np.int64)  # 0: none waits
        self._has_average = np.zeros(count, np.int64)  # round of the mean each user has

    def grow(self, roster: Roster) -> None:
        if self.settings.average_over == "all":
            raise ValueError(
                "average_over: 'all' moves all users' weights together from the first round on; "
                "let nobody join or leave, or average over 'holders'"
            )
        super().grow(roster)

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        # Their gradients belong to weights that are no more; averaged weights are sent again.
        had = bool((self._gradient_round[users] > 0).any())
        self._gradient_round[users] = 0
        self._has_average[users] = 0
        return had

    def requests(
        self,
        server_round: int,
        hosted: Mapping[int, IntArray],
        drawn: NDArray[np.int64] | None = None,
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
            due = self._average is not None and bool(
                (self._has_average[users] < self._average_round).any()
            )
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

    def reply_bytes(self, requests: Iterable[RelayRequest]) -> int:
        result = list(requests)
        latent = max((request.gradient.size for request in result), default=0)
        averages = any(request.send_weights for request in result)
        weights = math.prod(self.weight_shape) + self.weight_shape[0] if averages else 0
        return reply_bytes(latent + weights)

    def delivered(self, answered: Mapping[int, RelayRequest]) -> None:
        # Payload is what a user alone would be sent, whatever its cohort shares: its gradient, and
        # the averaged weights in full.
        for request in answered.values():
            users = request.users
            gradients = int((request.gradient_round > 0).sum())
            self.ledger.count("down", "gradient", gradients * request.gradient.shape[1] * 4)
            self._gradient_round[users] = 0
            size = request.gradient.shape[1] * 4
            self.traffic[users, DOWN] += (request.gradient_round > 0) * size
            if request.average is not None:
                lacks = self._has_average[users] < request.average_round
                lacking = int(lacks.sum())
                self.ledger.count("down", "weights", lacking * request.average.size * 4)
                self.traffic[users, DOWN] += lacks * request.average.size * 4
                self._has_average[users] = request.average_round

    def keep_gradients(
        self,
        server_round: int,
        answered: Mapping[int, RelayRequest],
        gradient: NDArray[np.generic],
        learning_rate: float,
    ) -> None:
        self._round, self._learning_rate = server_round, learning_rate
        for request in answered.values():
            users = request.users
            self._gradient[users] = gradient[users]
            self._gradient_round[users] = server_round
            self.ledger.count("up", "latent", users.size * gradient.shape[1] * 4)
            self.traffic[users, ANSWERED] += 1
            self.traffic[users, UP] += gradient.shape[1] * 4
            if request.send_weights:
                rows, size = self.weight_shape
                self.ledger.count("up", "weights", users.size * rows * size * 4)
                self.traffic[users, UP] += rows * size * 4

    def average(self, server_round: int, replies: list[RelayReply]) -> None:
        """Average the weights of the replies; rows that nobody holds are NaN."""
        sent = [r for r in replies if r.weight_sum is not None and r.holders is not None]
        if not sent:
            return
        total, count = np.zeros(self.weight_shape), np.zeros((self.weight_shape[0], 1), np.int64)
        for reply in sent:
            assert reply.weight_sum is not None and reply.holders is not None
            total += reply.weight_sum
            count += reply.holders.astype(np.int64)[:, None]
        mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        self._average = mean.astype(np.float32)
        self._average_round = server_round

    def state_dict(self) -> dict[str, object]:
        average = self._average
        return super().state_dict() | {
            "gradient": torch.from_numpy(self._gradient),
            "gradient-round": torch.from_numpy(self._gradient_round),
            "learning-rate": self._learning_rate,
            "average": None if average is None else torch.from_numpy(average),
            "average-round": self._average_round,
            "has-average": torch.from_numpy(self._has_average),
        }

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self._restore(self._gradient, state["gradient"])
        self._restore(self._gradient_round, state["gradient-round"])
        self._restore(self._has_average, state["has-average"])
        self._learning_rate = float(state["learning-rate"])
        self._average = None if state["average"] is None else state["average"].numpy()
        self._average_round = int(state["average-round"])


class RelayMembership(Membership):
    """The users of each SuperNode; their weights have one shape."""

    def __init__(self, state: RelayBook) -> None:
        super().__init__()
        self.state = state

    def question(self, resume: Resume) -> RecordDict:
        before = self.state.roster.before if resume.server_round else None
        return EnrolmentRequest(self.state.settings, resume, before).to_record()

    def enrolment_round(self, server_round: int) -> int:
        """Return the round after which the run was resumed, whenever newcomers come."""
        return self.resume.server_round

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        return EnrolmentReply.read(content, num_nodes=self.state.roster.size)

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
