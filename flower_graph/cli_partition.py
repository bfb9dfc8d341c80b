"""The command ``flower-graph partition``: who gets what, before anything is trained."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_graph.cli_run import default_folder
from flower_graph.config import RunConfig, load_config, to_dict
from flower_graph.config_fedgls import FedGLSConfig
from flower_graph.config_fedscem import FedSCemConfig
from flower_graph.config_ppfl import PPFLConfig
from flower_graph.errors import ConfigError
from flower_graph.files import prepare_folder, write_json, write_text

if TYPE_CHECKING:
    from flower_graph.data.partition_stats import PartitionStatistics
    from flower_graph.data.run_data import RunData

TRUE_GRAPHS = "fed-gnn"  # the one method that trains on edges which graphless clients do not have
MOST_FOLDERS = 20_000  # that are written; of one node each, PubMed has 19,717
PICTURE = "partition.png"
# FedGLS's Table 4 (Fu et al., TMLR 2024, appendix D) by data set: clients, features, mean nodes,
# mean edges and classes. The edges are close to ours if each counts in both directions.
TABLE_4_FIGURES = (
    "clients",
    "features",
    "nodes-per-client",
    "directed-edges-per-client",
    "classes",
)
TABLE_4 = {
    "cora": (8, 1433, 192, 695, 7),
    "citeseer": (8, 3703, 149, 535, 6),
    "pubmed": (16, 500, 1079, 4367, 3),
    "flickr": (20, 500, 4441, 28663, 7),
    "ogbn-arxiv": (16, 128, 8948, 50397, 40),
}
# PPFL-GNN's section 4.1 (Zhang et al., 2023): 4 clients, 40 % public and 15 % private nodes.
OVERLAP_FIGURES = ("nodes-per-client", "public-per-client", "private-per-client")
OVERLAPS = {"cora": (1489, 1083, 406), "citeseer": (1829, 1330, 499)}


def partition_command(args: argparse.Namespace, seeds: list[int] | None) -> int:
    """Partition a config's graph, print the figures and write them with a picture.

    Parameters
    ----------
    args : Namespace
        ``config``, ``overrides``, ``out``, ``supernodes``, ``true_edges``.
    seeds : list of int, optional
        Seeds to average over; the config's own if left out.

    Returns
    -------
    int
        Exit status.
    """
    overrides = [[*args.overrides, f"seed={seed}"] for seed in seeds or ()] or [args.overrides]
    configs = [load_config(args.config, mine) for mine in overrides]
    if args.supernodes is not None and len(configs) > 1:
        raise ConfigError(
            f"--supernodes {args.supernodes}: {len(configs)} seeds, and data folders are written "
            "for one; leave one of both out"
        )
    # Read before the folder is made, so that a missing data set leaves no empty folder.
    found, data = _deal_all(configs, args.true_edges)
    if args.supernodes is not None and data is not None:
        from flower_graph.data.run_data import check_supernodes  # loads torch

        check_supernodes(args.supernodes, data.num_clients)
    folder = default_folder(args.config)
    out = prepare_folder(args.out or folder.with_name(f"partition-{folder.name}"))
    numbers = [config.seed for config in configs]
    rows, paper = _rows([each.figures for each in found]), paper_figures(configs[0])
    folders = _write_folders(out, configs, data, args)
    # The picture first: where partition.json is, the command has done all it does.
    _draw(out / PICTURE, found[0], args.config, numbers[0])
    write_text(out / "partition.md", _page(args.config, numbers, rows, paper))
    write_json(out / "partition.json", _record(to_dict(configs[0]), numbers, found, paper))
    beside = {name: f"  (paper: {value:,})" for name, value in paper.items()}
    shown = {name: value + beside.get(name, "") for name, value in rows.items()}
    shown |= {"data folders": folders, "outputs": str(out)}
    width = max(len(name) for name in shown)
    lines = [f"  {name:{width}}  {value}" for name, value in shown.items()]
    print(_heading(args.config, numbers), *lines, sep="\n", flush=True)
    return 0


def paper_figures(config: RunConfig) -> dict[str, int]:
    """Give what the paper says of a partition, where the config asks for one of the paper's.

    Parameters
    ----------
    config : FedGLSConfig, PPFLConfig or other
        Settings of a run.

    Returns
    -------
    dict
        By name of the figure; empty for what is in no table.
    """
    name = config.data.name.lower().removeprefix("planetoid/")
    if isinstance(config, PPFLConfig):
        shares = config.partition
        theirs = (shares.clients, shares.public_share, shares.private_share) == (4, 0.4, 0.15)
        sizes = OVERLAPS.get(name) if theirs else None
        return {} if sizes is None else dict(zip(OVERLAP_FIGURES, sizes, strict=True))
    if not isinstance(config, FedGLSConfig) or config.partition.method != "louvain":
        return {}
    found = TABLE_4.get(name)
    if found is None or found[0] != config.partition.clients:
        return {}
    return dict(zip(TABLE_4_FIGURES, found, strict=True))


def _deal_all(
    configs: Sequence[RunConfig], true_edges: bool
) -> tuple[list[PartitionStatistics], RunData | None]:
    """Deal the graph with each seed; of several seeds nothing but the statistics is kept."""
    found: list[PartitionStatistics] = []
    for config in configs:
        statistics, data = _deal(config, true_edges)
        found.append(statistics)
    return found, data if len(configs) == 1 else None


def _write_folders(
    out: Path, configs: Sequence[RunConfig], data: RunData | None, args: argparse.Namespace
) -> str:
    """Write the data folders of one seed, and say what came of it."""
    from flower_graph.data.run_data import write_run
    from flower_graph.data.run_folder import deciding_settings

    if data is None:
        return f"none: {len(configs)} seeds; they are written for one seed"
    count = data.num_clients if args.supernodes is None else args.supernodes
    if count > MOST_FOLDERS:
        return (
            f"none: {count:,} are more than {MOST_FOLDERS:,}; --supernodes N deals the clients "
            "to fewer"
        )
    write_run(out, deciding_settings(to_dict(configs[0])), data, count)
    needs_edges = configs[0].strategy.name == TRUE_GRAPHS and not args.true_edges
    without = f"; {TRUE_GRAPHS} needs --true-edges where clients are graphless"
    return f"server, and {count:,} for {data.num_clients:,} clients" + without * needs_edges


def _deal(config: RunConfig, true_edges: bool) -> tuple[PartitionStatistics, RunData]:
    """Load the graph and deal it as the config's app would."""
    # Imported here: they take seconds, and a wrong word is told at once.
    from flower_graph.data import load_graph
    from flower_graph.data.ego_networks import partition_egos
    from flower_graph.data.partition_stats import ego_statistics, node_statistics
    from flower_graph.data.run_data import graph_data, node_data

    if true_edges and not isinstance(config, FedGLSConfig):
        raise ConfigError(f"--true-edges: app={config.app} has no clients without edges")
    if isinstance(config, FedGLSConfig):
        return _deal_communities(config, true_edges)
    if isinstance(config, PPFLConfig):
        return _deal_overlaps(config)
    graph = load_graph(config.data, seed=config.seed)
    if isinstance(config, FedSCemConfig):
        egos = partition_egos(graph, config.partition, config.seed)
        return ego_statistics(egos), graph_data(egos, graph.num_classes)
    # nFedGNN needs no partition: every node is a client.
    return node_statistics(graph), node_data(graph)


