"""The ego-network clients of one SuperNode, trained in one batched tensor program.

Every client has its own model: a GCN of two layers, a linear classifier and a projection head
(FedSCem, section 5.1.4). Nothing mixes clients, so any assignment of clients to cohorts gives the
same result up to the rounding of sums.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.data.description import NewGraph
from flower_graph.data.graph import EgoNetwork
from flower_graph.engine.graph_batch import (
    Metrics,
    check_classes,
    evaluate,
    mean_shares,
    node_losses,
    pack_graphs,
)
from flower_graph.engine.mini_batches import BatchOrder, MiniBatch, epochs_of
from flower_graph.engine.stacked_weights import ModelWeights, StackedWeights, Tensors, stacked_state
from flower_graph.ops.contrast import projected_nt_xent
from flower_graph.ops.graph import pointers, propagate
from flower_graph.ops.grouped import grouped_add, grouped_linear
from flower_graph.outputs.files import Predictions, SavedModels, SparseRows, predictions_from
from flower_graph.rng import generator, seeded
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import EgoGCN

MODULE, FIRST = f"{EgoGCN.__module__}.{EgoGCN.__qualname__}", "gnn.first.weight"
BEGUN = ("begun.first", "begun.rest")  # prefix in a state: the model that clients began with


class Shared(NamedTuple):
    """Mean embeddings of the nodes that several clients hold."""

    place: Tensor  # [s] row of each such node among the chosen clients' nodes, rising
    mean: Tensor  # [s, h] its mean embedding, h~


def sizes_of(settings: EgoSettings) -> dict[str, int]:
    """Return the arguments of the clients' ``EgoGCN``."""
    widths = settings.num_features, settings.hidden, settings.num_classes, settings.projection
    return dict(zip(("features", "hidden", "classes", "projection"), widths, strict=True))


@torch.no_grad()
def first_model(settings: EgoSettings) -> EgoGCN:
    """Draw the model that every client starts from, as PyG's GCN and PyTorch's Linear do."""
    check_classes(settings.num_classes)
    with seeded(torch.device("cpu"), settings.seed, "module"):
        model = EgoGCN(**sizes_of(settings))
    chance, bound = generator(settings.seed, "ego-model"), settings.hidden**-0.5
    for layer in (model.gnn.first, model.gnn.second):
        drawn = torch.empty(layer.in_features, layer.out_features)
        layer.weight.copy_(nn.init.xavier_uniform_(drawn, generator=chance).T)
    for head in (model.classifier, model.projection):
        drawn = torch.empty(head.in_features, head.out_features)
        head.weight.copy_(drawn.uniform_(-bound, bound, generator=chance).T)
        head.bias.uniform_(-bound, bound, generator=chance)
    return model


def initial_weights(settings: EgoSettings) -> ModelWeights:
    """Return the model that every client starts from, as the engine stacks it."""
    first, *rest = (part.detach() for part in first_model(settings).parameters())
    return ModelWeights(first.T.contiguous(), torch.cat([part.flatten() for part in rest]))


def split_rest(rest: Tensor, settings: EgoSettings) -> dict[str, Tensor]:
    """Split rows ``[c, D]`` into the parameters of an ``EgoGCN`` but the first, by name."""
    h, k, d = settings.hidden, settings.num_classes, settings.projection
    widths = {"gnn.second": h, "classifier": k, "projection": d}
    shapes: dict[str, tuple[int, ...]] = {"gnn.first.bias": (h,)}
    for name, width in widths.items():
        shapes |= {f"{name}.weight": (width, h), f"{name}.bias": (width,)}
    parts = rest.split([math.prod(shape) for shape in shapes.values()], dim=1)
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: part.unflatten(1, shape) for (name, shape), part in pairs}


