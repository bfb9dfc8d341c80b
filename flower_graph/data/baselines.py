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

from flower_graph.data.folders.client_folder import Clients
from flower_graph.data.graph import (
    ClientGraph,
    Graph,
    Scale,
    joined_edges,
    joined_masks,
    node_numbers,
    take_rows,
)
from flower_graph.ops import links
from flower_graph.ops.counts import Errors
from flower_graph.ops.graph import compact, gcn_adjacency
from flower_graph.ops.logistic_regression import fit, scores
from flower_graph.records.rounds import merit
from flower_graph.rng import generator
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import AP, AUC, MAE, MSE, RANKED, ROLES

JUDGED = ("test", "val")
MAJORITY, OWN_MAJORITY, REGRESSION = "majority", "majority-per-client", "logistic-regression"
PROPAGATION = "label-propagation"
SKIPPED = "skipped"  # beside a regression's figures: why there are none
# Beside the figures of a regression on a sample: its training nodes, and all training nodes
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


class Pool(NamedTuple):
    """All clients' nodes together, or the whole graph's."""

    x: Tensor  # [n, f], dense or CSR
    clients: int
    owner: Tensor  # [n] the client of each node
    y: Tensor  # [n] true classes
    train_y: Tensor  # [n] classes to train on: wrong ones under label noise
    masks: dict[str, Tensor]  # bool [n] by role, of labelled nodes only
    node: Tensor | None  # [n] numbers, the same at all clients; None: each is of one client
    edge_index: Tensor  # [2, e]; none of a client that is without a graph

    @classmethod
    def of(cls, graphs: Sequence[Graph | ClientGraph]) -> Pool:
        sizes = torch.tensor([graph.y.numel() for graph in graphs])
        y, matrices = torch.cat([graph.y for graph in graphs]), [graph.x for graph in graphs]
        if any(x.layout != torch.strided for x in matrices):
            matrices = [x.to_sparse_coo() for x in matrices]
        x = torch.cat(matrices)
        return cls(
            x if x.layout == torch.strided else x.to_sparse_csr(),
            len(graphs),
            torch.arange(len(graphs)).repeat_interleave(sizes),
            y,
            torch.cat([graph.labels for graph in graphs]),
            {role: mask & (y >= 0) for role, mask in joined_masks(graphs).items()},
            node_numbers(graphs) if isinstance(graphs, Clients) and graphs.is_identified else None,
            joined_edges(graphs),
        )

    def guess(self, role: str, *, is_own: bool) -> Tensor | None:
        """Guess the commonest class for all nodes ``[n]``: that of all, or first the client's own.

        None if no node in this role has a label.
        """
        known, y = self.masks[role], self.train_y if role == "train" else self.y
        if not known.any():
            return None
        size = 1 + int(y[known].max())
        whole = y[known].bincount(minlength=size).argmax()
        cells = (self.owner * size + y)[known]
        counts = cells.bincount(minlength=self.clients * size).view(-1, size)
        own = torch.where(counts.any(1), counts.argmax(1), whole)
        return own[self.owner] if is_own else whole.expand(len(y))

    def accuracies(self, guess: Tensor | None) -> dict[str, float]:
        """Judge a guess ``[n]`` of all nodes by role: the mean over clients, NaN without any."""
        result = dict.fromkeys(JUDGED, math.nan)
        for role in JUDGED if guess is not None else ():
            tested = self.masks[role]
            nodes = self.owner[tested].bincount(minlength=self.clients)
            right = self.owner[tested & (self.y == guess)].bincount(minlength=self.clients)
            result[role] = float((right / nodes.double())[nodes > 0].mean())
        return result

    def best(self, guesses: Sequence[Tensor]) -> Tree:
        """Return the accuracies of the guesses ``[n]`` that are best by validation."""
        each = [self.accuracies(guess) for guess in guesses]
        return max(each, key=lambda one: -1.0 if math.isnan(one["val"]) else one["val"])


