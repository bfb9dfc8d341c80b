"""Evaluation of embeddings: classifiers of nodes, and how near aligned embeddings are.

scikit-learn's SVC and MLP predict the nodes' classes, cross-validated.

scikit-learn is imported where it is used, because it takes half a second.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.config.rules import choice
from flower_graph.errors import DataError
from flower_graph.ops.counts import Counts, confusion_of
from flower_graph.ops.procrustes import alignment_precision, orthogonal_procrustes
from flower_graph.outputs.files import NODE_ROLES, Predictions, role_of
from flower_graph.rng import derive_seed
from flower_graph.strategies.ppfl.config import CLASSIFIERS, JUDGED, MLP, PRECISIONS, SVC

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph
    from flower_graph.strategies.ppfl.config import PPFLConfig

NOBODY = -1  # class and fold of a node that is not evaluated


def judge_embeddings(
    z: NDArray[np.floating],
    y: NDArray[np.integer],
    folds: int,
    seed: int,
    classifier: str = SVC,
) -> float:
    """Train a classifier on embeddings, and evaluate it on held-out ones.

    Each column is standardised by the training folds. The classifiers have scikit-learn's settings,
    as PPFL-GNN's paper names no others (section 4.2): an SVC with an RBF kernel, an MLP with one
    hidden layer of 100 that is trained for 200 passes.

    Parameters
    ----------
    z : array
        ``[n, d]`` embeddings.
    y : array
        ``[n]`` classes; a node with a number below 0 has no label and is left out.
    folds : int
        Parts of the nodes, each with its share of every class; at least 2.
    seed : int
        Determines the folds and the MLP's first weights.
    classifier : str
        ``svc`` or ``mlp``.

    Returns
    -------
    float
        Mean of the folds' micro-F1, which with one class a node is accuracy.

    Raises
    ------
    ValueError
        If the classifier is unknown, shapes do not fit, an embedding is not finite, a class has
        fewer labelled nodes than there are folds, or there is one class or none.
    """
    z, y = np.asarray(z), np.asarray(y)
    z, y = z[y >= 0], y[y >= 0]
    predicted, fold = cross_validated(z, y, folds, seed, classifier)
    return float(np.mean([np.mean((predicted == y)[fold == one]) for one in range(folds)]))


def cross_validated(
    z: NDArray[np.floating], y: NDArray[np.integer], folds: int, seed: int, classifier: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Classify each labelled node by the folds without it; return classes and folds.

    Arguments are as of ``judge_embeddings``.
    """
    if problem := _problem(y, folds):
        raise ValueError(problem)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from threadpoolctl import threadpool_limits

    seed = derive_seed(seed, "judge") % 2**32
    parts = [*StratifiedKFold(folds, shuffle=True, random_state=seed).split(z, y)]
    fold = np.empty(len(y), np.int64)
    for number, (_, here) in enumerate(parts):
        fold[here] = number
    # Products of 200 × 16 by 16 × 100 take several threads longer than one.
    with threadpool_limits(1), warnings.catch_warnings():
        # The MLP deliberately ends after scikit-learn's 200 passes, of which scikit-learn warns
        # each time. A thousand passes take four times as long, and move validation micro-F1 by
        # +1 to +1.5 points (DeepWalk, Cora) or -1.4 to -1.9 (GAT, CiteSeer).
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = untrained(classifier, seed)
        return cross_val_predict(model, z.astype(np.float64), y, cv=parts), fold


def _problem(y: NDArray[np.integer], folds: int) -> str:
    classes, counts = np.unique(y, return_counts=True)
    if len(classes) < 2:
        return f"{len(classes)} classes among {len(y)} labelled nodes, 2 are needed"
    few = f"class {classes[counts.argmin()]}: {counts.min()} labelled nodes"
    return f"{few}, judge.folds={folds} need as many" if counts.min() < folds else ""


# Any: scikit-learn has no types
def untrained(classifier: str, seed: int = 0) -> Any:
    """Make a classifier with scikit-learn's settings, on columns of mean 0 and deviation 1."""
    from sklearn import svm
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    choice(*CLASSIFIERS).check("classifier", classifier)
    chosen = svm.SVC() if classifier == SVC else MLPClassifier(random_state=seed)
    return make_pipeline(StandardScaler(), chosen)


