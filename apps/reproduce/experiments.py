"""Runs the experiments of a paper's table on all cores, and keeps what they gave in one file."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from flower_graph.apps.parallel import in_parallel, loaded, settings_of, time_left
from flower_graph.apps.reproduce.templates import one_of
from flower_graph.apps.run import simulate_whole
from flower_graph.config.common import RunConfig
from flower_graph.data.sources.names import file_path
from flower_graph.engine.graph_batch import Epoch
from flower_graph.engine.machine import peak_memory
from flower_graph.errors import OutputError
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport, merit
from flower_graph.storage.files import plain, write_packed, write_text
from flower_graph.storage.reading import Tree, read_json, read_packed, reading
from flower_graph.storage.writing import make_folder, remove, remove_empty
from flower_graph.wire.keys import ACCURACY, ROLES

RUNS = "runs.json.xz"  # what `reproduce` keeps: rows, choices and runs
SHORT, EVERY = 50, 10  # rounds of a run whose curves are kept whole; of longer ones each tenth
AXES = ("rounds", "steps", "MiB")  # What a client may be given: rounds, local steps, bytes to send


class Measured(Protocol):
    """A round of a method or of a baseline, as far as both have it."""

    @property
    def cross_entropy(self) -> float:
        """The mean loss."""

    @property
    def val_accuracy(self) -> float:
        """The accuracy by which the best round is chosen."""

    @property
    def test_accuracy(self) -> float:
        """The accuracy that is reported."""


# What stands in the place of a federation: the name of one of the figures that a run's accuracies
# are held against, or a function that trains the config's network in one piece and gives, for every
# epoch, what it measured. The function is a
# module's, since workers import it by its name.
InPlace = str | Callable[[object], Sequence[Measured]]


@dataclass(frozen=True)
class Experiment:
    """One method on one data set with one model."""

    data: str  # Names as the table has them
    model: str
    method: str
    config: str  # Shipped config to start from
    overrides: tuple[str, ...]  # Settings laid over it
    centralised: bool = False  # Whether the network is trained in one piece


class Run(NamedTuple):
    """One run of an experiment."""

    experiment: Experiment
    seed: int
    rounds: int


@dataclass
class Curves:
    """The results of one run, round by round; runs of older versions lack some fields."""

    cross_entropy: list[float]
    val_accuracy: list[float]
    test_accuracy: list[float]
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds_per_round: float = math.nan  # median, so that set-up in the first round is not in it
    run_seconds: float = math.nan  # all rounds and what goes before them
    # What the run says of learnt graphs, in the best round by validation.
    structure: dict[str, float] = field(default_factory=dict)
    # How near clients' aligned embeddings are, by measure; NaN in rounds that did not measure it.
    alignment: dict[str, list[float]] = field(default_factory=dict)
    # Accuracy after the last round by classifier, role and client.
    judged: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    # What a client has spent after each round, the mean over all: local steps, and bytes sent
    steps: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    left_out: int = 0  # The most clients that a round went without
    # Metrics other than the accuracy, by name, role and round; and the one that decides
    scores: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    metric: str = ACCURACY

    @property
    def validation(self) -> list[float]:
        """What decides, after each round: the validation accuracy, or that of another metric."""
        return self.val_accuracy if self.metric == ACCURACY else self.scores[self.metric]["val"]

    @property
    def best_round(self) -> int:
        """Index of the first round with the best validation; NaN is never best."""
        value = self._merits
        return value.index(max(value))

    @property
    def _merits(self) -> list[float]:
        """What decides, so that more is better; NaN is worst."""
        merits = [merit(self.metric, one) for one in self.validation]
        return [-math.inf if math.isnan(one) else one for one in merits]

    @property
    def best_val(self) -> float:
        """Best validation accuracy, or that of another metric if that decides."""
        return self.validation[self.best_round]

    @property
    def test_at_best_val(self) -> float:
        """Test accuracy in the round of the best validation."""
        return self.test_accuracy[self.best_round]

    @property
    def decided(self) -> tuple[str, float]:
        """The metric that decides, and what it is on the test nodes in the best round."""
        value = self.score(self.metric, "test", self.best_round)
        return self.metric, self.test_at_best_val if value is None else value

    def score(self, metric: str, role: str, place: int) -> float | None:
        """Return a metric other than the accuracy in one round, if the run reports it."""
        values = self.scores.get(metric, {}).get(role)
        return None if values is None else values[place]

    def ended(self, patience: int) -> bool:
        """Return whether validation had stopped improving."""
        return len(self.val_accuracy) > self.best_round + patience

    @property
    def best_so_far(self) -> list[float]:
        """Test accuracy after each round, at the best validation accuracy until then."""
        best, result, merits = 0, [], self._merits
        for index, value in enumerate(merits):
            best = index if value > merits[best] else best
            result.append(self.test_accuracy[best])
        return result

    def spent(self, axis: str) -> Sequence[float]:
        """Return what was spent after each round; empty for runs of older versions."""
        rounds = range(1, len(self.val_accuracy) + 1)
        amounts = rounds, self.steps, [one / 2**20 for one in self.up]
        return dict(zip(AXES, amounts, strict=True))[axis]


def thinned(curves: Curves) -> Curves:
    """Leave out rounds of long runs, as NaN: no figure is of them, and pictures do without.

    What stays: rounds that validate better than all before, the first ten, every tenth, the last.
    """
    best, rounds = -math.inf, len(curves.val_accuracy)
    kept = {rounds - 1, *range(rounds if rounds <= SHORT else EVERY)}
    kept |= {*range(EVERY - 1, rounds, EVERY)}
    for place, value in enumerate(curves._merits):
        if value > best:
            kept.add(place)
        best = max(best, value)

    def thin(values: Sequence[float]) -> list[float]:
        return [one if place in kept else math.nan for place, one in enumerate(values)]

    # No figure is of training nodes
    scores = {
        name: {role: thin(values) for role, values in by_role.items() if role != "train"}
        for name, by_role in curves.scores.items()
    }
    loss = [float(f"{one:.3g}") for one in thin(curves.cross_entropy)]  # for pictures alone
    val, test = thin(curves.val_accuracy), thin(curves.test_accuracy)
    return replace(curves, scores=scores, cross_entropy=loss, val_accuracy=val, test_accuracy=test)


def plain_curves(reports: Sequence[Measured]) -> Curves:
    """Make curves of loss and accuracies only."""
    return Curves(
        [report.cross_entropy for report in reports],
        [report.val_accuracy for report in reports],
        [report.test_accuracy for report in reports],
    )


def curves_of(
    reports: Sequence[RoundReport], final: Tree, clients: int, local_steps: float
) -> Curves:
    """Make curves of a run's rounds, at least one, and of its final figures."""
    curves = plain_curves(reports)
    curves.bytes_up = dict(reports[-1].bytes.get("up", {}))
    curves.seconds_per_round = median(report.seconds for report in reports)
    curves.structure = dict(reports[curves.best_round].structure)
    names = dict.fromkeys(name for report in reports for name in report.alignment)
    curves.alignment = {
        name: [report.alignment.get(name, math.nan) for report in reports] for name in names
    }
    curves.judged = dict(final.get("judged", {}))
    curves.scores = {
        name: {role: [report.score(name, role) for report in reports] for role in ROLES}
        for name in reports[-1].scores
    }
    asked = accumulate(report.asked for report in reports)
    curves.steps = [local_steps * count / clients for count in asked]
    curves.up = [sum(report.bytes.get("up", {}).values()) / clients for report in reports]
    curves.left_out = max(report.asked - report.answered for report in reports)
    return curves


