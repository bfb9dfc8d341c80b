"""What of a paper's comparison is asked for, what is there, and how long the rest takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flower_graph.apps.reproduce.experiments import Run, left_to_run, workers_for
from flower_graph.config.checks import refuse_key
from flower_graph.errors import ConfigError, DataError


def choose(
    only: Mapping[str, Sequence[str]], known: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Apply ``--only`` to what there is."""
    for key, values in only.items():
        if key not in known:
            refuse_key(key, list(known), " (in --only)")
        for value in values:
            if value not in known[key]:
                allowed = ", ".join(known[key])
                raise ConfigError(f"--only {key}={value}: unknown; allowed are {allowed}")
    return {key: [v for v in values if v in only.get(key, values)] for key, values in known.items()}


def available(names: Sequence[str], load: Callable[[str], object]) -> tuple[list[str], list[str]]:
    """Return the data sets that can be loaded, and why the others cannot."""
    there, left_out = [], []
    for name in names:
        try:
            load(name)
            there.append(name)
        except DataError as error:
            # The whole reason names folders of this machine: not for a page that is passed on.
            left_out.append(f"{name}: not in the data root, and it could not be downloaded")
            print(f"left out: {name}: {error}")
    if not there:
        raise DataError("none of the data sets is there: " + "; ".join(left_out))
    return there, left_out


def announce(runs: Sequence[Run], folder: Path, estimate: Callable[[Sequence[Run]], float]) -> None:
    """Say how many runs there are, and how long those that the folder lacks will take."""
    missing = left_to_run(runs, folder)
    workers = workers_for(missing)
    minutes = estimate(missing) / 60 / workers
    print(
        f"{len(runs)} runs, {len(runs) - len(missing)} of them there already; the others take "
        f"about {minutes:.0f} minutes, {workers} at a time",
        flush=True,
    )
