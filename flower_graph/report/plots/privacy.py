"""A picture of what a privacy budget costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_graph.report.plots.base import COLOURS, DASHES, legend_below, save

Values = Sequence[float]  # one a seed


class Panel(NamedTuple):
    """What is drawn of one config."""

    budgets: dict[float, Values]  # Accuracies by epsilon
    levels: dict[str, Values]  # Accuracies of runs without noise, by name


def plot_budgets(
    path: Path, panels: Mapping[str, Panel], *, noisy: str = "FED, with noise"
) -> None:
    """Draw accuracy against epsilon, and levels to compare it with."""
    # Points and lines are means over the seeds; bars and bands one standard deviation.
    if not panels:
        raise ValueError("panels: empty; at least one is needed")
    # Below a single panel the legend is wider than the panel.
    figure = Figure(figsize=(max(4.6 * len(panels), 7.2), 3.9), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).flatten()
    for cell, (title, panel) in zip(axes, panels.items(), strict=True):
        rows = [*panel.budgets.values(), *panel.levels.values()]
        if not panel.budgets or not all(map(len, rows)):
            raise ValueError(f"{title}: every budget and level needs at least one accuracy")
        _draw(cell, panel, noisy)
        cell.set_title(title, fontsize=11)
    axes[0].set_ylabel("accuracy in percent")
    legend_below(figure, list(axes))
    save(figure, path)


def _draw(axes: Axes, panel: Panel, noisy: str) -> None:
    epsilons = sorted(panel.budgets)
    means, spread = zip(*(_percent(panel.budgets[epsilon]) for epsilon in epsilons), strict=True)
    axes.errorbar(epsilons, means, spread, color=COLOURS[0], marker="o", capsize=3, label=noisy)
    for place, (name, values) in enumerate(panel.levels.items(), 1):
        mean, half = _percent(values)
        axes.axhline(mean, color=COLOURS[place], linestyle=DASHES[place], label=name)
        axes.axhspan(mean - half, mean + half, color=COLOURS[place], alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("epsilon of the whole run")
    axes.grid(visible=True, color="#E0E0E0", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _percent(values: Values) -> tuple[float, float]:
    return 100 * float(np.mean(values)), 100 * float(np.std(values))
