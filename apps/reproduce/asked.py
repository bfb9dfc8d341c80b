"""The runs that the selected rows of a paper's tables need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from flower_graph.apps.parallel import loaded
from flower_graph.apps.reproduce.experiments import Experiment, Run
from flower_graph.apps.reproduce.table import Choice, Part, Table
from flower_graph.apps.reproduce.templates import Values, fill
from flower_graph.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Group:
    """The rows of one method in one part of a table, and the experiments that they come from."""

    part: Part
    data: str  # Data set, model and method as they are asked for
    model: str
    method: str
    shown: str  # Its name in the rows
    keys: Values  # More keys of the rows
    experiments: tuple[Experiment, ...]  # One, or those of which validation accuracy chooses one
    rounds: int
    seeds: tuple[int, ...]
    choosers: tuple[int, ...] = ()  # Seeds whose validation accuracy chooses
    tried: tuple[Experiment, ...] = ()  # What they run of each experiment, in the same order

    @property
    def place(self) -> tuple[object, ...]:
        """The table, data set, model and keys: methods are compared where these agree."""
        return self.part.table, self.experiments[0].data, self.model, *self.keys.items()

    @property
    def words(self) -> str:
        """The place of the rows in words."""
        values = {"table": self.part.table, "data": self.experiments[0].data, "model": self.model}
        return f"{fill(self.part.place, {**values, **self.keys})}, {self.shown}"

    @property
    def runs(self) -> list[Run]:
        """The runs, seed by seed, of all experiments, since each may be chosen."""
        seeds = () if self.part.measure else self.seeds
        rows = [Run(one, seed, self.rounds) for seed in seeds for one in self.experiments]
        return [*dict.fromkeys([*self.choices, *rows])]

    @property
    def choices(self) -> list[Run]:
        """The runs whose validation accuracy chooses the experiment."""
        return [Run(one, seed, self.rounds) for seed in self.choosers for one in self.tried]


@dataclass(frozen=True)
class Asked:
    """The selected data sets, models, methods and tables, each in the order of the YAML."""

    table: Table
    data: tuple[str, ...]
    models: tuple[str, ...]
    methods: tuple[str, ...]
    tables: tuple[str, ...]
    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    overrides: tuple[str, ...] = ()  # Settings laid over those of every run
    named: frozenset[str] = frozenset()  # Keys that were asked for by name

    def groups(self, key: str = "") -> list[Group]:
        """List the groups of one table, or of all tables."""
        return [one for name in ([key] if key else self.tables) for one in self._by_table[name]]

    def stages(self) -> list[list[Run]]:
        """List the runs, each once, by table and seed, so that an early stop leaves whole seeds."""
        listed, stages = set[Run](), []
        for key in self.tables:
            groups = self.groups(key)
            runs = dict.fromkeys(run for group in groups for run in group.runs)
            first = [seed for group in groups for seed in group.choosers]
            for seed in dict.fromkeys([*first, *(run.seed for run in runs)]):
                stages.append([run for run in runs if run.seed == seed and run not in listed])
                listed.update(stages[-1])
        return [stage for stage in stages if stage]

    def runs(self) -> list[Run]:
        """List every run that the tables need, each once, in the order of the stages."""
        return [run for stage in self.stages() for run in stage]

    # Any: the schema of the method, whose sections the caller knows
    def common(self, data: str, model: str, method: str = "") -> Any:
        """Load the settings of a data set and a model, with or without those of a method."""
        choice = self.table.methods[method] if method else Choice()
        settings = self._settings(data, model, choice, self._values(data, model, choice))
        return loaded(self._config(data, model, choice), (*settings, *self.overrides))

    def rounds_of(self, data: str, model: str, method: str = "") -> int:
        """Return the rounds of runs on a data set, or those of a method with its own config."""
        own = method if method and self.table.methods[method].config else ""
        return self.rounds or self.table.rounds or int(self.common(data, model, own).rounds)

    def own(self, data: str, model: str, method: str) -> tuple[str, ...]:
        """Return the settings that only this method has on this data set and model."""
        here = {"data": data, "model": model, "method": method}
        for one in self.table.own:
            if all(one.get(key, value) == value for key, value in here.items()):
                return tuple(one["settings"])
        return ()

    @cached_property
    def _by_table(self) -> dict[str, list[Group]]:
        parts = {name: self.table.tables[name] for name in self.tables}
        named = "table" in self.named
        return {
            name: [one for part in each if named or not part.if_named for one in self._of(part)]
            for name, each in parts.items()
        }

    def _of(self, part: Part) -> Iterator[Group]:
        points = [one for varied in part.vary for one in _points(varied)] or [({}, {})]
        for data, model, point, method in product(
            _both(part.data, self.data),
            _both(part.models, self.models),
            points,
            _both(part.methods, self.methods),
        ):
            only = self.table.methods[method].only
            if all({"data": data, "model": model}[key] in values for key, values in only.items()):
                yield self._group(part, data, model, method, point)

    def _group(self, part: Part, data: str, model: str, method: str, point: Point) -> Group:
        choice, grid, (shown, varied) = self.table.methods[method], self.table.grid, point
        rounds = self.rounds or part.rounds or self.rounds_of(data, model, method)
        rounds *= choice.times_rounds
        tries = grid.of(method, model)[: self.table.data[data].tries] if part.choose else [()]
        where = replace(part, settings=grid.settings) if grid.settings else part
        experiments, tried = (
            tuple(
                self._experiment(one, data, model, method, {**varied, "rounds": rounds}, local)
                for local in tries
            )
            for one in (part, where)
        )
        seeds = (self.seeds or part.seeds or self.table.seeds)[: choice.seeds]
        seeds = seeds[: self.table.data[data].seeds]
        choosers = grid.seeds if part.choose else ()
        if {*choosers} & {*seeds}:
            raise ConfigError(
                f"grid.seeds: {grid.seeds} choose settings, so that no row may have one of them, "
                f"and {part.table} has seeds {seeds}"
            )
        keys = {**part.keys, **{key: one for key, one in shown.items() if key not in part.unnamed}}
        name = fill(part.shown, {**choice.values, "method": method, **shown})
        return Group(
            part, data, model, method, name, keys, experiments, rounds, seeds, choosers, tried
        )

    def _experiment(
        self,
        part: Part,
        data: str,
        model: str,
        method: str,
        varied: Values,
        tried: Sequence[str],
    ) -> Experiment:
        choice = self.table.methods[method]
        values = {**self._values(data, model, choice), "method": method, **varied}
        config = self._config(data, model, choice)
        local = (*self.own(data, model, method), *(fill(one, values) for one in tried))
        plain = (*self._settings(data, model, choice, values), *local, *self.overrides)
        more = () if method in part.not_for else tuple(fill(one, values) for one in part.settings)
        # What a table varies may be what the config has: then it is no run of its own.
        if part.usual and loaded(config, (*plain, *more)) == loaded(config, plain):
            more = ()
        name = fill(part.name, values) if more or not part.usual else method
        shown, model = fill(part.data_name, values), choice.model or model
        in_one_piece = bool(choice.centralised or choice.baseline)
        return Experiment(shown, model, name, config, (*plain, *more), in_one_piece)

    def _values(self, data: str, model: str, method: Choice) -> dict[str, object]:
        values: dict[str, object] = {"data": data, "model": model}
        for one in (self.table.data[data], self.table.models[model], method):
            values |= one.values
        return values

    def _config(self, data: str, model: str, method: Choice) -> str:
        return fill(method.config or self.table.config, {"data": data, "model": model})

    def _settings(self, data: str, model: str, method: Choice, values: Values) -> list[str]:
        result = (self.table.data[data], self.table.models[model], method)
        return [fill(setting, values) for one in result for setting in one.settings]


Point = tuple[dict[str, object], dict[str, object]]  # What rows show, and what settings have


def _points(varied: Values) -> Iterator[Point]:
    """List all combinations of the varied values."""
    pairs = [
        [(key, shown, one[shown] if isinstance(one, Mapping) else shown) for shown in one]
        for key, one in varied.items()
    ]
    for chosen in product(*pairs):
        yield {key: one for key, one, _ in chosen}, {key: one for key, _, one in chosen}


def _both(wanted: Sequence[str] | None, asked: Sequence[str]) -> list[str]:
    """Return the names that are both wanted by a part and selected, in the part's order."""
    return [one for one in (asked if wanted is None else wanted) if one in asked]
