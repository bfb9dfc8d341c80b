"""nFedGNN: node-level federated learning by relaying the gradients of latent vectors.

"One Node Per User: Node-Level Federated Learning for Graph Neural Networks" (anonymous authors).
Every client, a *user*, is one node of a graph: it holds one feature vector ``x_i`` and its own
model ``f_u(theta_i, .)``. The server holds the graph ``A``, the labels of some nodes and every
layer but the first linear map, ``f_s(theta_s, A, .)``.

Round ``t`` of Algorithm 1, in one exchange instead of two. The message that asks for the latent
vectors of round ``t`` carries the gradients of round ``t - 1``:

1. server -> user ``i``: the gradient of the loss by the last latent vector of ``i``;
2. user ``i``: back-propagates it and takes an Adam step on ``theta_i`` (lines 11 and 12);
3. user ``i`` -> server: ``x'_i = f_u(theta_i, x_i)`` (lines 5 and 6);
4. server: ``Z = f_s(theta_s, A, X')``, ``L = CE(Z, Y) + lambda L_reg`` (equations 5 to 7), the
   gradients of ``L`` by every ``x'_i``, and an Adam step on ``theta_s`` (lines 9 and 8; the paper
   steps first, here both come from one pass).

One more message after the last round delivers the last gradients. At the end of step 4 the server
evaluates its present weights and latent vectors.

*Absent users.* A user that is not asked or does not answer keeps its weights; the server goes on
with its last latent vector, and its gradient waits until it is back. A user that has never
answered has no edges until it does.

*Averaging* (``average_every = K``). In every K-th round the users also send their weights; the
next message carries the mean, which a user takes over before its step. CNFGNN, the paper's
baseline, is ``K = 1`` over all users with ``reg_weight = 0``.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.config.module import LinksSection
from flower_graph.config.rules import at_least
from flower_graph.config.schema import check_settings
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import NoClientsError
from flower_graph.outputs.files import (
    NO_CLIENT,
    Embeddings,
    KnownLinks,
    Predictions,
    Snapshot,
    role_of,
)
from flower_graph.records.participation import Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import Answer, Request, RoundStrategy
from flower_graph.server.session import Session
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.config import AVERAGED, OWN, StrategyConfig
from flower_graph.strategies.nfedgnn.messages import (
    EnrolmentReply,
    EnrolmentRequest,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.nfedgnn.server_model import (
    LinkRelayServer,
    RelayServer,
    scheduled,
    server_models,
)
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.counts import counted
from flower_graph.wire.exchange import Replies
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import ROLES
from flower_graph.wire.ledger import NUMBER, ROOM, ByteLedger, reply_bytes

LOG = logging.getLogger(__name__)
ANSWERED, UP, DOWN = range(3)  # columns of the traffic
FLOAT = 4  # bytes of a number
Q = TypeVar("Q", bound=Request)
A = TypeVar("A", bound=Answer)


# The users ---------------------------------------------------------------------------------------


class UserTable:
    """The users' part of the server's state in all forms: who is there, and bytes."""

    alone = 0  # rounds in which only the last newcomers train
    # How many users the checkpoint has that the run goes on from; None where nobody may come or go
    users_before: int | None = None
    is_change = False  # whether users came or went since that checkpoint

    def __init__(self, num_users: int, settings: UserSettings) -> None:
        self.settings = settings
        self.weight_shape = [0, 0]
        self.ledger = ByteLedger()
        self.round = 0  # the last
        self._begin(num_users)

    def _begin(self, count: int) -> None:
        self.size = count  # of all users there ever were
        # The round after which each joined; 0: there from the start
        self.joined = np.zeros(count, np.int64)
        self.left = np.zeros(count, bool)
        # Of each user: rounds that it answered, and its payload up and down
        self.traffic = np.zeros((count, 3), np.int64)

    def grow(self, count: int, left: Sequence[int], alone: int) -> None:
        self._begin(count)
        self.left[list(left)] = True
        self.alone, self.users_before = alone, count

    def rows(self) -> dict[str, NDArray[Any]]:
        """Return what a checkpoint has of each user."""
        return {"joined": self.joined, "traffic": self.traffic}

    def is_alone(self, server_round: int) -> bool:
        last = int(self.joined.max())
        return last > 0 and server_round <= last + self.alone

    def pool(self, server_round: int) -> NDArray[np.int64]:
        last = self.joined.max() if self.is_alone(server_round) else self.joined
        return np.flatnonzero((self.joined == last) & ~self.left)

    def begin_anew(self, users: NDArray[np.int64]) -> bool:
        """Forget what waits for users that have lost their state; return whether they had any."""
        return bool(self.traffic[users, ANSWERED].any())

    def count(self, way: str, kind: str, users: IntArray, nbytes: int) -> None:
        """Count the bytes that each of some users sent or was sent."""
        self.ledger.count(way, kind, users.size * nbytes)
        self.traffic[users, UP if way == "up" else DOWN] += nbytes

    def state_dict(self) -> dict[str, object]:
        return {
            "round": self.round,
            "left": torch.from_numpy(self.left),
            "ledger": self.ledger.state_dict(),
            **{name: torch.from_numpy(held) for name, held in self.rows().items()},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned; nothing waits for new or departed users."""
        left, gone, known = self.left, state["left"].numpy(), len(state["left"])
        if known > self.size or (known < self.size and self.users_before is None):
            raise ValueError(f"its num_users is {known}, this run's is {self.size}")
        self.round = int(state["round"])
        self._begin(self.size)
        self.joined[:] = self.round
        for name, held in self.rows().items():
            held[:known] = state[name].numpy()
            held[left] = 0
        self.left[:known] = gone
        # A checkpoint that was rewritten without departed users names its newcomers already.
        is_new = self.joined == self.round
        self.is_change = bool(is_new.any() or (left & ~self.left).any())
        self.users_before = None if self.users_before is None else int((~is_new).sum())
        self.left = left
        self.ledger.load_state_dict(state["ledger"])


