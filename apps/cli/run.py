"""The command ``flower-graph run``: one run, or one for each seed, and its summary."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import KW_ONLY, asdict, dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from flower_graph.apps.cli.say import say, withheld
from flower_graph.config.common import CHECKPOINTS, RunConfig
from flower_graph.config.foreign import CONFIG, DATA, RUN_OF, Trust, is_of_run, seed_folders
from flower_graph.errors import CheckpointError, ConfigError, OutputError, printable
from flower_graph.method.load import is_file_name, load_config, title_of, to_dict
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport, format_round
from flower_graph.report.result import describe_result, summarise
from flower_graph.storage.files import (
    FolderLock,
    holds_something,
    new_folder,
    plain,
    remove_all_empty,
)
from flower_graph.storage.reading import MOST_SETTINGS, read_json, read_text, reading
from flower_graph.storage.writing import (
    make_folder,
    named,
    remove,
    remove_empty,
    remove_folder,
    saying,
)
from flower_graph.wire.keys import ACCURACY

# The files of a run, finished and half written
WRITTEN = (
    *(CONFIG, DATA, "metrics.jsonl", "result.json", "weights.safetensors", "outputs.json"),
    *("predictions.*", "embeddings.npz", "links.npz", "model.*", "models.*", "measured.bin"),
    *("clients.csv", "curves.csv", "*.png", "flower.log", "trackers.json", ".*.[0-9]*"),
    *(".running", ".probe", ".partial-*", CHECKPOINTS, "clients", "embeddings", "rows"),
    *("snapshots", "tensorboard", "wandb"),
)
SUMMARY = "summary.json"  # of several seeds
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
    try:
        top, jobs, figures = run_all(args)
    except KeyboardInterrupt as stop:
        say(*getattr(stop, "__notes__", ["interrupted"]), to=sys.stderr)
        return 130
    method = method_of(jobs[0].config)
    called = (method.client, method.clients)
    if not (args.json and args.quiet):
        text = describe_result(title_of(jobs[0].name), figures, top, called)
        say(text, to=sys.stderr if args.json else sys.stdout)
    return 0


def run_all(args: argparse.Namespace) -> tuple[Path, list[Job], dict[str, object]]:
    """Do all runs of a command; return the folder, the jobs, and the result or its summary.

    ``args`` are the options of ``run``, and ``on_round``, which only Python can give.
    """
    if args.supernodes is not None and args.supernodes < 1:
        raise ConfigError(f"--supernodes {args.supernodes}: at least 1 is needed")
    if args.ray_address is not None and args.engine != "flwr":
        raise ConfigError(f"--ray-address {args.ray_address}: needs --engine flwr")
    if args.log_every < 1:
        raise ConfigError(f"--log-every {args.log_every}: at least 1 is needed")
    if args.overwrite and args.resume is not None:
        raise ConfigError("--overwrite: a run that goes on (--resume) is kept")
    top, jobs = _plan(args)
    if args.overwrite:
        runs_to_clear(top)  # another folder is told before data are read
        if is_file_name(jobs[0].name) and top in Path(jobs[0].name).absolute().parents:
            raise ConfigError(f"CONFIG {jobs[0].name}: --overwrite would delete it; copy it first")
    done = {job.config.seed: _done(job) for job in jobs if args.resume is not None}
    may_exist = args.resume is not None or args.overwrite
    with new_folder(top, may_exist=may_exist):
        pass  # one that cannot be written is told before data are read
    todo = [job for job in jobs if not done.get(job.config.seed)]
    check = partial(check_all, todo, args.supernodes, quiet=args.quiet)
    # Flower's engine takes as long to start, and is ended if jobs are refused.
    is_beside = args.engine == "flwr" and not args.overwrite
    if not is_beside:
        check()
    if args.overwrite:
        clear_runs(top)
    results: list[dict[str, object]] = []
    with _folders(top, jobs, may_exist):
        for job in jobs:
            try:
                first = check if is_beside and todo[:1] == [job] else None
                results.append(done.get(job.config.seed) or _run(job, args, first))
            except KeyboardInterrupt as stop:
                stop.add_note(_interrupted(job, top))
                raise
    return top, jobs, summarise(top, results) if len(jobs) > 1 else results[0]


def default_folder(name: str) -> Path:
    """Return a new folder's path for the outputs of a config: ``runs/<config>-<UTC time>``."""
    stem = Path(name).stem if is_file_name(name) else name.replace("/", "-")
    folder = Path("runs") / f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    # Python can do two runs within a second.
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(one for one in chain([folder], others) if not one.exists())


