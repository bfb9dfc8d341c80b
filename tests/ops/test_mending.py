import torch

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
