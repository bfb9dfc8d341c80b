"""Short public names that are imported on first use.

A package whose parts need different libraries names them in a table: importing the package, or one
of its modules, then costs nothing but that module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package from a table: public name, module that has it."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(names[name]), name)

    return getattr_
