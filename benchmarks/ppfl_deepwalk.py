"""One iteration of a DeepWalk client, beside gensim alone on the same walks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import say, summary
from flower_graph.method.load import load_config
from flower_graph.strategies.procrustes_alignment.cohort_client import EmbeddingModel
from flower_graph.strategies.procrustes_alignment.deepwalk import DeepWalkSettings
from flower_graph.strategies.procrustes_alignment.joining import build_model
from flower_graph.strategies.procrustes_alignment.messages import FloatArray, IntArray
from flower_graph.strategies.procrustes_alignment.method import METHOD

TARGET = 1.5  # times gensim alone, walking included
WORK = ["deepwalk.walks=10", "deepwalk.length=40", "deepwalk.window=5"]  # as the goal has it


def gensim_alone(walks: list[list[int]], settings: DeepWalkSettings) -> None:
    """Train skip-gram on walks as gensim's users do."""
    from gensim.models import Word2Vec

    Word2Vec(
        sentences=walks,
        vector_size=settings.dimension,
        window=settings.window,
        negative=settings.negative,
        epochs=settings.epochs,
        alpha=settings.learning_rate,
        min_alpha=settings.final_learning_rate,
        sg=1,
        hs=0,
        min_count=1,
        workers=1,
        seed=1,
    )


def measure_deepwalk(name: str, settings: list[str], turns: int) -> dict[str, Any]:
    """Time a client's first iteration and a later one; after each, gensim alone on its walks."""
    say(f"ppfl: {name}, DeepWalk beside gensim, {' '.join(settings)}")
    config = load_config(name, ["device=cpu", *settings])
    torch.set_num_threads(1)
    graph = METHOD.graphs(config)[0]
    rows = graph.public.nonzero().flatten().numpy()
    times: dict[str, list[float]] = defaultdict(list)

    def clocked(side: str, work: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        found = work(*arguments)
        times[side].append(time.perf_counter() - started)
        return found

    for _ in range(1 + turns):
        model = clocked("build", build_model, graph, config, METHOD.num_classes(config))
        embeddings = clocked("first", _iteration, model, rows, None, 1)
        clocked("first-gensim", gensim_alone, model.walk(1).tolist(), model.settings)
        clocked("later", _iteration, model, rows, embeddings[rows], 2)
        walks = clocked("walks", model.walk, 2).tolist()
        clocked("later-gensim", gensim_alone, walks, model.settings)
    found: dict[str, Any] = {side: summary(seconds[1:]) for side, seconds in times.items()}
    for kind in ("first", "later"):
        found[f"{kind}-ratio"] = found[kind]["median"] / found[f"{kind}-gensim"]["median"]
    isolated = graph.nodes.numel() - torch.unique(graph.edge_index).numel()
    sizes = {"nodes": graph.nodes.numel(), "edges": graph.edge_index.shape[1] // 2}
    return {**sizes, "isolated": isolated, "epochs": config.deepwalk.epochs, **found}


def _iteration(
    model: EmbeddingModel, rows: IntArray, targets: FloatArray | None, server_round: int
) -> FloatArray:
    """Do what a client does of its own in an iteration, judging apart."""
    model.learn(rows, targets, server_round)
    return model.embed()
