"""LPGNN: each user sends its features once, under noise of its own; the server trains on them.

Sajadmanesh and Gatica-Perez, "Locally Private Graph Neural Networks", CCS 2021. Every client, a
*user*, is one node and holds its features ``x``, numbers from ``low`` to ``high``; the server has
the edges and, as in nFedGNN, the labels of some nodes. With a budget ``e``:

1. user: the *multi-bit encoder* samples ``m = max(1, min(d, e / 2.18))`` of ``d`` features. For
   each of these it is +1 with the chance ``1 / (e^(e/m) + 1) + s (e^(e/m) - 1) / (e^(e/m) + 1)``,
   where ``s = (x - low) / (high - low)``, else -1; for the others it is 0 (`Encoder.encode`);
2. user -> server: these signs ``x*``, once. A user that is asked again sends the same signs;
3. server: the *rectifier* ``x' = d (high - low) / (2 m) (e^(e/m) + 1) / (e^(e/m) - 1) x*
   + (low + high) / 2``, whose mean over the noise is ``x`` (`Encoder.rectify`);
4. server: *KProp*, ``K`` steps of ``X <- D^(-1/2) A D^(-1/2) X``, without self-loops (`smooth`);
5. server: a GNN of two layers on the smoothed rows. A round is one step of Adam, and no message.

Labels can be the users', too (``strategy.label_epsilon``). A user whose node trains or validates
then sends its label, which *randomised response* keeps with the chance ``e^e / (e^e + c - 1)``. The
server trains by *Drop*: its targets are the commonest labels after a few steps of KProp, and its
predictions take the same way, through the response's matrix and KProp (`drop_loss`).
``privacy.epsilon`` is the budget of both; features have what is left.

Unlike the paper: the smoothed rows are scaled to a mean square of 1, since at a small budget they
are a million times as large as at a large one; Drop spreads training labels alone, and a node that
no label reaches keeps its own. Without a budget users send their features as they are.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flower_graph.client.state import CohortState, Tensors, places_of
from flower_graph.config.common import RunConfig, StrategySection, checkpoint_settings
from flower_graph.config.rules import (
    ABOVE_ZERO,
    BELOW_ONE,
    FINITE,
    NOT_NEGATIVE,
    SHARE,
    at_least,
    choice,
)
from flower_graph.config.schema import section, setting
from flower_graph.data.description import NewGraph, check_rows, server_graph
from flower_graph.data.folders import party
from flower_graph.data.graph import take_rows
from flower_graph.data.sources.datasets import cached_data
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, DivergedError, MalformedReplyError, RefusedError
from flower_graph.flower_compat import Mod, NumPyClient
from flower_graph.method.base import FinishedRun, Method, Partition
from flower_graph.models import CentralModel, build_server_model
from flower_graph.ops.adam import Adam
from flower_graph.ops.graph import Adjacency, adjacency, propagate
from flower_graph.outputs.build import form_of
from flower_graph.outputs.client import ClientOutputs, client_folders, node_figures
from flower_graph.outputs.files import NO_CLIENT, Embeddings, Predictions, Snapshot, role_of
from flower_graph.privacy.noise import fresh_chances
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import chances, seeded
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy, Session
from flower_graph.storage.reading import StateDict
from flower_graph.wire.arrays import Answer, Config, IntArray, Parameters
from flower_graph.wire.averaging import Enrolment
from flower_graph.wire.codec import Exact, Known, Message, Resume, Whole
from flower_graph.wire.codec import Tensor as Entries
from flower_graph.wire.counts import counted
from flower_graph.wire.keys import CHECKPOINT, ROLES, SERVER_ROUND, USERS
from flower_graph.wire.ledger import reply_bytes

LOG = logging.getLogger(__name__)
APP = "lpgnn"
SENT, RANDOM = FEATURES = ("sent", "random")
BEST = 2.18  # budget of a sampled feature with which the estimate varies least
AT_A_TIME = 1 << 22  # numbers that are encoded together
FEATURES_OF_A_USER = 1 << 32  # at most, so that each random feature has a number of its own
TINY = 1e-12
KEPT = ("sent", "known", "y")  # of the server's state
Draw = Callable[..., NDArray[np.float64]]  # uniform numbers of a shape, from 0 on and below 1

# The mechanism -----------------------------------------------------------------------------------


class Encoder(NamedTuple):
    """The multi-bit mechanism (steps 1 and 3); without ``epsilon`` features go as they are."""

    epsilon: float | None
    low: float = 0.0
    high: float = 1.0
    sampled: int | None = None

    def of(self, d: int) -> tuple[int, float]:
        """Return ``m`` of ``d`` features, and ``(e^(e/m) - 1) / (e^(e/m) + 1)``, less than 1."""
        assert self.epsilon is not None
        m = max(1, min(d, self.sampled or math.floor(self.epsilon / BEST)))
        return m, math.tanh(self.epsilon / m / 2)  # the quotient, which does not overflow

    def chance(self, share: NDArray[np.float64], k: float) -> NDArray[np.float64]:
        """Return the chance of +1 at ``s`` (step 1), where ``1 / (e^(e/m) + 1) = (1 - k) / 2``."""
        return (1 - k) / 2 + share * k

    def encode(self, x: Tensor, draw: Draw) -> Tensor:
        """Encode features ``[p, d]`` as int8 -1, 0 or 1."""
        x = x.clamp(self.low, self.high)
        if self.epsilon is None:
            return x
        (p, d), (m, k) = x.shape, self.of(x.shape[1])
        # Those of the m least numbers: any m features are as likely as any other
        places = np.argpartition(draw(p, d), m - 1, axis=1)[:, :m] if m < d else np.arange(d)[None]
        share = (x.double().numpy() - self.low) / (self.high - self.low)
        chosen = np.take_along_axis(share, np.broadcast_to(places, (p, m)), 1)
        signs = np.where(draw(p, m) < self.chance(chosen, k), 1, -1).astype(np.int8)
        result = np.zeros((p, d), np.int8)
        np.put_along_axis(result, np.broadcast_to(places, (p, m)), signs, 1)
        return torch.from_numpy(result)

    def rectify(self, signs: Tensor) -> Tensor:
        """Estimate features ``[n, d]`` from what was sent, without bias."""
        if self.epsilon is None:
            return signs
        d = signs.shape[1]
        m, k = self.of(d)
        scale, middle = d * (self.high - self.low) / (2 * m * k), (self.low + self.high) / 2
        return signs.float() * scale + middle


# Settings ----------------------------------------------------------------------------------------


@dataclass
class LPGNNModel:
    """The server's network."""

    name: str = setting("gcn", choice("gcn", "gat", "sage"), help="the graph neural network")
    hidden: int = setting(16, at_least(1), help="numbers in the hidden layer; `gat`: of each head")
    heads: int = setting(8, at_least(1), help="attention heads; `gat` only")
    dropout: float = setting(0.5, BELOW_ONE, help="share of entries dropped in training")


