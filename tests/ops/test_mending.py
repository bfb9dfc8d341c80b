import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.ops.mending import (
    Slots,
    impair,
    mended_edges,
    nearest_hidden,
    nearest_of_each,
    slots,
)

# 0 - 1 - 2 - 3, and 1 - 3
EDGES = torch.tensor([[0, 1, 1, 2, 2, 3, 1, 3], [1, 0, 2, 1, 3, 2, 3, 1]])


def test_impair_by_hand() -> None:
    graph = impair(EDGES, torch.tensor([False, False, True, True]))
    assert graph.kept.tolist() == [0, 1]
    assert graph.edge_index.tolist() == [[0, 1], [1, 0]]
    assert graph.missing.tolist() == [0, 2]  # node 1 misses 2 and 3; the edge 2 - 3 nobody
    assert graph.parent.tolist() == [1, 1]
    assert graph.hidden.tolist() == [2, 3]


@given(st.integers(1, 8), st.data())
def test_kept_edges_and_missing_neighbours_add_up(n: int, data: st.DataObject) -> None:
    pairs = [(i, j) for i in range(n) for j in range(i)]
    some = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    one_way = torch.tensor(some, dtype=torch.int64).reshape(-1, 2).T
    edges = torch.cat([one_way, one_way.flip(0)], 1)
    hidden = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    graph = impair(edges, hidden)
    degree = torch.bincount(edges[0], minlength=n)[graph.kept]
    left = torch.bincount(graph.edge_index[0], minlength=graph.kept.numel())
    assert torch.equal(left + graph.missing, degree)
    assert bool(hidden[graph.hidden].all())
    assert torch.equal(torch.bincount(graph.parent, minlength=graph.kept.numel()), graph.missing)


def test_slots_by_hand() -> None:
    slot = slots(torch.tensor([2, 0, 1]))
    assert slot.parent.tolist() == [0, 0, 2]
    assert slot.slot.tolist() == [0, 1, 0]


def test_mending_a_tiny_graph_by_hand() -> None:
    edges = mended_edges(torch.tensor([[0, 1], [1, 0]]), 2, torch.tensor([1, -1, 0]))
    assert edges.tolist() == [[0, 1, 1, 0, 2, 4], [1, 0, 2, 4, 1, 0]]


def test_nearest_hidden_neighbour_by_hand() -> None:
    graph = impair(EDGES, torch.tensor([False, False, True, True]))
    x = torch.tensor([[9.0, 9.0], [9.0, 9.0], [1.0, 0.0], [0.0, 1.0]])
    made = torch.tensor([[0.1, 0.7], [0.6, 0.2], [0.5, 0.5]])  # the last is equally near to both
    slot = Slots(torch.tensor([1, 1, 1]), torch.tensor([0, 1, 2]))
    assert nearest_hidden(made, slot, graph, x).tolist() == [3, 2, 2]


def test_nearest_of_each_client_by_hand() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.6], [2.0, 0.0]])
    made = torch.tensor([[0.9, 0.8], [0.0, 0.1]])
    for features in (x, x.to_sparse_csr()):
        assert nearest_of_each(made, features, [0, 2, 4]).tolist() == [[1, 0], [2, 2]]
