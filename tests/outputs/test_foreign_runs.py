"""A run's folder that somebody else made runs no code and reads no environment variable."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import GRAPH, MODEL, make_run

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.config import foreign
from flower_graph.config.foreign import Trust
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method import registry
from flower_graph.method.load import load_config
from flower_graph.method.run import latest_in
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import read_models

EVIL = """
from pathlib import Path
from torch import nn
Path({marker!r}).touch()
class Thing(nn.Module):
    pass
"""
OWN = """
from dataclasses import dataclass
from torch_geometric.nn import Sequential
from flower_graph.config.module import ModuleRunConfig
from flower_graph.method.module_method import ModuleMethod
from flower_graph.outputs.modules import GCN

class Mine(GCN):
    pass

@dataclass
class Settings(ModuleRunConfig):
    app: str = "mine.of_mine"

class Method(ModuleMethod):
    name, schema = "mine.of_mine", Settings

METHOD = Method()
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules and methods that a test brings."""
    before = set(sys.modules)
    monkeypatch.setattr(foreign, "GIVEN", {})
    monkeypatch.setattr(registry, "GIVEN", foreign.GIVEN)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("evil", "mine", "of_mine"):
            del sys.modules[name]


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name the file that code in a run would make; ``evil`` can be imported, and makes it."""
    path, code = tmp_path / "marker", tmp_path / "code"
    code.mkdir()
    (code / "evil.py").write_text(EVIL.format(marker=str(path)))
    monkeypatch.syspath_prepend(code)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a run whose clients have one model in common."""
    return make_run(tmp_path / "run", own=False)


def say(folder: Path, **changes: Any) -> None:
    """Change what the models' files say."""
    for path in folder.glob("clients/*/model.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def configure(folder: Path, **changes: Any) -> None:
    """Change lines of the run's settings."""
    path = folder / "config.yaml"
    lines = [one for one in path.read_text().splitlines() if one.partition(":")[0] not in changes]
    path.write_text("\n".join([*lines, *(f"{k}: {json.dumps(v)}" for k, v in changes.items())]))


def commanded(*words: object) -> None:
    if code := main([*map(str, words)]):
        raise ConfigError(f"exit {code}")


# All that reads a run's models -------------------------------------------------------------------


def model(folder: Path) -> None:
    fg.load_run(folder).model(0)


def predicted(folder: Path) -> None:
    fg.load_run(folder).predict(**GRAPH, client=0)


def by_itself(folder: Path) -> None:
    (saved,) = read_models(folder / "clients" / "0")
    build_module(saved)


def at_a_client(folder: Path) -> None:
    home = folder.parent / "home" / "outputs"
    home.mkdir(parents=True)
    (folder / "clients" / "0").rename(home / "run")
    latest_in(home.parent).model()


def predict_command(folder: Path) -> None:
    torch.save(GRAPH, folder.parent / "graph.pt")
    commanded("predict", folder, "--client", "0", "--data", folder.parent / "graph.pt")


DOORS = (model, predicted, by_itself, at_a_client, predict_command)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("which", ["import", "hints", "file"])
def test_a_models_class_runs_no_code(
    door: Callable[[Path], None], which: str, folder: Path, marker: Path
) -> None:
    hint = f"x -> __import__('pathlib').Path({str(marker)!r}).touch()"
    sequential = {"input_args": hint, "modules": []}
    if which == "import":
        say(folder, module="evil.Thing", arguments={})
    elif which == "hints":
        say(folder, module="torch_geometric.nn.Sequential", arguments=sequential)
    else:  # a class that ships makes others' in no way
        say(folder, module="flower_graph.outputs.modules.nn.Module", arguments={})
    with pytest.raises((OutputError, ConfigError)):
        door(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 10**12},
        {"hidden": 2**20},  # allowed, but not the weights'
        {"hidden": True},
        {"dropout": "0.5"},
        {"dropout": 7},
        {"classes": [2]},
        {"other": 1},
    ],
    ids=str,
)
def test_arguments_of_classes_that_ship_are_checked(changes: dict[str, Any], folder: Path) -> None:
    say(folder, arguments=MODEL[1] | changes)
    with pytest.raises(OutputError):
        model(folder)


# All that reads a run's settings -----------------------------------------------------------------


def config_read(folder: Path) -> None:
    _ = fg.load_run(folder).config


def config_given(folder: Path) -> None:
    load_config(str(folder / "config.yaml"))


