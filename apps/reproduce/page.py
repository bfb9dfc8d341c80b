"""Rows of a paper's tables with the paper's figures; ``table.md``, ``choices.md``, pictures."""

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

from flower_graph.apps.parallel import loaded
from flower_graph.apps.reproduce import table as t
from flower_graph.apps.reproduce.runs import AXES, BUDGET, Curves, Store, tried
from flower_graph.errors import ConfigError
from flower_graph.records.rounds import merit
from flower_graph.report import plots, result
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import ACCURACY, SCORES, VALUE_SCORES

PATIENCE = 50  # rounds without improvement, where a config has none of its own
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
*ended*: validation had stopped improving in all of them. `runs.json.xz` has the runs.
"""
UNEQUAL = """
Not all choose among equally many: {more}, the others {few}. Among more settings the best
validation is higher by chance alone.
"""

Row = Tree
Results = dict[tuple[t.Line, int], dict[str, Row]]  # by line and group of clients; rows by label


def make_rows(lines: Sequence[t.Line], store: Store) -> Results:
    """Make the rows of all runs that were done, with p values corrected (Holm)."""
    results: Results = {}
    for line in lines:
        runs = store.runs(line).values()
        for group in range(max((len(run.groups) or 1 for run in runs), default=0)):
            made = {one.label: _row(line, one, group, lines, store) for one in line.wanted}
            if rows := {label: row for label, row in made.items() if row}:
                results[line, group] = rows
    result.correct(all_rows(results))
    return results


def all_rows(results: Results) -> list[Row]:
    """List the rows of all lines."""
    return [row for rows in results.values() for row in rows.values()]


def _row(
    line: t.Line, figure: t.Figure, group: int, lines: Sequence[t.Line], store: Store
) -> Row | None:
    """Make a row of one figure; None where no run has it."""
    runs, settings = store.runs(line), store.settings(line)
    values, paper = _values(line, figure, group, store), line.paper.get(figure.label)
    if figure.over:
        place = (line.table, line.data, line.keys, figure.over)
        others = [one for one in lines if (one.table, one.data, one.keys, one.method) == place]
        if not others:
            return None
        other = min(others, key=lambda one: one.model != line.model)
        values = result.differences(values, _values(other, figure, group, store))
        ours, theirs = _mean(line.paper.get(t.TEST)), _mean(other.paper.get(t.TEST))
        if figure.of == t.TEST and None not in (ours, theirs) and paper is None:
            paper = ours - theirs
    if not any(map(math.isfinite, values.values())):
        return None
    return {
        **{key: getattr(line, key) for key in ("table", "data", "model", "method")},
        "metric": figure.name,
        "paper": paper,
        **result.describe([*values.values()]),
        "seeds": [*values],
        "config": line.config,
        "settings": settings,
        "limit": line.rounds or loaded(line.config, settings).rounds,
        **to_the_end(line, {seed: runs[seed] for seed in values if seed in runs}, settings),
        **line.keys,
        **figure.keys,
        **next((run.groups[group][0] for run in runs.values() if run.groups), {}),
        **(result.paired([*values.values()]) if figure.over else {}),
    }


# Any: a figure of the paper's, alone or with its deviation
def _mean(paper: Any) -> Any:
    return paper[0] if isinstance(paper, tuple) else paper


def _values(line: t.Line, figure: t.Figure, group: int, store: Store) -> dict[int, float]:
    """Return a figure of a line's runs by seed, where they have it."""
    name = figure.of or figure.name
    values = {
        seed: run.groups[group][1].get(name) if run.groups else value_of(name, run, figure.keys)
        for seed, run in store.runs(line).items()
    }
    return {seed: value for seed, value in values.items() if value is not None}


def to_the_end(line: t.Line, runs: Mapping[int, Curves], settings: tuple[str, ...]) -> Row:
    """Return the rounds that were run, whether all runs ended, and how many were left out."""
    curves = [*runs.values()]
    if line.trained and all(not one.loss or math.isnan(one.loss[0]) for one in curves):
        return {}  # measured, or nothing is trained
    config = loaded(line.config, settings)
    patience, most = config.patience, line.rounds or config.rounds
    still = [seed for seed, each in runs.items() if not each.ended(patience or PATIENCE)]
    # Of what patience ended, the round that was on its way may be the best by a little.
    ended = all(patience and len(runs[seed].loss) < most for seed in still)
    more = {"left_out": max(one.left_out for one in curves), "best_last": still if ended else []}
    summary = {"rounds": [len(each.loss) for each in curves], "ended": ended}
    return summary | {key: value for key, value in more.items() if value}


