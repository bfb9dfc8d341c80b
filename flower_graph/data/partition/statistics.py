"""Figures, distributions and lines of text that describe a graph, and the data of a run's clients.

``docs/partition.md`` says what each figure of clients means.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flower_graph.config.common import AS_IS, PartitionSection, RunConfig
from flower_graph.data.features import ReadOptions
from flower_graph.data.folders.client_folder import Clients, clients_path, load_folder
from flower_graph.data.graph import (
    ClientGraph,
    Graph,
    Scale,
    WholeGraph,
    joined_edges,
    joined_masks,
    node_numbers,
    to_undirected,
)
from flower_graph.data.sources.datasets import load_graph
from flower_graph.errors import DataError, FractionalLabelsError
from flower_graph.storage.reading import Tree


class Description(NamedTuple):
    """Figures by name, and for each distribution the count of each whole number."""

    figures: Tree  # numbers; of one graph, ``classes`` has the number of nodes of each class
    distributions: dict[str, dict[int, int]]
    # Of clients' graphs: nodes of each class, of each client
    classes: Sequence[list[int]] = ()
    # Of one graph: what was done to the data, and what makes results poor or hard to interpret
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()


def client_statistics(
    graphs: Sequence[ClientGraph], whole: WholeGraph | None = None
) -> Description:
    """Describe clients with graphs: sizes, roles, overlap, cut edges and public nodes.

    Edges are those of all clients that have or hide some. ``whole`` is the graph that the clients
    were cut out of; None for graphs of their own, which have nodes in common only if their nodes
    have identities. ``DataError`` if there are no clients.
    """
    if not graphs:
        raise DataError("no clients to describe: at least one is needed")
    clients, sizes = len(graphs), torch.tensor([graph.y.numel() for graph in graphs])
    owner, y = torch.arange(clients).repeat_interleave(sizes), torch.cat([g.y for g in graphs])
    edges = [g.hidden_edges if g.edge_index is None else g.edge_index for g in graphs]
    is_known = torch.tensor([one is not None for one in edges])
    source, target = joined_edges(graphs, edges)  # as all clients' nodes are numbered together
    judged = (y[source] >= 0) & (y[target] >= 0)
    same = judged & (y[source] == y[target])
    alike, ends = (owner[source[kind]].bincount(minlength=clients) for kind in (same, judged))
    classes, masks = class_counts(graphs), joined_masks(graphs)
    per_client = {
        "nodes": sizes,
        "edges": owner[source].bincount(minlength=clients)[is_known] // 2,
        "classes": torch.tensor([sum(map(bool, own)) for own in classes]),
    }
    means = {f"{name}-per-client": _mean(size) for name, size in per_client.items()}
    figures = {
        "clients": clients,
        "features": graphs[0].x.size(1),
        "classes": _classes(y),
        **means,
        "directed-edges-per-client": 2 * means["edges-per-client"],
        "homophily-per-client": _mean((alike.double() / ends)[ends > 0]),
        "fewest-nodes": int(sizes.min()),
        "most-nodes": int(sizes.max()),
        "graphless-clients": sum(graph.is_graphless for graph in graphs),
        "clients-without-edges": sum(not graph.edges.numel() for graph in graphs),
        "clients-without-training": clients - owner[masks["train"]].unique().numel(),
        **{f"{role}-per-client": int(mask.sum()) / clients for role, mask in masks.items()},
    }
    spread = {f"{name} per client": counts(size) for name, size in per_client.items()}
    numbers: Tensor | None = None  # of nodes, the same at all clients
    if whole is not None:
        numbers = torch.cat([graph.nodes for graph in graphs])
    elif isinstance(graphs, Clients) and graphs.is_identified:
        numbers = node_numbers(graphs)
    if numbers is not None:
        nodes, holders = numbers.unique(return_counts=True)
        links = numbers[joined_edges(graphs)].unique(dim=1).size(1) // 2
        is_trained = torch.isin(numbers[masks["test"]], numbers[masks["train"]])
        figures |= {
            "nodes": nodes.numel(),
            "edges": links,
            "density": links / nodes.numel(),
            # The paper's figure is this quotient of means, not the mean of quotients.
            "density-per-client": means["edges-per-client"] / means["nodes-per-client"],
            "clients-per-node": _mean(holders),
            "most-clients-per-node": int(holders.max()),
            "shared-share": _mean(holders >= 2),
            "tested-and-trained-share": _mean(is_trained),
        }
        spread["clients per node"] = counts(holders)
    if whole is not None and numbers is not None:
        n = whole.y.numel()
        begin, end = to_undirected(whole.edge_index, n)
        held, kept = torch.zeros(n, dtype=torch.bool), torch.zeros_like(begin, dtype=torch.bool)
        for graph in graphs:
            here = torch.zeros_like(held).index_fill(0, graph.nodes, True)
            held |= here
            kept |= here[begin] & here[end]
        figures["kept-nodes-share"], figures["kept-edges-share"] = _mean(held), _mean(kept)
        figures["cut-edges-share"] = _mean(~kept[held[begin] & held[end]])
    if publics := [graph.public for graph in graphs if graph.public is not None]:
        public, (source, target) = torch.cat(publics), joined_edges(graphs)
        degree = source.bincount(minlength=len(y))
        reach = source[public[target]].bincount(minlength=len(y))[~public]
        figures |= {
            "public-per-client": int(public.sum()) / clients,
            "private-per-client": int((~public).sum()) / clients,
            "isolated-share": _mean(degree == 0),
            "neighbours-of-public": _mean(degree[public]),
            "reached-share": _mean(reach >= 1),
            "reached-twice-share": _mean(reach >= 2),
        }
        spread["public neighbours per private node"] = counts(reach)
        if whole is not None and numbers is not None:
            degree = begin.bincount(minlength=n)
            figures["degree-of-public"] = _mean(degree[numbers[public].unique()])
    return Description(figures, spread, classes)


def node_statistics(data: Graph) -> Description:
    """Describe a graph whose every node is a client: neighbours, features in use, split."""
    nodes, edges = data.y.numel(), data.edge_index.size(1) // 2
    neighbours = torch.bincount(data.edge_index[0], minlength=nodes)
    masks = joined_masks([data])
    figures = {
        "clients": nodes,
        "edges": edges,
        "features": data.x.size(1),
        "classes": _classes(data.y),
        "density": edges / nodes,
        "neighbours-per-client": _mean(neighbours),
        "most-neighbours": int(neighbours.max()),
        "isolated": int((neighbours == 0).sum()),
        "features-per-client": int(torch.count_nonzero(data.x)) / nodes,
        **{part: int(mask.sum()) for part, mask in masks.items()},
    }
    classes = {f"classes in {part}": counts(data.y[mask]) for part, mask in masks.items()}
    return Description(figures, {"neighbours per client": counts(neighbours), **classes})


def class_counts(graphs: Sequence[ClientGraph]) -> list[list[int]]:
    """Count each client's labelled nodes by class."""
    classes = _classes(torch.cat([graph.y for graph in graphs]))
    return [g.y[g.y >= 0].bincount(minlength=classes).tolist() for g in graphs]


