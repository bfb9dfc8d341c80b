"""nFedGNN: node-level federated learning by relaying the gradients of latent vectors.

"One Node Per User: Node-Level Federated Learning for Graph Neural Networks" (anonymous authors).
Every client, a *user*, is one node of a graph: it holds one feature vector ``x_i`` and its own
model ``f_u(theta_i, .)``, a linear map. The server holds the graph ``A``, the labels of some nodes
and every layer but the first linear map, ``f_s(theta_s, A, .)``.

A round, Algorithm 1 (`relay_round`):

1. user ``i``: ``x'_i = f_u(theta_i, x_i)`` (line 5, `OwnMaps.forward`);
2. user ``i`` -> server: ``x'_i`` (line 6);
3. server: ``Z = f_s(theta_s, A, X')`` (equation 5), ``L = CE(Z, Y) + lambda L_reg`` (equations 3, 6
   and 7), and the gradient ``g_i`` of ``L`` with respect to each ``x'_i`` (line 9,
   `RelayServer.gradients`);
4. server -> user ``i``: ``g_i`` (line 9);
5. user ``i``: the gradient with respect to its weights is ``x_i g_i^T`` (line 11); an Adam step on
   ``theta_i`` (line 12, `OwnMaps.step`);
6. server: an Adam step on ``theta_s`` (line 8, `RelayServer.step`). The paper steps before line 9;
   here both gradients come from one backward pass.

A `Layer` carries steps 1, 2, 4 and 5. Users take step 5, after step 6, when the next message
arrives. There are three forms:

- *own* (`OwnMaps`): each user has a map of its own, the paper's method;
- *averaged*: in every ``K``-th round users also send their weights, and the next message carries
  the mean (`mean_weights`), which a user takes over before its step (`OwnMaps.set_weights`).
  CNFGNN, the paper's baseline, is ``K = 1`` over all users with ``lambda = 0``;
- *common* (`CommonMap`): all users have one map and one Adam, and step with the sum of all users'
  gradients. That is exactly the training of one network in one place. SuperNodes send
  ``sum_i x_i g_i^T``; the server adds the sums; the next message carries the total, and each
  SuperNode steps its copy.

Unlike the paper, or beyond it:

- ``CE`` is the mean over the labelled users; equation 3 has their sum;
- all users start from the same weights (`shared_linear_weight`);
- the schedule of the step size, clipping and the average of the server's weights are extras;
- users drop features with the common map alone.

This file has both halves as tensors, and needs PyTorch alone. Where to change

- the loss: `RelayServer.gradients` and `RelayServer.entropy` (links: ``links.py``); ``L_reg``:
  ``flower_graph/ops/graph.py``;
- the server's model: ``build_server_model`` in ``flower_graph/models.py``;
- the users' model: the maps, `UserModel` of saved models in ``modules.py``, and the shapes in the
  messages of ``client.py``;
- what travels: these messages, and the layers in ``strategy.py``; the common sum: `PlainSum.add`
  and `MaskedSum.add` there.
"""

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from flower_graph.engine.cohort import Judged
from flower_graph.errors import DataError, DivergedError
from flower_graph.ops.active_rows import ActiveRows, adam_, project, sum_by_feature, take
from flower_graph.ops.adam import MOMENTS, Adam, Rates, adam_rows_
from flower_graph.ops.graph import (
    LaplacianTerm,
    SortedEdges,
    csr_tensor,
    laplacian_regulariser,
    laplacian_term,
    pointers,
    weighted_sums,
)
from flower_graph.ops.links import LinkSplit
from flower_graph.rng import chances, generator, seeded
from flower_graph.strategies.nfedgnn.config import NFedGNNConfig, StrategyConfig

Tensors = dict[str, Tensor]
# What Adam changes, and how often it did, by the names in the tensors of a map
ADAM_TENSORS, STEP = ("weight", "exp-avg", "exp-avg-sq"), "step"
ROUND = "round"  # of the common map's last step
BLOCK_ENTRIES = 65_536  # entries per dropout draw; one block fits the cache
FEATURES_OF_A_USER = 1 << 32  # at most, so that each has a number of its own
WARM_UP = 0.1  # share of the rounds in which ``warmup-cosine`` raises the step size
Numbers = TypeVar("Numbers", bound=NDArray[np.floating])