def client_baselines(graphs: Sequence[Graph | ClientGraph]) -> Figures:
    """Return the four baselines of a run whose clients hold graphs, by name and by role."""
    pool = Pool.of(graphs)
    result: Figures = {}
    for name, is_own in ((MAJORITY, False), (OWN_MAJORITY, True)):
        # If nobody trains on labels, classifiers are trained on the tested nodes.
        trained = pool.guess("train", is_own=is_own)
        own = {role: pool.guess(role, is_own=is_own) for role in JUDGED if trained is None}
        result[name] = {role: pool.accuracies(own.get(role, trained))[role] for role in JUDGED}
    result |= {REGRESSION: _regression(pool), PROPAGATION: dict.fromkeys(JUDGED, math.nan)}
    if (train := pool.masks["train"]).any():
        classes, count = 1 + int(pool.train_y[train].max()), pool.edge_index.shape[1]
        is_large, why = count * classes > LARGEST, f"{count:,} edges and {classes} classes"
        found = _skipped(f"too large: {why}") if is_large else pool.best(_propagated(pool))
        result[PROPAGATION] = found
    return result


def graph_baselines(graph: Graph | ClientGraph) -> Figures:
    """Return the three baselines of a run on one graph with masks, without clients."""
    found = client_baselines([graph])
    return {name: one for name, one in found.items() if name != OWN_MAJORITY}


def propagate_all_labels(graph: Graph | ClientGraph) -> dict[str, float]:
    """Spread validation labels too; ``val`` uses training labels alone, which chose the share."""
    pool = Pool.of([graph])
    known = pool._replace(masks=pool.masks | {"train": pool.masks["train"] | pool.masks["val"]})
    of_training, of_all = (
        [pool.accuracies(guess) for guess in _propagated(spread)] for spread in (pool, known)
    )
    best = max(zip(of_training, of_all, strict=True), key=lambda pair: pair[0]["val"])
    return {"val": best[0]["val"], "test": best[1]["test"]}


def says_one_class(baselines: Figures) -> str:
    """Return a warning that clients may do better alone, if most of a client's nodes are alike."""
    own = baselines.get(OWN_MAJORITY, {}).get("test", 0.0)
    reached = f"clients' nodes are mostly of one class (guessing it reaches {own:.3f})"
    return f"{reached}: clients that train alone may reach more" if own >= ALONE else ""


def own_baselines(graphs: Sequence[ClientGraph]) -> Figures:
    """Return each client's baselines on its own data, as means over the clients here."""
    each, result = [graph_baselines(graph) for graph in graphs], dict[str, Tree]()
    for name in (MAJORITY, REGRESSION):
        figures = torch.tensor([[one[name][role] for role in JUDGED] for one in each]).double()
        result[name] = dict(zip(JUDGED, figures.nanmean(0).tolist(), strict=True))
    return result


def _skipped(why: str) -> Tree:
    return {**dict.fromkeys(JUDGED, math.nan), SKIPPED: why}


def _regression(pool: Pool) -> Tree:
    """Fit the regressions; choose the better of two strengths by validation."""
    train, node, sampled = pool.masks["train"], pool.node, dict[str, object]()
    classes, fold = pool.train_y[train].unique(), torch.zeros_like(pool.owner)
    if not classes.numel():
        return _skipped("nobody has training nodes")
    # If a node trains at one client and is tested at another, nodes are divided by number
    tested = pool.masks["test"] | pool.masks["val"]
    if node is not None and torch.isin(node[train], node[tested]).any():
        fold = node % FOLDS
    folds, whole = 1 + int(fold.max()), int(train.sum())
    x = compact(pool.x.float())
    is_dense = x.layout == torch.strided
    used = int(x[train].count_nonzero() if is_dense else x.crow_indices().diff()[train].sum())
    work = used * classes.numel() * folds
    if work > LARGEST:
        count = whole * LARGEST // work
        if count < FEWEST * classes.numel():
            return _skipped(f"too large: {used:,} non-zero features, {classes.numel()} classes")
        drawn = torch.randperm(whole, generator=generator(0, "regression-sample"))[:count]
        chosen = train.nonzero().flatten()[drawn]
        train = torch.zeros_like(train).index_fill(0, chosen, True)
        sampled = {SAMPLE: count, TRAINING: whole}
    # One matrix whose features have variance 1 together
    n, width = x.shape
    values = x if is_dense else x.values()
    mean = x.mean(0) if is_dense else torch.zeros(width).index_add_(0, x.col_indices(), values) / n
    square = float(values.double().square().sum()) / n
    variance = square - float(mean.double().square().sum())
    values /= math.sqrt(variance) if variance > 1e-9 * square else 1.0
    y = torch.searchsorted(classes, pool.train_y)
    guesses = [torch.zeros_like(y) for _ in STRENGTHS]
    for number in range(folds):  # the nodes of a fold are predicted by a fit to the others
        weights, due = None, fold == number
        trained = (train & ~due if folds > 1 else train).nonzero().flatten()
        rows = take_rows(x, trained)
        for guess, strength in zip(guesses, STRENGTHS, strict=True):
            if trained.numel():
                weights = fit(rows, y[trained], classes.numel(), strength, start=weights)
                guess[due] = scores(x, weights).argmax(1)[due]
    return pool.best([classes[guess] for guess in guesses]) | sampled


