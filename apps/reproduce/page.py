"""The rows of a paper's tables for reading: ``table.md``, ``choices.md`` and pictures."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import isfinite, nan
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from flower_graph.apps.parallel import loaded
from flower_graph.apps.reproduce.rows import BEST, Results, Row, all_rows
from flower_graph.apps.reproduce.runs import AXES, Curves, Store, runs_of
from flower_graph.apps.reproduce.table import (
    LAST,
    TEST,
    VALIDATION,
    WITHIN,
    Figure,
    Line,
    Paper,
    Picture,
    function,
)
from flower_graph.records.rounds import merit
from flower_graph.report import plots
from flower_graph.report.significance import MOST_CHANCE, differences, holm, paired
from flower_graph.wire.keys import SCORES, VALUE_SCORES

NONE = "–"  # stands for a figure that is not there
HOW = """\
Mean ± sample deviation over the n seeds that were run; each seed draws other splits, clients and
weights, the same for all methods. *Test* is of the round with the best validation, *last* of the
last round; an accuracy is the mean over the clients. Settings are those of the configs and those
that stand in the line; of several that a method may try, validation on seeds that no line has
chose them{choices}. Behind a difference: p of a paired t test; *Holm*, p
corrected for all tests of its table of the same difference, whichever data set and method; and
how many seeds have its sign. A line that still improved at its limit has its rounds in its name;
with a run that ended in its best round it has the seed. Rounds, local steps and MiB sent are
means over the seeds, the last two of one client. Seconds are of one thread with other runs beside
it."""
BUDGETS = """\
Within so many rounds, local steps of a client or MiB that a client sends, at the best validation
until then. *Best*: the best mean, and the methods that paired t tests, with Holm's correction, do
not tell from it (p at least 0.05)."""
CHOICES = """# How settings were chosen

Of each row's settings that with the best mean validation {metric}, in the round where that is best,
is taken (**bold**); no choice looked at a test {metric}. *Rounds* are those run, for each seed;
*ended*: validation had stopped improving in all of them. All figures: `choices` in `runs.json.xz`.
"""

# How a figure is written: heading, format, and whether its deviation stands behind
FORMS = {
    TEST: ("test", ".3f", True),
    LAST: ("last", ".3f", True),
    VALIDATION: ("best validation", ".3f", True),
    "rounds": ("rounds", ".0f", False),
    "steps-a-client": ("steps", ".0f", False),
    "MiB-a-client": ("MiB up", ",.3f", False),
    "uplink-mib": ("MiB of all users", ",.2f", False),
    "seconds-per-round": ("s a round", ".3g", False),
    "run-seconds": ("s a run", ".1f", False),
    "peak-mib": ("memory, MiB", ",.4g", False),
    **{name: (name, ".1f", False) for name in ("nodes", "edges")},
    **{name: (name.replace("-", " "), ".1f", True) for name in ("degree", "true-degree")},
    "epsilon-of-a-round": ("epsilon of a round", ",.4g", False),
    "noise-multiplier": ("noise / sensitivity", ".3g", False),
    **{f"test-{one}-at-best-val": (one.upper(), ".3f", True) for one in SCORES[1:]},
    **{f"test-{one}-at-best-val": (one.upper(), ".2f", True) for one in VALUE_SCORES},
    **{f"{BEST}{one}": ("best validation", ".2f", True) for one in VALUE_SCORES},
}


def make_page(
    paper: Paper,
    results: Results,
    missing: Sequence[str] = (),
    pictures: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write the whole page; a table without rows is not on it."""
    lines = paper.lines
    how = HOW.format(choices=" ([choices.md](choices.md))" * any(line.has_choice for line in lines))
    parts = [f"# {paper.title}", *notes, how, *settings_shown(paper)]
    several = len({line.names[0] for line in lines}) > 1
    places: dict[tuple[str, str], Results] = {}
    for line in lines:
        if rows := results.get(line):
            places.setdefault((line.table, line.names[0]), {})[line] = rows
    for (table, data), of_place in places.items():
        parts.append(f"## {table}, {data}" if several else f"## {table}")
        parts += _section(of_place, paper.scale)
    if pictures:
        drawn = ", ".join(f"`{name}`" for name in pictures)
        parts += ["## Pictures", f"`flower-graph reproduce` draws {drawn}."]
    if missing:
        parts += ["## Not run", "\n".join(f"- {reason}" for reason in missing)]
    return "\n\n".join(parts) + "\n"


