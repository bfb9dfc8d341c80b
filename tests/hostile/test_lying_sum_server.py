"""What a server that lies about keys, partners and survivors is told by parties with own keys.

The lies that one run can try one after the other are in ``lying_grid.py``.
"""

from dataclasses import replace

import numpy as np
import pytest
from party_helpers import PartyWorld
from sum_helpers import LENGTH, TERMS

from flower_graph.errors import IdentityError, MalformedReplyError, RefusedError
from flower_graph.secure.channel import new_key
from flower_graph.secure.parties import server as party_server
from flower_graph.secure.parties.epoch import MOST_LISTS
from flower_graph.secure.parties.messages import (
    ListRequest,
    RevealRequest,
    Signatures,
)
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.sum.messages import MASK_KEY, SEED, PrepareRequest, UnmaskRequest

VICTIM, STATE = 1003, bytes(16)


def without(present, places):
    """Strike places off a list."""
    result = np.array(present)
    result[list(places)] = False
    return result


def own_key(message):
    """Put the server's own key in place of the first partner's."""
    keys = np.array(message.channel_keys)
    keys[0] = np.frombuffer(new_key()[1], np.uint8)
    return replace(message, channel_keys=keys)


def swap_first(name, size):
    def change(message):
        rows = np.array(getattr(message, name))
        rows[0, :size] ^= 1
        return replace(message, **{name: rows})

    return change


def lying(kind, change, node=VICTIM):
    return lambda at, message: (
        change(message) if isinstance(message, kind) and node in (at, None) else message
    )


@pytest.fixture
def world(tmp_path):
    return PartyWorld.make(12, tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (RevealRequest, swap_first("commitments", 1), "committed to another seed|not on the list"),
        (
            RevealRequest,
            lambda m: replace(m, parties=m.parties[:7], commitments=m.commitments[:7]),
            "minimum.*9.*7",
        ),
        (
            RevealRequest,
            lambda m: replace(m, parties=np.delete(m.parties, 3), commitments=m.commitments[1:]),
            "commitment",
        ),
        (
            RevealRequest,
            lambda m: replace(m, parties=np.append(m.parties[:-1], 99)),
            "party 99.*registry",
        ),
    ],
)
def test_an_epoch_is_refused(world, kind, change, why):
    world.tamper = lying(kind, change)
    with pytest.raises(RefusedError, match=why):
        world.begin()


def declare(message, row, points):
    declared = np.array(message.declared)
    declared[row, 1] = points
    return replace(message, declared=declared)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (RevealRequest, lambda m: declare(m, 6, 32), "declared"),
        (RevealRequest, lambda m: replace(m, declared=m.declared[:6]), "declared"),
        (RevealRequest, lambda m: declare(m, 0, 65), "client 0.*65"),
        (RevealRequest, lambda m: declare(m, 0, 0), "client 0.*0"),
        (RevealRequest, lambda m: replace(m, declared=m.declared[::-1]), "ascending"),
        # Of a partner's: from another list another graph follows, and its binding says otherwise
        (RevealRequest, lambda m: declare(m, 0, 32), "not granted to it|is not signed"),
        (RevealRequest, lambda m: replace(m, declared=m.declared[1:]), "not granted to it|blocks"),
    ],
)
def test_points_of_an_alignment_are_as_their_party_signed_them(tmp_path, kind, change, why):
    world = PartyWorld.make(12, tmp_path, points=16)
    world.tamper = lying(kind, change)
    with pytest.raises(RefusedError, match=why):
        world.begin()


def test_who_declares_more_than_the_cap_is_not_bound(tmp_path):
    world = PartyWorld.make(5, tmp_path, points=16)
    party = world.parties[1000]
    party.points = {0: 16, 1: 65}
    with pytest.raises(IdentityError, match=r"65 points.*1"):
        party.bind()
    party.trust = replace(party.trust, block_cap=2**31)
    party.points = {0: 16, 1: 2**20}
    with pytest.raises(MalformedReplyError, match="1048576 points"):
        world.server.take_binding(1000, party.bind())
    reply = replace(party.bind(), declared=np.array([[0, 16], [2, 16]]))
    with pytest.raises(MalformedReplyError, match="clients"):
        world.server.take_binding(1000, reply)


def test_who_brings_more_points_than_the_ceiling_is_left_out_alone(tmp_path, monkeypatch):
    """A key-holder multiplies all of them: its own ceiling stands, whatever the server lists."""
    world = PartyWorld.make(6, tmp_path, points=16)
    for party in world.parties.values():
        party.trust = replace(party.trust, most_points=32)
    greedy = world.parties[1000]
    greedy.trust, greedy.points = replace(greedy.trust, most_points=64), {0: 16, 1: 32}
    with pytest.raises(RefusedError, match=r"party 0.*48.*32.*most-points"):
        world.begin()
    world = PartyWorld.make(6, tmp_path, points=16)
    monkeypatch.setattr(party_server, "MOST_POINTS", 32)
    world.parties[1000].points = {0: 16, 1: 32}
    with pytest.raises(MalformedReplyError, match=r"party 0.*48"):
        world.server.take_binding(1000, world.parties.pop(1000).bind())
    world.begin()
    assert world.server.epoch.parties.tolist() == [1, 2, 3, 4, 5]


