"""nFedGNN with one first layer where the server is not trusted: what it changes is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import Federation, at
from flwr.app import Array, Context, Message, RecordDict
from sum_helpers import settings
from test_summed import LINEAR, Summed, rich_graph

from flower_graph.errors import NoClientsError, RefusedError
from flower_graph.secure.common_key import CommonKey, KeyPacket, ShareKeyRequest
from flower_graph.secure.ring import CHECKS, Ring, SumPad, checks_of

RING, SUM = Ring(64, 40, 3, 64.0), (bytes(16), 3, b"detail")
LENGTH, COUNT = 12, 5
HOW: dict[str, Any] = {"supernodes": 5, "is_masked": True, "rounds": 3, "timeout": 0.5}
DELTA = 1 << 50  # of a word of the sum: a thousand, of one weight's gradient


class Adds(Federation):
    """Adds to the sum that clients are to step with, under pads that it cannot take off."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Change what is sent."""
        sent = list(messages)
        for one in sent:
            if (total := one.content.array_records.get("total")) is not None:
                words = total["words"].numpy().copy()
                words[0] += np.uint64(DELTA)
                total["words"] = Array(words)
        return super().push_messages(sent)


def test_what_is_added_to_a_sum_moves_the_layer_where_the_server_is_trusted() -> None:
    """And so the next latent vectors tell who has the first feature."""
    run = Summed(rich_graph(), grid=Adds, **HOW)
    first, *_, last = run.layers
    moved = last[LINEAR][0, 0] - first[LINEAR][0, 0]
    assert moved < -0.05, "by a step in each round, as the server knows"


def test_nobody_steps_with_a_sum_to_which_something_was_added() -> None:
    with pytest.raises(NoClientsError, match="relayed sum"):
        Summed(rich_graph(), grid=Adds, distrusts=True, **HOW)


def test_one_that_misses_a_step_is_back_and_the_others_go_on_meanwhile() -> None:
    """Sums under pads may differ by one SuperNode: nobody else is left out for one that is gone."""
    how = HOW | {"supernodes": 7, "rounds": 5, "timeout": 5.0}
    run = Summed(rich_graph(), faults=at("gone", {3, 4}, "connect"), distrusts=True, **how)
    assert not any(report.skipped or report.rejected for report in run.reports)
    answered = [report.answered for report in run.reports]
    assert answered[0] == answered[-1] == 40 and 0 < answered[1] == answered[2] < 40
    for layer in run.layers[-7:]:
        torch.testing.assert_close(layer, run.layers[-1])


@pytest.fixture
def keys(tmp_path: Path) -> list[CommonKey]:
    """Two SuperNodes with registered keys, of which the first has drawn the common key."""
    found = [
        CommonKey(Context(1, number, {}, RecordDict(), {}), trust)
        for number, trust in enumerate(settings(5, tmp_path)[:2])
    ]
    first, second = found
    assert first.public.size == second.public.size  # made when they are asked for
    reply = first.share(ShareKeyRequest(*rows(second), True, rows_signed(second)))
    second.take(KeyPacket(reply.packets[0], first.public, first.signed_by))
    return found


def rows(*of: CommonKey) -> tuple[Any]:
    return (np.array([one.public for one in of], np.uint8),)


def rows_signed(*of: CommonKey) -> Any:
    return np.array([one.signed_by for one in of], np.uint8)


def pad_of(
    key: CommonKey, number: int = SUM[1], detail: bytes = SUM[2], ring: Ring = RING
) -> SumPad:
    return key.pad(SUM[0], number, detail, ring, LENGTH)


def summed(key: CommonKey) -> tuple[np.ndarray, np.ndarray]:
    """Add up numbers of some contributors as masked sums do; give the words and the numbers."""
    values = np.random.default_rng(2).uniform(-60, 60, (COUNT, LENGTH))
    pad, total = pad_of(key), np.zeros(0, np.uint64)
    for one in values:
        words = np.zeros(pad.words.size, np.uint64)
        words[:LENGTH] = RING.encode(one)
        total = words + pad.added(RING, one) + (total if total.size else np.uint64(0))
    return total, values.sum(0)


