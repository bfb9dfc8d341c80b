"""Clients that lie in the secure sum: what they can spoil, and for how long."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sum_helpers import TERMS, World, mask, wire
from test_sum_rounds import masked_world, refused, tampering, zeros

from flower_graph.errors import RefusedError
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.secure.sum.server import Cause, Skipped

LIAR = 1000  # the SuperNode of client 0


def keys_of(world: World, *clients: int) -> Any:
    """Give the keys of a SuperNode that begins anew."""
    return wire(SumClient(world.server.run_id, clients).keys())


def accusing(world: World, *, times: int = 1, only: int | None = None) -> None:
    """Let the liar say of all packets, or one client's, that they do not open, and be silent."""

    def tamper(node: int, message: Any) -> Any:
        if node == LIAR and isinstance(message, UnmaskReply):
            return replace(message, kinds=message.kinds * 0, shares=message.shares[:0])
        if node != LIAR or not isinstance(message, MaskedReply):
            return message
        kept = world.hosts[LIAR]._rounds[message.server_round]
        partners = kept.partners[kept.live]
        if only is not None:
            partners = partners[partners == only]
        return replace(message, refused=np.repeat(partners, times))

    world.tamper = tamper


def sharing_another(field: str, liar: int = LIAR) -> Any:
    """Let the liar send packets that nobody can open, or commit to another seed than it shares."""
    return tampering(PrepareReply, liar, lambda message: zeros(message, field))


@pytest.mark.parametrize(("m", "per_host"), [(10, 1), (30, 3)])
def test_a_lying_accuser_spoils_no_sum_and_removes_nobody(m, per_host):
    world = World.make(m, per_host)
    accusing(world)
    for number in range(4):
        world.check(world.round(number), range(m))
    assert world.server.excluded == set() and world.server.available == list(range(m))
    kinds = [reason.kind for reason in world.server.blamed]
    assert len(kinds) <= 4 * m and set(kinds) == {Cause.DISPUTED}


def test_whoever_accuses_twice_or_strangers_is_not_in_the_sum():
    """Each accusation counts once, and 60,000 of them cost no more than a refusal."""
    world = World.make(10)
    accusing(world, times=7000)
    world.prepare(0)
    requests = world.requests("mask", 0)
    for node, request in requests.items():
        reply = world.mask_reply(node, request)
        if node != LIAR:
            world.rounds[0].take(node, reply)
            continue
        refused("open", world.rounds[0].take, node, world.send(node, reply))
        for party in (0, 77, -5):
            refused("open", world.rounds[0].take, node, replace(reply, refused=np.array([party])))
    world.tamper = lambda node, message: message
    world.unmask(0)
    world.check(world.rounds[0].result(), range(1, 10))
    assert world.server.blamed == []


def test_who_seals_rubbish_stops_one_sum_and_is_excluded():
    """Nobody can prove it, but with one liar nobody else is at odds with more than one."""
    world = World.make(10)
    world.tamper = sharing_another("packets")
    assert isinstance(world.round(0), Skipped)
    for number in range(1, 4):
        world.check(world.round(number), range(1, 10))
    assert world.server.excluded == {0}
    (reason,) = [one for one in world.server.blamed if one.kind is not Cause.DISPUTED]
    assert (reason.kind, reason.client, reason.round) == (Cause.AT_ODDS, 0, 0)
    world.forget(LIAR)
    refused("cheated", world.enroll, 7777, keys_of(world, 0))


@pytest.mark.parametrize(("m", "per_host", "only"), [(2, 1, None), (10, 5, 7)])
def test_one_liar_cannot_have_another_excluded(m, per_host, only):
    """It hosts so many that its word stops the sum; but nobody is at odds with two others."""
    world = World.make(m, per_host)
    accusing(world, only=only)
    assert "too few shares" in str(world.round(0).reason)
    assert world.server.available == list(range(m))
    world.tamper = lambda node, message: message
    world.check(world.round(1), range(m))


@pytest.mark.parametrize("renamed", [False, True])
def test_a_proven_cheat_does_not_come_back(renamed):
    """With lost state, or another node id, or both; nor does what else its SuperNode hosts."""
    world = World.make(12, 2)
    world.tamper = sharing_another("seed_commitment")
    assert isinstance(world.round(0), Skipped)
    assert world.server.excluded == {0, 1}
    node = 7777 if renamed else LIAR
    for number in range(1, 5):
        world.forget(LIAR)
        refused("cheated", world.enroll, node, keys_of(world, 0, 1))
        world.check(world.round(number), range(2, 12))


