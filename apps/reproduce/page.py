"""``table.md`` and ``choices.md``: the rows of a paper's tables for reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import NamedTuple

import pandas as pd

from flower_graph.apps.parallel import loaded
from flower_graph.apps.reproduce.rows import BEST, Row, as_figure
from flower_graph.apps.reproduce.table import LAST, TEST, VALIDATION, WITHIN, Figure, Line, Paper
from flower_graph.records.rounds import merit
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


class Form(NamedTuple):
    """How a figure is written: heading, factor, format, and whether its deviation stands behind."""

    label: str
    scale: float
    spec: str
    spread: bool = True


FORMS = {
    TEST: Form("test", 1, ".3f"),
    LAST: Form("last", 1, ".3f"),
    VALIDATION: Form("best validation", 1, ".3f"),
    "rounds": Form("rounds", 1, ".0f", spread=False),
    "steps-a-client": Form("steps", 1, ".0f", spread=False),
    "MiB-a-client": Form("MiB up", 1, ",.3f", spread=False),
    "uplink-mib": Form("MiB of all users", 1, ",.2f", spread=False),
    "seconds-per-round": Form("s a round", 1, ".3g", spread=False),
    "run-seconds": Form("s a run", 1, ".1f", spread=False),
    "peak-mib": Form("memory, MiB", 1, ",.4g", spread=False),
    **{name: Form(name, 1, ".1f", spread=False) for name in ("nodes", "edges")},
    **{name: Form(name.replace("-", " "), 1, ".1f") for name in ("degree", "true-degree")},
    "epsilon-of-a-round": Form("epsilon of a round", 1, ",.4g", spread=False),
    "noise-multiplier": Form("noise / sensitivity", 1, ".3g", spread=False),
    **{f"test-{one}-at-best-val": Form(one.upper(), 1, ".3f") for one in SCORES[1:]},
    **{f"test-{one}-at-best-val": Form(one.upper(), 1, ".2f") for one in VALUE_SCORES},
    **{f"{BEST}{one}": Form("best validation", 1, ".2f") for one in VALUE_SCORES},
}


def form_of(figure: Figure, scale: float) -> Form:
    """Return how a figure is written; accuracies are shares or, at scale 100, percent."""
    if figure.over and any(one in figure.of for one in VALUE_SCORES):
        return Form(figure.name.replace("-", " "), 1, "+.2f")
    if figure.over:
        return Form(figure.name.replace("-", " "), 100, "+.1f")
    form = FORMS.get(figure.name, Form(figure.name.replace("-", " "), 1, ".3f"))
    in_percent = scale > 1 and form.spec == ".3f" and "precision" not in figure.name
    return form._replace(scale=scale, spec=".1f") if in_percent else form


def make_page(
    paper: Paper,
    lines: Sequence[Line],
    rows: Sequence[Row],
    missing: Sequence[str] = (),
    pictures: Sequence[str] = (),
) -> str:
    """Write the whole page; a table without rows is not on it."""
    how = HOW.format(choices=" ([choices.md](choices.md))" * any(line.has_choice for line in lines))
    parts = [f"# {paper.title}", *filter(None, [paper.notes.strip()]), how]
    parts += settings_shown(paper, lines)
    several = len({line.names[0] for line in lines}) > 1
    for table, data in dict.fromkeys((line.table, line.names[0]) for line in lines):
        here = [line for line in lines if (line.table, line.names[0]) == (table, data)]
        of_rows = [row for row in rows if (row["table"], row["data"]) == (table, data)]
        if of_rows:
            parts.append(f"## {table}, {data}" if several else f"## {table}")
            parts += _section(here, of_rows, paper.scale)
    if pictures:
        drawn = ", ".join(f"`{name}`" for name in pictures)
        parts += ["## Pictures", f"`flower-graph reproduce` draws {drawn}."]
    if missing:
        parts += ["## Not run", "\n".join(f"- {reason}" for reason in missing)]
    return "\n\n".join(parts) + "\n"


def settings_shown(paper: Paper, lines: Sequence[Line]) -> list[str]:
    """Write a table of settings for each model, as the configs have them now."""
    parts = []
    for model, names in paper.settings.items():
        of_model = [line for line in lines if line.model == model and not line.trained]
        found = []
        for data, config in dict.fromkeys((line.data, line.config) for line in of_model):
            value: object = loaded(config)
            found.append([data, f"`{config}`", *(_setting(value, name) for name in names)])
        if found:
            parts.append(markdown(pd.DataFrame(found, columns=["data", "config", *names])))
    return parts


def _setting(value: object, name: str) -> str:
    for part in name.split("."):
        value = getattr(value, part)
    values = value if isinstance(value, list) else [value]
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)


# Tables ------------------------------------------------------------------------------------------


def _section(lines: Sequence[Line], rows: Sequence[Row], scale: float) -> list[str]:
    """Write the tables of one data set: of plain figures, and one for each kind of their keys."""
    figures = [as_figure(figure) for line in lines for figure in line.figures]
    names = {figure.name for figure in figures}
    figures += [Figure(r["metric"]) for r in rows if r["metric"] not in names]  # measured
    kinds: dict[str, dict[tuple[str, str], Figure]] = {}
    for figure in figures:
        kind = next(iter(figure.keys), "")
        kinds.setdefault(kind, {}).setdefault((figure.name, str(figure.keys)), figure)
    tables = {kind: _table(lines, [*some.values()], rows, scale) for kind, some in kinds.items()}
    return [
        part
        for kind, table in tables.items()
        for part in ([BUDGETS] if kind == "within" and table else []) + table
    ]


def _table(
    lines: Sequence[Line], figures: Sequence[Figure], rows: Sequence[Row], scale: float
) -> list[str]:
    """Write a table with a row for each line, or for each group that was measured of it."""
    records, columns = list[dict[str, str]](), list[str]()
    for line in lines:
        of_line = _of(rows, {**dict(zip(PLACE, line.names, strict=True)), **line.keys})
        for group in dict.fromkeys(r.get("group") for r in of_line):
            here = [r for r in of_line if r.get("group") == group]
            cells = _cells(figures, here, scale)
            if cells:
                about = {**line.keys, **{key: here[0][key] for key in GROUP if key in here[0]}}
                about = {"method": line.names[2] + marks(here), "model": line.model, **about}
                tried = [s[s.rfind(".", 0, s.find("=")) + 1 :] for s in _chosen(line, here[0])]
                end = {"settings": " ".join(tried), "n": str(len(here[0]["seeds"]))}
                records.append({**about, **cells, **(end if not line.measure else {})})
                columns = [*dict.fromkeys([*columns, *about])]
    labels = [label for one in figures for label in (label_of(one), _paper_label(one))]
    if any(figure.name == WITHIN for figure in figures) and records:
        best = {label_of(one): winner(_of(rows, {"metric": WITHIN, **one.keys})) for one in figures}
        records.append({"method": "*Best*", **best})
    others = [name for record in records for name in record]
    order = [*dict.fromkeys([*columns, *(name for name in labels if name in others), *others])]
    order = [*(one for one in order if one not in END), *(one for one in END if one in others)]
    frame = pd.DataFrame(records, columns=order).replace("", None).dropna(axis=1, how="all")
    if frame.get("model", pd.Series()).nunique() < 2:
        frame = frame.drop(columns="model", errors="ignore")
    return [markdown(frame)] if len(frame) else []


PLACE, GROUP, END = ("data", "model", "method"), ("group", "clients"), ("settings", "n")


def _of(rows: Sequence[Row], wanted: Mapping[str, object]) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _chosen(line: Line, row: Row) -> list[str]:
    """Return what was chosen for a line whose method may try several settings."""
    laid: list[str] = row["settings"]["overrides"][len(line.settings) :]
    return laid if line.has_choice else []


def label_of(figure: Figure) -> str:
    """Return the heading of a figure's column."""
    if figure.name == WITHIN:
        return str(figure.keys["within"])
    return ", ".join([form_of(figure, 1).label, *map(str, figure.keys.values())])