# The users' half ---------------------------------------------------------------------------------


class UserSettings(NamedTuple):
    """Settings of every user's model and optimiser, sent by the server; constant in a run."""

    latent_size: int  # of a latent vector, ``h``
    bias: bool  # whether the linear map has a bias, ``x_i W_i + b_i``
    weight_decay: float  # Adam's, as in ``torch.optim.Adam``
    seed: int  # of the run: all users start from the same weights
    average_over: str = "holders"  # or "all": `OwnMaps.weight_sum`
    dropout: float = 0.0  # share of its features that a user drops; with the common map only


def shared_linear_weight(num_features: int, settings: UserSettings) -> Tensor:
    """Draw the weights from which every user starts, ``[f, h]``; a bias is the last row."""
    weight = torch.empty(num_features, settings.latent_size)
    nn.init.xavier_uniform_(weight, generator=generator(settings.seed, "user-model"))
    return torch.cat([weight, torch.zeros(int(settings.bias), settings.latent_size)])


def unmoved(weight: Tensor, prefix: str = "") -> Tensors:
    """Return weights, and Adam's moments before the first step, by their names in a map."""
    moments = {f"{prefix}{name}": torch.zeros_like(weight) for name in ADAM_TENSORS[1:]}
    return {f"{prefix}{ADAM_TENSORS[0]}": weight, **moments}


class Maps:
    """Linear maps of some users, computed in one batched program.

    Nothing mixes the users, so any division of users into programs gives the same numbers. Where a
    method takes ``users`` ``[p]``, their places here, ``None`` means all of them.
    """

    def __init__(
        self, rows: ActiveRows, settings: UserSettings, tensors: Tensors | None = None
    ) -> None:
        # rows: the users' features that are not zero; tensors: of maps that have stepped already
        self.rows, self.settings = rows, settings
        self.tensors = self.start() if tensors is None else tensors

    def start(self) -> Tensors:
        """Return the tensors before the first step."""
        raise NotImplementedError

    def first(self) -> Tensor:
        features = self.rows.num_features - int(self.settings.bias)
        return shared_linear_weight(features, self.settings).to(self.rows.value.device)

    def _part(self, users: Tensor | None) -> tuple[ActiveRows, Tensor | slice, Tensor | slice]:
        """Return some users' rows, and the places of users and rows in the tensors."""
        every = torch.arange(self.rows.num_users, device=None if users is None else users.device)
        if users is None or torch.equal(users, every):  # the fast path: no copies
            return self.rows, slice(None), slice(None)
        rows, place = take(self.rows, users)
        return rows, users, place