def _classes(y: Tensor) -> int:
    return int(y[y >= 0].unique().numel())


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if values.numel() else 0.0


def counts(values: Tensor) -> dict[int, int]:
    """Count how often each whole number occurs."""
    result, times = torch.unique(values, return_counts=True)
    return dict(zip(result.tolist(), times.tolist(), strict=True))


def holdings(data: Graph | Clients, clients: int, called: str) -> str:
    """Describe in a line what clients hold: a graph each, or parts of one, such as a node each."""
    graphs: Sequence[Graph | ClientGraph] = data if isinstance(data, Clients) else [data]
    roles = {role: int(mask.sum()) for role, mask in joined_masks(graphs).items()}
    held = f"{clients:,} {called}"
    if isinstance(data, Clients):
        sizes, without = [graph.y.numel() for graph in data], sum(not g.edges.numel() for g in data)
        held += f", {without:,} of them without edges; {min(sizes):,} to {max(sizes):,} nodes each"
        held += f", {sum(sizes):,} together"
    return "; ".join([held, ", ".join(f"{role} {count:,}" for role, count in roles.items())])


# One graph, before a method runs on it ------------------------------------------------------------

DOMINANT = 0.8  # share of the labelled nodes from which one class counts as dominating
FEW = 0.5  # share of labelled nodes below which a warning says so
FAR_LESS = 0.8  # homophily, relative to chance, below which neighbours are mostly of other classes
LEAST = 100  # nodes below which accuracies are coarse


def survey(config: RunConfig) -> Description:
    """Read the data that a config names, and describe them, with untreated features.

    Labels that are no classes are described as numbers, even if the run is to learn classes.
    """
    data, path = replace(config.data, features=AS_IS), clients_path(config.data)
    how = ReadOptions.of(config)._replace(features=AS_IS)

    def read(how: ReadOptions) -> Graph:
        if path is None:
            return load_graph(data, seed=config.seed, how=how)
        return load_folder(path, PartitionSection(), config.seed, how).as_graph()

    try:
        return survey_graph(read(how))
    except FractionalLabelsError:
        return survey_graph(read(how._replace(targets=True)))