def _plan(args: argparse.Namespace) -> tuple[Path, list[Job]]:
    """Return the output folder and the runs; all settings are checked before the first run."""
    name, overrides, seeds = args.config, list(args.overrides), args.seeds
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
        seeds = seeds or ([*seed_folders(args.resume)] or None)
        files = [args.resume / CONFIG, *sorted(args.resume.glob(f"seed-*/{CONFIG}"))]
        name = name or next((str(path) for path in files if path.is_file()), None)
        if name is None:
            raise CheckpointError(f"--resume {args.resume}: no run to resume; no {CONFIG} in it")
    if name is None:
        raise ConfigError("CONFIG: missing; name one, such as quickstart (see `flower-graph list`)")
    of_run, trust = args.config is None or name != args.config, Trust(code=args.trust_code)
    load = partial(load_config, name, of_run=of_run, trust=trust)
    top = named(args.resume or args.out or default_folder(name))
    jobs, asked = list[Job](), [*seeds] if seeds else [None]
    for seed in asked:
        seeded = overrides if seed is None else [*overrides, f"seed={seed}"]
        out = top / f"seed-{seed}" if len(asked) > 1 else top
        jobs.append(Job(name, seeded, load(seeded), out))
    return top, jobs


@contextmanager
def _folders(top: Path, jobs: Sequence[Job], may_exist: bool) -> Iterator[None]:
    """Make the folders of several runs; remove them if no run completed a round."""
    if len(jobs) == 1:
        yield
        return
    with new_folder(top, may_exist=may_exist):
        for job in jobs:
            # All at once: a resumed command finds in the folders which seeds it was to run.
            make_folder(job.out)
        try:
            yield
        finally:
            if not any(holds_something(job.out) for job in jobs):
                remove_all_empty([job.out for job in jobs])


def check_all(jobs: Sequence[Job], supernodes: int | None = None, *, quiet: bool = False) -> None:
    """Check all jobs before the first makes a folder, and describe the data."""
    from flower_graph.apps.cli.check import short_form
    from flower_graph.apps.run import check_run

    with withheld("flower_graph.data", logging.INFO) as notes:  # a refusal prints its reason only
        for job in jobs:
            check_run(job.config, supernodes)
    facts, warnings = short_form(jobs[0].config) if jobs else ([], [])
    for note in notes:
        kind = warnings if note.levelno >= logging.WARNING else facts
        kind.append(re.sub("^data .*?: ", "", note.getMessage()))
    if shown := [*([] if quiet else facts), *(f"warning: {warning}" for warning in warnings)]:
        say(*(f"data  {line}" for line in shown), to=sys.stderr)


def _run(job: Job, args: argparse.Namespace, check: Callable[[], None] | None) -> dict[str, object]:
    from flower_graph.apps.run import usual_supernodes

    method, is_file = method_of(job.config), is_file_name(job.name)
    supernodes = args.supernodes or usual_supernodes(job.config)
    resume = args.resume is not None and job.out.is_dir() and holds_something(job.out)
    printer = RoundPrinter(
        job.config.rounds,
        seed=job.config.seed,
        clients=method.clients,
        metric=job.config.metrics[0],
        quiet=args.quiet,
        log_every=args.log_every,
        as_json=args.json,
    )

    def on_round(report: RoundReport) -> None:
        printer(report)
        if args.on_round is not None:
            args.on_round(report)

    def meanwhile() -> None:
        if check is not None:
            check()
        printer.wait(ENGINE_STARTS)  # after what the check may have to say

    with closing(printer):
        if args.engine == "flwr":
            from flower_graph.apps.cli.launch import flwr_run

            # Absolute paths: Flower runs the app in another working directory. A JSON string is a
            # YAML string, whatever signs the path has.
            given = asdict(job.config.data).items()
            paths = [
                f"data.{key}={json.dumps(value)}" for key, value in given if str(value)[:1] == "/"
            ]
            return flwr_run(
                str(Path(job.name).absolute()) if is_file else job.name,
                [*job.overrides, *paths],
                job.out,
                supernodes=supernodes or 2,
                seed=job.config.seed,
                resume=resume,
                echo=EngineLines(job.out, printer, on_round),
                ray_address=args.ray_address,
                meanwhile=meanwhile,
            )
        from flower_graph.apps.run import run

        return run(
            job.config,
            job.out,
            supernodes=supernodes or 1,
            resume=resume,
            progress=on_round,
            on_wait=printer.wait,
            title=title_of(job.name),
        )


def _done(job: Job) -> dict[str, object] | None:
    path = job.out / "result.json"
    if not path.exists():
        return None
    with reading(path, OutputError, "not the result of a run"):
        result: dict[str, object] = read_json(path)
        if not isinstance(result, dict):
            raise ValueError("it is no mapping")
        if result.get("config") != to_dict(job.config):
            return None
        describe_result("", result, job.out)  # as it will be
    return result


def _interrupted(job: Job, top: Path) -> str:
    # As storage.checkpoint lays them out; to import that (and torch) now would take seconds.
    result = sorted(path.parent for path in job.out.rglob("round-*/server.safetensors"))
    if not (job.out / "metrics.jsonl").exists():
        return "interrupted before the end of the first round; nothing is kept of it"
    if not result:
        every = job.config.checkpoint_every
        return f"interrupted; no checkpoint (checkpoint_every={every}); rounds so far: {job.out}"
    again = f"flower-graph run --resume {shlex.quote(str(top))}"
    return f"interrupted; the last checkpoint is {result[-1]}; go on with: {again}"


