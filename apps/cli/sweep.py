"""``flower-graph sweep``: tries settings on several seeds, and chooses the best by validation.

Each run has a folder named by its settings, and is done once. ``--optuna N`` has Optuna propose
settings instead of a grid.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from flower_graph.apps.cli.run import check_all, stem_of
from flower_graph.apps.cli.say import say
from flower_graph.apps.parallel import in_parallel, loaded, settings_of, workers_for
from flower_graph.apps.run import run
from flower_graph.config.common import CHECKPOINTS, RunConfig
from flower_graph.config.foreign import RESULT
from flower_graph.config.rules import require_library
from flower_graph.errors import ConfigError, DivergedError, OutputError
from flower_graph.method.compare import compare, or_nan
from flower_graph.method.load import read_override, title_of, to_yaml
from flower_graph.method.run import load_run
from flower_graph.records.rounds import merit
from flower_graph.report.result import summarise
from flower_graph.storage.files import named, new_folder, remove_folder, write_text
from flower_graph.storage.reading import Tree

BEST = "best.yaml"
MOST_NAME = 80  # letters of a folder's name
# Trials proposed at a time: the same number on any machine, so that a sweep that was stopped
# proposes the same ones again, and finds their runs
BATCH = 4
LOGARITHMIC = 100  # ranges whose ends are this many times apart are searched by their logarithm


@dataclass(frozen=True)
class Trial:
    """One choice of the varied settings, on all seeds of a sweep."""

    config: str
    fixed: tuple[str, ...]  # settings that do not vary
    out: Path  # of the sweep
    seeds: tuple[int, ...]
    apps: tuple[Path, ...] = ()  # files with methods of the user's own
    varied: tuple[str, ...] = ()

    def vary(self, varied: Sequence[str]) -> Trial:
        """Return another choice, whose settings are checked."""
        trial = replace(self, varied=tuple(varied))
        for seed in self.seeds:
            trial.loaded(seed)
        return trial

    def loaded(self, seed: int) -> RunConfig:
        return loaded(self.config, (*self.fixed, *self.varied, f"seed={seed}"))

    @cached_property
    def folder(self) -> Path:
        """The folder of the trial's runs; its name depends on all settings."""
        settings = settings_of(self.loaded(0)).items()
        text = json.dumps({k: v for k, v in settings if k not in ("seed", "track")}, sort_keys=True)
        words = re.sub(r"[^\w.,=+-]", "-", self.words.replace(" ", ","))[:MOST_NAME] or "as-it-is"
        return self.out / f"{words}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    @property
    def words(self) -> str:
        pairs = (one.partition("=") for one in self.varied)
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)

    def result(self, seed: int) -> Tree:
        folder = self.folder / f"seed-{seed}"
        return load_run(folder).result if (folder / RESULT).is_file() else {}

    @property
    def validation(self) -> float:
        """The mean over seeds of the best validation; NaN if a run has none."""
        key = f"best-val-{self.loaded(0).metrics[0]}"
        return fmean(or_nan(self.result(seed).get(key)) for seed in self.seeds)

    @property
    def merit(self) -> float:
        """The mean validation, with the sign that makes larger values better."""
        return merit(self.loaded(0).metrics[0], self.validation)


def do(trials: Sequence[Trial], of: int | None = None) -> None:
    """Do the runs without a result, each once, seed by seed; ``of``: say how many in all."""
    seeds, out = trials[0].seeds, trials[0].out
    runs = {(one.folder, seed): (one, seed) for seed in seeds for one in trials}
    missing = [(one, seed) for one, seed in runs.values() if not one.result(seed)]
    if of is not None:
        check_all([trial.loaded(seeds[0]) for trial in trials])
        say(
            f"{of * len(seeds)} runs ({of} settings × {len(seeds)} seeds), "
            f"{len(runs) - len(missing)} done before; {workers_for(missing)} at a time, in {out}",
            to=sys.stderr,
        )
    for (trial, seed), words, ended, left in in_parallel(do_run, missing, trials[0].apps):
        say(f"{ended}  {trial.words}, seed {seed}: {words}; {left} left", to=sys.stderr)


def do_run(trial: Trial, seed: int) -> str:
    """Do one run, and return a line about its result."""
    out, config = trial.folder / f"seed-{seed}", trial.loaded(seed)
    # Of a run that was killed only checkpoints are of use
    resume = any((out / CHECKPOINTS).glob("round-*/server.safetensors"))
    if not resume:
        remove_folder(out)
    try:
        result: Tree = run(config, out, resume=resume, title=title_of(trial.config))
    except DivergedError as error:
        remove_folder(out)
        return f"diverged ({error})"
    metric = config.metrics[0]
    return f"validation {metric} {or_nan(result.get(f'best-val-{metric}')):.3f}"


