"""FedGLS's ``table.md``: the rows of ``table.json`` for reading, the paper's figures beside."""

from __future__ import annotations

from collections.abc import Sequence

from flower_graph.apps.fedgls_cells import COMPARED, FEDGLS, KNN, RIVALS, TUNED, Plan
from flower_graph.apps.fedgls_rows import STRUCTURE, gain
from flower_graph.apps.tables import (
    LAST,
    NONE,
    SECONDS,
    TEST,
    VALIDATION,
    Row,
    accuracy,
    count_seeds,
    find,
    markdown,
    mean_of,
    number,
    paper_points,
    points,
    show_pictures,
)


def make_page(
    plan: Plan,
    rows: Sequence[Row],
    missing: Sequence[str],
    left_out: Sequence[str],
    pictures: Sequence[str],
) -> str:
    """Write the whole page; a table without rows is not on it.

    Parameters
    ----------
    plan : Plan
        What was asked for.
    rows : sequence of dict
        As ``make_rows`` gives them.
    missing, left_out : sequence of str
        Runs and data sets that are not there, in words.
    pictures : sequence of str
        Names of the pictures beside the page.
    """
    lines = _head(plan)
    for data in plan.data:
        lines += _table_1(plan, rows, data)
    lines += _structure(plan, rows)
    lines += _varied(plan, rows, "Table 2", "local epochs")
    lines += _varied(plan, rows, "Table 3", "graph:graphless")
    lines += show_pictures(pictures)
    if left_out or missing:
        lines += ["\n## Not run\n", *(f"- {reason}" for reason in (*left_out, *missing))]
    return "\n".join(lines) + "\n"


def _head(plan: Plan) -> list[str]:
    seeds = ", ".join(map(str, plan.seeds))
    columns = [
        "data",
        "clients",
        "rounds",
        "local epochs",
        "learning rate",
        "learner's",
        "k",
        "tau",
    ]
    columns += ["hidden", "dropout", "weight decay", "Adam", "features"]
    return [
        "# FedGLS: the paper's comparison\n",
        f"Seeds {seeds}: each draws other communities, graphless clients, splits and weights, the "
        "same for all methods. Mean ± sample deviation over the n seeds that were run. *Ours* is "
        "the test accuracy in the round with the best validation accuracy, *last* that after the "
        "last round. An accuracy is the mean over the clients. The paper's are the means that it "
        "prints. It does not say which round they are of.\n",
        f"*{FEDGLS} − …* is the difference in points of accuracy, seed by seed. Seconds are of one "
        "thread with other runs beside it, so that they compare methods only roughly; those of a "
        "round are the median, evaluation included. How to read this: [README.md](README.md).\n",
        *markdown(columns, [_settings(plan, data) for data in plan.data]),
        "",
        *_tuned(plan),
    ]


def _settings(plan: Plan, data: str) -> list[str]:
    """Say what the config of a data set has, as it is now, before what one method has alone."""
    config = plan.common(data)
    how, graph, model = config.strategy, config.graph, config.model
    rates = f"{how.learning_rate:g}", f"{graph.learning_rate:g}"
    return [
        data,
        *(str(n) for n in (config.partition.clients, plan.rounds_of(data), how.local_epochs)),
        *rates,
        str(graph.neighbours),
        f"{graph.tau:g}",
        *(str(model.hidden), f"{model.dropout:g}", f"{how.weight_decay:g}"),
        "kept" if how.optimiser == "keep" else "new each round",
        _features(config.data.presence, config.data.normalize),
    ]


def _features(presence: bool, normalize: bool) -> str:
    said = "0 or 1" if presence else "as they are"
    return f"{said}, rows sum to one" if normalize else said