def missing_runs(lines: Sequence[t.Line], store: Store) -> list[str]:
    """List the lines that lack runs of some seeds."""
    found = {
        line.words: f"{line.words}: {done} of {len(line.seeds)} runs"
        for line in lines
        if (done := len(store.runs(line))) < len(line.seeds)
    }
    return [*found.values()]


# The figures of a run ----------------------------------------------------------------------------

ALIGNED = ("precision-1", "precision-5", "precision-10")
BEST = "test-{}-at-best-val", "best-val-{}"
FORMATS = {
    **dict.fromkeys((*t.STRUCTURE, *ALIGNED, "micro-f1", "sum-of-micro-f1"), ".3f"),
    **dict.fromkeys((t.WITHIN, t.LAST, "val-accuracy-last"), ".3f"),
    **{name.format(metric): ".3f" for metric in SCORES for name in BEST},
    **{name.format(metric): ".2f" for metric in VALUE_SCORES for name in BEST},
    **dict.fromkeys(("degree", "true-degree", "run-seconds", "nodes", "edges"), ".1f"),
    **dict.fromkeys(("rounds", "steps-a-client"), ".0f"),
    **dict.fromkeys(("seconds-per-round", BUDGET[1]), ".3g"),
    **dict.fromkeys((BUDGET[0], "peak-mib"), ",.4g"),
    **{"MiB-a-client": ",.3f", "uplink-mib": ",.2f"},
}
SPREAD = (".1f", ".2f", ".3f")  # a deviation stands behind figures of these formats
HEADINGS = {  # other than the name
    **{BEST[0].format(metric): metric.upper() for metric in (*SCORES, *VALUE_SCORES)},
    **{BEST[1].format(metric): "best validation" for metric in (ACCURACY, *VALUE_SCORES)},
    t.TEST: "test",
    t.LAST: "last",
    "steps-a-client": "steps",
    "MiB-a-client": "MiB up",
    "uplink-mib": "MiB of all users",
    "seconds-per-round": "s a round",
    "run-seconds": "s a run",
    BUDGET[0]: "epsilon of a round",
    BUDGET[1]: "noise / sensitivity",
    "peak-mib": "memory, MiB",
}


def value_of(name: str, run: Curves, keys: Mapping[str, Any]) -> float | None:
    """Return a figure of a run by its name and keys; None: the run does not have it."""
    if name not in FORMATS:
        raise ConfigError(f"figure: {name!r} is not one of {', '.join(FORMATS)}")
    if name == t.WITHIN:
        if keys["within"] == t.END:
            return run.whole[t.TEST]
        number, _, axis = keys["within"].partition(" ")
        if axis not in AXES or not number.replace(".", "", 1).isdigit():
            raise ConfigError(
                f"within: {keys['within']!r}; write NUMBER and one of {', '.join(AXES)}"
            )
        reached = bisect_right(run.spent(axis), float(number))
        return run.best_so_far[reached - 1] if reached else None
    if "iteration" in keys:  # or the last value if the run ended before
        curve = {"micro-f1": run.scores[ACCURACY]["test"], **run.alignment}.get(name, [math.nan])
        return float(curve[min(keys["iteration"], len(curve)) - 1])
    return run.whole.get(", ".join([name, *map(str, keys.values())]))


# The page ----------------------------------------------------------------------------------------