@dataclass
class LPGNNSection(StrategySection):
    """Settings of what users send, of the smoothing, and of the training."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    participation: float = setting(1.0, SHARE, help="share of the users that a round counts")
    low: float = setting(
        0.0, FINITE, help="the least that a feature is; what is less is sent as this"
    )
    high: float = setting(
        1.0, FINITE, help="the most that a feature is; what is more is sent as this"
    )
    sampled: int | None = setting(None, at_least(1))
    """features that a user sends under noise, m; null: as many as make the estimate vary least"""
    hops: int = setting(8, at_least(0), help="steps of KProp over features, K")
    features: str = setting(SENT, choice(*FEATURES))
    """`random`: users send coin flips in the place of their features, to compare with"""
    label_epsilon: float | None = setting(None, ABOVE_ZERO)
    """part of `privacy.epsilon` for a user's label; null: the server has the labels"""
    label_hops: int = setting(2, at_least(0), help="steps of KProp over labels, for noisy ones")
    learning_rate: float = setting(0.01, ABOVE_ZERO, help="Adam's step size")
    weight_decay: float = setting(5e-4, NOT_NEGATIVE, help="Adam's L2 weight")


@dataclass
class LPGNNConfig(RunConfig):
    """Everything that a run of LPGNN needs to be repeated."""

    app: str = APP
    model: LPGNNModel = section(LPGNNModel)
    strategy: LPGNNSection = section(LPGNNSection)

    needs_own_nodes = False  # the noise is each user's own
    server_measures = True  # on what it has
    sends_once = True

    def local_steps(self, graphs: object) -> float:
        return 0

    @property
    def encoder(self) -> Encoder:
        """What encodes features with the budget that is left beside that of labels."""
        how, budget = self.strategy, self.privacy.epsilon
        rest = None if budget is None else budget - (how.label_epsilon or 0)
        return Encoder(rest, how.low, how.high, how.sampled)

    def validate(self) -> None:
        super().validate()
        how, budget = self.strategy, self.privacy.epsilon
        self.need(how.low < how.high, "strategy.high", "above strategy.low")
        good = how.label_epsilon is None or (budget is not None and how.label_epsilon < budget)
        self.need(good, "strategy.label_epsilon", "null, or less than privacy.epsilon")
        self.check_averages((), noised=(APP,))


