"""A model on its client's own test nodes and on all clients': by hand, and after runs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from federation import METHODS
from torch import Tensor, nn

import flower_graph as fg
from flower_graph.apps.run import run_server
from flower_graph.client.learner import GraphOnDevice
from flower_graph.errors import ConfigError
from flower_graph.method import evaluation
from flower_graph.method.page import page
from flower_graph.method.registry import method_of
from flower_graph.report.result import describe_result, summarise

BOTH = "evaluate=[own,all]"


class Says(nn.Module):
    """Gives every node the same logits."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.said = torch.tensor(logits)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.said.expand(len(x), -1)


def client(number: int, classes: list[int], tested: list[bool]) -> GraphOnDevice:
    y, none = torch.tensor(classes), torch.zeros((2, 0), dtype=torch.int64)
    return GraphOnDevice((number,), torch.zeros(len(y), 1), none, y, {"test": torch.tensor(tested)})


# Classes of test nodes: (0, 0, 1, 1), (1), none
GRAPHS = [
    client(0, [0, 0, 1, 1, 1], [True] * 4 + [False]),
    client(1, [1, 0], [True, False]),
    client(2, [0], [False]),
]


def test_three_clients_by_hand() -> None:
    zero, one, lost = Says(1, 0), Says(0, 1), Says(math.nan, 0)
    common = evaluation.judge_common(one, GRAPHS)
    np.testing.assert_array_equal(common.own, [1 / 2, 1, math.nan])
    np.testing.assert_array_equal(common.all, [3 / 5] * 3)
    assert common.to_result([4]) == {"rounds": [4], "own": 3 / 4, "all": pytest.approx(3 / 5)}
    own = evaluation.judge_own([zero, one, one], GRAPHS)
    np.testing.assert_array_equal(own.own, [1 / 2, 1, math.nan])
    np.testing.assert_array_equal(own.all, [2 / 5, 3 / 5, 3 / 5])
    half = evaluation.judge_own([zero, lost, one], GRAPHS)
    assert half.to_result([1]) == {"rounds": [1], "own": 1 / 2, "all": pytest.approx(1 / 2)}


def judged(name: str, *settings: str) -> tuple[Any, Any]:
    done = METHODS[name].whole("rounds=3", BOTH, *settings, state_dir=None)
    return done, done.result["evaluated"]


def test_a_common_model_has_the_runs_accuracy_and_the_share_of_all_nodes() -> None:
    done, found = judged("fedavg")
    plain = METHODS["fedavg"].whole("rounds=3", state_dir=None)
    assert plain.figures == pytest.approx(done.figures, abs=0, rel=0, nan_ok=True)
    assert "evaluated" not in plain.result and found.keys() == {"common-model"}
    assert found["common-model"]["own"] == pytest.approx(done.result["test-accuracy"])
    rows = fg.load_run(done.out).predictions().of_role("test")
    share = (rows.predicted == rows.label).mean()
    assert found["common-model"]["all"] == pytest.approx(share)
    table, old = pd.read_csv(done.out / "clients.csv"), pd.read_csv(plain.out / "clients.csv")
    assert [*table.columns] == [*old.columns, evaluation.COLUMN]
    last = table[table["at"] == "last"]
    assert last[evaluation.COLUMN].tolist() == pytest.approx([share] * 4)
    assert table[evaluation.COLUMN].notna().equals(table["round"] == 3)
    # Where SuperNodes keep their models to themselves nothing is judged
    assert "evaluated" not in METHODS["fedavg"].whole("rounds=3", BOTH).result


@pytest.mark.parametrize("name", ["ditto", pytest.param("fedproto", marks=pytest.mark.slow)])
def test_own_models_are_judged_at_every_client(name: str) -> None:
    networks = ["model.name=[gcn,sage,mlp]"] * (name == "fedproto")
    done, found = judged(name, *networks)
    run, config = fg.load_run(done.out), METHODS[name].load(*networks)
    assert found["own-model"]["own"] == pytest.approx(done.result["test-accuracy"])
    graphs, right = method_of(config).graphs(config), np.zeros((4, 2))
    for place, graph in enumerate(graphs):
        for other in graphs:
            logits = run.model(graph.client)(other.x.to_dense(), other.edge_index)
            good = (logits.argmax(1) == other.y)[other.test_mask]
            right[place] += [good.sum(), len(good)]
    shares = right[:, 0] / right[:, 1]
    assert found["own-model"]["all"] == pytest.approx(shares.mean())
    table = pd.read_csv(done.out / "clients.csv")
    assert table[table["at"] == "last"][evaluation.COLUMN].tolist() == pytest.approx(shares)
    # Ditto's common model is FedAvg's
    assert ("common-model" in found) == (name == "ditto")
    if name == "ditto":
        other = judged("fedavg")[1]
        for nodes in ("own", "all"):
            theirs = other["common-model"][nodes]
            assert found["common-model"][nodes] == pytest.approx(theirs, abs=1e-6)


def test_the_round_is_that_of_the_models_and_figures_are_shown(tmp_path: Path) -> None:
    done, found = judged("local", "keep=best")
    assert found["own-model"]["rounds"] == [done.result["best-round"]]
    best = done.result["test-accuracy-at-best-val"]
    assert found["own-model"]["own"] == pytest.approx(best)
    words = f"own model on own test nodes: {best:.3f}"
    assert words in describe_result("local", done.result, done.out)
    several = summarise(tmp_path, [done.result, done.result])
    assert f"{words} ± 0.000" in describe_result("local", several, done.out)
    shown = page(done.out)
    assert "own model on all test nodes" in shown


@pytest.mark.parametrize(
    ("name", "settings"),
    [(one, ()) for one in ("nfedgnn", "fedscem", "fedgls", "gat")]
    + [("fedavg", (f"evaluate={bad}",)) for bad in ("[]", "[all]", "[own,own]", "[mine]")]
    + [("fedavg", (one,)) for one in ("task=links", "save=none", "save=predictions")],
)
def test_others_are_refused_by_the_key(name: str, settings: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        METHODS[name].load(BOTH, *settings)
    assert caught.value.key == "evaluate"


def test_nobody_has_the_data_of_all_in_a_deployment(tmp_path: Path) -> None:
    config = METHODS["fedavg"].load(BOTH)
    folder = method_of(config).run_data(config).server
    with pytest.raises(ConfigError) as caught:
        run_server(config, None, tmp_path / "out", engine="flwr", folder=folder)  # type: ignore[arg-type]
    assert caught.value.key == "evaluate" and not (tmp_path / "out").exists()
