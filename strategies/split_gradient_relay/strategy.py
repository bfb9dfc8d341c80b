"""nFedGNN: node-level federated learning by relaying the gradients of latent vectors.

"One Node Per User: Node-Level Federated Learning for Graph Neural Networks" (anonymous authors).
Every client, a *user*, is one node of a graph: it holds one feature vector ``x_i`` and its own
model ``f_u(theta_i, .)``. The server holds the graph ``A``, the labels of some nodes and every
layer but the first linear map, ``f_s(theta_s, A, .)``.

Round ``t`` of Algorithm 1, in one exchange instead of two. The message that asks for the latent
vectors of round ``t`` carries the gradients of round ``t - 1``:

1. server -> user ``i``: the gradient of the loss by the latent vector that ``i`` sent last;
2. user ``i``: back-propagates it and takes an Adam step on ``theta_i`` (lines 11 and 12);
3. user ``i`` -> server: ``x'_i = f_u(theta_i, x_i)`` (lines 5 and 6);
4. server: ``Z = f_s(theta_s, A, X')``, ``L = CE(Z, Y) + lambda L_reg`` (equations 5 to 7), an Adam
   step on ``theta_s``, and the gradients of ``L`` by every ``x'_i`` (lines 8 and 9).

One more message after the last round delivers the last gradients. At the end of step 4 the server
evaluates the weights and latent vectors that it then has.

*Absent users.* A user that is not asked or does not answer keeps its weights; the server goes on
with its last latent vector, and its gradient waits until it is back. A user that has never
answered has no edges until it does.

*Averaging* (``average_every = K``). In every K-th round the users also send their weights; the
next message carries the mean, which a user takes over before its step. CNFGNN, the paper's
baseline, is ``K = 1`` over all users with ``reg_weight = 0``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor, nn

from flower_graph.config.rules import ABOVE_ZERO, at_least, choice
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import NoClientsError
from flower_graph.outputs.files import Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.server.round_strategy import RoundStrategy
from flower_graph.server.session import Session
from flower_graph.strategies.split_gradient_relay.config import SCHEDULES, StrategyConfig
from flower_graph.strategies.split_gradient_relay.kept import server_snapshot, user_lines
from flower_graph.strategies.split_gradient_relay.messages import RelayReply, RelayRequest
from flower_graph.strategies.split_gradient_relay.server_model import (
    RelayServer,
    ServerData,
    scheduled,
)
from flower_graph.strategies.split_gradient_relay.server_state import (
    RelayMembership,
    RelayServerState,
    Roster,
)
from flower_graph.strategies.split_gradient_relay.users import UserSettings
from flower_graph.wire.counts import counted
from flower_graph.wire.exchange import Replies

USUAL = StrategyConfig()  # where the defaults stand


class SplitGradientRelay(RoundStrategy[RelayRequest, RelayReply]):
    """Server of nFedGNN, for clients that answer as ``NodeClient`` does.

    Parameters
    ----------
    data : Data
        ``edge_index``, ``y``, ``train_mask`` and, for the report, ``val_mask``, ``test_mask``; a
        PyG ``Data`` will do. Features are not looked at.
    server_model : Module
        ``f_s``, called as ``server_model(latent, edge_index)``; returns logits ``[n, c]``.
    latent_size : int
        Length of a latent vector, ``h``.
    user_bias : bool
        Whether the users' linear map has a bias.
    reg_weight : float
        ``lambda`` of equation 7.
    learning_rate, weight_decay : float
        Of Adam, on both sides.
    schedule : str
        How the learning rate goes on over the rounds, on both sides: ``"constant"``, ``"cosine"``
        to nearly 0 in the last, or ``"warmup-cosine"``, up in the first tenth of them before that.
    gradient_norm : float
        L2 norm to which a longer gradient, of the server's weights and all latent vectors
        together, is scaled down; 0 for none.
    server_average : float
        Share of an exponential average of the server's weights that stays in a round, below 1;
        the average predicts, is evaluated and is what the server has learnt. 0: the weights do.
    participation : float
        Share of the users asked each round, above 0 and at most 1.
    average_every : int
        Average the users' weights every so many rounds; 0 for never.
    average_over : str
        ``"holders"``: a feature's row over the users that have the feature, the bias not at all;
        ``"all"``: every row over all users, which needs full participation.
    seed : int
        Of initial weights, dropout and the choice of users.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``, for the server's model.
    min_nodes : int
        SuperNodes to wait for before a round.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.

    Notes
    -----
    A client must answer ``query`` with the users it hosts, ``train`` with their latent vectors
    after applying the gradients that the message brings, and ``train.finish`` after applying the
    last ones (``messages.py`` beside this file).
    """

    usual_rounds = 200

    def __init__(
        self,
        data: ServerData,
        server_model: nn.Module,
        *,
        latent_size: int,
        user_bias: bool = False,
        reg_weight: float = USUAL.reg_weight,
        learning_rate: float = USUAL.learning_rate,
        weight_decay: float = USUAL.weight_decay,
        schedule: str = USUAL.schedule,
        gradient_norm: float = USUAL.gradient_norm,
        server_average: float = USUAL.server_average,
        participation: float = USUAL.participation,
        average_every: int = USUAL.average_every,
        average_over: str = USUAL.average_over,
        seed: int = 0,
        device: str = "cpu",
        min_nodes: int = USUAL.min_nodes,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        choice(*SCHEDULES).check("schedule", schedule)
        ABOVE_ZERO.check("learning_rate", learning_rate)
        self.schedule, self.learning_rate = schedule, learning_rate
        self.server = RelayServer(
            data,
            server_model,
            latent_size=latent_size,
            reg_weight=reg_weight,
            weight_decay=weight_decay,
            gradient_norm=gradient_norm,
            average=server_average,
            seed=seed,
            device=resolve_device(device),
        )
        self.num_classes = self.server.num_classes
        self._right_in_best: Tensor | None = None  # in the best round
        self.users = RelayServerState(
            self.server.num_nodes,
            UserSettings(latent_size, user_bias, weight_decay, seed, average_over),
            participation=participation,
            average_every=average_every,
        )
        super().__init__(
            Session(
                RelayMembership(self.users),
                min_nodes=min_nodes,
                participation=participation,
                seed=seed,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
            )
        )

    def grow(self, data: ServerData, *, left: Sequence[int] = (), alone: int = 0) -> None:
        """Go on with other users: the next ``start`` is to be with ``resume=True``.

        Parameters
        ----------
        data : Data
            The grown graph. The users so far are its first nodes, in their order; newcomers follow.
        left : sequence of int
            Users that have left, of all that ever were: they keep their numbers, and nothing else.
        alone : int
            Rounds in which the newcomers alone train: the server's model and the others are frozen.

        Raises
        ------
        ValueError
            If the users' weights are averaged over ``"all"``, or a number is impossible.

        Notes
        -----
        Old users keep weights, optimiser and latent vector. Newcomers begin from the last mean if
        weights are averaged, else from the seed's. What was stored of users that left is removed
        from the checkpoints as the run goes on; what the others have learnt from them stays.
        """
        at_least(0).check("alone", alone)
        if left and not 0 <= min(left) <= max(left) < data.y.shape[0]:
            raise ValueError(f"left: users {list(left)!s:.60} of {data.y.shape[0]}")
        self.users.grow(Roster.grown(int(data.y.shape[0]), left, alone))
        self.server.take(data, left)

    def check_start(self, given: Collection[str], *, resume: bool) -> None:
        """Refuse to run twice but to go on; the server has a model, which it evaluates itself."""
        if self.session.is_open and not resume:
            raise ValueError("this strategy has run already: build a new one, or resume the run")
        if "evaluate_config" in given:
            raise ValueError("evaluate_config: the server evaluates, clients are not asked")

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        """Take over the server model's initial ``state_dict``."""
        if initial_arrays is not None:
            for model in (self.server.model, self.server.eval_model):
                model.load_state_dict(initial_arrays.to_torch_state_dict())

    def ask(self, server_round: int) -> dict[int, RelayRequest]:
        """Step 1: ask this round's users for latent vectors, with the gradients that wait."""
        session, users = self.session, self.users
        pool = users.roster.pool(server_round)
        requests = users.requests(
            server_round,
            session.gather(server_round, "no SuperNode hosts users of this graph"),
            pool[session.draw(pool.size, server_round)],
            checkpoint=session.is_due(server_round),
            run=session.checkpoints.run,
        )
        if not requests:
            no_user = "no connected SuperNode hosts a user who takes part"
            raise NoClientsError(f"round {server_round}: {no_user}")
        return requests

    def read(self, node: int, content: RecordDict) -> RelayReply:
        """Read what step 3 brings."""
        return RelayReply.from_record(content, self.requests[node], self.users.weight_shape)

    def reply_bytes(self) -> int:
        """Return the most bytes that a reply to this round's requests may have."""
        return self.users.reply_bytes(self.requests.values())

    def learn(self, server_round: int, replies: Replies[RelayReply]) -> RoundReport:
        """Do steps 3 and 4: take in latent vectors, step the server, keep gradients for users."""
        self.session.must_have(server_round, replies)
        answered = {node: self.requests[node] for node in replies.values}
        for node, reply in replies.values.items():
            latent = torch.tensor(reply.latent, dtype=torch.float32)
            self.server.receive(torch.from_numpy(answered[node].users), latent)
        is_frozen = self.users.roster.is_alone(server_round)
        rate = scheduled(self.schedule, self.learning_rate, server_round, self.session.rounds)
        losses, gradient = self.server.step(server_round, rate, is_frozen=is_frozen)
        self.users.delivered(answered)
        self.users.keep_gradients(server_round, answered, gradient.cpu().numpy(), rate)
        self.users.average(server_round, list(replies.values.values()))
        unhosted = self.users.unhosted(self.session.members.clients)
        accuracy = self.server.accuracy()
        server = self.server
        self.counts = counted(server.said, server.y, server.masks, self.counting)
        return self.report(
            server_round,
            self.session.participation(self.session.clients_of(answered), left_out=unhosted),
            accuracy,
            loss=losses.total,
            cross_entropy=losses.cross_entropy,
            regulariser=losses.regulariser,
            bytes=self.users.ledger.payload,
        )

    def saw_best(self) -> None:
        """Keep whose class is right in the best round so far."""
        self._right_in_best = self.server.right

    def finish(self, server_round: int) -> None:
        """Deliver the last gradients, and let the clients forget the run."""
        self.requests = self.users.requests(server_round, self.session.present())
        replies = self.send(server_round, "train.finish")
        self.users.delivered({node: self.requests[node] for node in replies.values})

    def fixed_settings(self) -> dict[str, object]:
        """Return what may not change when a run is resumed."""
        return {**self.users.settings._asdict(), "learning_rate": self.learning_rate}

    def _resume(self) -> int:
        """Go on from a checkpoint, which from now on has nothing of users that left."""
        last, roster = super()._resume(), self.users.roster
        if roster.is_change:
            # What was the best is of other users; nobody needs what is held of it.
            self.best.forget()
            self._right_in_best = None
        if roster.is_change and roster.left.any():
            self.session.checkpoints.rewrite(last, self._saved())
        return last

    def state(self) -> dict[str, object]:
        """Return the server's model and what waits for users."""
        return {
            "server": self.server.state_dict(),
            "book": self.users.state_dict(),
            "right-then": self._right_in_best,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self.users.load_state_dict(state["book"])
        self.server.load_state_dict(state["server"])
        self._right_in_best = state.get("right-then")

    def learnt(self) -> ArrayRecord:
        """Return the server's model."""
        state = self.server.eval_model.state_dict()
        return ArrayRecord({name: Array(value.cpu().numpy()) for name, value in state.items()})

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with.

        Returns
        -------
        dict of str to Tensor
            ``server.<name>``: the parameters and buffers of the server's model, as its
            ``state_dict`` names and shapes them; ``latent`` ``[n, h]``: each user's latent vector,
            zeros for one that never answered.
        """
        model = {f"server.{name}": t for name, t in self.server.eval_model.state_dict().items()}
        return model | {"latent": self.server.latent}

    def snapshot(self) -> Snapshot:
        """Return predictions and latent vectors of all who have answered, and the server's half."""
        return server_snapshot(self.server)

    def figures(self) -> Iterator[list[str]]:
        """Give the lines of ``clients.csv``: of each user that is there, last and best round."""
        return user_lines(self.server, self.users.traffic, self.best, self._right_in_best)
