"""The methods that the user has, and the code that a run's files may name.

A run's folder may come from anybody, so its files may name only classes of this package and methods
that the user has: those of this package, those that installed packages announce, those given by
file (``--app FILE``), and those that the process has imported already. Any other code needs trust
in the whole folder, and its import is announced first.
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from flower_graph.config.rules import show
from flower_graph.errors import ConfigError
from flower_graph.storage.files import data_root

LOG = logging.getLogger(__name__)
# Of a run: settings, form of its data, rounds, result, and the result of several seeds
CONFIG, DATA = "config.yaml", "data.json"
METRICS, RESULT, SUMMARY = "metrics.jsonl", "result.json", "summary.json"
IN_RUN = "clients"  # of a simulation's folder: the outputs of each SuperNode
RUN_OF = "# run of "  # how the settings that a run keeps begin: the config that it was run with
# Files that a run writes beside its settings; any of them shows that a folder is a run's
OUTPUTS = "checkpoints predictions.npz embeddings.npz model.json models.json"
LEFT = (*OUTPUTS.split(), DATA, METRICS, RESULT, IN_RUN)
OTHERWISE = "Install its package, give its file (--app FILE), or trust the run (--trust-code)"


def seed_folders(folder: Path) -> dict[int, Path]:
    """Return a run's folders ``seed-N`` by their seed N."""
    found = ((re.fullmatch(r"seed-([0-9]{1,20})", one.name), one) for one in folder.glob("seed-*"))
    folders = {int(match[1]): one for match, one in found if match and one.is_dir()}
    return dict(sorted(folders.items()))


@dataclass(frozen=True)
class Trust:
    """Whether a run's files may name code that the user does not have."""

    code: bool = False
    say: Callable[[str], None] = LOG.warning
    """Called with a message before each import."""
    reads: bool = False
    """Whether the settings are only read: no data are then loaded by them."""

    def admit(self, name: str, refusal: Exception) -> None:
        """Announce an import, or refuse it if the folder is not trusted."""
        if not self.code:
            raise refusal
        self.say(f"trusted: importing {name}, which a file of the run names")

    def admit_settings(self, settings: Mapping[str, object], where: str) -> None:
        """Refuse settings of a run that could run code: ``ConfigError``."""
        app, root = settings.get("app"), settings.get("data.root")
        if isinstance(app, str) and not has_method(app):
            words = f"app: {show(app)} is no method that you have, and a run imports none{where}"
            self.admit(app, ConfigError(f"{words}. {OTHERWISE}"))
        if root is None or self.reads or self.code or root == str(data_root(None)):
            return
        # Raw files of data sets are pickles, which run code where they are read.
        remedy = "name it yourself (data.root=DIR), or trust the run (--trust-code)"
        raise ConfigError(f"data.root: {show(root)} may hold pickles{where}; {remedy}")


NOBODY = Trust()
OWN = Trust(code=True, say=lambda text: None)  # what this process has just written itself


def is_of_run(name: str) -> bool:
    """Return whether a file is a run's settings: ``config.yaml`` beside a run's other files."""
    path = Path(name).expanduser()
    return path.name == CONFIG and any((path.parent / one).exists() for one in LEFT)


# Any: the same type as the value has, which may be nested
def as_text(value: object) -> Any:
    """Escape a value so that OmegaConf reads ``${...}`` in it as text."""
    if isinstance(value, str):
        # A backslash before it escapes it, unless the backslash is doubled.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: as_text(one) for key, one in value.items()}
    return [as_text(one) for one in value] if isinstance(value, list) else value


# Methods ------------------------------------------------------------------------------------------

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
    "fedgcn": "fedgcn:FedGCNConfig",
    "scaffold": "scaffold:ScaffoldConfig",
    "moon": "moon:MoonConfig",
    "fedopt": "fed_opt:FedOptConfig",
    "lpgnn": "lpgnn:LPGNNConfig",
}
GIVEN: dict[str, ModuleType] = {}  # modules of the files that the user gave, by their app


@lru_cache(maxsize=1)
def announced() -> dict[str, str]:
    """Read the entry points: module by name."""
    from importlib.metadata import entry_points

    return {one.name: one.module for one in entry_points(group=GROUP)}


def has_method(app: str) -> bool:
    """Return whether the user has a method, so that importing it runs no foreign code."""
    is_imported = hasattr(sys.modules.get(app), "METHOD")
    return app in SHIPPED or app in GIVEN or app in announced() or is_imported


def code_of_methods(module: str) -> ModuleType | None:
    """Import a module of the user's methods that is not of this package; else None.

    For an announced method any module of its package; for a given or imported one its module only.
    """
    given = {one.__name__: one for one in GIVEN.values()} | GIVEN
    if module in given:
        return given[module]
    packages = {one.partition(".")[0] for one in announced().values()} - {"flower_graph"}
    if module in announced().values() or module.partition(".")[0] in packages:
        return import_module(module)
    return sys.modules[module] if module and has_method(module) else None
