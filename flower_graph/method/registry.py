"""The registry of methods: names for ``app``, and the module that has the ``METHOD``.

``app`` names, in this order, a method of this package, one whose file was given (``--app FILE``),
one that an installed package announces by the entry-point group ``flower_graph.methods``, or a
module of another package (``package.module``).

Names and module strings only: a process that answers one message imports one method.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from flower_graph.config.common import RunConfig
from flower_graph.config.foreign import GIVEN, SHIPPED, announced
from flower_graph.config.rules import nearest, show
from flower_graph.errors import ConfigError, told

if TYPE_CHECKING:
    from flower_graph.method.base import Method
    from flower_graph.server.round_loop import RoundLoop

DEFAULT = "nfedgnn"  # of settings without ``app``
UNKNOWN = "nor a module package.module that can be imported and has METHOD"


def known_apps() -> tuple[str, ...]:
    """List the methods of this package, and those that installed packages announce."""
    return (*SHIPPED, *(name for name in sorted(announced()) if name not in SHIPPED))


def describe_app(app: str) -> str:
    """Return the first sentence of a method's module; for an announced method, its module."""
    if app not in SHIPPED:
        return f"of an installed package: {announced()[app]}"
    # Read, not imported: importing all methods would take seconds.
    folder = Path(str(import_module("flower_graph.strategies").__file__)).parent
    path = folder / SHIPPED[app].partition(":")[0].partition(".")[0]
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8").partition("\n")[0].strip('"')


def schema_of(app: str, allowed: Collection[str] | None = None) -> type[RunConfig]:
    """Import the schema of a method; of foreign modules only those allowed (None: any)."""
    if app in SHIPPED:
        module, name = _shipped(app)
        return cast("type[RunConfig]", getattr(import_module(module), name))
    if app in GIVEN:
        return method_named(app).schema
    if app not in announced() and allowed is not None and app not in allowed:
        why = "this SuperNode's node config allows no such module"
        advice = f"Whoever runs the SuperNode can allow it with --node-config 'methods=\"{app}\"'"
        named = ", ".join(sorted(allowed)) or "none"
        error = _none_of(app, f"and {why} (methods: {named}). {advice}")
        raise told(error, f"app: {show(app)}: {why}")
    return method_named(app).schema


def method_of(config: RunConfig) -> Method[RunConfig, RoundLoop]:
    """Import the method of a run's config."""
    return method_named(config.app)


def method_named(app: str) -> Method[RunConfig, RoundLoop]:
    """Import a method; ``ConfigError`` if there is none or it cannot be used."""
    if app in SHIPPED:
        module = import_module(_shipped(app)[0].replace(".config", ".method"))
        return cast("Method[RunConfig, RoundLoop]", module.METHOD)
    if app in GIVEN:
        return cast("Method[RunConfig, RoundLoop]", GIVEN[app].METHOD)
    name = announced().get(app, app)
    is_module = name != app or all(part.isidentifier() for part in name.split("."))
    try:
        if not is_module:
            raise ModuleNotFoundError(name=name)
        module = import_module(name)
    except Exception as error:  # any error of the foreign module
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and name == app and f"{name}.".startswith(f"{missing}."):
            raise _none_of(app) from error
        raise _broken(app, name, error) from error
    return _method_in(module, app)


def give_file(path: Path) -> str:
    """Register the method of a user's file; return its name for ``app``."""
    spec = spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--app {path}: not a Python file (.py) that is there")
    module = sys.modules.get(path.stem)
    # A file such as json.py, or a second one of this name
    if module is not None and str(getattr(module, "__file__", None)) != str(path.absolute()):
        raise ConfigError(f"--app {path}: a module {path.stem} is there already; rename it")
    module = module or module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look up their annotations
    try:
        spec.loader.exec_module(module)
        method = _method_in(module, str(path))
    except Exception as error:  # any error of the user's module
        del sys.modules[path.stem]
        if type(error) is ConfigError:
            raise
        raise _broken(str(path), path.stem, error) from error
    if method.name in SHIPPED:
        raise ConfigError(f"--app {path}: METHOD.name {method.name!r} is a method that ships")
    GIVEN[method.name] = module
    return method.name


def _shipped(app: str) -> tuple[str, str]:
    module, _, name = SHIPPED[app].partition(":")
    return f"flower_graph.strategies.{module}", name


def _method_in(module: ModuleType, app: str) -> Method[RunConfig, RoundLoop]:
    from flower_graph.method.base import Method

    result = getattr(module, "METHOD", None)
    if not isinstance(result, Method):
        what = f"the module {module.__name__} has METHOD = {result!r:.60}"
        raise ConfigError(f"app: {show(app)}: {what}; it must be a flower_graph.method.Method")
    return result


def _broken(app: str, name: str, error: Exception) -> ConfigError:
    why = f"{type(error).__name__}: {error}"
    return ConfigError(f"app: {show(app)}: the module {name} cannot be imported ({why})")


def _none_of(app: str, why: str = UNKNOWN) -> ConfigError:
    close = nearest(app, known_apps())
    hint = f"; did you mean {close}?" if close else ""
    return ConfigError(f"app: {show(app)} is not one of {', '.join(known_apps())}, {why}{hint}")
