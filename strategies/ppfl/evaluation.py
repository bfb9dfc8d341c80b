"""Evaluation of embeddings by their nodes' classes: scikit-learn's SVC and MLP, cross-validated.

scikit-learn is imported where it is used, because it takes half a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.config.rules import choice
from flower_graph.errors import DataError
from flower_graph.ops.counts import Counts, confusion_of
from flower_graph.outputs.files import NODE_ROLES, Predictions, role_of
from flower_graph.rng import derive_seed
from flower_graph.strategies.ppfl.config import CLASSIFIERS, JUDGED, MLP, SVC

if TYPE_CHECKING:
    from flower_graph.data.graph import ClientGraph
    from flower_graph.strategies.ppfl.config import PPFLConfig

NOBODY = -1  # class and fold of a node that is not evaluated


class Folds(NamedTuple):
    """A cross-validated classifier's prediction for each node, by the fold without the node."""

    predicted: NDArray[np.int64]  # [n]
    fold: NDArray[np.int64]  # [n]

    def score(self, y: NDArray[np.integer]) -> float:
        """Return the mean of the folds' micro-F1, which with one class a node is accuracy."""
        right = self.predicted == y
        return float(np.mean([right[self.fold == one].mean() for one in np.unique(self.fold)]))


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
    labelled = y >= 0
    return cross_validated(z[labelled], y[labelled], folds, seed, classifier).score(y[labelled])


def cross_validated(
    z: NDArray[np.floating], y: NDArray[np.integer], folds: int, seed: int, classifier: str
) -> Folds:
    """Classify each labelled node by the others; arguments as of ``judge_embeddings``."""
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
        return Folds(cross_val_predict(model, z.astype(np.float64), y, cv=parts), fold)


def _problem(y: NDArray[np.integer], folds: int) -> str:
    """Return why nodes of these classes cannot be evaluated, or nothing."""
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
        self._settings, self._client, self._seed = config.judge, graph.client, config.seed
        self.labels: NDArray[np.int64] = graph.y.numpy()
        self.num_classes = num_classes or 1 + int(self.labels.max())
        self.roles = role_of(graph.train_mask, graph.val_mask, graph.test_mask)
        self.named = graph.nodes.numpy() if graph.called is None else np.array(graph.called)
        self.classes = None if classes is None else tuple(classes)
        judged = {
            role: (self.roles == NODE_ROLES.index(role)) & (self.labels >= 0) for role in JUDGED
        }
        self._judged = {role: chosen for role, chosen in judged.items() if chosen.any()}

    def __call__(
        self, embeddings: NDArray[np.float32], server_round: int, is_last: bool
    ) -> dict[str, float]:
        """Measure in the rounds that ``judge.every`` names, and in the last."""
        is_due = is_last or server_round % self._settings.every == 0
        names = (SVC, MLP) if is_last and self._settings.mlp else (SVC,)
        result, said = dict[str, float](), np.full(len(self.labels), NOBODY)
        for name in names if is_due else ():
            for role, found in self.classify(embeddings, name).items():
                chosen = self._judged[role]
                score = found.score(self.labels[chosen])
                result[f"{name}-{role}"] = score
                result.setdefault(role, score)
                if name == SVC:
                    said[chosen] = found.predicted
        rows = [np.flatnonzero((self.roles == role) & (said >= 0)) for role in range(1, 4)]
        pair = torch.from_numpy(said), torch.from_numpy(self.labels)
        self.counts = Counts(confusion_of(*pair, [*map(torch.from_numpy, rows)], self.num_classes))
        return result

    def classify(self, embeddings: NDArray[np.float32], classifier: str = SVC) -> dict[str, Folds]:
        """Classify, by role, each judged node by the others of its role."""
        result = {}
        for role, chosen in self._judged.items():
            seed = derive_seed(self._seed, "folds", self._client, role) % 2**32
            given = embeddings[chosen], self.labels[chosen], self._settings.folds
            result[role] = cross_validated(*given, seed, classifier)
        return result

    def predict(self, embeddings: NDArray[np.float32], logits: Tensor | None) -> Predictions:
        """Return the SVC's predictions, and for other nodes a model's own, if it has any."""
        n = len(self.labels)
        predicted, fold = np.full(n, NOBODY), np.full(n, NOBODY)
        for role, found in self.classify(embeddings).items():
            predicted[self._judged[role]], fold[self._judged[role]] = found
        probability = np.full(n, np.nan, np.float32)  # an SVC has none
        if logits is not None:
            share, itself = logits.cpu().softmax(1).numpy(), predicted < 0
            predicted = np.where(itself, share.argmax(1), predicted)
            probability[itself] = share.max(1)[itself]
        client, labels = np.full(n, self._client), np.maximum(self.labels, -1)
        of_nodes = self.named, predicted, probability, self.roles, labels
        return Predictions(client, *of_nodes, self.classes, fold).rows(predicted >= 0)


def check_labels(graphs: Sequence[ClientGraph], folds: int) -> None:
    """Refuse, before any training, clients whose held-out nodes cannot be evaluated."""
    for graph in graphs:
        for role in JUDGED:
            labels = graph.y[getattr(graph, f"{role}_mask")].numpy()
            if labels.size and (problem := _problem(labels[labels >= 0], folds)):
                raise DataError(f"client {graph.client}, {role} nodes: {problem}")
