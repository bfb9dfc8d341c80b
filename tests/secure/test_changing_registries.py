"""Registries that change in mid-run: newcomers, other keys, parties that are revoked."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from party_helpers import PartyWorld
from sum_helpers import RING, TERMS

from flower_graph.errors import IdentityError, MalformedReplyError, RefusedError, StateLostError
from flower_graph.secure.parties.identity import Identity
from flower_graph.secure.sum.client import SumClient


def read(world, node, registry, key=None):
    """Let a SuperNode read a version of the registry, as it does with its next message."""
    party = world.parties[node]
    identity = Identity(key or party.trust.identity._key, registry)
    trust = replace(party.trust, registry=registry, identity=identity)
    world.parties[node] = SumClient.from_bytes(party.to_bytes(), trust)


@pytest.fixture
def world(tmp_path):
    """Ten parties after their first round; each may begin anew once a day, and has."""
    world = PartyWorld.make(10, tmp_path)
    for party in world.parties.values():
        party.trust = replace(party.trust, runs=1)
    world.begin()
    world.check(world.round(0), range(10))
    return world


def test_another_version_is_another_epoch(world, caplog):
    """A newcomer; and what the parties had prepared or shown under the old one is given up."""
    world.prepare(1)
    key = Ed25519PrivateKey.generate()
    registry = world.server.registry.with_party(
        key.public_key().public_bytes_raw(), [range(20, 22)]
    )
    with caplog.at_level(logging.WARNING):
        registry.write(world.server._registry_file)
        world.server.renew()
    assert "joined: [10], with another key: [], revoked: []" in caplog.text
    for node in list(world.parties):
        read(world, node, registry)
    trust = replace(world.parties[1000].trust, identity=Identity(key, registry))
    trust = replace(trust, journal=trust.journal.with_name("10"))
    world.parties[1010] = SumClient(world.server.run_id, [20, 21], trust)
    world.words = world.words[[*range(10), 0]]
    world.begin()
    for number in (2, 3):  # all eleven differ from the ten by one: one is left out
        found = world.round(number).contributors.tolist()
        assert len(found) == 10


def test_a_party_with_another_key_goes_on_with_it(world, caplog):
    key = Ed25519PrivateKey.generate()
    registry = world.server.registry.rotated(3, key.public_key().public_bytes_raw())
    with caplog.at_level(logging.WARNING):
        registry.write(world.server._registry_file)
        world.server.renew()
    assert "joined: [], with another key: [3], revoked: []" in caplog.text
    with pytest.raises(IdentityError, match="party 3"):
        read(world, 1003, registry)
    for node in world.parties:
        read(world, node, registry, key if node == 1003 else None)
    world.begin()
    world.check(world.round(1), range(10))


def test_a_server_with_the_old_version_gets_nothing_of_who_has_the_new_one(world):
    """It keeps a party that is revoked: whoever knows of that takes no part any more."""
    registry = world.server.registry.without(3)
    world.prepare(1)
    requests = world.server.mask_requests(1, 8, 64, TERMS)
    read(world, 1004, registry)
    party = world.parties[1004]
    for step in (
        lambda: party.receive(requests[1004], TERMS.ring),
        lambda: party.prepare(None),
        lambda: party.sign_list(None),
        lambda: party.unmask(requests[1004]),
    ):
        with pytest.raises(StateLostError):
            step()
    with pytest.raises(MalformedReplyError, match="registry"):
        world.server.take_binding(1004, party.bind())
    for node, one in world.parties.items():
        if node != 1004:
            world.server.take_binding(node, one.bind())
    world.server.forget(1004)
    request = world.server.reveal_requests(RING.limit)[1005]
    read(world, 1005, registry)
    with pytest.raises(RefusedError, match="party 3"):
        world.parties[1005].reveal(request)


def test_a_seed_that_was_shown_serves_no_list_of_another_version(world):
    party = world.parties[1004]
    party.bind()
    seed = party._seed
    for node, one in world.parties.items():
        world.server.take_binding(node, one.bind())
    party.reveal(world.server.reveal_requests(RING.limit)[1004])
    read(world, 1004, world.server.registry.without(3))
    assert world.parties[1004]._seed != seed
