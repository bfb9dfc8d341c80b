"""The command ``flower-graph run``: one run, or one for each seed, and its summary."""

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

from flower_graph.apps.cli.say import say, withheld
from flower_graph.config.common import CHECKPOINTS, RunConfig
from flower_graph.config.foreign import (
    CONFIG,
    DATA,
    RESULT,
    RUN_OF,
    SUMMARY,
    Trust,
    is_of_run,
    seed_folders,
)
from flower_graph.errors import CheckpointError, ConfigError, OutputError, printable
from flower_graph.method.load import is_file_name, load_config, title_of, to_dict
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport, format_round
from flower_graph.report.result import describe_result, summarise
from flower_graph.storage import files
from flower_graph.storage.reading import MOST_SETTINGS, read_text, reading
from flower_graph.wire.keys import ACCURACY

# The files of a run, finished and half written
WRITTEN = (
    *(CONFIG, DATA, "metrics.jsonl", "result.json", "weights.safetensors", "outputs.json"),
    *("predictions.*", "embeddings.npz", "links.npz", "model.*", "models.*", "measured.bin"),
    *("clients.csv", "curves.csv", "*.png", "flower.log", "trackers.json", ".*.[0-9]*"),
    *(".running", ".probe", ".partial-*", CHECKPOINTS, "clients", "embeddings", "rows"),
    *("snapshots", "tensorboard", "wandb"),
)
NO_CONFIG = "CONFIG: missing; name one, such as quickstart (see `flower-graph list`)"
ENGINE_STARTS = (
    "Flower's engine starts, with processes of its own: half a minute until round 1, or more"
)
# Lines of Flower's engine that say in each run, or in each round, the same
ROUTINE = re.compile(
    r"Since flwr |(configure|aggregate)_(train|evaluate): |[├│└]|Starting logstream"
    r"|Starting Flower Simulation|Federation `|change federation size|flwr federation "
    r"|Created default configuration|Starting local SuperLink|Using SuperLink: local"
    r"|Successfully (started run|installed)|outputs in |^INFO :\s*$"
)
ROUND = re.compile(r"^INFO :\s+round +(\d+)/\d+ ")


@dataclass
class Job:
    """One run: what to do and where."""

    name: str  # the config's shipped name or path
    overrides: list[str]  # with the seed, if one was asked for
    config: RunConfig
    out: Path


def run_command(args: argparse.Namespace) -> int:
    """Do all runs of one command, one after another, and print the results."""
    top, jobs, figures = run_all(args)
    method = method_of(jobs[0].config)
    called = (method.client, method.clients)
    if not (args.json and args.quiet):
        text = describe_result(title_of(jobs[0].name), figures, top, called)
        say(text, to=sys.stderr if args.json else sys.stdout)
    return 0


def run_all(args: argparse.Namespace) -> tuple[Path, list[Job], dict[str, object]]:
    """Do all runs of a command; return the folder, the jobs, and the result or its summary.

    ``args`` are the options of ``run``; from Python also ``on_round``.
    """
    top, jobs = _plan(args)
    resume = args.resume is not None
    if args.overwrite:
        runs_to_clear(top)  # another folder is told before data are read
        if is_file_name(jobs[0].name) and top in Path(jobs[0].name).absolute().parents:
            raise ConfigError(f"CONFIG {jobs[0].name}: --overwrite would delete it; copy it first")
    done = {job.config.seed: _done(job) if resume else None for job in jobs}
    with files.new_folder(top, may_exist=resume or args.overwrite):
        pass  # one that cannot be written is told before data are read
    todo = [job.config for job in jobs if not done[job.config.seed]]
    check = cache(partial(check_all, todo, args.supernodes, quiet=args.quiet))  # done once
    # Flower's engine takes as long to start, and is ended if jobs are refused.
    if args.overwrite or args.engine != "flwr":
        check()
    if args.overwrite:
        clear_runs(top)
    made = [folder for job in jobs for folder in files.missing_folders(job.out)]
    results: list[dict[str, object]] = []
    try:
        for job in jobs:
            # All at once: a resumed command finds in the folders which seeds it was to run.
            files.make_folder(job.out)
        for job in jobs:
            if (result := done[job.config.seed]) is None:
                result = _run(job, args, check)
            results.append(result)
    except KeyboardInterrupt:
        # As storage.checkpoint lays them out; to import that (and torch) now would take seconds.
        if any(job.out.rglob("round-*/server.safetensors")):
            say(f"go on with: flower-graph run --resume {shlex.quote(str(top))}", to=sys.stderr)
        else:
            say(f"no checkpoint (checkpoint_every={job.config.checkpoint_every})", to=sys.stderr)
        raise
    finally:
        if not any(job.out.is_dir() and files.holds_something(job.out) for job in jobs):
            for folder in made:
                files.remove_empty(folder)
    return top, jobs, summarise(top, results) if len(jobs) > 1 else results[0]