# Formulas ----------------------------------------------------------------------------------------


def smoother(edge_index: Tensor, n: int) -> Adjacency:
    """Normalise symmetrically without self-loops: ``D^(-1/2) A D^(-1/2)``."""
    root = torch.bincount(edge_index[1], minlength=n).clamp(min=1).float().rsqrt()
    return adjacency(edge_index, root[edge_index[0]] * root[edge_index[1]], n)


def smooth(graph: Adjacency, rows: Tensor, hops: int) -> Tensor:
    """Take ``hops`` steps of KProp with rows ``[n, d]`` (step 4)."""
    for _ in range(hops):
        rows = propagate(graph, rows)
    return rows


def response_matrix(classes: int, epsilon: float) -> Tensor:
    """Return the chances ``[c, c]`` of each answer, column, to each true label, row."""
    other = 1 / (math.exp(min(epsilon, 700)) + classes - 1)
    return torch.full((classes, classes), other).fill_diagonal_(1 - (classes - 1) * other)


def respond(y: Tensor, classes: int, epsilon: float, draw: Draw) -> Tensor:
    """Answer with labels ``[p]``, or by chance with others, each as likely."""
    keep = float(response_matrix(classes, epsilon)[0, 0])
    change, shift = torch.from_numpy(draw(2, len(y)))
    other = (y + 1 + (shift * (classes - 1)).long()) % classes
    return torch.where(change < keep, y, other)


def drop_targets(graph: Adjacency, y: Tensor, train: Tensor, classes: int, hops: int) -> Tensor:
    """Return each training node's commonest label after KProp, ``[n]``; its own without any."""
    # y [n] noisy labels, train [n] bool; of the other nodes the result means nothing
    start = functional.one_hot(y.clamp(min=0), classes).float() * train[:, None]
    spread = smooth(graph, start, hops)
    return torch.where(spread.sum(1) > 0, spread.argmax(1), y)


def drop_loss(
    graph: Adjacency, logits: Tensor, targets: Tensor, train: Tensor, response: Tensor, hops: int
) -> Tensor:
    """Compute Drop's loss: the cross-entropy of predicted answers after KProp and the targets."""
    # logits [n, c], targets and train [n], response [c, c]
    answers = logits.softmax(1) @ response
    spread = smooth(graph, answers, hops)
    total = spread.sum(1, keepdim=True)
    shares = torch.where(total > 0, spread / total.clamp(min=TINY), answers)
    return functional.nll_loss(shares[train].clamp(min=TINY).log(), targets[train])


# Messages ----------------------------------------------------------------------------------------


