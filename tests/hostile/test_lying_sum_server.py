"""What a server that lies about keys, partners and survivors is told by parties with own keys.

The lies that one run can try one after the other are in ``lying_grid.py``.
"""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lying_grid import edited, struck
from sum_helpers import LENGTH, RING, TERMS, PartyWorld, World, in_journal, mask, wire

from flower_graph.audit.deviating import LyingRound
from flower_graph.errors import MalformedReplyError, RefusedError
from flower_graph.secure.parties.journal import (
    Journal,
    check_difference,
    choose,
    members_of,
    set_of,
)
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    ListRequest,
    MaskRequest,
    RevealRequest,
)
from flower_graph.secure.sum.server import Skipped, SumRound
from flower_graph.server import sums as party_server
from flower_graph.simulation import InProcessGrid

VICTIM, PLACE, STATE = 1003, 3, bytes(16)


def without(present, places):
    """Strike places off a list."""
    result = np.array(present)
    result[list(places)] = False
    return result


@pytest.fixture
def world(tmp_path):
    return PartyWorld.make(12, tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (edited("declared", lambda rows: np.put(rows[0], 1, 32)), "is not signed"),
        (lambda shown: replace(shown, declared=shown.declared[1:]), "blocks"),
    ],
)
def test_points_of_another_party_that_it_did_not_sign_are_refused(tmp_path, change, why):
    """From another list another graph follows, or its binding says otherwise."""
    world = PartyWorld.make(12, tmp_path, points=16)
    world.tamper = lambda node, message: (
        change(message) if isinstance(message, RevealRequest) and node == VICTIM else message
    )
    with pytest.raises(RefusedError, match=f"not granted to it|{why}"):
        world.begin()


def test_who_brings_more_points_than_the_ceiling_is_left_out_alone(tmp_path, monkeypatch):
    """A key-holder multiplies all of them: its own ceiling stands, whatever the server lists."""
    world = PartyWorld.make(6, tmp_path, points=16)
    for party in world.hosts.values():
        party.trust = replace(party.trust, most_points=32)
    greedy = world.hosts[1000]
    greedy.trust, greedy.points = replace(greedy.trust, most_points=64), {0: 16, 1: 32}
    with pytest.raises(RefusedError, match=r"party 0.*48.*most-points is 32"):
        world.begin()
    world = PartyWorld.make(6, tmp_path, points=16)
    monkeypatch.setattr(party_server, "MOST_POINTS", 32)
    world.hosts[1000].points = {0: 16, 1: 32}
    with pytest.raises(MalformedReplyError, match=r"party 0.*48"):
        world.server.take_binding(1000, world.hosts.pop(1000).keys())
    world.begin()
    assert world.server.epoch.parties.tolist() == [1, 2, 3, 4, 5]


def test_a_seed_that_was_shown_serves_no_second_list(world):
    seen = []
    world.tamper = lambda node, message: seen.append(message) or message
    world.begin()
    request = next(one for one in seen if isinstance(one, RevealRequest))
    with pytest.raises(RefusedError, match="own commitment"):
        world.hosts[VICTIM].reveal(replace(request, number=request.number + 1))


def test_nor_does_a_state_that_was_put_back_show_it_again(world):
    """Who knows everybody's seeds may choose its accomplices' to get the graph that it wants."""
    seen, states = [], {node: party.to_bytes() for node, party in world.hosts.items()}
    world.tamper = lambda node, message: seen.append(message) or message
    world.begin()
    request = next(one for one in seen if isinstance(one, RevealRequest))
    old = world.hosts[VICTIM].trust.journal.has_shown(request.commitments[PLACE].tobytes())
    world.put_back(states)
    with pytest.raises(RefusedError, match="shown for another list"):
        world.hosts[VICTIM].reveal(replace(request, number=request.number + 1))
    assert old and world.server.epoch.number == 0
    world.begin()  # each binds anew, by another seed
    again = [one for one in seen if isinstance(one, RevealRequest)][-1]
    assert (again.commitments != request.commitments).any(1).all()
    world.check(world.round(0), range(12))


