"""One page of HTML about runs, with its pictures inside; it needs no script and no other file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import cast

from flower_graph.config.foreign import has_method
from flower_graph.config.schema import settings_of
from flower_graph.errors import OutputError
from flower_graph.method.compare import ROUNDS, SECONDS, Comparison, compare
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
from flower_graph.report.result import BASELINES, metrics_of, metrics_shown
from flower_graph.report.trackers import visible
from flower_graph.storage.reading import Tree, reading
from flower_graph.wire.keys import ROLES

SECTIONS = 12  # most runs that have pictures of their own
REASONS = 8  # most reasons of failures that are listed
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, "DejaVu Sans", Verdana, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.75rem; border-bottom: 2px solid #0072b2; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.4rem 0; } .note { color: #555; font-size: 0.9rem; }
.tiles { display: grid; gap: 0.75rem; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }
.tile { border: 1px solid #d8d8d8; border-radius: 6px; padding: 0.5rem 0.75rem; }
.tile b { display: block; font-size: 1.15rem; } .tile span { color: #555; font-size: 0.85rem; }
.panels { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); align-items: start; }
figure { margin: 0; } figcaption { font-weight: 600; font-size: 0.95rem; }
svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { font-family: "DejaVu Sans", Verdana, sans-serif !important; }
.scroll { overflow-x: auto; max-width: 100%; margin-bottom: 0.75rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { border-bottom: 1px solid #e2e2e2; padding: 0.25rem 0.9rem 0.25rem 0; text-align: left;
  vertical-align: top; overflow-wrap: normal; }
td { font-variant-numeric: tabular-nums; }
.wide td, .wide th { white-space: nowrap; }
summary { cursor: pointer; }
"""


def page(*runs: Run | Path | str, title: str = "") -> str:
    """Write a page about runs, as HTML without paths of folders.

    From two runs on, taken as by ``compare``, the page begins with their comparison. The default
    title is the runs' names. ``OutputError`` if there is no finished run, or a file of one is
    damaged.
    """
    compared = compare(*runs)
    names = [row["run"] for row in compared.rows]
    heading = title or ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
    parts = [f"<h1>{escape(heading)}</h1>"]
    if len(compared.rows) > 1:
        links = (
            f'<a href="#run-{k}">{escape(name)}</a>' for k, name in enumerate(names[:SECTIONS])
        )
        contents = f"Comparison of all runs, then each by itself: {', '.join(links)}"
        with reading("runs", OutputError, "cannot be shown beside each other"):
            parts += [f"<nav><p>{contents}</p></nav>", *_comparison(compared)]
    for place, row in enumerate(compared.rows[:SECTIONS]):
        title = f'<h2 id="run-{place}">{escape(row["run"])}</h2>' if len(names) > 1 else ""
        with reading(row["path"], OutputError, "cannot be shown"):
            parts += [title, *_section(row)]
    if (more := len(names) - SECTIONS) > 0:
        parts.append(f'<p class="note">{more} further runs are in the table alone.</p>')
    for reason in compared.left_out:
        path, colon, words = reason.partition(": ")
        name = "/".join(Path(path).parts[-2:])
        parts.append(f'<p class="note">Left out: {escape(name + colon + words)}</p>')
    head = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(heading)}</title><style>{STYLE}</style></head>\n<body>\n"
    )
    return head + "\n".join(part for part in parts if part) + "\n</body></html>\n"


# Several runs ------------------------------------------------------------------------------------


def _comparison(compared: Comparison) -> list[str]:
    from flower_graph.report.plots import curves_panel, intervals_panel

    by_metric = dict[str, dict[str, tuple[float, float]]]()
    curves = dict[str, list[list[float]]]()
    for row in compared.rows:
        figure = row["figures"][f"test-{row['metric']}"]
        by_metric.setdefault(row["metric"], {})[row["run"]] = (figure["mean"], figure["std"])
    for row in compared.rows[:SECTIONS]:
        curves[row["run"]] = _of_seeds(_reports(row), row["metric"], "test")
    pictures = {
        f"Test {metric} at the best validation": intervals_panel("mean ± deviation", figures)
        for metric, figures in by_metric.items()
    }
    pictures["Test over the rounds"] = curves_panel("test", curves)
    words = [f'<p class="note">{escape(line)}</p>' for line in compared.about(all_settings=True)]
    shown, whole = _beside(compared), _beside(compared, all_settings=True)
    more = f"<details><summary>With all settings</summary>{_table(whole, 'wide')}</details>"
    parts = ["<h2>Comparison</h2>", _table(shown, "wide"), more * (whole != shown), *words]
    return [*parts, _panels(pictures)]


