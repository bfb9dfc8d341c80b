"""Two sums that differ in one SuperNode tell what it sent: no party takes part in the second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from party_helpers import PartyWorld
from test_summing_of_parties import gridded

from flower_graph.errors import RefusedError
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties.differences import (
    check_difference,
    choose,
    members_of,
    set_of,
)
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.parties.messages import ListRequest
from flower_graph.secure.parties.party import LIST
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.service import SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange

COUNT, VICTIM = 12, 3


@pytest.fixture
def world(tmp_path: Path) -> PartyWorld:
    world = PartyWorld.make(COUNT, tmp_path)
    world.begin()
    return world


def asked_without(world: PartyWorld, number: int, gone: list[int], refused: str = "") -> None:
    """Have everybody sign a list without some, whom the server claims to have vanished.

    If it is to be refused, the first to be asked refuses it, and the last.
    """
    world.prepare(number)
    world.mask(number)
    listed = np.ones(COUNT, np.bool_)
    listed[gone] = False
    request = ListRequest(world.server.epoch.id, number, listed)
    for node, party in world.parties.items():
        if node - 1000 not in gone:
            with pytest.raises(RefusedError, match=refused) if refused else nullcontext():
                party.sign_list(request)


# What parties refuse ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["at once", "state put back", "another epoch", "another list too"])
def test_a_sum_without_one_is_refused_by_all(world: PartyWorld, how: str) -> None:
    states = {node: party.to_bytes() for node, party in world.parties.items()}
    world.check(world.round(0), range(COUNT))
    if how == "state put back":
        world.put_back(states)
    elif how == "another epoch":
        world.begin()
    elif how == "another list too":
        asked_without(world, 1, [5, 6])  # two others: that is far enough
    asked_without(world, 2, [VICTIM], "differ-by")


def test_a_sum_with_one_more_is_refused_too(world: PartyWorld) -> None:
    asked_without(world, 0, [VICTIM])
    with pytest.raises(RefusedError, match="differ-by"):
        asked_without(world, 1, [])


@pytest.mark.parametrize("how", ["listed", "ready"])
def test_a_state_enters_one_sum(world: PartyWorld, how: str) -> None:
    """Or again one of the same parties, of which nothing new can be told."""
    world.states = {node: bytes([node % 256]) * 16 for node in world.parties}
    world.prepare(0)
    world.mask(0)  # of this one nobody signs a list: it was no sum
    world.check(world.round(1), range(COUNT))
    world.check(world.round(2), range(COUNT))
    with pytest.raises(RefusedError, match="has not changed"):
        if how == "listed":
            asked_without(world, 3, [5, 6])
        else:
            world.round(3, prepare=[1005, 1006])
    world.states = {}
    asked_without(world, 4, [5, 6])  # other vectors may be summed


def test_a_later_run_has_no_sum_of_the_same_states_without_some(world: PartyWorld) -> None:
    """Two runs, begun as often as is allowed: their difference would be what the absent sent."""
    world.states = {node: bytes([node % 256]) * 16 for node in world.parties}
    world.check(world.round(0), range(COUNT))
    world.begin_run(b"2")
    with pytest.raises(RefusedError, match="has not changed"):
        asked_without(world, 0, [VICTIM])
    world.check(world.round(1), range(COUNT))  # with the same ones it tells nothing new


def test_an_epoch_whose_sums_may_differ_by_less_than_the_node_says_is_refused(
    tmp_path: Path,
) -> None:
    world = PartyWorld.make(COUNT, tmp_path)
    party = world.parties[1000]
    party.trust = replace(party.trust, differ_by=3)
    with pytest.raises(RefusedError, match="differ-by"):
        world.begin()


def test_the_journal_of_an_old_run_lets_nobody_back_into_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for run in range(9):
        journal.enter(0, "sum", bytes(16), 7, 2, LIST, b"%d" % run)
    with pytest.raises(RefusedError):
        journal.enter(1, "sum", bytes([1] * 16), 7, 2, LIST, b"0")
    journal.enter(1, "sum", bytes([1] * 16), 7, 2, LIST, b"8")


# What an honest server does -----------------------------------------------------------------------


def apart(sets: list[set[int]], least: int = 2) -> bool:
    return all(one == two or len(one ^ two) >= least for one, two in combinations(sets, 2))


def test_a_run_in_which_one_drops_out_goes_on(world: PartyWorld) -> None:
    sets: list[set[int]] = []
    for number, lost in enumerate([[], [1003], [1003], [1003], [], [1003, 1007], [1007], []]):
        found = world.round(number, mask=lost)
        world.check(found, found.contributors)
        sets.append(set(found.contributors.tolist()))
    assert apart(sets)
    assert [len(one) for one in sets] == [12, 10, 10, 10, 12, 10, 10, 12]
    assert sets[1] | sets[2] == set(range(12)) - {3}  # who is left out takes turns
    assert sets[1] == sets[3]  # with few sets, as each further one tells more


def test_where_too_few_would_be_left_the_sum_is_skipped_and_the_log_says_so_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = PartyWorld.make(6, tmp_path)
    world.begin()
    assert "differ-by" in caplog.text
    world.check(world.round(0), range(6))
    found = world.round(1, mask=[1002])
    assert isinstance(found, Skipped) and "differ-by" in str(found.reason)
    world.check(world.round(2), range(6))


@pytest.mark.parametrize("differ_by", [1, 2, 3])
def test_sets_that_are_chosen_pass_the_check_and_are_large(differ_by: int) -> None:
    rng, parties = np.random.default_rng(differ_by), np.arange(30)
    earlier, lost = list[int](), list[int]()
    for number in range(200):
        present = set_of(parties[rng.random(30) < 0.93].tolist())
        spare = members_of(present)
        chosen = choose(present, earlier, differ_by, spare=spare, fewest=20, number=number)
        assert chosen is not None and chosen & ~present == 0
        check_difference(chosen, earlier, differ_by)
        lost.append((present & ~chosen).bit_count())
        earlier += [] if chosen in earlier else [chosen]
    assert np.mean(lost) < differ_by and (differ_by > 1 or not any(lost))


# Over Flower's messages ---------------------------------------------------------------------------


class Static(SecureSumClient):
    """Has the same vector each time, unless the config moves it."""

    def vectors(self, config: Any) -> Any:
        moved = float(config.get("moved", 0.0))
        return {c: np.random.default_rng(c).normal(size=8) + moved for c in self.clients}


def summing(folder: Path) -> tuple[InProcessGrid, SecureSum]:
    grid, registry = gridded(10, folder, Static)
    return grid, SecureSum(Exchange(grid), limit=100.0, server=PartySums(registry))


def with_one_fewer(grid: InProcessGrid, monkeypatch: Any, sums: int) -> Iterator[int]:
    """Connect all SuperNodes for sum 1, and all but one, another each time, for each later one."""
    nodes = sorted(grid.get_node_ids())
    for number in range(1, sums + 1):
        there = [node for place, node in enumerate(nodes) if place != number - 2]
        monkeypatch.setattr(grid, "get_node_ids", lambda there=there: there)
        yield number


def test_eleven_sums_do_not_give_ten_vectors(tmp_path: Path, monkeypatch: Any) -> None:
    (grid, secure), opened = summing(tmp_path), []
    for number in with_one_fewer(grid, monkeypatch, 11):
        summed = secure.sum(number, 8)
        opened += [] if isinstance(summed, Skipped) else [summed]
    assert len(opened) == 1 and opened[0].contributors.size == 20
    assert any("has not changed" in entry.reason for entry in secure.rejected)


def test_the_documented_example_cannot_be_differenced(monkeypatch: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "secure-sum.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)  # it has made one sum
    assert names["summed"].contributors.size == names["NODES"] * names["HOSTED"]
    for number in with_one_fewer(names["grid"], monkeypatch, 1 + names["NODES"]):
        if number > 1:
            assert isinstance(names["secure"].sum(number, names["CLASSES"] + 2), Skipped)


def test_vectors_that_change_are_summed_over_members_that_differ_by_two(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (grid, secure), sets = summing(tmp_path), []
    for number in with_one_fewer(grid, monkeypatch, 8):
        summed = secure.sum(number, 8, {"moved": float(number)})
        assert not isinstance(summed, Skipped)
        sets.append({client // 2 for client in summed.contributors.tolist()})
    assert apart(sets) and len(sets[0]) == 10 and any(one != two for one, two in pairwise(sets))
