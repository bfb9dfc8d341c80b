import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.graph_batch import (
    draw_kept,
    draw_mask,
    pack_graphs,
    turn_of,
    with_dropout,
)


def chance(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def network(client: int, x: list[list[float]]) -> ClientGraph:
    n = len(x)
    nobody = torch.zeros(n, dtype=torch.bool)
    edges = torch.zeros(2, 0, dtype=torch.long)
    y = torch.zeros(n, dtype=torch.long)
    return ClientGraph(client, y, torch.tensor(x), y, edges, None, nobody, nobody, nobody)


NETWORKS = [network(4, [[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]]), network(7, [[0.0, 5.0, 0.0]])]


@given(rate=st.sampled_from([0.1, 0.25, 0.5, 0.8]), seed=st.integers(0, 99))
def test_a_mask_holds_zeros_and_what_makes_up_for_them(rate, seed):
    mask = draw_mask((3, 5_000), rate, chance(seed))
    kept = round(256 * (1 - rate)) / 256
    assert mask.unique().tolist() == pytest.approx([0, 1 / kept])
    # Five standard deviations of the share that stays.
    assert abs(float((mask > 0).float().mean()) - kept) < 5 * (kept * (1 - kept) / 15_000) ** 0.5


def test_every_byte_of_a_word_is_as_likely_to_stay():
    mask = draw_mask((20_000, 8), 0.5, chance(0))
    assert ((mask > 0).float().mean(0) - 0.5).abs().max() < 0.02


def test_rate_zero_and_the_highest_rate_leave_something():
    assert draw_mask((2, 9), 0.0, chance(1)).eq(1).all()
    assert draw_mask((5_000,), 0.999, chance(1)).max() == 256  # one in 256 stays at least


def kept(networks, seeds):
    chances = [chance(seed) for seed in seeds]
    return draw_kept(
        pack_graphs(networks), chances, steps=2, hidden=3, input_rate=0.5, hidden_rate=0.25
    )


def test_what_a_network_loses_does_not_depend_on_its_company():
    both = kept(NETWORKS, [11, 12])
    alone = [kept([one], [seed]) for one, seed in zip(NETWORKS, [11, 12], strict=True)]
    assert torch.equal(both.inputs, torch.cat([one.inputs for one in alone], 1))
    assert torch.equal(both.hidden, torch.cat([one.hidden for one in alone], 1))
    assert both.inputs.shape == (2, 5) and both.hidden.shape == (2, 3, 3)


def test_without_rates_nothing_is_drawn():
    batch = pack_graphs(NETWORKS)
    rates = {"input_rate": 0.0, "hidden_rate": 0.0}
    assert draw_kept(batch, [chance(0)] * 2, steps=1, hidden=2, **rates) == (None, None)


def test_thinned_features_are_the_same_matrix_both_ways():
    x = pack_graphs(NETWORKS).x
    factors = torch.tensor([0.0, 2.0, 2.0, 0.0, 2.0])  # 1, 2 | 3, 4 | 5
    new = with_dropout(x, turn_of(x), factors)
    values = [[0.0, 0.0, 4.0, 0.0], [0.0, 6.0, 0.0, 0.0], [0.0, 0.0, 0.0, 10.0]]
    assert new.matrix.to_dense().tolist() == values
    assert torch.equal(new.transpose.to_dense(), new.matrix.to_dense().T)
    assert x.matrix.to_dense()[0].tolist() == [1.0, 0.0, 2.0, 0.0]  # the batch is as it was