def _propagated(pool: Pool) -> list[Tensor]:
    """Predict all nodes, once with each share of ``KEPT``."""
    fallback, train, y = pool.guess("train", is_own=True), pool.masks["train"], pool.train_y
    assert fallback is not None
    start = torch.zeros(y.numel(), 1 + int(y[train].max()))
    start[train, y[train]] = 1
    matrix, result = gcn_adjacency(pool.edge_index, y.numel()).matrix, []
    for kept in KEPT:
        rows = start  # [n, k]
        for _ in range(STEPS):
            rows = kept * (matrix @ rows) + (1 - kept) * start
        result.append(torch.where(rows.sum(1) > 0, rows.argmax(1), fallback))
    return result


# Numbers ----------------------------------------------------------------------------------------

MEAN, LINEAR = "mean", "linear-regression"
PENALTIES = (1e-3, 1e-1, 10.0)  # for a training node, on features of variance 1
WIDEST = 4000  # features of which the matrix of products is made


def value_baselines(graphs: Sequence[ClientGraph], metric: str) -> Figures:
    """Return each baseline's figures by name: a metric by role, and both by ``scores``.

    ``graphs`` have ``targets``; ``metric`` decides.
    """
    y = torch.cat([graph.targets for graph in graphs if graph.targets is not None]).double()
    roles = joined_masks(graphs)
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
    # x [n, f], y [n]; the mean of y over the training nodes is 0, so there is no intercept
    x, train = torch.cat([graph.x.to_dense() for graph in graphs]).double(), roles["train"]
    spread = x[train].std(0, correction=0)
    x = (x - x[train].mean(0)) / torch.where(spread > 0, spread, 1.0)
    rows, tried = x[train], []
    products, wanted = rows.T @ rows, rows.T @ scale.apply(y)[train]
    eye = torch.eye(width, dtype=x.dtype) * len(rows)
    for penalty in PENALTIES:
        said = x @ torch.linalg.solve(products + penalty * eye, wanted)
        tried.append(figures(scale.undo(said)))
    best = max(tried, key=lambda one: merit(metric, one["val"]))  # of NaN alone the first
    return {**result, LINEAR: best}


# Links ------------------------------------------------------------------------------------------

Held = tuple[Tensor, links.LinkSplit]  # features [n, f] and edges of one client
# A score of pairs, from edges, features and pairs
SCORES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "common-neighbours": lambda edges, x, pairs: links.common_neighbours(edges, x.shape[0], pairs),
    "adamic-adar": lambda edges, x, pairs: links.adamic_adar(edges, x.shape[0], pairs),
    "feature-product": lambda edges, x, pairs: links.dot_products(x.to_dense(), pairs),
}


def link_baselines(graphs: Sequence[Held], metric: str) -> Figures:
    """Return each baseline's figures by name: a metric by role, and all by ``scores``.

    ``graphs`` are features and edges of each client. ``metric`` decides; a metric that a baseline
    lacks, such as the accuracy, is left out.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # loads SciPy

    result: Figures = {}
    for name, score in SCORES.items() if metric in (AUC, AP, *RANKED) else ():
        scores = dict[str, dict[str, float]]()
        for role in JUDGED:
            parts = []
            for x, split in graphs:
                edges = split.later if role == ROLES[-1] else split.messages
                chosen = split.role == ROLES.index(role)
                found = score(edges, x, split.pairs)[chosen].double()
                parts.append((found, split.is_edge[chosen]))
            every, truth = (torch.cat(column) for column in zip(*parts, strict=True))
            figures, both = dict.fromkeys((AUC, AP), math.nan), (truth.numpy(), every.numpy())
            if truth.any() and not truth.all():
                figures = {AUC: roc_auc_score(*both), AP: average_precision_score(*both)}
            ranks = torch.stack([links.rank_counts(*part) for part in parts])
            figures |= links.hits_of(ranks.sum(0))
            for one, value in figures.items():
                scores.setdefault(one, {})[role] = value
        result[name] = {**scores[metric], "scores": scores}
    return result
