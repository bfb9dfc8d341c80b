"""The command ``flower-graph new-method``: a method to start from, with its test."""

import argparse
import keyword
import sys
from pathlib import Path
from string import Template

from flower_graph.apps.cli.say import say
from flower_graph.config.foreign import SHIPPED
from flower_graph.errors import ConfigError
from flower_graph.storage.files import make_folder, named, write_text

METHOD = '''"""$name: say here what server and clients do, round by round."""

from dataclasses import dataclass

from flower_graph.client.module_client import ModuleClient
from flower_graph.config.common import ModuleRunConfig, TrainingSection
from flower_graph.config.rules import NOT_NEGATIVE
from flower_graph.config.schema import section, setting
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod

APP = "$name"


@dataclass
class Section(TrainingSection):
    """How clients train: each field is a key of the section `strategy`."""

    pull: float = setting(0.1, NOT_NEGATIVE, help="weight of the distance to what came")


@dataclass
class Config(ModuleRunConfig):
    """All settings of a run."""

    app: str = APP
    strategy: Section = section(Section)


class Client(ModuleClient):
    """A client with a graph and a module of its own."""

    def loss(self, module, graph):
        """Return the loss of a step: cross-entropy, and the distance to what the server sent."""
        return super().loss(module, graph) + self.how.pull / 2 * self.distance(module)


class Server(ModuleFedAvg):
    """FedAvg's server; write `combine(self, replies)` for another mean than Flower's."""


class Method(ModuleMethod):
    """Both halves, for commands and apps."""

    name, schema = APP, Config
    strategy_class, client_class = Server, Client


METHOD = Method()
'''

CONFIG = """# $name on the Cora that ships with flower-graph.
#
# `flower-graph run $name.yaml --app $name.py`
app: $name
rounds: 20
data:
  name: cora-linqs
  features: presence
strategy:
  pull: 0.1
"""

TEST = '''"""$name learns, is FedAvg without its term, and has its keys checked."""

from pathlib import Path

import flower_graph as fg
import pytest
from flower_graph.errors import ConfigError

CONFIG = str(Path(__file__).with_name("$name.yaml"))
SMALL = {
    "data": {"name": "csbm", "nodes": 120, "classes": 3, "num_features": 24, "active": 6},
    "data.signal": 0.5,
    "partition": {"method": "random", "clients": 3},
    "strategy.learning_rate": 0.05,
    "model.dropout": 0,
    "device": "cpu",
    "rounds": 10,
}


def figures(config, out, **settings):
    run = fg.run(config, {**SMALL, **settings}, out=out, quiet=True)
    return [run.result[name] for name in ("loss", "test-accuracy")]


def test_it_learns(tmp_path):
    loss, accuracy = figures(CONFIG, tmp_path / "out")
    assert loss < 1.0 and accuracy > 0.5  # of three classes; by chance 1.1 and 0.33


def test_it_is_fedavg_without_its_term(tmp_path):
    alike = {"strategy.local_epochs": 1, "partition.ratios": [0.6, 0.2, 0.2], "model.hidden": 16}
    alike["strategy.weight_decay"] = 0
    mine = figures(CONFIG, tmp_path / "mine", **alike, **{"strategy.pull": 0})
    assert mine == figures("fedavg/cora-linqs", tmp_path / "fedavg", **alike)


def test_its_keys_are_checked():
    with pytest.raises(ConfigError, match="strategy.pull"):
        fg.run(CONFIG, {"strategy.pull": -1})
'''


def new_method_command(args: argparse.Namespace) -> int:
    """Write a method, its YAML and its test into a folder; print what to do next."""
    name, out = args.name, args.out or Path()
    known = name in SHIPPED or name in sys.stdlib_module_names
    if not name.isidentifier() or keyword.iskeyword(name) or known:
        raise ConfigError(
            f"NAME {name!r}: must be a name for a Python module, such as fed_mine, that no shipped "
            "method and no module of Python's has"
        )
    texts = {f"{name}.py": METHOD, f"{name}.yaml": CONFIG, f"test_{name}.py": TEST}
    if there := [file for file in texts if (out / file).exists()]:
        raise ConfigError(f"NAME {name!r}: {out / there[0]} exists; choose another name or --out")
    make_folder(named(out))
    for file, text in texts.items():
        write_text(named(out / file), Template(text).substitute(name=name))
        say(out / file)
    say(
        f"try    flower-graph run {out / name}.yaml --app {out / name}.py",
        f"test   pytest {out / f'test_{name}.py'}",
    )
    return 0
