"""A paper's tables as data: what ``conf/reproduce/<paper>.yaml`` says, and the runs of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, reduce
from importlib import import_module, resources
from itertools import product
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar, cast

import yaml

from flower_graph.apps.reproduce.experiments import Experiment, Run, loaded
from flower_graph.config.load import TABLES, is_file_name
from flower_graph.config.registry import known_apps, method_named
from flower_graph.config.rules import nearest, one_line, refuse_key
from flower_graph.errors import ConfigError

PRIVACY = "privacy"  # Name of the table that is a curve
Values = Mapping[str, Any]
T = TypeVar("T")


class _Text(Formatter):
    """Fills in ``{name}``, in lower case ``{name!l}``, in upper ``{name!u}``, numbers as ``g``."""

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion in ("l", "u"):
            return str(value).lower() if conversion == "l" else str(value).upper()
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        short = not format_spec and isinstance(value, float)
        return str(super().format_field(value, "g" if short else format_spec))


def fill(template: str, values: Values) -> str:
    """Fill values into a template of the YAML."""
    try:
        return _Text().vformat(template, (), values)
    except KeyError as error:
        raise ConfigError(
            f"{template!r}: {error} is unknown; there are {', '.join(values)}"
        ) from None


def function(name: str) -> Callable[..., Any]:
    """Import a function that the YAML names as ``package.module:function``."""
    module, _, attribute = name.partition(":")
    try:
        return cast("Callable[..., Any]", getattr(import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"function {name!r}: {error}; write package.module:function") from error


@dataclass(frozen=True)
class Choice:
    """One data set, model or method as the YAML has it."""

    settings: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)  # What templates may name
    only: Values = field(default_factory=dict)  # Data sets and models that have it; else all
    follows: str = ""  # Method that it is run with; it cannot be asked for itself
    seconds: float = 1.0  # Of a round on one core; those of data set, model and method multiply
    start_seconds: float = 0.0  # Of what goes before the first round
    model: str | None = None  # Name of the model in rows, where the method says it
    config: str | None = None  # Another config than the table's
    times_rounds: int = 1
    seeds: int | None = None  # Fewer seeds than others
    centralised: bool = False  # Trained in one piece


@dataclass(frozen=True)
class Part:
    """Rows of one name: a product of data sets, models, methods and of what is varied."""

    table: str
    data: tuple[str, ...] | None = None  # Without them all
    models: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    # Products of keys to values; of a mapping rows show the keys, and settings have the values
    vary: tuple[Values, ...] = ()
    unnamed: tuple[str, ...] = ()  # Of what is varied, keys that rows do not have
    keys: Values = field(default_factory=dict)  # More keys of every row
    settings: tuple[str, ...] = ()
    not_for: tuple[str, ...] = ()  # Methods that the settings mean nothing to
    name: str = "{method}"  # Name of the runs
    shown: str = "{method}"  # Name of the row
    data_name: str = "{data}"
    # Of what is varied, validation accuracy chooses one: the mean over the seeds, or "first", that
    # of the first seed, and the others run nothing but the chosen one
    choose: bool | str = False
    usual: bool = False  # Settings that are the config's own are no runs of their own
    place: str = "{table}, {data}"  # Where a row stands, in words
    rows: tuple[Any, ...] = ()
    paper: Any = None  # The paper's figures, by the keys of `paper_by`
    paper_by: tuple[str, ...] = ("data", "method")
    paper_where: Values = field(default_factory=dict)  # Keys of rows that it has figures for
    paper_scale: float = 1.0
    seeds: tuple[int, ...] | None = None  # Without other ones being asked for
    share: int = 1  # Divides the rounds
    any_data_if_named: bool = False  # All data sets where both data and table are asked for
    # In the place of runs: a function of the config that gives keys and figures of rows
    measure: str = ""


@dataclass(frozen=True)
class Table:
    """A whole file."""

    name: str
    title: str
    config: str  # Template of the shipped config's name
    only: tuple[str, ...]  # What can be asked for
    seeds: tuple[int, ...]
    data: Mapping[str, Choice]
    models: Mapping[str, Choice]
    methods: Mapping[str, Choice]
    tables: Mapping[str, tuple[Part, ...]]
    page: tuple[Any, ...]
    pictures: tuple[Any, ...] = ()
    own: tuple[Values, ...] = ()  # Settings of single methods
    rounds: int | None = None  # Without them each config's own
    start_seconds: float = 0.0
    times: tuple[str, ...] = ()  # Settings that the seconds of a round are to be multiplied by
    fresh: bool = False  # A process of its own for every run, so that its memory can be told
    centralised: str | None = None  # Function that trains the config's network in one piece
    privacy: Values | None = None  # A curve of accuracy against a budget, only if it is asked for

    def known(self, *, every: bool = False) -> dict[str, tuple[str, ...]]:
        """Give what ``--only`` may name, or every key's words."""
        known = {
            "data": tuple(self.data),
            "model": tuple(self.models),
            "method": tuple(key for key, one in self.methods.items() if not one.follows),
            "table": (*self.tables, *([PRIVACY] if self.privacy else [])),
        }
        return known if every else {key: known[key] for key in self.only}