@pytest.mark.parametrize("corrupt", [0.05, 0.5, float("nan")])
def test_a_share_of_colluders_that_fits_no_graph_shows_no_seed(world, corrupt):
    world.tamper = lambda node, message: (
        replace(message, corrupt=corrupt) if isinstance(message, RevealRequest) else message
    )
    with pytest.raises(RefusedError, match="corrupt is"):
        world.begin()


def test_pads_hide_sums_of_as_many_as_are_ready(world):
    """Pads of 2^a contributors need a guard bits, though the minimum needs fewer."""
    world.begin()
    world.prepare(0)
    request, party = world.requests("mask", 0)[VICTIM], world.host(VICTIM)
    party._rounds[0].minimum = 8  # as another trust-minimum would have it; twelve are ready
    ring = replace(RING, guard_bits=3)
    party.receive(request, ring)
    terms = replace(TERMS, ring=ring, padded=True)
    with pytest.raises(RefusedError, match="pads need 4"):
        party.mask(request, party.clients, world.words[PLACE], terms, [STATE])


# Sums of the same vectors under two limits differ by what is left out, or shortened ---------------


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 0.0, -1.0, RING.limit / 2])
def test_a_run_has_one_limit(world, limit):
    world.begin()
    world.check(world.round(0), range(12))
    world.tamper = lambda node, message: (
        replace(message, limit=limit) if isinstance(message, RevealRequest) else message
    )
    with pytest.raises(RefusedError, match=r"limit is (nan|inf|0\.0|-1\.0|32, of this run's)"):
        world.begin()


@pytest.mark.parametrize("how", ["another limit", "fewer clients"])
def test_what_has_not_changed_is_in_no_sum_of_another_limit_or_of_fewer_clients(world, how):
    """In a later run; in the same one the limit stays."""
    world.states = {node: bytes([node % 256]) * 16 for node in world.hosts}
    world.begin()
    world.check(world.round(0), range(12))
    world.begin_run(b"2")
    world.check(world.round(0), range(12))  # the same again tells nothing new
    ring = replace(RING, limit=RING.limit / 2) if how == "another limit" else RING
    world.begin_run(b"3")
    world.terms = terms = replace(TERMS, ring=ring)
    world.begin_run(b"4")
    world.prepare(0)
    party, request = world.host(VICTIM), world.requests("mask", 0)[VICTIM]
    party.receive(request, ring)
    present = party.clients if ring is not RING else party.clients[1:]
    with pytest.raises(RefusedError, match="other clients of ours or another limit"):
        party.mask(request, present, world.words[PLACE], terms, [world.states[VICTIM]])


def to_lists(world, number=0):
    world.begin()
    world.prepare(number)
    world.mask(number)


@pytest.mark.parametrize(("put_back", "why"), [(False, "already"), (True, "after 0")])
def test_a_second_list_is_refused(world, put_back, why):
    """The seed of one, by the first list, and its mask key, by the second, open its vector."""
    to_lists(world)
    party, request = world.hosts[VICTIM], world.requests("sign", 0)[VICTIM]
    before = party.to_bytes()
    party.sign_list(request)
    for again in (request, struck(5)(request)):
        if put_back:
            party = SumClient.from_bytes(before, party.trust)
        with pytest.raises(RefusedError, match=why):
            party.sign_list(again)


def test_nobody_is_listed_who_was_not_ready(world):
    """With parties that have sent nothing a server would make the minimum up."""
    world.begin()
    world.prepare(0, [1005])
    world.mask(0)
    with pytest.raises(RefusedError, match="not ready"):
        world.hosts[VICTIM].sign_list(ListRequest(world.server.epoch.id, 0, np.ones(12, np.bool_)))


def test_a_minimum_within_the_threshold_begins_no_epoch(world, monkeypatch):
    """A sum needs somebody beside those whose shares open it."""
    monkeypatch.setattr(party_server.PartySums, "fewest_nodes", 5)
    monkeypatch.setattr(party_server, "plan_of", lambda *_: (11, 4))
    for party in world.hosts.values():
        party.trust = replace(party.trust, minimum=5)
    with pytest.raises(RefusedError, match="minimum 5, threshold"):
        world.begin()


