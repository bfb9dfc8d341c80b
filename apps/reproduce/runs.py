"""Runs the experiments of a paper's tables on all cores, and keeps what they gave in one file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from flower_graph.apps.parallel import in_parallel, loaded, settings_of, time_left
from flower_graph.apps.reproduce.table import Line, function
from flower_graph.apps.run import simulate_whole
from flower_graph.config.common import RunConfig
from flower_graph.data.folders.client_folder import Clients
from flower_graph.data.sources.names import file_path
from flower_graph.engine.graph_batch import Epoch
from flower_graph.engine.machine import peak_memory
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport, merit
from flower_graph.storage.files import append_line, write_packed
from flower_graph.storage.reading import Tree, read_lines, read_packed, reading
from flower_graph.storage.writing import remove
from flower_graph.wire.keys import ACCURACY, ROLES

RUNS = "runs.json.xz"  # what `reproduce` keeps: rows, choices and runs
SHORT, EVERY = 50, 10  # rounds of a run whose curves are kept whole; of longer ones each tenth
AXES = ("rounds", "steps", "MiB")  # What a client may be given: rounds, local steps, bytes to send


class Run(NamedTuple):
    """A config with settings and a seed, and what trains it; see ``Line``."""

    config: str
    overrides: tuple[str, ...]
    seed: int
    rounds: int | None = None  # those of the config
    trained: str = ""

    @property
    def settings(self) -> RunConfig:
        return _with_seed(self.config, self.overrides, self.seed, self.rounds)

    @property
    def key(self) -> str:
        """What tells runs apart: other words may say the same settings."""
        return json.dumps([settings_kept(self.settings), self.config, self.trained])


@cache
def _with_seed(config: str, overrides: tuple[str, ...], seed: int, rounds: int | None) -> RunConfig:
    settings = loaded(config, overrides)
    settings = replace(settings, seed=seed, rounds=rounds or settings.rounds)
    settings.validate()
    return settings


@dataclass
class Curves:
    """The results of one run, round by round; runs of older versions lack some fields."""

    cross_entropy: list[float]
    val_accuracy: list[float]
    test_accuracy: list[float]
    bytes_up: dict[str, int] = field(default_factory=dict)
    seconds_per_round: float = math.nan  # median, so that set-up in the first round is not in it
    run_seconds: float = math.nan  # all rounds and what goes before them
    # What the run says of learnt graphs, in the best round by validation
    structure: dict[str, float] = field(default_factory=dict)
    # How near clients' aligned embeddings are, by measure; NaN in rounds that did not measure it
    alignment: dict[str, list[float]] = field(default_factory=dict)
    # Accuracy after the last round by classifier, role and client
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
        """The validation accuracy after each round, or that of another metric if that decides."""
        return self.val_accuracy if self.metric == ACCURACY else self.scores[self.metric]["val"]

    @property
    def merits(self) -> list[float]:
        """What decides after each round, so that more is better; NaN is worst."""
        merits = [merit(self.metric, value) for value in self.validation]
        return [-math.inf if math.isnan(value) else value for value in merits]

    @property
    def best_round(self) -> int:
        """Index of the first round with the best validation."""
        return self.merits.index(max(self.merits))

    def score(self, metric: str, role: str) -> float | None:
        """Return a metric in the round of the best validation, if the run reports it."""
        accuracy = {"val": self.val_accuracy, "test": self.test_accuracy}
        values = ({ACCURACY: accuracy} | self.scores).get(metric, {}).get(role)
        return None if values is None else values[self.best_round]

    @property
    def best_val(self) -> float:
        return self.validation[self.best_round]

    @property
    def test_at_best_val(self) -> float:
        return self.test_accuracy[self.best_round]

    def ended(self, patience: int) -> bool:
        """Return whether validation had stopped improving."""
        return len(self.val_accuracy) > self.best_round + patience

    @property
    def best_so_far(self) -> list[float]:
        """Test accuracy after each round, at the best validation accuracy until then."""
        merits = self.merits
        return [self.test_accuracy[merits.index(best)] for best in accumulate(merits, max)]

    def spent(self, axis: str) -> Sequence[float]:
        """Return what was spent after each round; empty for runs of older versions."""
        rounds = range(1, len(self.val_accuracy) + 1)
        amounts = rounds, self.steps, [sent / 2**20 for sent in self.up]
        return dict(zip(AXES, amounts, strict=True))[axis]


def thinned(curves: Curves) -> Curves:
    """Leave out rounds of long runs, as NaN: no figure is of them, and pictures do without.

    What stays: rounds that validate better than all before, the first ten, every tenth, the last.
    """
    rounds, best = len(curves.val_accuracy), [-math.inf, *accumulate(curves.merits, max)]
    kept = {rounds - 1, *range(rounds if rounds <= SHORT else EVERY)}
    kept |= {*range(EVERY - 1, rounds, EVERY)}
    kept |= {place for place in range(rounds) if best[place + 1] > best[place]}

    def thin(values: Sequence[float]) -> list[float]:
        return [value if place in kept else math.nan for place, value in enumerate(values)]

    scores = {  # no figure is of training nodes
        name: {role: thin(values) for role, values in by_role.items() if role != "train"}
        for name, by_role in curves.scores.items()
    }
    loss = [float(f"{value:.3g}") for value in thin(curves.cross_entropy)]  # for pictures alone
    val, test = thin(curves.val_accuracy), thin(curves.test_accuracy)
    return replace(curves, scores=scores, cross_entropy=loss, val_accuracy=val, test_accuracy=test)


def plain_curves(reports: Sequence[RoundReport | Epoch]) -> Curves:
    """Make curves of loss and accuracies only."""
    losses = [report.cross_entropy for report in reports]
    val, test = zip(*((one.val_accuracy, one.test_accuracy) for one in reports), strict=True)
    return Curves(losses, [*val], [*test])


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
    data, clients = method.data(config), method.num_clients(config)
    return clients, config.local_steps(data if isinstance(data, Clients) else [])


def costs(config: RunConfig) -> list[tuple[dict[str, object], dict[str, float]]]:
    """Measure time and memory of a config's rounds, in a process of its own."""
    seconds = [report.seconds for report in simulate_whole(config)[0]]
    return [({}, {"seconds-per-round": median(seconds), "peak-mib": peak_memory() / 2**20})]


