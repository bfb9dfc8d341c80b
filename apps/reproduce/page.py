"""Rows of a paper's tables with the paper's figures; ``table.md``, ``choices.md``, pictures."""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from flower_graph.apps.parallel import loaded, worker_pool
from flower_graph.apps.reproduce.runs import AXES, Curves, Run, Store, tried
from flower_graph.apps.reproduce.table import (
    END,
    LAST,
    TEST,
    VALIDATION,
    WITHIN,
    Figure,
    Line,
    Paper,
    Settings,
    function,
)
from flower_graph.errors import ConfigError
from flower_graph.privacy.accountant import spent as spent_privacy
from flower_graph.records.rounds import merit
from flower_graph.report import plots
from flower_graph.report.significance import (
    MOST_CHANCE,
    correct,
    describe,
    differences,
    holm,
    paired,
)
from flower_graph.storage.reading import Tree
from flower_graph.wire.keys import SCORES, VALUE_SCORES

PATIENCE = 50  # rounds without improvement, where a config has none of its own
BEST = "best-val-"  # begins the name of a figure, which ends with its metric
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

Row = Tree
Results = dict[Line, list[Row]]


def make_rows(lines: Sequence[Line], store: Store) -> Results:
    """Make the rows of all runs that were done, with p values corrected (Holm)."""
    results: Results = {}
    for line in lines:
        if store.runs(line):
            made = [_row_of(line, figure, lines, store) for figure in line.wanted]
            results[line] = [row for row in made if row]
    correct(all_rows(results))
    return results


def all_rows(results: Results) -> list[Row]:
    """List the rows of all lines."""
    return [row for rows in results.values() for row in rows]


def _row_of(line: Line, figure: Figure, lines: Sequence[Line], store: Store) -> Row | None:
    """Make a row of one figure; None where no run has it."""
    values, paper = _values_of(line, figure, store), line.paper.get(figure.label)
    if figure.over:
        place = (line.table, line.names[0], line.keys, figure.over)
        others = [o for o in lines if (o.table, o.names[0], o.keys, o.method) == place]
        if not others:
            return None
        other = min(others, key=lambda other: other.model != line.model)
        values = differences(values, _values_of(other, figure, store))
        ours, theirs = line.paper.get(TEST), other.paper.get(TEST)
        if figure.of == TEST and paper is None and ours is not None and theirs is not None:
            paper = ours - theirs
    if not any(map(math.isfinite, values.values())):
        return None
    made = _row(line, figure.name, values, store.settings(line), store.runs(line))
    tested = paired([*values.values()]) if figure.over else {}
    more = line.also.get(figure.name, {})
    return {**made, "paper": paper, **line.keys, **figure.keys, **more, **tested}


