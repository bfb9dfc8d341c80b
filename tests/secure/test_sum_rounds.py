"""What a sum is, whoever vanishes."""

import re
from dataclasses import replace

import numpy as np
import pytest
from sum_helpers import LENGTH, RING, TERMS, World

from flower_graph.errors import RefusedError
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum import server as sum_server
from flower_graph.secure.sum.messages import SumTerms
from flower_graph.secure.sum.round import Skipped


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
        for node, request in world.server.mask_requests(number, LENGTH, 64, TERMS).items():
            reply = world.mask_reply(node, request)
            assert (reply.total != world.plain_sum(request.clients)).all()
            masked.append(reply.total)
            world.server.take(node, reply)
        world.unmask(number)
        assert (sum(masked) != world.plain_sum(range(12))).all()
        world.check(world.server.result(number), range(12))
        seen.append(masked[0])
    assert (seen[0] != seen[1]).all()


def test_pads_are_those_of_one_sum_as_masks_are() -> None:
    ring = Ring(64, 20, 3, 32.0)
    terms = SumTerms("a sum", ring, b"layout", padded=True)
    rings = [replace(ring, **one) for one in ({"fraction_bits": 21}, {"guard_bits": 4},
             {"limit": 33.0}, {"word": 32, "fraction_bits": 8})]  # fmt: skip
    others = [replace(terms, ring=one) for one in (*rings, None)]
    others += [replace(terms, purpose="another"), replace(terms, detail=b"another")]
    contexts = [one.pad_context(b"a run") for one in (terms, *others)]
    contexts.append(terms.pad_context(b"another run"))
    assert len(set(contexts)) == len(contexts) == 9


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
    for node, request in world.server.mask_requests(0, LENGTH, 64, TERMS).items():
        terms = OTHERWISE[told] if node == 1002 else TERMS
        if node != 1004:
            world.server.take(node, world.mask_reply(node, request, terms=terms))
    world.unmask(0)
    total = world.server.result(0).total
    assert (total == world.plain_sum([0, 1, 2, 3, 5])).all() == (told == "nothing")
    assert told == "nothing" or (total != world.plain_sum([0, 1, 2, 3, 5])).mean() > 0.9


def test_terms_are_bound_to_length_threshold_and_minimum_and_guard_bits_to_the_clients():
    said = (7, 64, 3, 5)
    found = {TERMS.digest(*said)}
    found |= {TERMS.digest(*said[:at], 9, *said[at + 1 :]) for at in range(4)}
    assert len(found) == 5
    padded = replace(TERMS, padded=True, ring=replace(RING, guard_bits=2))
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
    "seed", [0, 1, *(pytest.param(k, marks=pytest.mark.release) for k in (2, 3, 4))]
)
def test_thirty_percent_at_random_stages(seed):
    world = World.make(40)
    draw = np.random.default_rng(seed)
    nodes = draw.permutation(list(world.hosts))[:12].tolist()
    stages = draw.integers(3, size=12)
    at = dict(zip(nodes, stages.tolist(), strict=True))
    lost = {
        s: [n for n in nodes if at[n] == i] for i, s in enumerate(("prepare", "mask", "unmask"))
    }
    absent = {world.hosts[node].clients[0] for node in (*lost["prepare"], *lost["mask"])}
    world.check(world.round(0, **lost), sorted(set(range(40)) - absent))
    world.check(world.round(1), range(40))  # they are back


@pytest.mark.parametrize(
    ("stage", "count", "why"),
    [
        # 13 at most: of the rest, those are not ready whose random partners are too few by now.
        ("prepare", 7, r": (\d|1[0-3]) of 20 clients are ready, at least 14 must"),
        ("mask", 7, ": 13 of 20 clients sent their vectors, at least 14 must"),
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


def test_less_than_two_clients():
    world = World.make(2)
    assert "a sum needs at least 2" in str(world.round(0, clients=[1]).reason)
    assert "0 clients" in str(world.round(1, clients=[]).reason)


@pytest.mark.parametrize("gone", [2, 1])
def test_a_sum_goes_on_with_however_few_clients_leave_it(gone):
    """With a share of 0.4 two of six may vanish, one of five, and none of three."""
    world = World.make(6, dropout=0.4)
    for number, m in enumerate((6, 5, 4, 3, 2)):
        lost = range(1000, 1000 + gone)
        world.check(world.round(2 * number, clients=range(m)), range(m))
        found = world.round(2 * number + 1, range(m), mask=list(lost))
        if gone <= {6: 2, 5: 1, 4: 1, 3: 0, 2: 0}[m]:
            world.check(found, range(gone, m))
        else:
            assert f"{m - gone} of {m} clients sent their vectors" in str(found.reason)
    with pytest.raises(ValueError, match=r"dropout.*0.5"):
        World.make(6, dropout=0.5)


def test_a_sum_needs_two_that_do_not_collude():
    world = World.make(4, dropout=0.0, corrupt=0.5)
    reason = world.round(0, clients=[0, 1]).reason
    assert "2 clients, a sum needs at least 2 that do not" in str(reason)
    world.check(world.round(1), range(4))


def test_participants_may_change_and_the_next_round_is_prepared_early():
    world = World.make(30, 4)
    world.prepare(0, range(0, 20))
    world.mask(0)
    world.prepare(1, range(10, 30))
    world.unmask(0)
    world.check(world.server.result(0), range(20))
    world.mask(1)
    world.unmask(1)
    world.check(world.server.result(1), range(10, 30))


def test_later_clients_join():
    world = World.make(6, 2)
    world.server.forget(1004)
    world.check(world.round(0), range(4))
    world.server.enroll(1004, world.hosts[1004].keys())
    world.check(world.round(1), range(6))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "m",
    [
        pytest.param(500, marks=pytest.mark.slow),
        pytest.param(10_000, marks=pytest.mark.release),
    ],
)
def test_many_clients(m):
    """With three in ten absent at a large host, and 100 clients elsewhere."""
    world = World.make(m, m - 100, dropout=0.3, corrupt=0.0)
    absent = np.random.default_rng(0).permutation(m - 100)[: 3 * m // 10].tolist()
    result = world.round(0, without=absent)
    world.check(result, sorted(set(range(m)) - set(absent)))
