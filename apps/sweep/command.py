"""``flower-graph sweep``: tries settings on several seeds, and chooses the best by validation."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from omegaconf import OmegaConf

from flower_graph.apps.cli.say import say
from flower_graph.apps.parallel import loaded
from flower_graph.apps.sweep.optuna_search import search
from flower_graph.apps.sweep.trials import Sweep, Trial
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method.compare import compare
from flower_graph.method.load import PARENT, is_file_name, read_override
from flower_graph.report.result import summarise
from flower_graph.storage.files import FolderLock, new_folder, write_text
from flower_graph.storage.writing import named

BEST = "best.yaml"
PATHS = ("data.name", "data.root", "data.add")


def sweep_command(args: argparse.Namespace) -> int:
    """Do the missing runs of a sweep, and write the result."""
    fixed, varied = read_settings(args.overrides, ranges=args.optuna is not None)
    seeds = args.seeds or [loaded(args.config, tuple(fixed)).seed]
    if args.optuna is not None and not (varied and args.optuna > 0):
        raise ConfigError(f"--optuna {args.optuna}: name a number of trials, and what varies")
    stem = Path(args.config).stem if is_file_name(args.config) else args.config.replace("/", "-")
    out = named(args.out or Path("runs") / f"sweep-{stem}")
    sweep = Sweep(args.config, tuple(fixed), out, tuple(seeds), tuple(args.app or ()))
    with new_folder(out, may_exist=True):
        lock = FolderLock(out)
        try:
            if args.optuna is None:
                trials = [sweep.trial(one) for one in product(*varied.values())]
                sweep.announce(trials, len({trial.folder for trial in trials}))
                sweep.do(trials)
            else:
                trials = search(sweep, varied, args.optuna)
            return finish(trials, sweep)
        except KeyboardInterrupt:
            say("interrupted; the same command goes on", to=sys.stderr)
            return 130
        finally:
            lock.release()


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


def finish(trials: Sequence[Trial], sweep: Sweep) -> int:
    """Print the comparison, and write it and the best settings."""
    seeds, apps = sweep.seeds, "".join(f" --app {file}" for file in sweep.apps)
    figures = {one.folder: (one.merit(seeds), one) for one in trials}
    whole = {f: made for f, made in figures.items() if math.isfinite(made[0])}
    if not whole:
        raise OutputError("no run of any setting has a validation figure: there is no best one")
    for folder in whole:
        summarise(folder, [whole[folder][1].result(seed) for seed in seeds])
    best = max(whole.values(), key=lambda one: one[0])[1]
    value = best.validation(seeds)
    compared = compare(*sorted(whole, key=lambda folder: -whole[folder][0]))
    say(compared.to_text())
    write_text(best.out / "table.csv", compared.to_csv())
    write_best(
        best, f"best validation, {value:.4f} on average over seeds {', '.join(map(str, seeds))}"
    )
    for folder in figures.keys() - whole.keys():
        say(f"left out: {folder.name}: not all seeds have a validation figure", to=sys.stderr)
    say(f"\nbest by validation ({value:.3f}): {best.words or 'as it is'}")
    say(f"  flower-graph run {os.path.relpath(best.out / BEST)}{apps}")
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
