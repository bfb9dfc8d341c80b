"""``flower-graph sweep``: tries settings on several seeds, and chooses the best by validation."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean, median

from omegaconf import OmegaConf

from flower_graph.apps.cli.run import Job, Options, check_all
from flower_graph.apps.parallel import (
    in_parallel,
    loaded,
    settings_of,
    time_left,
    workers_for,
)
from flower_graph.apps.run import first_rounds, run
from flower_graph.config.common import CHECKPOINTS, RunConfig
from flower_graph.errors import ConfigError, DivergedError, OutputError
from flower_graph.method.compare import compare
from flower_graph.method.load import PARENT, is_file_name, read_override, title_of
from flower_graph.method.run import RESULT, load_run
from flower_graph.report.result import metrics_of, summarise
from flower_graph.storage.files import FolderLock, new_folder, write_text
from flower_graph.storage.reading import Tree

BEST = "best.yaml"
PATHS = ("data.name", "data.root", "data.add")
MOST_NAME = 80  # letters of a folder's name


@dataclass(frozen=True)
class Trial:
    """One choice of the settings that vary, on all seeds."""

    config: str
    fixed: tuple[str, ...]  # settings that do not vary
    varied: tuple[str, ...]
    out: Path  # of the sweep

    def loaded(self, seed: int) -> RunConfig:
        """Load the settings of one run."""
        return loaded(self.config, (*self.fixed, *self.varied, f"seed={seed}"))

    @cached_property
    def folder(self) -> Path:
        """The folder of its runs; other settings have another one, so what is there is of these."""
        settings = {k: v for k, v in settings_of(self.loaded(0)).items() if k != "seed"}
        text = json.dumps(settings, sort_keys=True)
        words = re.sub(r"[^\w.,=+-]", "-", self.words.replace(" ", ","))[:MOST_NAME] or "as-it-is"
        return self.out / f"{words}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    @property
    def words(self) -> str:
        """What varies, in short."""
        pairs = (one.partition("=") for one in self.varied)
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)

    def run_folder(self, seed: int) -> Path:
        """Return the folder of one run, which is there once the run is complete."""
        return self.folder / f"seed-{seed}"

    def validation(self, seeds: Sequence[int]) -> float:
        """Return the mean over seeds of the best validation; NaN if a run has none."""
        values = []
        for seed in seeds:
            path = self.run_folder(seed)
            result: Tree = load_run(path).result if path.is_dir() else {}
            value = result.get(f"best-val-{metrics_of(result.get('config', {}))[0]}")
            values.append(math.nan if value is None else float(value))
        return fmean(values)


def sweep_command(args: argparse.Namespace) -> int:
    """Do what is missing of a sweep, and write what came out."""
    fixed, varied = read_settings(args.overrides, ranges=args.optuna is not None)
    seeds = args.seeds or [loaded(args.config, tuple(fixed)).seed]
    if args.optuna is not None and not (varied and args.optuna > 0):
        raise ConfigError(f"--optuna {args.optuna}: name a number of trials, and what varies")
    stem = Path(args.config).stem if is_file_name(args.config) else args.config.replace("/", "-")
    out = (args.out or Path("runs") / f"sweep-{stem}").expanduser().absolute()
    sweep = Sweep(args.config, tuple(fixed), out, tuple(seeds), tuple(args.app or ()))
    with new_folder(out, may_exist=True):
        lock = FolderLock(out)
        try:
            if args.optuna is None:
                trials = [sweep.trial(one) for one in product(*varied.values())]
                sweep.announce(trials, len({trial.folder for trial in trials}))
                sweep.do(trials)
            else:
                from flower_graph.apps.optuna_search import search

                trials = search(sweep, varied, args.optuna)
            return finish(trials, seeds)
        finally:
            lock.release()


def read_settings(
    given: Sequence[str], *, ranges: bool = False
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate settings with one value from those with several; each value is an override."""
    fixed, varied = list[str](), dict[str, list[str]]()
    for one in given:
        key, _, text = one.partition("=")
        values = list(dict.fromkeys(f"{key.strip()}={value}" for value in split(text)))
        for value in values:
            read_override(value)  # refuses what is no setting at all
        if not ranges and any(".." in value for value in values):
            raise ConfigError(f"{one}: a range needs --optuna N; a grid has values, as {key}=1,10")
        if len(values) > 1 or ".." in text:
            if key.strip() in ("seed", "app"):
                raise ConfigError(f"{one}: name seeds by --seeds, and sweep one app at a time")
            varied[key.strip()] = values
        else:
            fixed += values
    return fixed, varied