def steps_of(config: RunConfig) -> tuple[int, float]:
    """Return the number of clients, and the mean local steps of a client in a round."""
    method = method_of(config)
    return method.num_clients(config), method.local_steps(config)


def read_curves(stored: Mapping[str, object]) -> Curves:
    """Read the curves of a kept run; null stands for a number that was not finite."""

    def number(value: object) -> Any:
        if isinstance(value, list):
            return [number(item) for item in value]
        if isinstance(value, dict):
            return {key: number(item) for key, item in value.items()}
        return math.nan if value is None else value

    names = {one.name for one in fields(Curves)}  # An older version had more
    read: Tree = {key: number(value) for key, value in stored.items() if key in names}
    return Curves(**read)


Runs = dict[Experiment, dict[int, Curves]]


class Store:
    """The runs of an output folder: one file of all, and beside it one of each that came since.

    A run that ends is a file in ``runs`` until ``write`` puts it into the one file, so that a
    ``reproduce`` that is stopped loses no run.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.fresh = out, out / "runs"
        self._runs: dict[Run, Tree] = {}
        self._taken: list[Path] = []
        if (path := out / RUNS).exists():
            with reading(path, OutputError, "not what `reproduce` keeps"):
                self._runs = {_run_of(one): one for one in read_packed(path)["runs"]}
        self.collect()

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def collect(self) -> None:
        """Read the files of runs that came since."""
        for path in sorted(self.fresh.glob("*.json")):
            with reading(path, OutputError, "not a kept run"):
                stored = read_json(path)
                curves = _short(asdict(thinned(read_curves(stored["curves"]))))
                self._runs[_run_of(stored)] = stored | {"curves": curves}
            self._taken.append(path)

    def write(self, rows: Sequence[Tree], choices: Sequence[Tree]) -> None:
        """Write the file, with what was made of the runs; remove those that came since."""
        runs = sorted(self._runs.values(), key=lambda one: json.dumps([*map(one.get, WHICH)]))
        write_packed(self.out / RUNS, {"rows": rows, "choices": choices, "runs": runs})
        for path in self._taken:
            remove(path)
        self._taken = []
        remove_empty(self.fresh)

    def has(self, run: Run) -> bool:
        """Return whether a run was kept with the settings of today's config."""
        if run not in self._runs:
            return False
        return is_same(self._runs[run].get("settings", {}), _settings(config_of(run)))

    def curves(self, run: Run) -> Curves:
        """Return the curves of a run that is there."""
        return read_curves(self._runs[run]["curves"])


