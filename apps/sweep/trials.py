"""The runs of a sweep: each has a folder named by its settings, and is done once."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median

from flower_graph.apps.cli.run import Job, Options, check_all
from flower_graph.apps.cli.say import say
from flower_graph.apps.parallel import in_parallel, loaded, settings_of, time_left, workers_for
from flower_graph.apps.run import first_rounds, run
from flower_graph.config.common import CHECKPOINTS, RunConfig
from flower_graph.errors import DivergedError
from flower_graph.method.load import title_of
from flower_graph.method.run import RESULT, load_run
from flower_graph.records.rounds import merit
from flower_graph.report.result import metrics_of
from flower_graph.storage.reading import Tree
from flower_graph.storage.writing import remove_folder

MOST_NAME = 80  # letters of a folder's name


@dataclass(frozen=True)
class Trial:
    """One choice of the varied settings, on all seeds."""

    config: str
    fixed: tuple[str, ...]  # settings that do not vary
    varied: tuple[str, ...]
    out: Path  # of the sweep

    def loaded(self, seed: int) -> RunConfig:
        return loaded(self.config, (*self.fixed, *self.varied, f"seed={seed}"))

    @cached_property
    def folder(self) -> Path:
        """The folder of the trial's runs; its name depends on all settings."""
        settings = settings_of(self.loaded(0))
        settings = {key: value for key, value in settings.items() if key not in ("seed", "track")}
        text = json.dumps(settings, sort_keys=True)
        words = re.sub(r"[^\w.,=+-]", "-", self.words.replace(" ", ","))[:MOST_NAME] or "as-it-is"
        return self.out / f"{words}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    @property
    def words(self) -> str:
        pairs = (one.partition("=") for one in self.varied)
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)

    def run_folder(self, seed: int) -> Path:
        return self.folder / f"seed-{seed}"

    def result(self, seed: int) -> Tree:
        folder = self.run_folder(seed)
        return load_run(folder).result if (folder / RESULT).is_file() else {}

    def merit(self, seeds: Sequence[int]) -> float:
        """Return the mean validation, with the sign that makes larger values better."""
        return merit(self.loaded(0).metrics[0], self.validation(seeds))

    def validation(self, seeds: Sequence[int]) -> float:
        """Return the mean over seeds of the best validation; NaN if a run has none."""
        values = []
        for seed in seeds:
            result = self.result(seed)
            value = result.get(f"best-val-{metrics_of(result.get('config', {}))[0]}")
            values.append(math.nan if value is None else float(value))
        return fmean(values)


@dataclass(frozen=True)
class Sweep:
    """What all trials of a sweep have in common."""

    config: str
    fixed: tuple[str, ...]
    out: Path
    seeds: tuple[int, ...]
    apps: tuple[Path, ...] = ()  # files with methods of the user's own

    def trial(self, varied: Sequence[str]) -> Trial:
        trial = Trial(self.config, self.fixed, tuple(varied), self.out)
        for seed in self.seeds:
            trial.loaded(seed)
        return trial

    def announce(self, trials: Sequence[Trial], count: int) -> None:
        jobs = [Job(self.config, [], trial.loaded(self.seeds[0]), trial.folder) for trial in trials]
        check_all(jobs, Options())
        runs, missing = count * len(self.seeds), self.missing(trials)
        done = len({trial.folder for trial in trials}) * len(self.seeds) - len(missing)
        seeds = f"{len(self.seeds)} seed" + "s" * (len(self.seeds) > 1)
        say(f"{runs} runs ({count} settings × {seeds}), {done} done before", to=sys.stderr)
        if missing:
            workers = workers_for(missing)
            start, each = self._seconds(trials, missing)
            seconds = time_left(start + each * (runs - done) / workers)
            ends = "at most about" if missing[0][0].loaded(missing[0][1]).patience else "about"
            say(f"{ends} {seconds}, {workers} runs at a time, in {self.out}", to=sys.stderr)

    def missing(self, trials: Sequence[Trial]) -> list[tuple[Trial, int]]:
        runs = {one.run_folder(seed): (one, seed) for seed in self.seeds for one in trials}
        return [(one, seed) for one, seed in runs.values() if not one.result(seed)]

    def do(self, trials: Sequence[Trial]) -> None:
        missing = self.missing(trials)
        done = in_parallel(do_run, missing, self.apps)
        for number, ((trial, seed), words, left) in enumerate(done, 1):
            end = f"; {time_left(left)} left" if number < len(missing) else ""
            say(f"{number}/{len(missing)}  {trial.words}, seed {seed}: {words}{end}", to=sys.stderr)

    def _seconds(
        self, trials: Sequence[Trial], missing: Sequence[tuple[Trial, int]]
    ) -> tuple[float, float]:
        results = [one.result(seed) for one in trials for seed in self.seeds]
        if done := [float(one["seconds"]["total"]) for one in results if one]:
            return 0.0, fmean(done)
        tried = [missing[0], missing[-1]][: len(missing)]
        found = [result for _, result, _ in in_parallel(try_run, tried, self.apps)]
        starts, runs = zip(*found, strict=True)
        return max(starts), fmean(runs)


def try_run(trial: Trial, seed: int) -> tuple[float, float]:
    """Return the seconds of a process's start and of a run, by the first rounds of two runs.

    Data and modules that the first run loads are there for the second and all later runs.
    """
    config = trial.loaded(seed)
    (cold, _), (warm, each) = tried(config), tried(config)
    return max(0.0, cold - warm), warm + (config.rounds - 1) * each


def tried(config: RunConfig) -> tuple[float, float]:
    """Return the seconds of a run's start, including its first round, and of a later round."""
    started = time.perf_counter()
    later = [report.seconds for report in first_rounds(config)][1:]
    start = time.perf_counter() - started - sum(later)
    return start, median(later) if later else 0.0


def do_run(trial: Trial, seed: int) -> str:
    """Do one run, and return a line about its result."""
    out, config = trial.run_folder(seed), trial.loaded(seed)
    # Of a run that was killed only checkpoints are of use
    resume = any((out / CHECKPOINTS).glob("round-*/server.safetensors"))
    if not resume:
        remove_folder(out)
    try:
        result: Tree = run(config, out, resume=resume, title=title_of(trial.config))
    except DivergedError as error:
        remove_folder(out)
        return f"diverged ({error})"
    value = result.get(f"best-val-{config.metrics[0]}")
    what = f"validation {config.metrics[0]}"
    return f"no {what}" if value is None else f"{what} {value:.3f}"
