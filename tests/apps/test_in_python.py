"""``fg.run`` is the command for Python: settings in any form, the same checks, the same files."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from run_folders import SMALL
from torch_geometric.data import Data
from torch_geometric.utils import from_networkx

import flower_graph as fg
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import as_overrides, load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_in_python_leaves_what_the_command_leaves() -> None:
    run = fg.run("fedgta/cora-linqs", SMALL, seed=3)
    assert run.path.parent == Path("runs").absolute() and (run.path / "result.json").is_file()
    assert run.config == load_config("fedgta/cora-linqs", [*as_overrides(SMALL), "seed=3"])
    assert len(run.predictions().node) == 60 and run.metrics[-1]["round"] == 2
    with pytest.raises(ConfigError, match="supernodes: 0"):
        fg.run("fedgta/cora-linqs", SMALL, supernodes=0)
    both = fg.run("fedgta/cora-linqs", as_overrides(SMALL), seed=(3, 4), out="both")
    assert list(both.seeds) == [3, 4] and both.seeds[3].metrics[0]["loss"] == run.metrics[0]["loss"]


def test_settings_in_any_form() -> None:
    nested = {"model": {"name": "gat", "heads": 2}, "data": {"root": None, "ratios": [0.5, 0.5]}}
    words = ['model.name="gat"', "model.heads=2", "data.root=null", "data.ratios=[0.5, 0.5]"]
    assert as_overrides(nested) == words
    assert as_overrides({"model.name": "gat", "rounds": 3}) == ['model.name="gat"', "rounds=3"]
    assert as_overrides(["rounds=3"]) == ["rounds=3"] and as_overrides(None) == []
    for wrong, why in (("rounds=3", "mapping"), ({"rounds": object()}, "overrides")):
        with pytest.raises(ConfigError, match=why):
            as_overrides(wrong)


def given_graph() -> Any:
    """Make a graph with the attributes that ``from_networkx`` finds at its nodes and edges."""
    graph = networkx.connected_caveman_graph(4, 8)
    for node, found in graph.nodes(data=True):
        found.update(label=node // 16, age=float(node % 16), income=float(node // 16))
    networkx.set_edge_attributes(graph, 1.0, "weight")
    return from_networkx(graph)


def test_a_graph_that_python_has_is_saved_and_read_again() -> None:
    settings: dict[str, Any] = {key: one for key, one in SMALL.items() if key != "data"}
    settings["data.features"] = "as-is"
    data = given_graph()
    run = fg.run("fedgta/cora-linqs", {**settings, "data.name": data}, out="one/run")
    (file,) = Path("one/graphs").glob("*.pt")
    assert run.config.data.name == str(file.absolute())
    assert len(fg.load_run(run.path).predictions().node) == 32
    x = torch.stack([data.age, data.income], 1)
    assert run.predict(x, data.edge_index, client=0).shape == (32, 2)
    nested = {**settings, "data": {"name": Data(x=x, edge_index=data.edge_index, y=data.label)}}
    again = fg.run("fedgta/cora-linqs", nested, out="one/again")
    assert again.metrics[-1]["loss"] == run.metrics[-1]["loss"]
    with pytest.raises(DataError, match="has no y"):
        fg.run("fedgta/cora-linqs", {"data.name": Data(x=x, edge_index=data.edge_index)})


def test_a_notebook_completes_names_and_shows_little(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"run", "load_run", "Run"} <= set(dir(fg)) and "load_graph" in dir(fg.data)
    run = fg.run("fedgta/cora-linqs", SMALL)
    assert "round 2/2" in capsys.readouterr().err
    assert all(len(repr(one)) < 120 for one in (run.metrics, run.predictions()))
    assert len(run.metrics.to_pandas()) == 2 and len(run.predictions().to_pandas()) == 60


CODE = """
{first}
import flower_graph as fg, torch
before = torch.get_num_threads()
torch.set_num_threads(2)
from flower_graph.engine.machine import waiting_threads
with waiting_threads():
    print(torch.get_num_threads())
print(torch.get_num_threads())
import os
print(os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.slow  # two processes that import PyTorch
@pytest.mark.parametrize(("first", "threads"), [("import torch", 1), ("", 2)])
def test_threads_do_not_spin_in_python_either(first: str, threads: int) -> None:
    """A run has one thread where torch's would spin, and all where they were told to wait."""
    environment = {key: one for key, one in os.environ.items() if not key.startswith("OMP_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    code = [sys.executable, "-c", CODE.format(first=first)]
    done = subprocess.run(code, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == [str(threads), "2", "passive"]
    assert ("one thread" in done.stderr) == (threads == 1)
