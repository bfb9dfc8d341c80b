"""Whom SuperNodes trust: settings of a run, and the throw-away keys of a simulation."""

import stat
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flower_graph.client.state import forget_run
from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.errors import RefusedError
from flower_graph.method.trust import OpenedSums
from flower_graph.secure.node_config import FEWEST_PARTIES, MALICIOUS_SERVER
from flower_graph.storage.files import default_folder

RUN = 77
HOSTED = [range(3), range(3, 4), range(4, 6), range(6, 7), range(7, 9)]


def context(partition: int | str, run_id: int = RUN) -> Context:
    """Give what the SuperNode of a partition has."""
    return Context(run_id, 1, {"partition-id": partition}, RecordDict(), {})


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the keys of a simulation."""
    monkeypatch.setenv("FLOWER_GRAPH_STATE", str(tmp_path / "state"))
    return throwaway_parties(RUN, HOSTED)


def test_each_supernode_of_a_simulation_finds_the_key_of_its_partition(registry: Path) -> None:
    for partition, clients in enumerate(HOSTED):
        trust = trust_of(context(partition))
        assert trust.identity.party == partition
        assert trust.registry.parties[partition].clients == (clients,)
        assert trust.registry.verify(partition, trust.identity.sign(b"a", b"b"), b"a", b"b")
    key = registry.with_name("0")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert stat.S_IMODE(registry.parent.stat().st_mode) == 0o700


@pytest.mark.usefixtures("registry")
def test_a_supernode_without_a_key_takes_no_part_and_keys_go_with_the_run() -> None:
    for partition, run in ((len(HOSTED), RUN), (0, RUN + 1), ("../parties/0", RUN), ("", RUN)):
        with pytest.raises(RefusedError, match=r"identity-key.*registry"):
            trust_of(context(partition, run))
    forget_run(RUN)
    assert not [*default_folder().rglob("*")]


def test_only_clients_that_do_not_trust_the_server_need_keys() -> None:
    trusting, not_trusting = OpenedSums(), OpenedSums(trust=MALICIOUS_SERVER)
    assert (trusting.fewest_nodes, not_trusting.fewest_nodes) == (1, FEWEST_PARTIES)
