"""The ego-network clients of one SuperNode, trained in one batched tensor program.

Every client has its own model: a GCN of two layers, a linear classifier and a projection head
(FedSCem, section 5.1.4). Nothing mixes clients, so any dealing of clients to cohorts gives the
same result up to the rounding of sums.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.ego_batch import ROLES, EgoBatch, pack_egos, take_egos
from flower_graph.ops.adam import adam_rows_
from flower_graph.ops.contrast import projected_nt_xent
from flower_graph.ops.graph import propagate
from flower_graph.ops.grouped import group_sum, grouped_add, grouped_linear
from flower_graph.rng import generator

if TYPE_CHECKING:
    from flower_graph.data.ego_networks import EgoNetwork

Tensors = dict[str, Tensor]
MOMENTS = ("weight", "exp-avg", "exp-avg-sq")  # of ``first`` and ``rest`` each


class EgoSettings(NamedTuple):
    """What the server tells every client about its model and its training.

    Attributes
    ----------
    num_features, num_classes : int
        Widths of the features and of the classifier, ``f`` and ``k``.
    hidden, projection : int
        Length of an embedding, ``h``, and of a metric embedding, ``d``.
    learning_rate, weight_decay : float
        Adam's, as in ``torch.optim.Adam``.
    seed : int
        The run's seed: all clients start from the same weights.
    local_epochs : int
        Steps of each kind of training in a round.
    mu, tau : float
        Weight and temperature of the contrastive loss (equations 9 and 11).
    proximal : float
        Weight of FedProx's term, ``proximal / 2 ||w - w_global||^2``; 0 without.
    """

    num_features: int
    num_classes: int
    hidden: int = 64
    projection: int = 32
    learning_rate: float = 5e-4
    weight_decay: float = 5e-5
    seed: int = 0
    local_epochs: int = 1
    mu: float = 5.0
    tau: float = 10.0
    proximal: float = 0.0


class Shared(NamedTuple):
    """Mean embeddings of the nodes that other clients hold too.

    Attributes
    ----------
    place : Tensor
        ``[s]`` row of each such node among the chosen clients' nodes, rising.
    mean : Tensor
        ``[s, h]`` its mean embedding, ``h~``.
    """

    place: Tensor
    mean: Tensor


class Judgement(NamedTuple):
    """How well each of ``c`` clients does; NaN where it has no such nodes.

    Attributes
    ----------
    accuracy : Tensor
        ``[c, 3]`` on its nodes for training, validation and test.
    loss : Tensor
        ``[c]`` cross-entropy, mean over its training nodes.
    """

    accuracy: Tensor
    loss: Tensor


@dataclass
class ModelWeights:
    """One full model, such as FedAvg's mean: ``[f, h]`` first layer, ``[D]`` all the rest."""

    first: Tensor
    rest: Tensor


def rest_shapes(settings: EgoSettings) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all parameters but the first layer's matrix, in order."""
    h, k, d = settings.hidden, settings.num_classes, settings.projection
    return {
        "bias-1": (h,),
        "weight-2": (h, h),
        "bias-2": (h,),
        "classifier": (h, k),
        "classifier-bias": (k,),
        "projection": (h, d),
        "projection-bias": (d,),
    }


def initial_weights(settings: EgoSettings) -> ModelWeights:
    """Draw the weights that every client starts from, as PyG's GCN and PyTorch's Linear do."""
    chance = generator(settings.seed, "ego-model")
    first = torch.empty(settings.num_features, settings.hidden)
    nn.init.xavier_uniform_(first, generator=chance)
    parts = []
    for name, shape in rest_shapes(settings).items():
        part = torch.zeros(shape)
        if name == "weight-2":
            nn.init.xavier_uniform_(part, generator=chance)
        elif name.startswith(("classifier", "projection")):
            bound = settings.hidden**-0.5
            part.uniform_(-bound, bound, generator=chance)
        parts.append(part.reshape(-1))
    return ModelWeights(first, torch.cat(parts))


