"""Baselines without a GNN, to compare a run's accuracy with.

They are measured as the methods are: the accuracy on each client's labelled nodes, as a mean over
the clients that have such nodes (one graph counts as one client):

* ``majority``: the commonest class of all training nodes;
* ``majority-per-client``: each client's own commonest class; without training nodes, that of all;
* ``logistic-regression``: on the features alone, trained on all clients' training nodes, or on a
  sample of them where that would take long;
* ``label-propagation``: each client's training labels spread over its own edges, features unused;
  nodes that no label reaches get the client's commonest class, as above. In nFedGNN the server can
  compute it alone: it has the graph's edges and these labels. It also has the validation labels,
  which choose its best round: ``propagate_all_labels`` spreads these too.

A node may train at one client and be tested at another. Then nodes are divided into ``FOLDS``
parts, and each part is predicted by a regression fitted to the others. Without any training nodes
(DeepWalk), ``majority`` is the commonest class of the tested nodes, on which the classifiers are
trained, and there is no regression.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.data.graph import Graph, HeldGraph, row_entries, take_rows
from flower_graph.ops.graph import csr_tensor, gcn_adjacency, pointers
from flower_graph.ops.logistic_regression import fit, scores
from flower_graph.rng import generator
from flower_graph.storage.reading import Tree

JUDGED = ("test", "val")
MAJORITY, OWN_MAJORITY, REGRESSION = "majority", "majority-per-client", "logistic-regression"
PROPAGATION = "label-propagation"
SKIPPED = "skipped"  # beside a regression's figures: why there are none
# Beside those of a regression on a sample: how many training nodes it has, and there are
SAMPLE, TRAINING = "sample", "training-nodes"
FOLDS = 5
# scikit-learn's C for features of variance 1; the better one by validation, the first without
STRENGTHS = (1.0, 10.0)
# Shares of the neighbours in each step of label propagation: the best one by validation
KEPT, STEPS = (0.9, 0.95, 0.99), 50
LARGEST = 10_000_000  # non-zero features of training nodes times classes: some seconds
FEWEST = 10  # training nodes a class that a regression on a sample has
Figures = dict[str, Tree]
# Accuracy of clients' commonest classes above which clients may do better alone: methods were
# more than two points below local training on such graphs alone (docs/results/own-graph.md)
ALONE = 0.6


class Labelled(NamedTuple):
    """One client's nodes, or the whole graph's."""

    x: Tensor  # [n, f], dense or CSR
    y: Tensor  # [n] true classes
    train_y: Tensor  # [n] classes to train on: wrong ones under label noise
    masks: dict[str, Tensor]  # bool [n] by role, of labelled nodes only
    names: (
        Sequence[int | str] | None
    )  # identities of nodes common to all clients; None: no other client has these nodes
    edge_index: Tensor  # [2, e]; none of a client that is without a graph

    @classmethod
    def of(cls, graph: Graph | HeldGraph) -> Labelled:
        y, masks = graph.y, {}
        for role in ("train", *JUDGED):
            mask = getattr(graph, f"{role}_mask", None)
            masks[role] = torch.zeros_like(y, dtype=torch.bool) if mask is None else mask & (y >= 0)
        train_y = getattr(graph, "train_y", y)
        edges = getattr(graph, "edge_index", None)
        if edges is None or getattr(graph, "is_graphless", False):
            edges = torch.empty(2, 0, dtype=torch.int64)
        return cls(graph.x, y, train_y, masks, getattr(graph, "identities", None), edges)


def client_baselines(graphs: Sequence[HeldGraph]) -> Figures:
    """Return the four baselines of a run whose clients hold graphs, by name and by role."""
    parts = [Labelled.of(graph) for graph in graphs]
    return {
        MAJORITY: _majority(parts, is_own=False),
        OWN_MAJORITY: _majority(parts, is_own=True),
        REGRESSION: _regression(parts),
        PROPAGATION: _propagation(parts),
    }


def graph_baselines(graph: Graph | HeldGraph) -> Figures:
    """Return the three baselines of a run on one graph with masks, without clients."""
    parts = [Labelled.of(graph)]
    return {
        MAJORITY: _majority(parts, is_own=False),
        REGRESSION: _regression(parts),
        PROPAGATION: _propagation(parts),
    }


def propagate_all_labels(graph: Graph | HeldGraph) -> dict[str, float]:
    """Spread validation labels too; ``val`` uses training labels alone, which chose the share."""
    part = Labelled.of(graph)
    known = part._replace(masks=part.masks | {"train": part.masks["train"] | part.masks["val"]})
    rows = zip(_propagated([part]), _propagated([known]), strict=True)
    chosen = max(rows, key=lambda one: one[0]["val"])
    return {"val": chosen[0]["val"], "test": chosen[1]["test"]}


def says_one_class(baselines: Figures) -> str:
    """Return a warning that clients may do better alone, if most of a client's nodes are alike."""
    own = baselines.get(OWN_MAJORITY, {}).get("test", 0.0)
    if not own >= ALONE:
        return ""
    return (
        f"clients' nodes are mostly of one class (guessing it reaches {own:.3f}): clients that "
        "train alone may reach more"
    )