def test_signatures_of_others_or_other_rounds_do_not_count(world):
    world.begin()
    world.check(world.round(0), range(12))
    old = [world.server.epoch.partners]  # the graph stays for the epoch
    world.prepare(1)
    world.mask(1)
    world.sign(1)
    assert (world.server.epoch.partners == old[0]).all()
    one = world.rounds[1]
    request = world.requests("unmask", 1)[VICTIM]
    for why, change in (
        ("twice", {"columns": np.repeat(request.columns[:1], request.columns.size)}),
        ("0 partners", {"signatures": np.roll(request.signatures, 1, 0)}),
        # Signed, but for another purpose
        ("0 partners", {"signatures": one.keys[world.server.epoch.partners[3][request.columns]]}),
        ("0 partners", {"signatures": request.signatures[:0], "columns": request.columns[:0]}),
    ):
        with pytest.raises(RefusedError, match=why):
            world.hosts[VICTIM].unmask(replace(request, **change))


@pytest.fixture(scope="module")
def circle(tmp_path_factory):
    """Sixty parties, of whom nobody colludes: a graph with fewer partners than all."""
    world = PartyWorld.make(60, tmp_path_factory.mktemp("circle"), corrupt=0.0)
    world.begin()
    assert world.server.epoch.plan[0] < 59
    return world


def ring_of(epoch):
    """Walk along the circle: the first partner of each is its neighbour ahead."""
    ring = [0]
    while len(ring) < epoch.parties.size:
        ring.append(int(epoch.partners[ring[-1], 0]))
    return ring


def refused_on(epoch, gone):
    """Check a list without some under another minimum: the partners alone must show it."""
    wide = replace(epoch, minimum=5)
    wide.__dict__["order"] = epoch.order
    with pytest.raises(RefusedError, match="fewer than 20 of its partners"):
        wide.check_present(without(np.ones(60, bool), gone), "sent")


def test_the_partners_of_a_victim_cannot_be_named_as_vanished(circle):
    """All but one of them gone would leave the victim's vector with one mask of its own."""
    epoch = circle.server.epoch
    gone = epoch.partners[3][: epoch.plan[0] - epoch.threshold + 1]
    assert 60 - gone.size >= epoch.minimum - 10
    refused_on(epoch, gone)


def test_the_circle_cannot_be_cut_by_two_sets_of_dropouts(circle):
    epoch = circle.server.epoch
    ring, half = ring_of(epoch), epoch.plan[0] // 2
    refused_on(epoch, [*ring[:half], *ring[30 : 30 + half]])


def test_nothing_goes_to_a_round_a_second_time_after_a_restored_state(world):
    """The journal knows of the round, where Flower's state was put back."""
    world.begin()
    world.prepare(0)
    before = world.hosts[VICTIM].to_bytes()
    requests = world.requests("mask", 0)
    party, request = world.hosts[VICTIM], requests[VICTIM]
    given = party.clients, world.words[3], TERMS, [STATE]
    mask(party, request, *given)
    again = type(party).from_bytes(before, party.trust)
    with pytest.raises(RefusedError, match="after 0"):
        mask(again, request, *given)


# Rounds that come again ---------------------------------------------------------------------------


def test_under_another_number_it_is_counted(world):
    """As nobody can tell it from a SuperNode that has lost its state."""
    world.begin()
    states = {node: party.to_bytes() for node, party in world.hosts.items()}
    for party in world.hosts.values():
        party.trust = in_journal(party.trust, most_begun=2)
    for number in (0, 1):
        world.check(world.round(number), range(12))
        world.put_back(states)
    with pytest.raises(RefusedError, match=r"2 times.*24"):
        world.round(2)
    # Another run is counted too: what was kept of the one before is of no use in it
    for party in world.hosts.values():
        party.trust = in_journal(party.trust, most_begun=3)
    world.begin_run(b"2")
    world.check(world.round(0), range(12))
    with pytest.raises(RefusedError, match=r"3 times.*24"):
        world.begin_run(b"3")
        world.round(0)


def stories(partners: np.ndarray, threshold: int) -> dict[int, np.ndarray]:
    """Say which of the victim's partners each client is to believe to have vanished.

    Nobody believes in more than its partners less the threshold; each partner of the victim is to
    be gone for as many as possible.
    """
    around, told = set(partners[PLACE].tolist()), np.zeros(len(partners), int)
    shared = {c: sorted(around & set(row.tolist())) for c, row in enumerate(partners)}
    gone = {}
    for client in sorted(shared, key=lambda c: len(shared[c])):
        free = sorted((one for one in shared[client] if one != client), key=told.__getitem__)
        gone[client] = np.array(free[: partners.shape[1] - threshold], int)
        told[gone[client]] += 1
    return gone