def _paper_label(figure: Figure) -> str:
    return f"paper's {label_of(figure)}"


def _cells(figures: Sequence[Figure], rows: Sequence[Row], scale: float) -> dict[str, str]:
    """Write the figures of one line, and the paper's beside."""
    cells = {}
    for figure in figures:
        form = form_of(figure, scale)
        for row in _of(rows, {"metric": figure.name, **figure.keys})[:1]:
            if isfinite(row["mean"]) and not (figure.keys == {} and {*row} & {*KEYED}):
                cells[label_of(figure)] = written(row, form)
                if row["paper"] is not None:
                    cells[_paper_label(figure)] = _of_paper(row, form)
                if row.get("paper-gpu-memory-percent"):
                    cells["paper, % of GPU memory"] = f"{row['paper-gpu-memory-percent']:.2f}"
    return cells


KEYED = ("within", "iteration", "classifier")


def written(row: Row, form: Form) -> str:
    """Write a row's mean, with the deviation where there are several seeds, and the test."""
    text = format(form.scale * row["mean"], form.spec)
    if form.spread and len(row["seeds"]) > 1:
        text += f" ± {format(form.scale * row['std'], form.spec.lstrip('+'))}"
    if "p" not in row:
        return text
    chance, corrected = (NONE if row[key] is None else f"{row[key]:.2g}" for key in ("p", "holm"))
    return f"{text} (p {chance}, Holm {corrected}, {row['agree']} of {len(row['values'])})"


