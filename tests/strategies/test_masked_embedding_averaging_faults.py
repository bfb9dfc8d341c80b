"""Clients that drop out, answer badly or lie; the sum over the rest stays exact."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ego_helpers import CLASSES, toy_egos
from ego_strategy_helpers import assert_same, ego, faulty, rounded, run, seven_egos, three_egos
from flwr.app import RecordDict

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.errors import AlignmentError

Change = Callable[[RecordDict], None]
M, ROUNDS = 10, 5


def ten_egos() -> list[EgoNetwork]:
    return [network for network in toy_egos() if network.client not in (105, 111)]


# Dropping out ------------------------------------------------------------------------------------


def dropouts(seed: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Let 3 of 10 clients vanish in every round, each at some stage.

    Returns the script of a masked run, and that of a plain run in which the same clients are
    absent from the same sums. Who does not answer the second exchange of a round is in its sum,
    but has not prepared the next one.
    """
    draw = random.Random(seed)
    masked: dict[Any, Any] = {}
    plain: dict[Any, Any] = {}
    unprepared: list[int] = []
    for number in range(2, ROUNDS + 1):
        rest = [p for p in range(M) if p not in unprepared]
        mute = draw.randint(0, 3 - len(unprepared))  # having prepared it
        late = 3 - len(unprepared) - mute
        vanished = draw.sample(rest, mute + late)
        for place in vanished[:mute]:
            masked[place, "train", number] = "silent"
        for place in vanished[mute:]:
            masked[place, "both", number] = draw.choice(["silent", "lost"])
        for place in vanished[:mute] + unprepared:
            plain[place, "train", number] = "silent"
        unprepared = vanished[mute:] if number < ROUNDS else []
        if number == ROUNDS:
            for place in vanished[mute:]:
                plain[place, "train", number + 1] = "silent"
    return masked, plain


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_three_of_ten_drop_out_at_random_stages(seed: int) -> None:
    masked, plain = dropouts(seed)
    egos = ten_egos()
    one = run(egos, rounds=ROUNDS, supernodes=M, make_grid=faulty(masked))
    other = run(
        egos,
        rounds=ROUNDS,
        supernodes=M,
        make_grid=faulty(plain),
        aggregation="plain",
        mods=[rounded],
    )
    assert not any(report.skipped for report in one.reports)
    assert min(one.answered) == 7
    assert_same(one, other, 0.0)


def test_too_many_drop_out_and_the_round_is_skipped() -> None:
    script = {(p, "train", 3): "lost" for p in range(3)}
    outcome = run(seven_egos(), rounds=5, supernodes=7, make_grid=faulty(script))
    reasons = [report.skipped for report in outcome.reports]
    assert reasons[1].startswith("round 3 is skipped: 4 of 7 clients sent their vectors")
    assert reasons[1].endswith("at least 5 must; nothing is revealed")
    assert not any(reasons[:1] + reasons[2:])
    assert outcome.figures[1].isnan()[1:].all()  # what round 3's vectors say of round 2
    assert outcome.figures[2, 2].isnan()  # nothing to fuse from round 3
    assert outcome.figures[3:, :3].isfinite().all()


def test_too_few_prepare_and_the_round_is_skipped() -> None:
    script = {(p, "both", 2): "lost" for p in range(5)}
    outcome = run(seven_egos(), rounds=5, supernodes=7, make_grid=faulty(script))
    assert [bool(report.skipped) for report in outcome.reports] == [True, True] + [False] * 3
    assert outcome.answered[2:] == [7] * 3


# During the set-up -------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "word"), [("hello", "silent"), ("align", "lost")])
def test_lost_during_the_set_up(stage: str, word: str) -> None:
    outcome = run(seven_egos(), supernodes=7, make_grid=faulty({(2, stage, 1): word}))
    assert outcome.answered[-1] >= 6
    assert outcome.figures[1:, :3].isfinite().all()


def test_a_union_that_too_few_take_part_in_is_tried_without_the_others() -> None:
    script = {(p, "union", 1): "lost" for p in range(4)}
    outcome = run(seven_egos(), supernodes=7, make_grid=faulty(script))
    assert outcome.answered[-1] == 3


