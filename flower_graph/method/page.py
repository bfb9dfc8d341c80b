"""One page of HTML about runs, with its pictures inside; it needs no script and no other file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from flower_graph.config.foreign import has_method
from flower_graph.config.schema import settings_of
from flower_graph.errors import OutputError
from flower_graph.method.compare import ROUNDS, SECONDS, Comparison, compare, with_spread
from flower_graph.method.registry import schema_of
from flower_graph.method.run import METRICS, RESULT, Run
from flower_graph.outputs.figures import CLIENTS, read_table
from flower_graph.records.rounds import (
    WAYS,
    RoundReport,
    figure_text,
    format_bytes,
    read_reports,
)
from flower_graph.report.result import BASELINES
from flower_graph.report.trackers import visible
from flower_graph.storage.reading import Tree, reading
from flower_graph.wire.keys import ROLES

SECTIONS = 12  # most runs that have pictures of their own
REASONS = 8  # most reasons of failures that are listed
Seeds = Sequence[Sequence[RoundReport]]


def page(*runs: Run | Path | str, title: str = "") -> str:
    """Write a page about runs, as HTML without paths of folders.

    From two runs on, taken as by ``compare``, the page begins with their comparison. The default
    title is the runs' names. ``OutputError`` if there is no finished run, or a file of one is
    damaged.
    """
    import jinja2

    compared = compare(*runs)
    names = [row["run"] for row in compared.rows]
    heading = title or ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
    with reading("runs", OutputError, "cannot be shown beside each other"):
        comparison = _comparison(compared) if len(names) > 1 else None
    sections = list[Tree]()
    for row in compared.rows[:SECTIONS]:
        with reading(row["path"], OutputError, "cannot be shown"):
            sections.append(_section(row))
    left_out = list[str]()
    for reason in compared.left_out:
        path, colon, words = reason.partition(": ")
        left_out.append("/".join(Path(path).parts[-2:]) + colon + words)
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(source).render(
        heading=heading,
        comparison=comparison,
        sections=sections,
        more=len(names) - SECTIONS,
        left_out=left_out,
    )


# Several runs ------------------------------------------------------------------------------------


def _comparison(compared: Comparison) -> Tree:
    from flower_graph.report.plots import curves_panel, intervals_panel

    by_metric = dict[str, dict[str, tuple[float, float]]]()
    for row in compared.rows:
        figure = row["figures"][f"test-{row['metric']}"]
        by_metric.setdefault(row["metric"], {})[row["run"]] = (figure["mean"], figure["std"])
    curves = {
        row["run"]: _of_seeds(_reports(row), row["metric"], "test")
        for row in compared.rows[:SECTIONS]
    }
    pictures = {
        f"Test {metric} at the best validation": intervals_panel("mean ± deviation", figures)
        for metric, figures in by_metric.items()
    }
    return {
        "shown": _beside(compared),
        "whole": _beside(compared, all_settings=True),
        "words": compared.about(all_settings=True),
        "pictures": {**pictures, "Test over the rounds": curves_panel("test", curves)},
    }


def _beside(compared: Comparison, *, all_settings: bool = False) -> list[tuple[str, ...]]:
    """Order a comparison's columns: figures, then settings; few runs have a column each."""
    settings = {*compared.differing}
    table = compared.table(all_settings=all_settings)
    columns = sorted(zip(*table, strict=True), key=lambda column: column[0] in settings)
    return [*zip(*columns, strict=True)] if compared.is_wide else columns


# One run -----------------------------------------------------------------------------------------


def _section(row: Tree) -> Tree:
    """Return what the template shows of a run; of several seeds some parts are of the first."""
    result: Tree = _finished(row)[0].result
    seeds, config = _reports(row), result["config"]
    privacy = [[key, _word(value)] for key, value in (result.get("privacy") or {}).items()]
    return {
        "name": row["run"],
        "about": _about(row, result),
        "tiles": _tiles(row, result),
        "curves": _curves(row, seeds),
        "baselines": _baselines(row),
        "of_first": f", seed {row['seeds'][0]}" if len(row["seeds"]) > 1 else "",
        **_took_part(seeds[0]),
        "by_client": _by_client(row, result),
        "structure": _structure(seeds),
        "privacy": privacy and [["privacy budget", ""], *privacy],
        **_settings(config),
    }


def _about(row: Tree, result: Tree) -> str:
    config, seeds = result["config"], row["seeds"]
    data = visible({"name": config.get("data", {}).get("name")})["name"]
    versions = ", ".join(f"{name} {one}" for name, one in result.get("versions", {}).items() if one)
    named = "seed" if len(seeds) == 1 else "seeds"
    return (
        f"{row['app']} on {data}, {named} {', '.join(map(str, seeds))}, engine "
        f"{result.get('engine', 'unknown')}. {versions}."
    )


def _tiles(row: Tree, result: Tree) -> dict[str, str]:
    metric, figures = row["metric"], row["figures"]
    return {
        f"test {metric} at the best validation": _mean(figures[f"test-{metric}"], metric),
        f"best validation {metric}": _mean(figures[f"val-{metric}"], metric),
        "rounds": f"{figures[ROUNDS]['mean']:.0f}",
        "clients": f"{result['clients']:,}" if "clients" in result else "unknown",
        "payload up, down": ", ".join(_bytes(figures[way]["mean"]) for way in WAYS),
        "seconds": f"{figures[SECONDS]['mean']:.1f}",
        "memory at most": _bytes(result.get("peak-memory-bytes") or 0),
    }