# Rounds as they come -----------------------------------------------------------------------------


@dataclass
class RoundPrinter:
    """Shows rounds: as a bar in a terminal or notebook, else as one line each on stderr."""

    total: int
    _: KW_ONLY
    seed: int
    clients: str = "clients"  # the method's word
    metric: str = ACCURACY
    quiet: bool = False
    log_every: int = 1  # rounds between two lines; the last and rounds with refusals have one
    as_json: bool = False  # an object on stdout for each round, and nothing else for it
    _bar: Any = None

    def __call__(self, report: RoundReport) -> None:
        if self.as_json:
            record = plain({"seed": self.seed, **report.to_record()})
            print(json.dumps(record), flush=True)
        elif self.quiet:
            return
        elif sys.stderr.isatty() or "ipykernel" in sys.modules:  # a notebook shows a bar too
            self._advance(report)
        elif not (report.round % self.log_every and report.round < self.total) or (
            report.skipped or report.rejected
        ):
            say(format_round(report, self.total, self.clients), to=sys.stderr)

    def wait(self, work: str) -> None:
        if self._bar is not None:
            self._bar.write(printable(work), file=sys.stderr)
        elif not self.quiet:
            say(work, to=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _advance(self, report: RoundReport) -> None:
        if self._bar is None:
            from tqdm.auto import tqdm

            # A resumed run does not start at round 1; its speed counts from where it starts.
            before, label = report.round - 1, f"seed {self.seed}"
            self._bar = tqdm(total=self.total, initial=before, desc=label, unit="round")
        named = "" if self.metric == ACCURACY else f"{self.metric} "
        val, test = (report.score(self.metric, role) for role in ("val", "test"))
        figures = f"loss {report.loss:.4g}, {named}val {val:.3f}, test {test:.3f}"
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.update(report.round - self._bar.n)


class EngineLines:
    """Reads the lines of Flower's engine; shows rounds in the usual way, and new messages."""

    def __init__(self, out: Path, printer: RoundPrinter, on_round: Callable[[RoundReport], None]):
        self._metrics, self._printer, self._on_round = out / "metrics.jsonl", printer, on_round
        self._read = 0  # bytes of the file

    def __call__(self, line: str) -> None:
        if (match := ROUND.match(line)) is not None:
            self._show(int(match[1]))
        elif not ROUTINE.search(line):
            self._printer.wait(line)

    def _show(self, number: int) -> None:
        with reading(self._metrics, OutputError), self._metrics.open("rb") as file:
            file.seek(self._read)
            lines = file.readlines()
            self._read = file.tell()
            reports = (RoundReport.from_record(json.loads(line)) for line in lines)
            # A resumed run's file begins with rounds that were shown before.
            report = next((one for one in reports if one.round == number), None)
        if report is not None:
            self._on_round(report)


# An old run in the folder -------------------------------------------------------------------------


def runs_to_clear(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder: itself, or one for each seed, or none.

    ``OutputError`` if the folder is no run's, or contains a file that no run writes.
    """
    if not folder.is_dir():
        return []
    seeds = sorted(one for one in folder.glob("seed-*") if re.fullmatch(r"seed-\d+", one.name))
    for run in seeds or [folder]:
        if run.is_symlink() or not run.is_dir() or (holds_something(run) and not _is_run(run)):
            raise _kept(folder, f"{run.name} is not a run's")
        _refuse_others(run, WRITTEN)
    if seeds:
        _refuse_others(folder, [SUMMARY, *(one.name for one in seeds)])
    return seeds or [folder]


def clear_runs(folder: Path) -> None:
    """Delete the runs in a folder, but not the folder; raises as ``runs_to_clear`` does."""
    for run in runs_to_clear(folder):
        with saying(run):
            lock = FolderLock(run)
            try:
                for path in run.iterdir():
                    is_folder = path.is_dir() and not path.is_symlink()
                    remove_folder(path) if is_folder else remove(path)
            finally:
                lock.release()
            if run != folder:
                remove_empty(run)
    remove(folder / SUMMARY)


def _is_run(folder: Path) -> bool:
    file = folder / CONFIG
    with reading(file, OutputError):
        return is_of_run(str(file)) and read_text(file, MOST_SETTINGS).startswith(RUN_OF)


def _refuse_others(folder: Path, known: Sequence[str]) -> None:
    for path in folder.iterdir():
        if not any(fnmatch(path.name, name) for name in known):
            raise _kept(folder, f"no run writes {path.name!r}")


def _kept(folder: Path, why: str) -> OutputError:
    return OutputError(f"output folder {folder}: {why}, so it is not overwritten; choose another")