def test_a_union_that_nobody_takes_part_in_is_an_error() -> None:
    script = {(p, "union", 1): "lost" for p in range(7)}
    with pytest.raises(AlignmentError, match=r"round 1.*0"):
        run(seven_egos(), supernodes=7, make_grid=faulty(script))


@pytest.mark.parametrize(
    ("change", "message", "alignment"),
    [
        ({"nodes": torch.tensor([2, 2])}, "client 12 has identities twice: numbers 0 and 1", "psi"),
        *(
            ({"names": ("secret name", 17)}, "client 12 has identities of mixed types", alignment)
            for alignment in ("psi", "plain")
        ),
        ({"y": torch.tensor([1, CLASSES])}, f"client 12 has class {CLASSES}", "plain"),
        ({"x": torch.ones(2, 9)}, "client 12 has 9 features, the run has 7", "plain"),
    ],
)
def test_data_that_do_not_fit(
    change: dict[str, Any], message: str, alignment: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = replace(ego(12, [2, 3]), **change)
    outcome = run([*three_egos(), wrong], supernodes=4, alignment=alignment)
    assert outcome.answered == [3] * 3
    assert message in caplog.text
    assert "secret name" not in caplog.text


# Numbers that do not fit -------------------------------------------------------------------------


def spoilt(factor: float) -> list[EgoNetwork]:
    """Seven clients; the features of the second make its embeddings too large, or no numbers."""
    egos = seven_egos()
    egos[1] = replace(egos[1], x=egos[1].x * factor)
    return egos


@pytest.mark.parametrize(
    ("factor", "aggregation", "supernodes"),
    [
        (3.4e38, "masked", 7),
        pytest.param(3.4e38, "masked", 2, marks=pytest.mark.slow),
        (3.4e38, "plain", 2),
    ],
)
def test_a_client_beyond_the_range_is_left_out(
    factor: float, aggregation: str, supernodes: int
) -> None:
    outcome = run(spoilt(factor), supernodes=supernodes, rounds=4, aggregation=aggregation)
    assert outcome.answered == [6] * 4
    assert outcome.figures[:, :3].isfinite().all()
    for report in outcome.reports:
        (entry,) = report.rejected
        assert re.search(r"an? (embedding|measurement) is outside the range", entry["reason"])
        assert "101" in entry["reason"] or entry["client"] == 101
    # The others are as if it had never been asked.
    without = run(
        spoilt(1.0),
        supernodes=7,
        rounds=4,
        make_grid=faulty({(1, "train", n): "lost" for n in range(1, 6)}),
        aggregation=aggregation,
    )
    good = {c: w for c, w in outcome.last.items() if c != 101}
    for client, weights in good.items():
        torch.testing.assert_close(weights, without.last[client], atol=1e-5, rtol=0)


# Replies that are wrong --------------------------------------------------------------------------


def wrong_bytes(key: str) -> Change:
    def apply(content: RecordDict) -> None:
        record = next(r for r in content.config_records.values() if key in r)
        record[key] = bytes(255 - byte for byte in record[key])

    return apply


@pytest.mark.parametrize(
    ("script", "why", "answered"),
    [
        # Proof: it is out for good
        (
            {(2, "both", 3): wrong_bytes("unmask-shares")},
            "round 3: it sent a wrong share",
            [7, 7, 6, 6, 6, 6],
        ),
        # One word against another, and most are against it: it is out from the first union on
        (
            {(2, "hello", 1): wrong_bytes("sum-channel-key")},
            "most others and its SuperNode cannot open what they seal for each other",
            [6, 6, 6, 6, 6, 6],
        ),
    ],
)
def test_who_spoils_the_sum_is_named_and_left_out(
    script: dict[Any, Any], why: str, answered: list[int]
) -> None:
    outcome = run(seven_egos(), rounds=6, supernodes=7, make_grid=faulty(script), alignment="plain")
    assert outcome.answered == answered
    assert [not report.skipped for report in outcome.reports] == [n > 0 for n in answered]
    named = [e for r in outcome.reports for e in r.rejected if e.get("client") == 103]
    assert any(re.search(why, entry["reason"]) for entry in named)
    assert {e["client"] for r in outcome.reports for e in r.rejected if "client" in e} == {103}
    assert outcome.figures[[n > 0 for n in answered], :2].isfinite().all()
