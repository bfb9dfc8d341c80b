"""The whole method against slow versions, by hand, masked and plain; clients that come later."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, start_of, toy_egos
from ego_strategy_helpers import FINE, assert_same, faulty, rounded, run, seven_egos
from federation import Federation, who_of
from plain import fedscem as plain

from flower_graph.errors import AlignmentError, NoClientsError
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging


# Each value of each setting
@pytest.mark.parametrize(
    ("alignment", "aggregation", "variant", "sharing", "changes"),
    [
        ("psi", "masked", "full", "none", {"local_epochs": 4}),  # 24 steps
        ("psi", "masked", "full", "fedavg", {}),
        ("plain", "plain", "minus", "none", {"local_epochs": 2}),
        ("plain", "plain", "iter", "fedprox", {"proximal": 0.5, "local_epochs": 2}),
    ],
)
def test_equals_dense_clients(
    alignment: str, aggregation: str, variant: str, sharing: str, changes: dict[str, Any]
) -> None:
    """Three SuperNodes: one has no client with a shared node."""
    settings, egos = replace(SETTINGS, **changes), seven_egos()
    how = {"variant": variant, "model_sharing": sharing, "aggregation": aggregation}
    fast = run(egos, settings=settings, alignment=alignment, supernodes=3, **how)
    slow = plain.run(egos, 3, variant, sharing, start_of(), settings)
    for place, client in enumerate(slow):
        found = fast.last[egos[place].client]
        torch.testing.assert_close(found, client.weights(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resolution": 2.0**-70}, "resolution"),
        ({"registry": "none.json", "aggregation": "plain"}, "registry"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedEmbeddingAveraging(**{"settings": SETTINGS, **FINE, **options})


# Who does not answer the second exchange of a round is in its sum, but not in the next one.
MASKED = {(0, "train", 2): "silent", (1, "train.sum_unmask", 2): "lost"}
MASKED |= {
    (2, "train", 3): "silent",
    (3, "train.sum_unmask", 3): "silent",
    (4, "train.sum_unmask", 4): "lost",
}
PLAIN = [(0, 2), (1, 3), (2, 3), (3, 4), (4, 5)]  # who is absent from the same sums


def test_who_drops_out_at_any_stage_is_missing_as_from_a_plain_sum() -> None:
    egos = [network for network in toy_egos() if network.client not in (105, 111)]
    plain = {(place, "train", number): "silent" for place, number in PLAIN}
    how: dict[str, Any] = {"rounds": 4, "supernodes": 10}
    one = run(egos, make_grid=faulty(MASKED), **how)
    grid = faulty(plain)
    other = run(egos, make_grid=grid, aggregation="plain", mods=[rounded], **how)
    assert not any(report.skipped for report in one.reports)
    assert min(one.answered) == 8
    assert_same(one, other, 0.0)
    # A report tells of the exchanges that brought its measurements: those of the next round.
    first, second, *_ = (who_of(report.participation) for report in one.reports)
    assert first.failed == {100: "no reply within 0.05 s"}
    assert second.left_out[101] == "its keys for the sum did not come in time"


def test_too_many_drop_out_and_the_round_is_skipped() -> None:
    script = {(p, "train", 3): "lost" for p in range(3)}
    outcome = run(seven_egos(), rounds=5, supernodes=7, make_grid=faulty(script))
    reasons = [report.skipped for report in outcome.reports]
    assert reasons[1].startswith("4 of 7 clients sent their vectors")
    assert reasons[1].endswith("at least 5 must")
    assert not any(reasons[:1] + reasons[2:])
    assert outcome.figures[1].isnan()[1:].all()  # what round 3's vectors say of round 2
    assert outcome.figures[2, 2].isnan()  # nothing to fuse from round 3
    assert outcome.figures[3:, :3].isfinite().all()
    who = who_of(outcome.reports[1].participation)
    assert not who.answered and len(who.failed) == 7, "nobody's answer is used"
    assert sum("4 of 7" in reason for reason in who.failed.values()) == 4


def test_a_round_without_any_vector_ends_the_run_and_nobody_is_asked_again() -> None:
    asked = list[str]()

    class Silent(Federation):
        def word(self, node_id: int, server_round: int, message_type: str) -> str:
            asked.append(message_type)
            return "silent" if server_round == 3 and message_type != "connect" else "good"

    with pytest.raises(NoClientsError, match="round 3: none of 7 SuperNodes gave a usable answer"):
        run(seven_egos(), rounds=5, supernodes=7, make_grid=Silent)
    messages = [kind for kind in asked if kind != "connect"]
    assert messages[-7:] == ["train"] * 7


def test_a_union_that_nobody_takes_part_in_is_an_error() -> None:
    script = {(p, "train.union", 1): "lost" for p in range(7)}
    with pytest.raises(AlignmentError, match="0 of 7"):
        run(seven_egos(), supernodes=7, make_grid=faulty(script))


@pytest.mark.parametrize(("aggregation", "supernodes"), [("masked", 7), ("plain", 2)])
def test_a_client_beyond_the_range_is_left_out(aggregation: str, supernodes: int) -> None:
    egos = seven_egos()
    egos[1] = replace(egos[1], x=egos[1].x * 3.4e38)
    outcome = run(egos, supernodes=supernodes, rounds=4, aggregation=aggregation)
    assert outcome.answered == [6] * 4
    assert outcome.figures[:, :3].isfinite().all()
    for report in outcome.reports:
        (entry,) = report.rejected
        assert re.search(r"an? (embedding|measurement) is outside the range", entry["reason"])
        assert "101" in entry["reason"] or entry["client"] == 101