def tables() -> dict[str, str]:
    """Give all methods' tables by name: those of ``conf/reproduce``, or paths of files."""
    every = {Path(one).stem: one for app in known_apps() for one in method_named(app).tables}
    return dict(sorted(every.items()))


def read_table(name: str) -> Table:
    """Read a method's tables, or a file of the same form."""
    try:
        tree = yaml.safe_load(_text_of(name))
    except yaml.YAMLError as error:
        raise ConfigError(f"table {name}: malformed YAML: {one_line(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"table {name}: not a mapping of keys to values")
    tree.pop("shared", None)  # Anchors of what is there more than once
    for kind in ("data", "models", "methods"):
        choices = tree.get(kind) or {"": None}
        tree[kind] = {key: make(Choice, one or {}, f"{kind}.{key}") for key, one in choices.items()}
    tree["tables"] = {
        key: tuple(make(Part, part, f"tables.{key}") for part in parts)
        for key, parts in tree.get("tables", {}).items()
    }
    return make(Table, {"name": Path(name).stem, **tree}, name)


def _text_of(name: str) -> str:
    if is_file_name(name):
        try:
            return Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"table {name}: {error}") from error
    known = tables()
    if name not in known:
        close = nearest(name, [*known])
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(known)}"
        raise ConfigError(
            f"paper: {name!r} is unknown; {hint} (a table of your own must end in .yaml or .yml)"
        )
    if is_file_name(known[name]):
        return _text_of(known[name])
    return (resources.files("flower_graph.conf") / f"{TABLES}{name}.yaml").read_text("utf-8")


def make(kind: type[T], tree: Values, where: str) -> T:
    """Make a dataclass of a mapping."""
    known = [one.name for one in fields(cast("Any", kind))]
    for key in tree:
        if key not in known:
            refuse_key(key, known, f" (in {where})")
    frozen = {key: tuple(one) if isinstance(one, list) else one for key, one in tree.items()}
    try:
        return kind(**frozen)
    except TypeError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error


# Rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Group:
    """One method at one place of one table, with the experiments that its rows are of."""

    part: Part
    data: str  # Data set, model and method as they are asked for
    model: str
    method: str
    shown: str  # Its name in the rows
    keys: Values  # More keys of the rows
    experiments: tuple[Experiment, ...]  # One, or those of which validation accuracy chooses one
    rounds: int
    seeds: tuple[int, ...]

    @property
    def place(self) -> tuple[Any, ...]:
        """Where it stands, whatever its method: there methods are compared."""
        return self.part.table, self.experiments[0].data, self.model, *self.keys.items()

    @property
    def words(self) -> str:
        """Where it stands, in words."""
        known = {"table": self.part.table, "data": self.experiments[0].data, "model": self.model}
        return f"{fill(self.part.place, {**known, **self.keys})}, {self.shown}"

    @property
    def runs(self) -> list[Run]:
        """Its runs, seed by seed."""
        seeds = () if self.part.measure else self.seeds
        return [Run(one, seed, self.rounds) for seed in seeds for one in self.experiments]


