"""PPFL-GNN in the clear: server, clients, and new graphs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import who_of
from flwr.app import Context, Message, RecordDict
from public_helpers import ToyModel, make_grid, run, silent, still, still_member, toy_members
from scipy.linalg import orthogonal_procrustes as reference
from torch import Tensor

from flower_graph.data.description import NewGraph
from flower_graph.errors import DataError, OutputError
from flower_graph.flower_compat import ClientAppCallable
from flower_graph.method.load import load_config
from flower_graph.outputs.files import Embeddings, Predictions
from flower_graph.strategies.ppfl import method
from flower_graph.strategies.ppfl.algorithm import FloatArray, IntArray, disagreement
from flower_graph.strategies.ppfl.client import (
    UNUSABLE,
    EmbeddingClient,
    PublicNodeClient,
    PublicReply,
    PublicRequest,
    SingleModels,
    joined,
    public_rows,
)
from flower_graph.strategies.ppfl.evaluation import draw_pairs, measure_alignment
from flower_graph.strategies.ppfl.strategy import (
    LocalEmbedding,
    ProcrustesAlignment,
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
        "its arrays are of 2 numbers, the others' of 3"
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


def test_nodes_that_change_without_an_enrolment_are_refused() -> None:
    members, strategy = toy_members()[1:], ProcrustesAlignment(absent="last")
    strategy.session.open(make_grid(members, 3), 5.0)
    strategy.round(1)
    one = members[1]
    members[1] = replace(one, nodes=one.nodes[[0, 1, 2, 3, 5, 4]])  # as many, in another order
    report = strategy.round(2)
    assert report is not None
    assert (report.asked, report.answered) == (3, 2)
    assert "public nodes" in report.rejected[0]["reason"]


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


def context(**config: Any) -> Context:
    return Context(1, 2, config, RecordDict(), {})


def ask(host: PublicNodeClient, number: int, targets: Any = None, **more: Any) -> PublicReply:
    clients = list(host.members)
    nodes = [member.public for member in host.members.values()]
    means = joined(targets or [None] * len(clients), nodes, 3)
    request = PublicRequest(number, clients, nodes, 3, *means, **more)
    arrays, _, config = request.to_numpy()
    arrays, _, config = host.fit(arrays, config)
    return PublicReply.from_numpy(arrays, config, request=request, wants_embeddings=True)


def rows_of(reply: PublicReply, place: int = 0) -> FloatArray:
    found = reply.embeddings[place]
    assert found is not None
    return found


VECTORS = np.zeros((3, 2), np.float32)
GOOD: dict[str, Any] = {
    "number": 7,
    "nodes": np.array([4, 2, 9]),
    "rows": np.array([2, 0]),
    "dimension": 2,
    "build": partial(still, VECTORS),
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": np.zeros(0, np.int64)}, "client 7: 0 nodes"),
        ({"nodes": np.array([4, 4, 9])}, "client 7"),
        ({"rows": np.zeros(0, np.int64)}, "client 7"),
        ({"rows": np.array([1, 1])}, "client 7"),
        ({"rows": np.array([3])}, r"client 7: 3 nodes, rows \[3\]"),
        ({"rows": np.array([-1])}, "client 7.*-1"),
        ({"dimension": 0}, "client 7.*0"),
    ],
)
def test_what_cannot_be_a_client_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EmbeddingClient(**GOOD | changes)


def test_public_ids_and_rows_by_id() -> None:
    client = EmbeddingClient(**GOOD)
    assert client.public.tolist() == [9, 4]
    assert public_rows(client.nodes, np.array([9, 4])).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"\[3, 11\].*3"):
        public_rows(client.nodes, np.array([3, 9, 11]))
    for members in ([], [client, client]):
        with pytest.raises(ValueError, match="members"):
            PublicNodeClient(context(), members)


def test_a_model_that_embeds_in_another_shape_is_refused() -> None:
    member = still_member(5, [[1, 0, 0], [0, 1, 0]], [8, 9])
    wrong = EmbeddingClient(5, np.array([8, 9, 10]), np.array([0]), 3, member.build)
    with pytest.raises(ValueError, match=r"client 5.*\(2, 3\)"):
        ask(PublicNodeClient(context(), [wrong]), 1)


@pytest.mark.parametrize(
    "means",
    [np.zeros((2, 3)), np.zeros((4, 3)), np.zeros((3, 2)), np.full((3, 3), np.nan)],
    ids=str,
)
def test_means_that_do_not_fit_change_nothing(means: Any) -> None:
    host = PublicNodeClient(context(), toy_members(2)[1:])
    before = rows_of(ask(host, 1))
    with pytest.raises(ValueError, match="means"):
        ask(host, 2, [means.astype(np.float32)])
    again = PublicNodeClient(context(), toy_members(2)[1:])
    assert np.array_equal(rows_of(ask(again, 1)), before)
    assert np.array_equal(rows_of(ask(again, 2)), rows_of(ask(host, 2)))


def test_a_request_for_clients_of_another_supernode_or_for_one_twice_is_refused() -> None:
    host, member = PublicNodeClient(context(), toy_members(2)[1:]), toy_members(2)[0]
    for clients, why in (
        ([0], r"clients \[0\] are not hosted here"),
        ([1, 5], r"clients \[5\] are not hosted here"),
        ([1, 1], r"clients \[1, 1\]: each may be there once"),
    ):
        nodes = [member.public for _ in clients]
        request = PublicRequest(1, clients, nodes, 3, *joined([None for _ in clients], nodes, 3))
        arrays, _, config = request.to_numpy()
        with pytest.raises(ValueError, match=why):
            host.fit(arrays, config)
    again = PublicNodeClient(context(), toy_members(2)[1:])
    assert np.array_equal(rows_of(ask(host, 1)), rows_of(ask(again, 1)))


def test_a_reply_has_the_order_of_its_request_whatever_order_models_have() -> None:
    class Backwards(SingleModels):
        def outputs(self, clients: Sequence[int]) -> dict[int, tuple[FloatArray, None]]:
            return dict(reversed(super().outputs(clients).items()))

    members = toy_members(2)
    usual = ask(PublicNodeClient(context(), members), 1)
    reply = ask(PublicNodeClient(context(), members, models=partial(Backwards, members)), 1)
    assert reply.loss == usual.loss and reply.judged == usual.judged
    for place in range(2):
        assert np.array_equal(rows_of(reply, place), rows_of(usual, place))


def test_a_state_that_changes_its_form_is_refused() -> None:
    class Growing(ToyModel):
        def state_dict(self) -> dict[str, Tensor]:
            return super().state_dict() | ({"more": torch.zeros(1)} if int(self.rounds) else {})

    grows = partial(Growing, np.zeros((6, 3), np.float32))
    member = replace(toy_members(1)[0], build=grows, judge=None)
    with pytest.raises(ValueError, match="state_dict: names"):
        ask(PublicNodeClient(context(), [member]), 1)


def test_disagreement_by_hand() -> None:
    embeddings = np.array([[2, 0], [0, 3], [0, 0]], np.float32)
    targets = np.array([[1, 0], [1, 0], [1, 0]], np.float32)
    # Alike: 0; at a right angle: 1; no direction at all: counts as a right angle.
    assert disagreement(embeddings, targets) == pytest.approx(2 / 3)
    assert disagreement(-targets, targets) == pytest.approx(2)


def planted(nodes: int = 40, seed: int = 0) -> tuple[FloatArray, FloatArray]:
    """Draw embeddings, and a rotation of their space."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    return rng.normal(size=(nodes, 4)).astype(np.float32), turn.astype(np.float32)


