"""Baselines of link prediction without a network: by structure alone, by features alone.

Each client's pairs are scored by its own graph, and judged as the methods' are: AUC and average
precision of all clients' pairs together, ranks of an edge among its own client's pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flower_graph.data.baselines import JUDGED, Figures
from flower_graph.ops.links import (
    LinkSplit,
    adamic_adar,
    auc_of_scores,
    average_precision,
    common_neighbours,
    dot_products,
    hits_of,
    rank_counts,
)
from flower_graph.wire.keys import AP, AUC, RANKED, ROLES

NEIGHBOURS, ADAMIC_ADAR, FEATURES = "common-neighbours", "adamic-adar", "feature-product"
Held = tuple[Tensor, LinkSplit]  # features [n, f] and edges of one client
Score = Callable[[Held, Tensor], Tensor]  # of its pairs, over some edges


def _neighbours(held: Held, edges: Tensor) -> Tensor:
    return common_neighbours(edges, held[0].shape[0], held[1].pairs)


def _adamic_adar(held: Held, edges: Tensor) -> Tensor:
    return adamic_adar(edges, held[0].shape[0], held[1].pairs)


def _features(held: Held, edges: Tensor) -> Tensor:
    x, split = held
    rows = x if x.layout == torch.strided else x.to_dense()
    return dot_products(rows, split.pairs)


SCORES: dict[str, Score] = {
    NEIGHBOURS: _neighbours,
    ADAMIC_ADAR: _adamic_adar,
    FEATURES: _features,
}


def link_baselines(graphs: Sequence[Held], metric: str) -> Figures:
    """Return each baseline's figures by name: a metric by role, and all by ``scores``.

    ``graphs`` are features and edges of each client. ``metric`` decides; a metric that a baseline
    lacks, such as the accuracy, is left out.
    """
    if metric not in (AUC, AP, *RANKED):
        return {}
    result: Figures = {}
    for name, score in SCORES.items():
        by_role = {role: link_figures(graphs, score, role) for role in JUDGED}
        scores = {one: {role: by_role[role][one] for role in JUDGED} for one in by_role["test"]}
        result[name] = {**scores[metric], "scores": scores}
    return result


def link_figures(graphs: Sequence[Held], score: Score, role: str) -> dict[str, float]:
    """Return all metrics of a score over the pairs of one role."""
    place = ROLES.index(role)
    parts = []
    for held in graphs:
        split = held[1]
        edges = split.later if place == len(ROLES) - 1 else split.messages
        chosen = split.role == place
        parts.append((score(held, edges)[chosen].double(), split.is_edge[chosen]))
    scores, truth = (torch.cat(column) for column in zip(*parts, strict=True))
    ranks = torch.stack([rank_counts(*part) for part in parts]).sum(0)
    whole = {AUC: auc_of_scores(scores, truth), AP: average_precision(scores, truth)}
    return whole | hits_of(ranks)
