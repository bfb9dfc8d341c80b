"""A picture of who took part in a run: clients by rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from flower_graph.report.plots.base import COLOURS, finish, line, save
from flower_graph.server.ledger import ANSWERED, FAILED, LEFT_OUT, known_clients, states

if TYPE_CHECKING:
    from flower_graph.report.rounds import RoundReport

MOST_ROWS = 200  # clients with a row of their own; of more, neighbours share one
COLOUR = {ANSWERED: COLOURS[0], FAILED: COLOURS[1], LEFT_OUT: "#C8C8C8"}
NAMES = {ANSWERED: "answered", FAILED: "failed", LEFT_OUT: "left out"}
# By the numbers of the states; what is not known is white.
PALETTE = np.array([to_rgb("white"), *(to_rgb(COLOUR[state]) for state in sorted(COLOUR))])
SHARES = LinearSegmentedColormap.from_list("share", [COLOUR[LEFT_OUT], COLOUR[ANSWERED]])


def save_participation(path: Path, reports: Sequence[RoundReport], *, title: str) -> None:
    """Draw who answered, failed or was left out in each round, and how many."""
    # With more than ``MOST_ROWS`` clients a row stands for neighbouring ones, and its colour for
    # the share of them that answered.
    clients = known_clients(report.participation for report in reports)
    if not clients.size:
        raise ValueError("reports: no round says who took part; at least one must")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    who, how_many = figure.subplots(1, 2, width_ratios=(2, 1))
    rounds = [report.round for report in reports]
    result, counts = _picture(reports, clients)
    _draw(who, result, rounds, clients)
    for state, name in NAMES.items():
        line(how_many, rounds, counts[:, state].tolist(), name)
        how_many.lines[-1].set_color(COLOUR[state])
    finish(how_many, "clients", legend=True)
    how_many.set_ylim(0, 1.05 * clients.size)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def _picture(
    reports: Sequence[RoundReport], clients: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Give the cells, ``[rows, rounds]``, and how many clients were what, ``[rounds, 4]``."""
    # A cell is a state, or, where clients share rows, the share of them that answered; NaN in a
    # round that does not say.
    rows = min(clients.size, MOST_ROWS)
    starts = np.arange(rows) * clients.size // rows
    width = np.diff([*starts, clients.size])
    cells, counts = np.full((rows, len(reports)), np.nan), np.full((len(reports), 4), np.nan)
    records = [report.participation for report in reports]
    for place, (record, result) in enumerate(zip(records, states(records, clients), strict=True)):
        if not record:
            continue
        counts[place] = np.bincount(result, minlength=4)
        shared = np.add.reduceat(result == ANSWERED, starts, dtype=np.int64) / width
        cells[:, place] = result if rows == clients.size else shared
    return cells, counts


def _draw(
    axes: Axes, cells: NDArray[np.float64], rounds: Sequence[int], clients: NDArray[np.int64]
) -> None:
    """Draw the cells: by what a client was, or by the share that answered."""
    edges = (rounds[0] - 0.5, rounds[-1] + 0.5, clients.size - 0.5, -0.5)
    if len(cells) == clients.size:
        colours = PALETTE[np.nan_to_num(cells).astype(int)]
        axes.imshow(colours, aspect="auto", extent=edges)
        handles = [Patch(color=COLOUR[state], label=name) for state, name in NAMES.items()]
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=3,
            frameon=False,
            fontsize=9,
        )
    else:
        image = axes.imshow(cells, SHARES, aspect="auto", extent=edges, vmin=0, vmax=1)
        axes.figure.colorbar(image, ax=axes, label="share that answered (0 to 1)")
    finish(axes, "client", legend=False)
    axes.grid(visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: _number(clients, at)))


def _number(clients: NDArray[np.int64], at: float) -> str:
    """Name the client of a row; their numbers may have gaps."""
    return str(clients[int(at)]) if 0 <= at < clients.size else ""