WHICH = ("cell", "seed", "rounds")  # what tells runs apart


def _run_of(stored: Tree) -> Run:
    cell = stored["cell"]
    one = Experiment(**{**cell, "overrides": tuple(cell["overrides"])})
    return Run(one, stored["seed"], stored["rounds"])


def run_stages(
    stages: Iterable[Sequence[Run]],
    store: Store,
    after: Callable[[], None],
    in_place: Mapping[Experiment, InPlace] | None = None,
) -> None:
    """Run one stage after the other; call ``after`` at the end of each."""
    # A run may take less time than a fresh process needs for its imports.
    is_written = False
    for stage in stages:
        if runs := left_to_run(stage, store):
            is_written = True
            make_folder(store.fresh)
            try:
                _run_stage(runs, store.fresh, in_place or {})
            finally:
                store.collect()
                after()
    if not is_written:
        after()


def _run_stage(runs: Sequence[Run], folder: Path, in_place: Mapping[Experiment, InPlace]) -> None:
    """Do some runs, as many at a time as there are cores, and print the result of each."""
    number = 0
    groups = [(group, [in_place.get(run.experiment) for run in group]) for group in _together(runs)]
    for (group, _), figures, left in in_parallel(partial(_run, folder=folder), groups):
        for run, (metric, value) in zip(group, figures, strict=True):
            number += 1
            reached = f"test {metric} {value:.3f} at the best validation"
            print(_progress(run, reached, number, len(runs), left), flush=True)