def stem_of(name: str) -> str:
    """Return how folders are called after a config."""
    return Path(name).stem if is_file_name(name) else name.replace("/", "-")


def default_folder(name: str, kind: str = "") -> Path:
    """Return a new folder's path for outputs: ``runs/<kind><config>-<UTC time>``."""
    # Python can do two runs within a second.
    return Path("runs") / f"{kind}{stem_of(name)}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"


def of_seeds(seeds: Sequence[int] | None) -> list[list[str]]:
    """Return the overrides of each seed; of no seed, none: the config has its own."""
    return [[f"seed={seed}"] for seed in seeds or ()] or [[]]


def _plan(args: argparse.Namespace) -> tuple[Path, list[Job]]:
    """Return the output folder and the runs; all settings are checked before the first run."""
    name, overrides, seeds = args.config, list(args.overrides), args.seeds
    if args.ray_address is not None and args.engine != "flwr":
        raise ConfigError(f"--ray-address {args.ray_address}: needs --engine flwr")
    if args.overwrite and args.resume is not None:
        raise ConfigError("--overwrite: a run that goes on (--resume) is kept")
    if args.engine == "flwr" and (args.app or args.trust_code):
        raise ConfigError(
            "--engine flwr: its processes know neither --app nor --trust-code; name the config, "
            "and install its method or put it on Python's path"
        )
    if name is not None and "=" in name and not is_file_name(name):
        # Only `--resume` does without a config; the first word is an override then.
        overrides, name = [name, *overrides], None
    if args.every is not None:
        overrides.append(f"every={args.every}")
    if args.resume is not None:
        if not args.resume.is_dir():
            raise CheckpointError(f"--resume {args.resume}: no run to resume; no such folder")
        seeds = seeds or [*seed_folders(args.resume)]
        configs = [args.resume / CONFIG, *sorted(args.resume.glob(f"seed-*/{CONFIG}"))]
        name = name or next((str(path) for path in configs if path.is_file()), None)
        if name is None:
            raise CheckpointError(f"--resume {args.resume}: no run to resume; no {CONFIG} in it")
    if name is None:
        raise ConfigError(NO_CONFIG)
    how: Any = {"of_run": name != args.config, "trust": Trust(code=args.trust_code)}
    top = files.named(args.resume or args.out or default_folder(name))
    jobs = list[Job]()
    for own in of_seeds(seeds):
        given, out = [*overrides, *own], top
        config = load_config(name, given, **how)
        if len(seeds or ()) > 1:
            out = top / f"seed-{config.seed}"
        jobs.append(Job(name, given, config, out))
    return top, jobs


def check_all(
    configs: Sequence[RunConfig], supernodes: int | None = None, *, quiet: bool = False
) -> None:
    """Check all runs before the first makes a folder, and describe the data."""
    from flower_graph.apps.cli.check import short_form
    from flower_graph.apps.run import check_run

    with withheld("flower_graph.data", logging.INFO) as notes:  # a refusal prints its reason only
        for config in configs:
            check_run(config, supernodes)
    facts, warnings = short_form(configs[0]) if configs else ([], [])
    for note in notes:
        kind = warnings if note.levelno >= logging.WARNING else facts
        kind.append(re.sub("^data .*?: ", "", note.getMessage()))
    if shown := [*([] if quiet else facts), *(f"warning: {warning}" for warning in warnings)]:
        say(*(f"data  {line}" for line in shown), to=sys.stderr)


def _run(job: Job, args: argparse.Namespace, check: Callable[[], None]) -> dict[str, object]:
    from flower_graph.apps.run import run, supernodes_of

    config, name = job.config, job.name
    resume = args.resume is not None and files.holds_something(job.out)
    printer = RoundPrinter(config, args, job.out)
    with closing(printer):
        if args.engine != "flwr":
            return run(
                config,
                job.out,
                supernodes=args.supernodes,
                resume=resume,
                progress=printer,
                on_wait=printer.wait,
                title=title_of(name),
            )
        from flower_graph.apps.cli.launch import flwr_run

        def meanwhile() -> None:
            check()
            printer.wait(ENGINE_STARTS)  # after what the check may have to say

        # Absolute paths: Flower runs the app in another working directory. A JSON string is a YAML
        # string, whatever signs the path has.
        given = asdict(config.data).items()
        paths = [f"data.{key}={json.dumps(value)}" for key, value in given if str(value)[:1] == "/"]
        return flwr_run(
            str(Path(name).absolute()) if is_file_name(name) else name,
            [*job.overrides, *paths],
            job.out,
            supernodes=supernodes_of(config, args.supernodes, usual=2),
            seed=config.seed,
            resume=resume,
            echo=printer.read_line,
            ray_address=args.ray_address,
            meanwhile=meanwhile,
        )


