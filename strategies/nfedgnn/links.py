"""nFedGNN's server where links are learnt: it knows some edges and predicts others.

The model gives each node a row. The logit of a pair is its rows' dot product, or what a
``PairModel``'s decoder gives.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.engine.cohort import Judged, judged_pairs
from flower_graph.models import PairModel
from flower_graph.ops.links import LinkSplit, dot_products, drawn_pairs, split_links
from flower_graph.rng import generator
from flower_graph.strategies.nfedgnn.algorithm import RelayServer
from flower_graph.strategies.nfedgnn.config import NFedGNNConfig


def held_links(edge_index: Tensor, num_nodes: int, config: NFedGNNConfig) -> LinkSplit:
    """Hold out edges of the whole graph as one client with number 0 would."""
    links = config.links
    rng = generator(config.seed if links.seed is None else links.seed, "links", 0)
    return split_links(edge_index, num_nodes, links.val, links.test, rng)


class LinkRelayServer(RelayServer):
    """The server's half, where links are learnt: the model gives each node a row.

    The logit of a pair is its rows' dot product, or what a ``PairModel``'s decoder gives.
    """

    def needed(self, heard: Tensor) -> list[Tensor]:
        return []  # the loss needs the rows of all

    def entropy(self, logits: Tensor, heard: Tensor, server_round: int) -> Tensor:
        """Compute the cross-entropy of training edges and as many drawn pairs without an edge."""
        # logits: rows of nodes [n, h]; of pairs whose users were heard
        assert isinstance(self.graph, Tensor)
        rng = generator(self.seed, "absent-links", server_round)
        pairs, is_edge = drawn_pairs(self.graph, len(self.known), rng)
        kept = heard[pairs[0]] & heard[pairs[1]]
        if not kept.any():
            return 0 * logits.sum()
        scores, truth = _scores(self.model, logits, pairs[:, kept]), is_edge[kept].to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(scores, truth)

    @torch.no_grad()
    def judge(self) -> Judged:
        split = self.data.split
        assert split is not None
        early, later = (
            _scores(self.eval_model, self.logits(edges), split.pairs)
            for edges in (split.messages, split.later)
        )
        return judged_pairs(split, early, later)


def _scores(model: nn.Module, rows: Tensor, pairs: Tensor) -> Tensor:
    if isinstance(model, PairModel):
        return model.decoder(rows, pairs)  # type: ignore[no-any-return]
    return dot_products(rows, pairs)
