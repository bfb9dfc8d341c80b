"""Reads the tables of a paper from ``conf/reproduce/<paper>.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from flower_graph.apps.reproduce.templates import Values, make, one_of
from flower_graph.config.rules import nearest, refuse_key
from flower_graph.errors import ConfigError
from flower_graph.method.load import TABLES, is_file_name
from flower_graph.method.registry import known_apps, method_named
from flower_graph.storage.reading import MOST_SETTINGS, Tree, check_yaml, read_text, reading

BLOCKS = "blocks"  # Name of the file with parts of pages that several tables have
PRIVACY = "privacy"  # Name of the table that is a curve
MOST_TRIED = 4  # settings of a method, and as many that only it has
USUAL_ROWS = ("test-accuracy-at-best-val", "best-val-accuracy")  # of a file that names no figures


@dataclass(frozen=True)
class Choice:
    """One data set, model or method."""

    settings: tuple[str, ...] = ()
    values: Values = field(default_factory=dict)  # What templates may name
    only: Values = field(default_factory=dict)  # Data sets and models that have it; else all
    follows: str = ""  # Method that it is run with; it cannot be asked for itself
    model: str | None = None  # Name of the model in rows, where the method says it
    config: str | None = None  # Another config than the table's
    times_rounds: int = 1
    seeds: int | None = None  # Fewer seeds than others: the first so many
    tries: int | None = None  # On a data set: of the grid, the first so many of each method
    # In the place of federated runs: a function that trains the config's network in one piece, or
    # one of the figures that a run's accuracies are held against
    centralised: str = ""
    baseline: str = ""


@dataclass(frozen=True)
class Grid:
    """The settings that each method tries, with seeds that no table has.

    All try equally many, but for settings that only some methods have.
    """

    seeds: tuple[int, ...] = ()
    # Settings that are tried, each a list; a mapping has those of each model
    methods: Mapping[str, Sequence[Sequence[str]] | Mapping[str, Sequence[Sequence[str]]]] = field(
        default_factory=dict
    )
    # Settings that a method has and others lack; each is tried with each of those above
    also: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()  # Where it is tried, if not where each table's rows are

    def of(self, method: str, model: str) -> Sequence[Sequence[str]]:
        """Return the settings that a method tries with a model."""
        both = product(self.shared(method, model), self.also.get(method, [()]))
        return [(*shared, *also) for shared, also in both]

    def shared(self, method: str, model: str) -> Sequence[Sequence[str]]:
        """Return those of which each method tries as many."""
        tried = self.methods.get(method, ())
        return tried.get(model, ()) if isinstance(tried, Mapping) else tried


@dataclass(frozen=True)
class Part:
    """Rows of a table: all combinations of data sets, models, methods and varied values."""

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
    # Whether validation accuracy of the grid's seeds chooses of what the grid has for the method;
    # other seeds run nothing but the chosen
    choose: bool = False
    rounds: int | None = None  # Without other ones being asked for
    usual: bool = False  # Settings that are the config's own are no runs of their own
    place: str = "{table}, {data}"  # Where a row stands, in words
    rows: tuple[object, ...] = ()
    paper: Any = None  # The paper's figures, by the keys of `paper_by`
    paper_by: tuple[str, ...] = ("data", "method")
    paper_scale: float = 1.0
    seeds: tuple[int, ...] | None = None  # Without other ones being asked for
    if_named: bool = False  # Only where its table is asked for
    # In the place of runs: a function of the config that gives keys and figures of rows
    measure: str = ""


@dataclass(frozen=True)
class Table:
    """The content of one file."""

    name: str
    title: str
    config: str  # Template of the shipped config's name
    seeds: tuple[int, ...]
    data: Mapping[str, Choice]
    models: Mapping[str, Choice]
    methods: Mapping[str, Choice]
    tables: Mapping[str, tuple[Part, ...]]
    only: tuple[str, ...] = ("data", "model", "method", "table")  # What can be asked for
    page: tuple[Any, ...] = ()  # Without it, `default_page` of each table's name
    pictures: tuple[Any, ...] = ()
    own: tuple[Values, ...] = ()  # Settings of single methods
    grid: Grid = field(default_factory=Grid)
    rounds: int | None = None  # Without them each config's own
    privacy: Values | None = None  # A curve of accuracy against a budget, only if it is asked for

    def known(self, *, every: bool = False) -> dict[str, tuple[str, ...]]:
        """Return the keys and names that ``--only`` allows, or all of them."""
        words = {
            "data": tuple(self.data),
            "model": tuple(self.models),
            "method": tuple(key for key, one in self.methods.items() if not one.follows),
            "table": (*self.tables, *([PRIVACY] if self.privacy else [])),
        }
        return words if every else {key: words[key] for key in self.only}


def tables() -> dict[str, str]:
    """Return the tables of all methods by name: shipped ones, or paths of files."""
    every = {Path(one).stem: one for app in known_apps() for one in method_named(app).tables}
    return dict(sorted(every.items()))


def read_table(name: str) -> Table:
    """Read a shipped file of tables, or the user's own."""
    text = _text_of(name)
    with reading(f"table {name}", ConfigError, "malformed YAML"):
        check_yaml(text)
        tree = yaml.safe_load(text)
    if not isinstance(tree, dict):
        raise ConfigError(f"table {name}: not a mapping of keys to values")
    with reading(f"table {name}", ConfigError, "is none"):
        return _table_of(name, tree)


