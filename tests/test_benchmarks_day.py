"""A day of users who come and go: messages and bytes as worked out by hand, and by formulas."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.day import Day, There, drawn, simulate
from benchmarks.day_formula import Presence, expected, open_sessions, presence, sizes
from benchmarks.measure import run_part
from benchmarks.page_levels import levels

SIZES = sizes()


def there(*rounds: tuple[int, ...], leave: tuple[tuple[int, int], ...] = ()) -> There:
    """Say which SuperNodes are there, round by round; some leave before they have answered."""
    begins = np.array(rounds, np.bool_)
    answers = begins.copy()
    for server_round, supernode in leave:
        answers[server_round - 1, supernode] = False
    return There(begins, answers)


def of(day: There) -> Presence:
    """Count the chances that formulas start from."""
    begins, first = day.begins.astype(float), np.zeros_like(day.begins[:1], float)
    last = np.concatenate([first, begins[:-1]])
    earlier = np.concatenate([first, last[:-1]])
    new = begins * (1 - last)
    chances = (begins, day.answers.astype(float), new, new * earlier)
    return Presence(*(each.mean(1) for each in chances), float(day.begins.any(0).mean()))


def everybody(supernodes: int, each: int, rounds: int) -> Day:
    return Day(supernodes, each, rounds=rounds, share=1.0)


def test_messages_of_a_day_of_three_users_are_those_counted_by_hand():
    # Round 1 has users 0 and 1, of whom 1 leaves before it answers; round 2 users 0 and 2.
    found = simulate("own", everybody(3, 1, 2), there((1, 1, 0), (1, 0, 1), leave=((1, 1),)))
    assert found.messages == {"query down": 3, "query up": 3, "train down": 4, "train up": 3}
    assert (found.answered, found.voided) == (3, 0)
    # Keys and values: round, users, their rounds, rate; five settings; a round, two flags, the run;
    # the gradients
    ask = (12 + 8) + (5 + 8) + (14 + 8) + (13 + 8)
    ask += (11 + 8) + (9 + 1) + (12 + 8) + (4 + 8) + (12 + 7)
    ask += (13 + 8) + (12 + 1) + (10 + 1) + (9 + 32)
    head = 128  # of an array
    ask += 5 + head + 64
    # Round and number of examples; the vectors
    answer = (12 + 8) + (12 + 8) + (5 + head + 64)
    questions, answers = SIZES["question down"].of(3, 3), SIZES["question up"].of(3, 3)
    assert found.bytes["up"] == answers + 3 * answer
    assert found.bytes["down"] == questions + 4 * ask


def test_who_comes_back_to_one_layer_gets_a_copy_of_it():
    # SuperNode 1 is there in rounds 1 and 4. All who are there are asked for the next round, too.
    found = simulate("summed", everybody(2, 3, 4), there((1, 1), (1, 0), (1, 0), (1, 1)))
    asked = {"query": 2, "train": 2 + 2 + 1 + 1 + 1 + 2, "train.add_up": 6, "train.copy_layer": 1}
    both = {f"{name} {way}": n for name, n in asked.items() for way in ("down", "up")}
    assert (found.messages, found.answered, found.voided) == (both, 6 * 3, 0)


def test_a_supernode_that_leaves_before_its_sum_voids_the_round():
    day = there((1, 1), (1, 1), (1, 1), leave=((2, 1),))
    assert simulate("summed", everybody(2, 3, 3), day).voided == 1


@pytest.mark.parametrize("form", ["own", "averaged", "summed"])
def test_formulas_give_a_day_s_bytes_where_chance_has_no_part(
    form: str, monkeypatch: pytest.MonkeyPatch
):
    presences: NDArray[np.bool_] = np.random.default_rng(1).random((6, 12)) < 0.5
    presences[:, 0] = True  # who is first, of whom copies are
    seen, day = There(presences, presences), everybody(12, 4, 6)
    monkeypatch.setattr("benchmarks.day_formula.presence", lambda _: of(seen))
    found, said = simulate(form, day, seen), expected(form, day, SIZES)
    copies = "train.copy_layer down"
    assert said.answered == pytest.approx(found.answered)
    for name, number in found.messages.items():
        if not name.startswith("train.copy_layer"):  # whether one is needed is left to chance
            assert said.messages[name] == pytest.approx(number), name
    if form != "summed":
        assert said.bytes == pytest.approx(found.bytes)
    else:
        assert said.messages[copies] == pytest.approx(found.messages[copies], rel=0.3)
        assert said.bytes["up"] == pytest.approx(found.bytes["up"], rel=0.1)


def test_chances_of_an_even_day_are_those_of_poisson_s_law():
    # Four sessions of an hour and a half each in 24 hours: 0.25 are open at any time
    day = Day(1, rounds=2, visits=4.0, stay=1.5, swing=0.0, newcomers=0.0, answer=1.5)
    assert open_sessions(day, day.times) == pytest.approx([0.25, 0.25])
    found = presence(day)
    assert found.there == pytest.approx([1 - math.exp(-0.25)] * 2)
    assert found.stays == pytest.approx([1 - math.exp(-0.25 / math.e)] * 2)
    both = 0.25 * (1 + 1 - math.exp(-8))  # sessions that are open at 6:00, at 18:00, or both
    assert found.seen == pytest.approx(1 - math.exp(-both))


def test_sessions_that_are_drawn_have_the_chances_of_the_formulas():
    day = Day(40_000)
    seen, formula = drawn(day, 0), presence(day)
    for drawn_one, said in ((seen.begins, formula.there), (seen.answers, formula.stays)):
        error = np.sqrt(said / day.supernodes)
        assert (np.abs(drawn_one.mean(1) - said) < 5 * error).all()
    assert seen.begins.any(0).mean() == pytest.approx(formula.seen, abs=0.005)


@pytest.mark.slow
def test_a_day_of_3000_users_is_as_formulas_say():
    day = Day(3_000)
    found, said = simulate("own", day, drawn(day, 0)), expected("own", day, SIZES)
    for counted, formula in ((found.messages, said.messages), (found.bytes, said.bytes)):
        assert counted == {name: pytest.approx(n, rel=0.06) for name, n in formula.items()}


def test_levels_of_groups():
    assert levels(100_000, 100) == [1_000, 10, 1]
    assert levels(101, 100) == [2, 1]
    assert levels(100, 100) == [1]


@pytest.mark.slow
def test_what_a_user_takes_of_memory_is_as_its_tensors_say():
    users, server = (
        run_part("population", ["--case", json.dumps([case, 500])]) for case in ("users", "server")
    )
    # 32 active rows of 16 numbers, their two moments, the steps taken
    assert users["bytes"]["weights and moments"] == 3 * 32 * 16 * 4 + 4
    # The vector, a label, three roles, who is known, present, right
    assert server["bytes"]["latent vectors and labels"] == 16 * 4 + 8 + 3 + 1 + 1 + 1
    # A gradient, its round, that of the mean, what travelled; when it joined, whether it left
    assert server["bytes"]["what waits for users"] == 16 * 4 + 8 + 8 + 3 * 8 + 8 + 1
    assert server["bytes"]["edges"] == 4 * (server["edges"] + 501) / 500
