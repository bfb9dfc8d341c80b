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
judges the weights and latent vectors that it then has.

*Absent users.* A user that is not asked or does not answer keeps its weights; the server goes on
with its last latent vector, and its gradient waits until it is back. A user that has never
answered has no edges until it does.

*Averaging* (``average_every = K``). In every K-th round the users also send their weights; the
next message carries the mean, which a user takes over before its step. CNFGNN, the paper's
baseline, is ``K = 1`` over all users with ``reg_weight = 0``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from flower_graph.cohort import UserSettings
from flower_graph.exchange import Replies
from flower_graph.records.keys import CONFIG
from flower_graph.records.relay import Hello, HelloReply, RelayReply, RelayRequest
from flower_graph.relay import Losses, RelayServer, ServerData, resolve_device
from flower_graph.relay_book import RelayBook
from flower_graph.relay_session import RelaySession
from flower_graph.report import RoundReport, format_round
from flower_graph.user_host import ChosenUsers, UserHost
from flower_graph.without_evaluate import WithoutEvaluate

LOG = logging.getLogger(__name__)
ACTIONS = ("finish",)  # named actions of NodeClient, for make_client_app


# Client ------------------------------------------------------------------------------------------


class NodeClient(NumPyClient):
    """The users that one SuperNode hosts: in a deployment one, in a simulation thousands.

    Parameters
    ----------
    context : Context
        The ClientApp's context; the users' weights live behind it (``flower_graph.state``).
    x : Tensor
        ``[n_c, f]`` the users' features, dense or sparse CSR.
    users : Tensor
        ``[n_c]`` the users' numbers in the server's graph.
    user_model : Module, optional
        ``f_u``: any module from one user's features to a vector of ``latent_size``. Without it,
        the paper's linear map, stored by active rows. It runs without dropout, since one latent
        vector serves training and evaluation; put dropout into the server's model.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where to save the users' weights when the server asks for a checkpoint.
    """

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        user_model: nn.Module | None = None,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
    ) -> None:
        self.host = UserHost(
            context,
            x,
            users,
            user_model=user_model,
            device=resolve_device(device),
            checkpoint_dir=checkpoint_dir,
        )

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say which users are here; load a checkpoint first if the server resumes a run."""
        hello = Hello.from_config(config)
        self.host.restore(hello.settings, hello.resume)
        shape, handled = self.host.weight_shape(hello.settings), self.host.handled(hello.settings)
        return HelloReply(self.host.users.numpy(), shape, handled).to_properties()

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Apply the relayed gradients, then answer with latent vectors (steps 2 and 3)."""
        request = RelayRequest.from_numpy(parameters, config)
        with self._message(request) as users:
            self._update(users, request)
            reply = RelayReply(request.server_round, users.latent())
            if request.send_weights:
                reply.weight_sum, reply.holders = users.weight_sum()
        if request.checkpoint:
            reply.not_saved = self.host.save(request.server_round, request.run)
        return reply.to_numpy()

    def finish(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Apply the last gradients and forget the run."""
        request = RelayRequest.from_numpy(parameters, config)
        with self._message(request) as users:
            self._update(users, request)
        self.host.drop()
        # Nothing more to tell; but mods such as LocalDpMod compare the shapes of both messages.
        return RelayReply(request.server_round, np.zeros_like(request.gradient)).to_numpy()

    def _message(self, request: RelayRequest) -> AbstractContextManager[ChosenUsers]:
        """Open the users' state; it must be there if a gradient comes for what it has sent."""
        follows = bool(request.gradient_round.any())
        return self.host.message(request.settings, request.users, follows=follows)

    @staticmethod
    def _update(users: ChosenUsers, request: RelayRequest) -> None:
        """Take over averaged weights, then step; each at most once per round it belongs to."""
        if request.average is not None:
            users.take_average(request.average, request.average_round)
        users.step(request.gradient, request.gradient_round)


# Server ------------------------------------------------------------------------------------------


class SplitGradientRelay(WithoutEvaluate):
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
    last ones (``flower_graph.records``).
    """

    def __init__(
        self,
        data: ServerData,
        server_model: nn.Module,
        *,
        latent_size: int,
        user_bias: bool = False,
        reg_weight: float = 100.0,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        participation: float = 1.0,
        average_every: int = 0,
        average_over: str = "holders",
        seed: int = 0,
        device: str = "cpu",
        min_nodes: int = 1,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        self.server = RelayServer(
            data,
            server_model,
            latent_size=latent_size,
            reg_weight=reg_weight,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            seed=seed,
            device=resolve_device(device),
        )
        if average_over not in ("holders", "all"):
            raise ValueError(f"average_over: {average_over!r} is neither 'holders' nor 'all'")
        # Without averages nobody needs the inactive rows that "all" keeps.
        over = average_over if average_every else "holders"
        settings = UserSettings(latent_size, user_bias, learning_rate, weight_decay, seed, over)
        self.book = RelayBook(
            self.server.num_nodes,
            settings,
            participation=participation,
            average_every=average_every,
        )
        self.session = RelaySession(
            self.server,
            self.book,
            min_nodes=min_nodes,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 200,
        timeout: float = 600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        resume: bool = False,
    ) -> Result:
        """Run the method.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or ``flower_graph.simulation.InProcessGrid``.
        initial_arrays : ArrayRecord, optional
            The server model's initial ``state_dict``; by default the model as it is.
        num_rounds : int
            Rounds to run, those before a checkpoint included.
        timeout : float
            Seconds that an exchange may take.
        train_config : ConfigRecord, optional
            Entries to send along with every ``train`` message.
        evaluate_config : ConfigRecord, optional
            Refused: the server evaluates, nothing is sent to clients for it.
        evaluate_fn : callable, optional
            Called with the round and the server model's arrays after every round.
        on_round : callable, optional
            Called with every round's report; without it, one line is logged.
        resume : bool
            Go on from the last complete checkpoint in ``checkpoint_dir``.

        Returns
        -------
        Result
            The server model's arrays, and the metrics of every round.

        Raises
        ------
        NoClientsError
            If no client is there, or none gives a usable answer before the deadline.
        DivergedError
            If the loss is no longer a number.
        CheckpointError
            If there is nothing to resume from, or what there is does not fit.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds: {num_rounds} is not at least 1")
        if evaluate_config is not None:
            raise ValueError("evaluate_config: the server evaluates, clients are not asked")
        if self.session.is_open and not resume:
            raise ValueError("this strategy has run already: build a new one, or resume the run")
        if initial_arrays is not None:
            self.server.model.load_state_dict(initial_arrays.to_torch_state_dict())
        self.session.open(grid, timeout, num_rounds)
        first = self.session.resume() + 1 if resume else 1
        result = Result()
        for server_round in range(first, num_rounds + 1):
            started = time.perf_counter()
            report = self._round(server_round, grid, train_config or ConfigRecord())
            result.train_metrics_clientapp[server_round] = _as_metrics(report)
            found = evaluate_fn(server_round, self._arrays()) if evaluate_fn else None
            if found is not None:
                result.evaluate_metrics_serverapp[server_round] = found
            report.seconds = time.perf_counter() - started
            # In this order a run can be stopped anywhere: a checkpoint's rounds are reported.
            (on_round or self._log)(report)
            self.session.save(server_round)
        self.session.finish(num_rounds)
        result.arrays = self._arrays()
        return result

    def _round(self, server_round: int, grid: Grid, config: ConfigRecord) -> RoundReport:
        """Run steps 1 to 4."""
        messages = self.configure_train(server_round, ArrayRecord(), config, grid)
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        replies = self.session.send(server_round, contents)
        return self._report(server_round, self._learn(server_round, replies), replies)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Step 1: ask this round's users for latent vectors, with the gradients that wait."""
        if not self.session.is_open:  # Flower's own round loop is running
            self.session.open(grid, self.session.timeout, self.session.rounds)
        for node, request in self.session.plan(server_round).items():
            content = request.to_record()
            content[CONFIG] = ConfigRecord({**config, **content.config_records[CONFIG]})
            yield Message(content, node, "train", group_id=str(server_round))

    def _learn(self, server_round: int, replies: Replies[RelayReply]) -> Losses:
        """Do steps 3 and 4: take in latent vectors, step the server, keep gradients for users."""
        answered = self.session.answered(server_round, replies)
        for node, request in answered.items():
            latent = torch.tensor(replies.values[node].latent, dtype=torch.float32)
            self.server.receive(torch.from_numpy(request.users), latent)
        losses, gradient = self.server.step(server_round)
        self.book.delivered(answered)
        self.book.keep_gradients(server_round, answered, gradient.cpu().numpy())
        self.book.average(server_round, list(replies.values.values()))
        return losses

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do steps 3 and 4, for Flower's own round loop; ``start`` does not need it."""
        read = self.session.read(server_round, replies)
        report = self._report(server_round, self._learn(server_round, read), read)
        self.session.save(server_round)
        return self._arrays(), _as_metrics(report)

    def summary(self) -> None:
        """Log the settings in one line."""
        LOG.info("SplitGradientRelay: %d users, %s", self.server.num_nodes, self.book.settings)

    def _report(
        self, server_round: int, losses: Losses, replies: Replies[RelayReply]
    ) -> RoundReport:
        accuracy, ledger = self.server.accuracy(), self.book.ledger
        requests = self.session.requests
        return RoundReport(
            round=server_round,
            loss=losses.total,
            cross_entropy=losses.cross_entropy,
            regulariser=losses.regulariser,
            train_accuracy=accuracy["train"],
            val_accuracy=accuracy["val"],
            test_accuracy=accuracy["test"],
            asked=sum(request.users.size for request in requests.values()),
            answered=sum(requests[node].users.size for node in replies.values),
            rejected=[
                {"node": r.node_id, "reason": r.reason}
                for r in (*self.session.refused, *replies.rejected)
            ],
            bytes=ledger.payload,
            wire_bytes=self.session.exchange.ledger.wire,
            participation=self.session.participation(replies).to_record(),
        )

    def _arrays(self) -> ArrayRecord:
        state = self.server.model.state_dict()
        return ArrayRecord({name: Array(value.cpu().numpy()) for name, value in state.items()})

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with: the server's weights, the latent vectors."""
        model = {f"server.{name}": t for name, t in self.server.model.state_dict().items()}
        return model | {"latent": self.server.latent}

    def _log(self, report: RoundReport) -> None:
        LOG.info(format_round(report, self.session.rounds))


def _as_metrics(report: RoundReport) -> MetricRecord:
    names = ("loss", "train_accuracy", "val_accuracy", "test_accuracy", "answered")
    return MetricRecord({name.replace("_", "-"): getattr(report, name) for name in names})