def test_a_graph_is_drawn_at_most_eight_times_a_run(world):
    for _ in range(MOST_LISTS):
        world.begin()
    with pytest.raises(RefusedError, match="8 lists"):
        world.begin()


def test_a_seed_that_was_shown_serves_no_second_list(world):
    world.begin()
    request = world.server._request
    with pytest.raises(RefusedError, match="own commitment"):
        world.parties[VICTIM].reveal(replace(request, number=request.number + 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: replace(m, minimum=5), "minimum 5"),
        (own_key, "signed"),
    ],
)
def test_a_preparation_is_refused(world, change, why):
    world.begin()
    world.tamper = lying(PrepareRequest, change)
    with pytest.raises(RefusedError, match=why):
        world.prepare(0)


def test_a_round_key_of_the_servers_own_is_refused(world):
    """It cannot open the packet beside it, and nobody signed it: no mask is made with it."""
    world.begin()
    world.prepare(0)
    node, (request, ready) = next(iter(world.server.mask_requests(0, LENGTH, 64, TERMS).items()))
    keys = np.array(request.round_keys)
    keys[0] = np.frombuffer(new_key()[1], np.uint8)
    with pytest.raises(RefusedError, match="signed"):
        world.parties[node].receive(replace(request, round_keys=keys), ready, TERMS.ring)


def to_lists(world, number=0):
    world.begin()
    world.prepare(number)
    world.mask(number)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: replace(m, listed=without(m.listed, range(4, 8))), "8 parties"),
        (lambda m: replace(m, server_round=1), "round 1"),
    ],
)
def test_a_list_is_refused(world, change, why):
    to_lists(world)
    world.tamper = lying(ListRequest, change)
    with pytest.raises(RefusedError, match=why):
        world.sign(0)


def test_a_second_list_is_refused(world):
    to_lists(world)
    requests = world.server.list_requests(0)
    world.parties[VICTIM].sign_list(requests[VICTIM])
    with pytest.raises(RefusedError, match="already"):
        world.parties[VICTIM].sign_list(requests[VICTIM])


def two_lists(world, halves, gone):
    """Show each half a list without one of the other half, collect and hand out signatures."""
    epoch, signed = world.server.epoch, []
    ready = world.server._round(0).live
    for half, missing in zip(halves, gone, strict=True):
        listed = without(ready, [missing])
        signed.append({})
        for place in half:
            if place != missing:
                request = ListRequest(epoch.id, 0, listed)
                reply = world.parties[1000 + place].sign_list(request)
                signed[-1][place] = listed, reply.signature
    return signed


def test_two_lists_to_two_halves_open_nothing(world):
    """Each half signs, but nobody has as many partners who signed the same as the threshold."""
    to_lists(world)
    halves = range(6), range(6, 12)
    lists = two_lists(world, halves, (7, 1))
    epoch = world.server.epoch
    for signed in lists:
        for place, (listed, _) in signed.items():
            row = epoch.partners[place]
            columns = np.array([c for c, other in enumerate(row.tolist()) if other in signed])
            signatures = np.stack([signed[int(row[c])][1] for c in columns])
            kinds = np.where(listed[row], SEED, MASK_KEY).astype(np.uint8)[None]
            count = int(listed.sum())
            request = UnmaskRequest(epoch.id, 0, count, epoch.parties[[place]], kinds)
            with pytest.raises(RefusedError, match="something else"):
                world.parties[1000 + place].unmask(request, Signatures(columns, signatures))


def test_signatures_of_others_or_other_rounds_do_not_count(world):
    world.begin()
    world.check(world.round(0), range(12))
    old = [world.server.epoch.partners]  # the graph stays for the epoch
    world.prepare(1)
    world.mask(1)
    world.sign(1)
    assert (world.server.epoch.partners == old[0]).all()
    one = world.server._round(1)
    request, signed = world.server.unmask_requests(1)[VICTIM]
    twice = replace(signed, columns=np.repeat(signed.columns[:1], signed.columns.size))
    party = world.parties[VICTIM]
    with pytest.raises(RefusedError, match="twice"):
        party.unmask(request, twice)
    moved = replace(signed, signatures=np.roll(signed.signatures, 1, 0))
    with pytest.raises(RefusedError, match="0 partners"):
        party.unmask(request, moved)
    keys = replace(signed, signatures=one.keys[world.server.epoch.partners[3][signed.columns]])
    with pytest.raises(RefusedError, match="0 partners"):  # signed, but for another purpose
        party.unmask(request, keys)


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