def _deal_communities(
    config: FedGLSConfig, true_edges: bool
) -> tuple[PartitionStatistics, RunData]:
    """Cut the graph into communities, or read the clients of a folder."""
    from flower_graph.data import load_graph
    from flower_graph.data.client_folder import load_folder
    from flower_graph.data.client_graphs import partition_graph
    from flower_graph.data.names import folder_path
    from flower_graph.data.partition_stats import client_statistics
    from flower_graph.data.run_data import structure_data

    partition, folder = config.partition, folder_path(config.data.name)
    if folder is not None:
        seed = config.seed if partition.seed is None else partition.seed
        how = {"presence": config.data.presence, "normalize": config.data.normalize}
        graphs = load_folder(folder, partition.ratios, seed, **how)
        classes = 1 + max(int(graph.y.max()) for graph in graphs)
        data = structure_data(graphs, classes, true_edges=true_edges)
        return client_statistics(graphs, None), data
    whole, ratio = load_graph(config.data, seed=config.seed), config.graph.graphless_ratio
    graphs = partition_graph(whole, partition, ratio, config.seed)
    data = structure_data(graphs, whole.num_classes, true_edges=true_edges)
    return client_statistics(graphs, whole), data


def _deal_overlaps(config: PPFLConfig) -> tuple[PartitionStatistics, RunData]:
    """Cut the graph into clients that share public nodes, or read those of a folder."""
    from flower_graph.data import load_graph
    from flower_graph.data.names import folder_path
    from flower_graph.data.overlapping import overlapping_graphs
    from flower_graph.data.overlapping_folder import load_overlapping_folder
    from flower_graph.data.partition_stats import overlap_statistics
    from flower_graph.data.run_data import graph_data

    partition, folder = config.partition, folder_path(config.data.name)
    if folder is not None:
        seed = config.seed if partition.seed is None else partition.seed
        ratios, noise = partition.ratios, partition.label_noise
        how = {"presence": config.data.presence, "normalize": config.data.normalize}
        graphs = load_overlapping_folder(folder, ratios, seed, noise, **how)
        whole = None
    else:
        whole = load_graph(config.data, seed=config.seed)
        graphs = overlapping_graphs(whole, partition, config.seed)
    classes = 1 + max(int(graph.y.max()) for graph in graphs)
    return overlap_statistics(graphs, whole), graph_data(graphs, classes)


