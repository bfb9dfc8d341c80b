"""Clients with different networks: each learns as it does where all have its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from federation import METHODS
from torch.nn import functional

import flower_graph as fg
from flower_graph.config.common import NETWORKS
from flower_graph.errors import ConfigError
from flower_graph.models import GCN, PyGNetwork

MIXED = ["gcn", "sage", "mlp"]  # of four clients the first and the last have a GCN
LIST = f"model.name=[{','.join(MIXED)}]"
ONE = {"supernodes": 1, "state_dir": None}  # which has two clients of one form


def figures(name: str, *settings: str, **how: Any) -> pd.DataFrame:
    done = METHODS[name].whole("rounds=3", "every=1", *settings, **ONE, **how)
    return pd.read_csv(done.out / "curves.csv")


@pytest.mark.parametrize("name", ["local", pytest.param("fedproto", marks=pytest.mark.slow)])
def test_a_client_alone_learns_as_where_all_have_its_network(name: str) -> None:
    weight = ["strategy.prototype_weight=0"] * (name == "fedproto")
    found = figures(name, LIST, *weight)
    assert sorted({*found["client"]}) == [0, 1, 2, 3]
    for place, network in enumerate(MIXED):
        alone = figures("local", f"model.name={network}")
        theirs = [one[one["client"] % len(MIXED) == place] for one in (found, alone)]
        np.testing.assert_allclose(*(one.to_numpy() for one in theirs), atol=1e-6)


@pytest.mark.slow
def test_prototypes_of_other_networks_pull_and_supernodes_do_not_matter() -> None:
    pulled = METHODS["fedproto"].whole(LIST, "strategy.prototype_weight=5", **ONE)
    free = METHODS["fedproto"].whole(LIST, "strategy.prototype_weight=0", **ONE)
    assert pulled.figures != pytest.approx(free.figures, abs=1e-4, nan_ok=True)
    assert pulled.kept["shares"].sum() == pytest.approx(1)
    each = METHODS["fedproto"].whole(LIST, "strategy.prototype_weight=5")
    assert each.figures == pytest.approx(pulled.figures, abs=1e-6, nan_ok=True)


@pytest.mark.slow
def test_a_mixed_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole, saved = METHODS["fedproto"].whole(LIST), (LIST, "checkpoint_every=1")
    METHODS["fedproto"].run(tmp_path / "out", *saved, stop_at=2, **ONE)
    found = METHODS["fedproto"].run(tmp_path / "out", *saved, resume=True, **ONE)
    assert found.figures == pytest.approx(whole.figures, abs=1e-6, nan_ok=True)


def test_each_client_keeps_its_network() -> None:
    done = METHODS["fedproto"].whole(LIST, **ONE)
    run = fg.load_run(done.out)
    assert run.are_own and sorted(run.clients) == [0, 1, 2, 3]
    kinds = [getattr(run.model(one), "arguments", {}).get("name", "gcn") for one in range(4)]
    assert kinds == [*MIXED, MIXED[0]]
    predicted = run.predictions()
    assert predicted.client.tolist() == sorted(predicted.client)
    assert predicted.of_role("test").accuracy() == pytest.approx(done.result["test-accuracy"])
    nodes = torch.rand(5, run.data.treatment.width)
    assert run.predict(nodes, torch.tensor([[0, 1], [1, 2]]), client=1).shape == (5, 3)


@pytest.mark.parametrize("name", ["gcn", *(one for one in NETWORKS if one != "sgc")])
def test_hidden_layer_and_classes_make_the_network(name: str) -> None:
    x, edges = torch.rand(6, 4), torch.tensor([[0, 1, 2, 5], [1, 0, 3, 1]])
    net = GCN(4, 5, 3) if name == "gcn" else PyGNetwork(name, 4, 5, 3, 0.5, 0.2)
    for is_training in (False, True):
        net.train(is_training)
        torch.manual_seed(3)
        hidden = net.embed(x, edges)
        found = net.classify(hidden, edges)
        torch.manual_seed(3)
        assert torch.equal(found, net(x, edges))
    assert hidden.shape == (6, 5)
    if name == "mlp":
        weight, bias = net.network[0].weight, net.network[0].bias
        torch.testing.assert_close(
            net.eval().embed(x, edges), functional.linear(x, weight, bias).relu()
        )


@pytest.mark.parametrize(
    ("name", "networks"),
    [
        *(("fedavg", "[gcn,sage]"), ("fedgta", "[gcn]"), ("ditto", "[gcn,mlp]")),
        *(("fedproto", "[gcn,sgc]"), ("fedproto", "sgc"), ("local", "[]"), ("local", "[gcn,cnn]")),
    ],
)
def test_other_lists_are_refused(name: str, networks: str) -> None:
    with pytest.raises(ConfigError) as caught:
        METHODS[name].load(f"model.name={networks}")
    assert caught.value.key == "model.name"
