"""The command ``flower-graph partition``: which nodes each client gets."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flower_graph.apps.cli.run import default_folder, of_seeds
from flower_graph.apps.cli.say import say
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config, to_dict
from flower_graph.method.registry import method_of
from flower_graph.report.result import join
from flower_graph.storage.files import new_folder, write_json
from flower_graph.storage.reading import Tree

if TYPE_CHECKING:
    from flower_graph.method import Partition

MOST_FOLDERS = 20_000  # that are written; of one node each, PubMed has 19,717
PICTURE, CLASSES = "partition.png", "classes.png"


def partition_command(args: argparse.Namespace) -> int:
    """Partition a config's graph, print the figures and write them with a picture."""
    configs = [load_config(args.config, [*args.overrides, *one]) for one in of_seeds(args.seeds)]
    config, first = configs[0], f"seed {configs[0].seed}"
    if args.supernodes is not None and len(configs) > 1:
        raise ConfigError(
            f"--supernodes {args.supernodes}: {len(configs)} seeds, and data folders are written "
            "for one; leave one of both out"
        )
    method = method_of(config)
    if args.true_edges and not method.has_true_edges:
        raise ConfigError(f"--true-edges: app={config.app} has no clients without edges")
    # Read before the folder is made, so that a missing data set leaves no empty folder.
    cuts = [method.partition(one, true_edges=args.true_edges) for one in configs]
    if args.supernodes is not None:
        from flower_graph.data.folders.party import check_supernodes  # loads torch

        check_supernodes(args.supernodes, cuts[0].data.server.num_clients)
    figures, paper, statistics = [], cuts[0].paper, cuts[0].statistics
    for cut in cuts:
        tested = {f"{name}-test": one["test"] for name, one in cut.baselines.items()}
        finite = {name: value for name, value in tested.items() if not math.isnan(value)}
        figures.append({**cut.statistics.figures, **finite})
    record: Tree = {
        "config": to_dict(config),
        "seeds": [one.seed for one in configs],
        "figures": join(figures),
        "distributions": [cut.statistics.distributions for cut in cuts],
        **({"paper": paper} if paper else {}),
    }
    rows, over = _rows(record["figures"]), first
    if len(configs) > 1:
        over = f"mean ± deviation over seeds {', '.join(map(str, record['seeds']))}"
    title = f"{args.config}, {first}"
    with new_folder(args.out or default_folder(args.config, "partition-")) as out:
        folders = _write_folders(out, config, cuts, args.supernodes)
        # The picture first: where partition.json is, the command has done all it does.
        from flower_graph.report.plots import draw_classes, is_drawn, plot, plot_counts  # slow

        plot_counts(out / PICTURE, statistics.distributions, title=title)
        if is_drawn(counts := statistics.classes):
            names = cuts[0].data.server.class_names if len(cuts) == 1 else None
            plot(out / CLASSES, [[partial(draw_classes, counts=counts, classes=names)]], title)
        write_json(out / "partition.json", record)
        papers = {name: f"  (paper: {value:,})" for name, value in paper.items()}
        shown = {name: value + papers.get(name, "") for name, value in rows.items()}
        shown |= {"data folders": folders, "outputs": str(out)}
        width = max(map(len, shown))
        say(
            f"Partition of {args.config}, {over}",
            *(f"  {name:{width}}  {value}" for name, value in shown.items()),
        )
    return 0


def _write_folders(
    out: Path, config: RunConfig, cuts: Sequence[Partition], supernodes: int | None
) -> str:
    from flower_graph.data.folders.party import DATA_FORM, deciding_settings, write_run
    from flower_graph.method.base import data_form

    if len(cuts) > 1:
        return f"none: {len(cuts)} seeds; they are written for one seed"
    # For nodes that come later; the server holds no features, and is told nothing of them.
    form, data = data_form(config, method_of(config).data(config)), cuts[0].data
    if form is not None:
        data = replace(data, client_details=data.client_details | {DATA_FORM: form.to_json()})
    clients = data.server.num_clients
    count = clients if supernodes is None else supernodes
    if count > MOST_FOLDERS:
        return f"none: {count:,} are more than {MOST_FOLDERS:,}; --supernodes N makes fewer"
    write_run(out, deciding_settings(to_dict(config)), data, count)
    return f"1 for the server, {count:,} for {clients:,} clients{cuts[0].note}"


def _rows(figures: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    rows = {}
    for name, figure in figures.items():
        mean, spread = figure["mean"], figure["std"]
        if mean is None:  # not every seed has it
            continue
        digits = 3 if abs(mean) < 1 else 2  # a share needs its third digit
        if not spread and mean == int(mean):
            digits = 0
        rows[name] = f"{mean:,.{digits}f}" + (f" ± {spread:,.{digits}f}" if spread else "")
    return rows