@pytest.mark.parametrize(("m", "corrupt", "opened"), [(40, 0.0, True), (40, 0.1, False)])
def test_a_trusted_server_may_name_the_partners_of_one_client_as_vanished(m, corrupt, opened):
    """Some of them to these holders, some to those; each holder is told what can be."""
    world = World.make(m, corrupt=corrupt)
    world.prepare(0)
    world.mask(0)
    local = world.rounds[0]
    gone, requests = stories(local.partners, local.threshold), world.requests("unmask", 0)
    local.__class__, local.revealed = LyingRound, {}
    for node, request in requests.items():
        is_gone = np.isin(local.partners[node - 1000], gone[node - 1000])
        lie = replace(request, listed=~is_gone, contributors=m)
        local.note(node, world.hosts[node].unmask(wire(lie)))
    assert local.is_open(PLACE) is opened


# The form that does not trust it ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["who was ready", "who is listed"])
def test_two_halves_that_are_told_otherwise_open_nothing(world, monkeypatch, what):
    """Each signs, but nobody has as many partners who signed the same as the threshold."""
    monkeypatch.setattr(SumRound, "_verified", lambda self, row, signature, *_: signature)
    world.begin()
    world.prepare(0)
    partners, gone = world.server.epoch.partners, what == "who was ready"

    def tamper(node, message):
        row, place = partners[node - 1000], node - 1000
        told = np.arange(12) != (11 if place < 6 else 0)  # one of the other half is missing
        if isinstance(message, MaskRequest) and gone:
            names = ("round_keys", "packets", "share_commitments", "signatures")
            fewer = {name: getattr(message, name)[told[row]] for name in names}
            return replace(message, live=told, **fewer)
        if isinstance(message, ListRequest) and not gone:
            return replace(message, listed=told)
        return message

    world.tamper = tamper
    world.mask(0)
    if gone:
        world.rounds[0].contributed[[0, 11]] = False
    world.sign(0)
    requests = world.requests("unmask", 0)
    assert len(requests) == (10 if gone else 12)
    for node, request in requests.items():
        with pytest.raises(RefusedError, match="something else"):
            world.hosts[node].unmask(world.send(node, request))


def test_packets_of_another_epoch_do_not_open(tmp_path):
    """Two halves that agreed on different epochs, by all that the server could make fit."""
    world = PartyWorld.make(12, tmp_path)
    twins = {n: SumClient.from_bytes(one.to_bytes(), one.trust) for n, one in world.hosts.items()}
    other = PartyWorld(copy.deepcopy(world.server), twins, world.words, TERMS)
    other.server.lists = 1
    for half in (world, other):
        half.begin()
    assert world.server.epoch.id != other.server.epoch.id
    asked = {half: half.requests("prepare", 0) for half in (world, other)}
    one = world.rounds[0]
    one._verified = lambda row, signature, *_: signature
    for node in world.hosts:
        half = other if node >= 1006 else world
        reply = half.hosts[node].prepare(asked[half][node])
        one.take(node, replace(reply, run_id=world.server.epoch.id))
    request = one.mask_requests(LENGTH, 64, TERMS)[1000]
    with pytest.raises(RefusedError, match=r"party \d+ is not the one it signed"):
        world.hosts[1000].receive(request, TERMS.ring)


COUNT = 12


@pytest.fixture
def begun(world: PartyWorld) -> PartyWorld:
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
    for node, party in world.hosts.items():
        if node - 1000 not in gone:
            with pytest.raises(RefusedError, match=refused) if refused else nullcontext():
                party.sign_list(request)


# What parties refuse ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["at once", "state put back", "another epoch", "another list too"])
def test_a_sum_without_one_is_refused_by_all(begun: PartyWorld, how: str) -> None:
    states = {node: party.to_bytes() for node, party in begun.hosts.items()}
    begun.check(begun.round(0), range(COUNT))
    if how == "state put back":
        begun.put_back(states)
    elif how == "another epoch":
        begun.begin()
    elif how == "another list too":
        asked_without(begun, 1, [5, 6])  # two others: that is far enough
    asked_without(begun, 2, [PLACE], "differ-by")