class GraphJudge:
    """Cross-validates classifiers among the nodes from which the embedding did not learn."""

    # Validation and test nodes are evaluated separately. The SVC's figures are the round's; after
    # the last round both classifiers' figures are returned by name.

    counts: Counts  # by role, class, and what the SVC said, in the last evaluation

    def __init__(
        self,
        graph: ClientGraph,
        config: PPFLConfig,
        classes: Sequence[str] | None = None,
        num_classes: int = 0,
    ) -> None:
        self._settings, self._seed, n = config.judge, config.seed, graph.y.numel()
        self.num_classes = num_classes or 1 + int(graph.y.max())
        self._nodes = Predictions(
            np.full(n, graph.client),
            graph.nodes.numpy() if graph.called is None else np.array(graph.called),
            np.full(n, NOBODY),
            np.full(n, np.nan, np.float32),  # an SVC has none
            role_of(graph.train_mask, graph.val_mask, graph.test_mask),
            np.maximum(graph.y.numpy(), NOBODY),
            None if classes is None else tuple(classes),
            np.full(n, NOBODY),
        )

    @property
    def named(self) -> NDArray[Any]:
        return self._nodes.node

    def __call__(
        self, embeddings: NDArray[np.float32], server_round: int, is_last: bool
    ) -> dict[str, float]:
        is_due = is_last or server_round % self._settings.every == 0
        names = [SVC] * is_due + [MLP] * (is_last and self._settings.mlp)
        said = {name: self.classify(embeddings, name) for name in names}
        result = {
            f"{name}-{role}": part.accuracy()
            for name, one in said.items()
            for role in JUDGED
            if (part := one.of_role(role)).node.size
        }
        result |= {role: result[key] for role in JUDGED if (key := f"{SVC}-{role}") in result}
        found = said.get(SVC, self._nodes)
        every = [np.flatnonzero((found.role == r) & (found.predicted >= 0)) for r in range(1, 4)]
        parts = found.predicted, found.label, *every
        predicted, label, *rows = map(torch.from_numpy, parts)
        self.counts = Counts(confusion_of(predicted, label, rows, self.num_classes))
        return result

    def classify(self, embeddings: NDArray[np.float32], classifier: str = SVC) -> Predictions:
        """Classify, by role, each judged node by the others of its role."""
        nodes, (predicted, fold) = self._nodes, np.full((2, len(embeddings)), NOBODY)
        for role in JUDGED:
            chosen = (nodes.role == NODE_ROLES.index(role)) & nodes.known
            if chosen.any():
                seed = derive_seed(self._seed, "folds", int(nodes.client[0]), role) % 2**32
                given = embeddings[chosen], nodes.label[chosen], self._settings.folds
                predicted[chosen], fold[chosen] = cross_validated(*given, seed, classifier)
        return replace(nodes, predicted=predicted, fold=fold)

    def predict(self, embeddings: NDArray[np.float32], logits: Tensor | None) -> Predictions:
        """Return the SVC's predictions, and for other nodes a model's own, if it has any."""
        said = self.classify(embeddings)
        if logits is not None:
            share, itself = logits.cpu().softmax(1).numpy(), said.predicted < 0
            said.predicted[itself] = share.argmax(1)[itself]
            said.probability = np.where(itself, share.max(1), said.probability)
        return said.rows(said.predicted >= 0)


def check_labels(graphs: Sequence[ClientGraph], folds: int) -> None:
    """Refuse, before any training, clients whose held-out nodes cannot be evaluated."""
    for graph in graphs:
        for role in JUDGED:
            labels = graph.y[getattr(graph, f"{role}_mask")].numpy()
            if labels.size and (problem := _problem(labels[labels >= 0], folds)):
                raise DataError(f"client {graph.client}, {role} nodes: {problem}")


# How near aligned embeddings are ------------------------------------------------------------------

MEASURED_PAIRS = 12  # ordered pairs whose alignment is measured in a round: all, up to 4 clients
TRIED_PAIRS = 1000  # of these some may share no node; all, up to 32 clients


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of all numbers that are not NaN; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def measure_alignment(x: Tensor, held: Tensor, rng: torch.Generator) -> dict[str, float]:
    """Return how often aligned embeddings of the same node are near (Figures 3 to 6)."""
    # x, held [m, u, d]
    result: list[Mapping[int, float]] = []
    for source, target in islice(draw_pairs(x.shape[0], rng), TRIED_PAIRS):
        common = held[source] & held[target]
        if not common.any():
            continue
        a, b = x[source, common], x[target, common]
        result.append(alignment_precision(a, b, orthogonal_procrustes(a, b)))
        if len(result) == MEASURED_PAIRS:
            break
    return {name: mean_of([one[k] for one in result]) for name, k in PRECISIONS.items() if result}


def draw_pairs(count: int, rng: torch.Generator) -> Iterator[tuple[int, int]]:
    """Draw the ordered pairs of different numbers below ``count``, each once, one at a time."""
    # Thousands of clients have more pairs than fit into memory.
    for distance in (1 + torch.randperm(max(count - 1, 0), generator=rng)).tolist():
        for source in torch.randperm(count, generator=rng).tolist():
            yield source, (source + distance) % count