@dataclass(frozen=True)
class Asked:
    """What of the tables is asked for, each in the order of the YAML."""

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
        """List what one table needs, or all of them."""
        return [one for name in ([key] if key else self.tables) for one in self._by_table[name]]

    def stages(self) -> list[list[Run]]:
        """List the runs, each once, by table and seed: what is stopped early has whole seeds."""
        known, stages = set[Run](), []
        for key in self.tables:
            result = [run for group in self.groups(key) for run in group.runs]
            for seed in dict.fromkeys(run.seed for run in result):
                runs = dict.fromkeys(r for r in result if r.seed == seed and r not in known)
                known.update(runs)
                stages.append([*runs])
        return [stage for stage in stages if stage]

    def runs(self) -> list[Run]:
        """List every run that the tables need, each once, in the order of the stages."""
        return [run for stage in self.stages() for run in stage]

    def common(self, data: str, model: str, method: str = "") -> Any:
        """Load the settings of a data set and model, before or with what one method has."""
        choice = self.table.methods[method] if method else Choice()
        settings = self._settings(data, model, choice, self._values(data, model, choice))
        return loaded(self._config(data, model, choice), (*settings, *self.overrides))

    def rounds_of(self, data: str, model: str) -> int:
        """Return the rounds of a data set's runs."""
        return self.rounds or self.table.rounds or self.common(data, model).rounds

    def own(self, data: str, model: str, method: str) -> tuple[str, ...]:
        """Return the settings that a method has for itself."""
        here = {"data": data, "model": model, "method": method}
        for one in self.table.own:
            if all(one.get(key, value) == value for key, value in here.items()):
                return tuple(one["settings"])
        return ()

    def estimate(self, runs: Sequence[Run]) -> float:
        """Return about how many seconds of one core these runs take."""
        seconds = {run: self._seconds(group, run) for group in self.groups() for run in group.runs}
        return sum(seconds[run] for run in runs)

    def _seconds(self, group: Group, run: Run) -> float:
        table, method = self.table, self.table.methods[group.method]
        config: Any = loaded(run.experiment.config, run.experiment.overrides)
        seconds = table.data[group.data].seconds * table.models[group.model].seconds
        for names in table.times:
            values = [reduce(getattr, name.split("."), config) for name in names.split("+")]
            seconds *= sum(values)
        start = table.start_seconds + method.start_seconds
        return start + run.rounds * seconds * method.seconds

    @cached_property
    def _by_table(self) -> dict[str, list[Group]]:
        parts = {name: self.table.tables[name] for name in self.tables}
        return {n: [one for part in each for one in self._of(part)] for n, each in parts.items()}

    def _of(self, part: Part) -> Iterator[Group]:
        every = part.any_data_if_named and {"data", "table"} <= self.named
        points = [one for varied in part.vary for one in _points(varied)] or [({}, {})]
        chosen = [points] if part.choose else [[point] for point in points]
        for data, model, together, method in product(
            _both(None if every else part.data, self.data),
            _both(part.models, self.models),
            chosen,
            _both(part.methods, self.methods),
        ):
            only = self.table.methods[method].only
            if all({"data": data, "model": model}[key] in values for key, values in only.items()):
                yield self._group(part, data, model, method, together)

    def _group(
        self, part: Part, data: str, model: str, method: str, points: Sequence[Point]
    ) -> Group:
        choice, shown = self.table.methods[method], points[0][0]
        rounds = max(1, self.rounds_of(data, model) // part.share) * choice.times_rounds
        keys = {**part.keys, **{key: one for key, one in shown.items() if key not in part.unnamed}}
        experiments = tuple(
            self._experiment(part, data, model, method, {**varied, "rounds": rounds})
            for _, varied in points
        )
        seeds = (self.seeds or part.seeds or self.table.seeds)[: choice.seeds]
        name = fill(part.shown, {**choice.values, "method": method, **shown})
        return Group(part, data, model, method, name, keys, experiments, rounds, seeds)

    def _experiment(
        self, part: Part, data: str, model: str, method: str, varied: Values
    ) -> Experiment:
        choice = self.table.methods[method]
        values = {**self._values(data, model, choice), "method": method, **varied}
        config = self._config(data, model, choice)
        local = self.own(data, model, method)
        plain = (*self._settings(data, model, choice, values), *local, *self.overrides)
        more = () if method in part.not_for else tuple(fill(one, values) for one in part.settings)
        # What a table varies may be what the config has: then it is no run of its own.
        if part.usual and loaded(config, (*plain, *more)) == loaded(config, plain):
            more = ()
        name = fill(part.name, values) if more or not part.usual else method
        shown, model = fill(part.data_name, values), choice.model or model
        return Experiment(shown, model, name, config, (*plain, *more), choice.centralised)

    def _values(self, data: str, model: str, method: Choice) -> dict[str, Any]:
        values: dict[str, Any] = {"data": data, "model": model}
        for one in (self.table.data[data], self.table.models[model], method):
            values |= one.values
        return values

    def _config(self, data: str, model: str, method: Choice) -> str:
        return fill(method.config or self.table.config, {"data": data, "model": model})

    def _settings(self, data: str, model: str, method: Choice, values: Values) -> list[str]:
        result = (self.table.data[data], self.table.models[model], method)
        return [fill(setting, values) for one in result for setting in one.settings]


Point = tuple[dict[str, Any], dict[str, Any]]  # What rows show, and what settings have


def _points(varied: Values) -> Iterator[Point]:
    """List the product of what is varied."""
    pairs = [
        [(key, shown, one[shown] if isinstance(one, Mapping) else shown) for shown in one]
        for key, one in varied.items()
    ]
    for chosen in product(*pairs):
        yield {key: one for key, one, _ in chosen}, {key: one for key, _, one in chosen}


def _both(wanted: Sequence[str] | None, asked: Sequence[str]) -> list[str]:
    """Give those that a part wants, in its order, as far as they are asked for."""
    return [one for one in (asked if wanted is None else wanted) if one in asked]
