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
    if app not in GIVEN and app not in announced() and allowed is not None and app not in allowed:
        why = "this SuperNode's node config allows no such module"
        allows = f"methods={','.join(sorted(allowed))!r}"
        raise told(_refused(app, f"{why} ({allows})"), f"app: {show(app)}: {why}")
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
    try:
        return _method_in(import_module(name))
    except Exception as error:  # any error of the foreign module
        raise _refused(app, f"the module {name}: {type(error).__name__}: {error}") from error


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
        name = _method_in(module).name
    except Exception as error:  # any error of the user's module
        del sys.modules[path.stem]
        raise ConfigError(f"--app {path}: {type(error).__name__}: {error}") from error
    if name in SHIPPED:
        raise ConfigError(f"--app {path}: METHOD.name {name!r} is a method that ships")
    GIVEN[name] = module
    return name


def _shipped(app: str) -> tuple[str, str]:
    module, _, name = SHIPPED[app].partition(":")
    return f"flower_graph.strategies.{module}", name


def _method_in(module: ModuleType) -> Method[RunConfig, RoundLoop]:
    from flower_graph.method.base import Method

    result = getattr(module, "METHOD", None)
    if not isinstance(result, Method):
        raise TypeError(f"METHOD is {result!r:.60}, no flower_graph.method.Method")
    return result


def _refused(app: str, why: str) -> ConfigError:
    close = nearest(app, known_apps())
    hint = f"; did you mean {close}?" if close else ""
    return ConfigError(f"app: {show(app)} is not one of {', '.join(known_apps())}; {why}{hint}")