def _beside(compared: Comparison, *, all_settings: bool = False) -> list[tuple[str, ...]]:
    """Order a comparison's columns: figures, then settings; few runs have a column each."""
    settings = {*compared.differing}
    table = compared.table(all_settings=all_settings)
    columns = sorted(zip(*table, strict=True), key=lambda column: column[0] in settings)
    return [*zip(*columns, strict=True)] if compared.is_wide else columns


# One run -----------------------------------------------------------------------------------------


def _section(row: Tree) -> list[str]:
    result: Tree = _finished(row)[0].result
    seeds = _reports(row)
    config = result["config"]
    metrics = list(dict.fromkeys([*metrics_of(config), *metrics_shown(config)]))
    of_first = f", seed {row['seeds'][0]}" if len(row["seeds"]) > 1 else ""
    return [
        f"<p>{escape(_what(row, result))}</p>",
        _tiles(row, result),
        "<h3>Curves</h3>",
        _panels(_curves(row, seeds, metrics)),
        _baselines(row),
        f"<h3>Who took part{of_first}</h3>",
        _took_part(seeds[0]),
        *_by_client(row, result, of_first),
        *_structure(seeds),
        *_privacy(result),
        "<h3>Settings</h3>",
        _settings(config),
    ]


def _what(row: Tree, result: Tree) -> str:
    config, seeds = result["config"], row["seeds"]
    data = visible({"name": config.get("data", {}).get("name")})["name"]
    versions = ", ".join(f"{name} {one}" for name, one in result.get("versions", {}).items() if one)
    named = "seed" if len(seeds) == 1 else "seeds"
    return (
        f"{row['app']} on {data}, {named} {', '.join(map(str, seeds))}, engine "
        f"{result.get('engine', 'unknown')}. {versions}."
    )


def _tiles(row: Tree, result: Tree) -> str:
    metric, figures = row["metric"], row["figures"]
    tiles = {
        f"test {metric} at the best validation": _mean(figures[f"test-{metric}"], metric),
        f"best validation {metric}": _mean(figures[f"val-{metric}"], metric),
        "rounds": f"{figures[ROUNDS]['mean']:.0f}",
        "clients": f"{result['clients']:,}" if "clients" in result else "unknown",
        "payload up, down": ", ".join(_bytes(figures[way]["mean"]) for way in WAYS),
        "seconds": f"{figures[SECONDS]['mean']:.1f}",
        "memory at most": _bytes(result.get("peak-memory-bytes") or 0),
    }
    inner = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles.items()
    )
    return f'<div class="tiles">{"".join(inner)}</div>'


def _bytes(number: float) -> str:
    return format_bytes(number).replace(" ", "\N{NO-BREAK SPACE}")


def _mean(figure: Tree, metric: str) -> str:
    if not math.isfinite(figure["mean"]):
        return "not known"
    spread = f" ± {figure_text(metric, figure['std'])}" if len(figure["values"]) > 1 else ""
    return f"{figure_text(metric, figure['mean'])}{spread}"


def _curves(
    row: Tree, seeds: Sequence[Sequence[RoundReport]], metrics: Sequence[str]
) -> dict[str, str]:
    from flower_graph.report.plots import bytes_of, bytes_panel, curves_panel

    losses = {
        name: [[getattr(one, key) for one in reports] for reports in seeds]
        for name, key in (("loss", "loss"), ("cross-entropy", "cross_entropy"))
    }
    levels = {BASELINES.get(key, key): value for key, value in row["baselines"].items()}
    pictures = {"Loss": curves_panel("loss", losses)}
    for metric in metrics:
        curves = {role: _of_seeds(seeds, metric, role) for role in ROLES}
        shown = levels if metric == row["metric"] else {}
        pictures[metric.capitalize()] = curves_panel(metric, curves, shown)
    return pictures | {"Bytes of all clients": bytes_panel(bytes_of(seeds))}


