"""NeighGen, the generator of missing neighbours of LocalSage+ and FedSage+, for many clients.

Zhang et al., "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS 2021: an
encoder (2-layer GCN) turns a node of the impaired graph into ``z``; ``dGen``, a linear map with
ReLU, says how many neighbours are missing; ``fGen``, an MLP on ``z`` with Gaussian noise, their
features. Every client has weights of its own, stacked ``[c, ...]``; rows lie client by client.

**Smaller than published.** The published ``fGen`` (256, then 2,048 wide, then all features of all
neighbours) has 15 million weights on Cora. Here it gives each neighbour a code of ``CODE``
numbers, and the neighbours share the map from codes to features: 34 thousand weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flower_graph.engine.graph_batch import check_classes
from flower_graph.ops.graph import Adjacency, csr_tensor, gcn_adjacency, propagate
from flower_graph.ops.grouped import WideRows, grouped_linear, wide_linear, wide_rows
from flower_graph.ops.mending import (
    Slots,
    impair,
    mean_by_client,
    mended_edges,
    nearest_of_each,
)
from flower_graph.rng import generator

if TYPE_CHECKING:
    from flower_graph.data.partition.ego_networks import EgoNetwork

Tensors = dict[str, Tensor]

NEIGHBOURS = 5  # the most that a node is given, as published
ENCODER_HIDDEN, LATENT = 32, 64  # published: 32, 128
GENERATOR_HIDDEN, CODE = 64, 16
HIDDEN_SHARE = 0.25  # of a client's nodes, while its generator learns; published: 3 to 28 %
# Numbers in the table of distances that a judge fills at a time.
TABLE = 16_777_216

ENCODER = ("encoder-1", "encoder-2", "number")
FEATURES = ("generator-1", "generator-2", "generator-3")  # fGen: what FedSage+ exchanges
CLASSIFIER = ("classifier-1", "classifier-2", "classifier-3")


def parameter_names(layers: tuple[str, ...]) -> tuple[str, ...]:
    """Name the weights and biases of some layers."""
    return tuple(f"{layer}.{part}" for layer in layers for part in ("weight", "bias"))


def initial_weights(features: int, hidden: int, classes: int, seed: int) -> Tensors:
    """Draw the weights that all clients start from."""
    check_classes(classes)
    sizes = {
        "encoder-1": (features, ENCODER_HIDDEN),
        "encoder-2": (ENCODER_HIDDEN, LATENT),
        "number": (LATENT, 1),
        "generator-1": (LATENT, GENERATOR_HIDDEN),
        "generator-2": (GENERATOR_HIDDEN, NEIGHBOURS * CODE),
        "generator-3": (CODE, features),
        "classifier-1": (features, hidden),
        "classifier-2": (hidden, hidden),
        "classifier-3": (hidden, classes),
    }
    weights: Tensors = {}
    for layer, size in sizes.items():
        weight = torch.empty(size)
        nn.init.xavier_uniform_(weight, generator=generator(seed, "sage", layer))
        weights[f"{layer}.weight"] = weight
        weights[f"{layer}.bias"] = torch.full(size[1:], float(layer == "number"))
    return weights


def linear(weights: Tensors, layer: str, x: Tensor, ptr: list[int]) -> Tensor:
    """Apply each client's layer to its rows: ``[n, a]`` to ``[n, b]``."""
    return grouped_linear(x, weights[f"{layer}.weight"], weights[f"{layer}.bias"], ptr)


class Mended(NamedTuple):
    """Graphs with generated neighbours."""

    real: WideRows  # Features of the real nodes, and where each client's begin
    ptr: list[int]
    made: Tensor  # [r, f] features of the generated nodes, and where each client's begin
    made_ptr: list[int]
    adjacency: Adjacency  # Over both, real nodes first; normalised

    @property
    def owner(self) -> Tensor:
        """The client of every node, ``[n + r]``."""
        device = self.made.device
        return torch.cat([owners(self.ptr, device), owners(self.made_ptr, device)])


