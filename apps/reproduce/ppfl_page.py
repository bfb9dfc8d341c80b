"""PPFL-GNN's ``table.md``: the rows of ``table.json`` for reading, the paper's figures beside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from flower_graph.apps.reproduce.ppfl_cells import (
    DEEPWALK,
    FED,
    FIGURES,
    FULL,
    GAT,
    LOC,
    NAMES,
    OWN,
    OWN_SETTINGS,
    Case,
    Plan,
)
from flower_graph.apps.reproduce.ppfl_rows import ACCURACY, PRECISIONS, SUM
from flower_graph.apps.reproduce.ppfl_tables import choices, compared, levels
from flower_graph.apps.reproduce.tables import show_pictures
from flower_graph.apps.reproduce.text import (
    NONE,
    Row,
    accuracy,
    count_seeds,
    find,
    markdown,
    paper_percent,
    paper_points,
    percent,
    points,
)

PRECISE = 0.9  # P@1 that the paper reports of DeepWalk at the end
TEST = {"role": "test"}


def make_page(
    plan: Plan,
    rows: Sequence[Row],
    missing: Sequence[str],
    left_out: Sequence[str],
    pictures: Sequence[str],
) -> str:
    """Write the whole page; a table without rows is not on it."""
    lines = _head(plan)
    lines += compared(rows, "Table 1", DEEPWALK)
    lines += compared(rows, "Table 2", GAT)
    lines += levels(plan, rows)
    lines += choices(rows)
    lines += _figures(rows)
    lines += _reached(rows)
    lines += show_pictures(pictures)
    if left_out or missing:
        lines += ["\n## Not run\n", *(f"- {reason}" for reason in (*left_out, *missing))]
    return "\n".join(lines) + "\n"


# What was run ------------------------------------------------------------------------------------


def _head(plan: Plan) -> list[str]:
    seeds = ",".join(map(str, plan.seeds))
    lines = [
        "# PPFL-GNN: the paper's comparison\n",
        f"Seeds {seeds}: each draws other public and private nodes, roles and first weights, "
        f"the same for *{LOC}* (clients that train alone, as many rounds), *{FED}* (aligned) and "
        f"*{FULL}* (one client with every node). Figures are micro-F1 in percent after the last "
        "round, by cross-validation among the client's test nodes: no embedding was trained with "
        "their labels, and no setting chosen by them. Mean ± sample deviation over the n seeds "
        f"that were run. *GLOBAL* is the sum over the clients of {FED} − {LOC}, in points, seed by "
        "seed. The paper's clients are other draws than ours, and it gives no deviations: compare "
        "means and sums. How to read this: [README.md](README.md).\n",
        "```",
        f"flower-graph reproduce ppfl --seeds {seeds} --out DIR                 # everything",
        f"flower-graph run ppfl/cora-gat --seeds {seeds}                        # one {FED}",
        f"flower-graph run ppfl/cora-gat --seeds {seeds} strategy.name=local    # one {LOC}",
        "```\n",
        "`table.json` has config and settings of every row.\n",
    ]
    for model in plan.models:
        lines += [*_settings(plan, model), ""]
    return lines + _own(plan)


def _settings(plan: Plan, model: str) -> list[str]:
    """Say what the configs have, as they are now."""
    result: list[dict[str, Any]] = []
    for data in plan.data:
        case = Case("Table 1" if model == DEEPWALK else "Table 2", model, data)
        config = plan.settings(case)
        local = asdict(config.deepwalk if model == DEEPWALK else config.gat)
        part = config.partition
        result.append(
            {
                "config": f"`ppfl/{data.lower()}-{model.lower()}`",
                "rounds": plan.rounds_of(case),
                "clients": part.clients,
                "dimension": config.model.dimension,
                **local,
                "train, val, test": ", ".join(f"{ratio:g}" for ratio in part.ratios),
            }
        )
    names = [name.replace("_", " ") for name in result[0]]
    return markdown(names, [[_text(value) for value in one.values()] for one in result])


def _own(plan: Plan) -> list[str]:
    """Name the settings of clients that train alone, where they have others."""
    result = {
        (model, data): settings
        for (model, data), settings in OWN_SETTINGS.items()
        if model in plan.models and data in plan.data
    }
    if not result:
        return []
    return [
        f"*{OWN}* is {LOC} with settings that suit it better, chosen by validation accuracy:\n",
        *(f"- {data}, {model}: `{' '.join(how)}`" for (model, data), how in result.items()),
        "",
    ]


def _figures(rows: Sequence[Row]) -> list[str]:
    """Write the first, the second and the last iteration of Figures 3 to 6."""
    lines = []
    for name, case in FIGURES.items():
        here = [r for r in rows if r["table"] == name]
        if not here:
            continue
        steps = sorted({r["iteration"] for r in here})
        last = steps[-1]
        precise = [find(here, metric=PRECISIONS[0], iteration=step) for step in steps]
        others = [find(here, metric=metric, iteration=last) for metric in PRECISIONS[1:]]
        judged = [find(here, metric=ACCURACY, method=FED, iteration=step) for step in steps]
        judged.append(find(here, metric=ACCURACY, method=LOC, iteration=last))
        lines.append(
            [
                f"{name}: {case.name}, {case.model}",
                " → ".join(map(accuracy, precise)),
                *map(accuracy, others),
                " → ".join(map(percent, judged[:-1])),
                percent(judged[-1]),
                count_seeds([*precise, *judged]),
            ]
        )
    if not lines:
        return []
    columns = ["figure", "P@1", "P@5, last", "P@10, last", f"SVC, {FED}", f"SVC, {LOC}, last", "n"]
    return [
        "\n## Figures 3 to 6: alignment\n",
        "P@k: share of public nodes whose embedding at one client, turned into another's space, "
        "has the other's embedding of the same node among its k nearest; mean over all pairs. "
        "Figures of the first, the second and the last iteration, joined by arrows.\n",
        *markdown(columns, lines),
    ]


# Beside the paper --------------------------------------------------------------------------------


def _reached(rows: Sequence[Row]) -> list[str]:
    """Say of each of the paper's figures whether ours reaches it."""
    lines = []
    for table in ("Table 1", "Table 2"):
        here = [r for r in rows if r["table"] == table]
        for data in dict.fromkeys(r["data"] for r in here):
            for classifier, name in NAMES.items():
                key = {"data": data, "classifier": classifier, **TEST}
                total = find(here, metric=SUM, over=LOC, **key)
                levels = [find(here, metric=ACCURACY, method=m, **key) for m in (LOC, FED)]
                if total and all(levels):
                    positive = sum(value > 0 for value in total["values"])
                    shown = [points(total), paper_points(total), _yes(total)]
                    shown.append(f"{positive} of {len(total['values'])}")
                    for r in levels:
                        shown += [percent(r), paper_percent(r), _yes(r)]
                    lines.append([f"{table}, {data} ({name})", *shown])
    if not lines:
        return []
    columns = ["", "GLOBAL", "paper", "reached", "seeds above 0"]
    columns += [text for method in (LOC, FED) for text in (method, "paper", "reached")]
    return [
        "\n## What of the paper was reached\n",
        "*reached*: our mean is at least the paper's figure.\n",
        *markdown(columns, lines),
        *_precise(rows),
    ]


def _precise(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, case in FIGURES.items():
        here = [r for r in rows if (r["table"], r["metric"]) == (name, PRECISIONS[0])]
        if here and case.model == DEEPWALK:
            last = max(here, key=lambda r: r["iteration"])
            word = "reached" if last["mean"] > PRECISE else "not reached"
            lines.append(
                f"- P@1 above {PRECISE:g} at the end, {case.name}: {word}, {accuracy(last)}"
            )
    return ["", *lines] if lines else []


def _yes(r: Row | None) -> str:
    if r is None or r["paper"] is None:
        return NONE
    return "yes" if r["mean"] >= r["paper"] else "no"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
