"""PPFL-GNN's strategy in process: means worked out by hand, assignment, absence, faults."""

import math

import numpy as np
import pytest
import torch
from federation import who_of
from flwr.app import Context, Message, RecordDict
from public_helpers import make_grid, run, silent, still_member, toy_members
from scipy.linalg import orthogonal_procrustes as reference

from flower_graph.flower_compat import ClientAppCallable
from flower_graph.strategies.ppfl.client import UNUSABLE, EmbeddingClient
from flower_graph.strategies.ppfl.strategy import (
    LocalEmbedding,
    ProcrustesAlignment,
    draw_pairs,
    measure_alignment,
)


def test_what_a_round_reports_and_that_nothing_else_leaves_a_client() -> None:
    sent: list[Message] = []

    def watch(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        sent.append(call_next(message, context))
        return sent[-1]

    outcome = run(toy_members(), rounds=2, mods=[watch])
    first, last = outcome.reports
    assert (first.val_accuracy, last.val_accuracy, last.test_accuracy) == (1 / 8, 2 / 8, 6 / 8)
    assert math.isnan(first.regulariser)
    assert 0 <= last.regulariser <= 2
    assert (last.asked, last.answered, last.rejected, last.skipped) == (4, 4, [], "")
    assert set(last.alignment) == {"precision-1", "precision-5", "precision-10"}
    assert last.alignment["precision-10"] == 1  # there are three nodes
    # Client 0 has 2 public nodes, the others 3, of 3 float32 each; the first means go in round 2.
    assert last.bytes == {"down": {"means": 11 * 12}, "up": {"embeddings": 2 * 11 * 12}}
    assert outcome.strategy.clients.measured["mlp-test"] == dict.fromkeys(range(4), 0.25)
    # No private node and no label.
    assert len(sent) == 2 * 4
    for reply in sent:
        (record,) = reply.content.array_records.values()
        assert [(name, array.shape[0] in (2, 3)) for name, array in record.items()] == [
            ("public", True)
        ]
        assert set(reply.content.metric_records["metrics"]) == {
            *("loss", "disagreement", "with-targets", "num-examples"),
            *("judged-val", "judged-test"),
            *(["judged-mlp-test"] if reply in sent[-4:] else []),
        }


def test_local_training_sends_nothing_and_is_as_alone() -> None:
    outcome = run(toy_members(), strategy=LocalEmbedding())
    assert outcome.weights == {}
    assert outcome.reports[-1].bytes == {"down": {"means": 0}, "up": {"embeddings": 0}}
    assert outcome.reports[-1].alignment == {}
    losses = []
    for member in toy_members():
        model = member.build()
        losses.append([model.learn(member.rows, None, number) for number in (1, 2, 3)][-1])
    assert outcome.reports[-1].loss == pytest.approx(np.mean(losses))
    assert outcome.reports[-1].answered == 4


@pytest.mark.parametrize("absent", ["leave-out", "last"])
def test_absent_clients(absent: str) -> None:
    strategy = ProcrustesAlignment(absent=absent)
    outcome = run(toy_members()[1:], mods=[silent({2}, {2})], strategy=strategy, rounds=2)
    whole = run(toy_members()[1:], rounds=1)
    assert (outcome.reports[1].asked, outcome.reports[1].answered) == (3, 2)
    assert "away" in outcome.reports[1].rejected[0]["reason"]
    last = strategy.clients.embeddings
    there = [1, 2, 3] if absent == "last" else [1, 2]
    turned = [last[j] @ reference(last[j], last[1])[0] if j != 1 else last[1] for j in there]
    assert np.allclose(outcome.weights["means-1"], np.mean(turned, 0), atol=1e-5)
    if absent == "leave-out":  # what waits for the absent client waits on
        assert np.array_equal(outcome.weights["means-3"], whole.weights["means-3"])


def test_a_round_without_any_answer_is_skipped_and_the_run_goes_on() -> None:
    outcome = run(toy_members(), mods=[silent({0, 1, 2, 3}, {2})], rounds=3)
    assert [report.answered for report in outcome.reports] == [4, 0, 4]
    assert outcome.reports[1].skipped == "none of 4 SuperNodes gave an answer"
    assert math.isnan(outcome.reports[1].loss)


@pytest.mark.parametrize("kind", [ProcrustesAlignment, LocalEmbedding])
def test_a_client_with_nan_is_named_and_costs_its_neighbour_nothing(
    kind: type[ProcrustesAlignment],
) -> None:
    members = [still_member(i, [[1, 0], [0, 2]], [4, 5]) for i in range(3)]
    members.append(still_member(3, [[math.nan, 0], [0, 2]], [4, 5]))
    for report in run(members, supernodes=2, rounds=2, strategy=kind()).reports:
        who = who_of(report.participation)
        assert (who.answered, who.left_out) == ({0, 1, 2}, {})
        assert who.failed == {3: UNUSABLE}


def test_clients_of_another_dimension_are_named_and_left_out() -> None:
    members = [*toy_members()[1:], still_member(9, [[1, 2]] * 3, [10, 11, 12])]
    outcome = run(members, rounds=2)
    assert outcome.reports[0].rejected[0]["reason"] == (
        "embeddings of 2 numbers, the others have 3"
    )
    assert [report.answered for report in outcome.reports] == [3, 3]


def test_a_supernode_that_comes_back_with_other_nodes_is_refused() -> None:
    members, strategy = toy_members()[1:], ProcrustesAlignment(absent="last")
    grid = make_grid(members, 3)
    strategy.session.open(grid, 5.0)
    strategy.round(1)
    (gone,) = (node for node, own in strategy.session.members.clients.items() if own == [2])
    old = grid.contexts.pop(gone)
    grid.contexts[77] = Context(old.run_id, 77, old.node_config, RecordDict(), {})
    one = members[1]
    members[1] = EmbeddingClient(2, one.nodes, one.rows[:2], one.dimension, one.build, one.judge)
    report = strategy.round(2)
    assert report is not None
    assert (report.asked, report.answered) == (2, 2)
    assert "client 2" in report.rejected[0]["reason"]


def test_every_pair_is_drawn_once_and_one_at_a_time() -> None:
    for count in (1, 2, 4, 7):
        drawn = list(draw_pairs(count, torch.Generator().manual_seed(3)))
        assert sorted(drawn) == [(a, b) for a in range(count) for b in range(count) if a != b]
    many = draw_pairs(100_000, torch.Generator().manual_seed(3))  # 10^10 pairs in all
    assert len({next(many) for _ in range(12)}) == 12


def test_how_well_aligned_by_hand() -> None:
    x = torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0))
    turn, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)))
    x[1] = x[0] @ turn
    held = torch.ones(2, 20, dtype=torch.bool)
    found = measure_alignment(x, held, torch.Generator().manual_seed(0))
    assert found == {"precision-1": 1.0, "precision-5": 1.0, "precision-10": 1.0}
    held[0, :10] = held[1, 10:] = False  # nothing in common
    assert measure_alignment(x, held, torch.Generator().manual_seed(0)) == {}