def _tuned(plan: Plan) -> list[str]:
    """Name the settings that one method has for itself."""
    found = {
        key: settings
        for key, settings in TUNED.items()
        if key[0] in plan.data and key[1] in plan.methods
    }
    if not found:
        return ["Every method has the settings of its data set, as far as it uses them.\n"]
    return [
        "Every method has the settings of its data set, as far as it uses them, but for these, "
        "chosen by validation accuracy:\n",
        *(f"- {data}, {method}: `{' '.join(how)}`" for (data, method), how in found.items()),
        "",
    ]


def _table_1(plan: Plan, rows: Sequence[Row], data: str) -> list[str]:
    here = [r for r in rows if (r["table"], r["data"]) == ("Table 1", data)]
    if not here:
        return []
    lines = []
    for method in plan.methods:
        found = {m: find(here, method=method, metric=m) for m in (TEST, LAST, VALIDATION)}
        seconds = find(here, method=method, metric=SECONDS)
        lines.append(
            [
                method,
                accuracy(found[TEST]),
                number(_paper(found[TEST]), ".4f"),
                accuracy(found[LAST]),
                accuracy(found[VALIDATION]),
                number(mean_of(seconds), ".3f"),
                count_seeds([found[TEST]]),
            ]
        )
    for rival in RIVALS:
        best, last = (find(here, metric=gain(rival, m)) for m in (TEST, LAST))
        if best:
            known = [points(best), paper_points(best), points(last)]
            lines.append([f"{FEDGLS} − {rival}", *known, NONE, NONE, count_seeds([best])])
    columns = ["method", "ours", "paper", "last", "best validation", "s a round", "n"]
    return [
        f"\n## Table 1, {data}\n",
        *markdown(columns, lines),
    ]


def _structure(plan: Plan, rows: Sequence[Row]) -> list[str]:
    lines = []
    for data in plan.data:
        for method in (FEDGLS, KNN):
            key = {"table": "Table 1", "data": data, "method": method}
            found = [find(rows, metric=metric, **key) for metric in STRUCTURE]
            if any(found):
                shown = [accuracy(r) for r in found[:4]] + [
                    number(mean_of(r), ".1f") for r in found[4:]
                ]
                lines.append([data, method, *shown, count_seeds(found)])
    if not lines:
        return []
    columns = ["data", "method", "precision", "recall", "homophily", "true", "degree", "true", "n"]
    return [
        "\n## Graphs of the graphless clients\n",
        f"Edges that {FEDGLS} learns and that {KNN} has from the features, beside the true ones, "
        "which no client sees; in the round with the best validation accuracy. Precision: share "
        "of these edges that are true; recall: share of the true edges that are among these; "
        "homophily: share of the edges that join nodes of one class.\n",
        *markdown(columns, lines),
    ]


def _varied(plan: Plan, rows: Sequence[Row], table: str, name: str) -> list[str]:
    here = [r for r in rows if r["table"] == table]
    if not here:
        return []
    methods = [method for method in COMPARED if method in plan.methods]
    rivals = [rival for rival in RIVALS if find(here, metric=gain(rival))]
    lines = []
    for data, varied in dict.fromkeys((r["data"], r["varied"]) for r in here):
        key = {"data": data, "varied": varied}
        found = [find(here, method=method, metric=TEST, **key) for method in methods]
        gains = [find(here, metric=gain(rival), **key) for rival in rivals]
        cells = [text for r in found for text in (accuracy(r), number(_paper(r), ".4f"))]
        cells += [text for r in gains for text in (points(r), paper_points(r))]
        lines.append([data, varied, *cells, count_seeds(found)])
    compared = [*methods, *(f"{FEDGLS} − {rival}" for rival in rivals)]
    columns = ["data", name, *(text for method in compared for text in (method, "paper")), "n"]
    return [f"\n## {table}: {name}\n", *_note(table), *markdown(columns, lines)]


def _note(table: str) -> list[str]:
    if table != "Table 3":
        return []
    return ["Fed-MLP reads no edges: its runs are the same ones in all rows of a data set.\n"]


def _paper(r: Row | None) -> float | None:
    return None if r is None else r["paper"]
