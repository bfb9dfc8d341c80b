"""Malformed replies of one SuperNode: each is refused and named, and the run goes on.

This is a part of the corpus; ``run_corpus.py`` tries all of it.
"""

from __future__ import annotations

import numpy as np
import pytest
from corpus import Tally, attacks_on, campaigns, some_of, try_all, try_campaigns, try_each
from federation import ALL, tried
from hostile_grid import (
    CORPUS,
    FEDGLS,
    FINE,
    NFEDGNN,
    PLAIN,
    PPFL,
    PSI,
    SECURE,
    SHORT,
    TIMEOUT,
    Around,
    Method,
    fit_for_a_log,
    registered,
)
from mutations import Mutation, drawn, invented
from run_corpus import FORMS, run, totals

from flower_graph.errors import AlignmentError
from flower_graph.method.registry import known_apps


def check(tallies: dict[str, Tally]) -> None:
    """Hold what became of attacks against what must become of any."""
    for tally in tallies.values():
        assert tally.crashed == {}
        assert (tally.evicted, tally.costly) == ({}, {})
        assert tally.differs == []  # from the run in which the reply never came
        assert len(tally.refused) + len(tally.harmless) + len(tally.taken) == tally.tried > 0
        assert all(fit_for_a_log(why) or "; " in why for why in tally.refused.values())
    assert any(tally.refused for tally in tallies.values())


@pytest.mark.parametrize("name", tried(CORPUS, ("nfedgnn", "fedscem, plain")))
def test_some_of_the_corpus(name: str) -> None:
    check(try_all(CORPUS[name], 5, 80))


@pytest.mark.slow
def test_more_of_the_corpus_as_it_is_written_down() -> None:
    # The other forms: test_some_of_the_corpus
    found = totals({name: run(name, part=20) for name in FORMS[:2]})["all"]
    assert found["tried"] > 10
    assert {found[name] for name in ("crashed", "differs", "evicted", "costly")} == {0}


def test_every_registered_method_is_attacked() -> None:
    assert {setup.load().app for name, setup in ALL.items() if name in CORPUS} == set(known_apps())


def test_the_corpus_is_the_same_each_time_and_large_enough() -> None:
    example = NFEDGNN.clean.grid.examples["train", 2]
    names = [one.name for one in drawn(example, 100)]
    assert names == [one.name for one in drawn(example, 100)]
    assert len(set(names)) == len(names) > 80


def test_an_attack_that_does_nothing_is_found_harmless() -> None:
    nothing = Mutation("nowhere", "nothing", lambda content: None)
    tally = try_each(NFEDGNN, "train", [nothing])
    assert (tally.harmless, tally.refused) == (["nowhere: nothing"], {})


def test_an_attack_that_is_not_noticed_is_found_out() -> None:
    def half(content: object) -> None:
        array = content["arrays"]["relay"]  # type: ignore[index]
        content["arrays"]["relay"] = type(array)(array.numpy() / 2)  # type: ignore[index]

    quiet = Mutation("arrays/relay", "half", half)
    tally = try_each(NFEDGNN, "train", [quiet])
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
@pytest.mark.parametrize("value", [-1e30, np.nan])
def test_numbers_that_no_client_can_have_are_refused(method: Method, value: float) -> None:
    example = method.clean.grid.examples["train", 2]
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
    others = 90 - len(NFEDGNN.clean.clients)
    assert [report.asked for report in outcome.reports] == [others] + [90] * (SHORT - 1)
    (why,) = outcome.named[1]
    assert why.startswith("its weights are (1048576, 200), others have")


@pytest.mark.parametrize(
    "method,kind",
    [(SECURE, "train.sum_enroll"), (PLAIN, "train"), (PSI, "train"), (PSI, "train.union")],
    ids=lambda one: getattr(one, "name", one),
)
def test_thousands_of_invented_numbers_cost_less_than_a_megabyte(method: Method, kind: str) -> None:
    """At PPFL-GNN's enrolment for sums they took three gigabytes."""
    outcome = method.run({(kind, 1): invented("17,000", 17_000)}, 1 + method.late)
    assert outcome.error is None
    assert outcome.named or outcome.logged
    assert outcome.grid.peaks[kind] < 1 << 20


# More vanish than the share of five that an attacker leaves of six: fewer may
HALF = registered("fedscem", FINE, "strategy.dropout=0.4", atol=1e-4)


@pytest.mark.slow
def test_attacks_on_sums_that_bear_few_drop_outs() -> None:
    hard = [one for one in campaigns(HALF) if one.where == "train.unmask"]
    tally = try_campaigns(HALF, some_of(hard, 6))
    assert (tally.crashed, tally.evicted, tally.costly) == ({}, {}, {})
    assert tally.refused


def test_metrics_under_another_name_do_not_end_flowers_averaging() -> None:
    def rename(content: object) -> None:
        content["other"] = content.pop("metrics")  # type: ignore[attr-defined,index]

    outcome = FEDGLS.run({("train", 2): Mutation("metrics", "named other", rename)}, SHORT)
    assert outcome.error is None
    assert "metrics are not as in the other replies" in outcome.named[2][0]


def test_a_wrong_table_in_every_union_ends_a_run_before_its_first_round() -> None:
    tables = attacks_on(PSI, "train.union", 1, setup=True)
    words = next(one for one in tables if "other words" in one.name)
    outcome = PSI.run({("train.union", number): words for number in range(1, 40)}, 1)
    assert isinstance(outcome.error, AlignmentError) and outcome.reports == []
