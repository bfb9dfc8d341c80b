"""What the pages on commands and on public names have from the code."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import flower_graph
from flower_graph.apps.cli.main import make_parser
from flower_graph.lazy import declared


def commands(name: str) -> str:
    """Write each command's help under a heading; ``name`` is ``all``."""
    assert name == "all", name
    return "\n".join(
        f"## {one.prog}\n\n{said[:1].upper()}{said[1:]}.\n\n```text\n{one.format_help()}```\n"
        for one, said in _commands(make_parser())
    )


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Give all parsers that do something, those within others too, each with what it does."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {one.dest: one.help or "" for one in action._choices_actions}
            for word, own in action.choices.items():
                own.formatter_class = partial(argparse.HelpFormatter, width=88)
                inner = list(_commands(own))
                yield from inner or [(own, said[word])]


def names(where: str) -> str:
    """Have Sphinx describe public names: those of modules, or those after a colon of one module."""
    module, _, chosen = where.partition(": ")
    if chosen:
        return _described(f"flower_graph.{module}.{one}" for one in chosen.split())
    public = sorted(declared("flower_graph"))
    found = (one for one in public if _module(one).startswith(tuple(where.split())))
    return _described(f"flower_graph.{one}" for one in found)


def _module(name: str) -> str:
    """Give the module in which a public name stands, without the package's name."""
    value = getattr(flower_graph, name)
    module: str = value.__name__ if inspect.ismodule(value) else value.__module__
    return module.removeprefix("flower_graph.")


def _described(paths: Iterator[str]) -> str:
    lines = ["```{eval-rst}"]
    for path in paths:
        module, _, name = path.rpartition(".")
        value = getattr(import_module(module), name)
        if inspect.ismodule(value):
            lines += [f".. automodule:: {value.__name__}", "   :members:"]
        elif inspect.isclass(value):
            lines += [f".. autoclass:: {path}", "   :members:"]
        else:
            kind = "function" if callable(value) else "data"
            lines += [f".. auto{kind}:: {path}"]
        lines.append("")
    return "\n".join([*lines, "```\n"])