class OwnMaps(Maps):
    """A linear map ``W_i`` for each user.

    Only the rows of ``W_i`` whose feature is not zero in ``x_i`` are stored: the others never touch
    the output, and have no gradient (``ops/active_rows.py``).
    """

    def start(self) -> Tensors:
        shared, rows = self.first(), self.rows
        count = torch.zeros(rows.num_users, dtype=torch.int32, device=shared.device)
        tensors = {STEP: count} | unmoved(shared.index_select(0, rows.feature))
        if self.settings.average_over == "all":  # the rows that users do not store
            tensors |= unmoved(shared, "inactive-")
        return tensors

    def forward(self, users: Tensor | None) -> Tensor:
        """Compute the users' latent vectors ``x_i W_i``, ``[p, h]`` (line 5)."""
        rows, _, place = self._part(users)
        return project(rows, self.tensors["weight"][place])

    def step(self, users: Tensor | None, gradient: Tensor, rate: float) -> None:
        """Take Adam's step with the gradients ``[p, h]`` by the latent vectors (lines 11, 12)."""
        tensors, (rows, chosen, place) = self.tensors, self._part(users)
        rates = Rates(rate, self.settings.weight_decay)
        tensors[STEP][chosen] += 1
        weight, mean, square = (tensors[name][place] for name in ADAM_TENSORS)
        slope = gradient.to(weight.device)
        adam_(rows, weight, mean, square, slope, tensors[STEP][chosen], rates)
        if not isinstance(place, slice):
            for name, value in zip(ADAM_TENSORS, (weight, mean, square), strict=True):
                tensors[name][place] = value
        if "inactive-weight" in tensors:
            # Only weight decay acts on rows that users do not store. All users started from the
            # same row and are averaged together, so one matrix stands for the inactive rows of
            # everybody. It holds only if all users step together.
            weight, mean, square = (tensors[f"inactive-{name}"] for name in ADAM_TENSORS)
            nothing, whole = torch.zeros_like(weight), [0, len(weight)]
            adam_rows_(weight, mean, square, nothing, tensors[STEP][:1].cpu(), whole, rates)

    # Averaged

    def weight_sum(self, users: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sum the users' weights, ``[f, h]``; return the sum and how many users each row has."""
        # With ``"holders"``, a feature's row is summed over the users that have the feature, and
        # the bias stays personal (its count is 0). With ``"all"``, over all users and all rows.
        rows, _, place = self._part(users)
        total, count = sum_by_feature(rows, self.tensors["weight"][place])
        if self.settings.average_over == "all":
            others = (rows.num_users - count).double()[:, None]
            total += others * self.tensors["inactive-weight"].double()
            count = torch.full_like(count, rows.num_users)
        elif self.settings.bias:
            total[-1], count[-1] = 0, 0
        return total, count

    def set_weights(self, users: Tensor | None, mean: Tensor) -> None:
        """Replace the users' weights by ``[f, h]`` means; rows that nobody averaged are NaN."""
        tensors, (rows, _, place) = self.tensors, self._part(users)
        weight = mean.to(tensors["weight"])
        new = weight.index_select(0, rows.feature)
        tensors["weight"][place] = torch.where(new.isnan(), tensors["weight"][place], new)
        if "inactive-weight" in tensors:
            tensors["inactive-weight"].copy_(weight)


class CommonMap(Maps):
    """One linear map ``W`` ``[f, h]`` that all users share.

    Features are dropped in a round of training; round 0 stands for none.
    """

    def __init__(
        self,
        rows: ActiveRows,
        settings: UserSettings,
        numbers: Tensor,
        tensors: Tensors | None = None,
    ) -> None:
        # numbers [n]: the users' in the server's graph
        super().__init__(rows, settings, tensors)
        self.numbers = numbers.to(rows.value.device)
        order = torch.argsort(rows.feature, stable=True).to(torch.int32)
        ptr = pointers(rows.feature, rows.num_features)
        self._by_feature = order, rows.user.index_select(0, order), ptr
        self._last = (0, 0), rows.value  # of a seed and a round

    def start(self) -> Tensors:
        first = self.first()
        counts = {STEP: first.new_zeros(()), ROUND: first.new_zeros((), dtype=torch.int64)}
        return unmoved(first) | counts

    @property
    def round(self) -> int:
        return int(self.tensors[ROUND])

    def forward(self, users: Tensor | None = None, server_round: int = 0) -> Tensor:
        """Compute the users' latent vectors ``x_i W``, ``[p, h]`` (line 5)."""
        (rows, _, place), weight = self._part(users), self.tensors["weight"]
        return weighted_sums(rows.feature, rows.ptr, self._values(server_round)[place], weight)

    def gradient(self, users: Tensor, gradient: Tensor, server_round: int) -> Tensor:
        """Add up the gradients by ``W``, ``sum_i x_i g_i^T``, in double precision (line 11)."""
        # gradient [p, h], by the users' latent vectors; gradients of other users are 0
        rows, (order, user, ptr), value = self.rows, self._by_feature, self._values(server_round)
        size = rows.num_users, gradient.shape[1]
        every = torch.zeros(size, dtype=torch.float64, device=value.device)
        every[users.to(value.device)] = gradient.to(every)
        by_feature = value.index_select(0, order).double()
        entries = csr_tensor(ptr, user, by_feature, (rows.num_features, rows.num_users))
        total: Tensor = entries @ every
        return total

    def step(self, total: Tensor, server_round: int, rate: float) -> None:
        """Take Adam's step with the sum of all users' gradients ``[f, h]`` (line 12)."""
        weight, *held = (self.tensors[name] for name in (*ADAM_TENSORS, STEP))
        adam = Adam([weight], lr=rate, weight_decay=self.settings.weight_decay)
        adam.state[weight] = dict(zip(MOMENTS, held, strict=True))
        weight.grad = total.reshape(weight.shape).to(weight)
        adam.step()
        adam.zero_grad()
        self.tensors[ROUND].fill_(server_round)

    def _values(self, server_round: int) -> Tensor:
        """Return the values of the users' features, with those of a round's dropout at 0."""
        settings, rows = self.settings, self.rows
        if not settings.dropout or not server_round:
            return rows.value
        draw = settings.seed, server_round
        if self._last[0] != draw:  # asked for twice a round
            columns = (one.split(BLOCK_ENTRIES) for one in (rows.user, rows.feature, rows.value))
            value = torch.cat(
                [
                    value * dropped(settings, server_round, self.numbers[user.long()], feature)
                    for user, feature, value in zip(*columns, strict=True)
                ]
            )
            if settings.bias:
                value[rows.feature == rows.num_features - 1] = 1
            self._last = draw, value
        return self._last[1]


def dropped(settings: UserSettings, server_round: int, user: Tensor, feature: Tensor) -> Tensor:
    """Return the factors of users' features in a round: 0, or the factor that keeps the mean."""
    # A draw for each user and round; it depends on the numbers, not on the SuperNode.
    numbers = user.long() * FEATURES_OF_A_USER + feature.long()
    drawn = chances(numbers, settings.seed, "feature-dropout", server_round)
    return (drawn >= settings.dropout).float() / (1 - settings.dropout)


def bounded(total: Numbers, limit: float) -> Numbers:
    """Scale a sum of gradients down to a length of ``limit``, if it is longer."""
    length = float(np.linalg.norm(total))
    if length <= limit:
        return total
    result: Numbers = np.clip(total * (limit / length), -limit, limit)
    return result


# The server's half -------------------------------------------------------------------------------


def scheduled(section: StrategyConfig, server_round: int, rounds: int) -> float:
    """Return the step size of a round of so many; rounds count from 1. It is never 0."""
    rate = section.learning_rate
    if section.schedule == "constant":
        return rate
    rise = math.ceil(WARM_UP * rounds) if section.schedule == "warmup-cosine" else 0
    if server_round <= rise:
        return rate * server_round / rise
    done = (server_round - 1 - rise) / (rounds - rise)
    return rate * (1 + math.cos(math.pi * done)) / 2


def mean_weights(
    sums: Sequence[NDArray[np.floating]], counts: Sequence[NDArray[np.integer]]
) -> NDArray[np.float32]:
    """Return the mean of the users' weights ``[f, h]``; rows that nobody has are NaN."""
    # sums [f, h] and counts [f] as of `OwnMaps.weight_sum`, of parts of the users
    total = np.stack(sums).sum(0, dtype=np.float64)
    count = np.stack(counts).sum(0, dtype=np.int64)[:, None]
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    result: NDArray[np.float32] = mean.astype(np.float32)
    return result


class ServerGraph(NamedTuple):
    """What the server knows of its users."""

    edges: Tensor | SortedEdges  # over which messages pass: ``A``
    y: Tensor  # [n] classes, -1 for none: ``Y``
    masks: dict[str, Tensor]  # [n] bool: the labelled nodes by role; of links none
    present: Tensor  # [n] bool; users that have left take no part in anything
    num_classes: int
    # Where links are learnt: the held-out edges, beside those of training, and all edges
    split: LinkSplit | None = None
    whole: Tensor | None = None


class RelayServer:
    """The server's half, where classes of nodes are learnt: ``f_s`` and what the server knows."""

    def __init__(
        self, model: nn.Module, graph: ServerGraph, config: NFedGNNConfig, latent_size: int
    ) -> None:
        self.config, self.section, self.model = config, config.strategy, model
        self.reg_weight, self.seed = self.section.smoothness, config.seed
        self.optimizer = Adam(model.parameters(), weight_decay=self.section.weight_decay)
        # What predicts and is evaluated: the model that is trained, or the average of its weights
        self._decay = self.section.server_average
        self.eval_model = copy.deepcopy(model) if self._decay else model
        self.device = graph.y.device
        # The users' last latent vectors, and which users have ever sent one
        self.latent = torch.zeros(0, latent_size, device=self.device)
        self.known = torch.zeros(0, dtype=torch.bool, device=self.device)
        self.take(graph)

    def take(self, graph: ServerGraph) -> None:
        """Take a graph whose first nodes are the users so far; newcomers follow them."""
        self.data = graph
        self.right = torch.zeros_like(graph.present)  # predicted right in the last evaluation
        self.hold(self.latent, self.known)

    def hold(self, latent: Tensor, known: Tensor) -> None:
        """Take the last latent vectors of the first users; the others have sent none."""
        more = len(self.data.present) - len(known)
        self.latent = functional.pad(latent.to(self.device), (0, 0, 0, more))
        self.latent[~self.data.present] = 0
        self.known = functional.pad(known.to(self.device), (0, more)) & self.data.present
        self._forget_graph()

    def receive(self, users: NDArray[np.integer], latent: NDArray[np.floating]) -> None:
        """Keep the latent vectors ``[p, h]`` that users ``[p]`` have sent."""
        places, rows = self.placed(users, latent)
        self.latent[places] = rows
        if not self.known[places].all():
            self.known[places] = True
            self._forget_graph()

    def placed(
        self, users: NDArray[np.integer], latent: NDArray[np.floating]
    ) -> tuple[Tensor, Tensor]:
        """Copy users' numbers and vectors to where the model is."""
        rows = torch.tensor(latent, dtype=torch.float32)
        return torch.tensor(users).to(self.device), rows.to(self.device)

    # Made when it is needed, not as each SuperNode's first answer comes: there may be a million.
    @cached_property
    def graph(self) -> Tensor | SortedEdges:
        """The edges between users that have answered, in the form that the model takes."""
        return among(self.data.edges, self.known)

    @cached_property
    def _term(self) -> LaplacianTerm:
        return laplacian_term(self.graph, len(self.known))

    def _forget_graph(self) -> None:
        for made in ("graph", "_term"):
            self.__dict__.pop(made, None)

    # Learning

    def gradients(
        self, server_round: int, latent: Tensor, heard: Tensor
    ) -> tuple[dict[str, float], Tensor]:
        """Compute the loss and the gradients ``g_i`` (line 9).

        The cross-entropy is over the labelled users in ``heard``, the regulariser over all known
        users.
        """
        # latent, result [n, h], heard [n]; the gradient by the weights is kept for `step`
        latent = latent.detach().requires_grad_()
        self.optimizer.zero_grad()
        smooth = torch.zeros((), device=self.device)
        if self.reg_weight:
            # The regulariser's part goes first and by itself, so that its tensors are free again.
            term = laplacian_regulariser(self._term, latent)  # equation 6
            (self.reg_weight * term).backward()
            smooth = term.detach()
            del term
        self.model.train()
        with seeded(self.device, self.seed, "server-dropout", server_round):
            logits = self.model(latent, self.graph, *self.needed(heard))  # equation 5
        entropy = self.entropy(logits, heard, server_round)  # equation 3
        loss = entropy.detach() + self.reg_weight * smooth  # equation 7
        if not torch.isfinite(loss):
            keys = " or ".join(self.config.steadying)
            raise DivergedError(f"round {server_round}: the loss is {loss.item()}; lower {keys}")
        entropy.backward()
        if longest := self.section.gradient_norm:
            clip_grad_norm_([*self.model.parameters(), latent], longest)
        assert latent.grad is not None
        losses = {"loss": loss, "cross_entropy": entropy, "regulariser": smooth}
        return {name: one.item() for name, one in losses.items()}, latent.grad

    def needed(self, heard: Tensor) -> list[Tensor]:
        """Return the nodes whose logits the loss needs, for a model that can leave others out."""
        # On a GPU, nonzero() would make the CPU wait.
        if self.device.type != "cpu" or not getattr(self.model, "takes_nodes", False):
            return []
        return [(self.data.masks["train"] & heard).nonzero().flatten()]

    def entropy(self, logits: Tensor, heard: Tensor, server_round: int) -> Tensor:
        """Compute the cross-entropy of the training nodes whose users were heard (equation 3)."""
        # logits [n, c], heard [n]
        if logits.shape[1] < self.data.num_classes:
            text = f"y has {self.data.num_classes - 1}, the model gives {logits.shape[1]} classes"
            raise DataError(f"{text}: flower_graph.data.as_graph(data) numbers classes from 0 on")
        train = self.data.masks["train"] & heard
        # Until a labelled user has answered there is nothing but the regulariser to learn from.
        if not train.any():
            return 0 * logits.sum()
        return functional.cross_entropy(logits[train], self.data.y[train])

    @torch.no_grad()
    def step(self, server_round: int, rate: float) -> None:
        """Take Adam's step (line 8); update the running average, at first a plain mean."""
        self.optimizer.lr = rate
        self.optimizer.step()
        if not self._decay:
            return
        share, now = max(1 - self._decay, 1 / server_round), self.model.state_dict()
        for name, kept in self.eval_model.state_dict().items():
            kept.copy_(kept.lerp(now[name], share) if kept.is_floating_point() else now[name])

    # Evaluation

    @torch.no_grad()
    def logits(self, edges: Tensor | None = None) -> Tensor:
        """Return each node's row of the model that is evaluated, over given or learnt edges."""
        self.eval_model.eval()
        among_known = self.graph if edges is None else among(edges, self.known)
        result: Tensor = self.eval_model(self.latent, among_known)
        return result

    def judge(self) -> Judged:
        return Judged(self.logits(), self.data.y, self.data.masks, [0, len(self.data.y)])

    def accuracy(self) -> dict[str, float]:
        """Evaluate the present weights with the last latent vectors."""
        judged = self.judged = self.judge()
        self.right = judged.logits.argmax(1) == judged.y
        # There may be ten million users: no sum by groups.
        return {
            role: self.right[mask].double().mean().item() for role, mask in judged.masks.items()
        }


def among(edges: Tensor | SortedEdges, known: Tensor) -> Tensor | SortedEdges:
    """Return the edges between known nodes."""
    if known.all():
        return edges
    if isinstance(edges, SortedEdges):
        return edges.among(known)
    return edges[:, known[edges].all(0)]


# A round -----------------------------------------------------------------------------------------


class Layer(Protocol):
    """The users' layer as the server reaches it: it carries steps 1, 2, 4 and 5."""

    def latents(self, server_round: int) -> tuple[Tensor, Tensor]:
        """Return all latent vectors ``[n, h]``, and the users whose labels count ``[n]``.

        With own maps these are all users that ever answered.
        """
        ...

    def prepare_step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Prepare the users' step, which the next message triggers.

        Return the reason for no step, or "".
        """
        ...


def relay_round(
    layer: Layer, server: RelayServer, server_round: int, rate: float, *, is_frozen: bool = False
) -> tuple[dict[str, float], str]:
    """Run a round; return the parts of the loss, and why nobody stepped, or ""."""
    # is_frozen: the server keeps its weights, as newcomers train alone
    latent, heard = layer.latents(server_round)  # lines 5 and 6
    losses, gradient = server.gradients(server_round, latent, heard)  # line 9
    # Line 9; users take lines 10 to 12 when the next message arrives.
    skipped = layer.prepare_step(server_round, gradient, rate)
    if not skipped and not is_frozen:
        server.step(server_round, rate)  # line 8
    return losses, skipped
