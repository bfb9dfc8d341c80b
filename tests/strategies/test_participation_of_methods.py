"""What becomes of clients where it is the method's own: sums, and embeddings that are not finite.

That each method says of every client, once, what became of it, ``contracts/test_rounds.py`` shows.
"""

from typing import Any

import pytest
from ego_strategy_helpers import faulty, seven_egos
from ego_strategy_helpers import run as run_egos
from federation import Who, who_of
from public_helpers import run as run_public
from public_helpers import run_secure, silent, still_member, toy_members

from flower_graph.records.rounds import RoundReport
from flower_graph.strategies.ppfl.strategy import LocalEmbedding, ProcrustesAlignment


def checked(reports: list[RoundReport], clients: set[int]) -> list[Who]:
    """Read who took part, with what must hold in every round."""
    found = [who_of(report.participation) for report in reports]
    for who in found:
        assert sorted([*who.answered, *who.failed, *who.left_out]) == sorted(clients)
    return found


EGOS = {ego.client for ego in seven_egos()}


def egos_with(rounds: int, script: dict[Any, str]) -> tuple[list[RoundReport], list[Who]]:
    grid = faulty(script)
    outcome = run_egos(seven_egos(), supernodes=7, rounds=rounds, make_grid=grid, alignment="plain")
    return outcome.reports, checked(outcome.reports, EGOS)


def test_ego_networks_that_are_silent_or_did_not_prepare_the_sum() -> None:
    _, found = egos_with(4, {(6, "train", 2): "silent"})
    # A report tells of the exchanges that brought its measurements: those of the next round.
    assert found[0].failed == {seven_egos()[6].client: "no reply within 0.05 s"}
    assert found[-1].answered == EGOS
    _, found = egos_with(4, {(6, "both", 2): "silent"})
    late = "its keys for the sum did not come in time"
    assert found[1].left_out == {seven_egos()[6].client: late}


def test_a_sum_that_is_skipped_uses_nobodys_answer() -> None:
    reports, (first, *_) = egos_with(3, {(place, "train", 2): "silent" for place in (0, 1, 2, 3)})
    assert "is skipped" in reports[0].skipped
    assert first.answered == set() and set(first.failed) == EGOS
    assert sum("is skipped" in reason for reason in first.failed.values()) == 3


@pytest.mark.parametrize("kind", [ProcrustesAlignment, LocalEmbedding])
def test_public_nodes_of_clients_with_nan(kind: type[ProcrustesAlignment]) -> None:
    members = [still_member(i, [[1, 0], [0, 2]], [4, 5]) for i in range(3)]
    members.append(still_member(3, [[float("nan"), 0], [0, 2]], [4, 5]))
    # The broken client shares a SuperNode with a good one, which must not suffer.
    outcome = run_public(members, supernodes=2, rounds=2, strategy=kind())
    for who in checked(outcome.reports, {0, 1, 2, 3}):
        assert who.failed == {3: "its embeddings are not finite"}


def test_the_secure_form_says_who_is_in_no_sum_and_why() -> None:
    outcome = run_secure(toy_members(), rounds=6, mods=[silent({2}, {4})])
    assert not any(report.skipped for report in outcome.reports)
    found = checked(outcome.reports, {0, 1, 2, 3})
    assert "away" in found[3].failed[2]
    assert found[4].left_out == {2: "its keys for the sum did not come in time"}
    assert found[5].answered == {0, 1, 2, 3}