def unmended(x: Tensor, ptr: list[int], edge_index: Tensor) -> Mended:
    """Take graphs as they are, without generated nodes."""
    real, nothing = wide_rows(x, ptr), x.new_zeros(0, x.shape[1])
    return Mended(real, ptr, nothing, [0] * len(ptr), gcn_adjacency(edge_index, x.shape[0]))


def convolve_features(weights: Tensors, layer: str, graph: Mended) -> Tensor:
    """Apply each client's first graph convolution and ReLU, ``[n + r, b]``."""
    rows = wide_linear(graph.real, graph.made, weights[f"{layer}.weight"], graph.made_ptr)
    bias = weights[f"{layer}.bias"].index_select(0, graph.owner)
    return torch.relu(propagate(graph.adjacency, rows) + bias)


def convolve(weights: Tensors, layer: str, hidden: Tensor, graph: Mended) -> Tensor:
    """Apply each client's further graph convolution and ReLU, ``[n + r, a]`` to ``[n + r, b]``."""
    weight, bias = weights[f"{layer}.weight"], weights[f"{layer}.bias"]
    nothing, n = torch.zeros_like(bias), graph.ptr[-1]
    real = grouped_linear(hidden[:n], weight, nothing, graph.ptr)
    made = grouped_linear(hidden[n:], weight, nothing, graph.made_ptr)
    rows = propagate(graph.adjacency, torch.cat([real, made]))
    return torch.relu(rows + bias.index_select(0, graph.owner))


def owners(ptr: list[int], device: torch.device | None = None) -> Tensor:
    """Return the client of every row, ``[n]``."""
    return torch.repeat_interleave(torch.tensor(ptr, device=device).diff())


def encode(weights: Tensors, graph: Mended) -> Tensor:
    """Encode the real nodes of graphs without generated ones, ``[n, LATENT]``."""
    hidden = convolve_features(weights, "encoder-1", graph)
    return convolve(weights, "encoder-2", hidden, graph)


def predict_numbers(weights: Tensors, z: Tensor, ptr: list[int]) -> Tensor:
    """``dGen``: how many neighbours each node misses, ``[n]``, 0 or more."""
    return torch.relu(linear(weights, "number", z, ptr)).squeeze(1)


def rounded(numbers: Tensor) -> Tensor:
    """Turn predicted numbers into counts from 0 to ``NEIGHBOURS``, ``[n]`` int64."""
    return (numbers.detach() + 0.5).floor().clamp(0, NEIGHBOURS).long()


def generate(weights: Tensors, z: Tensor, ptr: list[int], slot: Slots) -> Tensor:
    """``fGen``: features of the neighbours in some slots."""
    # z [n, LATENT]
    hidden = torch.relu(linear(weights, "generator-1", z, ptr))
    codes = torch.relu(linear(weights, "generator-2", hidden, ptr))
    chosen = codes.view(-1, NEIGHBOURS, CODE)[slot.parent, slot.slot]
    return torch.tanh(linear(weights, "generator-3", chosen, slot_bounds(slot, ptr)))


def slot_bounds(slot: Slots, ptr: list[int]) -> list[int]:
    """Return where each client's slots begin, ``c + 1`` bounds."""
    bounds = torch.tensor(ptr, device=slot.parent.device)
    result: list[int] = torch.searchsorted(slot.parent, bounds).tolist()
    return result


def classify(weights: Tensors, graph: Mended) -> Tensor:
    """Classify the real nodes: 2-layer GCN and a linear classifier, ``[n, classes]`` logits."""
    hidden = convolve_features(weights, "classifier-1", graph)
    hidden = convolve(weights, "classifier-2", hidden, graph)
    return linear(weights, "classifier-3", hidden[: graph.ptr[-1]], graph.ptr)


