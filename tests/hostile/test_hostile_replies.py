"""Malformed replies of one SuperNode: each is refused and named, and the run goes on.

This is a part of the corpus; ``run_corpus.py`` tries all of it.
"""

from __future__ import annotations

import numpy as np
import pytest
from attacked_runs import (
    FEDGLS,
    FEDSCEM,
    NFEDGNN,
    PLAIN,
    PPFL,
    PSI,
    SECURE,
    TIMEOUT,
    Attacked,
    Method,
)
from corpus import SHORT, attacks_on, examples, try_rounds, try_setup
from hostile_grid import Around, fit_for_a_log
from mutations import Mutation, drawn, swapped

from flower_graph.errors import AlignmentError

# Of which messages how many attacks are tried here, evenly spread over all; 50 or more a method
PARTS = [
    *((NFEDGNN, kind, 25) for kind in ("query", "train")),
    *((PPFL, kind, 19) for kind in ("query", "train")),
    (SECURE, "train.sum_enroll", 6),
    *((SECURE, kind, 4) for kind in ("train", "train.sum_unmask")),
    *((FEDSCEM, kind, 8) for kind in ("query", "train.align", "train", "train.unmask")),
    *((PSI, kind, 4) for kind in ("train.align", "train.union", "train.unmask")),
    (PLAIN, "train", 8),
    *((FEDGLS, kind, 17) for kind in ("query", "train", "evaluate")),
]
CLEAN: dict[str, Attacked] = {}


def clean_run(method: Method) -> Attacked:
    if method.name not in CLEAN:
        CLEAN[method.name] = examples(method)
    return CLEAN[method.name]


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "kind", "count"), PARTS, ids=lambda v: getattr(v, "name", v))
def test_the_corpus(method: Method, kind: str, count: int, half: int) -> None:
    clean = clean_run(method)
    everything = attacks_on(method, kind, clean, 20)
    some = [everything[place * len(everything) // count] for place in range(half, count, 2)]
    tally = (try_rounds if kind in method.rounds else try_setup)(method, kind, some, clean)
    assert tally.crashed == {}
    assert tally.differs == []  # from the run in which the reply never came
    assert len(tally.refused) + len(tally.harmless) + len(tally.taken) == len(some)
    assert tally.refused
    assert all(fit_for_a_log(why) or "; " in why for why in tally.refused.values())


def test_fifty_of_each_method_are_tried_here() -> None:
    for methods in ((NFEDGNN,), (FEDSCEM, PSI, PLAIN), (FEDGLS,), (PPFL, SECURE)):
        assert sum(count for method, _, count in PARTS if method in methods) >= 50


def test_the_corpus_is_the_same_each_time_and_large_enough() -> None:
    example = clean_run(NFEDGNN).grid.examples["train", 2]
    names = [one.name for one in drawn(example, 100)]
    assert names == [one.name for one in drawn(example, 100)]
    assert len(set(names)) == len(names) > 80


def test_an_attack_that_does_nothing_is_found_harmless() -> None:
    nothing = Mutation("nowhere", "nothing", lambda content: None)
    tally = try_rounds(NFEDGNN, "train", [nothing], clean_run(NFEDGNN))
    assert (tally.harmless, tally.refused) == (["nowhere: nothing"], {})


def test_an_attack_that_is_not_noticed_is_found_out() -> None:
    def half(content: object) -> None:
        array = content["arrays"]["relay"]  # type: ignore[index]
        content["arrays"]["relay"] = type(array)(array.numpy() / 2)  # type: ignore[index]

    quiet = Mutation("arrays/relay", "half", half)
    tally = try_rounds(NFEDGNN, "train", [quiet], clean_run(NFEDGNN))
    assert tally.taken == ["arrays/relay: half"]


def test_a_reply_that_never_comes_is_as_good_as_an_error() -> None:
    # The reference that all refusals are held against.
    silent = Around("to no message")  # the server waits for it in vain
    one = NFEDGNN.run({("train", 2): silent}, SHORT)
    other = NFEDGNN.run({("train", 2): None}, SHORT)
    assert one.same(other, 0.0)
    assert f"no reply within {TIMEOUT:g} s" in one.named[2]
    assert other.named == {2: ["error reply: lost"]}


@pytest.mark.parametrize("method", [NFEDGNN, FEDGLS, PPFL, PLAIN])
@pytest.mark.parametrize("value", [1e9, -1e30, np.nan])
def test_numbers_that_no_client_can_have_are_refused(method: Method, value: float) -> None:
    example = clean_run(method).grid.examples["train", 2]
    record = next(name for name in example if name in ("arrays", "sums"))
    key = next(iter(example[record]))

    def spoil(content: object) -> None:
        array = content[record][key]  # type: ignore[index]
        values = array.numpy().astype(np.float64)
        values.reshape(-1)[-1] = value
        content[record][key] = type(array)(values)  # type: ignore[index]

    outcome = method.run({("train", 2): Mutation("x", "y", spoil)}, SHORT)
    assert outcome.error is None
    assert method.round_of(("train", 2)) in outcome.named
    assert outcome.same(method.run({("train", 2): None}, SHORT), method.atol)


def test_one_supernode_alone_does_not_decide_how_large_weights_are() -> None:
    def huge(content: object) -> None:
        content["config"]["weight-shape"] = [1 << 20, 200]  # type: ignore[index]

    outcome = NFEDGNN.run({("query", 1): Mutation("config", "huge", huge)}, SHORT)
    assert outcome.error is None
    assert [report.asked for report in outcome.reports] == [10] + [15] * (SHORT - 1)
    (why,) = outcome.named[1]
    assert why.startswith("its weights are (1048576, 200), others have")


def test_metrics_under_another_name_do_not_end_flowers_averaging() -> None:
    def rename(content: object) -> None:
        content["other"] = content.pop("metrics")  # type: ignore[attr-defined,index]

    outcome = FEDGLS.run({("train", 2): Mutation("metrics", "named other", rename)}, SHORT)
    assert outcome.error is None
    assert "metrics are not as in the other replies" in outcome.named[2][0]


def test_a_wrong_table_in_the_masked_union_ends_the_alignment() -> None:
    # Under masks nobody can tell whose table was wrong: the documented limit.
    clean = clean_run(PSI)
    words = next(
        one for one in attacks_on(PSI, "train.union", clean, 1) if "other words" in one.name
    )
    outcome = PSI.run({("train.union", number): words for number in range(1, 8)}, 1)
    assert isinstance(outcome.error, AlignmentError)


def test_swapping_a_record_away_is_a_mutation() -> None:
    content = clean_run(NFEDGNN).grid.examples["train", 2]
    spoilt = type(content)(dict(content))
    swapped("arrays", None)(spoilt)
    assert "arrays" in content
    assert "arrays" not in spoilt
