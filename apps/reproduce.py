"""``flower-graph reproduce``: the papers' tables and figures, their numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from flower_graph.apps import (
    reproduce_fedgls,
    reproduce_fedscem,
    reproduce_nfedgnn,
    reproduce_ppfl,
)
from flower_graph.errors import ConfigError

PAPERS = {
    "fedgls": reproduce_fedgls.reproduce,
    "fedscem": reproduce_fedscem.reproduce,
    "nfedgnn": reproduce_nfedgnn.reproduce,
    "ppfl": reproduce_ppfl.reproduce,
}


def main(
    paper: str,
    out: Path,
    *,
    only: dict[str, list[str]],
    seeds: Sequence[int] | None,
    rounds: int | None,
) -> None:
    """Run a paper's comparison and write ``table.md``, ``table.json`` and pictures.

    Parameters
    ----------
    paper : str
        Which paper, such as ``nfedgnn``.
    out : Path
        Output folder. Runs that it holds already, in ``runs``, are not run again.
    only : dict
        Cells to keep: allowed values by key.
    seeds : sequence of int, optional
        Other seeds than the paper's.
    rounds : int, optional
        Other rounds than the paper's.
    """
    if paper not in PAPERS:
        near = get_close_matches(paper, PAPERS, 1, 0)
        raise ConfigError(f"paper: {paper!r} is unknown; did you mean {near[0]!r}?")
    PAPERS[paper](out, only=only, seeds=seeds, rounds=rounds)