def _bytes(number: float) -> str:
    return format_bytes(number).replace(" ", "\N{NO-BREAK SPACE}")


def _mean(figure: Tree, metric: str) -> str:
    return with_spread(figure, metric) if math.isfinite(figure["mean"]) else "not known"


def _curves(row: Tree, seeds: Seeds) -> dict[str, str]:
    from flower_graph.report.plots import bytes_of, bytes_panel, curves_panel, losses_of

    levels = {BASELINES.get(key, key): value for key, value in row["baselines"].items()}
    pictures = {"Loss": curves_panel("loss", losses_of(seeds))}
    for metric in [key[5:] for key in row["figures"] if key.startswith("test-")]:
        curves = {role: _of_seeds(seeds, metric, role) for role in ROLES}
        shown = levels if metric == row["metric"] else {}
        pictures[metric.capitalize()] = curves_panel(metric, curves, shown)
    return pictures | {"Bytes of all clients": bytes_panel(bytes_of(seeds))}


def _of_seeds(seeds: Seeds, metric: str, role: str) -> list[list[float]]:
    return [[one.score(metric, role) for one in reports] for reports in seeds]


def _baselines(row: Tree) -> list[list[str]]:
    if not row["baselines"]:
        return []
    words = {True: "beaten", False: "not beaten"}
    if not math.isfinite(row["figures"][f"test-{row['metric']}"]["mean"]):
        words = {False: "not known: clients withhold what they measure"}
    lines = [
        [BASELINES.get(key, key), figure_text(row["metric"], value), words[key in row["beaten"]]]
        for key, value in row["baselines"].items()
    ]
    return [["baseline", "test", ""], *lines]


def _took_part(reports: Sequence[RoundReport]) -> Tree:
    from flower_graph.report.plots import curves_panel, draw_participation, drawn

    counts = {
        name: [[float(getattr(one, name)) for one in reports]] for name in ("asked", "answered")
    }
    is_known = any(report.participation for report in reports)
    reasons = Counter(
        f"{key.replace('-', ' ')}: {entry['reason']}"
        for one in reports
        for key in ("failed", "left-out")
        for entry in cast("list[Tree]", one.participation.get(key, []))
    )
    return {
        "participation": {
            "How many": curves_panel("clients", counts, from_zero=True),
            "Who": drawn(draw_participation, reports) if is_known else "",
        },
        "refused": sum(len(one.rejected) for one in reports),
        "skipped": sum(bool(one.skipped) for one in reports),
        "reasons": [["why clients took no part", "rounds"], *reasons.most_common(REASONS)],
    }


def _by_client(row: Tree, result: Tree) -> dict[str, str]:
    from flower_graph.report.plots import (
        clients_panel,
        draw_classes,
        draw_confusion,
        drawn,
        is_drawn,
    )

    path, shown = Run(row["path"]).each[0].path / CLIENTS, dict[str, str]()
    if path.is_file():
        table = read_table(path, ["client", "at", "test-accuracy"])
        table = table[~table["client"].str.startswith("-")]
        for at in ("best", "last"):
            rows = table[table["at"] == at]
            shares = rows["test-accuracy"].replace("", "nan").astype(float)
            values = dict(zip(rows["client"].astype(int), shares, strict=True))
            if picture := clients_panel("accuracy", values):
                shown[f"Test accuracy of each client, the {at} round"] = picture
                break
    classes, counts = result.get("classes"), result.get("class-counts", [])
    if is_drawn(counts):
        shown["Nodes of each class at each client"] = drawn(draw_classes, counts, classes)
    if confusion := result.get("test-confusion-at-best-val") or result.get("test-confusion"):
        picture = drawn(draw_confusion, confusion, classes, height=3.8)
        shown["Share of each class that was taken for which (%)"] = picture
    return shown


def _structure(seeds: Seeds) -> dict[str, str]:
    from flower_graph.report.plots import curves_panel

    pictures = {}
    for words, key in (
        ("Learnt graphs against true ones", "structure"),
        ("Alignment", "alignment"),
    ):
        names = dict.fromkeys(n for reports in seeds for one in reports for n in getattr(one, key))
        curves = {
            name: [[getattr(one, key).get(name, math.nan) for one in reports] for reports in seeds]
            for name in names
        }
        # Counts beside shares would flatten these
        shares = {
            name: rows
            for name, rows in curves.items()
            if all(abs(value) <= 1 for row in rows for value in row if math.isfinite(value))
        }
        rest = {name: rows for name, rows in curves.items() if name not in shares}
        pictures[words] = curves_panel("0 to 1", shares)
        pictures[f"{words}: {', '.join(rest)}"] = curves_panel("", rest)
    return {name: picture for name, picture in pictures.items() if picture}


def _settings(config: Tree) -> Tree:
    settings = visible(config)
    app = str(config.get("app", ""))
    defaults = dict[str, object]()
    if has_method(app):  # another one's code would have to be imported
        defaults = {one.key: one.default for one in settings_of(schema_of(app, allowed=()))}
    head = ["setting", "value"]
    whole = [[key, _word(value)] for key, value in settings.items()]
    changed = [line for line in whole if settings[line[0]] != defaults.get(line[0], ...)]
    return {
        "has_defaults": bool(defaults),
        "changed": [head, *changed],
        "settings": [head, *whole],
    }


def _word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return ", ".join(map(_word, value)) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _finished(row: Tree) -> list[Run]:
    return [one for one in Run(row["path"]).each if (one.path / RESULT).is_file()]


def _reports(row: Tree) -> list[list[RoundReport]]:
    return [read_reports(one.path / METRICS) for one in _finished(row)]
