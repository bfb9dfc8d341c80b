"""The steps of FedSCem's clients, taken by many at once as one tensor program.

Every client has its own model: a GCN of two layers, a linear classifier and a projection head
(FedSCem, section 5.1.4). Nothing mixes clients, so any assignment of clients to cohorts gives the
same result up to the rounding of sums.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import (
    Cohort,
    Learner,
    MiniBatch,
    Tensors,
    check_classes,
    epochs_of,
    placed_on,
)
from flower_graph.models import GCN
from flower_graph.ops.adam import Adam
from flower_graph.ops.contrast import projected_nt_xent
from flower_graph.ops.graph import Adjacency, pointers
from flower_graph.outputs.build import WIDTH, built_with
from flower_graph.rng import generator, seeded
from flower_graph.strategies.fedscem.config import EgoSettings

FIRST = "gnn.first.weight"  # of which clients keep the rows of their features
# For each client: ``2 t - 1`` once it has trained for round ``t``, ``2 t`` once it has used its
# means. A repeated message, or a resumed run, does neither a second time.
STEPS = "steps"


class Shared(NamedTuple):
    """Mean embeddings of the nodes that several clients hold."""

    place: Tensor  # [s] row of each such node among the chosen clients' nodes, rising
    mean: Tensor  # [s, h] its mean embedding, h~


@built_with(features=WIDTH, hidden=WIDTH, classes=WIDTH, projection=WIDTH)
class EgoGCN(nn.Module):
    """FedSCem's model: a GCN of two layers, a linear classifier and a projection head.

    Parameters
    ----------
    features, hidden, classes : int
        Widths of input, embedding and output.
    projection : int
        Output width of the projection head, which only training needs.
    """

    def __init__(self, features: int, hidden: int, classes: int, projection: int) -> None:
        super().__init__()
        self.arguments = {"features": features, "hidden": hidden, "classes": classes}
        self.arguments["projection"] = projection
        self.gnn = GCN(features, hidden, hidden, dropout=0.0)
        self.classifier = nn.Linear(hidden, classes)
        self.projection = nn.Linear(hidden, projection)

    def embed(self, x: Tensor | Adjacency, edge_index: Tensor) -> Tensor:
        embedding: Tensor = self.gnn(x, edge_index).relu_()
        return embedding

    def forward(self, x: Tensor | Adjacency, edge_index: Tensor) -> Tensor:
        """Return logits ``[n, k]`` from features ``[n, f]`` and edges ``[2, e]``."""
        logits: Tensor = self.classifier(self.embed(x, edge_index))
        return logits


@torch.no_grad()
def first_model(settings: EgoSettings) -> EgoGCN:
    """Draw the model that every client starts from, as PyG's GCN and PyTorch's Linear do."""
    check_classes(settings.num_classes)
    widths = settings.num_features, settings.hidden, settings.num_classes, settings.projection
    with seeded(torch.device("cpu"), settings.seed, "module"):
        model = EgoGCN(*widths)
    chance, bound = generator(settings.seed, "ego-model"), settings.hidden**-0.5
    for layer in (model.gnn.first, model.gnn.second):
        drawn = torch.empty(layer.in_features, layer.out_features)
        layer.weight.copy_(nn.init.xavier_uniform_(drawn, generator=chance).T)
    for head in (model.classifier, model.projection):
        drawn = torch.empty(head.in_features, head.out_features)
        head.weight.copy_(drawn.uniform_(-bound, bound, generator=chance).T)
        head.bias.uniform_(-bound, bound, generator=chance)
    return model


@dataclass
class EgoGroup:
    """Some ego-networks, each with a model of its own."""

    learner: Learner  # the clients as a group
    settings: EgoSettings
    # The weights that ``proximal`` pulls to, FedProx's term
    begun: Mapping[str, Tensor] = field(default_factory=dict)
    proximal: float = 0.0

    def __post_init__(self) -> None:
        self.graph, module = self.learner.graph, self.learner.module
        assert isinstance(module, EgoGCN)
        self.module = module

    def train(self, server_round: int) -> Tensor:
        """Step on ``L_nc`` (equation 3); return the logits from before."""
        every = self._epochs("local", self.graph.masks["train"], server_round)
        logits = [self._classify(part) for epoch in every for part in epoch]
        return logits[0]

    def fuse(self, shared: Shared, server_round: int, *, classify: bool = True) -> Tensor:
        """Step on ``L_nc + mu L_ct``, or on ``mu L_ct`` alone, by batches in turn with ``L_nc``."""
        # Returns each client's mean of NT-Xent over its shared nodes in the last epoch.
        every, train = torch.ones_like(self.graph.masks["train"]), self.graph.masks["train"]
        others: Iterator[Sequence[MiniBatch]] = repeat(())
        if not classify and self.settings.batch_size is not None:
            others = self._epochs("local", train, server_round)
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

    def embed(self) -> Tensor:
        return self._embedded().detach()

    @torch.no_grad()
    def logits(self) -> Tensor:
        logits: Tensor = self.module.classifier(self._embedded())
        return logits

    def largest(self) -> Tensor:
        clients, owner = len(self.graph.clients), {FIRST: self.graph.rows.owner}
        of_each = self.module.named_parameters()
        found = [largest_of(stack.detach(), owner.get(name), clients) for name, stack in of_each]
        return torch.stack(found).amax(0)

    # How it is computed

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def _embedded(self) -> Tensor:
        known = [parameter._version for parameter in self.module.parameters()]
        kept: tuple[list[int], Tensor] | None = self.module.__dict__.get("_kept")
        if kept is None or kept[0] != known:
            kept = known, self.module.embed(self.graph.x, self.graph.edge_index)
            self.module.__dict__["_kept"] = kept
        return kept[1]

    def _epochs(self, purpose: str, among: Tensor, server_round: int) -> Iterator[list[MiniBatch]]:
        sizes = self.settings.batch_size, self.settings.local_epochs, self.settings.seed
        return epochs_of(self.graph, among, *sizes, purpose, server_round)

    def _classify(self, part: MiniBatch) -> Tensor:
        """Step on ``L_nc`` of a batch; return the logits of all nodes from before."""
        logits: Tensor = self.module.classifier(self._embedded())
        self._descend(self._classification(logits, part), part)
        return logits.detach()

    def _contrast(self, part: MiniBatch, shared: Shared, *, classify: bool) -> Tensor:
        """Step on ``mu L_ct`` of a batch, and ``L_nc``; return NT-Xent's sums and nodes, [2, c]."""
        # Both losses are means over a client's nodes, where equations 10 and 11 have sums. A client
        # without shared nodes takes the step too, so that all have taken equally many: its gradient
        # of ``L_ct`` is zero, and only weight decay and Adam's momentum move it.
        h = self._embedded()
        losses, count = self._contrast_losses(h, shared, part)
        loss = self.settings.mu * (losses / count.clamp(min=1)).sum()
        if classify:
            loss = loss + self._classification(self.module.classifier(h), part)
        self._descend(loss, part)
        return torch.stack([losses.detach().double(), count.double()]).cpu()

    def _descend(self, loss: Tensor, part: MiniBatch) -> None:
        """Take an Adam step on a loss and the pull; what the loss does not use decays, too."""
        parameters = dict(self.module.named_parameters())
        grads = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            if self.proximal:
                grad = grad + self.proximal * (parameter.detach() - self.begun[name])
            parameter.grad = grad
        self.learner.optimiser.step(moves=part.moves)
        del self.module.__dict__["_kept"]  # PyTorch does not count a fused step as a change

    def _classification(self, logits: Tensor, part: MiniBatch) -> Tensor:
        """``L_nc``: cross-entropy, mean over each client's training nodes, summed over clients."""
        mask, graph = self.graph.masks["train"], self.graph
        mask = mask if part.nodes is None else mask & part.nodes
        losses = nn.functional.cross_entropy(logits[mask], graph.y[mask], reduction="none")
        return graph.sum_of_means(losses, mask)

    def _contrast_losses(self, h: Tensor, shared: Shared, part: MiniBatch) -> tuple[Tensor, Tensor]:
        """Return each client's sum of NT-Xent, ``[c]``, and its number of shared nodes, ``[c]``."""
        ptr, owner, clients = self.graph.ptr, self.graph.owner, len(self.graph.clients)
        if part.nodes is not None:  # nodes outside the batch are no negatives
            here = part.nodes.nonzero().flatten()
            h, owner = h.index_select(0, here), owner[here]
            kept = part.nodes[shared.place]
            place = (part.nodes.cumsum(0) - 1)[shared.place[kept]]
            shared = Shared(place, shared.mean[kept])
            ptr = pointers(owner, clients).tolist()
        count = torch.bincount(owner[shared.place], minlength=clients)
        bounds = ptr, [0, *count.cumsum(0).tolist()]
        head = dict(self.module.projection.named_parameters())
        weight, tau = head["weight"].mT, self.settings.tau
        losses = projected_nt_xent(h, shared.mean, weight, head["bias"], shared.place, *bounds, tau)
        return losses, count