def settings_shown(paper: Paper) -> list[str]:
    """Write a table of settings for each model, as the configs have them now."""
    parts = []
    for model, names in paper.settings.items():
        of_model = [line for line in paper.lines if line.model == model and not line.trained]
        places = dict.fromkeys((line.data, line.config) for line in of_model)
        found = [
            [data, f"`{config}`", *(_setting(loaded(config), name) for name in names)]
            for data, config in places
        ]
        if found:
            parts.append(markdown(pd.DataFrame(found, columns=["data", "config", *names])))
    return parts


def _setting(config: object, name: str) -> str:
    value = attrgetter(name)(config)
    values = value if isinstance(value, list) else [value]
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)


# Tables ------------------------------------------------------------------------------------------


def _section(results: Results, scale: int) -> list[str]:
    """Write the tables of one data set: of plain figures, and one for each kind of their keys."""
    kinds: dict[str, dict[str, Figure]] = {}
    for figure in [figure for line in results for figure in line.wanted]:
        kinds.setdefault(next(iter(figure.keys), ""), {}).setdefault(figure.label, figure)
    parts = []
    for kind, figures in kinds.items():
        if table := _table(results, [*figures.values()], scale):
            parts += [BUDGETS, table] if kind == "within" else [table]
    return parts


def _table(results: Results, figures: Sequence[Figure], scale: int) -> str:
    """Write a table with a row for each line, or for each group that was measured of it."""
    keys = [*(key for line in results for key in line.keys), "group", "clients"]
    labels = [name for one in map(_heading, figures) for name in (one, PAPERS + one)]
    columns = ["method", "model", *keys, *labels, MEMORY, "settings", "n"]
    records = []
    for line, rows in results.items():
        for group in dict.fromkeys(row.get("group") for row in rows):
            here = [row for row in rows if row.get("group") == group]
            cells = {}
            for figure in figures:
                for row in [row for row in _of(figure, here) if isfinite(row["mean"])]:
                    cells[_heading(figure)] = written(figure, row, scale)
                    if row["paper"] is not None:
                        cells[PAPERS + _heading(figure)] = _of_paper(figure, row, scale)
                    if row.get("paper-gpu-memory-percent"):
                        cells[MEMORY] = f"{row['paper-gpu-memory-percent']:.2f}"
            if cells:
                cells |= {"method": line.names[2] + marks(here), "model": line.model}
                cells |= {key: here[0][key] for key in keys if key in here[0]}
                if not line.measure:
                    cells["n"] = str(len(here[0]["seeds"]))
                if line.has_choice:
                    chosen = here[0]["settings"]["overrides"][len(line.settings) :]
                    names = [one[one.rfind(".", 0, one.find("=")) + 1 :] for one in chosen]
                    cells["settings"] = " ".join(names)
                records.append(cells)
    if records and any(one.name == WITHIN for one in figures):
        best = {_heading(one): winner(_of(one, all_rows(results))) for one in figures}
        records.append({"method": "*Best*", **best})
    if not records:
        return ""
    frame = pd.DataFrame(records, columns=[*dict.fromkeys(columns)])
    frame = frame.replace("", None).dropna(axis=1, how="all")
    return markdown(frame if frame["model"].nunique() > 1 else frame.drop(columns="model"))


def _of(figure: Figure, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["metric"] == figure.name and figure.keys.items() <= r.items()]