# What is kept ------------------------------------------------------------------------------------


def _each(change: Any, value: Any) -> Any:
    """Change the numbers of nested values; null stands for a number that was not finite."""
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_each(change, item) for item in value]
    return change(value)


def _short(value: object) -> object:
    """Round to six digits, to keep the file of the runs small."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_curves(stored: Mapping[str, object]) -> Curves:
    """Read the curves of a kept run."""
    names = {one.name for one in fields(Curves)}  # an older version had more
    known = {key: value for key, value in stored.items() if key in names}
    return Curves(**_each(lambda value: math.nan if value is None else value, known))


def settings_kept(config: RunConfig) -> dict[str, object]:
    """Return a run's settings; of a graph of one's own the file's name, wherever it lies."""
    path = file_path(config.data.name)
    return settings_of(config) | ({"data.name": path.name} if path else {})


class Store:
    """The runs of an output folder: one file of all, and beside it the runs that came since.

    A run that ends is a line of ``runs.jsonl`` until ``write`` puts it into the one file, so that a
    ``reproduce`` that is stopped loses no run. What tells runs apart are their settings.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.fresh = out, out / "runs.jsonl"
        self.kept: dict[Run, Tree] = {}
        if (path := out / RUNS).exists():
            with reading(path, OutputError, "not what `reproduce` keeps"):
                self._take(read_packed(path)["runs"])
        self.collect()

    def _take(self, runs: Sequence[Tree]) -> None:
        self._found: dict[Run, Curves | None] = {}
        for one in runs:
            place = one | {"overrides": (*one["overrides"],)}
            self.kept[Run(**{name: place[name] for name in Run._fields})] = one

    def collect(self) -> None:
        """Read the runs that came since."""
        with reading(self.fresh, OutputError, "not kept runs"):
            self._take(read_lines(self.fresh) if self.fresh.exists() else [])

    def write(self, rows: Sequence[Tree], choices: Sequence[Tree]) -> None:
        """Write the file, with what was made of the runs."""
        runs = [self.kept[run] for run in sorted(self.kept, key=json.dumps)]
        write_packed(self.out / RUNS, {"rows": rows, "choices": choices, "runs": runs})
        if self.fresh.exists():
            remove(self.fresh)

    def get(self, run: Run) -> Curves | None:
        """Return the curves of a run that was kept with the settings of today's config."""
        if run not in self._found:
            now = settings_kept(run.settings)
            place = (run.config, run.seed, now["rounds"], run.trained)
            among = [k for k in self.kept if (k.config, k.seed, k.rounds, k.trained) == place]
            for kept in sorted(among, key=lambda kept: kept.overrides != run.overrides):
                settings = self.kept[kept].get("settings", {})
                # A setting that one lacks is newer than the run, or became a constant since.
                if all(now.get(key, value) == value for key, value in settings.items()):
                    with reading(self.out / RUNS, OutputError, "not a kept run"):
                        self._found[run] = read_curves(self.kept[kept]["curves"])
                    break
        return self._found.setdefault(run, None)

    def left(self, runs: Iterable[Run]) -> list[Run]:
        """List the runs that were not kept, each once."""
        return [*{run.key: run for run in runs if self.get(run) is None}.values()]


