"""A picture of FedGLS's tables: differences by the setting that is varied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flower_graph.report.plots import Line, plot_lines
from flower_graph.storage.reading import Tree


# Any: what ``reproduce`` shows, which no method imports
def plot_differences(shown: Sequence[Any], picture: Tree) -> tuple[Any, Any, Tree]:
    """Draw a difference by the varied setting, a panel for each table, a line for each data set."""
    panels: dict[str, dict[str, Line]] = {}
    rows = [row for one in shown for row in one.rows if row["metric"] == picture["metric"]]
    for table, data in dict.fromkeys((row["table"], row["data"]) for row in rows):
        here = [row for row in rows if (row["table"], row["data"]) == (table, data)]
        by_seed = [dict(zip(row["seeds"], row["values"], strict=True)) for row in here]
        if shared := set.intersection(*map(set, by_seed)):
            panels.setdefault(table, {})[data] = {
                row["varied"]: [figures[seed] for seed in sorted(shared)]
                for row, figures in zip(here, by_seed, strict=True)
            }
    return plot_lines, panels, {"label": picture["label"]}
