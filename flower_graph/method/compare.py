"""Runs beside each other: their differences, paired by seed, as text, CSV, JSON and a picture."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from flower_graph.config.common import LINKS
from flower_graph.config.foreign import METRICS, RESULT
from flower_graph.config.rules import refuse_key
from flower_graph.config.schema import flatten
from flower_graph.errors import OutputError, one_line
from flower_graph.method.run import Run
from flower_graph.outputs.files import as_text
from flower_graph.records.rounds import WAYS, format_bytes, merit
from flower_graph.report import result as results
from flower_graph.storage.files import plain
from flower_graph.storage.reading import Tree, reading
from flower_graph.wire.keys import VALUE_SCORES

if TYPE_CHECKING:
    from flower_graph.report.plots import Interval

ROUNDS, SECONDS = "rounds-run", "seconds"  # `rounds` is a setting
COSTS = (*WAYS, ROUNDS, SECONDS)  # of all clients: payload up and down
SIDE_BY_SIDE = 3  # most runs that get a column each; more get a line each
MOST_SETTINGS = 8  # that have a column each, unless all are asked for
NONE = "–"
DEPTH = 4  # of folders in which runs are looked for
# Settings that have a column of their own, or make no difference
OTHER = ("app", "seed", "device", "data.root", "track")


def compare(*runs: Run | Path | str, by: str | None = None) -> Comparison:
    """Compare runs, of one app or of several.

    Parameters
    ----------
    *runs : Run, Path or str
        Runs, or folders that contain runs. Runs in one folder whose settings differ by the seed
        alone are one row; so are the seeds of one run.
    by : str, optional
        Order of the rows: ``test`` or ``val`` (of the metric that decides the best round; the best
        first), another figure such as ``seconds``, ``run``, ``app``, or a setting such as
        ``model.hidden``. Default: as named; those of one folder by ``val``.

    Returns
    -------
    Comparison
        A row for each run. The reference is the first one named, or the best by validation of the
        first folder.

    Raises
    ------
    OutputError
        If there is no such folder, or none of them has a finished run.
    ConfigError
        If rows have no such figure or setting to be sorted by.
    """
    rows, left_out = list[Tree](), list[str]()
    for one in runs:
        read = list(_rows(Path(one).expanduser(), left_out))
        rows += sorted(read, key=lambda row: _rank(row, "val"))
    if not rows:
        raise OutputError("; ".join(left_out) or "no run is named, so there is nothing to compare")
    names = Counter(row["run"] for row in rows)
    for row in rows:
        row["run"] = row["path"] if names[row["run"]] > 1 else row["run"]
    _test(rows)
    return Comparison(rows, left_out).sorted(by) if by else Comparison(rows, left_out)


# Reading ------------------------------------------------------------------------------------------


def _rows(path: Path, left_out: list[str]) -> Iterator[Tree]:
    """Read the runs of a folder; runs whose settings differ by the seed alone are one row."""
    if not path.is_dir():
        raise OutputError(f"{path}: no run; there is no such folder")
    groups = list[tuple[str, list[Path], dict[int, Tree]]]()
    for folder in (folders := [*_runs_in(path, DEPTH)]):
        seeds = dict[int, Tree]()
        for run in Run(folder).each:
            try:
                one = _read(run)
                seeds[one["seed"]] = one
            except OutputError as error:
                left_out.append(str(error))
        settings = _word([one["settings"], one["versions"]]) if seeds else ""
        # The same seed twice is two rows
        same = ((f, s) for word, f, s in groups if word == settings and not s.keys() & seeds.keys())
        if (group := next(same, None)) is not None:
            group[0].append(folder)
            group[1].update(seeds)
        elif seeds:
            groups.append((settings, [folder], seeds))
    if not folders:
        left_out.append(f"{path}: no run is in it")
    for _, (first, *more), seeds in groups:
        name = path.absolute().name if first == path else str(first.relative_to(path))
        yield _row(name + f" +{len(more)}" * bool(more), first, [seeds[k] for k in sorted(seeds)])


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    run = Run(folder)
    if run.each != [run] or any((folder / one).is_file() for one in (RESULT, METRICS)):
        yield folder
    elif depth:
        inner = (one for one in folder.iterdir() if one.is_dir() and one.name[:1] != ".")
        for one in sorted(inner):
            yield from _runs_in(one, depth - 1)


def _read(run: Run) -> Tree:
    """Return what is compared of the run of one seed."""
    result: Tree = run.result
    with reading(run.path / RESULT, OutputError, "not the result of a run"):
        config, metrics = result["config"], results.metrics_of(result["config"])
        given = {f"val-{metrics[0]}": result.get(f"best-val-{metrics[0]}")}
        for name in dict.fromkeys([*metrics, *results.metrics_shown(config)]):
            given[f"test-{name}"] = result.get(f"test-{name}-at-best-val")
        for way in WAYS:
            given[way] = sum(result.get("bytes", {}).get(way, {}).values())
        given |= {ROUNDS: result.get("rounds"), SECONDS: result.get("seconds", {}).get("total")}
        settings = {key: value for key, value in flatten(config) if key not in OTHER}
        digest = result.get("judged-on")
        # In a deployment nobody knows all nodes: what says how they are drawn must be the same
        deciding = ("links.",) * (settings.get("task") == LINKS)
        deciding += () if digest else ("data.", "partition.")
        drawn = {key: one for key, one in settings.items() if key.startswith(deciding)}
        return {
            "seed": int(result["seed"]),
            "app": str(config.get("app")),
            "version": str(result.get("versions", {}).get("flower-graph")),
            "versions": result.get("versions"),
            "metric": metrics[0],
            "settings": settings,
            "judged-on": _word([metrics[0], settings.get("data.name"), digest, drawn]),
            "figures": {key: or_nan(value) for key, value in given.items()},
            "baselines": results.tested(result),
        }


def or_nan(value: float | None) -> float:
    """Return NaN for a figure that a result does not have."""
    return math.nan if value is None else float(value)


def _row(name: str, path: Path, seeds: Sequence[Tree]) -> Tree:
    first, metric = seeds[0], seeds[0]["metric"]
    names = dict.fromkeys(key for one in seeds for key in one["figures"])
    figures = {
        key: results.describe([one["figures"].get(key, math.nan) for one in seeds]) for key in names
    }
    common = [key for key in first["baselines"] if all(key in one["baselines"] for one in seeds)]
    baselines = {key: fmean(one["baselines"][key] for one in seeds) for key in common}
    # Equal means over clients may differ in their last digits.
    own = merit(metric, figures[f"test-{metric}"]["mean"]) - 1e-9
    return {
        "run": name,
        "path": str(path),
        **{key: first[key] for key in ("app", "version", "metric", "settings")},
        "seeds": [one["seed"] for one in seeds],
        "is-reference": False,
        "judged-on": [one["judged-on"] for one in seeds],
        "figures": figures,
        "baselines": baselines,
        "beaten": [key for key, one in baselines.items() if own > merit(metric, one)],
    }


def _test(rows: Sequence[Tree]) -> None:
    """Add to each row but the first the difference from it, on seeds judged on the same nodes."""
    rows[0]["is-reference"] = True
    reference, found = _by_seed(rows[0]), list[Tree]()
    for row in rows[1:]:
        if apart := results.differences(_by_seed(row), reference):
            values, seeds = [*apart.values()], [seed for seed, _ in apart]
            row["difference"] = results.describe(values) | {"seeds": seeds} | results.paired(values)
            found.append(row["difference"])
    for one, chance in zip(found, results.holm([one["p"] for one in found]), strict=True):
        one["holm"] = chance


def _by_seed(row: Tree) -> dict[tuple[int, str], float]:
    """Return the known test metrics by seed and by the nodes that they are judged on."""
    values = row["figures"][f"test-{row['metric']}"]["values"]
    keys = zip(row["seeds"], row["judged-on"], strict=True)
    return {key: one for key, one in zip(keys, values, strict=True) if math.isfinite(one)}


# Showing ------------------------------------------------------------------------------------------


@dataclass(repr=False)
class Comparison:
    """Runs beside each other; ``print`` shows a table.

    Attributes
    ----------
    rows : list of dict
        For each run (all seeds of it) ``run``, ``path``, ``app``, ``version``, ``seeds``,
        ``settings`` by dotted key, ``figures`` of the best round by validation (``mean``, ``std``
        and ``values`` of each), ``metric`` (which decides that round), ``baselines``, ``beaten``
        and, but for the first row, ``difference``: test metric minus the first row's on the same
        seeds, with the p value of a paired t test, also corrected for the number of rows (Holm).
        It is missing where no seed of both is judged on the same nodes (``judged-on``).
    left_out : list of str
        Runs that are unfinished or cannot be read, and why.
    """

    rows: list[Tree]
    left_out: list[str]

    @property
    def differing(self) -> list[str]:
        given = dict[str, set[str]]()
        for row in self.rows:
            for key, value in row["settings"].items():
                given.setdefault(key, set()).add(_word(value))
        return [key for key, words in given.items() if len(words) > 1]

    @property
    def figures(self) -> list[str]:
        """Names of all figures: metrics, then what they cost."""
        names = dict.fromkeys(name for row in self.rows for name in row["figures"])
        return [*(name for name in names if name not in COSTS), *COSTS]

    def sorted(self, by: str) -> Comparison:
        """Return a copy with rows in another order."""
        known = ["test", "val", *self.figures, "run", "app", *self.differing]
        if by not in known:
            refuse_key(by, known, " (to sort by)")
        return Comparison(sorted(self.rows, key=lambda row: _rank(row, by)), self.left_out)

    def __repr__(self) -> str:
        return self.to_text()

    def table(self, *, all_settings: bool = False) -> Any:  # a data frame
        """Return what ``to_text`` shows: text, a line for each run."""
        frame, is_wide = self.to_pandas(), len(self.rows) > SIDE_BY_SIDE
        settings = self.differing[: MOST_SETTINGS if is_wide and not all_settings else None]
        for name in self.figures:
            frame[name] = [_shown(name, row["figures"].get(name)) for row in self.rows]
        shown = ["run", "app", "version", "seeds", *self.figures, "beaten", "difference", "p"]
        frame["p"] = [NONE if p is None else f"{p:.2g}" for p in frame["p (Holm)"]]
        frame["difference"] = [
            _shown(f"test-{row['metric']}", row.get("difference"), "+") for row in self.rows
        ]
        for key in settings:
            frame[key] = [setting_text(row["settings"].get(key, NONE)) for row in self.rows]
        # Files of others may hold characters that move a terminal's cursor
        frame = frame[[*shown, *settings]].map(one_line)
        return frame.loc[:, (frame != NONE).any()]

    def to_text(self, *, all_settings: bool = False) -> str:
        """Return the table as text, and what is to be known of it.

        Up to three runs have a column each. More have a line each, with at most eight of the
        settings that differ, unless all are asked for.
        """
        frame = self.table(all_settings=all_settings)
        is_wide = len(frame) > SIDE_BY_SIDE
        text = frame.to_string(index=False) if is_wide else frame.T.to_string(header=False)
        return "\n".join([text, *self.about()])

    def to_json(self) -> str:
        whole = {"differing": self.differing, "runs": self.rows, "left-out": self.left_out}
        return json.dumps(plain(whole), indent=2, allow_nan=False)

    def to_csv(self) -> str:
        frame = self.to_pandas().map(lambda one: as_text(one) if isinstance(one, str) else one)
        return str(frame.to_csv(index=False, lineterminator="\r\n"))

    def to_pandas(self) -> Any:  # a data frame
        import pandas as pd

        lines = []
        for row in self.rows:
            figures, difference = row["figures"], row.get("difference", {})
            lines.append(
                {key: row[key] for key in ("run", "path", "app", "version")}
                | {"seeds": " ".join(map(str, row["seeds"])), "beaten": _beaten(row)}
                | {key: row["settings"].get(key) for key in self.differing}
                | {name: figures.get(name, {}).get("mean") for name in self.figures}
                | {f"{name} std": figures.get(name, {}).get("std") for name in self.figures}
                | {"difference": difference.get("mean")}
                | {"p": difference.get("p"), "p (Holm)": difference.get("holm")}
            )
        return pd.DataFrame(lines, dtype=object)

    def save_picture(self, path: Path | str) -> None:
        from flower_graph.report.plots import plot_intervals

        if Path(path).suffix != ".png":
            raise OutputError(f"{path}: pictures are PNG files, whose names end in .png")
        if not plot_intervals(Path(path), self.intervals(), "test, at the best validation"):
            raise OutputError(f"{path}: no run has a test metric, so there is nothing to draw")

    def intervals(self) -> dict[str, dict[str, Interval]]:
        """Return the known test metrics by data set and metric, and by run."""
        from flower_graph.report.plots import Interval

        panels: dict[str, dict[str, Interval]] = {}
        for row in self.rows:
            one = row["figures"][f"test-{row['metric']}"]
            if math.isfinite(one["mean"]):
                name = f"{setting_text(row['settings'].get('data.name'))}, {row['metric']}"
                panels.setdefault(name, {})[row["run"]] = Interval(one["mean"], one["std"])
        return panels

    def about(self) -> list[str]:
        """Explain the differences; nothing of one run."""
        if len(self.rows) == 1:
            return []
        known = {key for row in self.rows for key in row["settings"]}
        reference = next(row["run"] for row in self.rows if row["is-reference"])
        found = [row["difference"] for row in self.rows if "difference" in row]
        is_error = any(row["metric"] in VALUE_SCORES for row in self.rows)
        count = sum(one["p"] is not None for one in found)
        others = len(self.rows) - 1 - len(found)
        is_cut = len(self.rows) > SIDE_BY_SIDE and len(self.differing) > MOST_SETTINGS
        shown = f" ({MOST_SETTINGS} have a column, with --all-settings all)" * is_cut
        lines = [
            "",
            f"{len(self.differing)} of {len(known)} settings differ{shown}",
            f"difference: test metric minus that of {reference} on the same seeds"
            + "; the less of an error, the better" * is_error,
            f"p: of a paired t test over the seeds, Holm's correction for {count}",
        ]
        none = f"no difference for {others}: no seed is judged on the same nodes as {reference}"
        return [*lines, none] if others else lines


def _rank(row: Tree, by: str) -> tuple[bool, bool, Any]:
    """Return a sort key: the best, or cheapest, first; what is not known is last."""
    name = f"{by}-{row['metric']}" if by in ("test", "val") else by
    value = (row["settings"] | row).get(by)
    if name in row["figures"]:
        mean = row["figures"][name]["mean"]
        value = mean if name in COSTS else -merit(name.partition("-")[2], mean)
    if isinstance(value, int | float):
        return not math.isfinite(value), False, value
    return value is None, True, _word(value)


def _word(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def setting_text(value: object) -> str:
    """Write a setting's value as in YAML; of a path the last name."""
    text = value if isinstance(value, str) else _word(value)
    return Path(text).name if text.startswith("/") else text


def _shown(name: str, figure: Tree | None, sign: str = "") -> str:
    if figure is None or not math.isfinite(figure["mean"]):
        return NONE
    mean = figure["mean"]
    if name in WAYS:
        return format_bytes(mean)
    if name in COSTS:
        return f"{mean:.0f}" if name == ROUNDS else f"{mean:.1f}"
    metric = name.partition("-")[2]  # of test-mse
    return (sign if mean >= 0 else "") + results.with_spread(figure, metric)


def _beaten(row: Tree) -> str:
    beaten, rest = row["beaten"], [key for key in row["baselines"] if key not in row["beaten"]]
    names = f" (not {', '.join(rest)})" if rest else ""
    return f"{len(beaten)} of {len(row['baselines'])}{names}" if row["baselines"] else NONE