def own_baselines(graphs: Sequence[HeldGraph]) -> Figures:
    """Return each client's baselines on its own data, as means over the clients here."""
    each = [graph_baselines(graph) for graph in graphs]
    return {
        name: {role: _mean([one[name][role] for one in each]) for role in JUDGED}
        for name in (MAJORITY, REGRESSION)
    }


def _majority(parts: Sequence[Labelled], *, is_own: bool) -> dict[str, float]:
    result = {}
    for role in JUDGED:
        # If nobody trains on labels, classifiers are trained on the tested nodes.
        source = role if _commonest(parts, "train") is None else "train"
        whole = _commonest(parts, source)
        own = [_commonest([part], source) if is_own else None for part in parts]
        guesses = [whole if guess is None else guess for guess in own]
        right = [
            part.y == (-1 if guess is None else guess)  # nobody has such nodes
            for part, guess in zip(parts, guesses, strict=True)
        ]
        result[role] = _accuracy(parts, role, right)
    return result


def _commonest(parts: Sequence[Labelled], role: str) -> int | None:
    y = torch.cat([(p.train_y if role == "train" else p.y)[p.masks[role]] for p in parts])
    return int(y.bincount().argmax()) if y.numel() else None


def _regression(parts: Sequence[Labelled]) -> dict[str, object]:
    """Fit the regressions; choose the better of two strengths by validation."""
    train = torch.cat([part.masks["train"] for part in parts])
    y = torch.cat([part.train_y for part in parts])
    names, sizes = y[train].unique(), [part.y.numel() for part in parts]
    nothing: dict[str, object] = dict.fromkeys(JUDGED, math.nan)
    if not names.numel():
        return {**nothing, SKIPPED: "nobody has training nodes"}
    fold = _folds(parts)
    used = sum(_used(part.x, part.masks["train"]) for part in parts)
    work, sampled = used * names.numel() * (1 + int(fold.max())), dict[str, object]()
    if work > LARGEST:
        count, whole = int(train.sum()) * LARGEST // work, int(train.sum())
        if count < FEWEST * names.numel():
            why = f"{used:,} non-zero features of training nodes and {names.numel()} classes"
            return {**nothing, SKIPPED: f"too large: {why}"}
        train, sampled = _sample(train, count), {SAMPLE: count, TRAINING: whole}
    x, rows = _pooled([part.x for part in parts]), []
    for guess in _predicted(x, torch.searchsorted(names, y), train, fold, names.numel()):
        right = [
            part.y == names[local] for part, local in zip(parts, guess.split(sizes), strict=True)
        ]
        rows.append({role: _accuracy(parts, role, right) for role in JUDGED})
    return _best(rows) | sampled


def _sample(mask: Tensor, count: int) -> Tensor:
    among = mask.nonzero().flatten()
    drawn = torch.randperm(among.numel(), generator=generator(0, "regression-sample"))[:count]
    return torch.zeros_like(mask).index_fill_(0, among[drawn], True)


def _propagation(parts: Sequence[Labelled]) -> dict[str, object]:
    nothing: dict[str, object] = dict.fromkeys(JUDGED, math.nan)
    if _commonest(parts, "train") is None:
        return nothing
    y = torch.cat([part.train_y[part.masks["train"]] for part in parts])
    classes, count = 1 + int(y.max()), sum(part.edge_index.shape[1] for part in parts)
    if count * classes > LARGEST:
        return {**nothing, SKIPPED: f"too large: {count:,} edges and {classes} classes"}
    return _best(_propagated(parts))