def largest_of(rows: Tensor, owner: Tensor | None, clients: int) -> Tensor:
    """Return each client's largest absolute number, ``[c]``; infinity for NaN."""
    # rows [n, ...], owner [n]; by default each client has one row
    size = rows.abs().flatten(1).amax(1).nan_to_num(torch.inf, posinf=torch.inf).double().cpu()
    owner = torch.arange(clients) if owner is None else owner.cpu()
    return size.new_zeros(clients).scatter_reduce_(0, owner, size, "amax")


class EgoCohort(Cohort):
    """All ego-networks of one SuperNode; ``tensors``: what lasts between rounds, if any did."""

    def __init__(
        self,
        egos: Sequence[ClientGraph],
        settings: EgoSettings,
        tensors: Tensors | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings, device = settings, torch.device(device)
        rate, decay = settings.learning_rate, settings.weight_decay
        super().__init__(
            first_model(settings),
            [placed_on(ego, device, is_dense=False) for ego in egos],
            tensors,
            lambda made: Adam(made.parameters(), lr=rate, weight_decay=decay),
            by_rows=(FIRST,),
        )
        never = torch.zeros(len(egos), dtype=torch.int32, device=device)
        self.tensors = {STEPS: never} | self.tensors

    @contextmanager
    def part(self, clients: Sequence[int] | None = None) -> Iterator[EgoGroup]:
        """Yield some clients, or all, as a group; the tensors then have its changes."""
        clients = self.clients if clients is None else clients
        if strange := sorted(set(clients).difference(self.graphs)):
            raise ValueError(f"clients {strange} are not among {self.clients}")
        with self.learners(sorted(clients, key=self._places.__getitem__)) as (learner,):
            yield EgoGroup(learner, self.settings)

    @torch.no_grad()
    def start_from(self, group: EgoGroup, weights: Tensor, *, replace: bool) -> None:
        """Begin with the server's model, flat; keep it, as ``proximal`` and inactive rows do."""
        held, plain = dict(group.module.named_parameters()), dict(self.module.named_parameters())
        parts = weights.split([parameter.numel() for parameter in plain.values()])
        took = partial(self.take_over, group.learner, replace=replace)
        group.proximal = self.settings.proximal
        group.begun = {
            name: took(name, held[name], part.view_as(one).to(one.device))
            for (name, one), part in zip(plain.items(), parts, strict=True)
        }

    def is_behind(self, clients: Sequence[int], step: int) -> bool:
        """Whether one of the clients has not come to a step yet (``STEPS``)."""
        places = [self._places[client] for client in clients]
        return bool((self.tensors[STEPS][places] < step).any())

    def note(self, clients: Sequence[int], step: int) -> None:
        self.tensors[STEPS][[self._places[client] for client in clients]] = step


def train_alone(graph: NewGraph, settings: EgoSettings, rounds: int) -> Tensor:
    """Train a newcomer on its own nodes; return probabilities ``[n, k]`` of all."""
    alone = replace(
        ClientGraph.bare(0, graph.x, graph.y, graph.edge_index), train_mask=graph.trains
    )
    with EgoCohort([alone], settings).part() as group:
        for number in range(rounds):
            group.train(number)
        return group.logits().softmax(1)
