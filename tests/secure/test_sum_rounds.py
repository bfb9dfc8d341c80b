"""What a sum is, whoever vanishes."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from sum_helpers import LENGTH, RING, TERMS, World, mask

from flower_graph.errors import MalformedReplyError, RefusedError, StateLostError
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    SEED,
    KeyReply,
    MaskRequest,
    PrepareReply,
    UnmaskReply,
)
from flower_graph.secure.sum.server import Cause, Reason, Skipped
from flower_graph.server import sums as sum_server


@pytest.mark.parametrize(
    ("m", "per_host", "word"),
    [(2, 1, 64), (2, 2, 64), (3, 1, 64), (5, 2, 64), (30, 1, 64), (40, 7, 64), (20, 3, 32)],
)
def test_sum_is_exact_over_rounds_however_clients_are_dealt(m, per_host, word):
    ring = Ring.fit(m, 64, 2.0 ** (-16 if word == 32 else -40))
    assert ring.word == word
    world = World.make(m, per_host, ring=ring)
    for number in range(3):
        world.check(world.round(number), range(m))
    assert world.server.blamed == []


def test_masks_hide_and_cancel_and_are_fresh_in_each_round():
    world = World.make(12, 3)
    seen = []
    for number in range(2):
        world.prepare(number)
        masked = []
        for node, request in world.requests("mask", number).items():
            reply = world.mask_reply(node, request)
            assert (reply.total != world.total(request.clients)).all()
            masked.append(reply.total)
            world.rounds[number].take(node, reply)
        world.unmask(number)
        assert (sum(masked) != world.total(range(12))).all()
        world.check(world.rounds[number].result(), range(12))
        seen.append(masked[0])
    assert (seen[0] != seen[1]).all()


OTHERWISE = {
    "purpose": replace(TERMS, purpose="another sum"),
    "detail": replace(TERMS, detail=b"columns"),
    **{
        name: replace(TERMS, ring=replace(RING, **{name: value}))
        for name, value in {"fraction_bits": 17, "guard_bits": 1, "limit": 99.0, "word": 32}.items()
    },
    "nothing": TERMS,
}


@pytest.mark.parametrize("told", OTHERWISE)
def test_a_client_that_is_told_of_another_sum_is_in_none(told):
    """All that are told the same are summed, with one of them gone; else nothing can be read."""
    world = World.make(6)
    world.prepare(0)
    for node, request in world.requests("mask", 0).items():
        terms = OTHERWISE[told] if node == 1002 else TERMS
        if node != 1004:
            world.rounds[0].take(node, world.mask_reply(node, request, terms=terms))
    world.unmask(0)
    total = world.rounds[0].result().total
    assert (total == world.total([0, 1, 2, 3, 5])).all() == (told == "nothing")
    assert told == "nothing" or (total != world.total([0, 1, 2, 3, 5])).mean() > 0.9


def test_terms_name_one_sum_and_need_a_guard_bit_for_each_doubling_of_clients():
    """Masks are of a run, a length, a word, a threshold and a minimum; pads of the terms alone."""
    said, padded = (7, 64, 3, 5), replace(TERMS, padded=True, ring=replace(RING, guard_bits=2))
    found = {TERMS.digest(*said)}
    found |= {TERMS.digest(*said[:at], 9, *said[at + 1 :]) for at in range(4)}
    found |= {one.pad_context(b"a run") for one in (*OTHERWISE.values(), replace(TERMS, ring=None))}
    found.add(TERMS.pad_context(b"another run"))
    assert len(found) == 5 + len(OTHERWISE) + 1 + 1
    padded.check_guard(4)
    with pytest.raises(RefusedError, match="guard-bits"):
        padded.check_guard(5)


@pytest.mark.parametrize("stage", ["prepare", "mask", "unmask", "without"])
@pytest.mark.parametrize("per_host", [1, 2, 10])
def test_dropouts_at_each_stage(stage, per_host):
    """SuperNodes whose replies are lost, and clients without a vector."""
    world = World.make(30, per_host)
    gone = [0, 7, 8, 19] if stage == "without" else list(world.hosts)[: 8 // per_host]
    without = gone if stage == "without" else [c for n in gone for c in world.hosts[n].clients]
    result = world.round(0, **{stage: gone})
    world.check(result, sorted(set(range(30)) - set([] if stage == "unmask" else without)))


@pytest.mark.parametrize(
    ("stage", "count", "why"),
    [
        # 13 at most: of the rest, those are not ready whose random partners are too few by now.
        ("prepare", 7, r"^(\d|1[0-3]) of 20 clients are ready, at least 14 must"),
        ("mask", 7, "13 of 20 clients sent their vectors, at least 14 must"),
        ("unmask", 16, "too few shares"),
    ],
)
def test_too_few_of_a_stage_skip_the_round(stage, count, why):
    world = World.make(20)
    result = world.round(0, **{stage: list(world.hosts)[:count]})
    assert isinstance(result, Skipped)
    assert re.search(why, str(result.reason))
    world.check(world.round(1), range(20))


def test_clients_without_enough_partners_are_pruned(monkeypatch):
    """Six of client 0's twelve partners did not prepare, and seven must: it is not in the sum."""
    monkeypatch.setattr(sum_server, "plan", lambda m, dropout, corrupt: (12, 7, 9))
    world = World.make(24, dropout=0.4)
    seed = int.from_bytes(world.server.run_id, "little")
    partners = sum_server.partners(np.arange(24), 12, seed, 0)
    # Places on the circle so that everybody else keeps seven: 1, 5 and 6 on either side
    dead = set(partners[0][[0, 4, 5, 6, 7, 11]].tolist())
    result = world.round(0, prepare=[1000 + client for client in dead])
    world.check(result, set(range(1, 24)) - dead)


