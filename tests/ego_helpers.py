"""Small ego-networks with everything odd among them, and slow versions to hold the engine against.

Twelve clients hold parts of a graph of 40 nodes; ``ODD`` names what is special about some.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.strategies.fedscem.cohort import Shared
from flower_graph.strategies.fedscem.config import EgoSettings

NODES, FEATURES, CLASSES, HIDDEN, PROJECTION = 40, 7, 3, 5, 4
SETTINGS = EgoSettings(
    FEATURES,
    CLASSES,
    hidden=HIDDEN,
    projection=PROJECTION,
    learning_rate=0.005,
    weight_decay=0.01,
    seed=3,
    mu=0.7,
    tau=0.5,
)
ODD = {"one node": 3, "no edges": 5, "no training": 7, "nothing shared": 9, "no features": 11}


def toy_egos() -> list[EgoNetwork]:
    """Make the clients; their numbers are 100, 101, ..."""
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(NODES, FEATURES, generator=draw)
    x *= torch.rand(NODES, FEATURES, generator=draw) < 0.4
    y = torch.randint(CLASSES, (NODES,), generator=draw)
    upper = (torch.rand(NODES, NODES, generator=draw) < 0.15).triu(1)
    return [_ego(place, x, y, upper | upper.T, draw) for place in range(12)]


def _ego(place: int, x: Tensor, y: Tensor, edges: Tensor, draw: torch.Generator) -> EgoNetwork:
    count = 1 if place == ODD["one node"] else 4 + place
    nodes = torch.randperm(30, generator=draw)[:count].sort().values
    if place == ODD["nothing shared"]:
        nodes = torch.arange(30, NODES)
    if place == ODD["no features"]:
        x = torch.zeros_like(x)
    own, y = edges[nodes][:, nodes], y[nodes]
    role = torch.randint(3, (nodes.numel(),), generator=draw)
    role[0] = 0
    if place == ODD["no edges"]:
        own = torch.zeros_like(own)
    if place == ODD["no training"]:
        role[role == 0], y = 1, torch.where(torch.arange(nodes.numel()) < 2, -1, y)
    masks = [(role == k) & (y >= 0) for k in range(3)]
    return EgoNetwork(100 + place, nodes, x[nodes], y, own.nonzero().T, None, *masks)


def toy_shared(egos: Sequence[EgoNetwork]) -> Shared:
    """Give these clients means of the nodes that several of all twelve hold; the same each time."""
    counts = torch.bincount(torch.cat([ego.nodes for ego in toy_egos()]), minlength=NODES)
    means = torch.rand(NODES, HIDDEN, generator=torch.Generator().manual_seed(1))
    nodes = torch.cat([ego.nodes for ego in egos])
    place = (counts[nodes] > 1).nonzero().flatten()
    return Shared(place, means[nodes[place]])


def slow_nt_xent(z: Tensor, shared: Tensor, rows: Tensor, tau: float) -> Tensor:
    """Equation 9 for one client, term by term: the losses of ``rows``, ``[s]``."""

    def term(one: Tensor, other: Tensor) -> Tensor:
        return (F.cosine_similarity(one, other, dim=0) / tau).exp()

    losses = []
    for number, j in enumerate(rows.tolist()):
        others = [term(z[j], z[k]) for k in range(z.shape[0]) if k != j]
        others += [term(z[j], shared[k]) for k in range(shared.shape[0])]
        losses.append(-(term(z[j], shared[number]) / torch.stack(others).sum()).log())
    return torch.stack(losses) if losses else z.new_zeros(0)


class PlainClient(nn.Module):
    """One client as anybody would write it with PyG: dense weights, autograd, PyTorch's Adam."""

    def __init__(self, ego: EgoNetwork, start: ModelWeights, settings: EgoSettings) -> None:
        super().__init__()
        self.ego, self.settings = ego, settings
        h, f = settings.hidden, settings.num_features
        self.layers = nn.ModuleList([GCNConv(f, h), GCNConv(h, h)])
        self.classifier = nn.Linear(h, settings.num_classes)
        self.head = nn.Linear(h, settings.projection)
        self.load(start)
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    def slots(self) -> list[nn.Parameter]:
        """Return the first layer's matrix, and the parameters in the order of ``rest``."""
        first, second = self.layers
        tail = [second.lin.weight, second.bias, *self.classifier.parameters()]
        return [first.lin.weight, first.bias, *tail, *self.head.parameters()]

    def load(self, model: ModelWeights) -> None:
        """Take over a model; the optimiser stays."""
        self.start, (first, *rest) = model, self.slots()
        with torch.no_grad():
            first.copy_(model.first.T)
            for slot, value in zip(rest, self.start_slots()[1:], strict=True):
                slot.copy_(value)

    def start_slots(self) -> list[Tensor]:
        shapes = [slot.shape for slot in self.slots()[1:]]
        parts = self.start.rest.split([shape.numel() for shape in shapes])
        rest = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return [self.start.first.T, *rest]

    def model(self, x: Tensor) -> ModelWeights:
        """Return the weights; a row whose feature is nowhere in ``x`` as it came."""
        first, *rest = (slot.detach() for slot in self.slots())
        has = (x != 0).any(0)[:, None]
        flat = torch.cat([part.flatten() for part in rest])
        return ModelWeights(torch.where(has, first.T, self.start.first), flat)

    def active(self) -> Tensor:
        """Return all weights as a client's state has them: rows with a feature, and the rest."""
        model, has = self.model(self.ego.x), (self.ego.x != 0).any(0)
        return torch.cat([model.first[has].reshape(-1), model.rest])

    def embed(self) -> Tensor:
        h = self.ego.x
        for layer in self.layers:
            h = layer(h, self.ego.edge_index).relu()
        return h

    def losses(self, shared: Shared | None, nodes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``L_nc`` and ``L_ct`` of all nodes or some, zero where nothing is averaged."""
        h, mask, y = self.embed(), self.ego.train_mask, self.ego.y
        nc = ct = 0 * h.sum()
        if nodes is not None:
            if shared is not None:
                kept = nodes[shared.place]
                place = torch.searchsorted(nodes.nonzero().flatten(), shared.place[kept])
                shared = Shared(place, shared.mean[kept])
            h, mask, y = h[nodes], mask[nodes], y[nodes]
        if mask.any():
            nc = F.cross_entropy(self.classifier(h)[mask], y[mask])
        if shared is not None and shared.place.numel():
            z, means = self.head(h), self.head(shared.mean)
            ct = slow_nt_xent(z, means, shared.place, self.settings.tau).mean()
        return nc, ct

    def step(
        self, shared: Shared | None = None, nodes: Tensor | None = None, *, classify: bool = True
    ) -> None:
        """Take a step of ``train`` (without shared means) or of ``fuse``, on all or some nodes."""
        nc, ct = self.losses(shared, nodes)
        loss = self.settings.mu * ct + (nc if classify else 0)
        for slot, value in zip(self.slots(), self.start_slots(), strict=True):
            loss = loss + self.settings.proximal / 2 * ((slot - value) ** 2).sum()
        self.optimizer.zero_grad()
        (loss + sum(0 * slot.sum() for slot in self.slots())).backward()
        self.optimizer.step()


def average(clients: Sequence[PlainClient]) -> ModelWeights:
    models = [client.model(client.ego.x.to_dense()) for client in clients]
    first, rest = (torch.stack([getattr(m, part) for m in models]) for part in ("first", "rest"))
    return ModelWeights(first.mean(0), rest.mean(0))
