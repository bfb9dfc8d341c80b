"""Compares runs, and tests their differences, paired by seed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from flower_graph.config.metrics import LINKS
from flower_graph.errors import OutputError
from flower_graph.method.comparison import ROUNDS, SECONDS, Comparison, order
from flower_graph.method.load import flatten
from flower_graph.method.run import METRICS, RESULT, Run
from flower_graph.records.rounds import WAYS, merit
from flower_graph.report.result import metrics_of, metrics_shown
from flower_graph.report.significance import differences, holm, paired
from flower_graph.storage.reading import Tree, reading

__all__ = ["Comparison", "compare"]

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
        rows += sorted(read, key=lambda row: -order(row, "val"))
    if not rows:
        raise OutputError("; ".join(left_out) or "no run is named, so there is nothing to compare")
    names = [row["run"] for row in rows]
    for row in rows:
        row["run"] = row["path"] if names.count(row["run"]) > 1 else row["run"]
    _test(rows)
    return Comparison(rows, left_out).sorted(by) if by else Comparison(rows, left_out)


def _rows(path: Path, left_out: list[str]) -> Iterator[Tree]:
    if not path.is_dir():
        raise OutputError(f"{path}: no run; there is no such folder")
    folders = list(_runs_in(path, DEPTH))
    if not folders:
        left_out.append(f"{path}: no run is in it")
    found = list[tuple[str, list[Path], dict[int, Tree]]]()
    for folder in folders:
        if results := _results(folder, left_out):
            settings = _same(next(iter(results.values())))
            # What has the same seed twice is two rows
            of_others = [one for one in found if one[0] == settings and not {*one[2]} & {*results}]
            if of_others:
                of_others[0][1].append(folder)
                of_others[0][2].update(results)
            else:
                found.append((settings, [folder], results))
    for _, (first, *more), results in found:
        yield _row(_name(first, path, len(more)), first, results)


def _runs_in(folder: Path, depth: int) -> Iterator[Path]:
    run = Run(folder)
    if run.each != [run] or any((folder / one).is_file() for one in (RESULT, METRICS)):
        yield folder
    elif depth:
        inner = (one for one in folder.iterdir() if one.is_dir() and one.name[:1] != ".")
        for one in sorted(inner):
            yield from _runs_in(one, depth - 1)


def _results(folder: Path, left_out: list[str]) -> dict[int, Tree]:
    results = {}
    for run in Run(folder).each:
        try:
            result: Tree = run.result
            with reading(run.path / RESULT, OutputError, "not the result of a run"):
                _row("", folder, {int(result["seed"]): result})
            results[int(result["seed"])] = result
        except OutputError as error:
            left_out.append(str(error))
    return results


def _name(folder: Path, path: Path, more: int) -> str:
    inner = folder.relative_to(path)
    return (path.absolute().name if folder == path else str(inner)) + (f" +{more}" if more else "")


def _settings(result: Tree) -> dict[str, object]:
    settings = dict(flatten(result["config"]))
    return {key: value for key, value in settings.items() if key not in OTHER}


def _same(result: Tree) -> str:
    return json.dumps([_settings(result), result.get("versions", {})], sort_keys=True)


def _row(name: str, path: Path, results: Mapping[int, Tree]) -> Tree:
    results = dict(sorted(results.items()))
    first = next(iter(results.values()))
    metric = metrics_of(first["config"])[0]
    row: Tree = {"run": name, "path": str(path), "app": str(first["config"].get("app"))}
    row |= {"version": str(first.get("versions", {}).get("flower-graph")), "metric": metric}
    row |= {"seeds": [*results], "settings": _settings(first), "is-reference": False}
    row["judged-on"] = [result.get("judged-on") for result in results.values()]
    each = [_figures(result) for result in results.values()]
    names = dict.fromkeys(key for one in each for key in one)
    row["figures"] = {key: _joined([one.get(key, math.nan) for one in each]) for key in names}
    row["baselines"] = _baselines([*results.values()], metric)
    reached = row["figures"].get(f"test-{metric}", {}).get("mean", math.nan)
    # Equal means over clients may differ in their last digits.
    own = merit(metric, reached) - 1e-9
    row["beaten"] = [key for key, one in row["baselines"].items() if own > merit(metric, one)]
    return row


def _figures(result: Tree) -> dict[str, float]:
    figures = dict[str, float]()
    metrics = metrics_of(result["config"])
    figures[f"val-{metrics[0]}"] = _number(result.get(f"best-val-{metrics[0]}"))
    for name in dict.fromkeys([*metrics, *metrics_shown(result["config"])]):
        figures[f"test-{name}"] = _number(result.get(f"test-{name}-at-best-val"))
    for way in WAYS:
        sent = (result.get("bytes") or {}).get(way, {})
        figures[way] = sum(map(_number, sent.values()))
    figures[ROUNDS] = _number(result.get("rounds"))
    figures[SECONDS] = _number((result.get("seconds") or {}).get("total"))
    return figures


def _baselines(results: Sequence[Tree], metric: str) -> dict[str, float]:
    given = [result.get("baselines") or {} for result in results]
    means = {}
    for key in given[0]:
        # Those of an older version have the accuracy alone
        each = [one.get(key, {}) for one in given]
        values = [one.get("scores", {}).get(metric, one).get("test") for one in each]
        mean = fmean(map(_number, values))
        if math.isfinite(mean):
            means[key] = mean
    return means


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan  # type: ignore[arg-type]


def _joined(values: list[float]) -> Tree:
    spread = stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    return {"mean": fmean(values), "std": spread or 0.0, "values": values}


def _test(rows: Sequence[Tree]) -> None:
    """Add to each row but the first the difference from it, on seeds judged on the same nodes."""
    reference, tested = rows[0], list[Tree]()
    reference["is-reference"] = True
    for row in rows[1:]:
        own, others = _judged(row), _judged(reference)
        apart = differences(_by_seed(row), _by_seed(reference))
        apart = {seed: value for seed, value in apart.items() if own[seed] == others[seed]}
        if apart:
            values = [*apart.values()]
            row["difference"] = _joined(values) | {"seeds": [*apart]} | paired(values)
            tested.append(row["difference"])
    for one, chance in zip(tested, holm([one["p"] for one in tested]), strict=True):
        one["holm"] = chance


def _judged(row: Tree) -> dict[int, object]:
    settings = row["settings"]
    sections = ("links.",) if settings.get("task") == LINKS else ()
    result = dict[int, object]()
    for seed, digest in zip(row["seeds"], row["judged-on"], strict=True):
        # In a deployment nobody knows all nodes: what says how they are drawn must be the same
        deciding = sections if digest else (*sections, "data.", "partition.")
        how = {key: one for key, one in settings.items() if key.startswith(deciding)}
        result[seed] = row["metric"], settings.get("data.name"), digest, how
    return result


def _by_seed(row: Tree) -> dict[int, float]:
    values = row["figures"][f"test-{row['metric']}"]["values"]
    return {s: v for s, v in zip(row["seeds"], values, strict=True) if math.isfinite(v)}
