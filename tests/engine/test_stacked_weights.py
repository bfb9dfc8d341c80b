"""Stacked weights against full matrices, one model and one optimiser of PyTorch's a network."""

from collections.abc import Sequence

import pytest
import torch
from graph_helpers import Toy, random_toy, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.engine.graph_batch import GraphBatch, pack_graphs
from flower_graph.engine.stacked_weights import ModelWeights, StackedWeights, Tensors, stacked_state
from flower_graph.ops.graph import propagate

FEATURES, HIDDEN = 5, 3
RATES = {"learning_rate": 0.05, "weight_decay": 0.1}


def draw_model(seed: int) -> ModelWeights:
    draw = torch.Generator().manual_seed(seed)
    return ModelWeights(
        torch.randn(FEATURES, HIDDEN, generator=draw), torch.randn(HIDDEN, generator=draw)
    )


def loss_of(batch: GraphBatch):
    """Give a loss that is a sum over networks and no quadratic."""

    def loss(first: Tensor, rest: Tensor) -> Tensor:
        return (propagate(batch.x, first) + rest[batch.node_client]).sin().sum()

    return loss


class Dense:
    """One network as anybody would write it: a full matrix and PyTorch's Adam."""

    def __init__(self, graph: Toy, start: ModelWeights) -> None:
        self.graph = graph
        self.has = (graph.x != 0).any(0)
        self.first, self.rest = start.first.clone(), start.rest.clone()
        self.load(start)
        self.forget()

    def load(self, start: ModelWeights) -> None:
        self.start = start
        for own, value in ((self.first, start.first), (self.rest, start.rest)):
            own.data.copy_(value)

    def forget(self) -> None:
        self.adam = torch.optim.Adam(
            [self.first.requires_grad_(), self.rest.requires_grad_()],
            lr=RATES["learning_rate"],
            weight_decay=RATES["weight_decay"],
        )

    def step(self, proximal: float) -> float:
        self.adam.zero_grad()
        value = (self.graph.x @ self.first + self.rest).sin().sum()
        pairs = (self.first, self.start.first), (self.rest, self.start.rest)
        (value + sum(proximal / 2 * ((own - at) ** 2).sum() for own, at in pairs)).backward()
        self.adam.step()
        # Rows without data stay what the round began with.
        self.first.data[~self.has] = self.start.first[~self.has]
        return value.item()


def assert_equal(stacked: StackedWeights, dense: Sequence[Dense]) -> None:
    first, rest = stacked.weights()
    ptr = stacked.batch.row_ptr
    for place, one in enumerate(dense):
        rows = slice(ptr[place], ptr[place + 1])
        own = one.first.detach()[stacked.batch.feature[rows]]
        torch.testing.assert_close(first[rows], own, rtol=0, atol=1e-5)
        torch.testing.assert_close(rest[place], one.rest.detach(), rtol=0, atol=1e-5)


def assert_models(ours: ModelWeights, first: Tensor, rest: Tensor) -> None:
    torch.testing.assert_close(ours.first, first, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.rest, rest, rtol=0, atol=1e-5)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Toy], list[int], int]:
    """Draw graphs, their kinds, and which of them forgets its moments."""
    count = draw(st.integers(1, 5))
    graphs = [
        random_toy(place, draw(st.integers(1, 6)), FEATURES, draw(st.integers(0, 999)))
        for place in range(count)
    ]
    kinds = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return graphs, kinds, draw(st.integers(0, count - 1))


@settings(deadline=None, max_examples=60)
@given(
    world=worlds(),
    proximal=st.sampled_from([0.0, 0.5]),
    forget=st.booleans(),
    shares=st.lists(st.integers(0, 9), min_size=5, max_size=5),
)
def test_equals_one_dense_model_each(
    world: tuple[list[Toy], list[int], int],
    proximal: float,
    forget: bool,
    shares: list[int],
):
    graphs, kinds, forgetful = world
    whole, models = pack_graphs(graphs), [draw_model(1), draw_model(2)]
    state = stacked_state(whole, models, kinds)
    dense = [Dense(graph, models[kind]) for graph, kind in zip(graphs, kinds, strict=True)]
    for number in range(3):
        stacked = StackedWeights(state, whole, kinds)
        models = [draw_model(10 * number), draw_model(10 * number + 1)]
        stacked.start_from(*models)
        for kind, one in zip(kinds, dense, strict=True):
            one.load(models[kind])
        if forget:
            stacked.forget_moments([forgetful])
            dense[forgetful].forget()
        for _ in range(2):
            value = stacked.step(loss_of(stacked.batch), proximal=proximal, **RATES)
            assert value.item() == pytest.approx(sum(d.step(proximal) for d in dense), abs=1e-3)
        assert_equal(stacked, dense)
        sums = stacked.weighted_sums(torch.tensor(shares[: len(graphs)]), divisor=7)
        for kind, ours in enumerate(sums):
            first, rest = torch.zeros(FEATURES, HIDDEN), torch.zeros(HIDDEN)
            for share, own, one in zip(shares, kinds, dense, strict=False):
                if own == kind:
                    first += share / 7 * one.first.detach()
                    rest += share / 7 * one.rest.detach()
            assert_models(ours, first, rest)


def pair() -> tuple[GraphBatch, Tensors]:
    """Two networks: the first has feature 0, the second features 0 and 4."""
    graphs = [toy(0, [[2.0, 0, 0, 0, 0]], [0]), toy(1, [[1.0, 0, 0, 0, 3.0]], [0])]
    batch = pack_graphs(graphs)
    zero = ModelWeights(torch.zeros(FEATURES, HIDDEN), torch.zeros(HIDDEN))
    return batch, stacked_state(batch, [zero])


def constant(value: float) -> ModelWeights:
    return ModelWeights(torch.full((FEATURES, HIDDEN), value), torch.full((HIDDEN,), value))


def stepped() -> tuple[StackedWeights, Tensors, Tensors]:
    """Two networks of two kinds after two steps, their state, and a copy of it."""
    batch, state = pair()
    stacked = StackedWeights(state, batch, kinds=[0, 1])
    for _ in range(2):
        stacked.step(loss_of(batch), **RATES)
    return stacked, state, {key: value.clone() for key, value in state.items()}


def test_a_network_with_share_zero_is_not_looked_at():
    batch, state = pair()
    stacked = StackedWeights(state, batch)
    stacked.start_from(constant(1.0))
    state["weight.first"][1:] = torch.nan
    state["weight.rest"][1] = torch.inf
    (sums,) = stacked.weighted_sums(torch.tensor([2.0, 0.0]))
    assert torch.equal(sums.first, torch.full((FEATURES, HIDDEN), 2.0))
    assert torch.equal(sums.rest, torch.full((HIDDEN,), 2.0))
    assert stacked.largest().tolist() == [1.0, torch.inf]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("key", ["weight.first", "weight.rest"])
def test_the_largest_weight_tells_of_numbers_that_are_none(key: str, value: float):
    batch, state = pair()
    state["weight.first"][0, 1] = -7.0
    state[key][-1, 2] = value
    assert StackedWeights(state, batch).largest().tolist() == [7.0, torch.inf]


def test_some_begin_anew():
    stacked, state, before = stepped()
    state["weight.rest"][1] = torch.nan
    stacked.restart([1], constant(3.0), constant(4.0))
    fresh = stacked_state(stacked.batch, [constant(3.0), constant(4.0)], [0, 1])
    for key, value in state.items():
        mine = slice(1, None)  # of the rows, and of the networks
        assert torch.equal(value[mine], fresh[key][mine])
        assert torch.equal(value[0], before[key][0])
