"""FedSCem, one client at a time, with PyG's layers and PyTorch's Adam: slow and plain.

Xie, Xiong and Yang (CIKM 2024). A client has a GCN, a classifier and a projection head; ``step``
descends on ``L_nc``, on ``L_nc + mu L_ct`` or on ``mu L_ct`` alone. ``run`` is the method, with
each variant and with models shared or not, and ``run_baseline`` FedAvg, FedProx or training alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GCNConv

Means = Mapping[int, Tensor]  # a node's mean embedding, of nodes with two holders or more


def nt_xent(z: Tensor, shared: Tensor, rows: Tensor, tau: float) -> Tensor:
    """Equation 9 for one client, term by term: the losses of ``rows``, ``[s]``."""

    def term(one: Tensor, other: Tensor) -> Tensor:
        return (functional.cosine_similarity(one, other, dim=0) / tau).exp()

    losses = []
    for number, j in enumerate(rows.tolist()):
        others = [term(z[j], z[k]) for k in range(z.shape[0]) if k != j]
        others += [term(z[j], shared[k]) for k in range(shared.shape[0])]
        losses.append(-(term(z[j], shared[number]) / torch.stack(others).sum()).log())
    return torch.stack(losses) if losses else z.new_zeros(0)


class Client(nn.Module):
    """One client as anybody would write it: dense weights, autograd, PyTorch's Adam."""

    def __init__(self, ego: Any, weights: Tensor, settings: Any) -> None:
        super().__init__()
        self.ego, self.settings, self.x = ego, settings, ego.x.to_dense()
        h, f = settings.hidden, settings.num_features
        self.layers = nn.ModuleList([GCNConv(f, h), GCNConv(h, h)])
        self.classifier = nn.Linear(h, settings.num_classes)
        self.head = nn.Linear(h, settings.projection)
        self.load(weights)
        rate, decay = settings.learning_rate, settings.weight_decay
        self.adam = torch.optim.Adam(self.parameters(), lr=rate, weight_decay=decay)

    def slots(self) -> list[nn.Parameter]:
        """Return the parameters in the order of ``EgoGCN``."""
        layers = [part for one in self.layers for part in (one.lin.weight, one.bias)]
        return [*layers, *self.classifier.parameters(), *self.head.parameters()]

    @torch.no_grad()
    def load(self, weights: Tensor) -> None:
        """Take over a model, flat; the optimiser stays."""
        parts = weights.split([slot.numel() for slot in self.slots()])
        self.start = [part.view_as(slot) for slot, part in zip(self.slots(), parts, strict=True)]
        for slot, value in zip(self.slots(), self.start, strict=True):
            slot.copy_(value)

    def weights(self) -> Tensor:
        """Return the model, flat; columns of features that the client lacks are as they came."""
        first, *rest = (slot.detach() for slot in self.slots())
        first = torch.where((self.x != 0).any(0), first, self.start[0])
        return torch.cat([part.flatten() for part in (first, *rest)])

    def embed(self) -> Tensor:
        h = self.x
        for layer in self.layers:
            h = layer(h, self.ego.edge_index).relu()
        return h

    def losses(
        self, place: Tensor | None, mean: Tensor, nodes: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``L_nc`` and ``L_ct`` of all nodes or some, zero where nothing is averaged."""
        h, mask, y = self.embed(), self.ego.train_mask, self.ego.y
        if nodes is not None:
            if place is not None:
                kept = nodes[place]
                place = torch.searchsorted(nodes.nonzero().flatten(), place[kept])
                mean = mean[kept]
            h, mask, y = h[nodes], mask[nodes], y[nodes]
        nc = ct = 0 * h.sum()
        if mask.any():
            nc = functional.cross_entropy(self.classifier(h)[mask], y[mask])
        if place is not None and place.numel():
            ct = nt_xent(self.head(h), self.head(mean), place, self.settings.tau).mean()
        return nc, ct

    def step(
        self,
        shared: tuple[Tensor, Tensor] | None = None,
        nodes: Tensor | None = None,
        *,
        classify: bool = True,
    ) -> None:
        """Take a step of training (without shared means) or of fusion, on all nodes or some."""
        place, mean = (None, torch.empty(0)) if shared is None else shared
        nc, ct = self.losses(place, mean, nodes)
        loss = self.settings.mu * ct + (nc if classify else 0)
        for slot, value in zip(self.slots(), self.start, strict=True):
            loss = loss + self.settings.proximal / 2 * ((slot - value) ** 2).sum() + 0 * slot.sum()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()

    def own(self, means: Means) -> tuple[Tensor, Tensor]:
        """Return which rows have a mean, and these means."""
        nodes = enumerate(self.ego.nodes.tolist())
        rows = [(place, means[node]) for place, node in nodes if node in means]
        place = torch.tensor([place for place, _ in rows], dtype=torch.long)
        return place, torch.stack([row for _, row in rows]) if rows else torch.zeros(0, 1)


def means_of(clients: Sequence[Client]) -> Means:
    """Average embeddings by node over at least two holders (equation 7)."""
    held: dict[int, list[Tensor]] = {}
    for client in clients:
        for node, row in zip(client.ego.nodes.tolist(), client.embed().detach(), strict=True):
            held.setdefault(node, []).append(row)
    return {node: torch.stack(rows).mean(0) for node, rows in held.items() if len(rows) > 1}


def average(clients: Sequence[Client]) -> Tensor:
    return torch.stack([client.weights() for client in clients]).mean(0)


def run(
    egos: Sequence[Any], rounds: int, variant: str, sharing: str, start: Tensor, settings: Any
) -> list[Client]:
    """Run the method; return the clients as after the last fusion."""
    model, means = start, dict[int, Tensor]()
    clients = [Client(ego, model, settings) for ego in egos]
    for number in range(1, rounds + 2):
        for client in clients:
            if sharing != "none":
                client.load(model)
            for _ in range(settings.local_epochs if number > 1 else 0):
                client.step(client.own(means), classify=variant != "iter")
            for _ in range(settings.local_epochs if number <= rounds and variant != "minus" else 0):
                client.step()
        if number <= rounds:
            means, model = dict(means_of(clients)), average(clients)
    return clients


def run_baseline(
    egos: Sequence[Any], rounds: int, start: Tensor, settings: Any, *, averages: bool
) -> tuple[Tensor, list[float]]:
    """Run FedAvg, FedProx or self-training; return the mean model and each round's mean loss."""
    model, losses, clients = start, [], [Client(ego, start, settings) for ego in egos]
    for _ in range(rounds):
        for client in clients:
            for _ in range(settings.local_epochs):
                client.step()
        model, found = average(clients), []
        for client in clients:
            if averages:
                client.load(model)
            if client.ego.train_mask.any():
                found.append(float(client.losses(None, torch.empty(0), None)[0].detach()))
        losses.append(sum(found) / len(found))
    return model, losses
