"""Runs rows of a table again, and compares the figures.

Processors round differently, and a long training may amplify that. How much, is measured for each
row by runs whose initial weights differ by 1e-7.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import stdev
from unittest.mock import patch

import pandas as pd
import torch

from flower_graph.apps.parallel import worker_pool, workers_for
from flower_graph.apps.reproduce.page import Row, markdown, value_of
from flower_graph.apps.reproduce.runs import RUNS, Run, curves_of, steps_of
from flower_graph.apps.reproduce.table import TEST
from flower_graph.apps.run import simulate_whole
from flower_graph.engine.machine import processor
from flower_graph.errors import ConfigError, DataError
from flower_graph.rng import generator
from flower_graph.storage.files import write_json, write_text
from flower_graph.storage.reading import read_packed, reading
from flower_graph.storage.writing import make_folder, named

SIZE = 1e-7  # of a change of the initial weights: about one rounding of a number near 1
DRAWS = 3  # changed runs of each run
LEAST = 0.001  # that is tolerated of a row whose changed runs agree
METRICS = (TEST, "micro-f1")
HEADINGS = {"spread": "changed by 1e-7: apart by at most", "seeds_deviate": "deviation over seeds"}


def main(
    paper: str, folder: Path, out: Path, only: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> bool:
    """Run rows of a folder's table again, write the results, and return whether all are near."""
    path, out = folder / RUNS, named(out)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file: name a folder that `reproduce` wrote")
    with reading(path, DataError, "not the table of a `reproduce`"):
        again = runs_of_rows(read_packed(path)["rows"], only, seeds)
    if not again:
        raise ConfigError(f"--only, --seeds: no such row of {path} can be run again")
    results: list[Row] = []
    runs = [(run, draw) for run in again for draw in range(DRAWS + 1)]
    print(f"{len(again)} runs, each also with {DRAWS} changes of its initial weights", flush=True)
    make_folder(out)
    machine = {"machine": platform.machine(), "processor": processor()}
    with worker_pool(workers_for(runs)) as pool:
        tasks = {one: pool.submit(_figures, *one, again[one[0]]) for one in runs}
        for run, rows in again.items():
            given = [tasks[run, draw].result() for draw in range(DRAWS + 1)]
            values = zip(rows, *given, strict=True)
            results += [compared(row, run.seed, figures) for row, *figures in values]
            write_json(out / "again.json", {"paper": paper, **machine, "rows": results})
            write_text(out / "again.md", _table(results) + "\n")
            print(_table(results[-len(rows) :]), flush=True)
    print(f"table in {out}")
    return all(one["near"] for one in results)


def runs_of_rows(
    rows: Sequence[Row], only: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> dict[Run, list[Row]]:
    """Return the runs behind the selected rows, each with its rows."""
    result: dict[Run, list[Row]] = {}
    for row in rows:
        how = row["settings"]
        asked = all(str(row.get(key, "")) in values for key, values in only.items())
        if row["metric"] not in METRICS or how["centralised"] or "client" in row or not asked:
            continue
        for seed in [one for one in seeds or row["seeds"][:1] if one in row["seeds"]]:
            run = Run(how["config"], (*how["overrides"],), seed, how["rounds"])
            result.setdefault(run, []).append(row)
    return result


def compared(row: Row, seed: int, values: Sequence[float | None]) -> Row:
    """Compare a row's new figure with the committed one.

    The first of ``values`` comes from the unchanged run, the others from runs with changed weights;
    None stands for a run without any weights to change.
    """
    committed, again = row["values"][row["seeds"].index(seed)], values[0]
    assert again is not None
    changed = [value for value in values[1:] if value is not None]
    spread = max((abs(value - again) for value in changed), default=None)
    tolerance = LEAST + 2 * (spread or 0.0)
    keys = ("table", "data", "model", "method", "metric", "classifier", "iteration")
    return {key: row[key] for key in keys if key in row} | {
        "seed": seed,
        "settings": row["settings"],
        "committed": committed,
        "again": again,
        "changed": changed,
        "spread": spread,
        "tolerance": tolerance,
        "seeds_deviate": stdev(row["values"]) if len(row["values"]) > 1 else None,
        "near": abs(again - committed) <= tolerance,
    }


def _figures(run: Run, draw: int, rows: Sequence[Row]) -> list[float | None]:
    """Do a run, with changed weights if ``draw`` is above 0, and return the figure of each row."""
    with perturbed(run.seed, draw) as drawn:
        curves = curves_of(*simulate_whole(run.settings), *steps_of(run.settings))
    is_changed = draw == 0 or drawn
    return [
        value_of(row["metric"], curves, row, run.settings) if is_changed else None for row in rows
    ]


@contextmanager
def perturbed(seed: int, draw: int) -> Iterator[list[torch.Size]]:
    """Add normal noise of 1e-7 to all tensors that are drawn uniformly; draw 0 adds none.

    These are the initial weights, and a few other numbers, which the noise hardly affects.
    Yields the shapes of the tensors that were drawn.
    """
    rng, drawn = generator(seed, "again", draw), list[torch.Size]()

    def noisy(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
        def draw_it(*args: object, **others: object) -> object:
            result = function(*args, **others)
            drawn.append(result.shape)
            if draw:
                with torch.no_grad():
                    noise = torch.randn(result.shape, generator=rng, dtype=result.dtype)
                    result += SIZE * noise.to(result.device)
            return result

        return draw_it

    # PyTorch's and PyG's initialisations draw by the first, and a method of its own by either.
    uniform, rand = noisy(torch.Tensor.uniform_), noisy(torch.rand)
    with patch.object(torch.Tensor, "uniform_", uniform), patch.object(torch, "rand", rand):
        yield drawn


def _table(results: Sequence[Row]) -> str:
    frame = pd.DataFrame(results, dtype=object).drop(columns=["settings", "changed"])
    frame["near"] = frame["near"].map({True: "near", False: "**not near**"})
    shown = frame.map(lambda one: f"{one:.4f}" if isinstance(one, float) else one)
    return markdown(shown.set_axis([HEADINGS.get(one, one) for one in shown], axis=1))