# The runs of lines --------------------------------------------------------------------------------


def tried(line: Line) -> dict[tuple[str, ...], list[Run]]:
    """Return the runs that choose a line's settings, by choice."""
    on = (*line.settings, *line.tried_on)
    return {
        choice: [
            Run(line.config, (*on, *choice), seed, line.rounds, line.trained)
            for seed in line.choosers
        ]
        for choice in (line.choices if line.has_choice else ())
    }


def chosen(line: Line, store: Store) -> tuple[str, ...] | None:
    """Return what has the best mean validation of a line's choices, once all of them have run."""
    means = {}
    for choice, runs in tried(line).items():
        curves = [found for found in map(store.get, runs) if found]
        if len(curves) < len(runs):
            return None
        mean = fmean(merit(one.metric, one.best_val) for one in curves)
        means[choice] = mean if math.isfinite(mean) else -math.inf
    return max(means, key=means.__getitem__, default=line.choices[0])


def settings_taken(line: Line, store: Store) -> tuple[str, ...]:
    """Return a line's settings with those that are chosen, or with the first before the choice."""
    return (*line.settings, *(chosen(line, store) or line.choices[0]))


def run_of(line: Line, seed: int, store: Store) -> Run:
    """Return a line's run."""
    return Run(line.config, settings_taken(line, store), seed, line.rounds, line.trained)


def runs_of(line: Line, store: Store) -> dict[int, Curves]:
    """Return a line's runs by seed; there are none if it is measured directly."""
    found = {} if line.measure else {s: store.get(run_of(line, s, store)) for s in line.seeds}
    return {seed: curves for seed, curves in found.items() if curves}


def stages(groups: Iterable[Sequence[Line]], store: Store) -> Iterator[list[Run]]:
    """List the runs by group and seed, so that an early stop leaves whole seeds; choices first."""
    for lines in groups:
        trained = [line for line in lines if not line.measure]
        among = [run for line in trained for runs in tried(line).values() for run in runs]
        for seed in dict.fromkeys(run.seed for run in among):
            yield [run for run in among if run.seed == seed]
        for seed in dict.fromkeys(seed for line in trained for seed in line.seeds):
            yield [run_of(line, seed, store) for line in trained if seed in line.seeds]


def run_all(runs: Sequence[Run], store: Store) -> None:
    """Do some runs, as many at a time as there are cores, and print the result of each."""
    try:
        done = in_parallel(partial(_run, file=store.fresh), [(run,) for run in runs])
        for number, ((run,), reached, left) in enumerate(done, start=1):
            print(
                f"{number}/{len(runs)}  {run.config} {' '.join(run.overrides)} {run.trained} "
                f"seed {run.seed}: test {reached} at the best validation; the others of this "
                f"table and seed take about {time_left(left)}",
                flush=True,
            )
    finally:
        store.collect()


def _run(run: Run, file: Path) -> str:
    """Do a run, keep it, and say what it reached."""
    config, started = run.settings, time.perf_counter()
    if not run.trained:
        curves = curves_of(*simulate_whole(config), *steps_of(config))
        curves.metric = config.metrics[0]
    elif ":" in run.trained:
        curves = plain_curves(function(run.trained)(config))
        curves.seconds_per_round = (time.perf_counter() - started) / config.rounds
    else:
        curves = _baseline(run)
    curves.run_seconds = time.perf_counter() - started
    stored = run._asdict() | {"rounds": config.rounds, "settings": settings_kept(config)}
    append_line(file, stored | {"curves": _each(_short, asdict(thinned(curves)))})
    return f"{curves.metric} {curves.score(curves.metric, 'test'):.3f}"


def _baseline(run: Run) -> Curves:
    figures = _baselines(run._replace(trained=""))
    if run.trained not in figures:
        raise ConfigError(f"trained: {run.trained!r} is not one of {', '.join(figures)}")
    found = figures[run.trained]
    curves = plain_curves([Epoch(math.nan, found["val"], found["test"])])
    scores = found.get("scores", {})  # of links
    curves.scores = {n: {role: [v] for role, v in s.items()} for n, s in scores.items()}
    metric = run.settings.metrics[0]
    curves.metric = metric if metric in scores else ACCURACY
    return curves


@cache  # several rows show them
def _baselines(run: Run) -> Mapping[str, Any]:
    return method_of(run.settings).baselines(run.settings)