def test_after_three_cheats_nobody_new_is_taken():
    """Nobody can tell one from a newcomer; who was there before is taken."""
    world = World.make(12)
    world.words = World.make(40).words
    for number in range(3):
        host = world.hosts[2000 + number] = SumClient(world.server.run_id, [12 + number])
        world.enroll(2000 + number, wire(host.keys()))
        world.tamper = sharing_another("seed_commitment", 2000 + number)
        assert isinstance(world.round(number), Skipped)
    refused("3 SuperNodes have cheated", world.enroll, 2003, keys_of(world, 15))
    world.check(world.round(3), range(12))
    world.forget(1003)
    world.enroll(1103, keys_of(world, 3))


def test_a_cheat_is_not_asked_in_the_round_that_is_prepared_already():
    world = World.make(12)
    world.tamper = sharing_another("seed_commitment")
    world.prepare(0)
    world.mask(0)
    world.prepare(1)
    world.unmask(0)
    assert isinstance(world.rounds[0].result(), Skipped)
    world.mask(1)
    world.unmask(1)
    world.check(world.rounds[1].result(), range(1, 12))


def test_whoever_begins_anew_too_often_stays_out():
    """By the numbers of its clients; one that is back with its keys has not begun anew."""
    world = World.make(6)
    for number in range(1, 11):
        world.forget(LIAR if number == 1 else 4999 + number)
        enrol = world.enroll, 5000 + number, keys_of(world, 0)
        if number < 8:
            enrol[0](*enrol[1:])
        else:
            refused("client 0 has begun anew too often", *enrol)
    world.check(world.round(1), range(1, 6))
    world.server.move(1003, 1103)
    world.enroll(1103, wire(world.hosts[1003].keys()))
    world.hosts[1103] = world.hosts.pop(1003)
    world.check(world.round(2), range(1, 6))


def test_terms_with_which_few_could_open_a_vector():
    world = World.make(80, 2)
    node, request = next(iter(world.requests("prepare", 0).items()))
    host, k = world.hosts[node], request.partners.size
    assert 2 * request.threshold > k
    twice = request.partners.copy()
    twice[1] = twice[0]
    for why, change in (
        ("threshold is 1 and minimum 2", {"threshold": 1, "minimum": 2}),
        (f"threshold is {k // 2} and", {"threshold": k // 2}),
        ("too few for", {"minimum": request.threshold}),
        ("too few for", {"minimum": (k + 1) // 2}),  # half of the SuperNodes that it knows of
        ("has one twice", {"partners": twice}),
    ):
        refused(why, host.prepare, replace(request, **change), error=RefusedError)
    host.prepare(request)


def test_a_holder_tells_nothing_of_whom_it_did_not_take():
    """The round stays open for the truth."""
    world = masked_world(40, 4)
    node, request = next(iter(world.requests("unmask", 0).items()))
    host = world.hosts[node]
    kept = host._rounds[0]
    kept.live = ~np.eye(1, kept.partners.size, dtype=bool)[0]
    refused("took no part", host.unmask, request, error=RefusedError)
    kept.live = np.ones_like(kept.live)
    assert host.unmask(request).kinds.all()


@pytest.mark.parametrize("hosted", [1, 3])
def test_a_supernode_that_is_told_to_be_alone_sends_no_sum_of_fewer_than_the_minimum(hosted):
    """Without partners there are no masks: one client is never a sum, nor are too few."""
    host = SumClient(bytes(16), range(hosted))
    for minimum in (0, 1):
        request = PrepareRequest(bytes(16), 0, 0, minimum)
        refused("too few for 0", host.prepare, request, error=RefusedError)
    host.prepare(PrepareRequest(bytes(16), 0, 0, 2))
    keys, packets = np.zeros((0, 32), np.uint8), np.zeros((0, 82), np.uint8)
    commitments = np.zeros((0, 2, 32), np.uint8)
    there, none = np.arange(hosted), np.zeros(0, np.bool_)
    request = MaskRequest(bytes(16), 0, 6, 64, there, none, keys, commitments, packets)
    total = np.arange(6, dtype="<u8")
    refused("nothing is sent", mask, host, request, [0], total, TERMS, error=RefusedError)
    if hosted > 1:
        assert (mask(host, request, [0, 2], total, TERMS).total == total).all()
        refused("masked already", mask, host, request, [0, 2], total, TERMS, error=RefusedError)
        shares = UnmaskRequest(bytes(16), 0, 2)
        assert not host.unmask(shares).shares.size  # there is nothing to reveal
