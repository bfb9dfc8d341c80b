"""One page of HTML about runs, with its pictures inside; it needs no script and no other file."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jinja2

from flower_graph.config.foreign import METRICS, RESULT, has_method
from flower_graph.config.schema import settings_of
from flower_graph.errors import OutputError
from flower_graph.method.compare import ROUNDS, SECONDS, Comparison, compare, setting_text
from flower_graph.method.registry import schema_of
from flower_graph.method.run import Run
from flower_graph.outputs.figures import CLIENTS, read_table
from flower_graph.records import rounds
from flower_graph.report import plots
from flower_graph.report.plots import curves_panel, drawn, over_rounds
from flower_graph.report.result import BASELINES, with_spread
from flower_graph.report.trackers import visible
from flower_graph.storage.reading import Tree, reading
from flower_graph.wire.keys import ROLES

SECTIONS = 12  # most runs that have pictures of their own
LETTERS = 28  # of a run's name beside its interval
REASONS = 8  # most reasons of failures that are listed
Seeds = Sequence[Sequence[rounds.RoundReport]]


def page(*runs: Run | Path | str, title: str = "") -> str:
    """Write a page about runs, as HTML without paths of folders.

    From two runs on, taken as by ``compare``, the page begins with their comparison. The default
    title is the runs' names. ``OutputError`` if there is no finished run, or a file of one is
    damaged.
    """
    compared = compare(*runs)
    names = [row["run"] for row in compared.rows]
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
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE).render(
        heading=title or ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3),
        comparison=comparison,
        sections=sections,
        more=len(names) - SECTIONS,
        left_out=left_out,
    )


def _comparison(compared: Comparison) -> Tree:
    pictures = {}
    for metric, figures in compared.intervals(lambda row: str(row["metric"])).items():
        ends = {name[-LETTERS:]: interval for name, interval in figures.items()}
        given, height = ([*ends], ends, "mean ± deviation"), 1.3 + 0.3 * len(ends)
        picture = drawn(plots.draw_intervals, *given, height=height)
        pictures[f"Test {metric} at the best validation"] = picture
    curves = {
        row["run"]: _of_seeds(_read(row)[1], row["metric"], "test")
        for row in compared.rows[:SECTIONS]
    }
    return {
        "table": compared.table(all_settings=True),
        "words": compared.about()[1:],
        "pictures": pictures | {"Test over the rounds": curves_panel(over_rounds("test", curves))},
    }


def _read(row: Tree) -> tuple[list[Run], list[list[rounds.RoundReport]]]:
    """Return the finished runs of a row, one a seed, and the reports of each."""
    runs = [one for one in Run(row["path"]).each if (one.path / RESULT).is_file()]
    return runs, [rounds.read_reports(one.path / METRICS) for one in runs]


def _of_seeds(seeds: Seeds, metric: str, role: str) -> list[list[float]]:
    return [[one.score(metric, role) for one in reports] for reports in seeds]


def _section(row: Tree) -> Tree:
    """Return what the template shows of a run; of several seeds some parts are of the first."""
    runs, seeds = _read(row)
    result: Tree = runs[0].result
    config, metric, figures = result["config"], row["metric"], row["figures"]
    data = visible({"name": config.get("data", {}).get("name")})["name"]
    versions = ", ".join(f"{name} {one}" for name, one in result.get("versions", {}).items() if one)
    named = f"seed{'s' * (len(row['seeds']) > 1)} {', '.join(map(str, row['seeds']))}"
    engine = result.get("engine", "unknown")
    privacy = [[key, setting_text(value)] for key, value in (result.get("privacy") or {}).items()]
    return {
        "name": row["run"],
        "about": f"{row['app']} on {data}, {named}, engine {engine}. {versions}.",
        "tiles": {
            f"test {metric} at the best validation": _mean(figures[f"test-{metric}"], metric),
            f"best validation {metric}": _mean(figures[f"val-{metric}"], metric),
            "rounds": f"{figures[ROUNDS]['mean']:.0f}",
            "clients": f"{result['clients']:,}" if "clients" in result else "unknown",
            "payload up, down": ", ".join(
                rounds.format_bytes(figures[way]["mean"]) for way in rounds.WAYS
            ),
            "seconds": f"{figures[SECONDS]['mean']:.1f}",
            "memory at most": rounds.format_bytes(result.get("peak-memory-bytes") or 0),
        },
        "curves": _curves(row, seeds),
        "baselines": _baselines(row),
        "of_first": f", seed {row['seeds'][0]}" if len(row["seeds"]) > 1 else "",
        **_took_part(seeds[0]),
        "by_client": _by_client(runs[0].path / CLIENTS, result),
        "structure": {
            panel.label.capitalize(): curves_panel(panel)
            for group in ("structure", "alignment")
            for panel in plots.learnt_of(seeds, group)
        },
        "privacy": privacy,
        **_settings(config),
    }


def _mean(figure: Tree, metric: str) -> str:
    return with_spread(figure, metric) if math.isfinite(figure["mean"]) else "not known"


def _curves(row: Tree, seeds: Seeds) -> dict[str, str]:
    levels = {BASELINES.get(key, key): value for key, value in row["baselines"].items()}
    panels = {"Loss": plots.losses_of(seeds)}
    for metric in [key[5:] for key in row["figures"] if key.startswith("test-")]:
        curves = {role: _of_seeds(seeds, metric, role) for role in ROLES}
        shown = levels if metric == row["metric"] else {}
        panels[metric.capitalize()] = over_rounds(metric, curves, levels=shown)
    panels["Bytes of all clients"] = plots.bytes_of(seeds)
    return {name: curves_panel(one) for name, one in panels.items()}


def _baselines(row: Tree) -> list[list[str]]:
    words, metric = {True: "beaten", False: "not beaten"}, row["metric"]
    if not math.isfinite(row["figures"][f"test-{metric}"]["mean"]):
        words = {False: "not known: clients withhold what they measure"}
    return [
        [BASELINES.get(key, key), rounds.figure_text(metric, value), words[key in row["beaten"]]]
        for key, value in row["baselines"].items()
    ]


def _took_part(reports: Sequence[rounds.RoundReport]) -> Tree:
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
            "How many": curves_panel(over_rounds("clients", counts, from_zero=True)),
            "Who": drawn(plots.draw_participation, reports) if is_known else "",
        },
        "refused": sum(len(one.rejected) for one in reports),
        "skipped": sum(bool(one.skipped) for one in reports),
        "reasons": reasons.most_common(REASONS),
    }


def _by_client(path: Path, result: Tree) -> dict[str, str]:
    shown = dict[str, str]()
    if path.is_file():
        table = read_table(path, ["client", "at", "test-accuracy"])
        table = table[~table["client"].str.startswith("-")]
        for at in ("best", "last"):
            rows = table[table["at"] == at]
            shares = rows["test-accuracy"].replace("", "nan").astype(float)
            pairs = zip(rows["client"].astype(int), shares, strict=True)
            if values := {client: share for client, share in pairs if math.isfinite(share)}:
                picture = drawn(plots.draw_clients, "accuracy", values)
                shown[f"Test accuracy of each client, the {at} round"] = picture
                break
    classes, counts = result.get("classes"), result.get("class-counts", [])
    if plots.is_drawn(counts):
        shown["Nodes of each class at each client"] = drawn(plots.draw_classes, counts, classes)
    if confusion := result.get("test-confusion-at-best-val") or result.get("test-confusion"):
        picture = drawn(plots.draw_confusion, confusion, classes, height=3.8)
        shown["Share of each class that was taken for which (%)"] = picture
    return shown


def _settings(config: Tree) -> Tree:
    settings, app = visible(config), str(config.get("app", ""))
    defaults = dict[str, object]()
    if has_method(app):  # another one's code would have to be imported
        defaults = {one.key: one.default for one in settings_of(schema_of(app, allowed=()))}
    whole = [[key, setting_text(value)] for key, value in settings.items()]
    return {
        "has_defaults": bool(defaults),
        "changed": [line for line in whole if settings[line[0]] != defaults.get(line[0], ...)],
        "settings": whole,
    }


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
</style></head>
<body>
<h1>{{ heading }}</h1>
{% if comparison %}
<nav><p>Comparison of all runs, then each by itself:
{% for one in sections %}<a href="#run-{{ loop.index0 }}">{{ one.name }}</a>
{%- if not loop.last %}, {% endif %}{% endfor %}
</p></nav>
<h2>Comparison</h2>
{{ table(comparison.table[0], comparison.table[1:], "wide") }}
{% for line in comparison.words %}<p class="note">{{ line }}</p>{% endfor %}
{{ panels(comparison.pictures) }}
{% endif %}
{% for one in sections %}
{% if comparison %}<h2 id="run-{{ loop.index0 }}">{{ one.name }}</h2>{% endif %}
<p>{{ one.about }}</p>
<div class="tiles">
{%- for name, value in one.tiles.items() -%}
<div class="tile"><b>{{ value }}</b><span>{{ name }}</span></div>
{%- endfor -%}
</div>
<h3>Curves</h3>
{{ panels(one.curves) }}
{% if one.baselines %}<h3>Baselines</h3>{{ table(["baseline", "test", ""], one.baselines) }}
{% else %}<p class="note">No baselines are known.</p>{% endif %}
<h3>Who took part{{ one.of_first }}</h3>
{{ panels(one.participation) -}}
<p>{{ one.refused }} answers were refused, and {{ one.skipped }} rounds skipped.</p>
{% if one.reasons %}{{ table(["why clients took no part", "rounds"], one.reasons) }}{% endif %}
{% if one.by_client -%}
<h3>By client and class{{ one.of_first }}</h3>{{ panels(one.by_client) }}{% endif %}
{% if one.structure %}<h3>Graphs and spaces</h3>{{ panels(one.structure) }}{% endif %}
<h3>Privacy</h3>
{% if one.privacy %}{{ table(["privacy budget", ""], one.privacy) }}
{%- else %}<p>No privacy budget: clients added no noise.</p>{% endif %}
<h3>Settings</h3>
<p>{{ "Settings that differ from the method's defaults" if one.has_defaults
  else "All settings" }}:</p>
{% if one.changed %}{{ table(["setting", "value"], one.changed) }}{% else %}<p>None.</p>{% endif %}
<details><summary>All {{ one.settings | length }} settings</summary>
{{ table(["setting", "value"], one.settings) }}</details>
{% endfor %}
{% if more > 0 %}<p class="note">{{ more }} further runs are in the table alone.</p>{% endif %}
{% for reason in left_out %}<p class="note">Left out: {{ reason }}</p>{% endfor %}
</body></html>
"""