def _record(
    config: Mapping[str, Any],
    seeds: list[int],
    found: Sequence[PartitionStatistics],
    paper: Mapping[str, int],
) -> dict[str, Any]:
    """Collect what ``partition.json`` holds; figures are lists in the order of the seeds."""
    names = found[0].figures
    values = {name: [each.figures[name] for each in found] for name in names}
    return {
        "config": config,
        "seeds": seeds,
        "figures": {
            name: {"mean": statistics.mean(of), "std": _spread(of), "values": of}
            for name, of in values.items()
        },
        "distributions": [each.distributions for each in found],
        **({"paper": paper} if paper else {}),
    }


def _rows(figures: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Write every figure as the table has it, with its deviation if there are several."""
    rows = {}
    for name in figures[0]:
        values = [figure[name] for figure in figures]
        mean, spread = statistics.mean(values), _spread(values)
        if not spread and mean == int(mean):
            rows[name] = f"{int(mean):,}"
            continue
        digits = 3 if abs(mean) < 1 else 2  # a share needs its third digit
        deviation = f" ± {spread:,.{digits}f}" if spread else ""
        rows[name] = f"{mean:,.{digits}f}{deviation}"
    return rows


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _heading(name: str, seeds: list[int]) -> str:
    if len(seeds) == 1:
        return f"Partition of {name}, seed {seeds[0]}"
    return f"Partition of {name}, mean ± deviation over seeds {', '.join(map(str, seeds))}"


def _page(name: str, seeds: list[int], rows: Mapping[str, str], paper: Mapping[str, int]) -> str:
    cells = [["figure", "value"], ["---", "---"], *([key, value] for key, value in rows.items())]
    if paper:
        beside = {"figure": "paper", "---": "---"} | {key: f"{v:,}" for key, v in paper.items()}
        cells = [[*row, beside.get(row[0], "")] for row in cells]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return f"# {_heading(name, seeds)}\n\n{table}\n\n![Distributions, seed {seeds[0]}]({PICTURE})\n"


def _draw(path: Path, found: PartitionStatistics, name: str, seed: int) -> None:
    from flower_graph.plots import plot_counts  # draws with matplotlib, which is slow to import

    plot_counts(path, found.distributions, title=f"{name}, seed {seed}")
