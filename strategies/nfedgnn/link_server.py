"""The server's half for link prediction: it knows some edges, and predicts the others.

This file needs PyTorch alone, as ``server_model.py`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.data.checked import server_graph
from flower_graph.models import PairModel
from flower_graph.ops.links import (
    LinkSplit,
    dot_products,
    draw_absent,
    ends,
    split_links,
    undirected,
)
from flower_graph.rng import generator
from flower_graph.strategies.nfedgnn.server_model import (
    Judged,
    RelayServer,
    ServerData,
)

ROLES = ("train", "val", "test")


class HeldLinks(NamedTuple):
    """Which shares of the edges are held out, and the seed of the draw."""

    val: float
    test: float
    seed: int

    def split(self, edge_index: Tensor, num_nodes: int) -> LinkSplit:
        """Hold out edges of the whole graph as one client with number 0 would."""
        rng = generator(self.seed, "links", 0)
        return split_links(edge_index, num_nodes, self.val, self.test, rng)


class LinkRelayServer(RelayServer):
    """The server's model and data, as tensors, where links are learnt.

    The logit of a pair is its rows' dot product, or what a ``PairModel``'s decoder gives.
    Arguments are those of ``RelayServer``, and ``links``: what is held out.
    """

    # Any: arguments are those of its parent
    def __init__(self, *data_and_model: Any, links: HeldLinks, **more: Any) -> None:
        self.links = links
        super().__init__(*data_and_model, **more)

    def take(self, data: ServerData, left: Sequence[int] = ()) -> None:
        """Take a graph; hold out some of its edges. Labels and masks of nodes play no part."""
        edges, n = server_graph(data).edge_index, int(data.y.shape[0])
        split = self.links.split(edges, n)
        self.split = LinkSplit(*(part.to(self.device) for part in vars(split).values()))
        self.whole = edges.to(self.device)
        super().take(data, left)
        self.num_classes = 2
        self.masks = {role: torch.zeros_like(self.present) for role in ROLES}
        self._all_edges = self.split.messages
        self._forget_graph()

    def _forget_graph(self) -> None:
        super()._forget_graph()
        self._own: Tensor | None = None

    def _learnt_from(self, heard: Tensor) -> tuple[()]:
        """Return no nodes: the loss needs the rows of all."""
        return ()

    def entropy(self, logits: Tensor, heard: Tensor, server_round: int) -> Tensor:
        """Compute the cross-entropy of training edges and as many drawn pairs without an edge."""
        # logits: rows of nodes [n, h]; of pairs whose users were heard
        if self._own is None:
            self._own = undirected(self.edges.cpu(), self.num_nodes)
        own = self._own
        rng = generator(self.seed, "absent-links", server_round)
        absent = draw_absent(own, self.num_nodes, len(own), rng)
        pairs = ends(torch.cat([own, absent]), self.num_nodes).to(self.device)
        is_edge = torch.arange(pairs.shape[1], device=self.device) < len(own)
        kept = heard[pairs[0]] & heard[pairs[1]]
        if not kept.any():
            return 0 * logits.sum()
        scores, truth = _scores(self.model, logits, pairs[:, kept]), is_edge[kept].to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(scores, truth)

    @torch.no_grad()
    def rows(self, edges: Tensor) -> Tensor:
        """Return nodes' rows over some edges, for users that have answered, ``[n, h]``."""
        self.eval_model.eval()
        kept = self.known[edges[0]] & self.known[edges[1]]
        result: Tensor = self.eval_model(self.latent, edges[:, kept])
        return result

    @torch.no_grad()
    def judge(self) -> Judged:
        """Judge pairs; for test pairs the model also sees the validation edges."""
        split = self.split
        early, later = (
            _scores(self.eval_model, self.rows(edges), split.pairs)
            for edges in (split.messages, split.later)
        )
        score = torch.where(split.role == len(ROLES) - 1, later, early)
        masks = {role: split.role == number for number, role in enumerate(ROLES)}
        return Judged(torch.stack([torch.zeros_like(score), score], 1), split.is_edge.long(), masks)


def _scores(model: nn.Module, rows: Tensor, pairs: Tensor) -> Tensor:
    """Return the logits ``[m]`` of pairs ``[2, m]`` from the nodes' rows ``[n, h]``."""
    if isinstance(model, PairModel):
        return model.decoder(rows, pairs)  # type: ignore[no-any-return]
    return dot_products(rows, pairs)