def split(text: str) -> list[str]:
    """Split values at commas, but not inside brackets or quotation marks."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        quote = "" if sign == quote else sign if not quote and sign in "'\"" else quote
        depth += 0 if quote else (sign in "[{") - (sign in "]}")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


# Running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """What all trials of a sweep have in common."""

    config: str
    fixed: tuple[str, ...]
    out: Path
    seeds: tuple[int, ...]
    apps: tuple[Path, ...] = ()  # files with methods of the user's own

    def trial(self, varied: Sequence[str]) -> Trial:
        """Make a trial, and refuse settings that cannot be run."""
        trial = Trial(self.config, self.fixed, tuple(varied), self.out)
        for seed in self.seeds:
            trial.loaded(seed)
        return trial

    def announce(self, trials: Sequence[Trial], count: int) -> None:
        """Say how many runs there will be and how long they take, by the first trials."""
        jobs = [Job(self.config, [], trial.loaded(self.seeds[0]), trial.folder) for trial in trials]
        check_all(jobs, Options())
        runs, missing = count * len(self.seeds), self.missing(trials)
        done = len({trial.folder for trial in trials}) * len(self.seeds) - len(missing)
        say(f"{runs} runs: {count} settings, {len(self.seeds)} seeds; {done} done before")
        if missing:
            workers = workers_for(missing)
            seconds = self._seconds(trials, missing) * (runs - done) / workers
            say(f"about {time_left(seconds)}, {workers} runs at a time, in {self.out}")

    def missing(self, trials: Sequence[Trial]) -> list[tuple[Trial, int]]:
        """List the runs, each once, that are not there."""
        runs = {one.run_folder(seed): (one, seed) for seed in self.seeds for one in trials}
        return [run for folder, run in runs.items() if not (folder / RESULT).is_file()]

    def do(self, trials: Sequence[Trial]) -> None:
        """Do runs that are missing, on all cores, and say what came of each."""
        missing = self.missing(trials)
        done = in_parallel(do_run, missing, self.apps)
        for number, ((trial, seed), words, left) in enumerate(done, 1):
            end = f"; {time_left(left)} left" if number < len(missing) else ""
            say(f"{number}/{len(missing)}  {trial.words}, seed {seed}: {words}{end}")

    def _seconds(self, trials: Sequence[Trial], missing: Sequence[tuple[Trial, int]]) -> float:
        """Estimate the seconds of a run, by runs done before, else by the first rounds of two."""
        folders = [one.run_folder(seed) for one in trials for seed in self.seeds]
        if done := [load_run(folder).result for folder in folders if folder.is_dir()]:
            return fmean(float(one["seconds"]["total"]) for one in done)  # type: ignore[index]
        tried = [missing[0], missing[-1]][: len(missing)]
        return fmean(seconds for _, seconds, _ in in_parallel(try_run, tried, self.apps))


def try_run(trial: Trial, seed: int) -> float:
    """Return the seconds that a run takes, by a trial of its first rounds."""
    config = trial.loaded(seed)
    seconds = [report.seconds for report in first_rounds(config)]
    return seconds[0] + (config.rounds - 1) * median(seconds[1:] or seconds)


def do_run(trial: Trial, seed: int) -> str:
    """Do one run in a folder that gets its name in the end; say what came of it."""
    out, config = trial.run_folder(seed), trial.loaded(seed)
    part = out.with_name(f".{out.name}.part")
    # Of a run that was killed only checkpoints are of use
    resume = any((part / CHECKPOINTS).glob("round-*/server.pt"))
    if part.exists() and not resume:
        shutil.rmtree(part)
    try:
        result: Tree = run(config, part, resume=resume, title=title_of(trial.config))
    except DivergedError as error:
        shutil.rmtree(part, ignore_errors=True)
        return f"diverged ({error})"
    part.rename(out)
    metric = config.metrics[0]
    value = result.get(f"best-val-{metric}")
    return f"no validation {metric}" if value is None else f"validation {metric} {value:.3f}"


# What came out -----------------------------------------------------------------------------------


def finish(trials: Sequence[Trial], seeds: Sequence[int]) -> int:
    """Print the comparison, and write it and the best settings."""
    figures = {one.folder: (one.validation(seeds), one) for one in trials}
    whole = {f: made for f, made in figures.items() if math.isfinite(made[0])}
    if not whole:
        raise OutputError("no run of any setting has a validation figure: there is no best one")
    for folder in whole:
        summarise(folder, [load_run(folder / f"seed-{seed}").result for seed in seeds])
    value, best = max(whole.values(), key=lambda one: one[0])
    compared = compare(*sorted(whole, key=lambda folder: -whole[folder][0]))
    print(compared.to_text())
    write_text(best.out / "table.csv", compared.to_csv())
    write_best(best, f"best validation, {value:.4f} on average over seeds {seeds}")
    for folder in figures.keys() - whole.keys():
        print(f"left out: {folder.name}: not all seeds have a validation figure", file=sys.stderr)
    print(f"\nbest by validation ({value:.3f}): {best.words or 'as it is'}")
    print(f"  flower-graph run {os.path.relpath(best.out / BEST)}")
    return 0


def write_best(best: Trial, why: str) -> None:
    """Write the chosen settings as a YAML file that ``flower-graph run`` takes."""
    tree = OmegaConf.create({PARENT: best.config})
    if is_file_name(best.config):
        # From the file's own folder, so that both may move together
        tree[PARENT] = os.path.relpath(Path(best.config).expanduser(), best.out)
    settings = {k: v for one in (*best.fixed, *best.varied) for k, v in read_override(one).items()}
    config = best.loaded(0)
    for key, value in settings.items():
        # Paths were given from the working directory
        OmegaConf.update(tree, key, getattr(config.data, key[5:]) if key in PATHS else value)
    text = OmegaConf.to_yaml(tree)
    write_text(best.out / BEST, f"# Chosen by `flower-graph sweep`: {why}.\n{text}")


def say(words: str) -> None:
    """Print a line beside the result."""
    print(words, file=sys.stderr, flush=True)
