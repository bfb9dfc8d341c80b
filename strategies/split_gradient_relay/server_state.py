"""What the relaying server keeps: who hosts which users, and what waits for each user."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.config.rules import at_least, choice
from flower_graph.server.membership import Membership
from flower_graph.strategies.split_gradient_relay.messages import (
    EnrolmentReply,
    EnrolmentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.split_gradient_relay.users import UserSettings
from flower_graph.wire.ledger import ByteLedger, reply_bytes

LOG = logging.getLogger(__name__)
ANSWERED, UP, DOWN = range(3)  # columns of the traffic
NEW = -1  # in place of a round: a user that the checkpoint does not have


class RelayServerState:
    """Users, gradients and averaged weights between two rounds."""

    def __init__(
        self, num_users: int, settings: UserSettings, *, participation: float, average_every: int
    ) -> None:
        at_least(0).check("average_every", average_every)
        choice("holders", "all").check("average_over", settings.average_over)
        if not average_every:  # nobody needs the inactive rows that "all" keeps
            settings = settings._replace(average_over="holders")
        if settings.average_over == "all" and participation < 1:
            raise ValueError("average_over: 'all' needs participation 1, all users step together")
        self.num_users, self.settings = num_users, settings
        self.average_every = average_every
        self.weight_shape = (0, 0)
        self.ledger = ByteLedger()
        self._gradient = np.zeros((num_users, settings.latent_size), np.float32)
        self._gradient_round = np.zeros(num_users, np.int64)  # 0: none waits
        self._learning_rate = 0.0  # with which users take their gradients: of the last round
        self._average: NDArray[np.float32] | None = None
        self._average_round = 0
        self._has_average = np.zeros(num_users, np.int64)  # round of the mean each user has
        # Round after which each user joined; 0: it was there from the start, NEW: it has come now
        self._joined = np.zeros(num_users, np.int64)
        self.left = np.zeros(num_users, bool)
        self.changed = False  # whether users came or went since the run began
        self.is_change = False  # ... since the checkpoint that it goes on from
        # Of each user: rounds that it answered, and its payload up and down
        self.traffic = np.zeros((num_users, 3), np.int64)
        self.before: int | None = None  # users that the checkpoint is of, where they changed since
        self.alone = 0  # rounds in which only the last newcomers train

    def grow(self, num_users: int, left: Sequence[int], alone: int) -> None:
        """Go on with more users, and without some."""
        if self.settings.average_over == "all":
            raise ValueError(
                "average_over: 'all' moves all users' weights together from the first round on; "
                "let nobody join or leave, or average over 'holders'"
            )
        state = self.state_dict()
        self.num_users, self.changed, self.alone = num_users, True, alone
        self.left = np.zeros(num_users, bool)
        self.left[list(left)] = True
        self._hold(state)

    def _hold(self, state: Mapping[str, Any]) -> None:
        """Keep what waits for each user: nothing for those that are new, or have left."""
        known = state["gradient"].shape[0]
        none = torch.zeros(known, 3, dtype=torch.int64)  # in checkpoints of 0.1.0
        state = {"joined": none[:, 0], "left": none[:, 0] > 0, "traffic": none, **state}
        if known > self.num_users or (known < self.num_users and not self.changed):
            raise ValueError(f"its num_users is {known}, this run's is {self.num_users}")

        def held(name: str, new: int = 0) -> NDArray[Any]:
            array = state[name].numpy()
            more = np.full((self.num_users - known, *array.shape[1:]), new, array.dtype)
            result = np.concatenate([array, more]) if len(more) else array
            result[self.left] = 0
            return result

        self._gradient = held("gradient")
        self._gradient_round = held("gradient-round")
        self._has_average = held("has-average")
        self._joined, self.traffic = held("joined", NEW), held("traffic")
        before = np.zeros(self.num_users, bool)
        before[:known] = state["left"].numpy()
        self.is_change = bool((self._joined == NEW).any() or (self.left & ~before).any())
        # Said of the checkpoint to whoever enrols, also after the newcomers have joined
        self.before = int((self._joined != NEW).sum()) if self.changed else None

    def arrived(self, server_round: int) -> None:
        """Note the round after which those that are new have joined."""
        self._joined[self._joined == NEW] = server_round

    def is_alone(self, server_round: int) -> bool:
        """Whether only the last newcomers train in a round."""
        last = int(self._joined.max())
        return last > 0 and server_round <= last + self.alone

    def pool(self, server_round: int) -> NDArray[np.int64]:
        """Return the users that may be asked in a round, ascending."""
        if self.is_alone(server_round):
            return np.flatnonzero((self._joined == self._joined.max()) & ~self.left)
        return np.flatnonzero(~self.left)

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        """Forget what waits for users who have lost their state; return whether they had any."""
        # Their gradients belong to weights that are no more; averaged weights are sent again.
        had = bool((self._gradient_round[users] > 0).any())
        self._gradient_round[users] = 0
        self._has_average[users] = 0
        return had

    def requests(
        self,
        server_round: int,
        hosted: Mapping[int, Iterable[int]],
        drawn: NDArray[np.int64] | None = None,
        *,
        checkpoint: bool = False,
        run: str = "",
    ) -> dict[int, RelayRequest]:
        """Write the request to every SuperNode that hosts a drawn user; without, the last one."""
        every = self.average_every
        is_due = bool(every) and server_round % every == 0
        # A mean of the newcomers alone would become everybody's.
        send_weights = is_due and drawn is not None and not self.is_alone(server_round)
        asked = np.zeros(self.num_users, bool)
        asked[~self.left if drawn is None else drawn] = True
        requests = {}
        for node, local in hosted.items():
            users = np.array(local, np.int64)
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
        """Return the most bytes of a reply to one of these requests."""
        result = list(requests)
        latent = max((request.gradient.size for request in result), default=0)
        averages = any(request.send_weights for request in result)
        weights = math.prod(self.weight_shape) + self.weight_shape[0] if averages else 0
        return reply_bytes(latent + weights)

    def homeless(self, hosted: Mapping[int, Iterable[int]]) -> dict[int, str]:
        """Return the users that no SuperNode hosts, with that as the reason."""
        users = set(np.flatnonzero(~self.left).tolist()).difference(*hosted.values())
        return dict.fromkeys(users, "no SuperNode hosts it")

    def delivered(self, answered: Mapping[int, RelayRequest]) -> None:
        """Note that these requests arrived, and count what each user of them was sent."""
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
        gradient: NDArray[Any],
        learning_rate: float,
    ) -> None:
        """Keep ``[n, h]`` gradients for the users that sent a latent vector this round."""
        self._learning_rate = learning_rate
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
        """Average the weights that came with the replies; NaN in rows that nobody holds."""
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

    def state_dict(self) -> dict[str, Any]:
        """Return everything that lasts between rounds, but for who hosts whom."""
        average = self._average
        return {
            "joined": torch.from_numpy(self._joined),
            "left": torch.from_numpy(self.left),
            "traffic": torch.from_numpy(self.traffic),
            "gradient": torch.from_numpy(self._gradient),
            "gradient-round": torch.from_numpy(self._gradient_round),
            "learning-rate": self._learning_rate,
            "average": None if average is None else torch.from_numpy(average),
            "average-round": self._average_round,
            "has-average": torch.from_numpy(self._has_average),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._hold(state)
        self._learning_rate = float(state["learning-rate"])
        self._average = None if state["average"] is None else state["average"].numpy()
        self._average_round = int(state["average-round"])
        self.ledger.load_state_dict(state["ledger"])


class RelayMembership(Membership):
    """Which users each SuperNode hosts; their weights are of one shape."""

    outside_rounds = True

    def __init__(self, state: RelayServerState) -> None:
        super().__init__()
        self.state = state

    def question(self) -> RecordDict:
        """Ask for users, under settings that stay the same in a run."""
        resume, before = self.resume, self.state.before
        return EnrolmentRequest(
            self.state.settings, resume, before if resume.server_round else None
        ).to_record()

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        """Read a reply; users are nodes of the server's graph."""
        return EnrolmentReply.read(content, num_nodes=self.state.num_users)

    def unasked(self) -> None:
        """Let nobody take part who does not say which users it hosts."""

    def in_order(self, answers: Mapping[int, EnrolmentReply]) -> list[tuple[int, EnrolmentReply]]:
        """Enrol those first whose weights have the commonest shape."""
        # Whoever comes first must not decide for all how large weights are.
        shapes = Counter(answer.shape for answer in answers.values())
        commonest = max(shapes, key=lambda shape: (shapes[shape], shape), default=(0, 0))
        return sorted(answers.items(), key=lambda item: (item[1].shape != commonest, item[0]))

    def refusal(self, answer: EnrolmentReply) -> str:
        """Refuse weights of another shape."""
        if self.clients and answer.shape != self.state.weight_shape:
            return f"its weights are {answer.shape}, others have {self.state.weight_shape}"
        return ""

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        """Note the weights' shape, and who has lost what it had."""
        self.state.weight_shape = answer.shape
        if answer.handled == 0 and self.state.begin_anew(answer.users):
            LOG.warning("node %d has lost its state: its users begin anew", node)