def _of_paper(row: Row, form: Form) -> str:
    # A paper prints one digit more than a share of the nodes needs
    spec = ".4f" if form.spec == ".3f" else form.spec
    text = format(form.scale * row["paper"], spec)
    return text + (f" ± {row['paper-std']:.4f}" if "paper-std" in row else "")


def winner(rows: Sequence[Row]) -> str:
    """Name the method with the best mean, and those that do not differ from it significantly."""
    best = max(rows, key=lambda row: merit(measure_of(row), row["mean"]), default=None)
    if best is None:
        return NONE
    others = [row for row in rows if row is not best]
    near = [
        row["method"] + cut_off([row])
        for row, p in zip(others, holm([_chance(best, row) for row in others]), strict=True)
        if p is None or p >= MOST_CHANCE
    ]
    beside = f" (not apart: {', '.join(near)})" if near else ""
    return str(best["method"]) + cut_off([best]) + beside


def _chance(best: Row, other: Row) -> float | None:
    """Return the p value of the difference of two rows, paired by seed."""
    ours, theirs = (dict(zip(r["seeds"], r["values"], strict=True)) for r in (best, other))
    chance: float | None = paired([*differences(ours, theirs).values()] or [0.0])["p"]
    return chance


def measure_of(row: Row) -> str:
    """Return the metric that a row is a figure of: `mse` of `test-mse-at-best-val`."""
    return str(row.get("metric", "")).removeprefix("test-").removesuffix("-at-best-val")


def marks(rows: Sequence[Row]) -> str:
    """Return remarks behind a method's name about how its rows were run."""
    seeds = sorted({seed for row in rows for seed in row.get("best_last", ())})
    last = f", best in the last round with seed {', '.join(map(str, seeds))}" if seeds else ""
    left_out = max((row.get("left_out", 0) for row in rows), default=0)
    return cut_off(rows) + last + (f", at most {left_out} left out" if left_out else "")


def cut_off(rows: Sequence[Row]) -> str:
    """Name the number of rounds if some run had not stopped improving."""
    rounds = [row["settings"]["rounds"] for row in rows if row.get("ended") is False]
    return f", {max(rounds)} rounds" if rounds else ""


def markdown(frame: pd.DataFrame) -> str:
    """Write a frame as a Markdown table; what is missing is a dash."""
    lines = [[*frame.columns], ["---"] * len(frame.columns), *frame.fillna(NONE).values.tolist()]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def choices_page(choices: Sequence[Row], lines: Sequence[Line]) -> str:
    """Write the page about how settings were chosen."""
    frame = pd.DataFrame(
        {
            "row": row["where"],
            "settings": f"{'**' * row['taken']}{' '.join(row['tried']) or 'as it ships'}"
            + "**" * row["taken"],
            "best validation": written(row, form_of(Figure(row["metric"]), 1)),
            "seeds": ", ".join(map(str, row["seeds"])),
            "rounds": ", ".join(map(str, row["rounds"])),
            "ended": "yes" if row["ended"] else "no",
        }
        for row in choices
    )
    metrics = dict.fromkeys(row["metric"].removeprefix(BEST) for row in choices)
    tried = {line.method: len(line.choices) for line in lines if line.has_choice}
    few = min(tried.values())
    more = [f"{method} {count}" for method, count in tried.items() if count > few]
    unequal = (
        f"Not all choose among equally many: {', '.join(more)}, the others {few}. Among more "
        "settings the best validation is higher by chance alone.\n\n"
    )
    text = CHOICES.format(metric=" or ".join(metrics))
    return f"{text}\n{unequal if more else ''}{markdown(frame)}\n"