class OwnTable(UserTable):
    """Users, gradients and averaged weights between two rounds."""

    def __init__(self, num_users: int, settings: UserSettings, average_every: int) -> None:
        if not average_every:  # nobody needs the inactive rows that "all" keeps
            settings = settings._replace(average_over="holders")
        self.average_every = average_every
        self._learning_rate = 0.0  # with which users take their gradients: of the last round
        self._average: NDArray[np.float32] | None = None
        self._average_round = 0
        super().__init__(num_users, settings)

    def _begin(self, count: int) -> None:
        super()._begin(count)
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

    def grow(self, count: int, left: Sequence[int], alone: int) -> None:
        if self.settings.average_over == "all":
            raise ValueError("average_over: 'all' lets nobody join or leave; 'holders' does")
        super().grow(count, left, alone)

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
        send_weights = is_due and drawn is not None and not self.is_alone(server_round)
        asked = np.zeros(self.size, bool)
        asked[~self.left if drawn is None else drawn] = True
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

    def __init__(
        self,
        state: UserTable,
        kind: type[EnrolmentReply] = EnrolmentReply,
        check: Callable[[Any], None] = lambda answer: None,  # refuses answers of that kind
    ) -> None:
        super().__init__()
        self.state, self._kind, self._check = state, kind, check
        self.answers: dict[int, Any] = {}  # of SuperNodes that have enrolled

    def question(self, resume: Resume) -> RecordDict:
        before = self.state.users_before if resume.server_round else None
        return EnrolmentRequest(self.state.settings, resume, before).to_record()

    def enrolment_round(self, server_round: int) -> int:
        """Return the round after which the run was resumed, whenever newcomers come."""
        return self.resume.server_round

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        answer = self._kind.read(content, num_nodes=self.state.size)
        self._check(answer)
        return answer

    def most_bytes(self) -> int:
        return max(super().most_bytes(), ROOM + NUMBER * self.state.size)

    def unasked(self) -> None:
        """Leave out SuperNodes that do not name their users."""

    def in_order(self, answers: Mapping[int, EnrolmentReply]) -> list[tuple[int, EnrolmentReply]]:
        """Enrol first the SuperNodes whose weights have the commonest shape."""
        # The first SuperNode must not decide for all how large weights are.
        shapes = Counter(tuple(answer.weight_shape) for answer in answers.values())
        commonest = [*max(shapes, key=lambda shape: (shapes[shape], shape), default=())]
        return sorted(
            answers.items(), key=lambda item: (item[1].weight_shape != commonest, item[0])
        )

    def refusal(self, answer: EnrolmentReply) -> str:
        if self.clients and answer.weight_shape != self.state.weight_shape:
            return f"its weights are {answer.weight_shape}, others have {self.state.weight_shape}"
        return ""

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        self.state.weight_shape, self.answers[node] = answer.weight_shape, answer
        if answer.handled == 0 and self.state.begin_anew(answer.users):
            LOG.warning("node %d has lost its state: its users begin anew", node)


