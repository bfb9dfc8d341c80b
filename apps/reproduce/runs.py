"""Runs the experiments of a paper's tables on all cores, and keeps what they gave in one file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
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
from flower_graph.engine.machine import peak_memory
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import Epoch, RoundReport, merit
from flower_graph.storage.files import append_line, plain, write_packed
from flower_graph.storage.reading import Tree, read_lines, read_packed, reading
from flower_graph.storage.writing import remove
from flower_graph.wire.keys import ACCURACY, ROLES

RUNS = "runs.json.xz"  # what `reproduce` keeps: rows, choices and runs
SHORT, EVERY = 50, 10  # rounds of a run whose curves are kept whole; of longer ones each tenth
AXES = ("rounds", "steps", "MiB")  # what a client may be given: rounds, local steps, bytes to send


class Run(NamedTuple):
    """A config with settings and a seed, and what trains it; see ``Line``."""

    config: str
    overrides: tuple[str, ...]
    seed: int
    rounds: int | None = None  # those of the config
    trained: str = ""

    @property
    def settings(self) -> RunConfig:
        return _settings(self)

    @property
    def key(self) -> str:
        """What tells runs apart: other words may say the same settings."""
        return json.dumps([settings_kept(self.settings), self.config, self.trained])


@cache
def _settings(run: Run) -> RunConfig:
    settings = loaded(run.config, run.overrides)
    settings = replace(settings, seed=run.seed, rounds=run.rounds or settings.rounds)
    settings.validate()
    return settings


@dataclass
class Curves:
    """The results of one run, round by round."""

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

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Curves:
        """Read the curves of a kept run; null is a number that was not finite."""
        return cls(**_each(lambda value: math.nan if value is None else value, dict(stored)))

    def series(self, metric: str, role: str) -> list[float]:
        """Return a metric after each round; nothing if the run does not report it."""
        if metric == ACCURACY:
            return self.val_accuracy if role == "val" else self.test_accuracy
        return self.scores.get(metric, {}).get(role, [])

    @property
    def merits(self) -> list[float]:
        """What decides after each round, so that more is better; NaN is worst."""
        validation = self.series(self.metric, "val")
        return [-math.inf if math.isnan(v) else merit(self.metric, v) for v in validation]

    @property
    def best_round(self) -> int:
        """Index of the first round with the best validation."""
        return self.merits.index(max(self.merits))

    def score(self, metric: str, role: str) -> float | None:
        """Return a metric in the round of the best validation, if the run reports it."""
        values = self.series(metric, role)
        return values[self.best_round] if values else None

    @property
    def best_val(self) -> float:
        return self.series(self.metric, "val")[self.best_round]

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
    merits, count = curves.merits, len(curves.val_accuracy)
    kept = {merits.index(best) for best in accumulate(merits, max)}
    kept |= {*range(count if count <= SHORT else EVERY), *range(EVERY - 1, count, EVERY), count - 1}

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
    val, test = zip(*((one.val_accuracy, one.test_accuracy) for one in reports), strict=True)
    return Curves([one.cross_entropy for one in reports], [*val], [*test])


def curves_of(
    reports: Sequence[RoundReport], final: Tree, clients: int, local_steps: float
) -> Curves:
    """Make curves of a run's rounds, at least one, and of its final figures."""
    curves = plain_curves(reports)
    names = dict.fromkeys(name for report in reports for name in report.alignment)
    asked = accumulate(report.asked for report in reports)
    return replace(
        curves,
        bytes_up=dict(reports[-1].bytes.get("up", {})),
        seconds_per_round=median(report.seconds for report in reports),
        structure=dict(reports[curves.best_round].structure),
        alignment={n: [one.alignment.get(n, math.nan) for one in reports] for n in names},
        judged=dict(final.get("judged", {})),
        scores={
            name: {role: [report.score(name, role) for report in reports] for role in ROLES}
            for name in reports[-1].scores
        },
        steps=[local_steps * count / clients for count in asked],
        up=[sum(report.bytes.get("up", {}).values()) / clients for report in reports],
        left_out=max(report.asked - report.answered for report in reports),
    )


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
    """Change the numbers of nested values."""
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    return [_each(change, one) for one in value] if isinstance(value, list) else change(value)


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
        self._found: dict[Run, Curves | None] = {}
        for path, read in (
            (out / RUNS, lambda path: read_packed(path)["runs"]),
            (self.fresh, read_lines),
        ):
            with reading(path, OutputError, "not what `reproduce` keeps"):
                for one in read(path) if path.exists() else ():
                    self._take(one)

    def _take(self, one: Tree) -> None:
        place = one | {"overrides": (*one["overrides"],)}
        self.kept[Run(**{name: place[name] for name in Run._fields})] = one
        self._found.clear()

    def add(self, one: Tree) -> None:
        """Keep a run that has just ended."""
        append_line(self.fresh, one)
        self._take(plain(one))

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
                        self._found[run] = Curves.read(self.kept[kept]["curves"])
                    break
        return self._found.setdefault(run, None)

    def left(self, runs: Iterable[Run]) -> list[Run]:
        """List the runs that were not kept, each once."""
        return [*{run.key: run for run in runs if self.get(run) is None}.values()]

    # The runs of lines

    def chosen(self, line: Line) -> tuple[str, ...] | None:
        """Return the choice of the best mean validation, once all that choose have run."""
        means = {}
        for choice, runs in tried(line).items():
            curves = [found for found in map(self.get, runs) if found]
            if len(curves) < len(runs):
                return None
            mean = fmean(merit(one.metric, one.best_val) for one in curves)
            means[choice] = mean if math.isfinite(mean) else -math.inf
        return max(means, key=means.__getitem__, default=line.choices[0])

    def settings(self, line: Line) -> tuple[str, ...]:
        """Return a line's settings with those chosen, or with the first before the choice."""
        return (*line.settings, *(self.chosen(line) or line.choices[0]))

    def run(self, line: Line, seed: int) -> Run:
        return Run(line.config, self.settings(line), seed, line.rounds, line.trained)

    def runs(self, line: Line) -> dict[int, Curves]:
        """Return a line's runs by seed; there are none if it is measured directly."""
        seeds = () if line.measure else line.seeds
        found = {seed: self.get(self.run(line, seed)) for seed in seeds}
        return {seed: curves for seed, curves in found.items() if curves}

    def stages(self, groups: Iterable[Sequence[Line]]) -> Iterator[list[Run]]:
        """List runs by group and seed, so that an early stop leaves whole seeds; choices first."""
        for lines in groups:
            trained = [line for line in lines if not line.measure]
            among = [run for line in trained for runs in tried(line).values() for run in runs]
            for seed in dict.fromkeys(run.seed for run in among):
                yield [run for run in among if run.seed == seed]
            for seed in dict.fromkeys(seed for line in trained for seed in line.seeds):
                yield [self.run(line, seed) for line in trained if seed in line.seeds]


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


def run_all(runs: Sequence[Run], store: Store) -> None:
    """Do some runs, as many at a time as there are cores, and print the result of each."""
    done = in_parallel(_run, [(run,) for run in runs])
    for number, ((run,), (kept, reached), left) in enumerate(done, start=1):
        store.add(kept)
        print(
            f"{number}/{len(runs)}  {run.config} {' '.join(run.overrides)} {run.trained} "
            f"seed {run.seed}: test {reached} at the best validation; the others of this "
            f"table and seed take about {time_left(left)}",
            flush=True,
        )


def _run(run: Run) -> tuple[Tree, str]:
    """Do a run; return what is kept of it, and what it reached."""
    config, started = run.settings, time.perf_counter()
    if not run.trained:
        curves = curves_of(*simulate_whole(config), *steps_of(config))
        curves.metric = config.metrics[0]
    elif ":" in run.trained:
        curves = plain_curves(function(run.trained)(config))
        curves.seconds_per_round = (time.perf_counter() - started) / config.rounds
    else:
        figures = _baselines(run._replace(trained=""))
        if run.trained not in figures:
            raise ConfigError(f"trained: {run.trained!r} is not one of {', '.join(figures)}")
        found = figures[run.trained]
        curves = plain_curves([Epoch(math.nan, found["val"], found["test"])])
        scores = found.get("scores", {})  # of links
        curves.scores = {n: {role: [v] for role, v in s.items()} for n, s in scores.items()}
        curves.metric = config.metrics[0] if config.metrics[0] in scores else ACCURACY
    curves.run_seconds = time.perf_counter() - started

    def short(value: object) -> object:  # six digits, to keep the file of the runs small
        return float(f"{value:.6g}") if isinstance(value, float) else value

    kept = run._asdict() | {"rounds": config.rounds, "settings": settings_kept(config)}
    kept["curves"] = _each(short, asdict(thinned(curves)))
    return kept, f"{curves.metric} {curves.score(curves.metric, 'test'):.3f}"


@cache  # several rows show them
def _baselines(run: Run) -> Mapping[str, Any]:
    return method_of(run.settings).baselines(run.settings)