# Optuna


def search(sweep: Trial, varied: Mapping[str, Sequence[str]], count: int) -> list[Trial]:
    """Try this many proposals of Optuna, each informed by the trials before it."""
    require_library("optuna", "--optuna", extra="optuna")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    trials = list[Trial]()
    while len(trials) < count:
        asked = [study.ask() for _ in range(min(BATCH, count - len(trials)))]
        batch = [
            sweep.vary([propose(one, key, values) for key, values in varied.items()])
            for one in asked
        ]
        do(batch, None if trials else count)
        for one, trial in zip(asked, batch, strict=True):
            is_known, failed = math.isfinite(trial.merit), optuna.trial.TrialState.FAIL
            study.tell(one, *((trial.merit,) if is_known else (None, failed)))
        trials += batch
    return trials


# Any: optuna's trial, whose package may not be there
def propose(trial: Any, key: str, values: Sequence[str]) -> str:
    """Choose one of the values of a setting, or a number in its range LOW..HIGH."""
    if len(values) > 1 or ".." not in values[0]:
        return str(trial.suggest_categorical(key, values))
    low, high, is_whole = ends(values[0])
    by_logarithm = low > 0 and high >= LOGARITHMIC * low
    if is_whole:
        return f"{key}={trial.suggest_int(key, int(low), int(high), log=by_logarithm)}"
    return f"{key}={trial.suggest_float(key, low, high, log=by_logarithm):.4g}"


def ends(text: str) -> tuple[float, float, bool]:
    """Read a range, such as ``model.hidden=8..64``, and whether its numbers are whole."""
    words = text.partition("=")[2].split("..")
    try:
        low, high = map(float, words)
        if not low < high < math.inf:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{text}: a range is LOW..HIGH, two numbers, such as 0.001..1") from None
    return low, high, all(word.strip().lstrip("-").isdigit() for word in words)


# The command


def sweep_command(args: argparse.Namespace) -> int:
    """Do the missing runs of a sweep, and write the result."""
    fixed, varied = read_settings(args.overrides, ranges=args.optuna is not None)
    seeds = args.seeds or [loaded(args.config, tuple(fixed)).seed]
    if args.optuna is not None and not varied:
        raise ConfigError(f"--optuna {args.optuna}: name what varies")
    out = named(args.out or Path("runs") / f"sweep-{stem_of(args.config)}")
    sweep = Trial(args.config, tuple(fixed), out, tuple(seeds), tuple(args.app or ()))
    with new_folder(out, may_exist=True):
        if args.optuna is None:
            trials = [sweep.vary(one) for one in product(*varied.values())]
            do(trials, len({trial.folder for trial in trials}))
        else:
            trials = search(sweep, varied, args.optuna)
        finish(trials)
    return 0


def read_settings(
    given: Sequence[str], *, ranges: bool = False
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate settings with one value from settings with several; each value is an override."""
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


def finish(trials: Sequence[Trial]) -> None:
    """Print the comparison, and write it and the best settings."""
    each = {trial.folder: trial for trial in trials}.values()
    whole = [trial for trial in each if math.isfinite(trial.merit)]
    whole.sort(key=lambda trial: -trial.merit)
    if not whole:
        raise OutputError("no run of any setting has a validation figure: there is no best one")
    for trial in whole:
        summarise(trial.folder, [trial.result(seed) for seed in trial.seeds])
    best, compared = whole[0], compare(*(trial.folder for trial in whole))
    say(compared.to_text())
    write_text(best.out / "table.csv", compared.to_csv())
    seeds = ", ".join(map(str, best.seeds))
    why = f"best validation, {best.validation:.4f} on average over seeds {seeds}"
    text = to_yaml(loaded(best.config, (*best.fixed, *best.varied)))
    write_text(best.out / BEST, f"# Chosen by `flower-graph sweep`: {why}.\n{text}")
    for trial in each:
        if trial not in whole:
            say(f"left out: {trial.folder.name}: a seed has no validation figure", to=sys.stderr)
    say(f"\nbest by validation ({best.validation:.3f}): {best.words or 'as it is'}")
    apps = "".join(f" --app {file}" for file in best.apps)
    say(f"  flower-graph run {os.path.relpath(best.out / BEST)}{apps}")
