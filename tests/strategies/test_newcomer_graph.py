"""A graph that comes later: turned into a space that is there, trained beside it, classified."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flower_graph.data.description import NewGraph
from flower_graph.errors import DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.outputs.files import Embeddings, Predictions
from flower_graph.strategies.ppfl.method import (
    Floats,
    Integers,
    PublicSpace,
    join_graph,
    join_space,
    learn_beside,
)


def planted(nodes: int = 40, seed: int = 0) -> tuple[Floats, Floats]:
    """Draw embeddings, and a rotation of their space."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    return rng.normal(size=(nodes, 4)).astype(np.float32), turn.astype(np.float32)


@pytest.mark.parametrize("words", [False, True])
def test_a_turned_space_is_turned_back_and_private_nodes_with_it(words: bool) -> None:
    truth, turn = planted()
    ids: Any = np.arange(40) * 7 % 40
    ids = ids.astype(str) if words else ids
    public = PublicSpace(ids[:30], truth[:30])
    new = ids[10:][::-1]  # ten of the others' public nodes are not its own, ten are its alone
    space, held = public.split(new, 0.25, seed=3)
    assert (space.nodes.size, held.nodes.size) == (15, 5)
    assert set(space.nodes) | set(held.nodes) == set(ids[10:30])
    found = join_space(truth[10:][::-1] @ turn, new, space, held)
    np.testing.assert_allclose(found.embeddings, truth[10:][::-1], atol=1e-5)
    assert found.common == 15 and found.precision == {1: 1.0, 5: 1.0, 10: 1.0}
    assert join_space(truth[10:][::-1] @ turn, new, space).precision == {}
    with pytest.raises(DataError, match=r"3.*30 public"):
        public.split(np.array([50, 51, 52]).astype(ids.dtype), 0.2, seed=0)


class Recorder:
    """A model that stays where it is and notes what it is told."""

    def __init__(self, vectors: Floats) -> None:
        self.told = list[tuple[int, Integers, Any]]()
        self.embed = lambda: vectors

    def learn(self, *told: Any) -> float:
        self.told.append((told[2], *told[:2]))
        return 0.0


def test_targets_are_public_nodes_in_the_models_own_space() -> None:
    truth, turn = planted()
    own, nodes = truth @ turn, np.arange(40)
    space, held = PublicSpace(nodes[:20], truth[:20]).split(nodes, 0.2, seed=0)
    model, alone = Recorder(own), Recorder(own)
    for rounds in (range(1, 3), range(3, 4)):
        learn_beside(model, nodes, space, rounds)
    assert [(number, targets is None) for number, _, targets in model.told] == [
        (1, True), (2, False), (3, False)
    ]  # fmt: skip
    for _, rows, targets in model.told[1:]:
        np.testing.assert_allclose(targets, own[rows], atol=1e-5)
        assert set(rows) == set(space.nodes) and not set(rows) & set(held.nodes)
    learn_beside(alone, nodes, None, range(1, 3))
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
    beside = join_graph(run_of(config), graph)
    y, _ = communities(0)
    assert beside.client == 2 and beside.joined.common == 32
    assert beside.joined.precision[10] > 0.9  # of eight
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
        join_graph(run_of(config, **run), new_graph_of(**graph))