def config_as_parent(folder: Path) -> None:
    (folder.parent / "mine.yaml").write_text("defaults: run/config.yaml\nrounds: 3\n")
    load_config(str(folder.parent / "mine.yaml"))


def resumed(folder: Path) -> None:
    commanded("run", "--resume", folder)


def resumed_without_traces(folder: Path) -> None:
    for one in folder.iterdir():
        if one.is_file() and one.name != "config.yaml":
            one.unlink()
    (folder / "clients").rename(folder.parent / "elsewhere")
    resumed(folder)


def run_again(folder: Path) -> None:
    commanded("run", folder / "config.yaml", "--out", folder.parent / "out")


def shown(folder: Path) -> None:
    commanded("show", folder / "config.yaml")


SETTINGS = (config_read, config_given, config_as_parent, resumed, resumed_without_traces)


@pytest.mark.parametrize("door", [*SETTINGS, run_again, shown, predicted, predict_command])
def test_settings_import_no_method(
    door: Callable[[Path], None], folder: Path, marker: Path
) -> None:
    configure(folder, app="evil")
    with pytest.raises(ConfigError):
        door(folder)
    assert not marker.exists()


def test_interpolation_is_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    texts = ("${oc.env:SECRET}", "a\\${oc.env:SECRET}", "${.app} ${oc.decode:x} {", "\\\\${app}\\")
    path = folder / "config.yaml"
    before = path.read_text()
    for text in texts:
        path.write_text(before.replace("name: cora-linqs", f"name: {json.dumps(text)}"))
        for config in (fg.load_run(folder).config, load_config(str(path), ["rounds=2"])):
            assert config.data.name == text
    configure(folder, rounds="${oc.env:SECRET}")
    with pytest.raises(ConfigError, match="rounds") as refused:
        config_read(folder)
    assert "swordfish" not in str(refused.value)
    monkeypatch.setenv("ROUNDS", "7")
    own = folder.parent / "config.yaml"  # a person's own file is filled in
    own.write_text("app: fedgta\nrounds: ${oc.env:ROUNDS}\n")
    assert load_config(str(own)).rounds == 7


def test_a_run_does_not_choose_where_raw_data_lie(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, root = folder / "config.yaml", tmp_path / "raw"
    root.mkdir()
    path.write_text(path.read_text().replace("root: null", f"root: {root}"))
    assert fg.load_run(folder).config.data.root == str(root)  # it is only told
    with pytest.raises(ConfigError, match=r"data\.root"):
        load_config(str(path))
    assert load_config(str(path), [f"data.root={root}"]).data.root == str(root)
    assert main(["run", "--resume", str(folder), "device=cpu"]) == 2
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(root))
    assert load_config(str(path)).data.root == str(root)


# Trust -------------------------------------------------------------------------------------------


def test_trust_is_said_before_anything_is_imported(
    folder: Path, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bool] = []
    trust = Trust(code=True, say=lambda text: seen.append("evil" in text and not marker.exists()))
    say(folder, module="evil.Thing", arguments={})
    with pytest.raises(OutputError):  # of other weights
        fg.load_run(folder, trust=trust).model(0)
    assert seen == [True] and marker.exists()
    marker.unlink()
    del sys.modules["evil"]
    configure(folder, app="evil")
    assert main(["run", "--resume", str(folder), "--trust-code"]) == 2  # evil has no METHOD
    assert marker.exists() and "evil" in caplog.text


@pytest.mark.parametrize("how", ["given by file", "imported"])
def test_a_method_of_ones_own_needs_no_trust(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine" / "of_mine.py"
    file.parent.mkdir()
    file.write_text(OWN)
    (folder / "config.yaml").write_text("app: mine.of_mine\n")
    say(folder, module="mine.of_mine.Mine")
    monkeypatch.syspath_prepend(tmp_path)
    for door, error in ((model, OutputError), (config_read, ConfigError)):
        with pytest.raises(error):
            door(folder)
    if how == "imported":
        __import__("mine.of_mine")
    else:
        commanded("show", folder / "config.yaml", "--app", file)
    run = fg.load_run(folder)
    assert run.config.app == "mine.of_mine" and type(run.model(0)).__name__ == "Mine"
    say(folder, module="mine.of_mine.Sequential", arguments={})  # not its own
    with pytest.raises(OutputError):
        model(folder)


@pytest.mark.parametrize("text", ["x = 1\n", "METHOD = 3\n", "raise OSError\n", None])
def test_a_file_that_is_no_method(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "of_mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        registry.give_file(path)
    assert "of_mine" not in sys.modules
