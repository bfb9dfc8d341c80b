"""The MLP that judges embeddings after the last round, beside scikit-learn's own."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measure import say, summary
from flower_graph.method.load import load_config
from flower_graph.strategies.procrustes_alignment.joining import build_model
from flower_graph.strategies.procrustes_alignment.method import METHOD
from flower_graph.strategies.procrustes_alignment.perceptron import Perceptron


def scikit_learns(x: Any, y: Any, seed: int) -> Any:
    """Train scikit-learn's classifier as it is shipped."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return MLPClassifier(random_state=seed).fit(x, y)


def measure_judge(name: str, turns: int) -> dict[str, Any]:
    """Time one fold of a client's test nodes by both, in turns; their predictions must agree."""
    from threadpoolctl import threadpool_limits

    say(f"ppfl: {name}, the MLP beside scikit-learn's")
    torch.set_num_threads(1)
    config = load_config(name, ["device=cpu"])
    graph, ways = METHOD.graphs(config)[0], (Perceptron, scikit_learns)
    z = build_model(graph, config, METHOD.num_classes(config)).embed().astype(np.float64)
    chosen = np.flatnonzero((graph.test_mask & (graph.y >= 0)).numpy())
    train = chosen[np.arange(len(chosen)) % config.judge.folds > 0]
    x, y, unseen = z[train], graph.y.numpy()[train], z[chosen]
    with threadpool_limits(1):
        pairs = [[_timed(way, x, y, seed) for way in ways] for seed in range(1 + turns)]
    alike = all(np.array_equal(*(one.predict(unseen) for _, one in pair)) for pair in pairs)
    own, theirs = (summary([pair[side][0] for pair in pairs[1:]]) for side in range(2))
    ratio = own["median"] / theirs["median"]
    return {"nodes": len(y), "own": own, "scikit-learn": theirs, "ratio": ratio, "alike": alike}


def _timed(way: Callable[..., Any], x: Any, y: Any, seed: int) -> tuple[float, Any]:
    started = time.perf_counter()
    trained = way(x, y, seed)
    return time.perf_counter() - started, trained
