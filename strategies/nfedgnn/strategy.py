"""nFedGNN: node-level federated learning by relaying the gradients of latent vectors.

"One Node Per User: Node-Level Federated Learning for Graph Neural Networks" (anonymous authors).
Every client, a *user*, is one node of a graph: it holds one feature vector ``x_i`` and its own
model ``f_u(theta_i, .)``. The server holds the graph ``A``, the labels of some nodes and every
layer but the first linear map, ``f_s(theta_s, A, .)``.

A round of the relay, Algorithm 1 (``SplitGradientRelay.round``):

1. user ``i`` -> server: ``x'_i = f_u(theta_i, x_i)`` (lines 5 and 6);
2. server: ``Z = f_s(theta_s, A, X')``, ``L = CE(Z, Y) + lambda L_reg`` (equations 5 to 7), the
   gradients ``g_i`` of ``L`` by every ``x'_i``, and an Adam step on ``theta_s`` (lines 9 and 8; the
   paper steps first, here both come from one pass);
3. server -> user ``i``: ``g_i``; the users' layer takes an Adam step (lines 11 and 12).

A layer says what travels in steps 1 and 3, and how it steps.

*Own layers* (``OwnLayer``) take one exchange a round. The message that asks for the latent vectors
of round ``t`` carries the gradients of round ``t - 1``; one more message after the last round
delivers the last gradients. The server evaluates its present weights and latent vectors at the end
of step 2. A user that is not asked or does not answer keeps its weights. The server goes on with
its last latent vector, and its gradient waits until it is back. A user that has never answered has
no edges until it does.

*Averaged layers* (``average_every = K``). In every K-th round the users also send their weights.
The next message carries the mean, which a user takes over before its step. CNFGNN, the paper's
baseline, is ``K = 1`` over all users with ``reg_weight = 0``.

*One common layer* (``CommonLayer``): all users hold the same ``W`` and the same Adam, which is
exactly the training of one network in one place. The gradient by ``W`` is a sum over users,
``sum_i x_i g_i^T``. A round takes two exchanges:

- server -> user: the sum of the round before; user: a step with it; user -> server: ``x'_i``, with
  dropout on ``x_i``, and once more without dropout if the server evaluates the round before;
- server -> user: ``g_i``; SuperNode -> server: the sum over its users.

The server asks for the first as soon as the round before has its sum, so that it can evaluate that
round, too. The loss and the sum are over the users that answered; the other users take part by
their last vector without dropout. A SuperNode that has missed a step, or is new, gets weights and
optimiser of another SuperNode, which the server relays. If a SuperNode sends latent vectors but not
its sum, nobody steps; a SuperNode that stops two steps in this way is left out with its users,
until another SuperNode joins.

*Masked sums* (``MaskedSum``): the server can see neither the sums nor the layer.

- Before the first round one SuperNode draws a common key and seals it for the others; the server
  carries the packets. First weights and dropout come from that key.
- The sum of gradients is a secure sum, ``SecureSum``, of 64-bit words with 40 fraction bits, under
  pads from the same key. The server adds up, takes the masks off, and sends the sum on, still under
  the pads.
- A copy of the layer travels under the same key.
- Every SuperNode of a sum must stay until the sum is opened; otherwise nobody steps.

With a registry the SuperNodes have keys of their own, and do not trust the server. The sums are
then ``PartySums``, public keys for the common key are signed, and each sum ends in checks by which
clients know that it was not changed.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.config.module import LinksSection
from flower_graph.config.rules import BELOW_ONE, at_least, require
from flower_graph.config.schema import check_settings
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import MalformedReplyError, NoClientsError, RefusedError
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
from flower_graph.secure.common_key import (
    SIGNED_BY,
    KeyPacket,
    ShareKeyReply,
    ShareKeyRequest,
    check_signed,
)
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.sum.messages import MaskRequest
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import PartySums, SumServer
from flower_graph.secure.sum.service import SecureSum
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy
from flower_graph.server.session import Session
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.config import AVERAGED, MASKED, OWN, SUMMED, StrategyConfig
from flower_graph.strategies.nfedgnn.messages import (
    AS_PARTY,
    GRADIENTS,
    IN_SUM,
    LEAST_FRACTION_BITS,
    Advance,
    CopyReply,
    EnrolmentReply,
    EnrolmentRequest,
    GradientRequest,
    HiddenSum,
    LatentReply,
    LatentRequest,
    MemberKey,
    RelayReply,
    RelayRequest,
    SumReply,
    detail_of,
)
from flower_graph.strategies.nfedgnn.server_model import (
    LinkRelayServer,
    RelayServer,
    scheduled,
    server_models,
)
from flower_graph.strategies.nfedgnn.users import UserSettings, bounded
from flower_graph.wire.arrays import Config, FloatArray, IntArray
from flower_graph.wire.counts import counted
from flower_graph.wire.exchange import Rejected, Replies, few
from flower_graph.wire.fields import Bytes, Resume
from flower_graph.wire.keys import CONFIG, ROLES, SERVER_ROUND
from flower_graph.wire.ledger import NUMBER, ROOM, ByteLedger, reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
ANSWERED, UP, DOWN = range(3)  # columns of the traffic
FLOAT = 4  # bytes of a number
NOBODY: IntArray = np.zeros(0, np.int64)
NEVER = -1  # the round of no step
MOST_STOPPED = 2  # steps that a SuperNode may stop before it is left out
Requests = Mapping[int, GradientRequest]
T = TypeVar("T")


class SplitGradientRelay(RoundStrategy[Any, Any]):
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
    feature_dropout : float
        Share of its features that each user drops in training; with ``share="summed"`` only.
    seed : int
        Of initial weights, dropout and the choice of users.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``, for the server's model.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    links : LinksSection, optional
        The edges that are held out if links are learnt; the model then gives a row for each node.
    section : StrategyConfig, optional
        The section ``strategy`` of a config.
    **fields
        In place of a section, its fields (``flower-graph docs configuration``), such as
        ``learning_rate`` or ``average_every``, which makes ``share="averaged"``.

    Notes
    -----
    A client must answer ``query`` with the users it hosts, ``train`` with their latent vectors
    after applying the gradients that the message brings, and ``train.finish`` after applying the
    last ones (``messages.py`` beside this file).
    """

    usual_rounds = 200
    form: ClassVar[dict[str, object]] = {}  # of a section of which only fields are given
    _right_in_best: Tensor | None = None  # users that the server predicted right in the best round

    def __init__(
        self,
        data: Any,
        server_model: nn.Module,
        *,
        latent_size: int,
        user_bias: bool = False,
        feature_dropout: float = 0.0,
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
        BELOW_ONE.check("feature_dropout", feature_dropout)
        is_good = section.share == SUMMED or not feature_dropout
        require(is_good, "feature_dropout", feature_dropout, f"0 without share={SUMMED}")
        self.section = section
        over, decay = section.average_over, section.weight_decay
        settings = UserSettings(latent_size, user_bias, decay, seed, over, feature_dropout)
        kind = RelayServer if links is None else partial(LinkRelayServer, links=links)
        self.server: RelayServer = kind(
            data, server_model, section, settings, resolve_device(device)
        )
        self.num_classes = self.server.num_classes
        form = CommonLayer if section.share == SUMMED else OwnLayer
        self.layer: OwnLayer | CommonLayer = form(self, settings)
        self.members = UserMembership(self.layer)
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

    # A round

    def round(self, server_round: int) -> RoundReport:
        """Run a round: the users' latent vectors, the server's step, the step of their layer."""
        layer, server = self.layer, self.server
        latent, heard = layer.latents(server_round)
        losses, gradient = server.gradients(server_round, latent, heard)
        how = self.section
        rate = scheduled(how.schedule, how.learning_rate, server_round, self.session.rounds)
        skipped = layer.step(server_round, gradient, rate)
        if not skipped and not layer.is_alone(server_round):
            server.move(server_round, rate)
        who = self.took_part(() if skipped else layer.answered, skipped)
        layer.round = server_round
        layer.look_ahead(server_round)
        report = self.measure(server_round, who, losses)
        report.skipped = skipped
        return report

    def hosted(self, server_round: int) -> dict[int, IntArray]:
        return self.numbers(
            self.session.gather(server_round, "no SuperNode hosts users of this graph")
        )

    def drawn(self, server_round: int, hosted: Mapping[int, IntArray]) -> dict[int, IntArray]:
        """Draw a round's users; return those of each SuperNode."""
        pool, takes_part = self.layer.pool(server_round), np.zeros(self.layer.size, bool)
        takes_part[pool[self.session.draw(pool.size, server_round)]] = True
        return {node: users[takes_part[users]] for node, users in hosted.items()}

    def nobody_drawn(self, server_round: int) -> NoClientsError:
        return NoClientsError(
            f"round {server_round}: no connected SuperNode hosts a user who takes part"
        )

    def took_part(self, nodes: Iterable[int], no_use: str = "") -> Participation:
        """Return what became of every user, where these SuperNodes have answered."""
        nobody = ~self.layer.left
        for users in self.session.members.numbers().values():
            nobody[users] = False
        unhosted = {"no SuperNode hosts it": np.flatnonzero(nobody)}
        answered = self.session.clients_of(nodes)
        return self.session.participation(answered, left_out=unhosted, no_use=no_use)

    def numbers(self, nodes: Iterable[int]) -> dict[int, IntArray]:
        """Return the users of some SuperNodes."""
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
        payload = self.layer.ledger.payload
        return self.report(server_round, who, accuracy, **losses, bytes=payload)

    def read(self, node: int, content: RecordDict) -> RelayReply | LatentReply:
        return self.layer.read(self.requests[node], content)

    def reply_bytes(self) -> int:
        return self.layer.reply_bytes(self.requests.values())

    def finish(self, server_round: int) -> None:
        self.layer.finish(server_round)

    # State and outputs

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

    def fixed_settings(self) -> dict[str, object]:
        return {**self.layer.settings._asdict(), "learning_rate": self.section.learning_rate}

    def saw_best(self) -> None:
        self._right_in_best = self.server.right

    def _resume(self) -> int:
        """Go on from a checkpoint, which from now on has nothing of users that left."""
        last, layer = super()._resume(), self.layer
        if layer.is_change:
            # What was the best is of other users; nobody needs what is held of it.
            self.best.forget()
            self._right_in_best = None
        if layer.is_change and layer.left.any():
            self.session.checkpoints.rewrite(last, self._saved())
        return last

    def state(self) -> dict[str, object]:
        return {
            "server": self.server.state_dict(),
            "layer": self.layer.state_dict(),
            "right-then": self._right_in_best,
        }

    def load_state(self, state: StateDict) -> None:
        self.layer.load_state_dict(state["layer"])
        self.server.load_state_dict(state["server"])
        self._right_in_best = state["right-then"]

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
        nodes, client = server.nodes[users.numpy()], np.full(len(users), NO_CLIENT)
        models, is_public = server_models(server.eval_model), np.zeros(len(users), bool)

        def beside(rows: Tensor) -> Embeddings:
            return Embeddings(client, nodes, users.numpy(), is_public, rows.cpu()[users].numpy())

        if isinstance(server, LinkRelayServer):
            edges = server.whole[:, server.known[server.whole].all(0)].cpu().numpy()
            known = KnownLinks(np.full(edges.shape[1], NO_CLIENT), *server.nodes[edges])
            return Snapshot(None, models, beside(server.rows(server.whole)), known)
        masks = (server.masks[name].cpu()[users] for name in ROLES)
        logits, label = server.logits().cpu()[users], server.y.cpu()[users]
        predictions = Predictions.of(
            logits, NO_CLIENT, nodes, role_of(*masks), label, server.classes
        )
        return Snapshot(predictions, models, beside(server.latent))

    def figures(self) -> Iterator[list[str]]:
        """Give the lines of ``clients.csv``: each present user in the last and the best round."""
        server, best = self.server, self.best
        role = role_of(*(server.masks[name] for name in ROLES))
        rounds = [("last", best.last, server.right), ("best", best.number, self._right_in_best)]
        texts = [(at, str(n), right.cpu().tolist()) for at, n, right in rounds if right is not None]
        for user in server.known.nonzero().flatten().tolist():
            counts = [str(count) for count in self.layer.traffic[user].tolist()]
            for at, number, right in texts:
                accuracy = ["", "", ""]
                if role[user]:
                    accuracy[role[user] - 1] = "1.0" if right[user] else "0.0"
                yield [str(user), at, number, "1", "", *accuracy, *counts]

    def summary(self) -> None:
        LOG.info(
            "%s: %d users, %s", type(self).__name__, self.server.num_nodes, self.layer.settings
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
        count = int(data.y.shape[0])
        if left and not 0 <= min(left) <= max(left) < count:
            raise ValueError(f"left: users {list(left)!s:.60} of {count}")
        if self.section.average_over == "all":
            raise ValueError("average_over: 'all' lets nobody join or leave; 'holders' does")
        self.layer.grow(count, left, alone)
        self.server.take(data, left)


class SummedGradientRelay(SplitGradientRelay):
    """``SplitGradientRelay`` with one layer of all users, for clients as ``CommonLayerClient``."""

    form: ClassVar = {"share": SUMMED}


class MaskedGradientRelay(SplitGradientRelay):
    """``SummedGradientRelay`` with masked sums, for clients as ``MaskedLayerClient``."""

    form: ClassVar = {"share": SUMMED, "aggregation": MASKED}


# The users' layers -------------------------------------------------------------------------------


class Layer:
    """The server's half of the users' layer in all forms: who is there, and bytes.

    A form has ``latents(round)``, a round's latent vectors ``[n, h]`` and the users that were heard
    ``[n]``; ``step(round, gradient, rate)``, which returns why the layer cannot step, or "";
    ``read`` and ``reply_bytes`` of a reply; and ``finish``.
    """

    # Of the state: arrays with a row for each user, and others
    rows: ClassVar[tuple[str, ...]] = ("joined", "traffic")
    others: ClassVar[tuple[str, ...]] = ("round",)
    round = 0  # the last
    alone = 0  # rounds in which only the last newcomers train
    # How many users the checkpoint has that the run goes on from; None where nobody may come or go
    users_before: int | None = None
    is_change = False  # whether users came or went since that checkpoint
    answered: Collection[int] = ()  # SuperNodes whose latent vectors the last round used

    def __init__(self, relay: SplitGradientRelay, settings: UserSettings) -> None:
        self.relay, self.settings = relay, settings
        self.weight_shape = [0, 0]
        self.ledger = ByteLedger()
        self._begin(relay.server.num_nodes)

    def _begin(self, count: int) -> None:
        self.size = count  # of all users there ever were
        # The round after which each joined; 0: there from the start
        self.joined = np.zeros(count, np.int64)
        self.left = np.zeros(count, bool)
        # Of each user: rounds that it answered, and its payload up and down
        self.traffic = np.zeros((count, 3), np.int64)

    def look_ahead(self, server_round: int) -> None:
        """Ask, after the step, for what the round's evaluation needs."""

    def check(self, answer: EnrolmentReply) -> None:
        """Refuse an enrolment without what this layer needs."""

    def refusal(self, users: Iterable[int]) -> str:
        """Return why newcomers may not take part, or ""."""
        return ""

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        self.weight_shape = answer.weight_shape

    def begin_anew(self, users: IntArray) -> bool:
        """Forget what waits for users that have lost their state; return whether they had any."""
        return bool(self.traffic[users, ANSWERED].any())

    def grow(self, count: int, left: Sequence[int], alone: int) -> None:
        self._begin(count)
        self.left[list(left)] = True
        self.alone, self.users_before = alone, count

    def is_alone(self, server_round: int) -> bool:
        last = int(self.joined.max())
        return last > 0 and server_round <= last + self.alone

    def pool(self, server_round: int) -> NDArray[np.int64]:
        last = self.joined.max() if self.is_alone(server_round) else self.joined
        return np.flatnonzero((self.joined == last) & ~self.left)

    def count(self, way: str, kind: str, users: IntArray, numbers: int) -> None:
        """Count numbers that each of some users sent or was sent."""
        self.ledger.count(way, kind, users.size * numbers * FLOAT)
        self.traffic[users, UP if way == "up" else DOWN] += numbers * FLOAT

    def state_dict(self) -> dict[str, object]:
        return {
            "left": torch.from_numpy(self.left),
            "ledger": self.ledger.state_dict(),
            **{name: torch.from_numpy(getattr(self, name)) for name in self.rows},
            **{name: getattr(self, name) for name in self.others},
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned; nothing waits for new or departed users."""
        left, gone, known = self.left, state["left"].numpy(), len(state["left"])
        if known > self.size or (known < self.size and self.users_before is None):
            raise ValueError(f"its num_users is {known}, this run's is {self.size}")
        for name in self.others:
            setattr(self, name, state[name])
        self._begin(self.size)
        self.joined[:] = self.round
        for name in self.rows:
            held = getattr(self, name)
            held[:known] = state[name].numpy()
            held[left] = 0
        self.left[:known] = gone
        # A checkpoint that was rewritten without departed users names its newcomers already.
        is_new = self.joined == self.round
        self.is_change = bool(is_new.any() or (left & ~self.left).any())
        self.users_before = None if self.users_before is None else int((~is_new).sum())
        self.left = left
        self.ledger.load_state_dict(state["ledger"])


class OwnLayer(Layer):
    """A layer of each user's own: gradients and averaged weights wait for users."""

    rows = (*Layer.rows, "gradient", "gradient_round", "has_average")
    others = (*Layer.others, "rate", "average", "average_round")
    rate = 0.0  # with which users take their gradients: of the last round
    average: Tensor | None = None
    average_round = 0

    def _begin(self, count: int) -> None:
        super()._begin(count)
        self.gradient = np.zeros((count, self.settings.latent_size), np.float32)
        self.gradient_round = np.zeros(count, np.int64)  # 0: none waits
        self.has_average = np.zeros(count, np.int64)  # round of the mean each user has

    def begin_anew(self, users: IntArray) -> bool:
        # Their gradients belong to weights that are no more; averaged weights are sent again.
        self.gradient_round[users] = self.has_average[users] = 0
        return super().begin_anew(users)

    def latents(self, server_round: int) -> tuple[Tensor, Tensor]:
        """Ask this round's users for latent vectors, with the gradients that wait."""
        relay = self.relay
        session, server = relay.session, relay.server
        hosted = relay.hosted(server_round)
        drawn, saves = relay.drawn(server_round, hosted), session.is_due(server_round)
        every = relay.section.average_every
        # A mean of the newcomers alone would become everybody's.
        averages = every and server_round % every == 0 and not self.is_alone(server_round)
        relay.requests = {
            # For a checkpoint every host is asked, even if none of its users takes part.
            node: self._request(server_round, users, bool(averages), saves, session.checkpoints.run)
            for node, users in drawn.items()
            if saves or users.size
        }
        if not relay.requests:
            raise relay.nobody_drawn(server_round)
        replies = relay.send(server_round, "train", relay._config)
        relay.answers = replies.values
        session.must_have(server_round, replies)
        self.answered = replies.values
        for node, reply in replies.values.items():
            request = relay.requests[node]
            latent = torch.tensor(reply.latent, dtype=torch.float32)
            server.receive(torch.from_numpy(request.users), latent)
            # Of a million users neither is to take room while the server steps.
            reply.latent, request.gradient = reply.latent[:0].copy(), request.gradient[:0].copy()
        return server.latent, server.known

    def _request(
        self,
        server_round: int,
        users: IntArray,
        send_weights: bool = False,
        checkpoint: bool = False,
        run: str = "",
    ) -> RelayRequest:
        due = bool((self.has_average[users] < self.average_round).any())
        return RelayRequest(
            server_round,
            users,
            self.gradient[users],
            self.gradient_round[users],
            self.rate,
            self.average.numpy() if due and self.average is not None else None,
            self.average_round if due else 0,
            send_weights,
            checkpoint,
            run,
        )

    def read(self, request: RelayRequest, content: RecordDict) -> RelayReply:
        return RelayReply.from_record(content, request, self.weight_shape)

    def reply_bytes(self, requests: Collection[RelayRequest]) -> int:
        latent = max((request.gradient.size for request in requests), default=0)
        averages = any(request.send_weights for request in requests)
        rows, size = self.weight_shape
        return reply_bytes(latent + (rows * (size + 1) if averages else 0))

    def step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Keep the gradients for users, and the mean of the weights that they sent."""
        relay, gradients = self.relay, gradient.cpu().numpy()
        self._delivered(self.answered)
        self.rate = rate
        for request in (relay.requests[node] for node in self.answered):
            users = request.users
            self.gradient[users] = gradients[users]
            self.gradient_round[users] = server_round
            self.traffic[users, ANSWERED] += 1
            self.count("up", "latent", users, self.settings.latent_size)
            if request.send_weights:
                self.count("up", "weights", users, math.prod(self.weight_shape))
        self.take_mean(server_round, relay.answers.values())
        return ""

    def _delivered(self, nodes: Iterable[int]) -> None:
        # Payload is what a user alone would be sent, whatever its cohort shares: its gradient, and
        # the averaged weights in full.
        for request in (self.relay.requests[node] for node in nodes):
            users = request.users
            waited = users[request.gradient_round > 0]
            self.count("down", "gradient", waited, self.settings.latent_size)
            self.gradient_round[users] = 0
            if request.average is not None:
                lacking = users[self.has_average[users] < request.average_round]
                self.count("down", "weights", lacking, request.average.size)
                self.has_average[users] = request.average_round

    def take_mean(self, server_round: int, replies: Collection[RelayReply]) -> None:
        """Average the weights of the replies; rows that nobody holds are NaN."""
        sums = [reply.weight_sum for reply in replies if reply.weight_sum is not None]
        holders = [reply.holders for reply in replies if reply.holders is not None]
        if sums:
            total = np.stack(sums).sum(0, dtype=np.float64)
            count = np.stack(holders).sum(0, dtype=np.int64)[:, None]
            mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
            self.average = torch.from_numpy(mean.astype(np.float32))
            self.average_round = server_round

    def finish(self, server_round: int) -> None:
        """Deliver the last gradients."""
        relay = self.relay
        relay.requests = {
            node: self._request(server_round, users[~self.left[users]])
            for node, users in relay.numbers(relay.session.present()).items()
            if not self.left[users].all()
        }
        self._delivered(relay.send(server_round, "train.finish").values)


class NoSum(NamedTuple):
    """The reason why a round has no sum of gradients, so that nobody steps."""

    text: str  # One line for a person
    nodes: tuple[int, ...] = ()  # SuperNodes that it is for want of, as far as they are known

    @classmethod
    def without(cls, missing: Sequence[int]) -> NoSum:
        return cls(f"missing from {len(missing)} SuperNode(s)", tuple(missing))


class CommonLayer(Layer):
    """One layer of all users: its last step, and which SuperNodes have taken that step."""

    others = (*Layer.others, "last")
    last = 0  # round of the last step; 0: the first weights
    no_sum: NoSum | None = None  # of the current round

    def __init__(self, relay: SplitGradientRelay, settings: UserSettings) -> None:
        super().__init__(relay, settings)
        self.at = dict[int, int]()  # round of the last step of each SuperNode's layer
        self.keys = dict[int, MemberKey]()  # of SuperNodes that have enrolled
        self.stopped = Counter[int]()  # steps that SuperNodes stopped, by their users
        self.sum = (MaskedSum if relay.section.aggregation == MASKED else PlainSum)(relay, self)
        self._go_back(0)
        self._ask_anew(0)

    def _go_back(self, server_round: int) -> None:
        self.last, self.before = server_round, NEVER  # rounds of the last two steps
        # [f, w] that the last was taken with, or the same under pads
        self.total: FloatArray | HiddenSum | None = None
        self.rate = 0.0  # of the last

    def _ask_anew(self, server_round: int) -> None:
        self.asked_round = server_round  # for which latent vectors were asked
        self.requests = dict[int, LatentRequest]()
        self.came = dict[int, FloatArray]()  # [p, h] of users that train
        self.rejected = list[Rejected]()

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from a state; vectors that were asked for ahead are asked for again."""
        super().load_state_dict(state)
        self._go_back(self.last)
        self._ask_anew(0)
        self.sum.forget()

    # Latent vectors

    def latents(self, server_round: int) -> tuple[Tensor, Tensor]:
        """Return the vectors that were asked for ahead, and those of new SuperNodes."""
        relay, session = self.relay, self.relay.session
        hosted = relay.hosted(server_round)
        if self.asked_round != server_round:
            self._ask_anew(server_round)
        self.requests = {node: asked for node, asked in self.requests.items() if node in hosted}
        session.rejected += few(self.rejected)
        new = {node: users for node, users in hosted.items() if node not in self.requests}
        users = relay.drawn(server_round, new)
        self._ask({node: (drawn, NOBODY) for node, drawn in users.items() if drawn.size})
        asked = {node: request.users for node, request in self.requests.items()}
        session.asked = {node: users for node, users in asked.items() if users.size}
        if not session.asked:
            raise relay.nobody_drawn(server_round)
        self.came = {node: rows for node, rows in self.came.items() if node in session.asked}
        session.must_have(server_round, Replies(dict(self.came), list(session.rejected)))
        server, self.answered = relay.server, self.came
        latent, heard = server.latent.clone(), torch.zeros_like(server.known)
        for node, came in self.came.items():
            users_, rows = torch.from_numpy(self.requests[node].users), _tensor(came)
            unknown = ~server.known.cpu()[users_]
            if unknown.any():  # the first word from them
                server.receive(users_[unknown], rows[unknown])
            latent[users_.to(server.device)] = rows.to(server.device)
            heard[users_.to(server.device)] = True
        return latent, heard

    def look_ahead(self, server_round: int) -> None:
        """Ask for the next round's latent vectors, and for vectors that evaluate this round."""
        relay = self.relay
        if self.no_sum is not None:
            self._note_stopped(self.no_sum.nodes)
        # All present SuperNodes are asked: measuring needs no training, and all write checkpoints.
        self._ask_anew(server_round + 1)
        hosted = relay.numbers(relay.session.hosted())
        nobody = dict.fromkeys(hosted, NOBODY)
        is_last = server_round >= relay.session.rounds
        drawn = nobody if is_last else relay.drawn(server_round + 1, hosted)
        measured = hosted if relay.evaluates(server_round) else nobody
        asked = {node: (drawn[node], measured[node]) for node in hosted}
        self._ask(asked, saves=relay.session.is_due(server_round))

    def _ask(self, asked: Mapping[int, tuple[IntArray, IntArray]], *, saves: bool = False) -> None:
        """Ask SuperNodes for vectors of users that train, and of users that are measured."""
        if not asked:
            return
        relay, session, settings = self.relay, self.relay.session, self.settings
        copied, copy = self._copy(list(asked))
        relay.requests = {
            node: LatentRequest(
                self.asked_round,
                users,
                measured,
                self.advance(node, copied, copy),
                # Without dropout one vector will do for both.
                trains=bool(users.size) and (settings.dropout > 0 or not measured.size),
                checkpoint=saves,
                run=session.checkpoints.run,
            )
            for node, (users, measured) in asked.items()
        }
        self.requests |= relay.requests
        contents = {node: request.to_record() for node, request in relay.requests.items()}
        _add_entries(contents, self.sum.entries(self.asked_round, list(contents)))
        replies = session.exchange.send(
            contents,
            server_round=self.asked_round,
            timeout=session.timeout,
            read=lambda node, content: self.read(relay.requests[node], content),
            max_reply_bytes=self.reply_bytes(relay.requests.values()),
        )
        relay.answers, self.rejected = replies.values, replies.rejected
        session.members.note(replies.rejected)
        for node, reply in replies.values.items():
            request = relay.requests[node]
            self._took_step(node, request)
            if reply.measured is not None:
                relay.server.receive(torch.from_numpy(request.measured), _tensor(reply.measured))
            if reply.latent is not None:
                self.came[node] = reply.latent
            elif reply.measured is not None:
                self.came[node] = reply.measured[np.isin(request.measured, request.users)]

    def read(self, request: LatentRequest, content: RecordDict) -> LatentReply:
        return LatentReply.read(
            content,
            server_round=request.server_round,
            layer_round=request.advance.layer_round,
            trains=request.trains,
            measures=bool(request.measured.size),
            p=request.users.size,
            m=request.measured.size,
            h=self.settings.latent_size,
        )

    def reply_bytes(self, requests: Collection[LatentRequest]) -> int:
        users = max((one.users.size + one.measured.size for one in requests), default=0)
        return reply_bytes(users * self.settings.latent_size)

    # The last step, and SuperNodes that lack it

    def can_go_on(self, node: int) -> bool:
        """Whether a SuperNode has the last step, or can take it with the sum."""
        at = self.at.get(node, 0)
        return at == self.last or (at == self.before and self.total is not None)

    def advance(self, node: int, copied: int, copy: Bytes | None) -> Advance:
        """Return the sum or copy that brings a SuperNode's layer to the last step."""
        at = self.at.get(node, 0)
        copy = None if self.can_go_on(node) else copy
        total = None if at == self.last or self.before not in (at, copied) else self.total
        hidden, total = (total, None) if isinstance(total, HiddenSum) else (None, total)
        return Advance(self.last, self.before, self.rate, total is not None, total, hidden, copy)

    def _copy(self, nodes: Iterable[int]) -> tuple[int, Bytes | None]:
        """Fetch a copy of the layer if a SuperNode needs it; return the copy's round, too."""
        if all(map(self.can_go_on, nodes)):
            return NEVER, None
        hosted = self.relay.session.hosted()
        if not any(map(self.can_go_on, hosted)):
            newest = max(self.at.get(node, 0) for node in hosted)
            lost = "the layer of round %d is lost: all go on from round %d"
            LOG.warning(lost, self.last, newest)
            self._go_back(newest)
        request = RecordDict({CONFIG: ConfigRecord()})
        for donor in filter(self.can_go_on, hosted):
            reply = self.ask_one(donor, "train.copy_layer", request, CopyReply.read)
            if reply is not None and reply.layer_round == self.at[donor]:
                self.ledger.count("up", "copy", reply.copy.nbytes)
                return reply.layer_round, reply.copy
        return NEVER, None

    def ask_one(
        self, node: int, message_type: str, request: RecordDict, read: Callable[[RecordDict], T]
    ) -> T | None:
        """Ask one SuperNode, and return its answer if it gives one."""
        replies = self.relay.session.send(
            {node: request},
            self.asked_round,
            lambda _, content: read(content),
            message_type=message_type,
            max_reply_bytes=setup_bytes(),
        )
        return replies.values.get(node)

    def _took_step(self, node: int, request: LatentRequest) -> None:
        advance, measured = request.advance, request.measured
        self.at[node] = advance.layer_round
        total = advance.hidden if advance.total is None else advance.total
        for kind, sent in (("sum", total), ("copy", advance.copy)):
            if sent is not None:
                self.ledger.count("down", kind, sent.nbytes)
                self.traffic[measured, DOWN] += sent.nbytes // max(1, measured.size)
        if measured.size:
            self.count("up", "measured", measured, self.settings.latent_size)

    # The sum

    def step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Have the SuperNodes' gradients by the layer added up for the next message."""
        gradients, size, requests = gradient.cpu().numpy(), self.settings.latent_size, {}
        for node in self.came:
            users = self.requests[node].users
            if self.requests[node].trains:  # otherwise counted as vectors to be measured
                self.count("up", "latent", users, size)
            self.traffic[users, ANSWERED] += 1
            self.count("down", "gradient", users, size)
            requests[node] = GradientRequest(server_round, users, gradients[users], self.last)
        total, self.no_sum = self.sum.add(server_round, requests), None
        if isinstance(total, NoSum):
            self.no_sum = total
            return f"no sum of gradients: {total.text}"
        self.last, self.before = server_round, self.last
        self.total, self.rate = total, rate
        return ""

    def added_up(self, users: IntArray, nbytes: int) -> None:
        self.ledger.count("up", "sum", nbytes)
        self.traffic[users, UP] += nbytes // users.size

    def _note_stopped(self, nodes: Collection[int]) -> None:
        members = self.relay.members
        # If most of them have, it is no fault of theirs.
        for node in nodes if 2 * len(nodes) < len(self.answered) else ():
            self.stopped.update(members.clients[node])
            if why := self.refusal(members.clients[node]):
                LOG.warning("node %d and its %d users: %s", node, len(members.clients[node]), why)
                members.forget(node)

    def refusal(self, users: Iterable[int]) -> str:
        """Refuse a SuperNode that stops steps, even under another id."""
        if max((self.stopped[user] for user in users), default=0) < MOST_STOPPED:
            return ""
        return f"it stopped {MOST_STOPPED} steps of all: left out until another SuperNode joins"

    def check(self, answer: EnrolmentReply) -> None:
        self.sum.check(answer)

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        super().enrolled(node, answer)
        self.stopped.clear()
        self.at[node] = answer.layer_round or 0
        if answer.key is not None:
            self.keys[node] = answer.key

    def finish(self, server_round: int) -> None:
        content = RecordDict({CONFIG: ConfigRecord({SERVER_ROUND: server_round})})
        self.relay.session.tell_all(server_round, content, "train.finish")


def _tensor(latent: NDArray[np.generic]) -> Tensor:
    return torch.tensor(latent, dtype=torch.float32)


def _add_entries(contents: Mapping[int, RecordDict], entries: Mapping[int, Config]) -> None:
    for node, more in entries.items():
        own = contents[node].config_records[CONFIG]
        contents[node][CONFIG] = ConfigRecord({**own, **more})


class UserMembership(Membership):
    """The users of each SuperNode; their weights have one shape."""

    def __init__(self, layer: OwnLayer | CommonLayer) -> None:
        super().__init__()
        self.layer = layer

    def question(self, resume: Resume) -> RecordDict:
        before = self.layer.users_before if resume.server_round else None
        return EnrolmentRequest(self.layer.settings, resume, before).to_record()

    def enrolment_round(self, server_round: int) -> int:
        """Return the round after which the run was resumed, whenever newcomers come."""
        return self.resume.server_round

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        answer = EnrolmentReply.read(content, num_nodes=self.layer.size)
        self.layer.check(answer)
        return answer

    def most_bytes(self) -> int:
        return max(super().most_bytes(), ROOM + NUMBER * self.layer.size)

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
        if self.clients and answer.weight_shape != self.layer.weight_shape:
            return f"its weights are {answer.weight_shape}, others have {self.layer.weight_shape}"
        return self.layer.refusal(answer.users.tolist())

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        self.layer.enrolled(node, answer)
        if answer.handled == 0 and self.layer.begin_anew(answer.users):
            LOG.warning("node %d has lost its state: its users begin anew", node)


# The sums of a common layer ----------------------------------------------------------------------


class PlainSum:
    """Sums of gradients that the server reads."""

    def __init__(self, relay: SplitGradientRelay, layer: CommonLayer) -> None:
        self.relay, self.layer = relay, layer

    def check(self, answer: EnrolmentReply) -> None:
        """Refuse an enrolment with which a SuperNode could not take part in the sums."""

    def entries(self, server_round: int, nodes: Sequence[int]) -> Mapping[int, Config]:
        """Return further entries for SuperNodes that are asked for latent vectors."""
        return {}

    def forget(self) -> None:
        """Forget what belongs to sums of an earlier start of the run."""

    def add(self, server_round: int, requests: Requests) -> FloatArray | HiddenSum | NoSum:
        """Ask for the sums of gradients; return the whole sum, or why there is none."""
        layer, session = self.layer, self.relay.session
        f, w = layer.weight_shape
        replies = session.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: SumReply.read(
                content, server_round=server_round, f=f, w=w, p=requests[node].users.size
            ),
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(f * w),
        )
        total = np.zeros(layer.weight_shape)
        for node in session.members.present(replies.values):
            total += bounded(replies.values[node].total, self.relay.section.limit)
            layer.added_up(requests[node].users, replies.values[node].total.nbytes)
        missing = [node for node in requests if node not in replies.values]
        return NoSum.without(missing) if missing else total.astype(np.float32)


class MaskedSum(PlainSum):
    """Sums of gradients under masks and pads, which the server cannot read."""

    def __init__(self, relay: SplitGradientRelay, layer: CommonLayer) -> None:
        super().__init__(relay, layer)
        registry = relay.section.registry
        # Under pads two sums tell the server nothing, however few SuperNodes they differ by.
        self._parties = None if registry is None else PartySums(registry, differ_by=1)

    @cached_property
    def sums(self) -> SecureSum:
        session = self.relay.session
        return SecureSum(
            session.exchange,
            limit=self.relay.section.limit,
            resolution=2.0**-LEAST_FRACTION_BITS,
            server=self._parties or SumServer(dropout=0.0),
            timeout=session.timeout,
            guard=True,
        )

    def forget(self) -> None:
        if self._parties is None:
            self.__dict__.pop("sums", None)

    def check(self, answer: EnrolmentReply) -> None:
        """Refuse a SuperNode whose public key no other SuperNode would take."""
        if (key := answer.key) is None:
            raise MalformedReplyError("key-public: missing; masked sums need it")
        if self._parties is not None:
            run = str(self.relay.session.exchange.grid.run.run_id).encode()
            try:
                check_signed(self._parties.registry, run, key.public, key.signed_by)
            except RefusedError as error:
                raise MalformedReplyError(str(error)) from error

    def entries(self, server_round: int, nodes: Sequence[int]) -> Mapping[int, Config]:
        """Have the common key sealed for SuperNodes that do not have it."""
        keys, hosted = self.layer.keys, list(self.relay.session.hosted())
        holders = [node for node in hosted if keys[node].key_check.any()]
        checks = {node: keys[node].key_check.tobytes() for node in holders}
        having = [node for node in holders if checks[node] == checks[holders[0]]]
        lacking = [node for node in nodes if node not in having]
        for donor in (having or hosted) if lacking else ():
            others = [node for node in lacking if node != donor]
            public = np.array([keys[node].public for node in others], np.uint8).reshape(-1, 32)
            signed = None
            if self._parties is not None:
                rows = [keys[node].signed_by for node in others]
                signed = np.array(rows, np.uint8).reshape(-1, SIGNED_BY)
            request = ShareKeyRequest(public, not holders, signed).to_record()
            read = partial(ShareKeyReply.read, k=len(others))
            reply = self.layer.ask_one(donor, "train.share_key", request, read)
            if reply is not None:
                for node in (donor, *others):
                    keys[node].key_check = reply.key_check
                sender = keys[donor].public, keys[donor].signed_by
                return {
                    node: KeyPacket(packet, *sender).to_config()
                    for node, packet in zip(others, reply.packets, strict=True)
                }
        return {}

    def add(self, server_round: int, requests: Requests) -> HiddenSum | NoSum:
        """Have the sums added up under masks; return the padded sum, or why there is none."""
        session, sums, layer = self.relay.session, self.sums, self.layer
        clients = session.members.clients
        count, checks = (IN_SUM, 0) if self._parties is None else (AS_PARTY, CHECKS)
        asked = {node: clients[node][:count] for node in requests}
        every = {one for local in asked.values() for one in local}
        if set(sums.clients) != every:
            sums.give_up()
        sums.prepare(server_round, asked)
        length = math.prod(layer.weight_shape) + checks
        ring = sums.ring
        entries = sums.requests(length, GRADIENTS, detail_of(server_round, layer.last), padded=True)
        contents = {node: requests[node].to_record() for node in entries}
        _add_entries(contents, entries)
        replies = session.send(
            contents,
            server_round,
            sums.take,
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(length, IN_SUM),
        )
        missing = [node for node in contents if node not in replies.values]
        for node in replies.values:
            layer.added_up(requests[node].users, 8 * length)
        result = sums.close_padded(server_round)
        rejected = sums.take_rejected()
        session.rejected += rejected
        if missing:
            return NoSum.without(missing)
        if isinstance(result, Skipped):
            silent = tuple({one.node_id for one in rejected} & requests.keys())
            return NoSum(str(result.reason), silent)
        if lost := every.difference(result.contributors.tolist()):
            text = f"{len(lost)} of {len(every)} parties were left out"
            nodes = (node for node, local in asked.items() if not lost.isdisjoint(local))
            return NoSum(text, tuple(nodes))
        mask = MaskRequest.from_config(next(iter(entries.values())))
        return HiddenSum(
            result.contributors.size, mask.run_id, mask.server_round, ring, result.total
        )