def _done(job: Job) -> dict[str, object] | None:
    if not (job.out / RESULT).exists():
        return None
    from flower_graph.method.run import Run  # loads torch

    result = Run(job.out, is_one=True).result
    if result.get("config") != to_dict(job.config):
        return None
    with reading(job.out / RESULT, OutputError, "not the result of a run"):
        describe_result("", result, job.out)  # as it will be
    return result


class RoundPrinter:
    """Shows the rounds of a run, as the command's options say, and calls its ``on_round``.

    A terminal or notebook gets a bar, others a line for a round on stderr, and with ``--json`` an
    object on stdout.
    """

    def __init__(self, config: RunConfig, args: argparse.Namespace, out: Path) -> None:
        self._config, self._args, self._metrics = config, args, out / "metrics.jsonl"
        self._read = 0  # bytes of that file, of which Flower's engine says when to read on
        self._bar: Any = None

    def __call__(self, report: RoundReport) -> None:
        args, total = self._args, self._config.rounds
        if args.json:
            record = files.plain({"seed": self._config.seed, **report.to_record()})
            print(json.dumps(record), flush=True)
        elif not args.quiet:
            # The last round has a line, and those with something unusual
            is_told = report.skipped or report.rejected or report.round >= total
            if sys.stderr.isatty() or "ipykernel" in sys.modules:  # a notebook shows a bar too
                self._advance(report)
            elif is_told or report.round % args.log_every == 0:
                say(format_round(report, total, method_of(self._config).clients), to=sys.stderr)
        if (on_round := getattr(args, "on_round", None)) is not None:
            on_round(report)

    def wait(self, work: str) -> None:
        """Say what takes long."""
        if self._bar is not None:
            self._bar.write(printable(work), file=sys.stderr)
        elif not self._args.quiet:
            say(work, to=sys.stderr)

    def read_line(self, line: str) -> None:
        """Read a line of Flower's engine; show rounds in the usual way, and new messages."""
        if (match := ROUND.match(line)) is None:
            if not ROUTINE.search(line):
                self.wait(line)
            return
        with reading(self._metrics, OutputError), self._metrics.open("rb") as file:
            file.seek(self._read)
            reports = [RoundReport.from_record(json.loads(one)) for one in file]
            self._read = file.tell()
        for report in reports:
            if report.round == int(match[1]):  # others were shown before the run was resumed
                return self(report)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _advance(self, report: RoundReport) -> None:
        metric, seed = self._config.metrics[0], self._config.seed
        if self._bar is None:
            from tqdm.auto import tqdm

            # A resumed run does not start at round 1; its speed counts from where it starts.
            size = {"total": self._config.rounds, "initial": report.round - 1}
            self._bar = tqdm(**size, desc=f"seed {seed}", unit="round")
        called = "" if metric == ACCURACY else f"{metric} "
        val, test = (report.score(metric, role) for role in ("val", "test"))
        figures = f"loss {report.loss:.4g}, {called}val {val:.3f}, test {test:.3f}"
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(report.round - self._bar.n)


# An old run in the folder -------------------------------------------------------------------------


def runs_to_clear(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder: itself, or one for each seed, or none.

    ``OutputError`` if the folder is no run's, or contains a file that no run writes.
    """
    if not folder.is_dir():
        return []
    seeds = [*seed_folders(folder).values()]
    runs = seeds or [folder]
    written = {folder: [SUMMARY, *(one.name for one in seeds)]} | dict.fromkeys(runs, WRITTEN)
    foreign = [run.name for run in runs if run.is_symlink() or not _is_run(run)]
    foreign += [
        path.name
        for place, names in written.items()
        for path in place.iterdir()
        if not any(fnmatch(path.name, name) for name in names)
    ]
    if foreign:
        raise OutputError(f"output folder {folder}: no run wrote {foreign[0]}; choose another")
    return runs


def _is_run(folder: Path) -> bool:
    with reading(file := folder / CONFIG, OutputError):
        return not files.holds_something(folder) or (
            is_of_run(str(file)) and read_text(file, MOST_SETTINGS).startswith(RUN_OF)
        )


def clear_runs(folder: Path) -> None:
    """Delete the runs in a folder, but not the folder; raises as ``runs_to_clear`` does."""
    for run in runs_to_clear(folder):
        with files.saying(run):
            with files.folder_lock(run):
                for path in run.iterdir():
                    is_folder = path.is_dir() and not path.is_symlink()
                    files.remove_folder(path) if is_folder else files.remove(path)
            if run != folder:
                files.remove_empty(run)
    files.remove(folder / SUMMARY)
