"""FedSCem whose clients do not trust the server."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ego_strategy_helpers import assert_same, faulty, run
from federation import Federation, round_of

from flower_graph import EgoNetworkClient
from flower_graph.errors import RefusedError
from flower_graph.secure.parties.registry import Registry, TrustSettings, new_identity
from flower_graph.secure.ring import Ring
from flower_graph.strategies.fedscem.client import EgoRequest, check_request

DEAL = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10], [11]]


@pytest.fixture
def parties(tmp_path):
    registry, keys = Registry({}, 3), [tmp_path / f"key-{part}" for part in range(len(DEAL))]
    for path, places in zip(keys, DEAL, strict=True):
        clients = [range(100 + place, 101 + place) for place in places]
        registry = registry.with_party(new_identity(path), clients)
    registry.write(tmp_path / "registry.json")

    def client(context, egos, settings, **options):
        part = int(context.node_config["partition-id"])
        files = {"identity-key": str(keys[part]), "registry": str(tmp_path / "registry.json")}
        return EgoNetworkClient(
            context, egos, settings, trust=TrustSettings.of(files, context.run_id), **options
        )

    return {
        "registry": tmp_path / "registry.json",
        "client_options": {"client": client},
        "supernodes": len(DEAL),
        "deal": DEAL,
    }


def test_results_are_those_of_a_trusted_server_for_one_exchange_more(parties):
    trusted = run(supernodes=6, deal=DEAL, make_grid=Federation)
    done = run(**parties, make_grid=Federation)
    assert_same(done, trusted, atol=0)
    assert done.strategy.session.num_slots == trusted.strategy.session.num_slots > 10
    for number in (2, 3, 4):
        ours, theirs = (
            {one.metadata.message_type for one, _ in grid.exchanged if round_of(one) == number}
            for grid in (done.grid, trusted.grid)
        )
        assert ours - theirs == {"train.sum_list"} and theirs <= ours


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ring": None}, "without masks"),
        ({"weights": np.zeros(3, np.float32)}, "weights are asked for"),
        ({"clients": np.array([100])}, "clients .100. are asked"),
    ],
)
def test_requests_for_what_the_server_could_read_are_refused(change, says):
    mask, ring = SimpleNamespace(), Ring.fit(3, 4.0, 2.0**-8)
    honest = EgoRequest(1, np.array([100, 101]), "full", mask=mask, ring=ring)
    aligner = SimpleNamespace(finished=[100, 101])
    check_request(honest, aligner)
    with pytest.raises(RefusedError, match=says):
        check_request(replace(honest, **change), aligner)


def test_who_joins_later_is_aligned_with_all(parties):
    script = {(5, "connect", 1): "gone"}
    done = run(**parties, rounds=3, make_grid=faulty(script))
    sums = done.strategy.session.sums
    # All are aligned; of each sum one is left out, as six SuperNodes differ from five by one.
    assert done.answered == [11, 11, 11] and sums.server.epoch.number == 1
    assert sums.server.epoch.parties.size == 6