def make_page(
    paper: t.Paper,
    results: Results,
    missing: Sequence[str] = (),
    pictures: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Write the whole page; a table without rows is not on it."""
    link = " ([choices.md](choices.md))" * any(len(line.choices) > 1 for line in paper.lines)
    parts = [f"# {paper.title}", *notes, HOW.format(choices=link)]
    several = len({line.data for line in paper.lines}) > 1
    places: dict[tuple[str, str], Results] = {}
    for (line, group), rows in results.items():
        places.setdefault((line.table, line.data), {})[line, group] = rows
    for (table, data), of_place in places.items():
        parts.append(f"## {table}, {data}" if several else f"## {table}")
        # One table of plain figures, and one for each kind of keys
        kinds: dict[str, dict[str, t.Figure]] = {}
        for figure in [figure for line, _ in of_place for figure in line.wanted]:
            kinds.setdefault(next(iter(figure.keys), ""), {}).setdefault(figure.label, figure)
        for kind, figures in kinds.items():
            if text := _table(of_place, figures, paper.scale):
                parts += [BUDGETS, text] if kind == "within" else [text]
    if pictures:
        drawn = ", ".join(f"`{name}`" for name in pictures)
        parts += ["## Pictures", f"`flower-graph reproduce` draws {drawn}."]
    if missing:
        parts += ["## Not run", "\n".join(f"- {reason}" for reason in missing)]
    return "\n\n".join(parts) + "\n"


def _table(results: Results, figures: Mapping[str, t.Figure], scale: int) -> str:
    """Write a table with a row for each line, or for each group that was measured of it."""
    lines = [line for line, _ in results]
    keys = [*(key for line in lines for key in line.keys), "group", "clients"]
    headings = {label: _heading(figure) for label, figure in figures.items()}
    columns = ["method", "model", *keys]
    columns += [name for one in headings.values() for name in (one, PAPERS + one)]
    columns += [*(name for line in lines for name in line.columns), "settings", "n"]
    records, budgets = [], dict[str, list[Row]]()
    for (line, _), rows in results.items():
        here = {k: rows[k] for k in figures if k in rows and math.isfinite(rows[k]["mean"])}
        if not here:
            continue
        first = next(iter(rows.values()))
        cells = {key: first[key] for key in keys if key in first} | dict(line.columns)
        cells |= {"method": line.method + marks(rows.values()), "model": line.model}
        cells["n"] = "" if line.is_timed else str(len(first["seeds"]))
        if len(line.choices) > 1:
            chosen = first["settings"][len(line.settings) :]
            cells["settings"] = " ".join(
                one[one.rfind(".", 0, one.find("=")) + 1 :] for one in chosen
            )
        for label, row in here.items():
            figure, heading = figures[label], headings[label]
            cells[heading] = written(figure, row, scale)
            if (mean := _mean(row["paper"])) is not None:
                factor, spec = _form(figure, scale)
                # A paper prints one digit more than a share of the nodes needs
                text = format(factor * mean, ".4f" if spec == ".3f" else spec)
                text += "" if mean is row["paper"] else f" ± {row['paper'][1]:.4f}"
                cells[PAPERS + heading] = text
            if figure.name == t.WITHIN:
                budgets.setdefault(heading, []).append(row)
        records.append(cells)
    if not records:
        return ""
    if budgets:
        best = {name: winner(rows) for name, rows in budgets.items()}
        records.append({"method": "*Best*"} | best)
    frame = pd.DataFrame(records, columns=[*dict.fromkeys(columns)])
    frame = frame.replace("", None).dropna(axis=1, how="all")
    return markdown(frame if frame["model"].nunique() > 1 else frame.drop(columns="model"))


PAPERS = "paper's "


def _heading(figure: t.Figure) -> str:
    if figure.name == t.WITHIN:
        return str(figure.keys["within"])
    name = HEADINGS.get(figure.name, figure.name.replace("-", " "))
    return ", ".join([name, *map(str, figure.keys.values())])


def _form(figure: t.Figure, scale: int) -> tuple[float, str]:
    """Return factor and format: accuracies are shares or percent, their differences points."""
    if figure.over:
        is_value = any(one in figure.of for one in VALUE_SCORES)
        return (1, "+.2f") if is_value else (100, "+.1f")
    spec = FORMATS.get(figure.of or figure.name, ".3f")
    is_percent = scale > 1 and spec == ".3f" and "precision" not in figure.name
    return (scale, ".1f") if is_percent else (1, spec)


def written(figure: t.Figure, row: Row, scale: int = 1) -> str:
    """Write a row's mean, with the deviation where there are several seeds, and the test."""
    factor, spec = _form(figure, scale)
    text = format(factor * row["mean"], spec)
    if (plain := spec.lstrip("+")) in SPREAD and len(row["seeds"]) > 1:
        text += f" ± {format(factor * row['std'], plain)}"
    if "p" not in row:
        return text
    chance, corrected = (NONE if row[key] is None else f"{row[key]:.2g}" for key in ("p", "holm"))
    return f"{text} (p {chance}, Holm {corrected}, {row['agree']} of {len(row['values'])})"


def winner(rows: Sequence[Row]) -> str:
    """Name the method with the best mean, and those that do not differ from it significantly."""
    # `mse` of `test-mse-at-best-val`
    metric = rows[0].get("metric", "").removeprefix("test-").removesuffix("-at-best-val")
    best = max(rows, key=lambda row: merit(metric, row["mean"]))
    others = [row for row in rows if row is not best]
    ours, *theirs = [dict(zip(r["seeds"], r["values"], strict=True)) for r in (best, *others)]
    chances = [
        result.paired([*result.differences(ours, one).values()] or [0.0])["p"] for one in theirs
    ]
    near = [
        row["method"] + cut_off([row])
        for row, p in zip(others, result.holm(chances), strict=True)
        if p is None or p >= result.MOST_CHANCE
    ]
    beside = f" (not apart: {', '.join(near)})" if near else ""
    return str(best["method"]) + cut_off([best]) + beside


def marks(rows: Collection[Row]) -> str:
    """Return remarks behind a method's name about how its rows were run."""
    seeds = sorted({seed for row in rows for seed in row.get("best_last", ())})
    last = f", best in the last round with seed {', '.join(map(str, seeds))}" if seeds else ""
    left_out = max((row.get("left_out", 0) for row in rows), default=0)
    return cut_off(rows) + last + (f", at most {left_out} left out" if left_out else "")


def cut_off(rows: Collection[Row]) -> str:
    """Name the number of rounds if some run had not stopped improving."""
    rounds = [row["limit"] for row in rows if row.get("ended") is False]
    return f", {max(rounds)} rounds" if rounds else ""


def markdown(frame: pd.DataFrame) -> str:
    """Write a frame as a Markdown table; what is missing is a dash."""
    rows = frame.astype(object).fillna(NONE).values.tolist()
    lines = [[*frame.columns], ["---"] * len(frame.columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def choices_page(lines: Sequence[t.Line], store: Store) -> str | None:
    """Write the page about how settings were chosen, each tried setting once; None: none were."""
    rows, metrics = dict[str, dict[str, str]](), dict[str, None]()
    for line in lines:
        taken = store.chosen(line)
        for choice, runs in tried(line).items():
            curves = {run.seed: found for run in runs if (found := store.get(run))}
            if not curves or runs[0].key in rows:
                continue
            metric = next(iter(curves.values())).metric
            metrics[metric] = None
            row = result.describe([one.best("val") for one in curves.values()]) | {
                "seeds": [*curves]
            }
            only = [one for one in choice if any(one not in c for c in line.choices)]
            end = to_the_end(line, curves, runs[0].overrides)
            rows[runs[0].key] = {
                "row": line.words,
                "settings": (" ".join(only) or "as it ships").join(["**" * (choice == taken)] * 2),
                "best validation": written(t.Figure(f"best-val-{metric}"), row),
                "seeds": ", ".join(map(str, curves)),
                "rounds": ", ".join(map(str, end["rounds"])),
                "ended": "yes" if end["ended"] else "no",
            }
    if not rows:
        return None
    counts = {line.method: len(line.choices) for line in lines if len(line.choices) > 1}
    more = [f"{method} {count}" for method, count in counts.items() if count > min(counts.values())]
    unequal = UNEQUAL.format(more=", ".join(more), few=min(counts.values())) if more else ""
    text = CHOICES.format(metric=" or ".join(metrics)) + unequal
    return f"{text}\n{markdown(pd.DataFrame([*rows.values()]))}\n"


# Pictures ----------------------------------------------------------------------------------------


def draw(out: Path, paper: t.Paper, store: Store) -> list[str]:
    """Draw pictures, and return the names of those for which there was anything."""
    names = []
    for picture in paper.pictures:
        shown = {
            line: list(store.runs(line).values())
            for line in paper.lines
            if line.table in picture.tables
            and line.method in (picture.tables[line.table] or [line.method])
            and line.data in (picture.data or [line.data])
        }
        kind = t.function(picture.draw) if picture.draw else curves
        if kind(out / picture.file, {line: runs for line, runs in shown.items() if runs}):
            names.append(picture.file)
    return names


def curves(path: Path, shown: Mapping[t.Line, Sequence[Curves]]) -> bool:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    accuracy, loss = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    levels: dict[str, dict[str, float]] = {}
    for line, runs in shown.items():
        if line.trained:
            levels[line.data] = {"centralised": fmean(run.best("test", ACCURACY) for run in runs)}
        else:
            tested = [run.scores[ACCURACY]["test"] for run in runs]
            accuracy.setdefault(line.data, {})[line.method] = tested
            loss.setdefault(line.data, {})[line.method] = [run.loss for run in runs]
    upper = [
        plots.Panel(rows, "test accuracy", title=data, levels=levels.get(data, {}))
        for data, rows in accuracy.items()
    ]
    lower = [plots.Panel(rows, "loss") for rows in loss.values()]
    return plots.plot_panels(path, [upper, lower])