def _of_seeds(seeds: Sequence[Sequence[RoundReport]], metric: str, role: str) -> list[list[float]]:
    return [[one.score(metric, role) for one in reports] for reports in seeds]


def _baselines(row: Tree) -> str:
    if not row["baselines"]:
        return '<p class="note">No baselines are known.</p>'
    words = {True: "beaten", False: "not beaten"}
    if not math.isfinite(row["figures"][f"test-{row['metric']}"]["mean"]):
        words = {False: "not known: clients withhold what they measure"}
    lines = [
        [BASELINES.get(key, key), figure_text(row["metric"], value), words[key in row["beaten"]]]
        for key, value in row["baselines"].items()
    ]
    return "<h3>Baselines</h3>" + _table([["baseline", "test", ""], *lines])


def _took_part(reports: Sequence[RoundReport]) -> str:
    from flower_graph.report.plots import curves_panel, participation_panels

    counts = {
        name: [[float(getattr(one, name)) for one in reports]] for name in ("asked", "answered")
    }
    panels = {"How many": curves_panel("clients", counts, from_zero=True)}
    for picture in participation_panels(reports):
        panels["Who"] = picture
    refused = sum(len(one.rejected) for one in reports)
    skipped = sum(bool(one.skipped) for one in reports)
    reasons = Counter(
        f"{key.replace('-', ' ')}: {entry['reason']}"
        for one in reports
        for key in ("failed", "left-out")
        for entry in cast("list[Tree]", one.participation.get(key, []))
    )
    lines = [["why clients took no part", "rounds"]]
    lines += [[reason, str(count)] for reason, count in reasons.most_common(REASONS)]
    words = f"<p>{refused} answers were refused, and {skipped} rounds skipped.</p>"
    return _panels(panels) + words + (_table(lines) if reasons else "")


def _by_client(row: Tree, result: Tree, of_first: str) -> list[str]:
    from flower_graph.report.plots import classes_panel, clients_panel, confusion_panel

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
    confusion = result.get("test-confusion-at-best-val") or result.get("test-confusion")
    if drawn := classes_panel(result.get("class-counts", []), result.get("classes")):
        shown["Nodes of each class at each client"] = drawn
    if confusion:
        shown["Share of each class that was taken for which (%)"] = confusion_panel(
            confusion, result.get("classes")
        )
    return [f"<h3>By client and class{of_first}</h3>", _panels(shown)] if shown else []


def _structure(seeds: Sequence[Sequence[RoundReport]]) -> list[str]:
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
    shown = {name: picture for name, picture in pictures.items() if picture}
    return ["<h3>Graphs and spaces</h3>", _panels(shown)] if shown else []


def _privacy(result: Tree) -> list[str]:
    spent = result.get("privacy")
    if not spent:
        return ["<h3>Privacy</h3>", "<p>No privacy budget: clients added no noise.</p>"]
    lines = [["privacy budget", ""], *([key, _word(value)] for key, value in spent.items())]
    return ["<h3>Privacy</h3>", _table(lines)]


def _settings(config: Tree) -> str:
    settings = visible(config)
    app = str(config.get("app", ""))
    defaults = dict[str, object]()
    if has_method(app):  # another one's code would have to be imported
        defaults = {one.key: one.default for one in settings_of(schema_of(app, allowed=()))}
    head = ["setting", "value"]
    whole = [[key, _word(value)] for key, value in settings.items()]
    changed = [line for line in whole if settings[line[0]] != defaults.get(line[0], ...)]
    words = "Settings that differ from the method's defaults" if defaults else "All settings"
    first = _table([head, *changed]) if changed else "<p>None.</p>"
    return (
        f"<p>{words}:</p>{first}<details><summary>All {len(settings)} settings</summary>"
        f"{_table([head, *whole])}</details>"
    )


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


def _panels(pictures: Mapping[str, str]) -> str:
    inner = (
        f"<figure><figcaption>{escape(name)}</figcaption>{picture}</figure>"
        for name, picture in pictures.items()
        if picture
    )
    return f'<div class="panels">{"".join(inner)}</div>'


def _table(lines: Sequence[Sequence[str]], kind: str = "") -> str:
    head, *rows = lines
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    about = f' class="{kind}"' if kind else ""
    return f'<div class="scroll"><table{about}><tr>{cells}</tr>{body}</table></div>'
