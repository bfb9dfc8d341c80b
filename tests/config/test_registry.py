"""Methods that do not ship, also on SuperNodes; and the run config of the root app."""

import json
import os
import re
import sys
import tomllib
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps.cli import main as cli
from flower_graph.apps.cli.launch import flwr_run
from flower_graph.apps.client_app import app as client_app
from flower_graph.apps.run import simulate
from flower_graph.apps.server_app import app as server_app
from flower_graph.config.app_keys import RUN_CONFIG, SETTINGS
from flower_graph.config.schema import known_keys
from flower_graph.data.sources import datasets
from flower_graph.errors import ConfigError, NoClientsError
from flower_graph.flower_compat import fuse_dicts, parse_config_args
from flower_graph.method import registry
from flower_graph.method.load import load_config
from flower_graph.method.permits import allowed_methods, configured
from flower_graph.method.registry import known_apps, schema_of
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
        pass

    needs_own_nodes = True


class Mine(FedGLS):
    name = "{name}"
    schema = Settings
    client, clients = "hamlet", "hamlets"
    tables = ()

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
    datasets._made.clear()


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
    manifests = [json.loads(one.read_text()) for one in tmp_path.glob("cut/*/manifest.json")]
    assert [one["settings"]["app"] for one in manifests] == ["strangers.mine"] * 5
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


