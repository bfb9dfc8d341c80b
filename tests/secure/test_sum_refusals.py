"""What is refused, at the hosts and at the server, and who is named."""

from dataclasses import replace

import numpy as np
import pytest
from sum_helpers import LENGTH, TERMS, Lost, World, mask

from flower_graph.errors import MalformedReplyError, RefusedError, StateLostError
from flower_graph.secure.channel import new_key
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    SEED,
    KeyReply,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    UnmaskReply,
)
from flower_graph.secure.sum.round import Cause, Reason, Skipped
from flower_graph.secure.sum.server import SumServer

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
    return next(iter(world.server.mask_requests(number, LENGTH, 64, TERMS).items()))


# --- hosts


def test_a_round_is_prepared_once_as_it_must_be_and_never_an_older_one():
    world = World.make(4, 2)
    node, request = next(iter(world.server.open_round(3, range(4)).items()))
    host = world.hosts[node]
    bad = {
        "minimum 1": {"minimum": 1},
        "run 0000": {"run_id": NOBODY},
        "client 1 is not the first": {"clients": np.array([1])},
        "0 channel keys for 1": {"channel_keys": request.channel_keys[:0]},
        "low order": zeros(request, "channel_keys"),
        "its own partner": {"partners": request.clients[None]},
        "minimum 2": {"minimum": 2, "partners": np.zeros((1, 0), np.int64)},
    }
    for why, change in bad.items():
        refused(why, host.prepare, replace(request, **change), error=RefusedError)
    host.prepare(request)  # none of these attempts has used up the round
    for number in (3, 2):
        older = replace(request, server_round=number)
        refused("not newer than 3", host.prepare, older, error=RefusedError)


def test_a_round_is_masked_once_as_it_must_be():
    world = World.make(4, 2)
    node, request = first_mask(world)
    host, total = world.hosts[node], np.zeros(LENGTH, "<u8")
    refused(
        r"\(7,\)", mask, host, request, [0], np.zeros(LENGTH + 1, "<u8"), TERMS, error=ValueError
    )
    refused("uint32", mask, host, request, [0], np.zeros(LENGTH, "<u4"), TERMS, error=ValueError)
    for present in ([], [3], [0, 0], [0, 1, 2]):
        refused("present is", mask, host, request, present, total, TERMS, error=RefusedError)
    fewer = replace(request, packets=request.packets[1:])
    refused("packets for", mask, host, fewer, [0], total, TERMS, error=RefusedError)
    mask(host, request, [0], total, TERMS)
    refused("masked already", mask, host, request, [0], total, TERMS, error=RefusedError)


def test_shares_are_given_once_never_two_of_a_client_and_never_below_the_minimum():
    world = masked_world(20, 5)
    node, request = next(iter(world.server.unmask_requests(0).items()))
    host = world.hosts[node]
    why = "13 clients, 14 must be: nothing is revealed"
    refused(why, host.unmask, replace(request, contributors=13), error=RefusedError)
    kinds = np.full_like(request.kinds, MASK_KEY)
    refused(
        "of our partners are in", host.unmask, replace(request, kinds=kinds), error=RefusedError
    )
    refused("shape", host.unmask, replace(request, kinds=kinds[:, 1:]), error=RefusedError)
    host.unmask(request)
    other = replace(request, kinds=np.where(request.kinds == SEED, MASK_KEY, SEED).astype("u1"))
    for again in (request, other):
        refused("round 0 is not open", world.restart(node).unmask, again, error=RefusedError)


@pytest.mark.parametrize("field", ["packets", "share_commitments"])
def test_altered_packets_are_refused_and_named(field):
    """One packet is lost to its holder; the sum is still exact, as others hold shares."""
    world = World.make(10)
    alter = tampering(MaskRequest, 1000, lambda m: {field: flipped(getattr(m, field), 0)})
    world.tamper = alter
    world.check(world.round(0), range(10))
    [reason] = world.server.blamed
    assert reason.kind is Cause.DISPUTED and "says client 0" in reason.text
    assert reason.client != 0 and world.server.excluded == set()


def test_a_swapped_round_key_spoils_the_packet():
    world = World.make(10)
    node, request = first_mask(world)
    swapped = np.array(request.round_keys)
    swapped[0] = np.frombuffer(new_key()[1], np.uint8)
    reply = world.mask_reply(node, replace(request, round_keys=swapped))
    partner = world.hosts[node]._rounds[0].partners[0]
    assert reply.refused.tolist() == [[0, partner]]


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
        refused(why, world.mask_reply, node, few, error=RefusedError)
        kept = world.hosts[node]._rounds[1]
        assert not kept.has.any() and not kept.held.any()  # so that nothing can be revealed


def test_state_that_is_none():
    refused("cannot be read", SumClient.from_bytes, b"nothing", error=StateLostError)
    refused("each there once", SumClient, NOBODY, [1, 1], error=ValueError)
    refused("must be some", SumClient, NOBODY, [], error=ValueError)


# --- server


def test_wrong_share_is_named_and_its_sender_excluded():
    world = World.make(20)
    world.tamper = tampering(UnmaskReply, 1003, lambda m: {"shares": flipped(m.shares, (0, 0))})
    world.check(world.round(0), range(20))
    assert world.server.blamed == [Reason(Cause.PROVEN, "it sent a wrong share", 3, 0)]
    world.check(world.round(1), [c for c in range(20) if c != 3])
    other = SumClient(world.server.run_id, [3, 20]).keys()
    refused("client 3 is of a SuperNode that has cheated", world.server.enroll, 1003, other)
    world.server.forget(1003)
    world.server.enroll(5, other)
    assert 3 not in world.server.clients and 20 in world.server.clients


def test_seed_that_does_not_match_is_named():
    """Client 2 commits to another seed than it shares."""
    world = World.make(20)
    world.tamper = tampering(
        PrepareReply, 1002, lambda m: {"seed_commitments": flipped(m.seed_commitments, (0, 0))}
    )
    result = world.round(0)
    assert isinstance(result, Skipped) and "client 2 shared wrongly" in str(result.reason)
    assert world.server.excluded == {2}
    world.check(world.round(1), [c for c in range(20) if c != 2])


def test_mask_key_that_does_not_match_is_named(monkeypatch):
    """Client 2 shares another mask key than it published, consistently, and vanishes."""
    world, share = World.make(20), SumClient._share

    def share_another(host, kept):
        other = replace(kept, private=np.zeros_like(kept.private))
        return share(host, other if host.party == 2 else kept)

    monkeypatch.setattr(SumClient, "_share", share_another)
    result = world.round(0, Lost(mask=[1002]))
    assert isinstance(result, Skipped) and "client 2 shared wrongly" in str(result.reason)
    assert world.server.excluded == {2}


def test_second_late_and_foreign_replies_are_refused():
    world = World.make(6, 2)
    server, hosts = world.server, world.hosts
    requests = server.open_round(0, range(6))
    replies = {node: hosts[node].prepare(request) for node, request in requests.items()}
    for node, reply in replies.items():
        server.take(node, reply)
    refused("node 1000 was not asked", server.take, 1000, replies[1000])
    refused("node 77", server.take, 77, replies[1000])

    requests = server.mask_requests(0, LENGTH, 64, TERMS)
    refused("in the stage mask, not prepare", server.take, 1000, replies[1000])
    masked = {node: world.mask_reply(node, request) for node, request in requests.items()}
    good = masked[1000]
    bad = {
        "client 2 was not asked": {"clients": np.array([0, 2])},
        "round 5 is not open": {"server_round": 5},
        "run 0000": {"run_id": NOBODY},
        r"uint64 \(5,\)": {"total": good.total[1:]},
        "uint32": {"total": good.total.astype("<u4")},
    }
    for why, change in bad.items():
        refused(why, server.take, 1000, replace(good, **change))
    for node, reply in masked.items():
        server.take(node, reply)
    refused("or answered", server.take, 1000, good)

    requests = server.unmask_requests(0)
    shares = {node: hosts[node].unmask(request) for node, request in requests.items()}
    own = shares[1000]
    others = np.where(own.kinds == SEED, MASK_KEY, 0).astype(np.uint8)
    refused("not asked for", server.take, 1000, replace(own, kinds=others))
    refused("other clients", server.take, 1000, replace(own, clients=own.clients + 1))
    for node, reply in shares.items():
        server.take(node, reply)
    refused("or answered", server.take, 1000, own)
    world.check(server.result(0), range(6))
    refused("round 0 is not open", server.take, 1000, good)


def test_wrong_preparations_are_refused():
    world = World.make(4, 2)
    requests = world.server.open_round(0, range(4))
    good = world.hosts[1000].prepare(requests[1000])
    bad = {
        "other clients": {"clients": good.clients + 1},
        "0 packets and commitments to 1": {"packets": good.packets[1:]},
        "1 packets and commitments to 0": {"share_commitments": good.share_commitments[1:]},
        "client 0: of low order": zeros(good, "round_keys"),
    }
    for why, change in bad.items():
        refused(why, world.server.take, 1000, replace(good, **change))
    world.server.take(1000, good)


def test_wrong_enrolments_are_refused():
    world = World.make(4, 2)
    server, good = world.server, world.hosts[1000].keys()
    refused("client 0 belongs to node 1000", server.enroll, 5, good)
    refused("low order", server.enroll, 1000, replace(good, **zeros(good, "channel_key")))
    refused("run", server.enroll, 1000, replace(good, run_id=NOBODY))
    refused("client 9 is not enrolled", server.open_round, 0, [0, 9], error=ValueError)
    twice = replace(good, clients=np.array([0, 0])).to_config()
    refused("twice", KeyReply.from_config, twice)


def test_stages_in_order_only():
    server = masked_world(4).server
    refused("asked for already", server.mask_requests, 0, LENGTH, 64, TERMS, error=ValueError)
    refused("not after 0", server.open_round, 0, range(4), error=ValueError)
    refused("no shares were asked for", server.result, 0, error=ValueError)
    with pytest.raises(ValueError, match=r"corrupt.*-1"):
        SumServer(corrupt=-1)


def test_new_keys_replace_the_old():
    """A host that lost its state enrols again; the old one can no longer take part."""
    world = World.make(20)
    old = world.hosts[1005]
    world.prepare(0)
    world.hosts[1005] = SumClient(world.server.run_id, [5])
    world.server.enroll(1005, world.hosts[1005].keys())
    request = world.server.mask_requests(0, LENGTH, 64, TERMS)[1005]
    refused("round 0 is not open", world.mask_reply, 1005, request, error=RefusedError)
    world.check(world.round(1), range(20))
    world.hosts[1005] = old
    world.prepare(2)
    request = world.server.mask_requests(2, LENGTH, 64, TERMS)[1005]
    refused("of its partners", world.mask_reply, 1005, request, error=RefusedError)


def test_left_out_clients_are_named():
    world = World.make(6, 3)
    said = {1: "value nan at (0,)\nis odd", 4: "not mine"}
    world.tamper = tampering(MaskedReply, 1000, lambda m: {"left_out": said})
    world.check(world.round(0, Lost(clients=[1])), [0, 2, 3, 4, 5])
    assert world.server.blamed == [Reason(Cause.LEFT_OUT, "value nan at (0,) is odd", 1, 0)]