def test_the_partners_of_a_victim_cannot_be_named_as_vanished(circle):
    """All but one of them gone would leave the victim's vector with one mask of its own."""
    epoch = circle.server.epoch
    everybody = np.ones(60, bool)
    gone = epoch.partners[3][: epoch.plan[0] - epoch.threshold + 1]
    assert 60 - gone.size >= epoch.minimum - 10
    wide = replace(epoch, minimum=5)  # not the minimum: the partners alone must show it
    with pytest.raises(RefusedError, match="fewer than 20 of its partners"):
        _check_with_graph(wide, epoch, without(everybody, gone))


def test_the_circle_cannot_be_cut_by_two_sets_of_dropouts(circle):
    epoch = circle.server.epoch
    ring, half = ring_of(epoch), epoch.plan[0] // 2
    gone = [*ring[:half], *ring[30 : 30 + half]]
    wide = replace(epoch, minimum=5)
    with pytest.raises(RefusedError, match="fewer than 20 of its partners"):
        _check_with_graph(wide, epoch, without(np.ones(60, bool), gone))


def _check_with_graph(wide, epoch, present):
    """Check a list under another minimum, which alone would refuse it, and the same graph."""
    wide.__dict__["order"] = epoch.order
    wide.check_present(present, "sent")


def test_nothing_goes_to_a_round_a_second_time_after_a_restored_state(world):
    """The journal knows of the round, where Flower's state was put back."""
    world.begin()
    world.prepare(0)
    before = world.parties[VICTIM].to_bytes()
    requests = world.server.mask_requests(0, LENGTH, 64, TERMS)
    party, (request, ready) = world.parties[VICTIM], requests[VICTIM]
    party.receive(request, ready, TERMS.ring)
    party.mask(world.words[3], TERMS, STATE)
    again = type(party).from_bytes(before, party.trust)
    again.receive(request, ready, TERMS.ring)
    with pytest.raises(RefusedError, match="after 0"):
        again.mask(world.words[3], TERMS, STATE)


# Rounds that come again ---------------------------------------------------------------------------


def repeat(world, number=0):
    """Begin another epoch, and in it the same round, without party 5."""
    world.begin()
    world.server._last = -1
    world.prepare(number, lost=[1005])
    world.mask(number)


def put_back(world, states):
    for node, state in states.items():
        world.parties[node] = PartyClient.from_bytes(state, world.parties[node].trust)


def run_again(world, run):
    """Bring the same SuperNodes to another run of Flower's, with nothing that they kept."""
    world.server = PartySums(world.server._registry_file)
    for node, party in world.parties.items():
        trust = replace(party.trust, run=run)
        world.parties[node] = PartyClient(world.server.run_id, party.clients, trust)
    world.begin()
    return world.round(0)


@pytest.mark.parametrize("kept", ["state", "state from before the sum", "nothing"])
def test_another_epoch_does_not_repeat_a_round_with_one_fewer(world, kept):
    """Without the journal beside the key the difference of both sums is what party 5 sent."""
    world.begin()
    before = {node: party.to_bytes() for node, party in world.parties.items()}
    world.check(world.round(0), range(12))
    if kept == "state from before the sum":
        put_back(world, before)
    elif kept == "nothing":
        world.parties = {
            node: PartyClient(world.server.run_id, party.clients, party.trust)
            for node, party in world.parties.items()
        }
        world.server.lists = 0
    with pytest.raises(RefusedError, match=r"round 0.*0"):
        repeat(world)


def test_under_another_number_it_is_counted(world):
    """As nobody can tell it from a SuperNode that has lost its state."""
    world.begin()
    states = {node: party.to_bytes() for node, party in world.parties.items()}
    for party in world.parties.values():
        party.trust = replace(party.trust, runs=2)
    world.check(world.round(0), range(12))
    put_back(world, states)
    world.check(world.round(1), range(12))
    put_back(world, states)
    with pytest.raises(RefusedError, match=r"2 times.*24"):
        world.round(2)


def test_another_run_is_counted_too(world):
    world.begin()
    world.check(world.round(0), range(12))
    for run in (b"2", b"3"):  # as it is resumed: what it kept of another run is of no use
        world.check(run_again(world, run), range(12))
    for party in world.parties.values():
        party.trust = replace(party.trust, runs=3)
    with pytest.raises(RefusedError, match=r"3 times.*24"):
        run_again(world, b"4")


def test_epochs_of_newcomers_are_not(tmp_path):
    world = PartyWorld.make(12, tmp_path)
    for party in world.parties.values():
        party.trust = replace(party.trust, runs=1)
    late = world.parties.pop(1011)
    world.begin()
    world.check(world.round(0), range(11))
    world.parties[1011] = late
    world.begin()
    there = set()
    for number in (1, 2):  # one is left out in turn: all twelve differ from the eleven by one
        found = world.round(number).contributors.tolist()
        assert len(found) == 11
        there.update(found)
    assert there == set(range(12))