class FeatureRequest(Message, down="train"):
    """Server to client: asks for features that the server does not have."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]
    users: Annotated[IntArray, Exact(USERS, "who is meant, and the order of all rows", shape="p")]
    # users whose labels are asked for, too
    labelled: Annotated[IntArray, Exact(shape="q")]


class FeatureReply(Message, up="train"):
    """Client to server: its users' features under their noise, and labels."""

    server_round: Annotated[int, Whole(SERVER_ROUND)]
    features: Annotated[NDArray[np.generic], Entries("arrays/features", shape="p d", dtype="int8")]
    labels: Annotated[IntArray, Exact(shape="q")]  # answers of `labelled`

    def check(self, known: Known) -> None:
        if (encoder := known.get("encoder")) is None:  # at the client
            return
        signs, values = encoder.epsilon is not None, self.features
        good = (
            np.isin(values, (-1, 0, 1))
            if signs
            else (values >= encoder.low) & (values <= encoder.high)
        )
        if not good.all():
            allowed = "-1, 0 and 1" if signs else f"numbers from {encoder.low} to {encoder.high}"
            raise MalformedReplyError(
                f"arrays/features: has {values[~good][0]}, expected {allowed}"
            )
        if ((self.labels < 0) | (self.labels >= known["classes"])).any():
            raise MalformedReplyError(f"labels: expected classes below {known['classes']}")


# Client ------------------------------------------------------------------------------------------


