"""A picture of FedGLS's tables: differences by the setting that is varied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flower_graph.report.plots import Line, plot_lines
from flower_graph.storage.reading import Tree


def plot_differences(path: Path, _: object, rows: Sequence[Tree], picture: Tree) -> bool:
    """Draw a difference by the varied setting, a panel for each table, a line for each data set."""
    panels: dict[str, dict[str, Line]] = {}
    for table in picture["panels"]:
        for data in picture["data"]:
            wanted = (table, data, picture["metric"])
            here = [row for row in rows if (row["table"], row["data"], row["metric"]) == wanted]
            by_seed = [dict(zip(row["seeds"], row["values"], strict=True)) for row in here]
            if shared := set.intersection(*map(set, by_seed)) if by_seed else set():
                panels.setdefault(table, {})[data] = {
                    row["varied"]: [figures[seed] for seed in sorted(shared)]
                    for row, figures in zip(here, by_seed, strict=True)
                }
    if panels:
        plot_lines(path, panels, label=picture["label"])
    return bool(panels)
