"""The paper's polynomials by hand, and how a server reads the identities from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.secure.align import polynomial as paper

PRIME = 1_610_612_741  # the first above 3 · 2^29


def array(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_primes() -> None:
    small = [n for n in range(60) if paper.is_prime(n)]
    assert small == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]
    assert paper.is_prime(PRIME)
    assert paper.is_prime(2**31 - 1)
    assert not any(paper.is_prime(n) for n in (561, 2047, 1_373_653, 25_326_001, 46_341**2))
    drawn = {paper.random_prime(*paper.PRIME_RANGE) for _ in range(20)}
    assert len(drawn) > 10
    assert all(3 << 29 <= p < 1 << 31 and paper.is_prime(p) for p in drawn)
    for _ in range(50):  # no random root is an identity
        assert paper.IDENTITY_LIMIT <= paper.random_prime(paper.IDENTITY_LIMIT, PRIME) < PRIME


def test_equation_12_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "random_prime", lambda low, high: 11)
    # (γ − 2)(γ − 3)(γ − 11) = γ³ − 16γ² + 61γ − 66
    found = paper.polynomial(array(2, 3), PRIME)
    assert found.tolist() == [PRIME - 66, 61, PRIME - 16, 1]
    assert paper.evaluate(found[None], array(2, 3, 11, 1), PRIME).tolist() == [
        [0], [0], [0], [PRIME - 20]
    ]  # fmt: skip


def patterns(sets: list[np.ndarray]) -> tuple[list[np.ndarray], list[Any]]:
    """Give the patterns of each client's identities, as bytes and as bits."""
    table = np.zeros((len(sets), max(own.size for own in sets) + 2), np.uint64)
    for row, own in zip(table, sets, strict=True):
        row[: own.size + 2] = paper.polynomial(own, PRIME)
    found = [
        paper.patterns(own, paper.pair_sums(table, place, PRIME), place, PRIME)
        for place, own in enumerate(sets)
    ]
    return found, [np.unpackbits(own, axis=1)[:, : len(sets)].tolist() for own in found]


def test_patterns_and_order_by_hand() -> None:
    sets = [array(9, 4, 2), array(4, 2), array(2, 7)]
    found, bits = patterns(sets)
    assert bits[0] == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert bits[2] == [[1, 1, 1], [0, 0, 1]]
    counts = {b"\x80": 1, b"\xc0": 1, b"\xe0": 1, b"\x20": 1}
    start = paper.sections(counts)
    assert start == {b"\xe0": 0, b"\xc0": 1}
    assert [paper.slots(own, f, start).tolist() for own, f in zip(sets, found, strict=True)] == [
        [-1, 1, 0], [1, 0], [0, -1]
    ]  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), max_size=9), min_size=2, max_size=10))
def test_patterns_say_exactly_who_holds_what(sets: list[set[int]]) -> None:
    owns = [array(*own) for own in sets]
    for own, bits in zip(owns, patterns(owns)[1], strict=True):
        assert bits == [[identity in other for other in sets] for identity in own.tolist()]


@pytest.mark.parametrize("identity", [-1, 1 << 30, "5", 2.0])
def test_other_identities_are_refused(identity: object) -> None:
    with pytest.raises(ValueError, match=r"client 3.*1"):
        paper.check_identities(3, [1, identity])


@pytest.mark.parametrize("modulus", [7, PRIME + 2, (1 << 31) + 11])
def test_other_moduli_are_refused(modulus: int) -> None:
    with pytest.raises(ValueError, match="prime"):
        paper.polynomial(array(1), modulus)


# How it is broken: the server has the coefficients, a client the sums. Nothing else is used below.


def test_the_server_finds_the_identities_by_trying_all_candidates() -> None:
    secret = sorted(np.random.default_rng(1).choice(20_000, 70, replace=False).tolist())
    sent = paper.polynomial(array(*secret), PRIME)
    values = paper.evaluate(sent[None], np.arange(20_000, dtype=np.uint64), PRIME)
    assert np.flatnonzero(values[:, 0] == 0).tolist() == secret


def test_a_client_takes_its_own_polynomial_away_and_reads_the_others() -> None:
    sets = [[3, 70, 500, 9_000], [70, 71, 72, 8_999], [1, 2, 500, 600]]
    table = np.stack([paper.polynomial(array(*one), PRIME) for one in sets])
    others = paper.pair_sums(table, 0, PRIME) + np.uint64(PRIME) - table[0]
    values = paper.evaluate(others % np.uint64(PRIME), np.arange(20_000, dtype=np.uint64), PRIME)
    assert [np.flatnonzero(column == 0).tolist() for column in values.T] == sets[1:]
