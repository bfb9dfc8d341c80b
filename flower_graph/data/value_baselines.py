"""Baselines of regression without a network.

Errors are over all clients' nodes together, as the methods' are:

* ``mean``: the mean of all training nodes' numbers, for every node;
* ``linear-regression``: ridge regression on the features alone, on all clients' training nodes; the
  best of several strengths by validation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.baselines import JUDGED, SKIPPED, Figures
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.data.scale import Scale
from flower_graph.ops.counts import Errors
from flower_graph.records.rounds import merit
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import MAE, MSE

MEAN, LINEAR = "mean", "linear-regression"
STRENGTHS = (1e-3, 1e-1, 10.0)  # of the penalty, a training node's share, on features of variance 1
WIDEST = 4000  # features of which the matrix of products is made


def value_baselines(graphs: Sequence[ClientGraph], metric: str) -> Figures:
    """Return each baseline's figures by name: a metric by role, and both by ``scores``.

    ``graphs`` have ``targets``; ``metric`` decides.
    """
    y = torch.cat([_targets(graph) for graph in graphs]).double()
    roles = {
        role: torch.cat([getattr(graph, f"{role}_mask") for graph in graphs])
        for role in ("train", *JUDGED)
    }
    scale = Scale.of([y[roles["train"]]])
    result: Figures = {MEAN: _figures(torch.full_like(y, scale.mean) - y, roles, metric)}
    width = graphs[0].x.shape[1]
    if width > WIDEST:
        why = f"too large: {width:,} features, at most {WIDEST:,}"
        nothing: Tree = {**dict.fromkeys(JUDGED, torch.nan), SKIPPED: why}
        return {**result, LINEAR: nothing}
    x = torch.cat([graph.x.to_dense() for graph in graphs]).double()
    tried = [
        _figures(scale.undo(said) - y, roles, metric)
        for said in _ridge(x, scale.apply(y), roles["train"])
    ]
    best = max(tried, key=lambda one: merit(metric, one["val"]))  # of NaN alone the first
    return {**result, LINEAR: best}


def _targets(graph: ClientGraph) -> Tensor:
    assert graph.targets is not None
    return graph.targets


def _ridge(x: Tensor, y: Tensor, train: Tensor) -> list[Tensor]:
    """Fit standardised numbers by each strength, and predict all nodes, ``[n]`` each."""
    # x [n, f], y [n]; the mean of y over the training nodes is 0, so there is no intercept
    rows = x[train]
    spread = rows.std(0, correction=0)
    x = (x - rows.mean(0)) / torch.where(spread > 0, spread, 1.0)
    rows = x[train]
    products, wanted = rows.T @ rows, rows.T @ y[train]
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    return [
        x @ torch.linalg.solve(products + strength * len(rows) * eye, wanted)
        for strength in STRENGTHS
    ]


def _figures(errors: Tensor, roles: dict[str, Tensor], metric: str) -> Tree:
    sums = Errors.of(errors, {role: roles[role] for role in JUDGED})
    scores = {
        name: {role: sums.mean(place, squared=name == MSE) for place, role in enumerate(JUDGED)}
        for name in (MSE, MAE)
    }
    return {**scores[metric], "scores": scores}