# The server --------------------------------------------------------------------------------------


class RelayStrategy(RoundStrategy[Q, A]):
    """The part that servers of all forms share: the model, and its predictions for users.

    Parameters
    ----------
    data, server_model, **settings
        As of ``SplitGradientRelay``.
    """

    usual_rounds = 200
    form: ClassVar[dict[str, object]] = {}  # what a section has that only its fields are given of
    server: RelayServer
    users: UserTable
    members: RelayMembership
    _right_in_best: Tensor | None = None  # in the best round

    def __init__(
        self,
        data: Any,
        server_model: nn.Module,
        *,
        latent_size: int,
        user_bias: bool = False,
        seed: int = 0,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        links: LinksSection | None = None,
        section: StrategyConfig | None = None,
        **fields: Any,  # of a section
    ) -> None:
        if section is None:
            share = AVERAGED if fields.get("average_every") else OWN
            section = StrategyConfig(**{"share": share, **self.form, **fields})
            check_settings(section)
            section.validate()
        self.section = section
        kind = RelayServer if links is None else partial(LinkRelayServer, links=links)
        self.server = kind(
            data,
            server_model,
            section,
            latent_size=latent_size,
            seed=seed,
            device=resolve_device(device),
        )
        self.num_classes = self.server.num_classes
        self.users = self.table(UserSettings(latent_size, user_bias, section.weight_decay, seed))
        self.members = self.membership()
        super().__init__(
            Session(
                self.members,
                min_nodes=section.fewest_nodes,
                participation=section.participation,
                seed=seed,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
            )
        )

    # What differs from form to form

    def table(self, settings: UserSettings) -> UserTable:
        raise NotImplementedError

    def membership(self) -> RelayMembership:
        return RelayMembership(self.users)

    def fixed_settings(self) -> dict[str, object]:
        return {**self.users.settings._asdict(), "learning_rate": self.section.learning_rate}

    # The run

    def step_size(self, server_round: int) -> float:
        how = self.section
        return scheduled(how.schedule, how.learning_rate, server_round, self.session.rounds)

    def hosted(self, server_round: int) -> dict[int, IntArray]:
        return self.numbers(
            self.session.gather(server_round, "no SuperNode hosts users of this graph")
        )

    def drawn(self, server_round: int) -> IntArray:
        pool = self.users.pool(server_round)
        return pool[self.session.draw(pool.size, server_round)]

    def took_part(self, nodes: Iterable[int], no_use: str = "") -> Participation:
        """Return what became of every user, where these SuperNodes have answered."""
        nobody = ~self.users.left
        for users in self.session.members.numbers().values():
            nobody[users] = False
        unhosted = {"no SuperNode hosts it": np.flatnonzero(nobody)}
        answered = self.session.clients_of(nodes)
        return self.session.participation(answered, left_out=unhosted, no_use=no_use)

    def check_start(self, given: Collection[str], *, resume: bool) -> None:
        """Refuse a second run unless it resumes; the server has a model and evaluates it."""
        if self.session.is_open and not resume:
            raise ValueError("this strategy has run already: build a new one, or resume the run")
        if "evaluate_config" in given:
            raise ValueError("evaluate_config: the server evaluates, clients are not asked")

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        if initial_arrays is not None:
            for model in (self.server.model, self.server.eval_model):
                model.load_state_dict(initial_arrays.to_torch_state_dict())

    def numbers(self, nodes: Iterable[int]) -> dict[int, IntArray]:
        every = self.session.members.numbers()
        return {node: every[node] for node in nodes}

    def evaluates(self, server_round: int) -> bool:
        """Whether a round is evaluated: every so many, and a round that may be the last."""
        may_end = server_round >= self.session.rounds or self.session.stops_early(server_round)
        return may_end or server_round % self.section.evaluate_every == 0

    def measure(
        self, server_round: int, who: Participation, losses: Mapping[str, float]
    ) -> RoundReport:
        accuracy, self.counts = dict.fromkeys(ROLES, math.nan), None
        if self.evaluates(server_round):
            accuracy = self.server.accuracy()
            self.counts = counted(*self.server.judged, self.counting)
        return self.report(
            server_round,
            who,
            accuracy,
            **losses,
            bytes=self.users.ledger.payload,
        )

    def saw_best(self) -> None:
        self._right_in_best = self.server.right

    def _resume(self) -> int:
        """Go on from a checkpoint, which from now on has nothing of users that left."""
        last, users = super()._resume(), self.users
        if users.is_change:
            # What was the best is of other users; nobody needs what is held of it.
            self.best.forget()
            self._right_in_best = None
        if users.is_change and users.left.any():
            self.session.checkpoints.rewrite(last, self._saved())
        return last

    def state(self) -> dict[str, object]:
        return {
            "server": self.server.state_dict(),
            "book": self.users.state_dict(),
            "right-then": self._right_in_best,
        }

    def load_state(self, state: StateDict) -> None:
        self.users.load_state_dict(state["book"])
        self.server.load_state_dict(state["server"])
        self._right_in_best = state.get("right-then")

    def learnt(self) -> ArrayRecord:
        return ArrayRecord(self.server.eval_model.state_dict())

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with.

        ``server.<name>``: parameters and buffers of the server's model, as in its ``state_dict``;
        ``latent`` ``[n, h]``: the users' latent vectors, zeros for a user that never answered.
        """
        model = {f"server.{name}": t for name, t in self.server.eval_model.state_dict().items()}
        return model | {"latent": self.server.latent}

    def snapshot(self) -> Snapshot:
        """Return the server's half of a run, of users that have answered."""
        server = self.server
        users = server.known.nonzero().flatten().cpu()
        every = (
            np.arange(server.num_nodes) if server.names is None else np.array(list(server.names))
        )
        nodes, client = every[users.numpy()], np.full(len(users), NO_CLIENT)
        models, is_public = server_models(server.eval_model), np.zeros(len(users), bool)

        def beside(rows: Tensor) -> Embeddings:
            return Embeddings(client, nodes, users.numpy(), is_public, rows.cpu()[users].numpy())

        if isinstance(server, LinkRelayServer):
            edges = server.whole[:, server.known[server.whole].all(0)].cpu().numpy()
            known = KnownLinks(np.full(edges.shape[1], NO_CLIENT), *every[edges])
            return Snapshot(None, models, beside(server.rows(server.whole)), known)
        masks = (server.masks[name].cpu()[users] for name in ROLES)
        logits, label = server.logits().cpu()[users], server.y.cpu()[users]
        role = role_of(*masks)
        predictions = Predictions.of(logits, NO_CLIENT, nodes, role, label, server.classes)
        return Snapshot(predictions, models, beside(server.latent))

    def figures(self) -> Iterator[list[str]]:
        """Give the lines of ``clients.csv``: each present user in the last and the best round."""
        server = self.server
        role = np.full(server.num_nodes, -1)
        for index, name in enumerate(ROLES):
            role[server.masks[name].cpu().numpy()] = index
        best, right_then = self.best, self._right_in_best
        rounds = {"last": (best.last, server.right), "best": (best.number, right_then)}
        texts = {
            at: (str(number), right.cpu().tolist())
            for at, (number, right) in rounds.items()
            if right is not None
        }
        for user in server.known.nonzero().flatten().tolist():
            counts = [str(count) for count in self.users.traffic[user].tolist()]
            for at, (number, right) in texts.items():
                accuracy = ["", "", ""]
                if role[user] >= 0:
                    accuracy[role[user]] = "1.0" if right[user] else "0.0"
                yield [str(user), at, number, "1", "", *accuracy, *counts]

    def summary(self) -> None:
        LOG.info(
            "%s: %d users, %s", type(self).__name__, self.server.num_nodes, self.users.settings
        )

    def grow(self, data: Any, *, left: Sequence[int] = (), alone: int = 0) -> None:
        """Go on with other users: the next ``start`` is to be with ``resume=True``.

        Parameters
        ----------
        data : Data
            The grown graph. Its first nodes are the users so far, in their order; newcomers follow.
        left : sequence of int
            Users that have left, of all users there ever were; they keep only their numbers.
        alone : int
            Rounds in which the newcomers alone train: the server's model and the others are frozen.

        Raises
        ------
        ValueError
            If the users' weights are averaged over ``"all"``, or a number is impossible.

        Notes
        -----
        Old users keep weights, optimiser and latent vector. Newcomers begin with the common layer,
        else with the last mean if weights are averaged, else with the seed's weights. The data of
        users that left are removed from the checkpoints as the run goes on; what other users have
        learnt from them stays.
        """
        at_least(0).check("alone", alone)
        if left and not 0 <= min(left) <= max(left) < data.y.shape[0]:
            raise ValueError(f"left: users {list(left)!s:.60} of {data.y.shape[0]}")
        count = int(data.y.shape[0])
        self.users.grow(count, left, alone)
        self.server.take(data, left)