@pytest.mark.parametrize("clients", [[], [1], [0, 1]])
def test_a_sum_needs_two_that_do_not_collude(clients):
    world = World.make(4, dropout=0.0, corrupt=0.5)
    assert "a sum needs at least 2" in str(world.round(0, clients=clients).reason)
    world.check(world.round(1), range(4))


# What is refused, at the hosts and at the server, and who is named -------------------------------

NOBODY = bytes(16)


def flipped(values, place):
    altered = np.array(values)
    altered[place] ^= 1
    return altered


def zeros(message, field):
    return {field: np.zeros_like(getattr(message, field))}


def refused(why, act, *arguments, error=MalformedReplyError):
    """Hold that something is refused, and how."""
    with pytest.raises(error, match=why):
        act(*arguments)


host_refuses = partial(refused, error=RefusedError)


def all_refused(act, good, bad, error=MalformedReplyError):
    """Hold that a message is refused with each of some changes: the reason, and the change."""
    for why, change in bad.items():
        refused(why, act, replace(good, **change), error=error)


def tampering(kind, node, change):
    """Change a node's messages of a kind on their way."""

    def tamper(at, message):
        is_it = isinstance(message, kind) and at == node
        return replace(message, **change(message)) if is_it else message

    return tamper


def masked_world(m=20, per_host=1, **shares):
    world = World.make(m, per_host, **shares)
    world.prepare(0)
    world.mask(0)
    return world


def first_mask(world, number=0):
    """Prepare a round and return the first node with its request for a masked sum."""
    world.prepare(number)
    return next(iter(world.requests("mask", number).items()))


# --- hosts


def test_a_round_is_prepared_once_as_it_must_be_and_never_an_older_one():
    world = World.make(4, 2)
    node, request = next(iter(world.requests("prepare", 3).items()))
    host = world.hosts[node]
    bad = {
        "run 0000": {"run_id": NOBODY},
        "0 channel keys": {"channel_keys": request.channel_keys[:0]},
        "low order": zeros(request, "channel_keys"),
        "its own partner": {"partners": np.array([node - 1000])},
    }
    all_refused(host.prepare, request, bad, RefusedError)
    host.prepare(request)  # none of these attempts has used up the round
    for number in (3, 2):
        older = replace(request, server_round=number)
        host_refuses("not newer than 3", host.prepare, older)


def test_a_round_is_masked_once_as_it_must_be():
    world = World.make(4, 2)
    node, request = first_mask(world)
    host, total = world.hosts[node], np.zeros(LENGTH, "<u8")
    for why, wrong in ((r"\(7,\)", np.zeros(LENGTH + 1, "<u8")), ("uint32", total.astype("<u4"))):
        refused(why, mask, host, request, [0], wrong, TERMS, error=ValueError)
    fewer = replace(request, packets=request.packets[1:])
    host_refuses("packets for", mask, host, fewer, [0], total, TERMS)
    mask(host, request, [0], total, TERMS)
    host_refuses("masked already", mask, host, request, [0], total, TERMS)


def test_shares_are_given_once_never_two_of_a_client_and_never_below_the_minimum():
    world = masked_world(20, 5)
    node, request = next(iter(world.requests("unmask", 0).items()))
    host = world.hosts[node]
    with pytest.raises(ValueError, match="no shares"):
        masked_world(4).rounds[0].result()
    bad = {
        "13 clients, 14 must be": {"contributors": 13},
        "of our partners are in": zeros(request, "listed"),
        "took no part": {"listed": request.listed[1:]},
    }
    all_refused(host.unmask, request, bad, RefusedError)
    host.unmask(request)
    for again in (request, replace(request, **zeros(request, "listed"))):
        host_refuses("round 0 is not open", world.host(node).unmask, again)


@pytest.mark.parametrize("field", ["packets", "share_commitments"])
def test_altered_packets_are_refused_and_named(field):
    """One packet is lost to its holder; the sum is still exact, as others hold shares."""
    world = World.make(10)
    world.tamper = tampering(MaskRequest, 1000, lambda m: {field: flipped(getattr(m, field), 0)})
    world.check(world.round(0), range(10))
    [reason] = world.server.blamed
    assert reason.kind is Cause.DISPUTED and "says client 0" in reason.text
    assert reason.client != 0 and world.server.excluded == set()


def test_too_few_partners_or_packets_of_an_earlier_round_at_the_host():
    world = World.make(10)
    _, old = first_mask(world)
    node, request = first_mask(world, 1)
    live = np.zeros_like(request.live)
    live[:2] = True
    pairs = ("round_keys", "packets", "share_commitments")
    two = {field: getattr(request, field)[:2] for field in pairs}
    for change in ({"packets": old.packets}, {"live": live} | two):
        few = replace(request, **change)
        why = "fewer than 6 of its partners"
        host_refuses(why, world.mask_reply, node, few)
        kept = world.hosts[node]._rounds[1]
        assert not kept.has.any() and not kept.held.any()  # so that nothing can be revealed


def test_a_state_that_cannot_be_read():
    refused("cannot be read", SumClient.from_bytes, b"nothing", error=StateLostError)


# --- server


def test_wrong_share_is_named_and_its_sender_excluded():
    world = World.make(20)
    world.tamper = tampering(UnmaskReply, 1003, lambda m: {"shares": flipped(m.shares, (0, 0))})
    world.check(world.round(0), range(20))
    assert world.server.blamed == [Reason(Cause.PROVEN, "it sent a wrong share", 3, 0)]
    world.check(world.round(1), [c for c in range(20) if c != 3])
    other = SumClient(world.server.run_id, [3, 20]).keys()
    refused("client 3 is of a SuperNode that has cheated", world.enroll, 1003, other)
    world.forget(1003)
    world.enroll(5, other)
    assert 3 not in world.server.available and 20 in world.server.available


@pytest.mark.parametrize("replaced", [False, True])
def test_mask_key_that_does_not_match_is_named(monkeypatch, replaced):
    """Client 2 shares another mask key than it published, consistently, and vanishes.

    Whoever comes with its number then is not asked in its place, nor at fault.
    """
    world, deal = World.make(20), SumClient._deal

    def share_another(host, kept):
        other = replace(kept, private=np.zeros_like(kept.private))
        return deal(host, other if host.party == 2 else kept)

    monkeypatch.setattr(SumClient, "_deal", share_another)
    world.prepare(0)
    if replaced:
        world.forget(1002)
        world.enroll(5000, SumClient(world.server.run_id, [2, 20]).keys())
    world.mask(0, lost=[1002])
    world.unmask(0)
    result = world.rounds[0].result()
    assert isinstance(result, Skipped) and "client 2 shared wrongly" in str(result.reason)
    assert world.server.excluded == {2}
    assert 5000 not in world.server._barred


def test_second_late_and_foreign_replies_are_refused():
    world = World.make(6, 2)
    hosts = world.hosts
    requests, one = world.requests("prepare", 0), world.rounds[0]
    replies = {node: hosts[node].prepare(request) for node, request in requests.items()}
    for node, reply in replies.items():
        one.take(node, reply)
    for node in (1000, 77):
        refused(f"node {node} was not asked", one.take, node, replies[1000])

    requests = world.requests("mask", 0)
    refused("in the stage mask", one.take, 1000, replies[1000])
    masked = {node: world.mask_reply(node, request) for node, request in requests.items()}
    good = masked[1000]
    bad = {
        "client 2 was not asked": {"clients": np.array([0, 2])},
        r"uint64 \(5,\)": {"total": good.total[1:]},
        "uint32": {"total": good.total.astype("<u4")},
    }
    all_refused(partial(one.take, 1000), good, bad)
    for node, reply in masked.items():
        one.take(node, reply)
    refused("not asked for this", one.take, 1000, good)

    requests = world.requests("unmask", 0)
    shares = {node: hosts[node].unmask(request) for node, request in requests.items()}
    own = shares[1000]
    others = np.where(own.kinds == SEED, MASK_KEY, 0).astype(np.uint8)
    refused("not asked for", one.take, 1000, replace(own, kinds=others))
    for node, reply in shares.items():
        one.take(node, reply)
    refused("not asked for this", one.take, 1000, own)
    world.check(one.result(), range(6))
    refused("in the stage over", one.take, 1000, good)


def test_wrong_preparations_are_refused():
    world = World.make(4, 2)
    request = world.requests("prepare", 0)[1000]
    good = world.hosts[1000].prepare(request)
    for name in ("packets", "share_commitments"):
        short = replace(good, **{name: getattr(good, name)[1:]}).to_config()
        refused(name.replace("_", "-"), partial(PrepareReply.from_config, k=1), short)
    low = replace(good, **zeros(good, "round_key"))
    refused("client 0: of low order", world.rounds[0].take, 1000, low)
    world.rounds[0].take(1000, good)


def test_wrong_enrolments_are_refused():
    world = World.make(4, 2)
    good = world.hosts[1000].keys()
    refused("low order", world.enroll, 5, replace(good, **zeros(good, "channel_key")))
    twice = replace(good, clients=np.array([0, 0])).to_config()
    refused("twice", KeyReply.from_config, twice)


def test_new_keys_replace_the_old():
    """A host that lost its state enrols again; the old one can no longer take part."""
    world = World.make(20)
    old = world.hosts[1005]
    world.hosts[1005] = SumClient(world.server.run_id, [5])
    world.enroll(1005, world.hosts[1005].keys())
    world.check(world.round(1), range(20))
    world.hosts[1005] = old
    world.prepare(2)
    request = world.requests("mask", 2)[1005]
    host_refuses("of its partners", world.mask_reply, 1005, request)
