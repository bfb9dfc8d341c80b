"""Each method's ``own-graph`` on ten graphs such as people have, by command line and by Python."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import COMPARED, PERSONAL
from own_graphs import ALIKE, OTHERS
from torch_geometric.data import Data

from flower_graph.apps.cli.main import main
from flower_graph.apps.run import run
from flower_graph.method.load import list_configs, load_config
from flower_graph.method.registry import known_apps

GRAPHS = {**ALIKE, **OTHERS}
TWICE = ("nfedgnn/own-graph", "gaps")  # CI tries it by the command line and by Python
CONFIGS = [name for name in list_configs() if name.endswith("/own-graph")]
# Of methods that cut and train as FedGLS does: one graph of each kind says what all do
FEW = [f"{name}/own-graph" for name in (*PERSONAL, *COMPARED)]
SOME = ("counts", "no features")
RELEASED = [f"{name}/own-graph" for name in COMPARED]
CASES = [
    pytest.param(
        config,
        name,
        marks=pytest.mark.slow
        if (name in SOME and config not in RELEASED) or (config, name) == TWICE
        else pytest.mark.release,
    )
    for config in CONFIGS
    for name in (SOME if config in FEW else GRAPHS)
]
REGRESSION, WORDS = "logistic-regression", "not better than"
Captured = pytest.CaptureFixture[str]
# What two runs of the same settings share
SAME = ("test-accuracy-at-best-val", "best-val-accuracy", "loss", "bytes", "baselines", "clients")


def test_every_method_has_one() -> None:
    assert {name.partition("/")[0] for name in CONFIGS} == {*known_apps()}


@pytest.mark.parametrize(("config", "name"), CASES)
def test_a_method_beats_features_alone_where_neighbours_are_alike_and_else_says_so(
    config: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    save(GRAPHS[name], tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["data.name=graph.pt", "device=cpu", *quick(config)]
    assert main(["run", config, *words, "--out", "out", "--quiet"]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    accuracy, alone = result[SAME[0]], result["baselines"][REGRESSION]["test"]
    if name in ALIKE:
        assert accuracy > alone and "not better than logistic regression" not in said
    else:
        assert WORDS in said, (accuracy, result["baselines"])
    if name != TWICE[1]:
        return
    through_python: dict[str, Any] = run(load_config(config, words), tmp_path / "again")
    assert {key: through_python[key] for key in SAME} == {key: result[key] for key in SAME}


def quick(config: str) -> list[str]:
    """Leave the last evaluation by an MLP out, which takes the longest and decides nothing here."""
    return ["judge.mlp=false"] if config.startswith("ppfl") else []


def save(make: Callable[[], Data], folder: Path) -> None:
    torch.save(make(), folder / "graph.pt")
