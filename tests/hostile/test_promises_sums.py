"""What a lying server gets out of secure sums, and what it does not, where no other test says so.

The first two attacks succeed: the form that trusts the server has no answer to them, and the pages
say so. On 82e52ed all of them succeed that are about that form.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from party_helpers import PartyWorld
from sum_helpers import LENGTH, RING, TERMS, World, wire

from flower_graph.audit.deviating import Opened
from flower_graph.errors import RefusedError
from flower_graph.secure import channel
from flower_graph.secure.channel import new_key
from flower_graph.secure.parties.messages import ListRequest, Signatures
from flower_graph.secure.shamir import SHARE_BYTES, combine_shares
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    NOTHING,
    SEED,
    PrepareReply,
    PrepareRequest,
    UnmaskRequest,
)

VICTIM, STATE = 3, bytes(16)


def stories(partners: np.ndarray, threshold: int) -> dict[int, np.ndarray]:
    """Say which of the victim's partners each client is to believe to have vanished.

    Nobody believes in more than its partners less the threshold; each partner of the victim is to
    be gone for as many as possible.
    """
    around, told = set(partners[VICTIM].tolist()), np.zeros(len(partners), int)
    shared = {c: sorted(around & set(row.tolist())) for c, row in enumerate(partners)}
    gone = {}
    for client in sorted(shared, key=lambda c: len(shared[c])):
        free = sorted((one for one in shared[client] if one != client), key=told.__getitem__)
        gone[client] = np.array(free[: partners.shape[1] - threshold], int)
        told[gone[client]] += 1
    return gone


@pytest.mark.parametrize(
    ("m", "corrupt", "opened"), [(40, 0.0, True), (40, 0.1, False), (100, 0.1, False)]
)
def test_a_trusted_server_may_name_the_partners_of_one_client_as_vanished(m, corrupt, opened):
    """Some of them to these holders, some to those; each holder is told what can be."""
    world = World.make(m, corrupt=corrupt)
    world.prepare(0)
    world.mask(0)
    local = world.server._rounds[0]
    gone, found = stories(local.partners, local.threshold), Opened(local)
    for node, request in world.server.unmask_requests(0).items():
        (client,), partners = request.clients, local.partners[node - 1000]
        kinds = np.where(np.isin(partners, gone[int(client)]), MASK_KEY, SEED).astype(np.uint8)
        lie = replace(request, kinds=kinds[None], contributors=m)
        found.take(world.hosts[node].unmask(wire(lie)))
    assert found.is_open(VICTIM) is opened


def test_a_trusted_server_may_hand_out_channel_keys_of_its_own():
    """The victim shares its secrets with the server, in the place of all its partners."""
    world, (own, public) = World.make(10), new_key()
    sent: dict[str, Any] = {}

    def tamper(node: int, message: Any) -> Any:
        if node == 1000 + VICTIM and isinstance(message, PrepareRequest):
            keys = np.broadcast_to(np.frombuffer(public, np.uint8), message.channel_keys.shape)
            return replace(message, channel_keys=keys)
        if node == 1000 + VICTIM and isinstance(message, PrepareReply):
            sent["reply"] = message
        return message

    world.tamper = tamper
    world.prepare(0)
    local, reply = world.server._rounds[0], sent["reply"]
    victim, run = world.hosts[1000 + VICTIM], world.server.run_id
    (secret,) = channel.agree(own, [victim.keys().channel_key.tobytes()])
    round_key, shares = reply.round_keys[0].tobytes(), []
    for holder, packet in zip(local.partners[VICTIM].tolist(), reply.packets, strict=True):
        what_for = channel.packet_context(run, 0, VICTIM, holder)
        plain = channel.unseal(secret, what_for, round_key, packet.tobytes())
        assert plain is not None
        shares.append((plain[:SHARE_BYTES], plain[SHARE_BYTES:]))
    places = range(1, local.threshold + 1)
    seed, mask_key = (
        combine_shares(places, both[: local.threshold]) for both in zip(*shares, strict=True)
    )
    assert channel.commit_to_seed(run, 0, VICTIM, seed) == reply.seed_commitments[0].tobytes()
    assert channel.public_key(mask_key) == round_key


# The form that does not trust it ------------------------------------------------------------------


def signed_by_all(world: PartyWorld, states: dict[int, bytes], gone: int) -> list[Any]:
    """Put everybody's state back to before it signed; ask for another list, without one."""
    listed = world.server._round(0).live.copy()
    listed[gone] = False
    said = []
    for node, state in states.items():
        party = type(world.parties[node]).from_bytes(state, world.parties[node].trust)
        request = next(iter(world.server.list_requests(0).values()))
        if node != 1000 + gone:
            said.append(party.sign_list(replace(request, listed=listed)))
    return said


