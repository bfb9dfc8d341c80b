"""Split models behind one shared linear map are PyG's two-layer networks."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv, SAGEConv

from flower_graph.models import (
    CentralModel,
    SplitGAT,
    SplitGCN,
    SplitModel,
    SplitSAGE,
    build_server_model,
)

N, F, H, L, C = 12, 9, 4, 3, 5
# PyG's names: of the shared map, and of the others with ours
NAMES = {
    SplitGCN: (
        ["first.lin.weight"],
        {"first.bias": "bias", "second.lin.weight": "linear.weight", "second.bias": "linear.bias"},
    ),
    SplitGAT: (
        ["first.lin.weight"],
        {
            **{"first.att_src": "source_1", "first.att_dst": "target_1", "first.bias": "bias_1"},
            **{"second.att_src": "source_2", "second.att_dst": "target_2"},
            **{"second.lin.weight": "linear.weight", "second.bias": "bias_2"},
        },
    ),
    SplitSAGE: (
        ["first.lin_r.weight", "first.lin_l.weight"],
        {
            **{"first.lin_l.bias": "bias", "second.lin_r.weight": "own.weight"},
            **{"second.lin_l.weight": "neighbours.weight", "second.lin_l.bias": "own.bias"},
        },
    ),
}
# Nodes 10 and 11 are isolated.
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 2], [1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 9]])
UNDIRECTED = torch.cat([EDGES, EDGES.flip(0)], dim=1)
OPTIONS = {"hidden": H, "heads": L, "classes": C, "dropout": 0.5, "seed": 3}


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomise(module: nn.Module) -> None:
    """Give every parameter, biases too, a value that would show if it were lost."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))


class Reference(nn.Module):
    """PyG's network with the weights of ours: the shared map's ``weight``, and a split model."""

    def __init__(self, weight: Tensor, split: SplitModel) -> None:
        super().__init__()
        self.activation = functional.elu if isinstance(split, SplitGAT) else functional.relu
        kinds = {SplitGCN: (GCNConv(F, H), GCNConv(H, C))}
        kinds[SplitGAT] = GATConv(F, H, heads=L), GATConv(H * L, C)
        kinds[SplitSAGE] = SAGEConv(F, H), SAGEConv(H, C)
        self.first, self.second = kinds[type(split)]
        names = NAMES[type(split)]
        self.shared = [self.get_parameter(name) for name in names[0]]
        with torch.no_grad():
            for mine, ours in zip(self.shared, weight.chunk(len(self.shared)), strict=True):
                mine.copy_(ours)
            for pygs, ours in names[1].items():
                mine = self.get_parameter(pygs)
                mine.copy_(split.get_parameter(ours).view_as(mine))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.second(self.activation(self.first(x, edges)), edges)


SIZES = {"gcn": H, "gat": H * L, "sage": 2 * H}  # of what a user sends


@pytest.mark.parametrize("edge_index", [UNDIRECTED, EDGES], ids=["undirected", "directed"])
@pytest.mark.parametrize("name", SIZES)
def test_equals_pyg_with_the_same_weights(name: str, edge_index: Tensor):
    model = CentralModel(F, build_server_model(name, **OPTIONS), input_dropout=0.5).eval()
    randomise(model)
    reference = Reference(model.linear.weight.detach(), model.server)
    x, weight = normal(N, F), normal(N, C, seed=2)
    out, expected = model(x, edge_index), reference(x, edge_index)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    want = torch.cat([one.grad for one in reference.shared])
    torch.testing.assert_close(model.linear.weight.grad, want, rtol=1e-3, atol=1e-3)
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("name", SIZES)
def test_another_edge_index_or_more_nodes_refresh_the_cache(name: str):
    model = build_server_model(name, **OPTIONS)
    assert model.latent_size == SIZES[name]
    fresh, x = copy.deepcopy(model).eval(), normal(N, model.latent_size)
    assert not torch.allclose(model(x, UNDIRECTED), model(x, UNDIRECTED))  # dropout
    model.eval()
    before = model(x, UNDIRECTED)
    assert torch.equal(model(x, UNDIRECTED), before)
    changed = model(x, UNDIRECTED[:, 1:])
    assert not torch.allclose(changed, before)
    assert torch.equal(changed, fresh(x, UNDIRECTED[:, 1:]))
    more = model(torch.cat([x, x[:2]]), UNDIRECTED)  # two isolated nodes besides
    torch.testing.assert_close(more[:N], before)
    assert more.shape == (N + 2, C)
    assert torch.equal(model(x, UNDIRECTED), before)


def test_central_model_drops_features():
    model = CentralModel(F, SplitGCN(H, C, dropout=0.0), input_dropout=0.5)
    x = torch.ones(N, F)
    assert not torch.allclose(model(x, UNDIRECTED), model(x, UNDIRECTED))
    model.input_dropout = 0.0
    expected = model.server(model.linear(x), UNDIRECTED)
    assert torch.equal(model(x, UNDIRECTED), expected)
    assert model.linear.bias is None
