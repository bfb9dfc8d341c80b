"""Malformed replies of one SuperNode: each is refused and named, and the run goes on."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from federation import ALL, METHODS, VARIANTS, Federation, tried
from flwr.app import Array
from hostile_grid import (
    CORPUS,
    FEDGLS,
    FEDSCEM,
    NFEDGNN,
    PLAIN_SUMS,
    PPFL,
    PSI,
    SECURE,
    TIMEOUT,
    Attacked,
    Method,
    Mutation,
    campaigns,
    check,
    clean,
    invented,
    replaced,
    without,
)

from flower_graph.apps.run import client_app
from flower_graph.data.folders.party import Member, assigned
from flower_graph.errors import MembershipError
from flower_graph.method.registry import known_apps, method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.align.server import AlignmentServer
from flower_graph.strategies.fedscem.vector import SUMMED_NAMES


@pytest.mark.parametrize("name", tried(CORPUS))
def test_some_malformed_replies(name: str) -> None:
    check(CORPUS[name], 4)


@pytest.mark.release
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CORPUS)
def test_many_malformed_replies(name: str) -> None:
    check(CORPUS[name], 60, seed=1)


def test_every_registered_method_is_attacked() -> None:
    assert {setup.load().app for name, setup in ALL.items() if name in CORPUS} == set(known_apps())


def test_a_reply_that_never_comes_is_as_good_as_an_error() -> None:
    # The reference that all refusals are held against.
    silent = Mutation("to no message")  # the server waits for it in vain
    one = NFEDGNN.run({("train", 2): silent})
    other = without(NFEDGNN, ("train", 2))
    assert one.same(other, 0.0)
    assert f"no reply within {TIMEOUT:g} s" in one.named[2]
    assert other.named == {2: ["error reply: lost"]}


@pytest.mark.parametrize(
    ("method", "value"),
    [
        (NFEDGNN, -1e30),
        (PLAIN_SUMS, np.nan),
        pytest.param(FEDGLS, np.nan, marks=pytest.mark.slow),
        pytest.param(PPFL, -1e30, marks=pytest.mark.slow),
    ],
)
def test_numbers_that_no_client_can_have_are_refused(method: Method, value: float) -> None:
    example = clean(method).grid.examples["train", 2]
    record = next(name for name in example if name in ("arrays", "sums"))
    key = next(iter(example[record]))

    def spoilt(array: Array) -> Array:
        values = array.numpy().astype(np.float64)
        values.reshape(-1)[-1] = value
        return Array(values)

    spoil = Mutation("x", replaced(record, key, spoilt))
    outcome = method.run({("train", 2): spoil})
    assert outcome.error is None
    assert max(1, 2 - method.late) in outcome.named
    assert outcome.same(without(method, ("train", 2)), method.atol)


def test_one_supernode_alone_does_not_decide_how_large_weights_are() -> None:
    huge = replaced("config", "weight-shape", lambda _: [1 << 20, 200])
    outcome = NFEDGNN.run({("query", 1): Mutation("huge", huge)})
    assert outcome.error is None
    others = 90 - len(clean(NFEDGNN).clients)
    assert [report.asked for report in outcome.reports] == [others, 90, 90]
    (why,) = outcome.named[1]
    assert "1048576" in why


@pytest.mark.parametrize(
    "method,kind",
    [(SECURE, "train.sum_enroll"), (PLAIN_SUMS, "train"), (PSI, "train.union")],
    ids=lambda one: getattr(one, "name", one),
)
def test_thousands_of_invented_numbers_cost_less_than_a_megabyte(method: Method, kind: str) -> None:
    """At PPFL-GNN's enrolment for sums they took three gigabytes."""
    outcome = method.run({(kind, 1): invented("17,000", 17_000)}, 1 + method.late)
    assert outcome.error is None
    assert outcome.refused
    assert outcome.grid.peaks[kind] < 1 << 20


def test_a_key_holder_that_is_excluded_has_the_others_aligned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Client 1, at the hostile SuperNode, holds a share of the key, cheats in a sum and is lost
    monkeypatch.setattr(AlignmentServer, "_draw_holders", lambda _, free, n: sorted(free)[:n])
    cheats = "train.sum_unmask: config/prepare-seed-commitment: wrong, then lost"
    [attack] = [one for one in campaigns(PSI) if one.name == cheats]
    found = PSI.run(attack.plan, attack.rounds)
    assert found.error is None and 1 in found.excluded
    assert not any(report.skipped for report in found.reports[-2:])
    assert found.reports[-1].asked == found.reports[-1].answered == 5


ROUNDS, CLIENTS, HIDDEN = 5, 6, 6
READERS = 5  # clients that share a node with another


def odd(words: Any) -> Any:
    return words + 1  # a bit that no number has: noticed by whoever holds the slot


def large(words: Any) -> Any:
    return words + words.dtype.type(1 << (8 * words.itemsize - 3))


def attacked(method: Method, change: Any, rounds: Iterable[int], whole: bool = False) -> Attacked:
    """Change the embeddings in sums of some rounds, or what was measured, too."""

    def poisoned(array: Array) -> Array:
        words = array.numpy().copy()
        slots = (words.size - len(SUMMED_NAMES)) // (HIDDEN + 1)
        end = None if whole else slots * HIDDEN
        words[:end] = change(words[:end])
        return Array(words)

    attack = Mutation("poisoned", replaced("arrays", "masked-sum", poisoned))
    # The vector of round t comes with the t-th message.
    found = method.run({("train", number): attack for number in rounds}, ROUNDS)
    assert (found.error, found.grid.failed) == (None, [])
    return found