def survey_graph(graph: Graph) -> Description:
    """Describe a graph; ``DataError`` if it is too large for dense features."""
    if graph.x.layout != torch.strided:
        raise DataError(f"data.nodes = {graph.num_nodes}: too many for dense features")
    n, (source, target), targets = graph.num_nodes, graph.edge_index, graph.targets
    degree, labelled = torch.bincount(source, minlength=n), graph.y >= 0
    sizes = torch.bincount(graph.y[labelled], minlength=graph.num_classes)
    names = graph.classes or tuple(map(str, range(graph.num_classes)))
    # For a regression, there is one class, which marks the nodes that have a number
    both = labelled[source] & labelled[target] & (targets is None)
    same = (graph.y[source] == graph.y[target])[both]
    parts = component_sizes(graph.edge_index, n)
    figures = {
        "nodes": n,
        "edges": source.numel() // 2,
        "neighbours": _mean(degree),
        "most-neighbours": int(degree.max()),
        "isolated": int((degree == 0).sum()),
        "components": parts.numel(),
        "largest-component": int(parts.max()),
        "features": graph.x.size(1),
        "least-feature": float(graph.x.min()),
        "largest-feature": float(graph.x.max()),
        "non-zero-share": float(graph.x.count_nonzero()) / graph.x.numel(),
        "labelled": int(labelled.sum()),
        "classes": dict(zip(names, sizes.tolist(), strict=True)),
        "homophily": _mean(same) if same.numel() else None,
        "homophily-by-chance": float(((sizes / sizes.sum()) ** 2).sum()),
    }
    spread = {"neighbours of a node": counts(degree)}
    if targets is None:
        spread["class of a labelled node"] = counts(graph.y[labelled])
    else:
        known = targets.double()[graph.edge_index[:, labelled[source] & labelled[target]]]
        # Without a pair of known neighbours PyTorch would warn
        similar = float(torch.corrcoef(known)[0, 1]) if known.numel() else math.nan
        given = targets[labelled].double()
        figures["values"] = {
            "least": float(given.min()),
            "largest": float(given.max()),
            **Scale.of([given])._asdict(),
            "correlation-of-neighbours": similar if math.isfinite(similar) else None,
        }
    if same.numel():
        around = torch.bincount(source[both], minlength=n)
        alike = torch.bincount(source[both], weights=same.double(), minlength=n)
        percent = (100 * alike[around > 0] / around[around > 0]).round().long()
        spread["neighbours of its own class (%)"] = counts(percent)
    return Description(figures, spread, (), graph.notes, _warnings(figures, graph.x))


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


def lines(survey: Description) -> list[str]:
    """Describe the survey in a few lines."""
    f = survey.figures
    if (v := f.get("values")) is not None:
        alike = f"numbers of neighbours: correlated by {v['correlation-of-neighbours'] or 0:.2f}"
        learnt = (
            f"with task=values numbers from {v['least']:.4g} to {v['largest']:.4g} to learn, mean "
            f"{v['mean']:.4g}, deviation {v['deviation']:.4g}, on {f['labelled']:,} nodes"
        )
    else:
        sizes, total = f["classes"], max(1, f["labelled"])
        shown = [f"{name}: {_percent(size / total)}" for name, size in [*sizes.items()][:8]]
        shown += ["…"] if len(sizes) > 8 else []
        learnt = f"{len(sizes)} classes ({', '.join(shown)}) on {f['labelled']:,} labelled nodes"
        same, chance = (_percent(f[key] or 0.0) for key in ("homophily", "homophily-by-chance"))
        alike = f"{same} of the edges join nodes of one class ({chance} by chance)"
        alike = "no edge has two labelled ends" if f["homophily"] is None else alike
    return [
        f"{f['nodes']:,} nodes, {f['edges']:,} edges, {f['neighbours']:.1f} neighbours a node "
        f"(at most {f['most-neighbours']:,}; {f['isolated']:,} nodes without), "
        f"{f['components']:,} components, the largest of {f['largest-component']:,} nodes",
        f"{f['features']:,} features from {f['least-feature']:.3g} to {f['largest-feature']:.3g}, "
        f"{_percent(f['non-zero-share'])} of the entries non-zero",
        learnt,
        alike,
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


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