def _table_of(name: str, tree: Tree) -> Table:
    """Build the tables that a file says, and check them."""
    tree.pop("shared", None)  # Anchors of what is there more than once
    for kind in ("data", "models", "methods"):
        choices = tree.get(kind) or {"": None}
        tree[kind] = {key: make(Choice, one or {}, f"{kind}.{key}") for key, one in choices.items()}
    tree["tables"] = {
        key: tuple(make(Part, part, f"tables.{key}") for part in parts)
        for key, parts in tree.get("tables", {}).items()
    }
    shared = yaml.safe_load(_shipped(BLOCKS))
    tree["page"] = [_alike(block, shared) for block in tree.get("page", ())]
    if "grid" in tree:
        tree["grid"] = make(Grid, tree["grid"], "grid")
    table = with_usual(make(Table, {"name": Path(name).stem, **tree}, name))
    if not any(table.tables.values()) and table.privacy is None:
        raise ConfigError(f"tables: {name} has none; give each a list of rows, with `table: NAME`")
    for key in table.tables:
        _check_choices(key, table)
    for key, one in table.data.items():
        if one.tries is not None and one.tries < 1:
            raise ConfigError(f"data.{key}: tries is {one.tries}; at least 1 is tried")
    return table


def _alike(block: Values, shared: Values) -> Values:
    """Merge a block of a page with the shared block that its ``like`` names."""
    inner = [_alike(one, shared) for one in block.get("blocks", ())]
    block = {**block, "blocks": inner} if inner else block
    if "like" not in block:
        return block
    one_of("like", block["like"], [*shared])
    return {**shared[block["like"]], **block}


def with_usual(table: Table) -> Table:
    """Add a page to a file without one, and the usual metrics to tables without any."""
    if table.page:
        return table
    parts = {
        key: tuple(replace(one, rows=one.rows or USUAL_ROWS) for one in each)
        for key, each in table.tables.items()
    }
    every = {one.table: one for each in parts.values() for one in each}
    page = tuple(default_page(one) for one in every.values())
    return replace(table, tables=parts, page=page)


def default_page(part: Part) -> dict[str, object]:
    """Return a page's block for a table: a line for each method, columns for each data set."""
    figures = [one for one in part.rows if isinstance(one, str)]
    return {
        "heading": part.table,
        "text": "Mean ± deviation over seeds {seeds}.",
        "rows": {"table": part.table},
        "each": ["model", "method"],
        "columns": [
            ["method", "{method} {model}"],
            *({"for": ["data"], "is": [["{data}, " + one, "accuracy", one]]} for one in figures),
        ],
    }


def _check_choices(key: str, table: Table) -> None:
    """Refuse a choice without settings, and methods that try more settings than others."""
    grid, counts = table.grid, dict[str, int]()
    for part in table.tables[key]:
        if not isinstance(part.choose, bool):
            raise ConfigError(f"tables.{key}: choose: {part.choose!r} is not true or false")
        if part.choose:
            for name, model in product(part.methods or table.methods, part.models or table.models):
                what = f"{name}, {model}" if isinstance(grid.methods.get(name), Mapping) else name
                counts[what] = len(grid.shared(name, model))
    for section, named in (("methods", [*grid.methods]), ("also", [*grid.also])):
        for name in named:
            if name not in table.methods:
                refuse_key(name, [*table.methods], f" (in grid.{section})")
    for name, also in grid.also.items():
        if not 1 <= len(also) <= MOST_TRIED:
            raise ConfigError(
                f"grid.also: {name!r} has {len(also)} settings of its own to try; allowed are 1 to "
                f"{MOST_TRIED}"
            )
    for name, count in counts.items():
        if not 1 <= count <= MOST_TRIED or count != max(counts.values()):
            raise ConfigError(
                f"grid.methods: {name!r} has {count} settings to try in tables.{key}; each method "
                f"must have as many, at least 1 and at most {MOST_TRIED}"
            )


def _text_of(name: str) -> str:
    if is_file_name(name):
        with reading(f"table {name}", ConfigError):
            return read_text(name, MOST_SETTINGS)
    shipped = tables()
    if name not in shipped:
        close = nearest(name, [*shipped])
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(shipped)}"
        raise ConfigError(
            f"paper: {name!r} is unknown; {hint} (a table of your own must end in .yaml or .yml)"
        )
    if is_file_name(shipped[name]):
        return _text_of(shipped[name])
    return _shipped(name)


def _shipped(name: str) -> str:
    return (resources.files("flower_graph.conf") / f"{TABLES}{name}.yaml").read_text("utf-8")