def test_a_sum_is_read_by_who_has_the_key(keys: list[CommonKey]) -> None:
    total, values = summed(keys[0])
    assert np.allclose(pad_of(keys[1]).taken(RING, total, COUNT), values, atol=1e-10)


@pytest.mark.parametrize(
    ("added", "count", "of"),
    [
        pytest.param({3: 1 << 3}, COUNT, {}, id="word"),
        pytest.param({3: 1 << 55}, COUNT, {}, id="high bit"),
        pytest.param({-1: 1}, COUNT, {}, id="check"),
        pytest.param({}, COUNT + 1, {}, id="contributors"),
        pytest.param({}, COUNT, {"detail": b"another"}, id="step"),
        pytest.param({}, COUNT, {"ring": Ring(64, 41, 3, 64.0)}, id="form"),
        pytest.param({}, COUNT, {"number": SUM[1] + 1}, id="other sum"),
    ],
)
def test_a_sum_is_refused_that_is_not_what_contributors_sent(
    keys: list[CommonKey], added: dict[int, int], count: int, of: dict[str, Any]
) -> None:
    total, _ = summed(keys[0])
    for place, change in added.items():
        total[place] += np.uint64(change)
    with pytest.raises(RefusedError):
        pad_of(keys[1], **of).taken(RING, total, count)


def test_a_refusal_does_not_tell_where_the_sum_lies_that_something_is_added_to(
    keys: list[CommonKey],
) -> None:
    """What is added brings the one sum over the limit and not the other: the words are the same."""
    said = set[str]()
    step = 1 << RING.guard_bits
    for value in (-50.0, 50.0):
        pad = pad_of(keys[0])
        total = pad.added(RING, np.full(LENGTH, value))
        total[:LENGTH] += RING.encode(np.full(LENGTH, value))
        for delta in (64 << RING.fraction_bits, 1, 0):
            changed = total.copy()
            changed[0] += np.uint64(delta * step)
            changed[-1] += np.uint64(1)
            with pytest.raises(RefusedError) as refused:
                pad.taken(RING, changed, 1)
            said.add(str(refused.value))
    assert len(said) == 1


@pytest.mark.parametrize("word", [32, 64])
def test_a_change_of_one_bit_anywhere_is_found_by_about_half_of_the_checks(word: int) -> None:
    chance = np.random.default_rng(4)
    subsets = chance.integers(0, 1 << 63, 40, np.uint64) * np.uint64(2) + np.uint64(1)
    words = chance.integers(0, 1 << 31, 40).astype(f"<u{word // 8}")
    right, found = checks_of(words, subsets), list[int]()
    for place in range(40):
        for bit in (0, word // 2, word - 1):
            changed = words.copy()
            changed[place] += words.dtype.type(1 << bit)
            found.append(int((checks_of(changed, subsets) != right).sum()))
    assert min(found) > 12 and max(found) < 52 and abs(np.mean(found) - CHECKS / 2) < 3
    twice = checks_of(words + words[::-1], subsets)
    assert np.array_equal(twice, right + checks_of(words[::-1].copy(), subsets))


@pytest.mark.parametrize("lie", ["unsigned", "another's", "own"])
def test_the_common_key_is_sealed_for_registered_parties_alone(
    keys: list[CommonKey], lie: str, tmp_path: Path
) -> None:
    first, second = keys
    server = CommonKey(Context(1, 9, {}, RecordDict(), {}))
    assert server.public.size
    signed = {
        "unsigned": None,
        "another's": rows_signed(second),
        "own": rows_signed(
            CommonKey(Context(1, 8, {}, RecordDict(), {}), settings(5, tmp_path / "own")[0])
        ),
    }[lie]
    with pytest.raises(RefusedError):
        first.share(ShareKeyRequest(*rows(server), False, signed))
    reply = server.share(ShareKeyRequest(*rows(second), True))
    with pytest.raises(RefusedError):
        second.take(
            KeyPacket(reply.packets[0], server.public, None if signed is None else signed[0])
        )
    assert second.check.tobytes() == first.check.tobytes()