def judge(generated: Tensor, author: Tensor, x: Tensor, ptr: list[int], judges: Tensor) -> Tensor:
    """FedSage+'s cross-client term: compare generated neighbours with other clients' nodes."""
    # The term is ``sum_j min_{u in V_j} ||g - x_u||^2`` over the clients ``j`` that are not the
    # author. Its gradient is all that an author needs.
    # generated [r, f], author [r], x [n, f], judges [c]
    gradient = torch.empty_like(generated)
    step = max(1, TABLE // max(x.shape[0], 1))
    for first in range(0, generated.shape[0], step):
        part = slice(first, first + step)
        other = (judges[:, None] != author[part]).float()
        nearest = nearest_of_each(generated[part], x, ptr)
        # 2 (g - x_u), summed over the judges: a sparse matrix has the chosen u of every g.
        choice = csr_tensor(
            torch.arange(nearest.shape[1] + 1, device=x.device) * nearest.shape[0],
            nearest.T.ravel(),
            other.T.ravel(),
            (nearest.shape[1], x.shape[0]),
        )
        chosen = (choice @ x).to_dense()
        gradient[part] = 2 * (generated[part] * other.sum(0)[:, None] - chosen)
    return gradient


# Ego-networks side by side, impaired and mended


class SageGraph:
    """The ego-networks of a cohort as one graph without edges between them."""

    def __init__(self, networks: Sequence[EgoNetwork], seed: int, device: torch.device) -> None:
        sizes = [network.nodes.numel() for network in networks]
        self.ptr = bounds(torch.tensor(sizes))
        starts = self.ptr[:-1]
        edges = [net.edge_index + start for net, start in zip(networks, starts, strict=True)]
        self.edge_index = torch.cat(edges, 1).to(device)
        self.x = torch.cat([_dense(network.x) for network in networks]).float().to(device)
        self.sparse_x = wide_rows(self.x, [0, self.x.shape[0]]).matrix
        self.y = torch.cat([network.y for network in networks]).to(device)
        self.masks = [
            torch.cat([getattr(network, f"{split}_mask") for network in networks]).to(device)
            for split in ("train", "val", "test")
        ]
        hidden = torch.cat(
            [_hidden(net.client, size, seed) for net, size in zip(networks, sizes, strict=True)]
        )
        self.impaired = impair(self.edge_index, hidden.to(device))
        kept = self.impaired.kept
        self.kept_train = self.masks[0][kept]
        kept_ptr = torch.searchsorted(kept, torch.tensor(self.ptr, device=device)).tolist()
        self.whole = unmended(self.x, self.ptr, self.edge_index)
        self.rest = unmended(self.x[kept], kept_ptr, self.impaired.edge_index)


def _hidden(client: int, size: int, seed: int) -> Tensor:
    """Draw the nodes that one client hides from its generator, ``[size]`` bool."""
    order = torch.randperm(size, generator=generator(seed, "hidden", client))
    return order < int(HIDDEN_SHARE * size)


def _dense(x: Tensor) -> Tensor:
    return x if x.layout == torch.strided else x.to_dense()


def bounds(sizes: Tensor) -> list[int]:
    """Return where each client's rows begin and the last one's end, ``c + 1`` numbers."""
    return [0, *sizes.cumsum(0).tolist()]


def mend(graph: Mended, edge_index: Tensor, made: Tensor, slot: Slots, parent: Tensor) -> Mended:
    """Hang generated neighbours on a graph that has none."""
    # made, slot [r, f], parent [r]
    n = graph.ptr[-1]
    adjacency = gcn_adjacency(mended_edges(edge_index, n, parent), n + made.shape[0])
    return graph._replace(made=made, made_ptr=slot_bounds(slot, graph.ptr), adjacency=adjacency)


def class_loss(logits: Tensor, y: Tensor, mask: Tensor, ptr: list[int]) -> Tensor:
    """Average the cross-entropy over each client's masked nodes, ``[c]``; zero without any."""
    place = mask.nonzero().flatten()
    loss = F.cross_entropy(logits[place], y[place], reduction="none")
    part = torch.searchsorted(place, torch.tensor(ptr, device=place.device))
    return mean_by_client(loss, part.tolist())