class EgoCohort(StackedWeights):
    """Clients with an ego-network and a model each."""

    def __init__(
        self,
        egos: Sequence[EgoNetwork],
        settings: EgoSettings,
        tensors: Tensors | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.egos, self.settings = list(egos), settings
        batch = pack_graphs(self.egos, device)
        if tensors is None:
            start = initial_weights(settings)
            begun = {BEGUN[0]: start.first, BEGUN[1]: start.rest}
            tensors = stacked_state(batch, [start]) | begun
        super().__init__(tensors, batch)
        self._last: tuple[Tensor, list[Tensor], Tensor] | None = None  # of ``_embed``
        self._places: Tensors = {}  # of a part: which rows of the whole's tensors are its own

    def tensors(self) -> Tensors:
        """Return everything that lasts between rounds; changing a tensor changes the cohort."""
        return self._state

    def part(self, clients: Sequence[int]) -> EgoCohort:
        """Return a cohort of some clients alone, in this one's order; ``put`` takes it back."""
        if strange := sorted(set(clients) - set(self.batch.clients)):
            raise ValueError(f"clients {strange} are not among {list(self.batch.clients)}")
        egos = [ego for ego in self.egos if ego.client in clients]
        if len(egos) == len(self.egos):
            return self
        places = self._indices(egos)
        held = {name: self._state[name][index] for name, index in places.items()}
        begun = {name: self._state[name] for name in BEGUN}
        part = EgoCohort(egos, self.settings, held | begun, self._device)
        part._start, part._places = self._start, places
        return part

    @torch.no_grad()
    def put(self, part: EgoCohort) -> None:
        """Take over the changes of some clients."""
        if part is not self:
            for name, index in part._places.items():
                self._state[name][index] = part._state[name]
            self._start = part._start

    def _indices(self, egos: Sequence[EgoNetwork]) -> Tensors:
        places = [self.batch.clients.index(ego.client) for ego in egos]
        found = self.indices(places)
        # Others count something for each client, as steps do.
        return found | dict.fromkeys(self._state.keys() - found.keys() - {*BEGUN}, found["step"])

    def train(self, server_round: int) -> Tensor:
        """Step on ``L_nc`` (equation 3); return the logits from before, for ``evaluate``."""
        logits = [self._classify(part) for epoch in self._training(server_round) for part in epoch]
        return logits[0]

    def fuse(self, shared: Shared, server_round: int, *, classify: bool = True) -> Tensor:
        """Step on ``L_nc + mu L_ct``, or on ``mu L_ct`` alone, by batches in turn with ``L_nc``."""
        # Returns each client's mean of NT-Xent over its shared nodes in the last epoch.
        every = torch.ones_like(self.batch.y, dtype=torch.bool)
        others: Iterator[Sequence[MiniBatch]] = repeat(())
        if not classify and self.settings.batch_size is not None:
            others = self._training(server_round)
        fusion, losses = self._epochs("fusion", every, server_round), list[Tensor]()
        for epoch, in_turn in zip(fusion, others, strict=False):
            losses = []
            # No client has more batches of training nodes than of all its nodes.
            for part, local in zip_longest(epoch, in_turn):
                if local is not None:
                    self._classify(local)
                losses.append(self._contrast(part, shared, classify=classify))
        total = torch.stack(losses).sum(0)
        return total[0] / total[1]

    def start_from(self, *models: ModelWeights, replace: bool = True) -> None:
        """Start from the server's model, and keep it: a later process may have to save it."""
        super().start_from(*models, replace=replace)
        (model,) = models
        for name, value in zip(BEGUN, (model.first, model.rest), strict=True):
            self._state[name].copy_(value)

    def begun(self) -> ModelWeights:
        """Return the model that clients began with: the server's last, else the first."""
        return ModelWeights(*(self._state[name] for name in BEGUN))

    def embed(self) -> Tensor:
        """Return the clients' node embeddings, ``[n, h]``; the next step begins with the same."""
        return self._embed(*self.leaves())[1].detach()

    @torch.no_grad()
    def evaluate(self, h: Tensor) -> Metrics:
        return evaluate(self.batch, self.classify(h))

    @torch.no_grad()
    def classify(self, h: Tensor) -> Tensor:
        """Return logits ``[n, k]`` of the embeddings ``h`` that ``embed`` gave."""
        return self._logits(h, self._split(self.weights()[1]))

    # How it is computed

    def _training(self, server_round: int) -> Iterator[list[MiniBatch]]:
        return self._epochs("local", self.batch.masks["train"], server_round)

    def _epochs(self, purpose: str, among: Tensor, server_round: int) -> Iterator[list[MiniBatch]]:
        batch, local = self.batch, self.settings
        order = BatchOrder(local.batch_size, local.seed, server_round, purpose)
        return epochs_of(among, batch.ptr, batch.clients, order, epochs=local.local_epochs)

    def _classify(self, part: MiniBatch) -> Tensor:
        """Step on ``L_nc`` of a batch; return the logits of all nodes from before."""
        seen: list[Tensor] = []

        def loss(h: Tensor, rest: list[Tensor]) -> Tensor:
            seen.append(self._logits(h, rest))
            return self._classification(seen[0], part)

        self._descend(loss, part)
        return seen[0].detach()

    def _contrast(self, part: MiniBatch, shared: Shared, *, classify: bool) -> Tensor:
        """Step on ``mu L_ct`` of a batch, and ``L_nc``; return NT-Xent's sums and nodes, [2, c]."""
        # Both losses are means over a client's nodes, where equations 10 and 11 have sums. A client
        # without shared nodes takes the step too, so that all have taken equally many: its gradient
        # of ``L_ct`` is zero, and only weight decay and Adam's momentum move it.
        seen: list[Tensor] = []

        def loss(h: Tensor, rest: list[Tensor]) -> Tensor:
            losses, count = self._contrast_losses(h, rest, shared, part)
            seen.append(torch.stack([losses.detach().double(), count.double()]).cpu())
            contrast = self.settings.mu * (losses / count.clamp(min=1)).sum()
            if not classify:
                return contrast
            return contrast + self._classification(self._logits(h, rest), part)

        self._descend(loss, part)
        return seen[0]

    def _descend(self, loss: Callable[[Tensor, list[Tensor]], Tensor], part: MiniBatch) -> None:
        def of_weights(first: Tensor, rest: Tensor) -> Tensor:
            parts, h = self._embed(first, rest)
            self._last = None  # a gradient can be taken once
            return loss(h, parts)

        local = self.settings
        self.step(
            of_weights,
            learning_rate=local.learning_rate,
            weight_decay=local.weight_decay,
            proximal=local.proximal,
            moves=part.moves,
        )

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def _embed(self, first: Tensor, rest: Tensor) -> tuple[list[Tensor], Tensor]:
        """Split the weights, and take two GCN layers with rectified output (equation 1)."""
        if self._last is not None and self._last[0] is first:
            return self._last[1:]
        batch, parts = self.batch, self._split(rest)
        hidden = propagate(batch.graph, propagate(batch.x, first))
        hidden = F.relu_(grouped_add(hidden, parts[0], batch.ptr))
        # Multiplying by the weights after the neighbours' sum gives the same, and includes the
        # bias.
        around = propagate(batch.graph, hidden)
        h = F.relu_(grouped_linear(around, parts[1].mT, parts[2], batch.ptr))
        self._last = first, parts, h
        return parts, h

    def _logits(self, h: Tensor, rest: list[Tensor]) -> Tensor:
        return grouped_linear(h, rest[3].mT, rest[4], self.batch.ptr)

    def _classification(self, logits: Tensor, part: MiniBatch) -> Tensor:
        """``L_nc``: cross-entropy, mean over each client's training nodes, summed over clients."""
        batch, share = self.batch, self.batch.train_share
        if part.nodes is not None:
            share = mean_shares(batch.masks["train"] & part.nodes, batch.ptr)
        return node_losses(batch, logits) @ share

    def _contrast_losses(
        self, h: Tensor, rest: list[Tensor], shared: Shared, part: MiniBatch
    ) -> tuple[Tensor, Tensor]:
        """Return each client's sum of NT-Xent, ``[c]``, and its number of shared nodes, ``[c]``."""
        ptr, owner = self.batch.ptr, self.batch.node_client
        if part.nodes is not None:  # nodes outside the batch are no negatives
            here = part.nodes.nonzero().flatten()
            h, owner = h.index_select(0, here), owner[here]
            kept = part.nodes[shared.place]
            place = (part.nodes.cumsum(0) - 1)[shared.place[kept]]
            shared = Shared(place, shared.mean[kept])
            ptr = pointers(owner, self.batch.size).tolist()
        count = torch.bincount(owner[shared.place], minlength=self.batch.size)
        bounds = ptr, [0, *count.cumsum(0).tolist()]
        losses = projected_nt_xent(
            h, shared.mean, rest[5].mT, rest[6], shared.place, *bounds, self.settings.tau
        )
        return losses, count

    def _split(self, rest: Tensor) -> list[Tensor]:
        return list(split_rest(rest, self.settings).values())


def predictions_of(cohort: EgoCohort, classes: Sequence[str] | None) -> Predictions:
    """Return the clients' predictions for all their nodes, from their weights."""
    nodes = [node for ego in cohort.egos for node in ego.called or ego.identities]
    return predictions_from(cohort.egos, cohort.classify(cohort.embed()), classes, nodes)


def own_models(cohort: EgoCohort) -> SavedModels:
    """Return the clients' models; only the rows of a client's features are its own."""
    batch, (first, rest) = cohort.batch, cohort.weights()
    rows = SparseRows(FIRST, first, batch.feature, torch.tensor(batch.row_ptr), transposed=True)
    begun = {FIRST: cohort.begun().first.T}
    own = split_rest(rest, cohort.settings)
    return SavedModels(MODULE, sizes_of(cohort.settings), list(batch.clients), begun, own, rows)


def common_model(model: ModelWeights, settings: EgoSettings, client: int) -> SavedModels:
    """Return the saved form of a model that the clients share."""
    return SavedModels(MODULE, sizes_of(settings), [client], state_of(model, settings), {})


def state_of(model: ModelWeights, settings: EgoSettings) -> dict[str, Tensor]:
    """Return a model as the ``state_dict`` of an ``EgoGCN``."""
    rest = split_rest(model.rest[None], settings).items()
    return {FIRST: model.first.T} | {name: part[0] for name, part in rest}


def train_alone(graph: NewGraph, settings: EgoSettings, trains: Tensor, rounds: int) -> Tensor:
    """Train a newcomer on nodes ``[n]`` of its own; return probabilities ``[n, k]`` of all."""
    assert graph.edge_index is not None
    nodes, nobody = torch.arange(graph.y.numel()), torch.zeros_like(trains)
    held = nodes, graph.x, graph.y, graph.edge_index, None, trains, nobody, nobody
    ego = EgoNetwork(0, *held)
    cohort = EgoCohort([ego], settings)
    for number in range(rounds):
        cohort.train(number)
    return cohort.classify(cohort.embed()).softmax(1)
