"""One graph whose nodes say which client has them: what each method does with it, as shipped."""

from pathlib import Path

import pytest
import torch
from federation import COMPARED, PERSONAL, one_fast
from own_graphs import alike

from flower_graph.apps.cli.main import main
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of

CLIENTS = ("bern", "genf", "thun", "zug")
WORDS = ["data.name=graph.pt", "rounds=1", "device=cpu"]
# Methods whose clients are those of the column
CUT = ("fedgls", "fedscem", *PERSONAL, *COMPARED)
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save a graph whose nodes are each at one of four clients, and say nowhere who they are."""
    monkeypatch.chdir(tmp_path)
    owners = [CLIENTS[node % 4] for node in range(600)]
    torch.save(alike(client=owners), "graph.pt")


@pytest.mark.parametrize("app", one_fast(CUT, "fedpub"))
def test_a_method_runs_with_the_clients_of_the_column(app: str, capsys: Captured) -> None:
    assert main(["run", f"{app}/own-graph", *WORDS, "--out", "out", "--quiet"]) == 0
    assert f"{app}/own-graph: 4 " in capsys.readouterr().out


def test_fedgls_takes_edges_from_the_share_that_is_asked_for() -> None:
    def graphless(ratio: str) -> set[int]:
        config = load_config("fedgls/own-graph", [*WORDS, f"graph.graphless_ratio={ratio}"])
        graphs = method_of(config).graphs(config)  # type: ignore[attr-defined]
        assert all(g.hidden_edges is not None for g in graphs if g.is_graphless)
        return {g.client for g in graphs if g.is_graphless}

    assert len(graphless("0.25")) == 1 and len(graphless("0.5")) == 2
    assert graphless("0.25") < graphless("0.5")
    with pytest.raises(ConfigError, match=r"^graph\.graphless_ratio: 0"):
        graphless("0")


def test_ppfl_says_that_graphs_must_overlap() -> None:
    config = load_config("ppfl/own-graph", WORDS)
    with pytest.raises(DataError, match=r"data\.name"):
        method_of(config).num_clients(config)
