"""What a SuperNode's node config permits: a server that asks for less is refused, by the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ego_helpers import toy_egos
from flwr.app import Context, Message, RecordDict

from flower_graph.apps.cli.main import main
from flower_graph.apps.client_app import app
from flower_graph.data.sources.cache import fetching, missing_message
from flower_graph.errors import ConfigError, DataError, RefusedError
from flower_graph.method.load import load_config
from flower_graph.method.of_app import configured_client
from flower_graph.method.permits import Permits
from flower_graph.secure.node_config import least_clients
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import PrepareRequest
from flower_graph.simulation import InProcessGrid

NOISY = ("privacy.epsilon=2", "privacy.clipping_norm=5")
NODE: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}
MASKED = ("strategy.aggregation=masked",)
LIES = (*MASKED, "strategy.trust=malicious-server")

REFUSED = [
    ("nfedgnn/cora", (), {"most-epsilon": 2}),
    ("nfedgnn/cora", ("privacy.epsilon=1000000",), {"most-epsilon": 2}),
    ("nfedgnn/cora", (), {"most-clip": 5}),
    ("nfedgnn/cora", ("privacy.epsilon=2", "privacy.clipping_norm=1e30"), {"most-clip": 5.0}),
    ("nfedgnn/cora", ("privacy.epsilon=1000",), {"least-noise": 1}),
    ("fedgls/cora-linqs", ("strategy.name=fed-gnn", "privacy.epsilon=2", "privacy.form=central"),
     {"most-epsilon": 2}),
    ("nfedgnn/cora", (), {"least-clients": 10}),
    ("fedscem/cora-linqs", ("strategy.aggregation=plain",), {"least-clients": 10}),
    ("fedscem/cora-linqs", ("strategy.aggregation=plain",), {"allow-trust": "semi-honest"}),
    ("fedscem/cora-linqs", (), {"allow-trust": "malicious-server"}),
    ("ppfl/cora-linqs-gat", (), {"allow-trust": "semi-honest,malicious-server"}),
    ("fedscem/cora-linqs", (), {"least-holders": 3}),
    ("fedscem/cora-linqs", ("strategy.least_holders=3",), {"least-holders": 4}),
    ("ppfl/cora-linqs-gat", ("strategy.alignment=secure",), {"least-holders": 3}),
    ("nfedgnn/cora-summed", MASKED, {"allow-trust": "malicious-server"}),
    ("nfedgnn/cora-summed", LIES, {"differ-by": 2}),
]  # fmt: skip


@pytest.mark.parametrize("name,overrides,node", REFUSED)
def test_a_run_below_a_floor_is_refused_by_its_name(
    name: str, overrides: tuple[str, ...], node: dict[str, Any]
) -> None:
    (floor,) = node
    with pytest.raises(RefusedError, match=floor):
        Permits.of(node).check(load_config(name, overrides))


TAKEN = [
    ("nfedgnn/cora", NOISY, {"most-epsilon": 2, "most-clip": 5, "least-noise": 0.1}),
    ("nfedgnn/cora", (), {}),
    ("fedscem/cora-linqs", (), {"allow-trust": "semi-honest", "least-clients": 2}),
    ("ppfl/cora-linqs-gat", ("strategy.alignment=secure",), {"allow-trust": "semi-honest"}),
    ("fedscem/cora-linqs", ("strategy.least_holders=3",), {"least-holders": 3}),
    ("nfedgnn/cora", (), {"least-holders": 3}),
    ("nfedgnn/cora-summed", LIES, {"allow-trust": "malicious-server", "least-clients": 5}),
]


@pytest.mark.parametrize("name,overrides,node", TAKEN)
def test_a_run_at_the_floors_is_taken(
    name: str, overrides: tuple[str, ...], node: dict[str, Any]
) -> None:
    Permits.of(node).check(load_config(name, overrides))


@pytest.mark.parametrize("node", [{}, {"state-dir": ":memory:"}], ids=["deployed", "simulated"])
def test_the_server_hears_which_floor_it_is(tmp_path: Path, node: dict[str, Any]) -> None:
    there = {**NODE, "state-dir": str(tmp_path), "most-epsilon": 2, **node}
    run: dict[str, Any] = {"config": "nfedgnn/cora-linqs", "overrides": "privacy.epsilon=1000000"}
    grid = InProcessGrid(app, num_supernodes=1, run_config=run, node_config=there)
    (number,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(RecordDict(), number, "query")])
    assert reply.has_error() and "most-epsilon=2" in reply.error.reason


@pytest.mark.parametrize("node,key", [
    ({"most-epsilom": 2}, "most-epsilon"), ({"least-client": 2}, "least-clients"),
    ({"most-epsilon": "2"}, "most-epsilon"), ({"most-clip": -1}, "most-clip"),
    ({"most-clip": float("nan")}, "most-clip"), ({"least-noise": True}, "least-noise"),
    ({"least-clients": 2.5}, "least-clients"), ({"allow-trust": "everybody"}, "allow-trust"),
    ({"allow-trust": ""}, "allow-trust"), ({"data": 3}, "data"),
    ({"least-holders": 1}, "least-holders"), ({"most-points": 0}, "most-points"),
    ({"most-point": 9}, "most-points"), ({"least-holder": 3}, "least-holders"),
])  # fmt: skip
def test_a_floor_that_cannot_be_read_is_an_error(node: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        Permits.of(node)


def asked_of(node: dict[str, Any], overrides: str) -> Any:
    run: Any = {"config": "nfedgnn/cora", "overrides": overrides}
    return configured_client(Context(1, 2, {**NODE, **node}, RecordDict(), run))


def test_a_node_names_the_data_that_a_run_may_name(tmp_path: Path) -> None:
    inside, outside = tmp_path / "graphs" / "mine.pt", tmp_path / "other.pt"
    node = {"data": f"Cora,{tmp_path / 'graphs'}"}
    for name in ("Cora", str(inside)):
        config, _ = asked_of(node, f"data.name={name}")
        assert config.data.name == name
    escaping = tmp_path / "graphs" / ".." / "other.pt"
    for name in ("PubMed", "Airports/usa", str(outside), str(escaping), "mine.pt"):
        with pytest.raises(RefusedError, match="data"):
            asked_of(node, f"data.name={name}")
    with pytest.raises(RefusedError, match=r"data\.add"):
        asked_of(node, f"data.add={outside}")


def test_a_deployed_supernode_fetches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise AssertionError("a SuperNode asked the network")

    monkeypatch.setattr("flower_graph.data.sources.pyg.check_reachable", stop)
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLOWER_GRAPH_DATA", raising=False)
    there = {**NODE, "state-dir": str(tmp_path / "state")}
    run: dict[str, Any] = {"config": "nfedgnn/cora", "overrides": "data.name=Airports/usa"}
    grid = InProcessGrid(app, num_supernodes=1, run_config=run, node_config=there)
    (number,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(RecordDict(), number, "query")])
    assert reply.has_error() and "fetches no data" in reply.error.reason
    assert str(tmp_path) not in reply.error.reason


def test_what_may_be_fetched_ends_with_the_message(tmp_path: Path) -> None:
    with pytest.raises(DataError), fetching(False):
        missing_message("a", tmp_path, [], None, True)
    assert missing_message("a", tmp_path, [], None, True)


def test_a_masked_run_has_no_vector_without_masks(tmp_path: Path) -> None:
    """The server writes the run config and the request: the one is held to the other."""
    from flower_graph.strategies.fedscem.cohort_client import EgoNetworkClient
    from flower_graph.strategies.fedscem.messages import EgoRequest

    context = Context(1, 2, {**NODE, "state-dir": ":memory:"}, RecordDict(), {})
    client = EgoNetworkClient(context, toy_egos(), masked=True, alignment="psi")
    request = object.__new__(EgoRequest)
    request.mask = None
    with pytest.raises(RefusedError, match="masks"):
        client.round(request)


def test_a_sum_of_too_few_clients_is_not_opened() -> None:
    """A minimum that is too low is refused before keys are made, also by a kept state."""
    request = PrepareRequest(b"run-of-the-sums!", 1, 2, 3, np.array([0]), np.array([[1, 2]]),
                             np.zeros((2, 32), np.uint8))  # fmt: skip
    host = SumClient(request.run_id, [0], least=4)
    for one in (host, SumClient.from_bytes(host.to_bytes(), least=4)):
        with pytest.raises(RefusedError, match="least-clients"):
            one.prepare(request)
    assert least_clients({"least-clients": 4}) == 4 and least_clients({}) == 1


@pytest.mark.parametrize("name,alignment", [
    ("fedscem/cora-linqs", "plain"),
    ("ppfl/cora-linqs-gat", "pairs"),
])  # fmt: skip
def test_more_holders_are_asked_for_where_they_are_counted_alone(name: str, alignment: str) -> None:
    with pytest.raises(ConfigError, match="least_holders"):
        load_config(name, ("strategy.least_holders=3", f"strategy.alignment={alignment}"))


def test_check_prints_what_a_node_permits(capsys: pytest.CaptureFixture[str]) -> None:
    node = 'most-epsilon=2 data="Cora"'
    assert main(["check", "--node", node]) == 0
    said = capsys.readouterr().out
    assert "most-epsilon" in said and "Cora" in said
    assert "at least 2 clients" in said and str(1 << 18) in said
    assert main(["check", "nfedgnn/cora", "--node", node]) == 1
    assert "most-epsilon" in capsys.readouterr().out
    assert main(["check", "nfedgnn/cora", "privacy.epsilon=1", "--node", node]) == 0
    assert main(["check", "--node", "nonsense"]) == 2
    assert "--node" in capsys.readouterr().err
    assert main(["check"]) == 2
