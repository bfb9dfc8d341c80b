"""What the relaying server keeps: who hosts which users, and what waits for each user."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.config.rules import at_least, choice
from flower_graph.server.ledger import ByteLedger, reply_bytes
from flower_graph.server.membership import Membership
from flower_graph.strategies.split_gradient_relay.messages import (
    EnrolmentReply,
    EnrolmentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.split_gradient_relay.users import UserSettings

LOG = logging.getLogger(__name__)


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
        self._average: NDArray[np.float32] | None = None
        self._average_round = 0
        self._has_average = np.zeros(num_users, np.int64)  # round of the mean each user has

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
        send_weights = bool(every) and server_round % every == 0 and drawn is not None
        asked = np.zeros(self.num_users, bool)
        asked[slice(None) if drawn is None else drawn] = True
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
        users = set(range(self.num_users)).difference(*hosted.values())
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
            if request.average is not None:
                lacking = int((self._has_average[users] < request.average_round).sum())
                self.ledger.count("down", "weights", lacking * request.average.size * 4)
                self._has_average[users] = request.average_round

    def keep_gradients(
        self, server_round: int, answered: Mapping[int, RelayRequest], gradient: NDArray[Any]
    ) -> None:
        """Keep ``[n, h]`` gradients for the users that sent a latent vector this round."""
        for request in answered.values():
            users = request.users
            self._gradient[users] = gradient[users]
            self._gradient_round[users] = server_round
            self.ledger.count("up", "latent", users.size * gradient.shape[1] * 4)
            if request.send_weights:
                rows, size = self.weight_shape
                self.ledger.count("up", "weights", users.size * rows * size * 4)

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
            "gradient": torch.from_numpy(self._gradient),
            "gradient-round": torch.from_numpy(self._gradient_round),
            "average": None if average is None else torch.from_numpy(average),
            "average-round": self._average_round,
            "has-average": torch.from_numpy(self._has_average),
            "ledger": self.ledger.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self._gradient = state["gradient"].numpy()
        self._gradient_round = state["gradient-round"].numpy()
        self._average = None if state["average"] is None else state["average"].numpy()
        self._average_round = int(state["average-round"])
        self._has_average = state["has-average"].numpy()
        self.ledger.load_state_dict(state["ledger"])


class RelayMembership(Membership):
    """Which users each SuperNode hosts; their weights are of one shape."""

    outside_rounds = True

    def __init__(self, state: RelayServerState) -> None:
        super().__init__()
        self.state = state

    def question(self) -> RecordDict:
        """Ask for users, under settings that stay the same in a run."""
        return EnrolmentRequest(self.state.settings, self.resume).to_record()

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
