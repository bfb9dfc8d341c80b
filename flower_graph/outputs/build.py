"""Saves modules, and builds them from saved weights.

A run's folder may come from anybody. Of this package's classes only those that are declared with
``built_with`` are built from its files, and only with arguments of the declared types and bounds.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flower_graph.config.common import NETWORKS
from flower_graph.config.foreign import OTHERWISE, code_of_methods
from flower_graph.config.rules import Rule, choice
from flower_graph.errors import OutputError, brief
from flower_graph.models import GCN, GCNPairs, PyGNetwork, SplitModel
from flower_graph.outputs.files import SavedModels
from flower_graph.storage.reading import reading

# The modules of this package's classes
SHIPPED = re.compile(r"flower_graph\.(models|strategies\.[a-z_]+\.modules)", re.ASCII)


T = TypeVar("T")


# What is declared --------------------------------------------------------------------------------


def whole(least: int, most: int) -> Rule:
    """Make the rule of a whole number within bounds."""
    # bool is an int
    words = f"a whole number from {least} to {most}"
    return Rule(words, lambda value: type(value) is int and least <= value <= most)


def mapping(rules: Mapping[str, Rule]) -> Rule:
    """Make the rule of arguments by name, each with a rule of its own."""
    return Rule(
        "a mapping of " + ", ".join(f"{name} ({rule.words})" for name, rule in rules.items()),
        lambda value: (
            isinstance(value, dict)
            and all(name in rules and rules[name].admits(one) for name, one in value.items())
        ),
    )


WIDTH = whole(1, 2**24)
LAYERS = whole(0, 64)  # each is a module: an unlimited number would fill the memory
HEADS = whole(1, 2**12)
COUNT = whole(0, 2**24)
SEED = whole(-(2**63), 2**64)
SHARE = Rule("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1)
FLAG = Rule("true or false", lambda value: type(value) is bool)

DECLARED: dict[type, Rule] = {}


def built_with(**rules: Rule) -> Callable[[type[T]], type[T]]:
    """Declare a class of this package: a run's files may build it with these arguments only."""

    def declare(kind: type[T]) -> type[T]:
        DECLARED[kind] = mapping(rules)
        return kind

    return declare


for network in (GCN, GCNPairs):
    sizes = dict.fromkeys(("features", "hidden", "classes"), WIDTH)
    built_with(**sizes, dropout=SHARE, input_dropout=SHARE)(network)
built_with(name=choice(*NETWORKS), **sizes, dropout=SHARE, input_dropout=SHARE)(PyGNetwork)
SPLIT: dict[str, type[SplitModel]] = {kind.__name__: kind for kind in get_args(SplitModel)}
for half in SPLIT.values():
    built_with(hidden=WIDTH, heads=HEADS, classes=WIDTH, dropout=SHARE)(half)


# Saving ------------------------------------------------------------------------------------------


def form_of(module: nn.Module, make: Callable[[], nn.Module], client: int) -> SavedModels:
    """Return the saved form of a client's module that ``make`` made, with nothing shared.

    Its arguments are the module's attribute ``arguments``, or those of ``make`` if ``make`` is a
    ``partial`` of its class, with arguments that JSON can hold; otherwise the class must need none.
    """
    kind = type(module)
    own = {name: value[None] for name, value in module.state_dict().items()}
    arguments = getattr(module, "arguments", {})
    if not arguments and isinstance(make, partial) and make.func is kind:
        named = dict(zip(inspect.signature(kind).parameters, make.args, strict=False))
        with suppress(TypeError, ValueError):  # what JSON cannot say
            arguments = json.loads(json.dumps({**named, **make.keywords}, allow_nan=False))
    return SavedModels(f"{kind.__module__}.{kind.__qualname__}", arguments, [client], {}, own)


# Building ----------------------------------------------------------------------------------------


def build_module(saved: SavedModels, client: int | None = None) -> nn.Module:
    """Build one client's model, in evaluation mode; ``client`` may be None if there is only one.

    Its class is of this package, or of a method that the user has; others need trust.
    """
    # Any error of a class that gets unsuitable arguments or weights
    why = "cannot be built of what was saved (`flower-graph docs new-method`)"
    with reading(f"the model {saved.module}", OutputError, why):
        if not saved.clients:
            raise ValueError("it is no client's")
        kind, arguments = _class_of(saved), saved.arguments
        state = saved.state_dict(saved.clients[0] if client is None else client)
        rule = DECLARED.get(kind)
        if rule is not None and not rule.admits(arguments):
            raise ValueError(f"arguments {brief(arguments, 200)}; allowed is {rule.words}")
        _check_shapes(kind, arguments, state)
        module: nn.Module = kind(**arguments)
        module.load_state_dict(state)
    return module.eval()


def _class_of(saved: SavedModels) -> type[nn.Module]:
    module_name, _, name = saved.module.rpartition(".")
    if SHIPPED.fullmatch(module_name):
        kind = getattr(import_module(module_name), name)  # the import declares
        is_known = isinstance(kind, type) and kind in DECLARED
    else:
        module = code_of_methods(module_name)
        kind = getattr(module, name, None)
        # Classes that a method's module imports, such as PyG's Sequential, do not count.
        is_known = module is not None and getattr(kind, "__module__", "") == module.__name__
    if not is_known:
        why = "which is neither a class that ships nor one of a method that you have"
        refusal = OutputError(f"the model is a {saved.module}, {why}. {OTHERWISE}")
        saved.trust.admit(saved.module, refusal)
        kind = getattr(import_module(module_name), name)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError("it is no torch.nn.Module")
    return kind


def _check_shapes(
    kind: type[nn.Module], arguments: dict[str, object], state: dict[str, Tensor]
) -> None:
    """Refuse arguments that do not fit the weights, before any memory is allocated."""
    try:
        with torch.device("meta"):
            made = kind(**arguments)
    except (NotImplementedError, RuntimeError):
        if kind in DECLARED:
            raise
        return  # a user's class that cannot be made on PyTorch's meta device
    if any(is_lazy(one) for one in made.parameters()):
        return  # a lazy module, which takes its shapes from the weights
    wanted = {name: value.shape for name, value in made.state_dict().items()}
    if wanted != {name: value.shape for name, value in state.items()}:
        raise ValueError(f"weights have other names or shapes than its own with {arguments}")
