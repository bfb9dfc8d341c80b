"""What configs of nFedGNN, FedGLS and PPFL-GNN become: methods, clients, refusals, whole runs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from app_helpers import MakeConfig, context_of
from federation import METHODS
from graph_helpers import small_graph
from torch_geometric.data import Data

from flower_graph.apps.run import simulate
from flower_graph.errors import ConfigError, DataError, RefusedError
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport
from flower_graph.strategies.fedgls import method as fedgls
from flower_graph.strategies.fedgls.config import GRAPHS
from flower_graph.strategies.fedgls.config import METHODS as STRATEGIES
from flower_graph.strategies.nfedgnn.method import METHOD
from flower_graph.strategies.ppfl import evaluation


def test_a_deployed_client_shows_no_sum_of_gradients_unless_its_node_allows_it(
    config_of: MakeConfig,
) -> None:
    config = config_of(small_graph(30), "strategy.share=summed")
    node: dict[str, str] = {"data-folder": "/nowhere"}
    for more in ({}, {"allow-trust": "semi-honest"}):
        with pytest.raises(RefusedError, match=r"strategy\.share.*allow-trust"):
            METHOD.build_client(config, context_of(node | more), None)
    masked = config_of(small_graph(30), "strategy.share=summed", "strategy.aggregation=masked")
    with pytest.raises(DataError):  # it goes on to read the folder
        METHOD.build_client(masked, context_of(node), None)
    with pytest.raises(DataError):
        METHOD.build_client(config, context_of(node | {"allow-trust": "plain,semi-honest"}), None)


@pytest.mark.slow
def test_quickstart_is_calm(caplog: pytest.LogCaptureFixture) -> None:
    """It is the first that people see: no warning, the loss falls, accuracy does not jump."""
    reports = simulate(load_config("quickstart", ["device=cpu"]))
    found, losses = [one.val_accuracy for one in reports], [one.loss for one in reports]
    assert len(reports) == 200 and not caplog.messages
    assert max(losses) < 1.05 * losses[0] and losses[-1] < losses[100] < losses[50] < losses[0]
    assert max(abs(one - other) for one, other in pairwise(found[50:])) < 0.03
    assert min(found[100:]) > 0.74  # the paper's form: between 0.63 and 0.75


# FedGLS: who has edges ----------------------------------------------------------------------------


def fedgls_of(*overrides: str) -> Any:
    """Load FedGLS with four clients, of which two have no edges."""
    return METHODS["fedgls"].load("rounds=2", *overrides)


def figures(reports: list[RoundReport]) -> list[float]:
    return [
        value
        for report in reports
        for value in (report.loss, report.train_accuracy, report.val_accuracy, report.test_accuracy)
    ]


def test_without_a_graphless_client_there_is_nothing_to_learn() -> None:
    none = "graph.graphless_ratio=0"
    with pytest.raises(ConfigError, match="graphless_ratio: 0"):
        simulate(fedgls_of(none))
    # The baselines are all what they are for clients with edges.
    wanted = figures(simulate(fedgls_of(none, "strategy.name=fed-gnn")))
    assert figures(simulate(fedgls_of(none, "strategy.name=fed-gnn-knn"))) == wanted


def test_where_all_are_graphless_fedgls_is_its_knn_baseline(
    caplog: pytest.LogCaptureFixture,
) -> None:
    everyone = "graph.graphless_ratio=1"
    reports = simulate(fedgls_of(everyone))
    assert "all 4 clients are graphless" in caplog.text
    wanted = simulate(fedgls_of(everyone, "strategy.name=fed-gnn-knn"))
    assert figures(reports) == figures(wanted)


@pytest.mark.parametrize("name", STRATEGIES)
def test_more_neighbours_than_nodes(name: str) -> None:
    config = fedgls_of("graph.neighbours=40", f"strategy.name={name}")
    if GRAPHS[name] not in ("learned", "knn"):
        assert fedgls.METHOD.num_clients(config) == 4  # nobody looks for neighbours
        return
    with pytest.raises(ConfigError, match=r"graph\.neighbours"):
        fedgls.METHOD.num_clients(config)


# FedGLS: clients of one's own ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three saved clients; the second has no edges."""
    made = tmp_path / "clients"
    made.mkdir()
    for number in range(3):
        whole = small_graph(30)
        x = whole.x.roll(number, 0)
        edges = None if number == 1 else whole.edge_index
        torch.save(Data(x=x, y=whole.y, edge_index=edges), made / f"{number}.pt")
    return made


def test_fewer_labels_for_every_client(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"graph\.knn_on.*strategy\.n"):
        fedgls_of("graph.knn_on=encoder")
    few, all_ = (
        fedgls.METHOD.graphs(fedgls_of(f"data.name={folder}", f"partition.train_share={share}"))
        for share in (0.3, "null")
    )
    assert [int(one.train_mask.sum()) for one in few] == [9, 9, 9]
    for one, other in zip(few, all_, strict=True):
        assert torch.equal(one.test_mask, other.test_mask) and int(other.train_mask.sum()) == 18


def test_true_edges_that_nobody_has(folder: Path) -> None:
    config = fedgls_of(f"data.name={folder}", "strategy.name=fed-gnn")
    with pytest.raises(ConfigError, match=r"strategy\.name.*client 1"):
        simulate(config)


# PPFL-GNN: when runs end --------------------------------------------------------------------------


def test_a_run_ends_after_a_round_that_was_judged() -> None:
    """Rounds between evaluations are no rounds without improvement: the last one has its figure."""
    settings = ("judge.every=4", "patience=2", "rounds=30", "judge.mlp=false", "gat.epochs=1")
    reports = simulate(METHODS["gat"].load("strategy.name=local", *settings))
    val = np.array([report.val_accuracy for report in reports])
    judged = np.isfinite(val)
    # Until a figure is there, and after the best one, the second round is judged as it may be last
    assert judged.nonzero()[0][0] == 1 and judged[-1] and len(val) < 30
    best = int(np.nanargmax(val))
    assert len(val) == best + 3 and not val[-1] > val[best]


def test_the_mlp_judges_no_round_that_cannot_be_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def score(*args: Any) -> Any:
        asked.append(args[-1])
        return args[1].copy(), np.zeros(len(args[1]), np.int64)

    monkeypatch.setattr(evaluation, "cross_validated", score)
    reports = simulate(
        METHODS["gat"].load(
            "judge.every=1", "judge.mlp=true", "patience=2", "rounds=9", "gat.epochs=1"
        )
    )
    # Nothing is better than the first, so that the third is the last: both roles of four clients
    assert len(reports) == 3 and (asked.count("svc"), asked.count("mlp")) == (24, 8)
    assert asked[-2 * 8 :].count("mlp") == 8


def test_judging_seldom_and_without_validation_nodes() -> None:
    config = METHODS["deepwalk"].load("judge.every=2", "rounds=3", "partition.ratios=[0.5,0,0.5]")
    reports = simulate(config)
    measured = [report.test_accuracy == report.test_accuracy for report in reports]
    assert measured == [False, True, True]
    assert all(report.val_accuracy != report.val_accuracy for report in reports)