class LPGNNClient(NumPyClient):
    """The users of one SuperNode: features ``x`` ``[p, d]``, numbers ``[p]``, labels ``y`` ``[p]``.

    What a user has sent is in the context (``flower_graph.client.state``), and is what it sends if
    it is asked again. Other arguments are as of ``NodeClient``.
    """

    actions = ("save",)

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        y: Tensor,
        config: LPGNNConfig,
        *,
        classes: int,
        checkpoint_dir: Path | None = None,
        outputs: ClientOutputs | None = None,
    ) -> None:
        if not len(x) == len(users) == len(y) or not len(users):
            raise ValueError(f"x has {len(x)} rows for {len(users)} users; give one each")
        check_rows(x)
        self.users, self._x, self._y, self._config = users.long(), x, y, config
        self._classes, self._encoder = classes, config.encoder
        self.outputs = outputs or ClientOutputs(context)
        self._state = CohortState[Tensors](context, self.users, checkpoint_dir, self._made)

    def _made(self, saved: Tensors | None) -> tuple[Tensors, Tensors]:
        """Return what users have sent; none of them at first."""
        if saved is None:
            kind = torch.float32 if self._encoder.epsilon is None else torch.int8
            nobody = torch.zeros(len(self.users), dtype=torch.bool)
            saved = {"features": torch.zeros(self._x.shape, dtype=kind), "has-sent": nobody}
            saved["label"] = torch.full_like(self.users, -1)
        return saved, saved

    def get_properties(self, config: Config) -> Config:
        resume = Resume.from_config(config)
        if resume.server_round and self._encoder.epsilon is not None:
            raise RefusedError("an older state may lack what was sent since: fresh noise would be")
        self._state.restore(resume)
        self._state.look()  # one that cannot be read is an error: nobody begins anew
        return Enrolment(self.users.tolist(), handled=self._state.version).to_config()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = FeatureRequest.from_numpy(parameters, config)
        users, labelled = (places_of(self.users, one) for one in (request.users, request.labelled))
        budget = self._config.strategy.label_epsilon
        if len(labelled) and budget is None:
            raise RefusedError("labels are asked for without strategy.label_epsilon: none is sent")
        with self._state.opened() as held:
            # What was sent once is sent again as it was: fresh noise would spend the budget again.
            for part in users[~held["has-sent"][users]].split(
                max(1, AT_A_TIME // self._x.shape[1])
            ):
                held["features"][part] = self._encoder.encode(self._features(part), fresh_chances)
                held["has-sent"][part] = True
            new = labelled[held["label"][labelled] < 0]
            if len(new) and budget is not None:
                held["label"][new] = respond(self._y[new], self._classes, budget, fresh_chances)
            features, labels = held["features"][users].numpy(), held["label"][labelled].numpy()
        return FeatureReply(request.server_round, features, labels).to_numpy(len(users))

    def _features(self, places: Tensor) -> Tensor:
        """Return some users' features ``[q, d]``, or coin flips that do not depend on them."""
        x, how = take_rows(self._x, places).to_dense(), self._config.strategy
        if how.features == SENT:
            outside = float(((x < how.low) | (x > how.high)).double().mean())
            if outside:
                words = "%.1f %% of the features here are not from strategy.low to strategy.high"
                LOG.warning(words + ": they are cut off there", 100 * outside)
            return x
        numbers = self.users[places][:, None] * FEATURES_OF_A_USER + torch.arange(x.shape[1])
        heads = chances(numbers, self._config.seed, "random-features") < 0.5
        return torch.where(heads, how.low, how.high)

    def save(self, parameters: Parameters, config: Config) -> Answer:
        return [], len(self.users), dict(self._state.save_asked(config))

    def snapshot(self) -> Snapshot:
        return Snapshot(None)


# Server ------------------------------------------------------------------------------------------


class Users(Membership):
    """Who hosts which users of a graph with ``count`` nodes."""

    needs_query = True

    def __init__(self, count: int) -> None:
        super().__init__(named=True)
        self.count = count

    def read(self, node: int, content: RecordDict) -> Enrolment:
        answer = Enrolment.read(content)
        if wrong := [user for user in answer.clients if user >= self.count]:
            words = f"it hosts user {wrong[0]}, but the graph has nodes 0 to {self.count - 1}"
            raise MalformedReplyError(words)
        return answer


class LPGNN(RoundStrategy[FeatureRequest, FeatureReply]):
    """Server of LPGNN: collects features, and takes a step of training in each round.

    Parameters
    ----------
    data : Data
        Edges, labels and masks, as of ``SplitGradientRelay``.
    config : LPGNNConfig
        The settings of a run.
    features, classes : int
        Numbers that a user sends, and number of classes.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    """

    usual_rounds, asks_to_save = 200, ("train.save", {CHECKPOINT: True})
    _right_in_best: Tensor | None = None  # users that were predicted right in the best round
    _latent: Tensor | None = None  # [n, h] what the first map gives now, for the next step, too

    def __init__(
        self,
        data: Any,
        config: LPGNNConfig,
        *,
        features: int,
        classes: int,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        self.config, self.how, self.num_classes = config, config.strategy, classes
        device, (edges, y, masks) = resolve_device(config.device), server_graph(data)
        if not masks["train"].any():
            raise DataError("train_mask: no node is marked; at least one labelled node is needed")
        # [n] the users whose labels are their own: the server does not have these before
        is_own = self.how.label_epsilon is not None
        self.asks = (masks["train"] | masks["val"]) if is_own else torch.zeros_like(masks["train"])
        self.known = torch.zeros_like(self.asks)  # [n] who has sent
        self.edges, self.y = edges.to(device), torch.where(self.asks, -1, y).to(device)
        self.masks = {role: mask.to(device) for role, mask in masks.items()}
        kind = torch.float32 if config.encoder.epsilon is None else torch.int8
        self.sent = torch.zeros(len(y), features, dtype=kind, device=device)
        split = build_server_model(classes=classes, seed=config.seed, **vars(config.model))
        with seeded(torch.device("cpu"), config.seed, "first-layer"):
            self.model = CentralModel(features, split, 0.0).to(device)
        rate, decay = self.how.learning_rate, self.how.weight_decay
        self.optimizer = Adam(self.model.parameters(), lr=rate, weight_decay=decay)
        self.names, self.classes = getattr(data, "names", None), getattr(data, "classes", None)
        places = checkpoint_dir, checkpoint_every
        super().__init__(Session(Users(len(y)), self.how, config.seed, *places))

    def round(self, server_round: int) -> RoundReport:
        """Ask for what is lacking (steps 1 and 2), and train with what is there (3 to 5)."""
        session, hosted = self.session, self.session.gather(server_round)
        numbers, drawn = session.members.numbers(), torch.zeros_like(self.known)
        drawn[session.draw(len(drawn), server_round)] = True
        session.asked = {node: numbers[node][drawn[numbers[node]].numpy()] for node in hosted}
        self._collect(server_round)
        used = drawn & self.known
        if not self.known.any():
            session.must_have(server_round, ())
        trains = self.masks["train"] & (self.y >= 0) & used.to(self.y.device)
        skipped = "" if trains.any() else "no user whose label is known has sent its features"
        loss = math.nan if skipped else self._step(server_round, trains)
        accuracy = self._measure()
        clients = used.nonzero().flatten().numpy() if not skipped else np.zeros(0, np.int64)
        nobodys = np.ones(len(drawn), bool)
        nobodys[np.concatenate([*numbers.values()])] = False
        left_out = {"no SuperNode hosts it": np.flatnonzero(nobodys)}
        who = session.participation(clients, left_out=left_out, no_use=skipped)
        figures = {"loss": loss, "cross_entropy": loss, "regulariser": math.nan}
        return self.report(server_round, who, accuracy, skipped=skipped, **figures)

    def _collect(self, server_round: int) -> None:
        """Ask the round's users for features that are not here, whatever comes of the others'."""
        requests, d = dict[int, FeatureRequest](), self.sent.shape[1]
        for node, asked in self.session.asked.items():
            users = np.asarray(asked, np.int64)
            lacking = users[~self.known[users].numpy()]
            if lacking.size:
                own = lacking[self.asks[lacking].numpy()]
                requests[node] = FeatureRequest(server_round, lacking, own)

        def read(node: int, content: RecordDict) -> FeatureReply:
            sizes = {"p": requests[node].users.size, "d": d, "q": requests[node].labelled.size}
            known = {"encoder": self.config.encoder, "classes": self.num_classes}
            return FeatureReply.read(content, server_round=server_round, **sizes, **known)

        most = reply_bytes(d * max((one.users.size for one in requests.values()), default=0))
        contents = {node: one.to_record() for node, one in requests.items()}
        replies = self.session.send(contents, server_round, read, max_reply_bytes=most)
        for node, reply in replies.values.items():
            local, own = requests[node].users, requests[node].labelled
            self.sent[local] = torch.tensor(reply.features).to(self.sent)
            self.y[own] = torch.tensor(reply.labels).to(self.y)
            self.known[local] = True
            self.session.ledger.count("up", "features", local.size * d * self.sent.element_size())
            self.__dict__.pop("smoothed", None)
            self._latent = None

    # Training

    @cached_property
    def smoothed(self) -> tuple[Tensor, Adjacency, Tensor, Tensor]:
        """The edges among users that have sent; KProp's matrix; smoothed rows; Drop's targets."""
        known, hops = self.known.to(self.y.device), self.how.label_hops
        edges = self.edges[:, known[self.edges].all(0)]
        graph = smoother(edges, len(known))
        rows = smooth(graph, self.config.encoder.rectify(self.sent) * known[:, None], self.how.hops)
        rows /= rows.square().mean().sqrt().clamp(min=TINY)
        train = self.masks["train"] & known
        return edges, graph, rows, drop_targets(graph, self.y, train, self.num_classes, hops)

    def _step(self, server_round: int, trains: Tensor) -> float:
        """Take a step of Adam on the loss of some nodes ``[n]``; return the loss."""
        (edges, graph, rows, targets), budget = self.smoothed, self.how.label_epsilon
        latent = self.model.linear(rows) if self._latent is None else self._latent
        self.model.train()
        self.optimizer.zero_grad()
        with seeded(rows.device, self.config.seed, "server-dropout", server_round):
            logits = self.model.server(latent, edges)
        if budget is None:
            loss = functional.cross_entropy(logits[trains], self.y[trains])
        else:
            response = response_matrix(self.num_classes, budget).to(rows)
            loss = drop_loss(graph, logits, targets, trains, response, self.how.label_hops)
        if not torch.isfinite(loss):
            words = f"round {server_round}: the loss is {loss.item()}"
            raise DivergedError(f"{words}; lower strategy.learning_rate")
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def _measure(self) -> dict[str, float]:
        """Predict all nodes, and compare with the labels that the server has."""
        edges, _, rows, _ = self.smoothed
        self.model.eval()
        self._latent = self.model.linear(rows)
        with torch.no_grad():
            self.logits = self.model.server(self._latent, edges)
        self.right = self.logits.argmax(1) == self.y
        self.counts = counted(self.logits, self.y, self.masks, self.counting)
        return {role: self.right[mask].double().mean().item() for role, mask in self.masks.items()}

    # State and outputs

    def fixed_settings(self) -> dict[str, object]:
        own = {k: v for k, v in vars(self.how).items() if not hasattr(StrategySection, k)}
        model = {f"model-{key}": value for key, value in vars(self.config.model).items()}
        return own | model | {"seed": self.config.seed, "epsilon": self.config.privacy.epsilon}

    def saw_best(self) -> None:
        self._right_in_best = self.right

    def state(self) -> dict[str, object]:
        mine = {name: getattr(self, name) for name in KEPT}
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**mine, **parts, "right-then": self._right_in_best}

    def load_state(self, state: StateDict) -> None:
        for name in KEPT:
            setattr(self, name, state[name].to(getattr(self, name)))
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._right_in_best = state["right-then"]
        self.__dict__.pop("smoothed", None)
        self._measure()  # there may be no later round to record which users are right

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def snapshot(self) -> Snapshot:
        """Return predictions, the network behind its first map, and what that map gives."""
        users, server = self.known.nonzero().flatten().numpy(), self.model.server
        nodes = users if self.names is None else np.array(list(self.names))[users]
        role = role_of(*(self.masks[name].cpu()[users] for name in ROLES))
        label, logits = self.y.cpu()[users], self.logits.cpu()[users]
        predictions = Predictions.of(logits, NO_CLIENT, nodes, role, label, self.classes)
        with torch.no_grad():
            rows = self.model.linear(self.smoothed[2]).cpu().numpy()[users]
        client, is_public = np.full(len(users), NO_CLIENT), np.zeros(len(users), bool)
        rows = Embeddings(client, nodes, users, is_public, rows)
        return Snapshot(predictions, [form_of(server, type(server), NO_CLIENT)], rows)

    def figures(self) -> Iterator[list[str]]:
        best, size = self.best, self.sent.shape[1] * self.sent.element_size()
        rounds = ("last", best.last, self.right), ("best", best.number, self._right_in_best)
        return node_figures(self.known, self.masks, rounds, np.tile([1, size, 0], (len(self.y), 1)))


class LPGNNMethod(Method[LPGNNConfig, LPGNN]):
    """Every node of the graph is a client."""

    name, schema = APP, LPGNNConfig
    client, clients = "user", "users"
    heterophily = "LPGNN smooths over edges before and while it trains; not tried on such graphs"
    tables = (APP,)
    attacks = "flower_graph.strategies.lpgnn_attack:FeatureAudit"

    def build_strategy(
        self, config: LPGNNConfig, out: Path | None, folder: party.RunFolder | None = None
    ) -> LPGNN:
        if folder is None:
            data: Any = cached_data(config)
            sizes = {"features": data.x.shape[1], "classes": data.num_classes}
        else:
            data = SimpleNamespace(**folder.tensors, classes=folder.class_names)
            sizes = {"features": folder.features, "classes": folder.classes}
        return LPGNN(data, config, **sizes, **checkpoint_settings(config, out))

    def build_client(self, config: LPGNNConfig, context: Context, out: Path | None) -> LPGNNClient:
        if (folder := party.client_folder(config, context)) is not None:
            x, users = party.read_matrix("x", folder.tensors), folder.tensors[party.USERS]
            y, classes = folder.tensors["y"], folder.classes
        else:
            graph = cached_data(config)
            here = party.share(context, graph.num_nodes)
            x, users = take_rows(graph.x, here), torch.arange(here.start, here.stop)
            y, classes = graph.y[here], graph.num_classes
        more = client_folders(context, out)
        return LPGNNClient(context, x, users, y, config, classes=classes, **more)

    def predict(
        self, config: LPGNNConfig, run: FinishedRun, graph: NewGraph, client: int | None
    ) -> Tensor:
        """Refuse: a new node's row is smoothed over the neighbours that it has in the run."""
        raise DataError("LPGNN classifies the users of a run; a new user needs a new run")

    def num_clients(self, config: LPGNNConfig, folder: party.RunFolder | None = None) -> int:
        return cached_data(config).num_nodes if folder is None else folder.num_clients

    def partition(self, config: LPGNNConfig, *, true_edges: bool = False) -> Partition:
        from flower_graph.data.partition.statistics import node_statistics

        graph = cached_data(config)
        data = party.node_data(graph, labels=True)
        return Partition(node_statistics(graph), data, self.baselines(config))

    def train_mods(self, config: LPGNNConfig) -> list[Mod]:
        return []  # the noise is the client's own


METHOD = LPGNNMethod()
