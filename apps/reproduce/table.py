"""A paper's tables as plain Python: the lines of each table, and the figures of each line.

A file in ``papers`` has one paper's tables as ``PAPER``; a user's own file has the same form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from types import MappingProxyType
from typing import Any

from flower_graph.config.rules import nearest
from flower_graph.errors import ConfigError
from flower_graph.method.registry import known_apps, method_named

TEST, LAST, VALIDATION = "test-accuracy-at-best-val", "test-accuracy-last", "best-val-accuracy"
PLAIN = [TEST, LAST, VALIDATION, "rounds"]
SPENT = ["steps-a-client", "MiB-a-client"]
STRUCTURE = ["precision", "recall", "homophily", "degree", "true-homophily", "true-degree"]
WITHIN, END = "test-accuracy-within", "the end"
BASELINES: dict[str, dict[str, Any]] = {  # methods without a GNN, by the name of their lines
    name: {"trained": trained, "figures": [TEST], "tries": [()]}
    for name, trained in {
        "own commonest class": "majority-per-client",
        "regression on all features": "logistic-regression",
        "label propagation": "label-propagation",
    }.items()
}
_, REGRESSION, PROPAGATION = BASELINES

Settings = Sequence[str]
Methods = Mapping[str, Mapping[str, Any]]  # fields of the lines of each


@dataclass(frozen=True)
class Figure:
    """A figure of a line, or its difference to another method's line."""

    name: str  # in ``page.FORMS``, or of the difference
    of: str = ""  # for a difference: the figure,
    over: str = ""  # and the method whose figure is taken off seed by seed
    keys: Mapping[str, Any] = field(default_factory=dict)  # such as ``{"within": "100 rounds"}``

    @property
    def label(self) -> str:
        """The name and the values of the keys, by which a line's ``paper`` has it."""
        return ", ".join([self.name, *map(str, self.keys.values())])


def within(*budgets: str) -> list[Figure]:
    """List the test accuracies within budgets, such as ``100 rounds``, and at the end."""
    return [Figure(WITHIN, keys={"within": one}) for one in (*budgets, END)]


Gain = tuple[Figure, Sequence[str]]  # and the methods whose lines have it


def gain(over: str, *methods: str, of: str = TEST, name: str = "") -> Gain:
    """Make the difference of some methods' figures to another method's."""
    return Figure(name or f"gain-over-{over.lower()}", of, over), methods


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """A line of a table: a method on a data set. ``--only`` may ask for the first four fields."""

    table: str
    data: str = ""
    model: str = "GCN"
    method: str = ""
    config: str
    settings: Settings = ()  # laid over the config
    seeds: Sequence[int]
    rounds: int | None = None  # None: those of the config
    figures: Sequence[str | Figure] = (TEST, VALIDATION)
    keys: Mapping[str, Any] = field(default_factory=dict)  # differ among a method's lines
    tries: Sequence[Settings] = ((),)  # settings of which the best by validation is taken
    choosers: Sequence[int] = (10, 11)  # seeds of the runs that choose; no line may have them
    tried_on: Settings = ()  # laid over the runs that choose
    # In the place of a federation: a baseline of the method, or ``module:function``, which gives
    # what each epoch of training in one place measured, or the keys and figures of groups
    trained: str = ""
    is_timed: bool = False  # run while nothing else is running
    # The paper's figures by label, some with their deviation; and columns with more of the paper
    paper: Mapping[str, float | tuple[float, float] | None] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> list[tuple[str, ...]]:
        """The settings of which one is taken; one empty choice where nothing is tried."""
        return [*map(tuple, self.tries)]

    @property
    def wanted(self) -> list[Figure]:
        return [Figure(one) if isinstance(one, str) else one for one in self.figures]

    @property
    def words(self) -> str:
        keys = [f"{key} {value}" for key, value in self.keys.items()]
        return ", ".join(filter(None, [self.table, self.data, self.model, *keys, self.method]))

    def grid(
        self,
        data: Sequence[str] | Mapping[str, int],
        methods: Methods | Callable[[str], Methods],
        gains: Sequence[Gain] = (),
        budgets: Sequence[Figure] = (),
        last: Settings = (),
        over: Mapping[str, Mapping[Any, Settings]] = MappingProxyType({}),
    ) -> list[Line]:
        """Make this line for each data set, each choice of what is varied, and each method.

        Parameters
        ----------
        data : sequence, or mapping to int
            Data sets, for ``{data}`` in the config; a number is of the settings that each
            method may try there.
        methods : mapping, or function of the data set
            By method the fields of its lines; settings come behind those of this line.
        gains, budgets : sequences
            Figures behind the others: those of some methods, and those of all.
        last : sequence of str
            Settings behind those of the methods.
        over : mapping
            What is varied: by key of the lines its values, with the settings that each stands for.
        """
        lines = []
        varied = [[(key, value) for value in values] for key, values in over.items()]
        for name in data:
            ours = methods(name) if callable(methods) else methods
            for keys, (method, more) in product(map(dict, product(*varied)), ours.items()):
                tested = [figure for figure, having in gains if method in having]
                own: dict[str, Any] = {
                    "config": self.config,
                    "tries": self.tries,
                    "figures": [*self.figures, *tested, *budgets],
                    **more,
                }
                settings = [*self.settings, *own.pop("settings", ()), *last]
                settings += [one for key, value in keys.items() for one in over[key][value]]
                own |= {"settings": settings, "keys": {**self.keys, **keys}}
                own["config"] = own["config"].format(data=name.lower())
                if isinstance(data, Mapping):
                    own["tries"] = own["tries"][: data[name]]
                lines.append(replace(self, data=name, method=method, **own))
        return lines