def test_a_sum_with_one_more_is_refused_too(begun: PartyWorld) -> None:
    asked_without(begun, 0, [PLACE])
    with pytest.raises(RefusedError, match="differ-by"):
        asked_without(begun, 1, [])


@pytest.mark.parametrize("how", ["listed", "ready"])
def test_a_state_enters_one_sum(begun: PartyWorld, how: str) -> None:
    """Or again one of the same parties, of which nothing new can be told."""
    begun.states = {node: bytes([node % 256]) * 16 for node in begun.hosts}
    begun.prepare(0)
    begun.mask(0)  # of this one nobody signs a list: it was no sum
    begun.check(begun.round(1), range(COUNT))
    begun.check(begun.round(2), range(COUNT))
    with pytest.raises(RefusedError, match="has not changed"):
        if how == "listed":
            asked_without(begun, 3, [5, 6])
        else:
            begun.round(3, prepare=[1005, 1006])
    begun.states = {}
    asked_without(begun, 4, [5, 6])  # other vectors may be summed


def test_the_journal_of_an_old_run_lets_nobody_back_into_it(tmp_path: Path) -> None:
    journals = [Journal(tmp_path / "journal", b"%d" % run) for run in range(9)]
    for one in journals:
        one.enter(0, "sum", bytes(16), 7, 2)
    with pytest.raises(RefusedError):
        journals[0].enter(1, "sum", bytes([1] * 16), 7, 2)
    journals[8].enter(1, "sum", bytes([1] * 16), 7, 2)


# What an honest server does -----------------------------------------------------------------------


def apart(sets: list[set[int]], least: int = 2) -> bool:
    return all(one == two or len(one ^ two) >= least for one, two in combinations(sets, 2))


def test_a_run_in_which_one_drops_out_goes_on(begun: PartyWorld) -> None:
    sets: list[set[int]] = []
    for number, lost in enumerate([[], [1003], [1003], [1003], [], [1003, 1007], [1007], []]):
        found = begun.round(number, mask=lost)
        begun.check(found, found.contributors)
        sets.append(set(found.contributors.tolist()))
    assert apart(sets)
    assert [len(one) for one in sets] == [12, 10, 10, 10, 12, 10, 10, 12]
    assert sets[1] | sets[2] == set(range(12)) - {3}  # who is left out takes turns
    assert sets[3] in sets[1:3]  # with few sets, as each further one tells more


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


@pytest.mark.parametrize("differ_by", [1, 3])
def test_sets_that_are_chosen_pass_the_check_and_are_large(differ_by: int) -> None:
    rng, parties = np.random.default_rng(differ_by), np.arange(30)
    earlier, lost = list[int](), list[int]()
    for number in range(200):
        present = set_of(parties[rng.random(30) < 0.93].tolist())
        spare = members_of(present)[number % 20 :][: differ_by + 4]
        chosen = choose(present, earlier, differ_by, spare=spare, fewest=20, number=number)
        assert chosen is not None and chosen & ~present == 0
        check_difference(chosen, earlier, differ_by)
        lost.append((present & ~chosen).bit_count())
        earlier += [] if chosen in earlier else [chosen]
    assert np.mean(lost) < differ_by and (differ_by > 1 or not any(lost))


# Over Flower's messages ---------------------------------------------------------------------------


def with_one_fewer(grid: InProcessGrid, monkeypatch: Any, sums: int) -> Iterator[int]:
    """Connect all SuperNodes for sum 1, and all but one, another each time, for each later one."""
    nodes = sorted(grid.get_node_ids())
    for number in range(1, sums + 1):
        there = [node for place, node in enumerate(nodes) if place != number - 2]
        monkeypatch.setattr(grid, "get_node_ids", lambda there=there: there)
        yield number


def test_the_documented_example_cannot_be_differenced(monkeypatch: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "secure-sum.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[2].split("```")[0], names)  # it has made one sum
    assert names["summed"].contributors.size == names["NODES"] * names["HOSTED"]
    for number in with_one_fewer(names["grid"], monkeypatch, 1 + names["NODES"]):
        if number > 1:
            assert isinstance(names["secure"].sum(number, names["CLASSES"] + 2), Skipped)
