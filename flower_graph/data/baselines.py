"""Baselines without a GNN, to compare a run's accuracy, error or link metrics with.

``docs/reference/outputs.md`` says what each baseline is. Accuracies are means over the clients that
have labelled nodes in a role, as the methods are measured; one graph counts as one client. Errors,
AUC and average precision are of all clients' nodes or pairs together.

A node may train at one client and be tested at another. Then nodes are divided into ``FOLDS``
parts, and each part is predicted by a regression fitted to the others. Without any training nodes
(DeepWalk), ``majority`` is the commonest class of the tested nodes, on which the classifiers are
trained, and there is no regression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.data.graph import ClientGraph, Graph, Scale, take_rows
from flower_graph.ops.counts import Errors
from flower_graph.ops.graph import csr_tensor, gcn_adjacency, pointers
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
from flower_graph.ops.logistic_regression import fit, scores
from flower_graph.records.rounds import merit
from flower_graph.rng import generator
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import AP, AUC, MAE, MSE, RANKED, ROLES

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
    names: Sequence[int | str] | None  # identities, the same at all clients; None: of its own
    edge_index: Tensor  # [2, e]; none of a client that is without a graph

    @classmethod
    def of(cls, graph: Graph | ClientGraph) -> Labelled:
        y, masks = graph.y, {}
        for role in ROLES:
            mask = getattr(graph, f"{role}_mask", None)
            masks[role] = torch.zeros_like(y, dtype=torch.bool) if mask is None else mask & (y >= 0)
        train_y = getattr(graph, "train_y", y)
        edges = getattr(graph, "edge_index", None)
        if edges is None or getattr(graph, "is_graphless", False):
            edges = torch.empty(2, 0, dtype=torch.int64)
        return cls(graph.x, y, train_y, masks, getattr(graph, "identities", None), edges)


def client_baselines(graphs: Sequence[Graph | ClientGraph]) -> Figures:
    """Return the four baselines of a run whose clients hold graphs, by name and by role."""
    parts = [Labelled.of(graph) for graph in graphs]
    return {
        MAJORITY: _majority(parts, is_own=False),
        OWN_MAJORITY: _majority(parts, is_own=True),
        REGRESSION: _regression(parts),
        PROPAGATION: _propagation(parts),
    }


def graph_baselines(graph: Graph | ClientGraph) -> Figures:
    """Return the three baselines of a run on one graph with masks, without clients."""
    found = client_baselines([graph])
    return {name: one for name, one in found.items() if name != OWN_MAJORITY}


def propagate_all_labels(graph: Graph | ClientGraph) -> dict[str, float]:
    """Spread validation labels too; ``val`` uses training labels alone, which chose the share."""
    part = Labelled.of(graph)
    known = part._replace(masks=part.masks | {"train": part.masks["train"] | part.masks["val"]})
    of_training, of_all = (
        [_accuracies([part], guess) for guess in _propagated([spread])] for spread in (part, known)
    )
    best = max(zip(of_training, of_all, strict=True), key=lambda pair: pair[0]["val"])
    return {"val": best[0]["val"], "test": best[1]["test"]}


def says_one_class(baselines: Figures) -> str:
    """Return a warning that clients may do better alone, if most of a client's nodes are alike."""
    own = baselines.get(OWN_MAJORITY, {}).get("test", 0.0)
    if not own >= ALONE:
        return ""
    return (
        f"clients' nodes are mostly of one class (guessing it reaches {own:.3f}): clients that "
        "train alone may reach more"
    )


def own_baselines(graphs: Sequence[ClientGraph]) -> Figures:
    """Return each client's baselines on its own data, as means over the clients here."""
    each = [graph_baselines(graph) for graph in graphs]
    return {
        name: {role: _mean([one[name][role] for one in each]) for role in JUDGED}
        for name in (MAJORITY, REGRESSION)
    }


def _majority(parts: Sequence[Labelled], *, is_own: bool) -> dict[str, float]:
    # If nobody trains on labels, classifiers are trained on the tested nodes.
    nobody = _commonest(parts, "train") is None
    guesses = {role: _guess(parts, role if nobody else "train", is_own) for role in JUDGED}
    return {role: _accuracies(parts, guess)[role] for role, guess in guesses.items()}


def _guess(parts: Sequence[Labelled], role: str, is_own: bool) -> Tensor:
    """Guess the commonest class for all nodes ``[n]``: that of all, or first the client's own."""
    whole, guesses = _commonest(parts, role), []
    for part in parts:
        own = _commonest([part], role) if is_own else None
        guess = whole if own is None else own
        guesses.append(torch.full_like(part.y, -1 if guess is None else guess))
    return torch.cat(guesses)