@dataclass(frozen=True)
class Picture:
    """A picture of some tables' lines."""

    file: str
    tables: Mapping[str, Sequence[str] | None]  # methods, or all
    data: Sequence[str] | None = None
    draw: str = ""  # ``module:function``; default: accuracy and loss by round


@dataclass(frozen=True)
class Paper:
    """The tables of one paper."""

    title: str  # the page's heading
    tables: Mapping[str, Sequence[Line]]  # groups in the order of their runs; they may share lines
    on_request: Sequence[str] = ()  # groups that are run only if ``--only table=`` names them
    pictures: Sequence[Picture] = ()
    scale: int = 1  # 100 shows accuracies in percent

    @property
    def lines(self) -> list[Line]:
        """The lines of all tables, each once."""
        return [*dict.fromkeys(line for lines in self.tables.values() for line in lines)]

    def having(self, lines: Mapping[Line, Line]) -> Paper:
        """Return the paper with some lines in the place of its own, and without the others."""
        tables = {k: [lines[one] for one in own if one in lines] for k, own in self.tables.items()}
        return replace(self, tables=tables)

    @property
    def asked(self) -> list[Sequence[Line]]:
        """The groups that are run; the page has the others too, if their runs are there."""
        return [lines for name, lines in self.tables.items() if name not in self.on_request]


def papers() -> dict[str, str]:
    """Return the tables of all methods by name: shipped ones, or paths of files."""
    every = {Path(one).stem: one for app in known_apps() for one in method_named(app).tables}
    return dict(sorted(every.items()))


def read_paper(name: str) -> Paper:
    """Import a shipped paper's tables, or the user's own."""
    shipped = papers()
    path = name if name.endswith(".py") else shipped.get(name)
    if path is None:
        close = nearest(name, [*shipped])
        hint = f"did you mean {close!r}?" if close else f"there are {', '.join(shipped)}"
        raise ConfigError(f"paper: {name!r} is unknown; {hint} (a file of your own ends in .py)")
    try:
        if path.endswith(".py"):
            paper = run_path(path)["PAPER"]
        else:
            paper = import_module(f"{__package__}.papers.{path.replace('-', '_')}").PAPER
    except Exception as error:  # any error of the user's file
        raise ConfigError(f"paper: {path}: {type(error).__name__}: {error}") from error
    if not isinstance(paper, Paper):
        raise ConfigError(f"paper: {path}: PAPER is no Paper")
    return paper


# Any: the caller knows what the function returns
def function(name: str) -> Callable[..., Any]:
    """Import a function that a paper names as ``package.module:function``."""
    try:
        found: Callable[..., Any] = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"function {name!r}: {error}; write package.module:function") from error
    return found
