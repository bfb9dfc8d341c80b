"""One page of HTML about runs, with its pictures inside; it needs no script and no other file."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import jinja2

from flower_graph.config.foreign import METRICS, RESULT
from flower_graph.errors import OutputError
from flower_graph.method.compare import ROUNDS, SECONDS, Comparison, compare, setting_text
from flower_graph.method.run import Run
from flower_graph.outputs.client import CLIENTS, read_table
from flower_graph.records import rounds
from flower_graph.report import plots
from flower_graph.report import result as results
from flower_graph.report.plots import Panel, curves_panel, svg
from flower_graph.report.result import BASELINES, evaluated, metrics_shown, with_spread
from flower_graph.report.trackers import visible
from flower_graph.storage.reading import Tree, reading

SECTIONS = 12  # most runs that have pictures of their own
LETTERS = 28  # of a run's name beside its interval
REASONS = 8  # most reasons of failures that are listed
Seeds = Sequence[Sequence[rounds.RoundReport]]


def page(*runs: Run | Path | str) -> str:
    """Write a page about runs, as HTML without paths of folders.

    From two runs on, taken as by ``compare``, the page begins with their comparison.
    ``OutputError`` if there is no finished run, or a file of one is damaged.
    """
    compared = compare(*runs)
    names = [row["run"] for row in compared.rows]
    with reading("runs", OutputError, "cannot be shown"):
        shown = [(row, *_read(row)) for row in compared.rows[:SECTIONS]]
        comparison = _comparison(compared, shown) if len(names) > 1 else None
        sections = [_section(*one) for one in shown]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        heading=", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3),
        comparison=comparison,
        sections=sections,
        more=len(names) - SECTIONS,
        # Of a path the last two names
        left_out=[
            "/".join([*Path(path).parts[-2:]]) + colon + why
            for path, colon, why in (reason.partition(": ") for reason in compared.left_out)
        ],
    )


def _comparison(compared: Comparison, shown: Sequence[tuple[Tree, list[Run], Seeds]]) -> Tree:
    pictures = {}
    for name, figures in compared.intervals().items():
        ends = {name[-LETTERS:]: interval for name, interval in figures.items()}
        draw = partial(plots.draw_intervals, figures=ends, label="mean ± deviation")
        pictures[f"Test at the best validation: {name}"] = svg(draw, 1.3 + 0.3 * len(ends))
    curves = {
        row["run"]: [[one.score(row["metric"], "test") for one in reports] for reports in seeds]
        for row, _, seeds in shown
    }
    return {
        "table": compared.table(all_settings=True).to_dict("split"),
        "words": compared.about()[1:],
        "pictures": pictures | {"Test over the rounds": curves_panel(Panel(curves, "test"))},
    }


def _read(row: Tree) -> tuple[list[Run], Seeds]:
    """Return the finished runs of a row, one a seed, and the reports of each."""
    runs = [one for one in Run(row["path"]).each if (one.path / RESULT).is_file()]
    return runs, [rounds.read_reports(one.path / METRICS) for one in runs]


def _section(row: Tree, runs: Sequence[Run], seeds: Seeds) -> Tree:
    """Return what the template shows of a run; of several seeds some parts are of the first."""
    result: Tree = runs[0].result
    config, metric, figures = visible(result["config"]), row["metric"], row["figures"]
    versions = ", ".join(f"{name} {one}" for name, one in result.get("versions", {}).items() if one)
    engine, named = result.get("engine", "unknown"), ", ".join(map(str, row["seeds"]))
    levels = {BASELINES.get(key, key): value for key, value in row["baselines"].items()}
    metrics = dict.fromkeys([metric, *metrics_shown(result["config"])])
    panels = plots.panels_of(seeds, [*metrics], levels)
    sent = ", ".join(rounds.format_bytes(figures[way]["mean"]) for way in rounds.WAYS)
    return {
        "name": row["run"],
        "about": f"{row['app']} on {config.get('data.name')}, seeds {named}, engine {engine}. "
        f"{versions}.",
        "figures": {
            f"test {metric} at the best validation": with_spread(figures[f"test-{metric}"], metric),
            f"best validation {metric}": with_spread(figures[f"val-{metric}"], metric),
            **evaluated(results.join([one.result.get("evaluated") for one in runs])),
            "rounds": f"{figures[ROUNDS]['mean']:.0f}",
            "clients": str(result.get("clients", "unknown")),
            "payload up, down": sent,
            "seconds": f"{figures[SECONDS]['mean']:.1f}",
            "memory at most": rounds.format_bytes(result.get("peak-memory-bytes") or 0),
        },
        "curves": {one.label[0].upper() + one.label[1:]: curves_panel(one) for one in panels},
        "baselines": [
            [BASELINES.get(key, key), rounds.figure_text(metric, value), _beaten(row, key)]
            for key, value in row["baselines"].items()
        ],
        "of_first": f", seed {row['seeds'][0]}" if len(row["seeds"]) > 1 else "",
        **_took_part(seeds[0]),
        "by_client": _by_client(runs[0].path / CLIENTS, result),
        "privacy": _texts(result.get("privacy") or {}),
        "settings": _texts(config),
    }


def _texts(settings: Mapping[str, object]) -> list[list[str]]:
    return [[key, setting_text(value)] for key, value in settings.items()]


def _beaten(row: Tree, key: str) -> str:
    if not math.isfinite(row["figures"][f"test-{row['metric']}"]["mean"]):
        return "not known: clients withhold what they measure"
    return "beaten" if key in row["beaten"] else "not beaten"


def _took_part(reports: Sequence[rounds.RoundReport]) -> Tree:
    is_known = any(report.participation for report in reports)
    reasons = Counter(
        f"{key.replace('-', ' ')}: {entry['reason']}"
        for one in reports
        for key in ("failed", "left-out")
        for entry in cast("list[Tree]", one.participation.get(key, []))
    )
    who = svg(partial(plots.draw_participation, reports=reports)) if is_known else ""
    return {
        "participation": {"Who": who},
        "refused": sum(len(one.rejected) for one in reports),
        "skipped": sum(bool(one.skipped) for one in reports),
        "reasons": reasons.most_common(REASONS),
    }


def _by_client(path: Path, result: Tree) -> dict[str, str]:
    shown, column = dict[str, str](), "test-accuracy"
    if path.is_file():
        table = read_table(path, ["client", "at", column])
        table = table[(table[column] != "") & ~table["client"].str.startswith("-")]
        at = "best" if (table["at"] == "best").any() else "last"
        rows = table[table["at"] == at].astype({"client": int, column: float})
        if len(rows):
            values = dict(zip(rows["client"], rows[column], strict=True))
            picture = svg(partial(plots.draw_clients, values=values))
            shown[f"Test accuracy of each client, the {at} round"] = picture
    classes, counts = result.get("classes"), result.get("class-counts", [])
    if plots.is_drawn(counts):
        picture = svg(partial(plots.draw_classes, counts=counts, classes=classes))
        shown["Nodes of each class at each client"] = picture
    if confusion := result.get("test-confusion-at-best-val") or result.get("test-confusion"):
        picture = svg(partial(plots.draw_confusion, nodes=confusion, classes=classes), 3.8)
        shown["Share of each class that was taken for which"] = picture
    return shown


TEMPLATE = """\
{#- What ``page.py`` fills in. Pictures are SVG of matplotlib's, which escapes names in them. -#}
{%- macro table(head, lines, kind="") -%}
<div class="scroll"><table{% if kind %} class="{{ kind }}"{% endif %}><tr>
{%- for cell in head %}<th>{{ cell }}</th>{% endfor %}</tr>
{%- for row in lines %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor -%}
</table></div>
{%- endmacro -%}
{%- macro panels(pictures) -%}
<div class="panels">
{%- for name, picture in pictures.items() if picture -%}
<figure><figcaption>{{ name }}</figcaption>{{ picture | safe }}</figure>
{%- endfor -%}
</div>
{%- endmacro -%}
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{{ heading }}</title><style>
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1rem; background: #fff; color: #1a1a1a;
  font: 16px/1.5 system-ui, "DejaVu Sans", Verdana, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 0.75rem; border-bottom: 2px solid #0072b2; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.5rem; }
p { margin: 0.4rem 0; } .note { color: #555; font-size: 0.9rem; }
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
</style></head>
<body>
<h1>{{ heading }}</h1>
{% if comparison %}
<nav>{% for one in sections %}<a href="#run-{{ loop.index0 }}">{{ one.name }}</a>
{% endfor %}</nav>
<h2>Comparison</h2>
{{ table(comparison.table.columns, comparison.table.data, "wide") }}
{% for line in comparison.words %}<p class="note">{{ line }}</p>{% endfor %}
{{ panels(comparison.pictures) }}
{% endif %}
{% for one in sections %}
{% if comparison %}<h2 id="run-{{ loop.index0 }}">{{ one.name }}</h2>{% endif %}
<p>{{ one.about }}</p>
{{ table(one.figures.keys(), [one.figures.values()]) }}
<h3>Curves</h3>
{{ panels(one.curves) }}
{% if one.baselines %}{{ table(["baseline", "test", ""], one.baselines) }}{% endif %}
<h3>Who took part{{ one.of_first }}</h3>
{{ panels(one.participation) -}}
<p>{{ one.refused }} answers were refused, and {{ one.skipped }} rounds skipped.</p>
{% if one.reasons %}{{ table(["why clients took no part", "rounds"], one.reasons) }}{% endif %}
{% if one.by_client -%}
<h3>By client and class{{ one.of_first }}</h3>{{ panels(one.by_client) }}{% endif %}
<h3>Privacy</h3>
{{ table(["privacy budget", ""], one.privacy or [["none", "clients added no noise"]]) }}
<details><summary>All {{ one.settings | length }} settings</summary>
{{ table(["setting", "value"], one.settings) }}</details>
{% endfor %}
{% if more > 0 %}<p class="note">{{ more }} further runs are in the table alone.</p>{% endif %}
{% for reason in left_out %}<p class="note">Left out: {{ reason }}</p>{% endfor %}
</body></html>
"""
