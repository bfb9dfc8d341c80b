"""Names of the methods that the user has, and the modules of their code.

Only names and module strings, except for methods given by file or imported already.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from types import ModuleType

GROUP = "flower_graph.methods"  # of entry points, each of a module that has METHOD

# Looked up first, since reading entry points would slow every deployed message. These modules have
# the schema, which is read without the rest of the method; METHOD is in `method` beside it.
SHIPPED = {
    "nfedgnn": "nfedgnn.config:NFedGNNConfig",
    "fedscem": "fedscem.config:FedSCemConfig",
    "fedgls": "fedgls.config:FedGLSConfig",
    "ppfl": "ppfl.config:PPFLConfig",
    "fedgta": "fed_gta:FedGTAConfig",
    "fedpub": "fed_pub:FedPUBConfig",
    "fedavg": "fed_avg:FedAvgConfig",
    "fedprox": "fed_prox:FedProxConfig",
    "local": "local_training:LocalConfig",
    "ditto": "ditto:DittoConfig",
    "fedproto": "fed_proto:FedProtoConfig",
}
GIVEN: dict[str, ModuleType] = {}  # modules of the files that the user gave, by their app


@lru_cache(maxsize=1)
def announced() -> dict[str, str]:
    """Read the entry points: module by name."""
    from importlib.metadata import entry_points

    return {one.name: one.module for one in entry_points(group=GROUP)}


def has_method(app: str) -> bool:
    """Return whether the user has a method, so that importing it runs no foreign code."""
    if app in SHIPPED or app in GIVEN or app in announced():
        return True
    return "METHOD" in vars(sys.modules.get(app) or ModuleType(app))  # imported already


def code_of_methods(module: str) -> ModuleType | None:
    """Import a module of the user's methods that is not of this package; else None.

    For an announced method any module of its package; for a given or imported one its module only.
    """
    if module in GIVEN:
        return GIVEN[module]
    if given := next((one for one in GIVEN.values() if one.__name__ == module), None):
        return given
    packages = {one.partition(".")[0] for one in announced().values()} - {"flower_graph"}
    if module in announced().values() or module.partition(".")[0] in packages:
        return import_module(module)
    return sys.modules[module] if module and has_method(module) else None