PAPERS, MEMORY = "paper's ", "paper, % of GPU memory"


def _heading(figure: Figure) -> str:
    if figure.name == WITHIN:
        return str(figure.keys["within"])
    name = FORMS[figure.name][0] if figure.name in FORMS else figure.name.replace("-", " ")
    return ", ".join([name, *map(str, figure.keys.values())])


def _form(figure: Figure, scale: int) -> tuple[float, str, bool]:
    """Return factor, format, and whether a deviation stands behind; see ``FORMS``."""
    # Accuracies are shares or, at scale 100, percent; differences of them are points
    if figure.over:
        is_value = any(one in figure.of for one in VALUE_SCORES)
        return (1, "+.2f", True) if is_value else (100, "+.1f", True)
    _, spec, spread = FORMS.get(figure.name, ("", ".3f", True))
    is_percent = scale > 1 and spec == ".3f" and "precision" not in figure.name
    return (scale, ".1f", spread) if is_percent else (1, spec, spread)


def written(figure: Figure, row: Row, scale: int) -> str:
    """Write a row's mean, with the deviation where there are several seeds, and the test."""
    factor, spec, spread = _form(figure, scale)
    text = format(factor * row["mean"], spec)
    if spread and len(row["seeds"]) > 1:
        text += f" ± {format(factor * row['std'], spec.lstrip('+'))}"
    if "p" not in row:
        return text
    chance, corrected = (NONE if row[key] is None else f"{row[key]:.2g}" for key in ("p", "holm"))
    return f"{text} (p {chance}, Holm {corrected}, {row['agree']} of {len(row['values'])})"


def _of_paper(figure: Figure, row: Row, scale: int) -> str:
    factor, spec, _ = _form(figure, scale)
    # A paper prints one digit more than a share of the nodes needs
    text = format(factor * row["paper"], ".4f" if spec == ".3f" else spec)
    return text + (f" ± {row['paper-std']:.4f}" if "paper-std" in row else "")


def winner(rows: Sequence[Row]) -> str:
    """Name the method with the best mean, and those that do not differ from it significantly."""
    if not rows:
        return NONE
    # `mse` of `test-mse-at-best-val`
    metric = rows[0].get("metric", "").removeprefix("test-").removesuffix("-at-best-val")
    best = max(rows, key=lambda row: merit(metric, row["mean"]))
    others = [row for row in rows if row is not best]
    ours, *theirs = [dict(zip(r["seeds"], r["values"], strict=True)) for r in (best, *others)]
    chances = [paired([*differences(ours, one).values()] or [0.0])["p"] for one in theirs]
    near = [
        row["method"] + cut_off([row])
        for row, p in zip(others, holm(chances), strict=True)
        if p is None or p >= MOST_CHANCE
    ]
    beside = f" (not apart: {', '.join(near)})" if near else ""
    return str(best["method"]) + cut_off([best]) + beside


def marks(rows: Collection[Row]) -> str:
    """Return remarks behind a method's name about how its rows were run."""
    seeds = sorted({seed for row in rows for seed in row.get("best_last", ())})
    last = f", best in the last round with seed {', '.join(map(str, seeds))}" if seeds else ""
    left_out = max((row.get("left_out", 0) for row in rows), default=0)
    return cut_off(rows) + last + (f", at most {left_out} left out" if left_out else "")


def cut_off(rows: Iterable[Row]) -> str:
    """Name the number of rounds if some run had not stopped improving."""
    rounds = [row["settings"]["rounds"] for row in rows if row.get("ended") is False]
    return f", {max(rounds)} rounds" if rounds else ""


