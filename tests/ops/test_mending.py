import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_graph.ops.mending import impair

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