class EgoCohort:
    """Clients with an ego-network and a model each.

    Parameters
    ----------
    egos : sequence of EgoNetwork
        The clients' graphs.
    settings : EgoSettings
        Sizes, optimiser, seed.
    tensors : dict of Tensor, optional
        What ``tensors()`` of an earlier cohort with the same clients returned.
    device : device
        Where to compute.
    """

    def __init__(
        self,
        egos: Sequence[EgoNetwork],
        settings: EgoSettings,
        tensors: Tensors | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.egos, self.settings, self.device = list(egos), settings, torch.device(device)
        self.batch = pack_egos(self.egos, device)
        self._state = self._initial() if tensors is None else tensors
        self._chosen: ChosenEgos | None = None

    def tensors(self) -> Tensors:
        """Return everything that lasts between rounds; changing a tensor changes the cohort."""
        return self._state

    def choose(self, clients: Sequence[int]) -> ChosenEgos:
        """Take some of the clients, by number, in the cohort's order; the last choice is kept."""
        wanted = set(clients)
        places = [place for place, c in enumerate(self.batch.clients) if c in wanted]
        if len(places) != len(wanted):
            strange = sorted(wanted - set(self.batch.clients))
            raise ValueError(f"clients {strange} are not among {list(self.batch.clients)}")
        if self._chosen is None or self._chosen.places != places:
            every = len(places) == self.batch.size
            batch = self.batch if every else take_egos(self.batch, places)
            self._chosen = ChosenEgos(self, places, batch)
        return self._chosen

    def _initial(self) -> Tensors:
        start = initial_weights(self.settings)
        first = start.first.to(self.device)[self.batch.feature]
        rest = start.rest.to(self.device).expand(self.batch.size, -1).clone()
        state: Tensors = {"step": torch.zeros(self.batch.size, dtype=torch.int32)}
        for name, value in (("first", first), ("rest", rest)):
            for kind in MOMENTS:
                state[f"{kind}.{name}"] = value if kind == "weight" else torch.zeros_like(value)
        return state


class ChosenEgos:
    """Some clients of a cohort, as one batch; made by ``EgoCohort.choose``."""

    def __init__(self, cohort: EgoCohort, places: list[int], batch: EgoBatch) -> None:
        self.cohort, self.places, self.batch = cohort, places, batch
        self.settings = cohort.settings
        self._place = torch.tensor(places, dtype=torch.long)
        all_of_them = len(places) == cohort.batch.size
        self._rows = None if all_of_them else self._rows_of(places)
        self._start: ModelWeights | None = None  # FedAvg's model that this round began with

    # What the strategy asks for

    def start_from(self, model: ModelWeights, *, replace: bool = True) -> None:
        """Replace the clients' weights by one model (FedAvg, FedProx); moments stay as they are.

        With a new optimiser every round, each of Adam's steps would have full size, whatever the
        gradient: at the paper's one step a round FedAvg then ends with a constant prediction.

        Parameters
        ----------
        model : ModelWeights
            What the round starts from.
        replace : bool
            False if the clients have trained from it already: only remember it then.
        """
        device = self.cohort.device
        self._start = ModelWeights(model.first.to(device), model.rest.to(device))
        if replace:
            self._put("weight.first", self._start.first[self.batch.feature])
            self._put("weight.rest", self._start.rest.expand(self.batch.size, -1))

    def train(self) -> Tensor:
        """Step on ``L_nc`` (equation 3); return the logits from before, for ``judge_logits``."""
        seen: list[Tensor] = []

        def loss(h: Tensor, rest: list[Tensor]) -> Tensor:
            seen.append(self._logits(h, rest))
            return self._losses(seen[-1]) @ self.batch.train_share

        for _ in range(self.settings.local_epochs):
            self._step(loss)
        return seen[0].detach()

    def fuse(self, shared: Shared, *, classify: bool = True) -> Tensor:
        """Step on ``L_nc + mu L_ct``, or on ``mu L_ct`` alone.

        Both losses are means over a client's nodes, where equations 10 and 11 have sums. A client
        without shared nodes takes the step too, so that all have taken equally many: its gradient
        of ``L_ct`` is zero, and what moves it is weight decay and Adam's momentum.

        Parameters
        ----------
        shared : Shared
            Mean embeddings; without any, what is left is ``L_nc``.
        classify : bool
            Whether the classification loss is part of it.

        Returns
        -------
        Tensor
            ``[c]`` each client's ``L_ct`` before its last step; NaN without shared nodes.
        """
        found: list[Tensor] = []

        def loss(h: Tensor, rest: list[Tensor]) -> Tensor:
            losses, count = self._contrast_losses(h, rest, shared)
            found.append((losses.detach().double() / count).cpu())
            contrast = self.settings.mu * (losses / count.clamp(min=1)).sum()
            return contrast + self._classification(h, rest) if classify else contrast

        for _ in range(self.settings.local_epochs):
            self._step(loss)
        return found[-1]

    @torch.no_grad()
    def embed(self) -> Tensor:
        """Return the clients' node embeddings, ``[n, h]``."""
        first, rest = self.weights()
        return self._embed(first, self._split(rest))

    @torch.no_grad()
    def judge(self, h: Tensor) -> Judgement:
        """Measure accuracy and loss with the embeddings ``h`` that ``embed`` gave."""
        return self.judge_logits(self._logits(h, self._split(self.weights()[1])))

    @torch.no_grad()
    def judge_logits(self, logits: Tensor) -> Judgement:
        """Measure accuracy and loss with the logits ``[n, k]`` that ``train`` began with."""
        masks = self.batch.masks
        right = (logits.argmax(1) == self.batch.y).double()
        loss = self._mean(self._losses(logits).double(), masks["train"])
        columns = [self._mean(right, masks[role]) for role in ROLES]
        return Judgement(torch.stack(columns, 1).cpu(), loss.cpu())

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the clients' weights: ``[r, h]`` active rows and ``[c, D]`` all the rest."""
        return self._get("weight.first"), self._get("weight.rest")

    def inactive_rows(self) -> Tensor:
        """Return ``[f, h]``: a row of the first layer at clients that do not have its feature.

        Such a row has no gradient, and stays what it was when the round began. In a dense model
        weight decay alone would move it by Adam's full step, against those who do have the feature.
        """
        assert self._start is not None, "only with model sharing"
        return self._start.first

    # How it is computed

    def _step(self, loss: Callable[[Tensor, list[Tensor]], Tensor]) -> None:
        """Take one Adam step on a loss that is a sum over clients; every chosen client takes it."""
        parts = [weight.detach().requires_grad_() for weight in self.weights()]
        rest = self._split(parts[1])
        grads = torch.autograd.grad(loss(self._embed(parts[0], rest), rest), parts)
        steps = self.cohort.tensors()["step"]
        steps[self._place] += 1
        bounds = self.batch.row_ptr, list(range(self.batch.size + 1))
        for name, grad, ptr in zip(("first", "rest"), grads, bounds, strict=True):
            held = [self._get(f"{kind}.{name}") for kind in MOMENTS]
            if self.settings.proximal and self._start is not None:
                start = self._start.first[self.batch.feature] if name == "first" else None
                anchor = self._start.rest if start is None else start
                grad = grad + self.settings.proximal * (held[0] - anchor)
            self._adam(tuple(held), grad, steps[self._place], ptr)
            if self._rows is not None:
                for kind, value in zip(MOMENTS, held, strict=True):
                    self._put(f"{kind}.{name}", value)

    def _adam(
        self, held: tuple[Tensor, ...], gradient: Tensor, step: Tensor, ptr: list[int]
    ) -> None:
        weight, mean, square = held
        rate, decay = self.settings.learning_rate, self.settings.weight_decay
        adam_rows_(
            weight, mean, square, gradient, step, ptr, learning_rate=rate, weight_decay=decay
        )

    def _embed(self, first: Tensor, rest: list[Tensor]) -> Tensor:
        """Two GCN layers with rectified output (equation 1)."""
        batch = self.batch
        hidden = propagate(batch.graph, propagate(batch.x, first))
        hidden = F.relu_(grouped_add(hidden, rest[0], batch.ptr))
        # Weights after the neighbours' sum give the same and take the bias along.
        around = propagate(batch.graph, hidden)
        return F.relu_(grouped_linear(around, rest[1], rest[2], batch.ptr))

    def _logits(self, h: Tensor, rest: list[Tensor]) -> Tensor:
        return grouped_linear(h, rest[3], rest[4], self.batch.ptr)

    def _losses(self, logits: Tensor) -> Tensor:
        """Cross-entropy of each node, ``[n]``; of no meaning for one without a label."""
        return F.cross_entropy(logits, self.batch.y.clamp(min=0), reduction="none")

    def _classification(self, h: Tensor, rest: list[Tensor]) -> Tensor:
        """``L_nc``: cross-entropy, mean over each client's training nodes, summed over clients."""
        return self._losses(self._logits(h, rest)) @ self.batch.train_share

    def _contrast_losses(
        self, h: Tensor, rest: list[Tensor], shared: Shared
    ) -> tuple[Tensor, Tensor]:
        """Return each client's sum of NT-Xent, ``[c]``, and its number of shared nodes, ``[c]``."""
        count = torch.bincount(self.batch.node_client[shared.place], minlength=self.batch.size)
        ptr = [0, *count.cumsum(0).tolist()]
        bounds = self.batch.ptr, ptr
        losses = projected_nt_xent(
            h, shared.mean, rest[5], rest[6], shared.place, *bounds, self.settings.tau
        )
        return losses, count

    def _mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Average over each client's masked nodes, ``[c]``; NaN without any."""
        count = group_sum(mask.double(), self.batch.ptr)
        return group_sum(values * mask, self.batch.ptr) / count

    def _split(self, rest: Tensor) -> list[Tensor]:
        shapes = list(rest_shapes(self.settings).values())
        parts = rest.split([torch.Size(shape).numel() for shape in shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    # Where the chosen clients' part of the state lies

    def _rows_of(self, places: list[int]) -> Tensor:
        """Return the active rows of these clients in the cohort's state."""
        ptr = self.cohort.batch.row_ptr
        return torch.cat([torch.arange(ptr[p], ptr[p + 1]) for p in places]).to(self.cohort.device)

    def _index(self, key: str) -> Tensor:
        assert self._rows is not None
        return self._rows if key.endswith(".first") else self._place.to(self.cohort.device)

    def _get(self, key: str) -> Tensor:
        whole = self.cohort.tensors()[key]
        return whole if self._rows is None else whole[self._index(key)]

    def _put(self, key: str, value: Tensor) -> None:
        whole = self.cohort.tensors()[key]
        if self._rows is None:
            whole.copy_(value)
        else:
            whole[self._index(key)] = value
