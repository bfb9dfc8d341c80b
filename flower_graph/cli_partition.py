"""The command ``flower-graph partition``: who gets what, before anything is trained."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_graph.cli_run import default_folder
from flower_graph.config import RunConfig, load_config, to_dict
from flower_graph.config_fedscem import FedSCemConfig
from flower_graph.files import prepare_folder, write_json, write_text

if TYPE_CHECKING:
    from flower_graph.data.partition_stats import PartitionStatistics

PICTURE = "partition.png"


def partition_command(args: argparse.Namespace, seeds: list[int] | None) -> int:
    """Partition a config's graph, print the figures and write them with a picture.

    Parameters
    ----------
    args : Namespace
        ``config``, ``overrides``, ``out``.
    seeds : list of int, optional
        Seeds to average over; the config's own if left out.

    Returns
    -------
    int
        Exit status.
    """
    overrides = [[*args.overrides, f"seed={seed}"] for seed in seeds or ()] or [args.overrides]
    configs = [load_config(args.config, mine) for mine in overrides]
    # Read before the folder is made, so that a missing data set leaves no empty folder.
    found = [_statistics(config) for config in configs]
    folder = default_folder(args.config)
    out = prepare_folder(args.out or folder.with_name(f"partition-{folder.name}"))
    numbers = [config.seed for config in configs]
    rows = _rows([each.figures for each in found])
    # The picture first: where partition.json is, the command has done all it does.
    _draw(out / PICTURE, found[0], args.config, numbers[0])
    write_text(out / "partition.md", _page(args.config, numbers, rows))
    write_json(out / "partition.json", _record(to_dict(configs[0]), numbers, found))
    print(_heading(args.config, numbers))
    width = max(len(name) for name in rows)
    print(*(f"  {name:{width}}  {value}" for name, value in rows.items()), sep="\n")
    print(f"  {'outputs':{width}}  {out}", flush=True)
    return 0


def _statistics(config: RunConfig) -> PartitionStatistics:
    """Load the graph and deal it as the config's app would."""
    # Imported here: they take seconds, and a wrong word is told at once.
    from flower_graph.data import load_graph
    from flower_graph.data.ego_networks import partition_egos
    from flower_graph.data.partition_stats import ego_statistics, node_statistics

    graph = load_graph(config.data, seed=config.seed)
    if isinstance(config, FedSCemConfig):
        return ego_statistics(partition_egos(graph, config.partition, config.seed))
    # nFedGNN needs no partition: every node is a client.
    return node_statistics(graph)


def _record(
    config: Mapping[str, Any], seeds: list[int], found: Sequence[PartitionStatistics]
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


def _page(name: str, seeds: list[int], rows: Mapping[str, str]) -> str:
    table = "\n".join(f"| {figure} | {value} |" for figure, value in rows.items())
    return (
        f"# {_heading(name, seeds)}\n\n| figure | value |\n|---|---|\n{table}\n\n"
        f"![Distributions, seed {seeds[0]}]({PICTURE})\n"
    )


def _draw(path: Path, found: PartitionStatistics, name: str, seed: int) -> None:
    from flower_graph.plots import plot_counts  # draws with matplotlib, which is slow to import

    plot_counts(path, found.distributions, title=f"{name}, seed {seed}")
