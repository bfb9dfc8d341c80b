"""Ego-networks side by side, impaired and mended, for LocalSage+ and FedSage+."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from flower_graph.ops.graph import csr_tensor, gcn_adjacency, pointers
from flower_graph.ops.mending import Slots, impair, mean_by_client, mended_edges
from flower_graph.ops.wide import wide_rows
from flower_graph.rng import generator
from flower_graph.strategies.fed_sage.neighbour_generation import Mended, slot_bounds, unmended

if TYPE_CHECKING:
    from flower_graph.data.partition.ego_networks import EgoNetwork

HIDDEN_SHARE = 0.25  # of a client's nodes, while its generator learns; published: 3 to 28 %


class SageGraph:
    """The ego-networks of a cohort as one graph without edges between them."""

    def __init__(self, networks: Sequence[EgoNetwork], seed: int, device: torch.device) -> None:
        sizes = [network.nodes.numel() for network in networks]
        self.ptr = bounds(torch.tensor(sizes))
        starts = self.ptr[:-1]
        edges = [net.edge_index + start for net, start in zip(networks, starts, strict=True)]
        self.edge_index = torch.cat(edges, 1).to(device)
        self.x = torch.cat([_dense(network.x) for network in networks]).float().to(device)
        self.sparse_x = _sparse(self.x)
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
        self.whole = _unmended(self.x, self.ptr, self.edge_index)
        self.rest = _unmended(self.x[kept], kept_ptr, self.impaired.edge_index)


def _unmended(x: Tensor, ptr: list[int], edge_index: Tensor) -> Mended:
    adjacency = gcn_adjacency(edge_index, x.shape[0])
    return unmended(wide_rows(x, ptr), ptr, x.shape[1], adjacency)


def _hidden(client: int, size: int, seed: int) -> Tensor:
    """Draw the nodes that one client hides from its generator, ``[size]`` bool."""
    order = torch.randperm(size, generator=generator(seed, "hidden", client))
    return order < int(HIDDEN_SHARE * size)


def _dense(x: Tensor) -> Tensor:
    return x if x.layout == torch.strided else x.to_dense()


def _sparse(x: Tensor) -> Tensor:
    row, col = x.nonzero(as_tuple=True)
    ptr = pointers(row, x.shape[0])
    return csr_tensor(ptr, col.to(torch.int32), x[row, col], (x.shape[0], x.shape[1]))


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