class SplitGradientRelay(RelayStrategy[RelayRequest, RelayReply]):
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
        The learning rate over the rounds, on both sides: ``"constant"``; ``"cosine"``, down to
        nearly 0 in the last; or ``"warmup-cosine"``, which first rises for a tenth of the rounds.
    gradient_norm : float
        L2 norm to which a longer gradient, of the server's weights and all latent vectors
        together, is scaled down; 0 for none.
    server_average : float
        Share of an exponential average of the server's weights that stays in a round, below 1;
        the average predicts, is evaluated and is what the server has learnt. 0: the weights do.
    evaluate_every : int
        Rounds between evaluations; the last round is evaluated always. In the others the report
        has losses, and no accuracy.
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
    links : LinksSection, optional
        The edges that are held out if links are learnt; the model then gives a row for each node.
    section : StrategyConfig, optional
        The section ``strategy`` of a config, in place of its fields.

    Notes
    -----
    A client must answer ``query`` with the users it hosts, ``train`` with their latent vectors
    after applying the gradients that the message brings, and ``train.finish`` after applying the
    last ones (``messages.py`` beside this file).
    """

    users: OwnTable

    def table(self, settings: UserSettings) -> OwnTable:
        settings = settings._replace(average_over=self.section.average_over)
        return OwnTable(self.server.num_nodes, settings, self.section.average_every)

    def ask(self, server_round: int) -> dict[int, RelayRequest]:
        """Step 1: ask this round's users for latent vectors, with the gradients that wait."""
        requests = self.users.requests(
            server_round,
            self.hosted(server_round),
            self.drawn(server_round),
            checkpoint=self.session.is_due(server_round),
            run=self.session.checkpoints.run,
        )
        if not requests:
            no_user = "no connected SuperNode hosts a user who takes part"
            raise NoClientsError(f"round {server_round}: {no_user}")
        return requests

    def read(self, node: int, content: RecordDict) -> RelayReply:
        return RelayReply.from_record(content, self.requests[node], self.users.weight_shape)

    def reply_bytes(self) -> int:
        latent = max((request.gradient.size for request in self.requests.values()), default=0)
        averages = any(request.send_weights for request in self.requests.values())
        rows, size = self.users.weight_shape
        return reply_bytes(latent + (rows * (size + 1) if averages else 0))

    def learn(self, server_round: int, replies: Replies[RelayReply]) -> RoundReport:
        """Do steps 3 and 4: take in latent vectors, step the server, keep gradients for users."""
        self.session.must_have(server_round, replies)
        answered = {node: self.requests[node] for node in replies.values}
        for node, reply in replies.values.items():
            request = answered[node]
            self.server.receive(
                torch.from_numpy(request.users), torch.tensor(reply.latent, dtype=torch.float32)
            )
            # Of a million users neither is to take room while the server steps.
            reply.latent, request.gradient = reply.latent[:0].copy(), request.gradient[:0].copy()
        is_frozen = self.users.is_alone(server_round)
        rate = self.step_size(server_round)
        losses, gradient = self.server.step(server_round, rate, is_frozen=is_frozen)
        self.users.delivered(answered)
        self.users.keep_gradients(server_round, answered, gradient.cpu().numpy(), rate)
        self.users.average(server_round, list(replies.values.values()))
        return self.measure(server_round, self.took_part(answered), losses)

    def finish(self, server_round: int) -> None:
        self.requests = self.users.requests(server_round, self.numbers(self.session.present()))
        replies = self.send(server_round, "train.finish")
        self.users.delivered({node: self.requests[node] for node in replies.values})