def alone(outcome: Attacked) -> dict[int, list[str]]:
    return {
        report.round: said
        for report in outcome.reports
        if (said := [one["reason"] for one in report.rejected if "went on alone" in one["reason"]])
    }


def test_one_poisoned_round() -> None:
    found = attacked(PSI, large, [2])
    assert alone(found).keys() == {2}
    (why,) = alone(found)[2]
    assert why.startswith(f"{READERS} of {CLIENTS} clients could not read the means")
    assert found.named == {}  # nobody is named: it cannot be known who it was
    # The round before is as ever, and afterwards everybody is there and fuses again.
    assert np.allclose(found.figures[0], clean(PSI, ROUNDS).figures[0], atol=PSI.atol)
    assert [report.answered for report in found.reports] == [CLIENTS] * ROUNDS
    assert np.isnan(found.reports[1].regulariser)
    assert all(np.isfinite(report.regulariser) for report in found.reports if report.round != 2)
    # The log of every SuperNode says it, and that of the server.
    said = [line for line in found.log if line.startswith("round 2: ")]
    assert sum("the means are not used" in line for line in said) == READERS
    assert sum("could not read the means" in line for line in said) == 1


def test_every_round_poisoned_is_self_training() -> None:
    found = attacked(PSI, odd, range(1, ROUNDS + 1))
    assert alone(found).keys() == set(range(1, ROUNDS + 1))
    assert np.isnan([report.regulariser for report in found.reports]).all()
    losses = [report.cross_entropy for report in found.reports]
    assert losses == sorted(losses, reverse=True)  # they train all the same


def test_a_wholly_wrong_vector_skips_the_round_and_no_more() -> None:
    found = attacked(FEDSCEM, odd, [3], whole=True)
    # What round 3's vectors say of round 2 is lost, and so are the means of round 3.
    assert [bool(report.skipped) for report in found.reports] == [False, True, False, False, False]
    assert "a client's part of the sum was not as agreed" in found.reports[1].skipped
    assert [report.answered for report in found.reports] == [6, 0, 6, 6, 6]
    assert np.isnan(found.reports[2].regulariser)
    assert np.isfinite([report.cross_entropy for report in found.reports[2:]]).all()


def test_a_poisoned_consensus_skips_the_round_and_no_more() -> None:
    # Once a mean of millions had been handed out, no client's embeddings fitted any more.
    other = replaced("arrays", "masked-sum", lambda array: Array(~array.numpy()))
    words = Mutation("other words", other)
    found = SECURE.run({("train", 2): words}, ROUNDS)
    assert found.error is None
    assert [bool(report.skipped) for report in found.reports] == [False, True, False, False, False]
    assert "a client's part of the sum was not as agreed" in found.reports[1].skipped
    assert not any(report.rejected for report in found.reports)
    assert np.abs(found.weights["mean"]).max() < 10


# Where there is a registry, it says who may speak for whom
EACH = METHODS | {name: one for name, one in VARIANTS.items() if "untrusted" not in name}
EVERY = tried(EACH)


def claimed(name: str, is_lowest: bool = True) -> tuple[Any, Federation, dict[int, range], int]:
    """Have one SuperNode claim all numbers: the strategy, the grid, whose each is, and its id."""
    config = EACH[name].load()
    method = method_of(config)
    count = method.num_clients(config)

    def fault(partition: int, server_round: int, kind: str) -> Any:
        is_claim = kind == "query" and list(whose)[partition] == claimant
        return invented("all", count, 0, instead=True).apply if is_claim else "good"

    grid = Federation(client_app(config, None), num_supernodes=EACH[name].supernodes, faults=fault)
    places = len(grid.contexts)
    whose = {node: assigned(k, places, count) for k, node in enumerate(grid.contexts)}
    claimant = (min if is_lowest else max)(whose)
    return method.build_strategy(config, None), grid, whose, claimant


@pytest.mark.parametrize("is_lowest", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_a_double_stops_the_run_and_both_are_named(name: str, is_lowest: bool) -> None:
    strategy, grid, whose, claimant = claimed(name, is_lowest)
    reports = list[RoundReport]()
    with pytest.raises(MembershipError) as error:
        strategy.start(grid, num_rounds=2, timeout=5, on_round=reports.append)
    said = str(error.value)
    assert str(claimant) in said and any(str(node) in said for node in whose if node != claimant)
    assert "members.csv" in said and "registry" in said
    assert reports == []


@pytest.mark.parametrize("name", EVERY)
def test_by_the_list_the_right_ones_are_taken_and_the_claimant_is_named(name: str) -> None:
    strategy, grid, whose, claimant = claimed(name)
    members = [Member(f"{node}", frozenset(own), node) for node, own in whose.items()]
    strategy.session.members.listed, reports = members, list[RoundReport]()
    strategy.start(grid, num_rounds=2, timeout=5, on_round=reports.append)
    del whose[claimant]
    assert strategy.session.members.clients == {node: [*own] for node, own in whose.items()}
    for report in reports:
        assert claimant in {entry.get("node") for entry in report.rejected}