def _values_of(line: Line, figure: Figure, store: Store) -> dict[int, float]:
    """Return a figure of a line's runs by seed, where they have it."""
    keys, config = {**line.keys, **figure.keys}, loaded(line.config, store.settings(line))
    name, runs = figure.of or figure.name, store.runs(line)
    values = {seed: value_of(name, curves, keys, config) for seed, curves in runs.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def _row(
    line: Line,
    metric: str,
    values: Mapping[int, float],
    settings: Settings,
    runs: Mapping[int, Curves],
) -> Row:
    """Make one row; every paper's table has this form."""
    return {
        "table": line.table,
        **dict(zip(("data", "model", "method"), line.names, strict=True)),
        "metric": metric,
        "paper": line.paper.get(metric),
        **describe([*values.values()]),
        "seeds": [*values],
        "settings": {
            "config": line.config,
            "overrides": [*settings],
            "rounds": line.rounds or loaded(line.config, (*settings,)).rounds,
            "centralised": bool(line.trained),
        },
        **to_the_end(line, {seed: runs[seed] for seed in values if seed in runs}, (*settings,)),
    }


def to_the_end(line: Line, runs: Mapping[int, Curves], settings: tuple[str, ...]) -> Row:
    """Return the rounds that were run, whether all runs ended, and how many were left out."""
    curves = [*runs.values()]
    if not curves or (line.trained and all(math.isnan(one.cross_entropy[0]) for one in curves)):
        return {}  # measured, or nothing is trained
    config = loaded(line.config, settings)
    patience, most = config.patience, line.rounds or config.rounds
    still = [seed for seed, each in runs.items() if not each.ended(patience or PATIENCE)]
    # Of what patience ended, the round that was on its way may be the best by a little.
    ended = all(patience and len(runs[seed].val_accuracy) < most for seed in still)
    more = {"left_out": max(one.left_out for one in curves), "best_last": still if ended else []}
    summary = {"rounds": [len(each.val_accuracy) for each in curves], "ended": ended}
    return summary | {key: value for key, value in more.items() if value}


def choices(lines: Sequence[Line], store: Store) -> list[Row]:
    """List the settings that were tried for the lines, each once, with its validation."""
    rows: dict[str, Row] = {}
    for line in lines:
        taken = store.chosen(line)
        for choice, runs in tried(line).items():
            curves = {run.seed: found for run in runs if (found := store.get(run))}
            if curves and runs[0].key not in rows:
                metric = next(iter(curves.values())).metric
                best = {seed: found.best_val for seed, found in curves.items()}
                made = _row(line, BEST + metric, best, runs[0].overrides, curves) | {"paper": None}
                only = [one for one in choice if any(one not in c for c in line.choices)]
                made |= {**line.keys, "where": line.words, "tried": only}
                rows[runs[0].key] = made | {"taken": choice == taken}
    return [*rows.values()]


def measured_rows(lines: Sequence[Line]) -> Results:
    """Make the rows that are measured directly, while nothing else is running."""
    results: Results = {}
    for line in [line for line in lines if line.measure]:
        run = Run(line.config, (*line.settings,), line.seeds[0], line.rounds)
        with worker_pool(1) as pool:
            groups = pool.submit(function(line.measure), run.settings).result()
        results[line] = [
            _row(line, metric, {run.seed: value}, line.settings, {})
            | {**line.keys, **keys, **line.also.get(metric, {})}
            for keys, figures in groups
            for metric, value in figures.items()
        ]
    return results


def missing_runs(lines: Sequence[Line], store: Store) -> list[str]:
    """List the lines that lack runs of some seeds."""
    found = {
        line.words: f"{line.words}: {done} of {len(line.seeds)} runs"
        for line in lines
        if not line.measure and (done := len(store.runs(line))) < len(line.seeds)
    }
    return [*found.values()]


# The figures of a run ----------------------------------------------------------------------------


STRUCTURE = ("precision", "recall", "homophily", "degree", "true-homophily", "true-degree")
ALIGNED = ("precision-1", "precision-5", "precision-10")
BUDGET = ("epsilon-of-a-round", "noise-multiplier")
MICRO_F1 = ("micro-f1", "sum-of-micro-f1")
# How a figure is written: heading if another than the name, format, and whether its deviation
# stands behind
SHARE = ("", ".3f", True)
FORMS = {
    **dict.fromkeys((*STRUCTURE, *ALIGNED, *MICRO_F1, WITHIN, "val-accuracy-last"), SHARE),
    TEST: ("test", ".3f", True),
    LAST: ("last", ".3f", True),
    VALIDATION: ("best validation", ".3f", True),
    **{f"test-{one}-at-best-val": (one.upper(), ".3f", True) for one in SCORES[1:]},
    **{f"{BEST}{one}": SHARE for one in SCORES[1:]},
    **{f"test-{one}-at-best-val": (one.upper(), ".2f", True) for one in VALUE_SCORES},
    **{f"{BEST}{one}": ("best validation", ".2f", True) for one in VALUE_SCORES},
    **dict.fromkeys(("degree", "true-degree"), ("", ".1f", True)),
    "rounds": ("", ".0f", False),
    "steps-a-client": ("steps", ".0f", False),
    "MiB-a-client": ("MiB up", ",.3f", False),
    "uplink-mib": ("MiB of all users", ",.2f", False),
    "seconds-per-round": ("s a round", ".3g", False),
    "run-seconds": ("s a run", ".1f", False),
    BUDGET[0]: ("epsilon of a round", ",.4g", False),
    BUDGET[1]: ("noise / sensitivity", ".3g", False),
    # What is measured in the place of runs
    "peak-mib": ("memory, MiB", ",.4g", False),
    **dict.fromkeys(("nodes", "edges"), ("", ".1f", False)),
}


def value_of(name: str, run: Curves, keys: Tree, config: Any) -> float | None:
    """Return a figure of a run, by the keys of its row and the run's config; None: it has none."""
    if name not in FORMS:
        raise ConfigError(f"figure: {name!r} is not one of {', '.join(FORMS)}")
    if name.endswith("-at-best-val"):
        return run.score(name.removeprefix("test-").removesuffix("-at-best-val"), "test")
    if name.startswith(BEST):
        return run.score(name.removeprefix(BEST), "val")
    if name == WITHIN:
        return _within(run, keys["within"])
    if name in BUDGET:
        return float(str(spent_privacy(config.privacy, config.rounds)[name]))
    if name in MICRO_F1 and "classifier" in keys:
        clients = config.partition.clients
        values = run.judged.get(keys["classifier"], {}).get("test", [])
        if len(values) != clients:
            return None
        mean = values[keys["client"] - 1] if "client" in keys else fmean(values)
        return mean * clients if name == "sum-of-micro-f1" else mean
    if name in (*MICRO_F1, *ALIGNED):
        # The value of an iteration, or the last value if the run ended before
        curve = {"micro-f1": run.test_accuracy, **run.alignment}.get(name, [])
        index = min(keys.get("iteration", 0), len(curve)) - 1
        return curve[index] if curve else math.nan
    spent = {"steps-a-client": run.spent("steps"), "MiB-a-client": run.spent("MiB")}
    whole = {
        "rounds": len(run.test_accuracy),
        LAST: run.test_accuracy[-1],
        "val-accuracy-last": run.val_accuracy[-1],
        "seconds-per-round": run.seconds_per_round,
        "run-seconds": run.run_seconds,
        "uplink-mib": sum(run.bytes_up.values()) / 2**20,
        **{key: amounts[-1] for key, amounts in spent.items() if amounts},
        **run.structure,
    }
    return whole.get(name)


def _within(run: Curves, budget: str) -> float | None:
    """Return the test accuracy at the best validation within a budget, such as ``100 rounds``."""
    if budget == END:
        return run.test_at_best_val
    number, _, axis = budget.partition(" ")
    if axis not in AXES or not number.replace(".", "", 1).isdigit():
        raise ConfigError(f"within: {budget!r}; write NUMBER and one of {', '.join(AXES)}")
    reached = bisect_right(run.spent(axis), float(number))
    return run.best_so_far[reached - 1] if reached else None


# The page ----------------------------------------------------------------------------------------


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
    parts = [f"# {paper.title}", *notes, how]
    several = len({line.names[0] for line in lines}) > 1
    places: dict[tuple[str, str], Results] = {}
    for line in lines:
        if rows := results.get(line):
            places.setdefault((line.table, line.names[0]), {})[line] = rows
    for (table, data), of_place in places.items():
        parts.append(f"## {table}, {data}" if several else f"## {table}")
        # One table of plain figures, and one for each kind of keys
        kinds: dict[str, dict[str, Figure]] = {}
        for figure in [figure for line in of_place for figure in line.wanted]:
            kinds.setdefault(next(iter(figure.keys), ""), {}).setdefault(figure.label, figure)
        for kind, figures in kinds.items():
            if text := _table(of_place, [*figures.values()], paper.scale):
                parts += [BUDGETS, text] if kind == "within" else [text]
    if pictures:
        drawn = ", ".join(f"`{name}`" for name in pictures)
        parts += ["## Pictures", f"`flower-graph reproduce` draws {drawn}."]
    if missing:
        parts += ["## Not run", "\n".join(f"- {reason}" for reason in missing)]
    return "\n\n".join(parts) + "\n"


def _table(results: Results, figures: Sequence[Figure], scale: int) -> str:
    """Write a table with a row for each line, or for each group that was measured of it."""
    keys = [*(key for line in results for key in line.keys), "group", "clients"]
    labels = [name for one in map(_heading, figures) for name in (one, PAPERS + one)]
    columns = ["method", "model", *keys, *labels, MEMORY, "settings", "n"]
    records = []
    for line, rows in results.items():
        for group in dict.fromkeys(row.get("group") for row in rows):
            here, cells = [row for row in rows if row.get("group") == group], {}
            for figure in figures:
                for row in [row for row in _of(figure, here) if isfinite(row["mean"])]:
                    cells[_heading(figure)] = written(figure, row, scale)
                    if row["paper"] is not None:
                        factor, spec, _ = _form(figure, scale)
                        # A paper prints one digit more than a share of the nodes needs
                        text = format(factor * row["paper"], ".4f" if spec == ".3f" else spec)
                        text += f" ± {row['paper-std']:.4f}" if "paper-std" in row else ""
                        cells[PAPERS + _heading(figure)] = text
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
    if not records:
        return ""
    if any(one.name == WITHIN for one in figures):
        best = {_heading(one): winner(_of(one, all_rows(results))) for one in figures}
        records.append({"method": "*Best*", **best})
    frame = pd.DataFrame(records, columns=[*dict.fromkeys(columns)])
    frame = frame.replace("", None).dropna(axis=1, how="all")
    return markdown(frame if frame["model"].nunique() > 1 else frame.drop(columns="model"))


def _of(figure: Figure, rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["metric"] == figure.name and figure.keys.items() <= r.items()]


PAPERS, MEMORY = "paper's ", "paper, % of GPU memory"


def _heading(figure: Figure) -> str:
    if figure.name == WITHIN:
        return str(figure.keys["within"])
    name = FORMS.get(figure.name, SHARE)[0] or figure.name.replace("-", " ")
    return ", ".join([name, *map(str, figure.keys.values())])


def _form(figure: Figure, scale: int) -> tuple[float, str, bool]:
    """Return factor, format, and whether a deviation stands behind."""
    # Accuracies are shares or, at scale 100, percent; differences of them are points
    if figure.over:
        is_value = any(one in figure.of for one in VALUE_SCORES)
        return (1, "+.2f", True) if is_value else (100, "+.1f", True)
    _, spec, spread = FORMS.get(figure.name, SHARE)
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


def cut_off(rows: Collection[Row]) -> str:
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


class Shown(NamedTuple):
    """The runs and the rows of one line, as functions of pictures take them."""

    line: Line
    runs: dict[int, Curves]
    rows: list[Row]


Drawing = Sequence[Shown]
Options = Mapping[str, Any]  # of a ``Picture``


def draw(out: Path, paper: Paper, results: Results, store: Store) -> list[str]:
    """Draw pictures, and return the names of those for which there was anything."""
    names = []
    present = dict.fromkeys(line.data for line in paper.lines)
    for picture in paper.pictures:
        kind = KINDS.get(picture.kind) or function(picture.kind)
        data = [name for name in picture.data or present if name in present]
        for of_file in [[one] for one in data] if "{data}" in picture.file else [data]:
            shown = []
            for name, (table, methods) in product(of_file, picture.tables.items()):
                here = [line for line in results if (line.table, line.data) == (table, name)]
                for method in methods or dict.fromkeys(line.method for line in here):
                    chosen = [line for line in here if line.method == method]
                    shown += [Shown(line, store.runs(line), results[line]) for line in chosen]
            file = picture.file.replace("{data}", "".join(of_file[:1]).lower())
            if kind(out / file, shown, picture.options):
                names.append(file)
    return names


def curves(path: Path, shown: Drawing, _: Options) -> bool:
    """Draw accuracy and loss by round, a panel for each data set, a curve for each method."""
    accuracy, loss = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    levels: dict[str, dict[str, float]] = {}
    for line, by_seed, _rows in shown:
        (data, _model, method), runs = line.names, [*by_seed.values()]
        if runs and line.trained:
            levels[data] = {"centralised": fmean(run.test_at_best_val for run in runs)}
        elif runs:
            accuracy.setdefault(data, {})[method] = [run.test_accuracy for run in runs]
            loss.setdefault(data, {})[method] = [run.cross_entropy for run in runs]
    upper = [
        plots.over_rounds("test accuracy", rows, title=data, levels=levels.get(data, {}))
        for data, rows in accuracy.items()
    ]
    lower = [plots.over_rounds("loss", rows) for rows in loss.values()]
    return plots.plot_panels(path, [upper, lower])


def matrices(path: Path, shown: Drawing, options: Options) -> bool:
    """Draw a matrix of figures by two settings, a panel for each metric, all on one scale."""
    y, x = options["axes"]
    rows = [row for one in shown for row in one.rows if row["metric"] in options["metrics"]]
    if not rows:
        return False
    means = pd.DataFrame(rows).pivot(index=["metric", y], columns=x, values="mean")
    metrics, sides = means.index.levels
    names = {metric: name for metric, name in options["metrics"].items() if metric in metrics}
    panels = {name: means.loc[metric].reindex(sides) for metric, name in names.items()}
    return plots.plot_matrices(path, panels, label=options["label"])


KINDS: dict[str, Callable[..., bool]] = {"curves": curves, "matrices": matrices}
