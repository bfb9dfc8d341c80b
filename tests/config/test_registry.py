"""Methods that do not ship: by module, by entry point, and refused on deployed SuperNodes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps.cli import main as cli
from flower_graph.apps.cli.launch import flwr_run
from flower_graph.apps.client_app import app as client_app
from flower_graph.apps.run import simulate
from flower_graph.errors import ConfigError, NoClientsError
from flower_graph.method import of_app, registry
from flower_graph.method.load import load_config
from flower_graph.method.of_app import allowed_methods, configured
from flower_graph.simulation import InProcessGrid

Captured = pytest.CaptureFixture[str]
# A method of somebody else's, in one file: FedGLS's clients under another name
MINE = """
from dataclasses import dataclass

from flower_graph.strategies.fedgls.config import FedGLSConfig
from flower_graph.strategies.fedgls.method import FedGLS


@dataclass
class Settings(FedGLSConfig):
    app: str = "{name}"

    def validate(self) -> None:
        self.strategy.validate()


class Mine(FedGLS):
    name = "{name}"
    schema = Settings
    client, clients = "hamlet", "hamlets"
    tables = ()

    def default_supernodes(self, config):
        return self.num_clients(config)

    def audit(self):
        return None


METHOD = Mine()
"""
YAML = """
app: {app}
rounds: 1
data: {{name: csbm, nodes: 90, classes: 3, degree: 6, num_features: 40, active: 4}}
partition: {{clients: 4, method: random}}
graph: {{neighbours: 3}}
"""


@pytest.fixture(autouse=True)
def strangers(tmp_path, monkeypatch):
    """Put a folder for others' packages on the path, and forget what was read of it."""
    place = tmp_path / "site"
    (place / "strangers").mkdir(parents=True)
    (place / "strangers" / "__init__.py").touch()
    (place / "strangers" / "mine.py").write_text(MINE.format(name="strangers.mine"))
    monkeypatch.syspath_prepend(place)
    yield place
    for name in [name for name in sys.modules if name.partition(".")[0] == "strangers"]:
        del sys.modules[name]
    registry.announced.cache_clear()
    of_app._configuration.cache_clear()


def announce(place: Path, name: str, value: str) -> None:
    """Lay down what an installer would: the metadata of a package with an entry point."""
    folder = place / "strangers-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[flower_graph.methods]\n{name} = {value}\n")
    registry.announced.cache_clear()


def small_yaml(folder: Path, app: str = "strangers.mine") -> str:
    file = folder / "mine.yaml"
    file.write_text(YAML.format(app=app), encoding="utf-8")
    return str(file)


def test_a_module_is_a_method_for_every_command(tmp_path, capsys):
    yaml = small_yaml(tmp_path)
    assert cli.main(["show", yaml, "--plain"]) == 0
    assert capsys.readouterr().out.startswith("app: strangers.mine\n")
    assert cli.main(["run", yaml, "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "mine.yaml: 4 hamlets, 1 rounds, seed 0" in shown.out and "per hamlet" in shown.out
    assert "  4/4 hamlets  " in shown.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["config"]["app"], result["clients"]) == ("strangers.mine", 4)
    assert cli.main(["partition", yaml, "--out", str(tmp_path / "cut")]) == 0
    folders = sorted(path.name for path in (tmp_path / "cut").iterdir() if path.is_dir())
    assert folders == [*(f"client-000{number}" for number in range(4)), "server"]
    manifest = json.loads((tmp_path / "cut" / "client-0000" / "manifest.json").read_text())
    assert manifest["app"] == "strangers.mine"
    assert cli.main(["audit", yaml]) == 2
    assert "app: strangers.mine" in capsys.readouterr().err


def test_an_announced_method_is_known_by_its_name(tmp_path, strangers, capsys):
    announce(strangers, "hamlets", "strangers.mine")
    assert cli.main(["list"]) == 0
    assert "\n  hamlets " in capsys.readouterr().out
    config = load_config(small_yaml(tmp_path, "hamlets"))
    assert config.app == "hamlets"
    assert [report.answered for report in simulate(config)] == [4]


def test_a_shipped_name_is_never_looked_for_elsewhere(strangers, monkeypatch):
    announce(strangers, "fedgls", "strangers.mine")
    assert registry.method_named("fedgls").clients == "communities"
    with monkeypatch.context() as patched:
        patched.setattr(registry, "announced", lambda: pytest.fail("looked through"))
        for app in registry.SHIPPED:
            assert registry.schema_of(app, frozenset()) is registry.method_named(app).schema
            assert registry.method_named(app).name == app


@pytest.mark.parametrize("app", ["strangers.nobody", "no module"])
def test_an_app_that_is_no_module_is_refused(app, tmp_path):
    with pytest.raises(ConfigError, match=f"^app: {app!r}"):
        load_config(small_yaml(tmp_path, app))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import nothing_of_this_name", "cannot be imported (ModuleNotFoundError: No module named"),
        ("1 / 0", "cannot be imported (ZeroDivisionError: division by zero)"),
        ("x = 1", "the module strangers.mine"),
        ("METHOD = 3", "has METHOD = 3"),
    ],
)
def test_an_unfit_module_is_told(text, complaint, tmp_path, strangers):
    (strangers / "strangers" / "mine.py").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(small_yaml(tmp_path))
    assert complaint in str(error.value)


