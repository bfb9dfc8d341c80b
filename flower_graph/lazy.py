"""Short public names that are imported on first use.

A package imports its public names under ``TYPE_CHECKING`` alone. Importing the package, or one of
its modules, then loads nothing else.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def attach(package: str) -> Callable[[str], object]:
    """Make the ``__getattr__`` of a package: it imports the names under ``TYPE_CHECKING``.

    ``__all__`` and ``dir`` of the package list these names.
    """
    names = vars(sys.modules[package])
    names.setdefault("__dir__", lambda: sorted({*names, *declared(package)}))

    def getattr_(name: str) -> object:
        if name == "__all__":
            return sorted(declared(package))
        if find_spec(f"{package}.{name}"):  # a module needs no list of all names
            return import_module(f"{package}.{name}")
        if name not in declared(package):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = declared(package)[name]
        public = import_module(module)
        return getattr(public, own) if hasattr(public, own) else import_module(f"{module}.{own}")

    return getattr_


@cache
def declared(package: str) -> dict[str, tuple[str, str]]:
    """Read a package's source: public name to its module and its name in that module."""
    tree = ast.parse(Path(str(import_module(package).__file__)).read_text(encoding="utf-8"))
    blocks = (one for one in tree.body if isinstance(one, ast.If))
    imports = (one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom))
    found: dict[str, tuple[str, str]] = {}
    for one in imports:
        for name in one.names:
            own = {name.asname or name.name: (str(one.module), name.name)}
            found |= declared(str(one.module)) if name.name == "*" else own
    return found