def _together(runs: Sequence[Run]) -> list[list[Run]]:
    """Group the runs without a federation that have the same settings: they share their work."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        one = run.experiment
        is_shared = one.centralised
        key = (one.config, one.overrides, run.seed, run.rounds) if is_shared else run
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def _progress(run: Run, reached: str, number: int, count: int, left: float) -> str:
    one = run.experiment
    return (
        f"{number}/{count}  {one.data} {one.model} {one.method}, seed {run.seed}: {reached}; "
        f"the others of this table and seed take about {time_left(left)}"
    )


def kept_runs(runs: Sequence[Run], store: Store) -> Runs:
    """Read the runs that were done before."""
    result: Runs = {}
    for run in runs:
        if store.has(run):
            with reading(store.out / RUNS, OutputError, "not a kept run"):
                result.setdefault(run.experiment, {})[run.seed] = store.curves(run)
    return result


def left_to_run(runs: Sequence[Run], store: Store) -> list[Run]:
    """List the runs, each once, that were not kept with the same settings."""
    return [run for run in dict.fromkeys(runs) if not store.has(run)]


def _path(folder: Path, run: Run) -> Path:
    text = json.dumps([asdict(run.experiment), run.seed, run.rounds])
    return folder / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"


def _settings(config: RunConfig) -> dict[str, object]:
    """Return a run's settings; of a graph of one's own the file's name, wherever it lies."""
    path = file_path(config.data.name)
    return settings_of(config) | ({"data.name": path.name} if path else {})


def is_same(kept: Mapping[str, object], now: Mapping[str, object]) -> bool:
    """Return whether a kept run had today's settings."""
    # A setting that the run's file does not have is newer than the run: it changed nothing then.
    return all(now.get(key) == value for key, value in kept.items())


def config_of(run: Run) -> RunConfig:
    """Load a run's config."""
    experiment, seed, rounds = run
    config = loaded(experiment.config, experiment.overrides)
    config = replace(config, seed=seed, rounds=rounds)
    config.validate()
    return config


def costs(config: RunConfig) -> list[tuple[dict[str, object], dict[str, float]]]:
    """Measure time and memory of a config's rounds, in a process of its own."""
    seconds = [report.seconds for report in simulate_whole(config)[0]]
    return [({}, {"seconds-per-round": median(seconds), "peak-mib": peak_memory() / 2**20})]


def _short(value: object) -> object:
    """Round numbers to six digits, to keep the files of the runs small."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _run(
    runs: Sequence[Run], in_place: Sequence[InPlace | None], folder: Path
) -> list[tuple[str, float]]:
    """Do runs with the same config and seed, keep them, and return what each reached."""
    config = config_of(runs[0])
    baselines = cache(lambda: method_of(config).baselines(config))
    reached = []
    for run, how in zip(runs, in_place, strict=True):
        started = time.perf_counter()
        if how is None:
            assert not run.experiment.centralised, "somebody has to train it"
            curves = curves_of(*simulate_whole(config), *steps_of(config))
            curves.metric = config.metrics[0]
        elif isinstance(how, str):
            curves = plain_curves([_baseline(how, baselines())])
            scores = baselines()[how].get("scores", {})  # of links
            curves.scores = {n: {role: [v] for role, v in s.items()} for n, s in scores.items()}
            curves.metric = config.metrics[0] if config.metrics[0] in scores else ACCURACY
        else:
            curves = plain_curves(how(config))
            curves.seconds_per_round = (time.perf_counter() - started) / run.rounds
        curves.run_seconds = time.perf_counter() - started
        stored = {"cell": asdict(run.experiment), "seed": run.seed, "rounds": run.rounds}
        stored |= {"settings": _settings(config), "curves": _short(asdict(curves))}
        write_text(_path(folder, run), json.dumps(plain(stored)) + "\n")
        reached.append(curves.decided)
    return reached


def _baseline(name: str, figures: Mapping[str, Mapping[str, float]]) -> Epoch:
    """Return the accuracies of one baseline as an epoch."""
    one_of("baseline", name, [*figures])
    return Epoch(math.nan, figures[name]["val"], figures[name]["test"])
