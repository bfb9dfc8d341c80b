"""A picture of an audit: each attack's success beside a guess, by setting."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flower_graph.report.plots.base import COLOURS, GREY, legend_below, save

LABEL_WIDTH = 42  # letters of an attack's name in a line
BAR, GAP = 0.8, 0.35  # height of a bar, and room between attacks


def save_audit(path: Path, findings: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Draw one bar for each attack and setting, and a line where a guess would be."""
    if not findings:
        raise ValueError("findings: empty; at least one attack is needed")
    attacks = list(dict.fromkeys(one["attack"] for one in findings))
    settings = list(dict.fromkeys(one["setting"] for one in findings))
    height = len(attacks) * (len(settings) * BAR + GAP)
    figure = Figure(figsize=(8.6, 1.4 + 0.32 * height), layout="constrained")
    axes = figure.subplots()
    for one in findings:
        _bar(axes, one, attacks.index(one["attack"]), settings.index(one["setting"]), len(settings))
    step = len(settings) * BAR + GAP
    centres = [place * step + (len(settings) - 1) * BAR / 2 for place in range(len(attacks))]
    axes.set_yticks(centres, [textwrap.fill(attack, LABEL_WIDTH) for attack in attacks], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02)
    axes.set_xlabel("success (AUC or precision); grey lines: a guess")
    axes.grid(visible=True, axis="x", color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    legend_below(figure, [axes])
    save(figure, path)


def _bar(axes: Axes, one: Mapping[str, Any], attack: int, setting: int, settings: int) -> None:
    place = attack * (settings * BAR + GAP) + setting * BAR
    axes.barh(
        place,
        one["mean"],
        height=BAR * 0.9,
        color=COLOURS[setting % len(COLOURS)],
        xerr=one["std"] or 0,
        error_kw={"elinewidth": 1},
        label=one["setting"],
    )
    half = BAR / 2
    axes.plot([one["chance"]] * 2, [place - half, place + half], color=GREY, linewidth=2)
