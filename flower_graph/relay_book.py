"""What the relaying server keeps per user: where it is, and what waits for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.cohort import UserSettings
from flower_graph.gathering import hosted_twice
from flower_graph.ledger import ByteLedger
from flower_graph.records.relay import HelloReply, RelayReply, RelayRequest
from flower_graph.rng import generator


class RelayBook:
    """Users, hosts, gradients and averaged weights between two rounds.

    Parameters
    ----------
    num_users : int
        Nodes of the graph, ``n``.
    settings : UserSettings
        What every user is told.
    participation : float
        Share of the users asked each round, above 0 and at most 1.
    average_every : int
        Average weights every so many rounds; 0 for never.
    """

    def __init__(
        self, num_users: int, settings: UserSettings, *, participation: float, average_every: int
    ) -> None:
        if not 0 < participation <= 1:
            raise ValueError(f"participation: {participation} is not above 0 and at most 1")
        if average_every < 0:
            raise ValueError(f"average_every: {average_every} is not at least 0")
        if settings.average_over not in ("holders", "all"):
            raise ValueError(
                f"average_over: {settings.average_over!r} is neither 'holders' nor 'all'"
            )
        if settings.average_over == "all" and participation < 1:
            raise ValueError("average_over: 'all' needs participation 1, all users step together")
        self.num_users, self.settings = num_users, settings
        self.participation, self.average_every = participation, average_every
        self.nodes: dict[int, NDArray[np.int64]] = {}  # SuperNode -> its users, in its order
        self.weight_shape = (0, 0)
        self.ledger = ByteLedger()
        self._gradient = np.zeros((num_users, settings.latent_size), np.float32)
        self._gradient_round = np.zeros(num_users, np.int64)  # 0: none waits
        self._average: NDArray[np.float32] | None = None
        self._average_round = 0
        self._has_average = np.zeros(num_users, np.int64)  # round of the mean each user has

    def enroll(self, node: int, reply: HelloReply, connected: Iterable[int]) -> str | None:
        """Note which users a SuperNode hosts.

        Returns
        -------
        str or None
            Why it cannot take part, or ``None`` if it does.
        """
        if self.nodes and reply.weight_shape != self.weight_shape:
            return f"its weights are {reply.weight_shape}, others have {self.weight_shape}"
        alive = set(connected)
        for other, users in list(self.nodes.items()):
            shared = np.intersect1d(reply.users, users)
            if not shared.size:
                continue
            if other in alive:
                return hosted_twice(int(shared[0]), other)
            del self.nodes[other]  # the same users are back under another node id
        self.weight_shape = reply.weight_shape
        self.nodes[node] = reply.users
        return None

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        """Forget what waits for users who have lost their state; return whether they had any.

        Their gradients belong to weights that are no more; averaged weights are sent again.
        """
        had = bool((self._gradient_round[users] > 0).any())
        self._gradient_round[users] = 0
        self._has_average[users] = 0
        return had

    def requests(
        self,
        server_round: int,
        connected: Iterable[int],
        *,
        checkpoint: bool = False,
        last: bool = False,
        run: str = "",
    ) -> dict[int, RelayRequest]:
        """Write the round's request to every SuperNode that hosts a user who takes part.

        Parameters
        ----------
        server_round : int
            The round.
        connected : iterable of int
            SuperNodes that can be reached.
        checkpoint : bool
            Whether clients are to save their state.
        last : bool
            Whether this only delivers what waits, to everybody.
        run : str
            Token of the run.
        """
        every = self.average_every
        send_weights = bool(every) and server_round % every == 0 and not last
        asked = np.ones(self.num_users, bool) if last else self._participants(server_round)
        requests = {}
        for node in connected:
            users = self.nodes.get(node, np.zeros(0, np.int64))
            # For a checkpoint every host is asked, even if none of its users takes part.
            if not (checkpoint and users.size) and not asked[users].any():
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

    def _participants(self, server_round: int) -> NDArray[np.bool_]:
        """Draw the round's users over the whole graph, so that no dealing changes the draw."""
        asked = np.ones(self.num_users, bool)
        if self.participation < 1:
            count = max(1, round(self.participation * self.num_users))
            draw = generator(self.settings.seed, "participants", server_round)
            asked[:] = False
            asked[torch.randperm(self.num_users, generator=draw)[:count].numpy()] = True
        return asked

    def delivered(self, answered: Mapping[int, RelayRequest]) -> None:
        """Note that these requests arrived, and count what each user of them was sent.

        Payload is what a user alone would be sent, whatever its cohort shares: its gradient, and
        the averaged weights in full.
        """
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