def context_of(run_config: dict[str, Any], **node_config: Any) -> Context:
    return Context(1, 2, node_config, RecordDict(), run_config)


def test_a_run_does_not_choose_what_a_supernode_imports(tmp_path, strangers):
    given = {"config": small_yaml(tmp_path)}
    context = context_of(given)
    with pytest.raises(ConfigError, match="methods"):
        configured(context, allowed_methods(context))
    context = context_of(given, methods="other.one, third")
    with pytest.raises(ConfigError, match=r"methods: other.one.*methods"):
        configured(context, allowed_methods(context))
    assert "strangers.mine" not in sys.modules
    # The override of a run is as little trusted as a file.
    context = context_of({"config": "fedgls/cora", "overrides": "app=strangers.mine"})
    with pytest.raises(ConfigError):
        configured(context, allowed_methods(context))
    context = context_of(given, methods="other.one, strangers.mine")
    config, _ = configured(context, allowed_methods(context))
    assert config.app == "strangers.mine"
    announce(strangers, "hamlets", "strangers.mine")
    context = context_of({"config": small_yaml(tmp_path, "hamlets")})
    assert configured(context, allowed_methods(context))[0].app == "hamlets"


def test_node_config_that_is_no_text_is_refused():
    with pytest.raises(ConfigError, match="node-config methods"):
        allowed_methods(context_of({}, methods=3))


def test_actors_of_ray_may_import_any(monkeypatch):
    assert allowed_methods(context_of({})) == frozenset()
    for is_connected, allowed in ((True, None), (False, frozenset())):
        ray = SimpleNamespace(is_initialized=lambda answer=is_connected: answer)
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert allowed_methods(context_of({})) == allowed


def test_the_client_app_refuses_and_answers(tmp_path):
    config = load_config(small_yaml(tmp_path))
    method = registry.method_of(config)
    given = {"config": small_yaml(tmp_path)}
    reports = []
    grid = InProcessGrid(client_app, num_supernodes=4, run_config=given)
    with pytest.raises(NoClientsError, match=r"ConfigError: app: 'strangers.mine'"):
        method.build_strategy(config, None).start(grid, num_rounds=1, timeout=1)
    allowing = {"methods": "strangers.mine"}
    grid = InProcessGrid(client_app, num_supernodes=4, run_config=given, node_config=allowing)
    method.build_strategy(config, None).start(grid, num_rounds=1, on_round=reports.append)
    assert [report.answered for report in reports] == [4]


@pytest.mark.flwr
def test_a_module_is_a_method_on_ray(tmp_path, strangers, monkeypatch):
    paths = [str(strangers), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    yaml, out = small_yaml(tmp_path), tmp_path / "ray"
    result = flwr_run(yaml, [], out, supernodes=2, echo=lambda _: None)
    (alone,) = simulate(load_config(yaml), supernodes=2)
    assert (result["clients"], result["config"]["app"]) == (4, "strangers.mine")
    assert result["loss"] == pytest.approx(alone.loss, abs=1e-5)
