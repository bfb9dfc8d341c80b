"""Graphs one behind the other, with a column for each active row; dropout of each network."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ego_helpers import toy_egos
from graph_helpers import toy
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_graph.engine.cohort import MiniBatch, epochs_of, joined, placed_on
from flower_graph.ops.dropout import draw_kept, draw_mask, turn_of, with_dropout


def together(graphs):
    return joined([placed_on(g, torch.device("cpu"), is_dense=False) for g in graphs], by_rows=True)


def test_blocks_are_the_clients_graphs():
    egos = toy_egos()
    batch = together(egos)
    assert batch.clients == tuple(range(100, 112))
    x, rows = batch.x.matrix.to_dense(), batch.rows
    assert torch.equal(batch.x.transpose.to_dense(), x.T)
    for place, ego in enumerate(egos):
        nodes, own = (slice(*ptr[place : place + 2]) for ptr in (batch.ptr, rows.ptr))
        at = batch.layout.edge_ptr[place : place + 2]
        assert torch.equal(batch.edge_index[:, slice(*at)] - nodes.start, ego.edge_index)
        # Putting the columns back gives the features; only features that occur have a column.
        feature = rows.feature[own]
        assert torch.equal(feature, (ego.x != 0).any(0).nonzero().flatten())
        assert torch.equal(x[nodes, own], ego.x[:, feature])
        assert not x[nodes, : own.start].any() and not x[nodes, own.stop :].any()
        assert set(batch.owner[nodes].tolist()) == {place}
        assert rows.owner[own].eq(place).all()
        assert torch.equal(batch.y[nodes], ego.y)
        assert torch.equal(batch.masks["val"][nodes], ego.val_mask)


def test_sparse_features_give_the_same_and_a_stored_zero_is_none():
    egos = toy_egos()
    sparse = [replace(e, x=e.x.to_sparse_csr()) for e in egos]
    sparse[4].x.values()[0] = 0
    egos[4] = replace(egos[4], x=sparse[4].x.to_dense())
    one, other = together(sparse), together(egos)
    assert torch.equal(one.rows.feature, other.rows.feature) and one.rows.ptr == other.rows.ptr
    assert torch.equal(one.x.matrix.to_dense(), other.x.matrix.to_dense())


NETWORKS = [toy(4, [[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]], [0, 0]), toy(7, [[0.0, 5.0, 0.0]], [0])]


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(rate=st.sampled_from([0.1, 0.25, 0.5, 0.8]), seed=st.integers(0, 99))
def test_a_mask_holds_zeros_and_what_makes_up_for_them(rate, seed):
    mask = draw_mask((3, 5_000), rate, chance(seed))
    kept = round(256 * (1 - rate)) / 256
    assert mask.unique().tolist() == pytest.approx([0, 1 / kept])
    # Five standard deviations of the share that stays.
    assert abs(float((mask > 0).float().mean()) - kept) < 5 * (kept * (1 - kept) / 15_000) ** 0.5


def kept(networks, seeds):
    batch, chances = together(networks), [chance(seed) for seed in seeds]
    return draw_kept(
        batch.x, batch.ptr, chances, steps=2, hidden=3, input_rate=0.5, hidden_rate=0.25
    )


def test_what_a_network_loses_does_not_depend_on_its_company():
    both = kept(NETWORKS, [11, 12])
    alone = [kept([one], [seed]) for one, seed in zip(NETWORKS, [11, 12], strict=True)]
    assert torch.equal(both.inputs, torch.cat([one.inputs for one in alone], 1))
    assert torch.equal(both.hidden, torch.cat([one.hidden for one in alone], 1))
    assert both.inputs.shape == (2, 5) and both.hidden.shape == (2, 3, 3)


def test_thinned_features_are_the_same_matrix_both_ways():
    x = together(NETWORKS).x
    factors = torch.tensor([0.0, 2.0, 2.0, 0.0, 2.0])  # 1, 2 | 3, 4 | 5
    new = with_dropout(x, turn_of(x), factors)
    values = [[0.0, 0.0, 4.0, 0.0], [0.0, 6.0, 0.0, 0.0], [0.0, 0.0, 0.0, 10.0]]
    assert new.matrix.to_dense().tolist() == values
    assert torch.equal(new.transpose.to_dense(), new.matrix.to_dense().T)
    assert x.matrix.to_dense()[0].tolist() == [1.0, 0.0, 2.0, 0.0]  # the batch is as it was


# Which nodes each step of an epoch is on --------------------------------------------------------

# Three clients of five nodes, one and three; of the last nobody takes part.
GRAPH: Any = SimpleNamespace(ptr=[0, 5, 6, 9], clients=[4, 7, 2])
AMONG = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
ORDER: Any = {"size": 3, "seed": 1, "server_round": 2, "purpose": "local", "epochs": 1}


def drawn(**changes: object) -> list[list[MiniBatch]]:
    return list(epochs_of(GRAPH, AMONG, **ORDER | changes))


def numbers(epoch: list[MiniBatch]) -> Tensor:
    """Return how many nodes of each client are in each batch."""
    found = [part.nodes for part in epoch if part.nodes is not None]
    return torch.stack([torch.stack([n.sum() for n in one.split([5, 1, 3])]) for one in found])


def test_every_node_once_an_epoch_and_nobody_steps_in_surplus_batches() -> None:
    for epoch in drawn(epochs=3):
        assert numbers(epoch).tolist() == [[3, 1, 0], [1, 0, 0]]
        assert torch.equal(sum(part.nodes.int() for part in epoch), AMONG.int())  # type: ignore[union-attr, arg-type]
        # Who has no such nodes takes the first step, as it does without batches.
        moves = [part.moves.tolist() for part in epoch if part.moves is not None]
        assert moves == [[True, True, True], [True, False, False]]


def test_without_a_size_a_step_is_on_all() -> None:
    assert drawn(size=None, epochs=2) == [[MiniBatch()], [MiniBatch()]]


def test_an_order_is_the_clients_own_and_new_in_each_epoch_round_and_purpose() -> None:
    many = torch.ones(40, dtype=torch.bool)

    def order(client: int = 4, epoch: int = 0, **changes: object) -> list[int]:
        """Return the nodes of the client's first batch of twenty, beside another client's."""
        graph: Any = SimpleNamespace(ptr=[0, 40, 80], clients=[9, client])
        both, how = torch.cat([many, many]), ORDER | {"size": 20, "epochs": 2} | changes
        epochs = list(epochs_of(graph, both, **how))
        return epochs[epoch][0].nodes[40:].nonzero().flatten().tolist()  # type: ignore[index]

    own: Any = SimpleNamespace(ptr=[0, 40], clients=[4])
    alone = next(epochs_of(own, many, **ORDER | {"size": 20}))
    assert order() == alone[0].nodes.nonzero().flatten().tolist()  # type: ignore[union-attr]
    others = [order(client=5), order(epoch=1), order(seed=2), order(server_round=3)]
    others += [order(purpose="fusion"), order()]
    assert len({tuple(one) for one in others}) == len(others)