def _commonest(parts: Sequence[Labelled], role: str) -> int | None:
    y = torch.cat([(p.train_y if role == "train" else p.y)[p.masks[role]] for p in parts])
    return int(y.bincount().argmax()) if y.numel() else None


def _regression(parts: Sequence[Labelled]) -> Tree:
    """Fit the regressions; choose the better of two strengths by validation."""
    train = torch.cat([part.masks["train"] for part in parts])
    y = torch.cat([part.train_y for part in parts])
    names = y[train].unique()
    if not names.numel():
        return _skipped("nobody has training nodes")
    fold = _folds(parts)
    used = sum(_used(part.x, part.masks["train"]) for part in parts)
    work, sampled = used * names.numel() * (1 + int(fold.max())), dict[str, object]()
    if work > LARGEST:
        whole = int(train.sum())
        count = whole * LARGEST // work
        if count < FEWEST * names.numel():
            why = f"{used:,} non-zero features of training nodes and {names.numel()} classes"
            return _skipped(f"too large: {why}")
        train, sampled = _sample(train, count), {SAMPLE: count, TRAINING: whole}
    x = _pooled([part.x for part in parts])
    guesses = _predicted(x, torch.searchsorted(names, y), train, fold, names.numel())
    return _best(parts, [names[guess] for guess in guesses]) | sampled


def _sample(mask: Tensor, count: int) -> Tensor:
    among = mask.nonzero().flatten()
    drawn = torch.randperm(among.numel(), generator=generator(0, "regression-sample"))[:count]
    return torch.zeros_like(mask).index_fill_(0, among[drawn], True)


def _propagation(parts: Sequence[Labelled]) -> Tree:
    if _commonest(parts, "train") is None:
        return dict.fromkeys(JUDGED, math.nan)
    y = torch.cat([part.train_y[part.masks["train"]] for part in parts])
    classes, count = 1 + int(y.max()), sum(part.edge_index.shape[1] for part in parts)
    if count * classes > LARGEST:
        return _skipped(f"too large: {count:,} edges and {classes} classes")
    return _best(parts, _propagated(parts))


def _propagated(parts: Sequence[Labelled]) -> list[Tensor]:
    """Predict all nodes, once with each share of ``KEPT``."""
    fallback = _guess(parts, "train", is_own=True)
    train = torch.cat([part.masks["train"] for part in parts])
    y = torch.cat([part.train_y for part in parts])
    start = torch.zeros(y.numel(), 1 + int(y[train].max()))
    start[train, y[train]] = 1
    first = torch.tensor([0, *(part.y.numel() for part in parts)]).cumsum(0).tolist()
    edges = torch.cat([one.edge_index + at for one, at in zip(parts, first, strict=False)], 1)
    matrix, result = gcn_adjacency(edges, y.numel()).matrix, []
    for kept in KEPT:
        rows = start  # [n, k]
        for _ in range(STEPS):
            rows = kept * (matrix @ rows) + (1 - kept) * start
        result.append(torch.where(rows.sum(1) > 0, rows.argmax(1), fallback))
    return result


def _best(parts: Sequence[Labelled], guesses: Sequence[Tensor]) -> Tree:
    """Return the accuracies of the guesses ``[n]`` that are best by validation."""
    each = [_accuracies(parts, guess) for guess in guesses]
    return max(each, key=lambda one: -1.0 if math.isnan(one["val"]) else one["val"])


def _skipped(why: str) -> Tree:
    return {**dict.fromkeys(JUDGED, math.nan), SKIPPED: why}


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
    """Return all rows as one matrix whose features have variance 1 together, CSR if sparse."""
    rows, columns = sum(x.size(0) for x in matrices), matrices[0].size(1)
    used = sum(_used(x) for x in matrices)
    if 3 * used > rows * columns and all(x.layout == torch.strided for x in matrices):
        whole = torch.cat(list(matrices)).float()
        return whole / _deviation(whole, whole.mean(0), rows)
    entries = torch.cat([x.to_sparse_coo() for x in matrices]).coalesce()
    (row, column), values = entries.indices(), entries.values().float()
    mean = torch.zeros(columns).index_add_(0, column, values) / rows
    values = values / _deviation(values, mean, rows)
    return csr_tensor(pointers(row, rows), column.to(torch.int32), values, (rows, columns))


def _deviation(values: Tensor, mean: Tensor, rows: int) -> float:
    square = float(values.double().square().sum()) / rows
    variance = square - float(mean.double().square().sum())
    return math.sqrt(variance) if variance > 1e-9 * square else 1.0


def _used(x: Tensor, mask: Tensor | None = None) -> int:
    if x.layout == torch.strided:
        return int((x if mask is None else x[mask]).count_nonzero())
    used = x.crow_indices().diff()
    return int((used if mask is None else used[mask]).sum())