@pytest.mark.parametrize("words", [False, True])
def test_a_turned_space_is_turned_back_and_private_nodes_with_it(words: bool) -> None:
    truth, turn = planted()
    ids: Any = np.arange(40) * 7 % 40
    ids = ids.astype(str) if words else ids
    public = method.PublicSpace(ids[:30], truth[:30])
    new = ids[10:][::-1]  # ten of the others' public nodes are not its own, ten are its alone
    space, held = public.split(new, 0.25, seed=3)
    assert (space.nodes.size, held.nodes.size) == (15, 5)
    assert set(space.nodes) | set(held.nodes) == set(ids[10:30])
    found = method.join_space(truth[10:][::-1] @ turn, new, space, held)
    np.testing.assert_allclose(found.embeddings, truth[10:][::-1], atol=1e-5)
    assert found.common == 15 and found.precision == {1: 1.0, 5: 1.0, 10: 1.0}
    assert method.join_space(truth[10:][::-1] @ turn, new, space).precision == {}
    with pytest.raises(DataError, match=r"3.*30 public"):
        public.split(np.array([50, 51, 52]).astype(ids.dtype), 0.2, seed=0)


class Recorder:
    """A model that stays where it is and notes what it is told."""

    def __init__(self, vectors: FloatArray) -> None:
        self.told = list[tuple[int, IntArray, Any]]()
        self.embed = lambda: vectors

    def learn(self, *told: Any) -> float:
        self.told.append((told[2], *told[:2]))
        return 0.0


