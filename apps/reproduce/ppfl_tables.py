"""PPFL-GNN's Tables 1 to 3 as ``table.md`` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flower_graph.apps.reproduce.ppfl_cells import (
    CHOSEN,
    COVER,
    DEGREE,
    FED,
    FULL,
    LEVELS,
    LOC,
    NAMES,
    OWN,
    TABLE_3_RATIOS,
    Plan,
)
from flower_graph.apps.reproduce.ppfl_rows import ACCURACY, CLIENT, GAIN, SUM
from flower_graph.apps.reproduce.text import (
    NONE,
    Row,
    count_seeds,
    find,
    markdown,
    number,
    paper_percent,
    paper_points,
    percent,
    points,
)
from flower_graph.strategies.procrustes_alignment.evaluation import SVC

TEST = {"role": "test"}


def compared(rows: Sequence[Row], table: str, model: str) -> list[str]:
    """Write Table 1 or 2, two lines for a classifier, then the full graph."""
    here = [r for r in rows if r["table"] == table]
    if not here:
        return []
    clients = sorted({r["client"] for r in here if r["metric"] == CLIENT})
    lines = []
    for data in dict.fromkeys(r["data"] for r in here):
        for classifier, name in NAMES.items():
            lines += _pair_lines(here, data, classifier, f"{data} ({name})", clients)
    columns = ["data (classifier)", ""]
    columns += [f"{method} {client}" for client in clients for method in (LOC, FED)]
    columns += [f"{LOC} mean", f"{FED} mean", "GLOBAL", "n"]
    return [
        f"\n## {table}: {model}\n",
        "Clients' own figures are means over the seeds; `table.json` has their deviations.\n",
        *markdown(columns, lines),
        *_full(here),
    ]


def _pair_lines(
    here: Sequence[Row], data: str, classifier: str, name: str, clients: Sequence[int]
) -> list[list[str]]:
    key = {"data": data, "classifier": classifier, **TEST}
    each = [
        find(here, metric=CLIENT, method=method, client=client, **key)
        for client in clients
        for method in (LOC, FED)
    ]
    means = [find(here, metric=ACCURACY, method=method, **key) for method in (LOC, FED)]
    total = find(here, metric=SUM, over=LOC, **key)
    ours = [number(None if r is None else 100 * r["mean"], ".1f") for r in each]
    lines = [
        [name, "ours", *ours, *map(percent, means), points(total), count_seeds(means)],
        ["", "paper", *map(paper_percent, (*each, *means)), paper_points(total), ""],
    ]
    alone = find(here, metric=ACCURACY, method=OWN, **key)
    if alone:
        over = find(here, metric=SUM, over=OWN, **key)
        shown = [percent(alone), percent(means[1]), points(over), count_seeds([alone])]
        lines.insert(1, ["", OWN, *[NONE] * len(each), *shown])
    return lines


def _full(here: Sequence[Row]) -> list[str]:
    lines = []
    for data in dict.fromkeys(r["data"] for r in here if r["method"] == FULL):
        key = {"data": data, "method": FULL, "metric": ACCURACY, **TEST}
        result = [find(here, classifier=classifier, **key) for classifier in NAMES]
        shown = [text for r in result for text in (percent(r), paper_percent(r))]
        lines.append([f"{data} ({FULL})", *shown, count_seeds(result)])
    columns = ["data", *(text for name in NAMES.values() for text in (name, "paper")), "n"]
    return ["", *markdown(columns, lines)] if lines else []


def levels(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Write Table 3: public nodes of the highest degree."""
    here = [r for r in rows if (r["table"], r.get("public")) == ("Table 3", DEGREE)]
    if not here:
        return []
    ratios = " and ".join(f"`{TABLE_3_RATIOS[m]}` for {m}" for m in plan.models)
    lines = [
        "\n## Table 3: public nodes by highest degree\n",
        "SVC, mean over the clients; each has 15 % of the nodes for itself at every level. The "
        "paper names neither the data set nor the classifier: its figures stand beside both data "
        f"sets. `partition.ratios` are {ratios}: nothing is chosen here, and with 5 % public nodes "
        "the fifth that is for validation elsewhere leaves classes with fewer than five test "
        "nodes.\n",
    ]
    columns = ["public", LOC, "paper", FED, "paper", f"{FED} − {LOC}", "paper", "n"]
    for data, model in dict.fromkeys((r["data"], r["model"]) for r in here):
        table = []
        for share in LEVELS:
            result = _three(here, data=data, model=model, share=share)
            if any(result):
                table.append([f"{share} %", *_with_paper(result), count_seeds(result)])
        lines += [f"\n{data}, {model}:\n", *markdown(columns, table)]
    return lines


def choices(rows: Sequence[Row]) -> list[str]:
    """Write what other choices of few public nodes give, which the paper does not have."""
    here = [r for r in rows if r["table"] == "Table 3"]
    if not any(r["public"] == COVER for r in here):
        return []
    lines = []
    for data, model in dict.fromkeys((r["data"], r["model"]) for r in here):
        for share in CHOSEN[COVER]:
            result = [_three(here, p, data=data, model=model, share=share) for p in CHOSEN]
            shown = [text for loc, fed, gain in result for text in _bare(loc, fed, gain)]
            count = count_seeds([r for three in result for r in three])
            lines.append([data, model, f"{share} %", *shown, count])
    columns = ["data", "model", "public"]
    columns += [f"{public}: {what}" for public in CHOSEN for what in (LOC, FED, "gain")]
    return [
        "\n## Few public nodes: highest degree, random, greedy cover\n",
        "Not in the paper, which leaves a better choice as future work. The cover takes the nodes "
        "with the most neighbours not yet covered. SVC, mean over the clients; the gain is "
        f"{FED} − {LOC} in points. Clients with other public nodes are other clients: {LOC} "
        "differs too.\n",
        *markdown([*columns, "n"], lines),
    ]


def _three(here: Sequence[Row], public: str = DEGREE, **place: Any) -> list[Row | None]:
    """Find LOC, FED and their difference at one place of Table 3."""
    key = {"classifier": SVC, "public": public, **TEST, **place}
    both = [find(here, metric=ACCURACY, method=method, **key) for method in (LOC, FED)]
    return [*both, find(here, metric=GAIN, over=LOC, **key)]


def _bare(loc: Row | None, fed: Row | None, gain: Row | None) -> list[str]:
    return [percent(loc), percent(fed), points(gain)]


def _with_paper(found: Sequence[Row | None]) -> list[str]:
    papers = [*map(paper_percent, found[:2]), paper_points(found[2])]
    return [text for pair in zip(_bare(*found), papers, strict=True) for text in pair]
