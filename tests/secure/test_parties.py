"""Sums under a server that parties need not trust, when it is honest."""

import numpy as np
import pytest
from party_helpers import PartyWorld

from flower_graph.secure.sum.round import Skipped


@pytest.mark.parametrize("n", [5, 6, 12, 30])
def test_sums_are_exact_over_rounds(n, tmp_path):
    world = PartyWorld.make(n, tmp_path)
    world.begin()
    for number in range(2):
        world.check(world.round(number), range(n))
    assert world.server.blamed == []


@pytest.mark.parametrize("stage", ["prepare", "mask", "sign", "unmask"])
def test_thirty_percent_lost_at_each_stage(stage, tmp_path):
    world = PartyWorld.make(20, tmp_path)
    world.begin()
    gone = [1000, 1003, 1004, 1011, 1017, 1019]
    left = set(range(20)) - {node - 1000 for node in gone}
    result = world.round(0, **{stage: gone})
    world.check(result, left if stage in ("prepare", "mask") else range(20))
    world.check(world.round(1), range(20))


def test_too_few_skip_the_round(tmp_path):
    world = PartyWorld.make(10, tmp_path)
    world.begin()
    for number, stage in enumerate(("prepare", "mask", "sign")):
        result = world.round(number, **{stage: [1000, 1001, 1002, 1003, 1004]})
        assert isinstance(result, Skipped)


def test_who_shows_no_seed_is_left_out_of_a_new_list(tmp_path):
    world = PartyWorld.make(8, tmp_path)
    world.begin(lost=[1002])
    assert world.server.epoch is None and 2 not in world.server.parties
    del world.parties[1002]
    world.begin()
    assert world.server.epoch.parties.tolist() == [0, 1, 3, 4, 5, 6, 7]
    world.check(world.round(0), [0, 1, 3, 4, 5, 6, 7])


def test_the_graph_is_symmetric_and_of_all_seeds(tmp_path):
    world = PartyWorld.make(30, tmp_path, corrupt=0.0)
    world.begin()
    graph, first = world.server.epoch.partners, world.server.epoch.digest
    k = graph.shape[1]
    for place in range(30):
        for column, partner in enumerate(graph[place]):
            assert graph[partner, k - 1 - column] == place
    world.begin()
    assert world.server.epoch.digest != first


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", ["prepare", "mask", "sign", "unmask"])
def test_a_thousand_parties(stage, tmp_path):
    world = PartyWorld.make(1_000, tmp_path, corrupt=0.0)
    world.begin()
    gone = (1000 + np.random.default_rng(0).permutation(1_000)[:300]).tolist()
    left = set(range(1_000)) - {node - 1000 for node in gone}
    result = world.round(0, **{stage: gone})
    world.check(result, left if stage in ("prepare", "mask") else range(1_000))
