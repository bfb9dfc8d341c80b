"""Figures and warnings about a graph, before a method runs on it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import AS_IS, RunConfig
from flower_graph.data.features import ReadOptions
from flower_graph.data.folders.client_folder import RATIOS, clients_path, load_folder
from flower_graph.data.graph import Graph, Scale
from flower_graph.data.partition.statistics import counts
from flower_graph.data.sources.datasets import load_graph
from flower_graph.errors import DataError, FractionalLabelsError
from flower_graph.ops.links import common_neighbours, ends, undirected
from flower_graph.storage.reading import Tree

DOMINANT = 0.8  # share of the labelled nodes from which one class counts as dominating
FEW = 0.5  # share of labelled nodes below which a warning says so
FAR_LESS = 0.8  # homophily, relative to chance, below which neighbours are mostly of other classes
SOME_EDGES = 2000  # that are looked at for common neighbours
LEAST = 100  # nodes below which accuracies are coarse


class Survey(NamedTuple):
    """The figures and warnings of one graph."""

    figures: Tree  # numbers; ``classes`` has the number of nodes of each class
    distributions: dict[str, dict[int, int]]  # the count of each whole number, by name
    notes: list[str]  # what was done to the data
    warnings: list[str]  # problems that make results poor or hard to interpret


def survey(config: RunConfig) -> Survey:
    """Read the data that a config names, and describe them, with untreated features.

    Labels that are no classes are described as numbers, even if the run is to learn classes.
    """
    data, path = replace(config.data, features=AS_IS), clients_path(config.data)
    how = ReadOptions.of(config)._replace(features=AS_IS)

    def read(how: ReadOptions) -> Survey:
        if path is None:
            return survey_graph(load_graph(data, seed=config.seed, how=how))
        return survey_graph(load_folder(path, RATIOS, config.seed, how=how).as_graph())

    try:
        return read(how)
    except FractionalLabelsError:
        return read(how._replace(targets=True))


def survey_graph(graph: Graph) -> Survey:
    """Describe a graph; ``DataError`` if it is too large for dense features."""
    if graph.x.layout != torch.strided:
        raise DataError(f"data.nodes = {graph.num_nodes}: too many for dense features")
    n, (source, target) = graph.num_nodes, graph.edge_index
    degree = torch.bincount(source, minlength=n)
    labelled = graph.y >= 0
    sizes = torch.bincount(graph.y[labelled], minlength=graph.num_classes)
    names = graph.classes or tuple(map(str, range(graph.num_classes)))
    # For a regression, there is one class, which marks the nodes that have a number
    has_classes = graph.targets is None
    both = labelled[source] & labelled[target] & has_classes
    same = (graph.y[source] == graph.y[target])[both]
    parts, values = component_sizes(graph.edge_index, n), None
    pairs = ends(undirected(graph.edge_index, n), n)
    if (count := pairs.shape[1]) > SOME_EDGES:
        pairs = pairs[:, torch.arange(SOME_EDGES) * count // SOME_EDGES]
    shared = common_neighbours(graph.edge_index, n, pairs)
    if graph.targets is not None:
        around = graph.targets.double()[graph.edge_index]
        known = around[:, ~around.isnan().any(0)]
        similar = float(torch.corrcoef(known)[0, 1]) if known.numel() else math.nan
        given = graph.targets[labelled].double()
        values = {
            "least": float(given.min()),
            "largest": float(given.max()),
            **Scale.of([given])._asdict(),
            "correlation-of-neighbours": similar if math.isfinite(similar) else None,
        }
    figures = {
        "nodes": n,
        "edges": source.numel() // 2,
        "neighbours": float(degree.double().mean()),
        "most-neighbours": int(degree.max()),
        "isolated": int((degree == 0).sum()),
        "components": parts.numel(),
        "largest-component": int(parts.max()),
        "features": graph.x.size(1),
        "least-feature": float(graph.x.min()),
        "largest-feature": float(graph.x.max()),
        "non-zero-share": float(graph.x.count_nonzero()) / graph.x.numel(),
        "closed-edges": float((shared > 0).double().mean()) if len(shared) else 0.0,
        "labelled": int(labelled.sum()),
        **({} if values is None else {"values": values}),
        "classes": dict(zip(names, sizes.tolist(), strict=True)),
        "homophily": float(same.double().mean()) if same.numel() else None,
        "homophily-by-chance": float(((sizes / sizes.sum()) ** 2).sum()),
    }
    distributions = {"neighbours of a node": counts(degree)}
    if has_classes:
        distributions["class of a labelled node"] = counts(graph.y[labelled])
    if same.numel():
        around = torch.bincount(source[both], minlength=n)
        alike = torch.bincount(source[both], weights=same.double(), minlength=n)
        percent = (100 * alike[around > 0] / around[around > 0]).round().long()
        distributions["neighbours of its own class (%)"] = counts(percent)
    return Survey(figures, distributions, list(graph.notes), list(_warnings(figures, graph.x)))


def is_heterophilous(figures: Tree) -> bool:
    """Return whether edges join nodes of one class far less often than by chance."""
    alike = figures["homophily"]
    return alike is not None and bool(alike < FAR_LESS * figures["homophily-by-chance"])


def component_sizes(edge_index: Tensor, n: int) -> Tensor:
    """Return the sizes of the connected components; an isolated node is one."""
    # Not SciPy's function: its import takes 0.2 s at the start of each run. edge_index [2, e], both
    # directions
    source, target = edge_index
    label = torch.arange(n)
    while True:
        lower = label.scatter_reduce(0, target, label[source], "amin")
        lower = lower[lower]  # so that a long path takes few steps
        if torch.equal(lower, label):
            sizes: Tensor = label.unique(return_counts=True)[1]
            return sizes
        label = lower


def lines(survey: Survey) -> list[str]:
    """Describe the survey in a few lines."""
    f, parts = survey.figures, "all connected"
    none = "1 node has none" if f["isolated"] == 1 else f"{f['isolated']:,} nodes have none"
    if f["components"] > 1:
        largest = f"the largest with {f['largest-component']:,} nodes"
        parts = f"{f['components']:,} connected components, {largest}"
    if (v := f.get("values")) is not None:
        found = v["correlation-of-neighbours"]
        alike = (
            "no edge has two ends that differ" if found is None else f"correlated by {found:.2f}"
        )
        alike = f"numbers of neighbours: {alike}"
        learnt = (
            f"with task=values numbers from {v['least']:.4g} to {v['largest']:.4g} to learn, mean "
            f"{v['mean']:.4g}, deviation {v['deviation']:.4g}, on {f['labelled']:,} nodes"
        )
    else:
        sizes, total = f["classes"], max(1, f["labelled"])
        shown = [f"{name}: {_percent(size / total)}" for name, size in [*sizes.items()][:8]]
        shown += [f"and {len(sizes) - 8} more"] if len(sizes) > 8 else []
        learnt = f"{len(sizes)} classes ({', '.join(shown)}) on {f['labelled']:,} labelled nodes"
        alike = "no edge has two labelled ends"
        if f["homophily"] is not None:
            same, chance = (_percent(f[key]) for key in ("homophily", "homophily-by-chance"))
            alike = f"{same} of the edges join nodes of one class ({chance} by chance)"
    return [
        f"{f['nodes']:,} nodes, {f['edges']:,} edges, {f['neighbours']:.1f} neighbours a node "
        f"(at most {f['most-neighbours']:,}; {none}), {parts}",
        f"{f['features']:,} features from {f['least-feature']:.3g} to {f['largest-feature']:.3g}, "
        f"{_percent(f['non-zero-share'])} of the entries non-zero",
        learnt,
        alike,
        f"with task=links {f['edges']:,} edges to learn; the ends of "
        f"{_percent(f['closed-edges'])} have a common neighbour",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or not share else f"{100 * share:.2g} %"


def _warnings(f: Tree, x: Tensor) -> list[str]:
    labelled = f["labelled"] / f["nodes"]
    warnings = {
        f"{_percent(1 - labelled)} of the nodes have no label: they are neither trained on nor "
        "judged": labelled < FEW,
        "all nodes have the same features: they tell nothing": bool((x == x[:1]).all()),
        f"{f['nodes']} nodes are few: one test node more or less changes an accuracy a lot": (
            f["nodes"] < LEAST
        ),
    }
    if "values" not in f:
        sizes, alike, chance = f["classes"], f["homophily"], f["homophily-by-chance"]
        name, rarest = max(sizes, key=sizes.get), min(sizes, key=sizes.get)
        share, is_far_less = sizes[name] / max(1, f["labelled"]), is_heterophilous(f)
        said_less = f"{_percent(alike or 0.0)} of the edges, {_percent(chance)} by chance"
        warnings |= {
            f"class {name} has {_percent(share)} of the labelled nodes: whoever guesses it is as "
            "often right": share >= DOMINANT,
            "neighbours are hardly more often of one class than chance: edges may not help": (
                alike is not None and alike < 1.2 * chance and not is_far_less
            ),
            f"neighbours are far less often of one class than chance ({said_less}): the graph is "
            "heterophilous, and methods that smooth over edges do poorly": is_far_less,
            f"class {rarest} ({sizes[rarest]} labelled nodes) is rare: some clients may have none "
            "of it": sizes[rarest] < 10,
        }
    return [text for text, is_so in warnings.items() if is_so]
