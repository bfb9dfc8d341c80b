"""A server that deviates in the secure sum, alone: what clients do not believe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sum_helpers import TERMS, World

from flower_graph.errors import RefusedError
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import (
    MASK_KEY,
    SEED,
    MaskRequest,
    PrepareRequest,
    UnmaskRequest,
)


def masked(m: int, per_host: int = 1) -> World:
    world = World.make(m, per_host)
    world.prepare(0)
    world.mask(0)
    return world


def told(kinds: np.ndarray, partners: np.ndarray, gone: list[int]) -> np.ndarray:
    """What a holder is asked for if these have vanished."""
    return np.where(np.isin(partners, gone), MASK_KEY, SEED).astype(np.uint8)


@pytest.mark.parametrize("m", [10, 40])
def test_nobody_believes_that_one_client_alone_survived(m):
    """On 82e52ed every holder revealed all, and client 3 was open to the server."""
    world = masked(m)
    others = [client for client in range(m) if client != 3]
    for node, request in world.server.unmask_requests(0).items():
        host = world.hosts[node]
        kinds = told(request.kinds, host._rounds[0].partners, others)[None]
        lie = replace(request, kinds=kinds, contributors=m)
        with pytest.raises(RefusedError, match="partners"):
            host.unmask(lie)


@pytest.mark.parametrize("m", [10, 40, 100])
def test_different_stories_open_nobody(m):
    """Half of the holders are told that a client is there, half that it vanished."""
    world, draw = masked(m), np.random.default_rng(m)
    shown = np.zeros((2, m), int)  # shares of each client's seed, and of its mask key
    threshold = 0
    for node, request in world.server.unmask_requests(0).items():
        host = world.hosts[node]
        kept, threshold = host._rounds[0], host._rounds[0].threshold
        partners = kept.partners
        # As many as this holder will believe to have vanished
        gone = draw.permutation(partners)[: partners.size - threshold].tolist()
        kinds = told(request.kinds, partners, gone)[None]
        reply = host.unmask(replace(request, kinds=kinds, contributors=m))
        for kind in (SEED, MASK_KEY):
            shown[kind - SEED, partners[reply.kinds[0] == kind]] += 1
    assert shown.sum() == m * partners.size
    assert ((shown >= threshold).sum(0) < 2).all()


def test_terms_with_which_few_could_open_a_vector():
    world = World.make(80, 2)
    node, request = next(iter(world.server.open_round(0, range(80)).items()))
    host, k = world.hosts[node], request.partners.shape[1]
    assert 2 * request.threshold > k
    twice = request.partners.copy()
    twice[:, 1] = twice[:, 0]
    own = request.partners.copy()
    own[0, 0] = request.clients[0]
    for why, change in (
        ("threshold is 1 and minimum 2", {"threshold": 1, "minimum": 2}),
        (f"threshold is {k // 2} and", {"threshold": k // 2}),
        ("too few for", {"minimum": request.threshold}),
        ("too few for", {"minimum": (k + 1) // 2}),  # half of the SuperNodes that it knows of
        ("has one twice", {"partners": twice}),
        ("its own partner", {"partners": own}),
    ):
        with pytest.raises(RefusedError, match=why):
            host.prepare(replace(request, **change))
    host.prepare(request)


def test_what_contradicts_what_a_holder_knows():
    """Nothing is revealed, and the round stays open for the truth."""
    world = masked(40, 4)
    node, request = next(iter(world.server.unmask_requests(0).items()))
    host = world.hosts[node]
    kept = host._rounds[0]
    gone = request.kinds.copy()
    gone[0, : kept.partners.size - kept.threshold + 1] = MASK_KEY
    for why, change in (
        ("39 clients", {"contributors": kept.minimum - 1}),
        ("of our partners are in the sum", {"kinds": gone}),
    ):
        with pytest.raises(RefusedError, match=why.replace("39", str(kept.minimum - 1))):
            host.unmask(replace(request, **change))
    kept.live = ~np.eye(1, kept.partners.size, dtype=bool)[0]
    with pytest.raises(RefusedError, match="took"):
        host.unmask(request)
    kept.live = np.ones_like(kept.live)
    assert host.unmask(request).kinds.all()
    with pytest.raises(RefusedError, match="round 0"):
        host.unmask(request)


@pytest.mark.parametrize("hosted", [1, 3])
def test_a_supernode_that_is_told_to_be_alone_sends_no_sum_of_fewer_than_the_minimum(hosted):
    """Without partners there are no masks: one client is never a sum, nor are too few."""
    host = SumClient(bytes(16), range(hosted))
    none = np.zeros((1, 0), np.int64)
    keys = np.zeros((0, 32), np.uint8)
    for minimum in (0, 1):
        with pytest.raises(RefusedError, match="too few for 0 partners"):
            host.prepare(PrepareRequest(bytes(16), 0, 0, minimum, np.array([0]), none, keys))
    host.prepare(PrepareRequest(bytes(16), 0, 0, 2, np.array([0]), none, keys))
    packets = np.zeros((0, 82), np.uint8)
    commitments = np.zeros((0, 2, 32), np.uint8)
    there = np.arange(hosted)
    request = MaskRequest(bytes(16), 0, 6, 64, there, none[0] > 0, keys, commitments, packets)
    total = np.arange(6, dtype="<u8")
    with pytest.raises(RefusedError, match="nothing is sent"):
        host.mask(request, [0], total, TERMS)
    if hosted > 1:
        assert (host.mask(request, [0, 2], total, TERMS).total == total).all()
        with pytest.raises(RefusedError, match="masked already"):
            host.mask(request, [0, 2], total, TERMS)
        shares = UnmaskRequest(bytes(16), 0, 2, np.array([0]), np.zeros((1, 0), np.uint8))
        assert not host.unmask(shares).shares.size  # there is nothing to reveal


def test_a_host_that_sent_nothing_reveals_nothing():
    """Also when its masks were asked for, and it refused because too few partners were there."""
    world = World.make(10)
    world.prepare(0)
    node, request = next(iter(world.server.mask_requests(0, 6, 64, TERMS).items()))
    host, live = world.hosts[node], request.live.copy()
    live[2:] = False
    pairs = ("round_keys", "packets", "share_commitments")
    two = {name: getattr(request, name)[:2] for name in pairs}
    with pytest.raises(RefusedError, match="fewer"):
        host.mask(replace(request, live=live, **two), [0], np.zeros(6, "<u8"), TERMS)
    assert not host._rounds[0].has.any() and not host._rounds[0].held.any()
