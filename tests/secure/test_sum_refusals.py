"""What is refused, at the hosts and at the server, and who is named."""

from dataclasses import replace

import numpy as np
import pytest
from sum_helpers import LENGTH, Lost, World

from flower_graph.errors import MalformedReplyError, RefusedError, StateLostError
from flower_graph.secure import channel
from flower_graph.secure.channel import new_key, split_secret
from flower_graph.secure.sum.client import ClientRound, SumClient
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    SEED,
    KeyReply,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    UnmaskReply,
)
from flower_graph.secure.sum.server import Skipped, SumServer


def flipped(values, place):
    altered = np.array(values)
    altered[place] ^= 1
    return altered


def masked_world(m=20, per_host=1, **shares):
    world = World.make(m, per_host, **shares)
    world.prepare(0)
    world.mask(0)
    return world


# --- hosts


def test_nothing_is_revealed_below_the_minimum():
    world = masked_world()
    node, request = next(iter(world.server.unmask_requests(0).items()))
    with pytest.raises(RefusedError, match=r"13 clients contributed.*14 must.*nothing is revealed"):
        world.hosts[node].unmask(replace(request, contributors=13))


def test_minimum_below_two_is_refused():
    world = World.make(3)
    node, request = next(iter(world.server.open_round(0, range(3)).items()))
    with pytest.raises(RefusedError, match="minimum 1"):
        world.hosts[node].prepare(replace(request, minimum=1))


def test_both_shares_of_one_client_are_refused():
    world = masked_world(20, 5)
    node, request = next(iter(world.server.unmask_requests(0).items()))
    partners = world.hosts[node]._rounds[0].partners
    kinds = np.full_like(request.kinds, SEED)
    twice = next(c for c in np.unique(partners) if (partners == c).sum() > 1)
    row, column = np.argwhere(partners == twice)[0]
    kinds[row, column] = MASK_KEY
    with pytest.raises(RefusedError, match=f"both.*client {twice}"):
        world.hosts[node].unmask(replace(request, kinds=kinds))


def test_shares_are_given_once():
    world = masked_world()
    requests = world.server.unmask_requests(0)
    node, request = next(iter(requests.items()))
    world.hosts[node].unmask(request)
    other = replace(request, kinds=np.where(request.kinds == SEED, MASK_KEY, SEED).astype("u1"))
    for again in (request, other):
        with pytest.raises(RefusedError, match="round 0 is not open"):
            world.restart(node).unmask(again)


def test_a_round_is_masked_once():
    world = World.make(4)
    world.prepare(0)
    node, request = next(iter(world.server.mask_requests(0, LENGTH).items()))
    world.mask_reply(node, request)
    with pytest.raises(RefusedError, match="masked already"):
        world.mask_reply(node, request)


def test_a_round_is_prepared_once_and_never_an_older_one():
    world = World.make(4)
    node, request = next(iter(world.server.open_round(3, range(4)).items()))
    host = world.hosts[node]
    host.prepare(request)
    for number in (3, 2):
        with pytest.raises(RefusedError, match="not newer than 3"):
            host.prepare(replace(request, server_round=number))


def test_other_runs_and_strangers_are_refused():
    world = World.make(4)
    node, request = next(iter(world.server.open_round(0, range(4)).items()))
    host = world.hosts[node]
    with pytest.raises(RefusedError, match="run 0000"):
        host.prepare(replace(request, run_id=bytes(16)))
    with pytest.raises(RefusedError, match="client 99 is not hosted"):
        host.prepare(replace(request, clients=np.array([99])))
    with pytest.raises(RefusedError, match="0 channel keys for 3"):
        host.prepare(replace(request, channel_keys=request.channel_keys[:0]))
    with pytest.raises(RefusedError, match="low order"):
        host.prepare(replace(request, channel_keys=np.zeros_like(request.channel_keys)))


def test_partners_that_are_not_mirrored_are_refused():
    world = World.make(4, 4)
    node, request = next(iter(world.server.open_round(0, range(4)).items()))
    with pytest.raises(RefusedError, match="not mirrored"):
        world.hosts[node].prepare(replace(request, partners=np.roll(request.partners, 1, 1)))


def test_wrong_sums_and_clients_at_the_host():
    world = World.make(4, 2)
    world.prepare(0)
    node, request = next(iter(world.server.mask_requests(0, LENGTH).items()))
    host, total = world.hosts[node], np.zeros(LENGTH, "<u8")
    with pytest.raises(ValueError, match="shape"):
        host.mask(request, [0], np.zeros(LENGTH + 1, "<u8"))
    with pytest.raises(ValueError, match="uint32"):
        host.mask(request, [0], np.zeros(LENGTH, "<u4"))
    for present in ([], [3], [0, 0], [0, 1, 2]):
        with pytest.raises(RefusedError, match="present is"):
            host.mask(request, present, total)
    with pytest.raises(RefusedError, match="packets for"):
        host.mask(replace(request, packets=request.packets[1:]), [0], total)
    host.mask(request, [0], total)  # none of these attempts has used up the round


@pytest.mark.parametrize("field", ["packets", "share_commitments"])
def test_altered_packets_are_refused_and_named(field):
    """One packet is lost to its holder; the sum is still exact, as others hold shares."""
    world, altered = World.make(10), []

    def tamper(node, message):
        if isinstance(message, MaskRequest) and not altered:
            altered.append(int(message.clients[0]))
            return replace(message, **{field: flipped(getattr(message, field), 0)})
        return message

    world.tamper = tamper
    world.check(world.round(0), range(10))
    [(dealer, reason)] = world.server.blamed
    assert f"does not open, says client {altered[0]}" in reason
    assert dealer != altered[0] and world.server.excluded == set()


def test_a_swapped_round_key_spoils_the_packet():
    world = World.make(10)
    world.prepare(0)
    node, request = next(iter(world.server.mask_requests(0, LENGTH).items()))
    swapped = np.array(request.round_keys)
    swapped[0] = np.frombuffer(new_key()[1], np.uint8)
    reply = world.mask_reply(node, replace(request, round_keys=swapped))
    partner = world.hosts[node]._rounds[0].partners[0, 0]
    assert reply.refused.tolist() == [[0, partner]]


def test_packets_of_an_earlier_round_do_not_open():
    world = World.make(10)
    world.prepare(0)
    old = world.server.mask_requests(0, LENGTH)[1000].packets
    world.prepare(1)
    request = world.server.mask_requests(1, LENGTH)[1000]
    with pytest.raises(RefusedError, match="fewer than 6 of its partners"):
        world.mask_reply(1000, replace(request, packets=old))


def test_too_few_partners_at_the_host():
    world = World.make(10)
    world.prepare(0)
    node, request = next(iter(world.server.mask_requests(0, LENGTH).items()))
    live = np.zeros_like(request.live)
    live[:, :2] = True
    few = replace(
        request,
        live=live,
        round_keys=request.round_keys[:2],
        packets=request.packets[:2],
        share_commitments=request.share_commitments[:2],
    )
    with pytest.raises(RefusedError, match="fewer than 6 of its partners"):
        world.mask_reply(node, few)


def test_state_that_is_none():
    with pytest.raises(StateLostError):
        SumClient.from_bytes(b"nothing")
    with pytest.raises(ValueError, match="each there once"):
        SumClient(bytes(16), [1, 1])
    with pytest.raises(ValueError, match="must be some"):
        SumClient(bytes(16), [])


# --- server


def test_wrong_share_is_named_and_its_sender_excluded():
    world = World.make(20)

    def tamper(node, message):
        if isinstance(message, UnmaskReply) and node == 1003:
            return replace(message, shares=flipped(message.shares, (0, 0)))
        return message

    world.tamper = tamper
    world.check(world.round(0), range(20))
    assert world.server.blamed == [(3, "round 0: it sent a wrong share")]
    world.check(world.round(1), [c for c in range(20) if c != 3])
    world.server.enroll(1003, world.hosts[1003].keys())
    assert 3 in world.server.clients


def test_seed_that_does_not_match_is_named():
    """Client 2 commits to another seed than it shares."""
    world = World.make(20)

    def tamper(node, message):
        if isinstance(message, PrepareReply) and node == 1002:
            return replace(message, seed_commitments=flipped(message.seed_commitments, (0, 0)))
        return message

    world.tamper = tamper
    result = world.round(0)
    assert isinstance(result, Skipped) and "client 2 shared wrongly" in result.reason
    assert world.server.excluded == {2}
    world.check(world.round(1), [c for c in range(20) if c != 2])


def test_mask_key_that_does_not_match_is_named(monkeypatch):
    """Client 2 shares another mask key than it published, consistently, and vanishes."""
    world = World.make(20)

    def split_other(secret, threshold, count):
        return split_secret(bytes(32) if secret == target else secret, threshold, count)

    monkeypatch.setattr(channel, "split_secret", split_other)
    target = None
    begin = ClientRound.begin

    def begin_and_note(*arguments):
        nonlocal target
        kept = begin(*arguments)
        target = kept.private[0].tobytes() if kept.clients[0] == 2 else target
        return kept

    monkeypatch.setattr(ClientRound, "begin", begin_and_note)
    result = world.round(0, Lost(mask=[1002]))
    assert isinstance(result, Skipped) and "client 2 shared wrongly" in result.reason
    assert world.server.excluded == {2}


def test_second_late_and_foreign_replies_are_refused():
    world = World.make(6, 2)
    requests = world.server.open_round(0, range(6))
    replies = {node: world.hosts[node].prepare(request) for node, request in requests.items()}
    server = world.server
    for node, reply in replies.items():
        server.take_prepare(node, reply)
    with pytest.raises(MalformedReplyError, match="node 1000 was not asked"):
        server.take_prepare(1000, replies[1000])
    with pytest.raises(MalformedReplyError, match="node 77"):
        server.take_prepare(77, replies[1000])
    requests = server.mask_requests(0, LENGTH)
    with pytest.raises(MalformedReplyError, match="in the stage mask, not prepare"):
        server.take_prepare(1000, replies[1000])
    masked = {node: world.mask_reply(node, request) for node, request in requests.items()}
    bad = {
        "client 2 was not asked": replace(masked[1000], clients=np.array([0, 2])),
        "round 5 is not open": replace(masked[1000], server_round=5),
        "run 0000": replace(masked[1000], run_id=bytes(16)),
        r"shape \(5,\)": replace(masked[1000], total=masked[1000].total[1:]),
        "uint32": replace(masked[1000], total=masked[1000].total.astype("<u4")),
    }
    for match, reply in bad.items():
        with pytest.raises(MalformedReplyError, match=match):
            server.take_masked(1000, reply)
    for node, reply in masked.items():
        server.take_masked(node, reply)
    with pytest.raises(MalformedReplyError, match="or answered"):
        server.take_masked(1000, masked[1000])
    check_shares(world)
    world.check(server.result(0), range(6))
    with pytest.raises(MalformedReplyError, match="round 0 is not open"):
        server.take_masked(1000, masked[1000])


def check_shares(world):
    server = world.server
    requests = server.unmask_requests(0)
    replies = {node: world.hosts[node].unmask(request) for node, request in requests.items()}
    good = replies[1000]
    others = replace(good, kinds=np.where(good.kinds == SEED, MASK_KEY, 0).astype(np.uint8))
    with pytest.raises(MalformedReplyError, match="not asked for"):
        server.take_shares(1000, others)
    with pytest.raises(MalformedReplyError, match="other clients"):
        server.take_shares(1000, replace(good, clients=good.clients[::-1]))
    for node, reply in replies.items():
        server.take_shares(node, reply)
    with pytest.raises(MalformedReplyError, match="or answered"):
        server.take_shares(1000, good)


def test_wrong_preparations_are_refused():
    world = World.make(4, 2)
    requests = world.server.open_round(0, range(4))
    good = world.hosts[1000].prepare(requests[1000])
    bad = {
        "other clients": replace(good, clients=good.clients + 1),
        "3 packets, expected 4": replace(good, packets=good.packets[1:]),
        "other partners": replace(good, share_commitments=good.share_commitments[:, 1:]),
        "client 0 is of low order": replace(good, round_keys=np.zeros_like(good.round_keys)),
    }
    for match, reply in bad.items():
        with pytest.raises(MalformedReplyError, match=match):
            world.server.take_prepare(1000, reply)
    world.server.take_prepare(1000, good)


def test_wrong_enrolments_are_refused():
    world = World.make(4, 2)
    server, good = world.server, world.hosts[1000].keys()
    with pytest.raises(MalformedReplyError, match="client 0 belongs to node 1000"):
        server.enroll(5, good)
    with pytest.raises(MalformedReplyError, match="low order"):
        server.enroll(1000, replace(good, channel_keys=np.zeros_like(good.channel_keys)))
    with pytest.raises(MalformedReplyError, match="run"):
        server.enroll(1000, replace(good, run_id=bytes(16)))
    with pytest.raises(ValueError, match="client 9 is not enrolled"):
        server.open_round(0, [0, 9])
    with pytest.raises(MalformedReplyError, match="twice"):
        KeyReply.from_config(replace(good, clients=np.array([0, 0])).to_config())


def test_stages_in_order_only():
    world = masked_world(4)
    with pytest.raises(ValueError, match="asked for already"):
        world.server.mask_requests(0, LENGTH)
    with pytest.raises(ValueError, match="not after 0"):
        world.server.open_round(0, range(4))
    with pytest.raises(ValueError, match="no shares were asked for"):
        world.server.result(0)
    with pytest.raises(ValueError, match="corrupt is -1"):
        SumServer(corrupt=-1)


def test_new_keys_replace_the_old():
    """A host that lost its state enrols again; the old one can no longer take part."""
    world = World.make(20)
    old = world.hosts[1005]
    world.prepare(0)
    world.hosts[1005] = SumClient(world.server.run_id, [5])
    world.server.enroll(1005, world.hosts[1005].keys())
    requests = world.server.mask_requests(0, LENGTH)
    with pytest.raises(RefusedError, match="round 0 is not open"):
        world.mask_reply(1005, requests[1005])
    world.check(world.round(1), range(20))
    world.hosts[1005] = old
    world.prepare(2)
    requests = world.server.mask_requests(2, LENGTH)
    with pytest.raises(RefusedError, match="of its partners"):
        world.mask_reply(1005, requests[1005])


def test_left_out_clients_are_named():
    world = World.make(6, 3)

    def tamper(node, message):
        if isinstance(message, MaskedReply) and node == 1000:
            return replace(message, left_out={1: "value nan at (0,)\nis odd", 4: "not mine"})
        return message

    world.tamper = tamper
    world.check(world.round(0, Lost(clients=[1])), [0, 2, 3, 4, 5])
    assert world.server.blamed == [(1, "round 0: left out: value nan at (0,) is odd")]