def test_a_second_list_is_refused_where_state_was_put_back(tmp_path):
    """The seed of one, by the first list, and its mask key, by the second, open its vector."""
    world = PartyWorld.make(12, tmp_path)
    world.begin()
    world.prepare(0)
    world.mask(0)
    before = {node: party.to_bytes() for node, party in world.parties.items()}
    world.sign(0)
    with pytest.raises(RefusedError, match="after 0"):
        signed_by_all(world, before, VICTIM)


def test_who_was_ready_is_signed_too(tmp_path):
    """Two halves that saw different partners mask: nobody shows a share to either."""
    world = PartyWorld.make(12, tmp_path)
    world.begin()
    world.prepare(0)
    epoch, replies = world.server.epoch, {}
    missing = {place: 11 if place < 6 else 0 for place in range(12)}
    for node, (request, ready) in world.server.mask_requests(0, LENGTH, 64, TERMS).items():
        place = node - 1000
        seen, row = ready.ready.copy(), epoch.partners[place]
        seen[missing[place]] = False
        kept = seen[row]
        names = ("round_keys", "packets", "share_commitments")
        fewer = {name: getattr(request, name)[kept] for name in names}
        if seen[place]:
            lie = replace(request, live=kept, **fewer)
            told = replace(ready, ready=seen, signatures=ready.signatures[kept])
            world.parties[node].receive(lie, told, TERMS.ring)
            replies[node] = world.parties[node].mask(world.words[place], TERMS, STATE)
    assert len(replies) == 12
    both = np.ones(12, bool)
    both[[0, 11]] = False
    request = ListRequest(epoch.id, 0, both)
    signed = {}
    for node in replies:
        if node not in (1000, 1011):
            signed[node] = world.parties[node].sign_list(request).signature
    server = world.server._round(0)
    for node, signature in signed.items():
        server.lists[node - 1000], server.signed[node - 1000] = signature, True
    for node in signed:
        place = node - 1000
        row, ready = epoch.partners[place], np.ones(12, bool)
        ready[missing[place]] = False
        columns = np.flatnonzero(server.signed[row])
        kinds = np.where(both[row], SEED, np.where(ready[row], MASK_KEY, NOTHING)).astype(np.uint8)
        parties = epoch.parties[[place]]
        told = UnmaskRequest(epoch.id, 0, int(both.sum()), parties, kinds[None])
        with pytest.raises(RefusedError, match="something else"):
            world.parties[node].unmask(told, Signatures(columns, server.lists[row[columns]]))


def test_packets_of_another_epoch_do_not_open(tmp_path):
    """Two halves that agreed on different epochs, by all that the server could make fit."""
    world = PartyWorld.make(12, tmp_path)
    server = world.server
    for node, party in world.parties.items():
        server.take_binding(node, wire(party.bind()))
    server.reveal_requests(RING.limit)
    other = copy.deepcopy(server)
    other._request = replace(server._request, number=1)
    of = {node: other if node >= 1006 else server for node in world.parties}
    for node, party in world.parties.items():
        reply = party.reveal(of[node]._request)
        for number, one in enumerate((server, other)):
            one.take_seed(node, replace(reply, number=number))
    asked = {one: one.epoch_requests() for one in (server, other)}
    for node, party in world.parties.items():
        party.begin(asked[of[node]][node])
    assert server.epoch.id != other.epoch.id
    asked = {one: one.open_round(0, one.clients) for one in (server, other)}
    one = server._round(0)
    for node, party in world.parties.items():
        reply, signed = party.prepare(asked[of[node]][node])
        one.take(node, replace(reply, run_id=server.epoch.id))
        one.keys[node - 1000] = signed.signature
    request, ready = server.mask_requests(0, LENGTH, 64, TERMS)[1000]
    with pytest.raises(RefusedError, match=r"8.*partners"):
        world.parties[1000].receive(request, ready, TERMS.ring)
