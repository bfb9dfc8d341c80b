"""Pictures of FedGLS's tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flower_graph.report.plots import Line, Panel, plot_panels
from flower_graph.storage.reading import Tree


# Any: what ``reproduce`` shows, which no method imports
def plot_differences(path: Path, shown: Sequence[Any], picture: Tree) -> bool:
    """Draw a difference by the varied setting, a panel for each table, a line for each data set."""
    panels: dict[str, dict[str, Line]] = {}
    rows = [row for one in shown for row in one.rows if row["metric"] == picture["metric"]]
    for table, data in dict.fromkeys((row["table"], row["data"]) for row in rows):
        here = [row for row in rows if (row["table"], row["data"]) == (table, data)]
        by_seed = [dict(zip(row["seeds"], row["values"], strict=True)) for row in here]
        if shared := set.intersection(*map(set, by_seed)):
            values = [[100 * one[seed] for one in by_seed] for seed in sorted(shared)]
            panels.setdefault(table, {})[data] = Line([row["varied"] for row in here], values)
    row = [
        Panel(lines, picture["label"], table, levels={"_zero": 0.0})
        for table, lines in panels.items()
    ]
    return plot_panels(path, [row])