def _propagated(parts: Sequence[Labelled]) -> list[dict[str, float]]:
    whole, sizes = _commonest(parts, "train"), [part.y.numel() for part in parts]
    own = [_commonest([part], "train") for part in parts]
    guesses = torch.tensor([whole if guess is None else guess for guess in own])
    fallback = guesses.repeat_interleave(torch.tensor(sizes))  # [n] of all clients' nodes
    train = torch.cat([part.masks["train"] for part in parts])
    y = torch.cat([part.train_y for part in parts])
    start = torch.zeros(y.numel(), 1 + int(y[train].max()))
    start[train, y[train]] = 1
    first = torch.tensor([0, *sizes]).cumsum(0).tolist()
    edges = torch.cat([one.edge_index + at for one, at in zip(parts, first, strict=False)], 1)
    accuracies = []
    for rows in _spread(start, gcn_adjacency(edges, y.numel()).matrix):
        guess = torch.where(rows.sum(1) > 0, rows.argmax(1), fallback)
        right = [part.y == local for part, local in zip(parts, guess.split(sizes), strict=True)]
        accuracies.append({role: _accuracy(parts, role, right) for role in JUDGED})
    return accuracies


def _spread(start: Tensor, matrix: Tensor) -> list[Tensor]:
    result = []  # [n, k] each
    for kept in KEPT:
        rows = start
        for _ in range(STEPS):
            rows = kept * (matrix @ rows) + (1 - kept) * start
        result.append(rows)
    return result


def _best(accuracies: Sequence[dict[str, float]]) -> dict[str, object]:
    best = max(accuracies, key=lambda one: -1.0 if math.isnan(one["val"]) else one["val"])
    return dict(best)


def _predicted(x: Tensor, y: Tensor, train: Tensor, fold: Tensor, classes: int) -> list[Tensor]:
    """Predict all nodes, once with each strength; those of a fold by a fit to the others."""
    result = [torch.zeros_like(y) for _ in STRENGTHS]
    folds = 1 + int(fold.max())
    for number in range(folds):
        weights = None
        trained = (train & (fold != number) if folds > 1 else train).nonzero().flatten()
        rows, due = take_rows(x, trained), fold == number
        for guess, strength in zip(result, STRENGTHS, strict=True):
            if trained.numel():
                weights = fit(rows, y[trained], classes, strength, start=weights)
                guess[due] = scores(x, weights).argmax(1)[due]
    return result


def _folds(parts: Sequence[Labelled]) -> Tensor:
    # The first by name in the order of the clients goes to fold 0, the next to 1, and so on.
    numbers: dict[int | str, int] = {}
    sizes = [part.y.numel() for part in parts]
    if any(part.names is None for part in parts):
        return torch.zeros(sum(sizes), dtype=torch.int64)
    for part in parts:
        for name in part.names or ():
            numbers.setdefault(name, len(numbers))
    node = torch.tensor([numbers[name] for part in parts for name in part.names or ()])
    train, *tested = (torch.cat([p.masks[role] for p in parts]) for role in ("train", *JUDGED))
    is_leaking = bool(torch.isin(node[train], node[tested[0] | tested[1]]).any())
    return node % FOLDS if is_leaking else torch.zeros_like(node)


def _pooled(matrices: Sequence[Tensor]) -> Tensor:
    rows, columns = sum(x.size(0) for x in matrices), matrices[0].size(1)
    used = sum(_used(x) for x in matrices)
    if 3 * used > rows * columns and all(x.layout == torch.strided for x in matrices):
        whole = torch.cat(list(matrices)).float()
        return whole / _deviation(whole, whole.mean(0), rows)
    parts, first = [], 0
    for x in matrices:
        row, column, values = _entries(x)
        parts.append((row + first, column, values))
        first += x.size(0)
    row, column, values = (torch.cat(each) for each in zip(*parts, strict=True))
    mean = torch.zeros(columns).index_add_(0, column.long(), values) / rows
    values = values / _deviation(values, mean, rows)
    return csr_tensor(pointers(row, rows), column.to(torch.int32), values, (rows, columns))


def _deviation(values: Tensor, mean: Tensor, rows: int) -> float:
    square = float(values.double().square().sum()) / rows
    variance = square - float(mean.double().square().sum())
    return math.sqrt(variance) if variance > 1e-9 * square else 1.0


def _entries(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if x.layout == torch.strided:
        row, column = x.nonzero(as_tuple=True)
        return row, column, x[row, column].float()
    row, _ = row_entries(x.crow_indices().long(), torch.arange(x.size(0)))
    return row, x.col_indices().long(), x.values().float()


def _used(x: Tensor, mask: Tensor | None = None) -> int:
    if x.layout == torch.strided:
        return int((x if mask is None else x[mask]).count_nonzero())
    used = x.crow_indices().diff()
    return int((used if mask is None else used[mask]).sum())


def _accuracy(parts: Sequence[Labelled], role: str, right: Sequence[Tensor]) -> float:
    tested = [(one, part.masks[role]) for one, part in zip(right, parts, strict=True)]
    return _mean([float(one[mask].double().mean()) for one, mask in tested])


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan
