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

from flower_graph.apps.parallel import in_parallel, loaded, settings_of
from flower_graph.apps.reproduce.table import Line, function
from flower_graph.apps.run import simulate_whole
from flower_graph.config.common import RunConfig
from flower_graph.data.folders.client_folder import Clients
from flower_graph.data.sources.names import file_path
from flower_graph.engine.machine import peak_memory
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method.registry import method_of
from flower_graph.privacy.noise import spent
from flower_graph.records.rounds import Epoch, RoundReport, merit
from flower_graph.storage.files import append_line, plain, remove, write_packed
from flower_graph.storage.reading import Tree, read_lines, read_packed, reading
from flower_graph.wire.keys import ACCURACY

RUNS = "runs.json.xz"  # what `reproduce` keeps: rows and runs
SHORT, EVERY = 50, 10  # rounds of a run whose curves are kept whole; of longer ones each tenth
AXES = ("rounds", "steps", "MiB")  # what a client may be given: rounds, local steps, bytes to send
JUDGED = ("val", "test")  # roles whose scores are kept: no figure is of training nodes
BUDGET = ("epsilon-of-a-round", "noise-multiplier")


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
        return json.dumps([settings_kept(self), self.config, self.trained])


@cache
def _settings(run: Run) -> RunConfig:
    settings = loaded(run.config, run.overrides)
    settings = replace(settings, seed=run.seed, rounds=run.rounds or settings.rounds)
    settings.validate()
    return settings


@cache
def settings_kept(run: Run) -> Mapping[str, object]:
    """Return a run's settings; of a graph of one's own the file's name, wherever it lies."""
    path = file_path(run.settings.data.name)
    return settings_of(run.settings) | ({"data.name": path.name} if path else {})


@dataclass
class Curves:
    """The results of one run, round by round."""

    scores: dict[str, dict[str, list[float]]]  # by metric and role
    loss: list[float] = field(default_factory=list)
    metric: str = ACCURACY  # decides which round is the best
    figures: dict[str, float] = field(default_factory=dict)  # of the whole run, by label
    # How near clients' aligned embeddings are, by measure; NaN in rounds that did not measure it
    alignment: dict[str, list[float]] = field(default_factory=dict)
    # What a client has spent after each round, the mean over all: local steps, and bytes sent
    steps: list[float] = field(default_factory=list)
    up: list[float] = field(default_factory=list)
    uplink: int = 0  # bytes that all clients sent
    left_out: int = 0  # the most clients that a round went without
    # In the place of all these: keys and figures of groups of clients
    groups: list[tuple[dict[str, Any], dict[str, float]]] = field(default_factory=list)

    @classmethod
    def of(cls, reports: Sequence[RoundReport | Epoch]) -> Curves:
        """Make curves of loss and accuracies only."""
        scores = {role: [getattr(one, f"{role}_accuracy") for one in reports] for role in JUDGED}
        return cls({ACCURACY: scores}, [one.cross_entropy for one in reports])

    @property
    def merits(self) -> list[float]:
        """What decides after each round, so that more is better; NaN is worst."""
        validation = self.scores[self.metric]["val"]
        return [-math.inf if math.isnan(v) else merit(self.metric, v) for v in validation]

    @property
    def best_round(self) -> int:
        """Index of the first round with the best validation."""
        return self.merits.index(max(self.merits))

    def best(self, role: str, metric: str = "") -> float:
        """Return a metric, by default that which decides, in the round of the best validation."""
        return self.scores[metric or self.metric][role][self.best_round]

    def ended(self, patience: int) -> bool:
        """Return whether validation had stopped improving."""
        return len(self.merits) > self.best_round + patience

    @property
    def best_so_far(self) -> list[float]:
        """Test accuracy after each round, at the best validation until then."""
        merits = self.merits
        test = self.scores[ACCURACY]["test"]
        return [test[merits.index(best)] for best in accumulate(merits, max)]

    def spent(self, axis: str) -> Sequence[float]:
        """Return what was spent after each round."""
        amounts = range(1, len(self.merits) + 1), self.steps, [sent / 2**20 for sent in self.up]
        return dict(zip(AXES, amounts, strict=True))[axis]

    @property
    def whole(self) -> dict[str, float]:
        """The figures of the run by label: at the best validation, after the last round, in all."""
        last = {name: values[-1] for name, values in self.alignment.items()}
        found = last | {
            **self.figures,
            "rounds": len(self.merits),
            "uplink-mib": self.uplink / 2**20,
        }
        for metric, by_role in self.scores.items():
            found[f"test-{metric}-at-best-val"] = self.best("test", metric)
            found[f"best-val-{metric}"] = self.best("val", metric)
            found |= {f"{role}-{metric}-last": values[-1] for role, values in by_role.items()}
        spent = {"steps-a-client": self.spent("steps"), "MiB-a-client": self.spent("MiB")}
        return found | {name: amounts[-1] for name, amounts in spent.items() if amounts}


def thinned(curves: Curves) -> Curves:
    """Leave out rounds of long runs, as NaN: no figure is of them, and pictures do without.

    What stays: rounds that validate better than all before, the first ten, every tenth, the last.
    """
    merits = curves.merits
    kept = {merits.index(best) for best in accumulate(merits, max)} | {len(merits) - 1}
    kept |= {*range(len(merits) if len(merits) <= SHORT else EVERY)}

    def thin(values: Sequence[float]) -> list[float]:
        return [v if n in kept or (n + 1) % EVERY == 0 else math.nan for n, v in enumerate(values)]

    scores = {m: {r: thin(one) for r, one in each.items()} for m, each in curves.scores.items()}
    loss = [float(f"{value:.3g}") for value in thin(curves.loss)]  # for pictures alone
    return replace(curves, scores=scores, loss=loss)


def train(config: RunConfig) -> Curves:
    """Do a run, and return its curves."""
    return curves_of(*simulate_whole(config), config)


def curves_of(reports: Sequence[RoundReport], final: Tree, config: RunConfig) -> Curves:
    """Make curves of a run's rounds, at least one, and of its final figures."""
    curves, last = Curves.of(reports), reports[-1]
    curves.metric = config.metrics[0]
    for metric in last.scores:
        curves.scores[metric] = {
            role: [one.score(metric, role) for one in reports] for role in JUDGED
        }
    curves.figures = {
        "seconds-per-round": median(report.seconds for report in reports),
        **reports[curves.best_round].structure,
    }
    for name in {name for report in reports for name in report.alignment}:
        curves.alignment[name] = [one.alignment.get(name, math.nan) for one in reports]
    for classifier, roles in final.get("judged", {}).items():  # after the last round
        if values := roles["test"]:
            curves.figures[f"micro-f1, {classifier}"] = fmean(values)
            curves.figures[f"sum-of-micro-f1, {classifier}"] = sum(values)
            each = enumerate(values, start=1)
            curves.figures |= {f"micro-f1, {classifier}, {n}": value for n, value in each}
    if config.privacy.is_on:
        budget = spent(config)
        curves.figures |= {name: float(str(budget[name])) for name in BUDGET if name in budget}
    clients, steps = steps_of(config)
    asked = accumulate(report.asked for report in reports)
    curves.steps = [steps * count / clients for count in asked]
    curves.up = [sum(report.bytes.get("up", {}).values()) / clients for report in reports]
    curves.uplink = sum(last.bytes.get("up", {}).values())
    curves.left_out = max(report.asked - report.answered for report in reports)
    return curves


def steps_of(config: RunConfig) -> tuple[int, float]:
    """Return the number of clients, and the mean local steps of a client in a round."""
    method = method_of(config)
    data, clients = method.data(config), method.num_clients(config)
    return clients, config.local_steps(data if isinstance(data, Clients) else [])


def costs(config: RunConfig) -> list[tuple[dict[str, Any], dict[str, float]]]:
    """Measure time and memory of a config's rounds, in a process of its own."""
    seconds = [report.seconds for report in simulate_whole(config)[0]]
    return [({}, {"seconds-per-round": median(seconds), "peak-mib": peak_memory() / 2**20})]


# What is kept ------------------------------------------------------------------------------------


def _each(change: Any, value: Any) -> Any:
    """Change the numbers of nested values."""
    if isinstance(value, dict):
        return {key: _each(change, item) for key, item in value.items()}
    return [_each(change, one) for one in value] if isinstance(value, list) else change(value)