def _accuracies(parts: Sequence[Labelled], guess: Tensor) -> dict[str, float]:
    """Judge a guess ``[n]`` of all clients' nodes, by role."""
    each = guess.split([part.y.numel() for part in parts])
    right = [part.y == local for part, local in zip(parts, each, strict=True)]
    result = {}
    for role in JUDGED:
        tested = [one[part.masks[role]] for one, part in zip(right, parts, strict=True)]
        result[role] = _mean([float(one.double().mean()) for one in tested])
    return result


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


# Numbers ----------------------------------------------------------------------------------------

MEAN, LINEAR = "mean", "linear-regression"
PENALTIES = (1e-3, 1e-1, 10.0)  # for a training node, on features of variance 1
WIDEST = 4000  # features of which the matrix of products is made


def value_baselines(graphs: Sequence[ClientGraph], metric: str) -> Figures:
    """Return each baseline's figures by name: a metric by role, and both by ``scores``.

    ``graphs`` have ``targets``; ``metric`` decides.
    """
    y = torch.cat([graph.targets for graph in graphs if graph.targets is not None]).double()
    roles = {role: torch.cat([getattr(g, f"{role}_mask") for g in graphs]) for role in ROLES}
    scale = Scale.of([y[roles["train"]]])

    def figures(said: Tensor) -> Tree:
        sums = Errors.of(said - y, {role: roles[role] for role in JUDGED})
        scores = {
            name: {role: sums.mean(place, squared=name == MSE) for place, role in enumerate(JUDGED)}
            for name in (MSE, MAE)
        }
        return {**scores[metric], "scores": scores}

    result: Figures = {MEAN: figures(torch.full_like(y, scale.mean))}
    width = graphs[0].x.shape[1]
    if width > WIDEST:
        return {**result, LINEAR: _skipped(f"too large: {width:,} features, at most {WIDEST:,}")}
    x = torch.cat([graph.x.to_dense() for graph in graphs]).double()
    tried = [figures(scale.undo(said)) for said in _ridge(x, scale.apply(y), roles["train"])]
    best = max(tried, key=lambda one: merit(metric, one["val"]))  # of NaN alone the first
    return {**result, LINEAR: best}


def _ridge(x: Tensor, y: Tensor, train: Tensor) -> list[Tensor]:
    """Fit standardised numbers by each penalty, and predict all nodes, ``[n]`` each."""
    # x [n, f], y [n]; the mean of y over the training nodes is 0, so there is no intercept
    rows = x[train]
    spread = rows.std(0, correction=0)
    x = (x - rows.mean(0)) / torch.where(spread > 0, spread, 1.0)
    rows = x[train]
    products, wanted = rows.T @ rows, rows.T @ y[train]
    eye = torch.eye(x.shape[1], dtype=x.dtype) * len(rows)
    return [x @ torch.linalg.solve(products + penalty * eye, wanted) for penalty in PENALTIES]


# Links ------------------------------------------------------------------------------------------

Held = tuple[Tensor, LinkSplit]  # features [n, f] and edges of one client
# A score of pairs, from edges, features and pairs
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "common-neighbours": lambda edges, x, pairs: common_neighbours(edges, x.shape[0], pairs),
    "adamic-adar": lambda edges, x, pairs: adamic_adar(edges, x.shape[0], pairs),
    "feature-product": lambda edges, x, pairs: dot_products(x.to_dense(), pairs),
}


def link_baselines(graphs: Sequence[Held], metric: str) -> Figures:
    """Return each baseline's figures by name: a metric by role, and all by ``scores``.

    ``graphs`` are features and edges of each client. ``metric`` decides; a metric that a baseline
    lacks, such as the accuracy, is left out.
    """
    if metric not in (AUC, AP, *RANKED):
        return {}
    result: Figures = {}
    for name in SCORES:
        by_role = {role: _link_figures(graphs, name, role) for role in JUDGED}
        scores = {one: {role: by_role[role][one] for role in JUDGED} for one in by_role["test"]}
        result[name] = {**scores[metric], "scores": scores}
    return result


def _link_figures(graphs: Sequence[Held], name: str, role: str) -> dict[str, float]:
    parts = []
    for x, split in graphs:
        edges = split.later if role == ROLES[-1] else split.messages
        chosen = split.role == ROLES.index(role)
        parts.append((SCORES[name](edges, x, split.pairs)[chosen].double(), split.is_edge[chosen]))
    scores, truth = (torch.cat(column) for column in zip(*parts, strict=True))
    ranks = torch.stack([rank_counts(*part) for part in parts]).sum(0)
    whole = {AUC: auc_of_scores(scores, truth), AP: average_precision(scores, truth)}
    return whole | hits_of(ranks)