@pytest.mark.parametrize(
    ("text", "app", "complaint"),
    [
        (MINE, "strangers.nobody", "app: 'strangers.nobody'"),
        ("import nothing_of_this_name", "", "ModuleNotFoundError: No module named"),
        ("1 / 0", "", "ZeroDivisionError: division by zero"),
        ("x = 1", "", "the module strangers.mine"),
        ("METHOD = 3", "", "METHOD is 3"),
    ],
)
def test_an_unfit_module_is_told(text, app, complaint, tmp_path, strangers):
    (strangers / "strangers" / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load_config(small_yaml(tmp_path, app or "strangers.mine"))


def context_of(run_config: dict[str, Any], **node_config: Any) -> Context:
    return Context(1, 2, node_config, RecordDict(), run_config)


def test_a_run_does_not_choose_what_a_supernode_imports(tmp_path, strangers):
    def app_of(config: str, methods: str = "", **given: str) -> str:
        context = context_of({"config": config, **given}, methods=methods)
        return configured(context, allowed_methods(context))[0].app

    yaml = small_yaml(tmp_path)
    for config, methods, given in (
        *((yaml, methods, {}) for methods in ("", "other.one, third")),
        ("fedgls/cora", "", {"overrides": "app=strangers.mine"}),  # as little trusted as a file
    ):
        with pytest.raises(ConfigError, match="methods"):
            app_of(config, methods, **given)
    assert "strangers.mine" not in sys.modules
    assert app_of(yaml, "other.one, strangers.mine") == "strangers.mine"
    announce(strangers, "hamlets", "strangers.mine")
    assert app_of(small_yaml(tmp_path, "hamlets")) == "hamlets"


def test_actors_of_ray_may_import_any(monkeypatch):
    assert allowed_methods(context_of({})) == frozenset()
    for is_connected, allowed in ((True, None), (False, frozenset())):
        ray = SimpleNamespace(is_initialized=lambda answer=is_connected: answer)
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert allowed_methods(context_of({})) == allowed
    with pytest.raises(ConfigError, match="node-config methods"):  # which must be text
        allowed_methods(context_of({}, methods=3))


def test_the_client_app_refuses_and_answers(tmp_path):
    config, reports = load_config(small_yaml(tmp_path)), []

    def start(**how: Any) -> None:
        given = {"config": small_yaml(tmp_path)}
        grid = InProcessGrid(client_app, num_supernodes=4, run_config=given, **how)
        strategy = registry.method_of(config).build_strategy(config, None)
        strategy.start(grid, num_rounds=1, timeout=5, on_round=reports.append)

    with pytest.raises(NoClientsError, match=r"ConfigError: app: 'strangers.mine'"):
        start()
    start(node_config={"methods": "strangers.mine"})
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


# The run config of the root app: Flower's own keys ------------------------------------------------

ROOT = Path(__file__).parents[2]
TINY = (
    "data.name=csbm data.nodes=60 data.classes=3 data.degree=6 data.active=5 data.split=random "
    "data.ratios=[0.4,0.3,0.3]"
)


def given_to_flower(*words: str) -> Context:
    """Read `--run-config` as `flwr run` and its SuperLink do: unknown keys are refused."""
    given = fuse_dicts(dict(RUN_CONFIG), parse_config_args(list(words)), check_keys=True)
    return Context(1, 2, {}, RecordDict(), given)


def test_the_root_app_declares_what_is_read():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["tool"]["flwr"]["app"]["config"] == dict(RUN_CONFIG)
    for name in ("quickstart", "ppfl/cora-linqs-gat"):  # without keys as in the config
        assert configured(given_to_flower(f"config='{name}'"))[0] == load_config(name)


@pytest.mark.parametrize("app", known_apps())
def test_every_method_has_what_the_keys_stand_for(app):
    known = known_keys(schema_of(app))
    missing = {key for key, setting in SETTINGS.items() if setting not in known}
    assert missing <= {"learning-rate", "local-epochs"}  # not every method has one step size


GLS = "config='fedgls/cora-linqs'"


def test_a_key_is_a_setting():
    values = dict(zip(SETTINGS, (5, 3, "fed-mlp", 0.5, 0.001, 2, 4, 6), strict=True))
    words = [f"{key}={value!r}" for key, value in values.items()]
    config, _ = configured(given_to_flower(GLS, *words, "overrides='rounds=7 seed=8'"))
    assert {key: attrgetter(one)(config) for key, one in SETTINGS.items()} == values
    config, _ = configured(given_to_flower(GLS, "num-server-rounds='5' learning-rate=''"))
    assert config == load_config("fedgls/cora-linqs", ["rounds=5"])


SECURE = "overrides='strategy.alignment=secure'"
# What is given, and the key that is blamed: of the run config, of the settings, or only the latter
BAD = {
    "local-epochs=2": "strategy.local_epochs",
    "config='ppfl/cora-linqs-gat' learning-rate=0.1": "strategy.learning_rate",
    "num-server-rounds='ten'": "rounds: 'ten'",
    "fraction-train=1.5": "strategy.participation: 1.5",
    "strategy-name='fedavg'": "strategy.name: 'fedavg'",
    f"config='ppfl/cora-linqs-gat' fraction-train=0.5 {SECURE}": "strategy.participation",
    "num-server-rounds=2 overrides='rounds=2 strategy.nmae=x'": "strategy.nmae: ",
    "local-epochs=2 overrides='sede=1'": "sede: ",
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_key_is_named_with_what_there_is(words):
    with pytest.raises(ConfigError) as error:
        configured(given_to_flower(words))
    assert str(error.value).startswith(BAD[words]) and "\n" not in str(error.value)


def test_the_root_app_runs_by_its_keys(tmp_path):
    words = f"num-server-rounds=2 seed=7 learning-rate=0.05 output-dir='{tmp_path / 'out'}'"
    given = given_to_flower(words, f"overrides='{TINY}'").run_config
    grid = InProcessGrid(client_app, num_supernodes=2, run_config=given)
    server_app(grid, Context(grid.run.run_id, 0, {}, RecordDict(), given))
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert (result["rounds"], result["seed"], result["clients"]) == (2, 7, 60)
    assert result["config"]["strategy"]["learning_rate"] == 0.05
    with pytest.raises(ConfigError, match=r"checkpoint_every: 5.*output-dir"):
        configured(given_to_flower("overrides='checkpoint_every=5'"))