class Store:
    """The runs of an output folder: one file of all, and beside it the runs that came since.

    A run that ends is a line of ``runs.jsonl`` until ``write`` puts it into the one file, so that a
    ``reproduce`` that is stopped loses no run. What tells runs apart are their settings.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.fresh = out, out / "runs.jsonl"
        self.kept: dict[Run, Tree] = {}
        self._found: dict[Run, Curves | None] = {}
        with reading(out / RUNS, OutputError, "not what `reproduce` keeps"):
            for one in read_packed(out / RUNS)["runs"] if (out / RUNS).exists() else ():
                self._take(one)
        with reading(self.fresh, OutputError, "not what `reproduce` keeps"):
            for one in read_lines(self.fresh) if self.fresh.exists() else ():
                self._take(one)

    def _take(self, one: Tree) -> None:
        place = one | {"overrides": (*one["overrides"],)}
        self.kept[Run(**{name: place[name] for name in Run._fields})] = one
        self._found.clear()

    def add(self, one: Tree) -> None:
        """Keep a run that has just ended."""
        append_line(self.fresh, one)
        self._take(plain(one))

    def write(self, rows: Sequence[Tree]) -> None:
        """Write the file, with what was made of the runs."""
        runs = [self.kept[run] for run in sorted(self.kept, key=json.dumps)]
        write_packed(self.out / RUNS, {"rows": rows, "runs": runs})
        if self.fresh.exists():
            remove(self.fresh)

    def get(self, run: Run) -> Curves | None:
        """Return the curves of a run that was kept with the settings of today's config."""
        if run not in self._found:
            self._found[run] = None
            now = settings_kept(run)
            place = (run.config, run.seed, now["rounds"], run.trained)
            among = [k for k in self.kept if (k.config, k.seed, k.rounds, k.trained) == place]
            for kept in sorted(among, key=lambda kept: kept.overrides != run.overrides):
                settings = self.kept[kept]["settings"]
                # A setting that one lacks is newer than the run, or became a constant since.
                if all(now.get(key, value) == value for key, value in settings.items()):
                    with reading(
                        self.out / RUNS, OutputError, "kept by another version, or damaged"
                    ):
                        stored = self.kept[kept]["curves"]
                        self._found[run] = Curves(
                            **_each(lambda value: math.nan if value is None else value, stored)
                        )
                    break
        return self._found[run]

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
            mean = fmean(merit(one.metric, one.best("val")) for one in curves)
            means[choice] = mean if math.isfinite(mean) else -math.inf
        return max(means, key=means.__getitem__, default=line.choices[0])

    def settings(self, line: Line) -> tuple[str, ...]:
        """Return a line's settings with those chosen, or with the first before the choice."""
        return (*line.settings, *(self.chosen(line) or line.choices[0]))

    def run(self, line: Line, seed: int) -> Run:
        return Run(line.config, self.settings(line), seed, line.rounds, line.trained)

    def runs(self, line: Line) -> dict[int, Curves]:
        """Return a line's runs by seed."""
        found = {seed: self.get(self.run(line, seed)) for seed in line.seeds}
        return {seed: curves for seed, curves in found.items() if curves}

    def stages(self, groups: Iterable[Sequence[Line]]) -> Iterator[list[Run]]:
        """List runs by group and seed, so that an early stop leaves whole seeds; choices first."""
        for lines in groups:
            among = [run for line in lines for runs in tried(line).values() for run in runs]
            for seed in dict.fromkeys(run.seed for run in among):
                yield [run for run in among if run.seed == seed]
            for seed in dict.fromkeys(seed for line in lines for seed in line.seeds):
                having = [line for line in lines if seed in line.seeds]
                yield [self.run(line, seed) for line in having if not line.is_timed]
                yield from ([self.run(line, seed)] for line in having if line.is_timed)


def tried(line: Line) -> dict[tuple[str, ...], list[Run]]:
    """Return the runs that choose a line's settings, by choice; none where nothing is tried."""
    on = (*line.settings, *line.tried_on)
    return {
        choice: [
            Run(line.config, (*on, *choice), seed, line.rounds, line.trained)
            for seed in line.choosers
        ]
        for choice in (line.choices if len(line.choices) > 1 else ())
    }


def run_all(runs: Sequence[Run], store: Store) -> None:
    """Do some runs, as many at a time as there are cores, and print the result of each."""
    for (run,), (kept, reached), ended, left in in_parallel(_run, [(run,) for run in runs]):
        store.add(kept)
        print(
            f"{ended}  {run.config} {' '.join(run.overrides)} {run.trained} seed {run.seed}: "
            f"{reached}; the others of this table and seed take about {left}",
            flush=True,
        )


def _run(run: Run) -> tuple[Tree, str]:
    """Do a run; return what is kept of it, and what it reached."""
    config, started = run.settings, time.perf_counter()
    if not run.trained:
        curves = train(config)
    elif ":" not in run.trained:
        curves = _baseline(run, config.metrics[0])
    elif isinstance((found := function(run.trained)(config))[0], Epoch):
        curves = Curves.of(found)
        curves.figures["seconds-per-round"] = (time.perf_counter() - started) / config.rounds
    else:
        curves = Curves({ACCURACY: {role: [math.nan] for role in JUDGED}}, groups=found)
    curves.figures["run-seconds"] = time.perf_counter() - started

    def short(value: object) -> object:  # six digits, to keep the file of the runs small
        return float(f"{value:.6g}") if isinstance(value, float) else value

    kept = run._asdict() | {"rounds": config.rounds, "settings": settings_kept(run)}
    kept["curves"] = _each(short, asdict(thinned(curves)))
    return kept, f"test {curves.metric} {curves.best('test'):.3f} at the best validation"


def _baseline(run: Run, metric: str) -> Curves:
    figures = _baselines(run._replace(trained=""))
    if run.trained not in figures:
        raise ConfigError(f"trained: {run.trained!r} is not one of {', '.join(figures)}")
    found = figures[run.trained]
    curves = Curves.of([Epoch(math.nan, found["val"], found["test"])])
    for name, scores in found.get("scores", {}).items():  # of links
        curves.scores[name] = {role: [scores[role]] for role in JUDGED}
    curves.metric = metric if metric in curves.scores else ACCURACY
    return curves


@cache  # several rows show them
def _baselines(run: Run) -> Mapping[str, Any]:
    return method_of(run.settings).baselines(run.settings)