def markdown(frame: pd.DataFrame) -> str:
    """Write a frame as a Markdown table; what is missing is a dash."""
    rows = frame.astype(object).fillna(NONE).values.tolist()
    lines = [[*frame.columns], ["---"] * len(frame.columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def choices_page(choices: Sequence[Row], lines: Sequence[Line]) -> str:
    """Write the page about how settings were chosen."""
    columns = ["row", "settings", "best validation", "seeds", "rounds", "ended"]
    cells = [
        [
            row["where"],
            (" ".join(row["tried"]) or "as it ships").join(["**" * row["taken"]] * 2),
            written(Figure(row["metric"]), row, 1),
            *(", ".join(map(str, row[name])) for name in ("seeds", "rounds")),
            "yes" if row["ended"] else "no",
        ]
        for row in choices
    ]
    metrics = dict.fromkeys(row["metric"].removeprefix(BEST) for row in choices)
    tried = {line.method: len(line.choices) for line in lines if line.has_choice}
    few = min(tried.values())
    more = [f"{method} {count}" for method, count in tried.items() if count > few]
    unequal = (
        f"Not all choose among equally many: {', '.join(more)}, the others {few}. Among more "
        "settings the best validation is higher by chance alone.\n\n"
    )
    text = CHOICES.format(metric=" or ".join(metrics))
    return f"{text}\n{unequal if more else ''}{markdown(pd.DataFrame(cells, columns=columns))}\n"


# Pictures ----------------------------------------------------------------------------------------

AXES_NAMES = ("rounds", "local steps of a client", "MiB that a client sends")


class Shown(NamedTuple):
    """The runs and the rows of one line, as functions of pictures take them."""

    table: str
    data: str
    model: str
    method: str
    centralised: bool
    runs: dict[int, Curves]
    rows: list[Row]


Drawing = Sequence[Shown]
Options = Mapping[str, Any]  # of a ``Picture``, and its data sets
Plot = tuple[Callable[..., object], Any, Mapping[str, Any]]  # with its arguments


def draw(out: Path, paper: Paper, results: Results, store: Store) -> list[str]:
    """Draw pictures, and return the names of those for which there was anything."""
    names = []
    present = dict.fromkeys(line.data for line in paper.lines)
    for picture in paper.pictures:
        kind = KINDS.get(picture.kind) or function(picture.kind)
        data = [name for name in picture.data or present if name in present]
        for of_file in [[one] for one in data] if "{data}" in picture.file else [data]:
            shown = [*_shown(picture, of_file, results, store)]
            plot, panels, more = kind(shown, {**picture.options, "data": of_file})
            if panels:
                names.append(picture.file.replace("{data}", "".join(of_file[:1]).lower()))
                plot(out / names[-1], panels, **more)
    return names


def _shown(
    picture: Picture, data: Sequence[str], results: Results, store: Store
) -> Iterator[Shown]:
    for name, (table, methods) in product(data, picture.tables.items()):
        here = [line for line in results if (line.table, line.data) == (table, name)]
        for method in methods or dict.fromkeys(line.method for line in here):
            for line in [line for line in here if line.method == method]:
                runs = runs_of(line, store)
                yield Shown(table, *line.names, bool(line.trained), runs, results[line])


def curves(shown: Drawing, _: Options) -> Plot:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    accuracy, loss = dict[str, dict[str, plots.Line]](), dict[str, dict[str, plots.Line]]()
    reference: dict[str, float] = {}
    for one in shown:
        runs = [*one.runs.values()]
        if runs and one.centralised:
            reference[one.data] = fmean(run.test_at_best_val for run in runs)
        elif runs:
            rounds = range(1, 1 + max(len(run.cross_entropy) for run in runs))
            of_accuracy = plots.Line(rounds, [run.test_accuracy for run in runs])
            accuracy.setdefault(one.data, {})[one.method] = of_accuracy
            of_loss = plots.Line(rounds, [run.cross_entropy for run in runs])
            loss.setdefault(one.data, {})[one.method] = of_loss
    levels = {data: {"centralised": figure} for data, figure in reference.items()}
    upper = [
        plots.Panel(lines, "test accuracy", title=data, levels=levels.get(data, {}))
        for data, lines in accuracy.items()
    ]
    lower = [plots.Panel(lines, "loss") for lines in loss.values()]
    return plots.plot_panels, [upper, lower] if upper else [], {}


def intervals(shown: Drawing, options: Options) -> Plot:
    """Draw means with deviations, a panel for each data set, and the paper's figures beside.

    ``also`` has more points of a method: their names, and the figures that they show.
    """
    panels: dict[str, dict[str, plots.Interval]] = {}
    for one in shown:
        also = options.get("also", {}).get(one.method, {})
        for name, metric in {one.method: options.get("metric", TEST), **also}.items():
            for row in [row for row in one.rows if row["metric"] == metric][:1]:
                interval = plots.Interval(row["mean"], row["std"], row["paper"])
                panels.setdefault(one.data, {}).setdefault(name, interval)
    return plots.plot_intervals, panels, {"label": options.get("label", "test accuracy")}


def matrices(shown: Drawing, options: Options) -> Plot:
    """Draw a matrix of figures by two settings, a panel for each metric, all on one scale."""
    y, x = options["axes"]
    rows = [row for one in shown for row in one.rows]
    sides = {name: [*dict.fromkeys(row[name] for row in rows)] for name in (y, x)}
    panels = {}
    for metric, name in options["metrics"].items():
        mean = {(row[y], row[x]): row["mean"] for row in rows if row["metric"] == metric}
        if any(map(isfinite, mean.values())):
            panels[name] = [[mean.get((v, h), nan) for h in sides[x]] for v in sides[y]]
    more = {"rows": (y, sides[y]), "columns": (x, sides[x]), "label": options["label"]}
    return plots.plot_matrices, panels, more


def axes(shown: Drawing, options: Options) -> Plot:
    """Draw accuracy by rounds, by local steps and by bytes sent, a curve for each method.

    Of many methods those at stake are ``marked``, and the others grey.
    """
    panels: dict[str, dict[str, plots.Line]] = {}
    for one in shown:
        trained = [curves for curves in one.runs.values() if curves.up and not one.centralised]
        for axis, label in zip(AXES, AXES_NAMES, strict=True) if trained else ():
            spent = max((curves.spent(axis) for curves in trained), key=len)
            name = one.method if one.data in options["data"] else f"{one.method}, {one.data}"
            drawn = plots.Line(spent, [curves.best_so_far for curves in trained])
            panels.setdefault(label, {})[name] = drawn
    how = {"scales": "x", "marked": options.get("marked", ())}
    row = [plots.Panel(lines, "test accuracy", label, **how) for label, lines in panels.items()]
    return plots.plot_panels, [row] if row else [], {}


def budgets(shown: Drawing, _: Options) -> Plot:
    """Draw accuracy by privacy budget, a panel for each model; lines without one are levels."""
    noised = dict[str, dict[str, dict[float, list[float]]]]()
    levels = dict[str, dict[str, list[float]]]()
    for one in shown:
        title = f"{one.data}, {one.model}"
        for row in [row for row in one.rows if row["metric"] == TEST]:
            if row.get("epsilon"):
                of_method = noised.setdefault(title, {}).setdefault(one.method, {})
                of_method[row["epsilon"]] = row["values"]
            else:
                levels.setdefault(title, {})[one.method] = row["values"]
    panels = []
    for title, methods in noised.items():
        budgets = sorted({budget for values in methods.values() for budget in values})
        given = {name: [values[one] for one in budgets] for name, values in methods.items()}
        given |= {name: [values] * len(budgets) for name, values in levels.get(title, {}).items()}
        lines = {n: plots.Line(budgets, [*zip(*one, strict=True)]) for n, one in given.items()}
        x_label = "epsilon of the whole run"
        panels.append(plots.Panel(lines, "test accuracy", x_label, title, scales="x"))
    return plots.plot_panels, [panels] if panels else [], {}


KINDS: dict[str, Callable[..., Plot]] = {
    one.__name__: one for one in (axes, budgets, curves, intervals, matrices)
}
