"""What a config of FedGLS becomes: its method, its clients, what it refuses, whole runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from app_helpers import own_config, own_graph
from torch_geometric.data import Data

from flower_graph.apps.run import simulate
from flower_graph.errors import ConfigError
from flower_graph.records.rounds import RoundReport
from flower_graph.strategies.fedgls import method as fedgls
from flower_graph.strategies.fedgls.config import GRAPHS, METHODS, FedGLSConfig

MakeFedGLSConfig = Callable[..., FedGLSConfig]


@pytest.fixture
def config_of(tmp_path: Path) -> MakeFedGLSConfig:
    """Three clients of ten nodes each, drawn from the small graph; one or two have no edges."""
    partition = "partition:\n  method: random\n  clients: 3\n"
    return own_config(tmp_path, "fedgls", f"rounds: 2\n{partition}graph:\n  neighbours: 3\n")


def figures(reports: list[RoundReport]) -> list[float]:
    return [
        value
        for report in reports
        for value in (report.loss, report.train_accuracy, report.val_accuracy, report.test_accuracy)
    ]


# Who has edges -----------------------------------------------------------------------------------


def graphless(config: FedGLSConfig) -> int:
    return sum(graph.is_graphless for graph in fedgls.METHOD.graphs(config))


def test_a_share_of_the_clients_has_no_edges(config_of: MakeFedGLSConfig) -> None:
    found = [
        graphless(config_of("strategy.name=fed-mlp", f"graph.graphless_ratio={ratio}"))
        for ratio in (0, 0.3, 0.7, 1)
    ]
    assert found == [0, 1, 2, 3]


def test_without_a_graphless_client_there_is_nothing_to_learn(
    config_of: MakeFedGLSConfig,
) -> None:
    none = "graph.graphless_ratio=0"
    with pytest.raises(ConfigError, match="graphless_ratio: 0"):
        simulate(config_of(none))
    # The baselines are all what they are for clients with edges.
    wanted = figures(simulate(config_of(none, "strategy.name=fed-gnn")))
    assert figures(simulate(config_of(none, "strategy.name=fed-gnn-knn"))) == wanted


def test_where_all_are_graphless_fedgls_is_its_knn_baseline(
    config_of: MakeFedGLSConfig, caplog: pytest.LogCaptureFixture
) -> None:
    everyone = "graph.graphless_ratio=1"
    reports = simulate(config_of(everyone))
    assert "all 3 clients are graphless" in caplog.text
    wanted = simulate(config_of(everyone, "strategy.name=fed-gnn-knn"))
    assert figures(reports) == figures(wanted)


@pytest.mark.parametrize("name", METHODS)
def test_more_neighbours_than_nodes(name: str, config_of: MakeFedGLSConfig) -> None:
    config = config_of("graph.neighbours=10", f"strategy.name={name}")
    if GRAPHS[name] not in ("learned", "knn"):
        assert fedgls.METHOD.num_clients(config) == 3  # nobody looks for neighbours
        return
    with pytest.raises(ConfigError, match=r"graph\.neighbours"):
        fedgls.METHOD.num_clients(config)


# Clients of one's own ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three saved clients; the second has no edges."""
    made = tmp_path / "clients"
    made.mkdir()
    for number in range(3):
        whole = own_graph()
        x = whole.x.roll(number, 0)
        edges = None if number == 1 else whole.edge_index
        torch.save(Data(x=x, y=whole.y, edge_index=edges), made / f"{number}.pt")
    return made


def test_fewer_labels_for_every_client(config_of: MakeFedGLSConfig, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"graph\.knn_on.*strategy\.n"):
        config_of("graph.knn_on=encoder")
    few, all_ = (
        fedgls.METHOD.graphs(config_of(f"data.name={folder}", f"partition.train_share={share}"))
        for share in (0.3, "null")
    )
    assert [int(one.train_mask.sum()) for one in few] == [9, 9, 9]
    for one, other in zip(few, all_, strict=True):
        assert torch.equal(one.test_mask, other.test_mask) and int(other.train_mask.sum()) == 18


def test_true_edges_that_nobody_has(config_of: MakeFedGLSConfig, folder: Path) -> None:
    config = config_of(f"data.name={folder}", "strategy.name=fed-gnn")
    with pytest.raises(ConfigError, match=r"strategy\.name.*client 1"):
        simulate(config)


def test_a_folder_without_a_graphless_client(config_of: MakeFedGLSConfig, folder: Path) -> None:
    (folder / "1.pt").unlink()
    with pytest.raises(ConfigError, match=r"data\.name.*2"):
        simulate(config_of(f"data.name={folder}"))


def test_local_training_compares_the_graphs_that_are_averaged_elsewhere(
    config_of: MakeFedGLSConfig,
) -> None:
    alone, together = (
        simulate(config_of(f"strategy.name={name}")) for name in ("local-gnn-knn", "fed-gnn-knn")
    )
    assert alone[-1].structure == pytest.approx(together[-1].structure)