def test_targets_are_public_nodes_in_the_models_own_space() -> None:
    truth, turn = planted()
    own, nodes = truth @ turn, np.arange(40)
    space, held = method.PublicSpace(nodes[:20], truth[:20]).split(nodes, 0.2, seed=0)
    model, alone = Recorder(own), Recorder(own)
    for rounds in (range(1, 3), range(3, 4)):
        method.learn_beside(model, nodes, space, rounds)
    assert [(number, targets is None) for number, _, targets in model.told] == [
        (1, True), (2, False), (3, False)
    ]  # fmt: skip
    for _, rows, targets in model.told[1:]:
        np.testing.assert_allclose(targets, own[rows], atol=1e-5)
        assert set(rows) == set(space.nodes) and not set(rows) & set(held.nodes)
    method.learn_beside(alone, nodes, None, range(1, 3))
    assert [(rows.size, targets) for _, rows, targets in alone.told] == [(0, None)] * 2


def communities(seed: int, count: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a graph of three communities, which are the classes."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    chance = torch.where(y[:, None] == y, 0.3, 0.01)
    upper = (torch.rand(count, count, generator=draw) < chance).triu(1)
    return y, (upper | upper.T).nonzero().T


def run_of(config: Any, **changes: Any) -> Any:
    """Stand in for a run whose client 2 has a place for each class."""
    y, _ = communities(0)
    rng = np.random.default_rng(0)
    places = (2 * np.eye(4)[y.numpy()] + 0.5 * rng.normal(size=(90, 4))).astype(np.float32)
    n, called = np.arange(90), np.array([f"p{number}" for number in range(90)])
    placed = Embeddings(np.full(90, 2), called, n, n < 60, places)
    judged = {"role": np.full(90, 3), "label": y.numpy(), "fold": n % 2} | changes
    found = Predictions(np.full(90, 2), called, y.numpy(), np.ones(90), **judged)
    return SimpleNamespace(
        config=config,
        data=SimpleNamespace(num_classes=3),
        embeddings=lambda client=None: placed,
        predictions=lambda client=None: found,
    )


def new_graph_of(**values: Any) -> NewGraph:
    """Make a graph that has 40 of the public nodes, and 50 that nobody knows."""
    edges = values.pop("edge_index", communities(0)[1])
    ids = torch.arange(90)
    ids = torch.where((ids >= 40), ids + 1000, ids)
    none = torch.full((90,), -1)
    return NewGraph(torch.eye(90), edges, none, values={"n_id": ids} | values)


DEEPWALK = ["model.name=deepwalk", "model.dimension=4", "deepwalk.walks=10", "judge.folds=2"]


@pytest.mark.parametrize("words", [False, True])
def test_a_new_graphs_private_nodes_are_classified_by_another_clients_labels(words: bool) -> None:
    config: Any = load_config("ppfl/cora-linqs-deepwalk", [*DEEPWALK, "rounds=4"])
    graph = new_graph_of()
    if words:
        graph = new_graph_of(n_id=None, identity=[f"p{one}" for one in graph.values["n_id"]])
    beside = method.join_graph(run_of(config), graph)
    y, _ = communities(0)
    assert beside.client == 2 and beside.common == 32
    assert beside.precision[10] > 0.9  # of eight
    torch.testing.assert_close(beside.probability.sum(1), torch.ones(90))
    private = slice(40, None)
    right = beside.probability.argmax(1)[private] == y[private]
    assert right.float().mean() > 0.8


@pytest.mark.parametrize(
    ("settings", "graph", "run", "message"),
    [
        ([], {"n_id": None}, {}, "node"),
        ([], {"n_id": torch.arange(90) + 5000}, {}, "graph.*90"),
        (["model.name=gat", "partition.ratios=[0.6,0.2,0.2]"], {}, {}, "label"),
        ([], {}, {"label": np.full(90, -1)}, "judged"),
        ([], {"edge_index": None}, {}, "edges"),
    ],
)
def test_what_cannot_join_is_refused(
    settings: list[str], graph: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    config = load_config("ppfl/cora-linqs-deepwalk", [*DEEPWALK, "rounds=1", *settings])
    with pytest.raises((DataError, OutputError), match=message):
        method.join_graph(run_of(config, **run), new_graph_of(**graph))
