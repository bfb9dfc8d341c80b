"""The GAT client: PyG's two layers, a loss worked out by hand, and a state that goes on."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import GATConv

from flower_graph.engine.dropout import turn_of
from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.ops.attention import attention_graph
from flower_graph.strategies.procrustes_alignment.gat import (
    GATWeights,
    Inputs,
    PublicGAT,
    PublicGATSettings,
    embedding_loss,
    hidden_layer,
    output_layer,
)

N, F, D, C = 12, 9, 6, 3
ROWS = np.array([1, 4, 5, 11])
SETTINGS = PublicGATSettings(
    classes=C, dimension=D, heads=2, epochs=3, learning_rate=0.01, dropout=0.5, beta=10, seed=7
)


@dataclass(frozen=True)
class Client:
    """What the model reads of an overlapping graph."""

    client: int
    x: Tensor
    y: Tensor
    train_y: Tensor
    edge_index: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor


def make_client(seed: int = 0, client: int = 2, nodes: int = N) -> Client:
    """Draw a graph in which the last two nodes are isolated, and every second node trains."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(nodes, F, generator=draw)
    x *= torch.rand(nodes, F, generator=draw) < 0.5
    upper = (torch.rand(nodes, nodes, generator=draw) < 0.3).triu(1)
    upper[:, -2:] = False
    y = torch.randint(C, (nodes,), generator=draw)
    train = torch.arange(nodes) % 2 == 0
    return Client(client, x, y, y, (upper | upper.T).nonzero().T, train, ~train, ~train)


def make_targets(seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(ROWS), D)).astype(np.float32)


def make_inputs(graph: Client) -> Inputs:
    x = pack_graphs([graph]).x
    return Inputs(x, turn_of(x), attention_graph(graph.edge_index, len(graph.y)))


def make_weights(rows: int, seed: int = 1) -> GATWeights:
    """Draw weights, biases too, that need gradients."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(rows, D), (2, D // 2), (2, D // 2), (D,), (D, C), (1, C), (1, C), (C,)]
    return GATWeights(*(torch.randn(s, generator=draw).requires_grad_() for s in shapes))


def pyg_layers(weights: GATWeights) -> tuple[GATConv, GATConv]:
    first, second = GATConv(F, D // 2, heads=2), GATConv(D, C)
    state = weights._asdict()
    with torch.no_grad():
        for layer, end in ((first, "_1"), (second, "_2")):
            layer.lin.weight.copy_(state["linear" + end].T)
            layer.att_src.copy_(state["source" + end][None])
            layer.att_dst.copy_(state["target" + end][None])
            layer.bias.copy_(state["bias" + end])
    return first, second


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_layers_are_pygs(seed: int):
    graph = make_client(seed, nodes=30)
    assert (graph.x != 0).any(0).all()  # or a column would be left out
    inputs, weights = make_inputs(graph), make_weights(F, seed)
    hidden = hidden_layer(weights, inputs)
    logits = output_layer(weights, hidden, inputs)
    first, second = pyg_layers(weights)
    expected = functional.elu(first(graph.x, graph.edge_index))
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    wanted = second(expected, graph.edge_index)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


def test_embedding_loss_by_hand():
    public = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]])
    targets = torch.tensor([[4.0, 3.0], [-5.0, 0.0], [0.0, 0.5]])
    # The cosines are 24 / 25, -1 and 1.
    assert embedding_loss(public, targets).item() == pytest.approx((0.04 + 2 + 0) / 3, abs=1e-6)


def test_first_loss_by_hand():
    """Three nodes in a line; attention is even, as its vectors are zero."""
    graph = Client(
        client=0,
        x=torch.eye(3),
        y=torch.tensor([0, 1, 0]),
        train_y=torch.tensor([0, 0, -1]),
        edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]),
        train_mask=torch.tensor([False, True, True]),  # the last one has no label
        val_mask=torch.zeros(3, dtype=torch.bool),
        test_mask=torch.zeros(3, dtype=torch.bool),
    )
    options = PublicGATSettings(
        classes=2, dimension=2, epochs=1, learning_rate=1e-9, dropout=0, beta=1
    )
    model = PublicGAT(graph, options)
    state = model.state_dict()
    # linear_1 [3, 2], two attention halves, bias; linear_2 [2, 2], two halves, bias.
    flat = [1.0, 0, 0, 2, 3, 0] + [0.0] * 6 + [1.0, 0, 0, 1] + [0.0] * 6
    model.load_state_dict(state | {"weight": torch.tensor(flat)[:, None]})
    hidden = [[1 / 2, 1], [4 / 3, 2 / 3], [3 / 2, 1]]
    np.testing.assert_allclose(model.embed(), hidden, rtol=1e-6)
    # Node 1 sees the mean of all: logits (10 / 9, 8 / 9), and its label is 0.
    loss = model.learn(np.array([0]), np.array([[1.0, 1.0]], np.float32), 1)
    assert loss == pytest.approx(math.log(1 + math.exp(8 / 9 - 10 / 9)), abs=1e-6)


def test_gradient_of_all_terms_is_the_sum():
    """Two steps along cross-entropy + beta cosine: PyG's layers and PyTorch's Adam do the same."""
    graph, beta = make_client(nodes=30), 0.7
    options = dataclasses.replace(SETTINGS, dropout=0.0, beta=beta, epochs=2)
    model, targets = PublicGAT(graph, options), make_targets()
    weights = make_weights(F)
    flat = torch.cat([one.detach().view(-1) for one in weights])[:, None]
    model.load_state_dict(model.state_dict() | {"weight": flat})
    model.learn(ROWS, targets, 1)
    first, second = pyg_layers(weights)
    parameters = [*first.parameters(), *second.parameters()]
    adam = torch.optim.Adam(parameters, lr=0.01, weight_decay=5e-4, fused=True)
    for _ in range(2):
        hidden = functional.elu(first(graph.x, graph.edge_index))
        logits = second(hidden, graph.edge_index)
        loss = functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])
        cosine = functional.cosine_similarity(hidden[ROWS], torch.from_numpy(targets))
        adam.zero_grad()
        (loss + beta * (1 - cosine).mean()).backward()
        adam.step()
    expected = functional.elu(first(graph.x, graph.edge_index)).detach().numpy()
    np.testing.assert_allclose(model.embed(), expected, rtol=1e-3, atol=1e-4)


def test_cosine_term_reaches_the_first_layer_alone():
    graph = make_client(nodes=30)
    weights, inputs = make_weights(F), make_inputs(graph)
    hidden = hidden_layer(weights, inputs)
    output_layer(weights, hidden, inputs)
    embedding_loss(hidden[ROWS], torch.from_numpy(make_targets())).backward()
    assert all(one.grad is not None and one.grad.abs().sum() > 0 for one in weights[:4])
    assert all(one.grad is None for one in weights[4:])


def test_targets_pull_public_rows_towards_them():
    graph, targets = make_client(), make_targets()
    options = dataclasses.replace(SETTINGS, epochs=100, dropout=0.0)
    distances = []
    for beta in (0.0, 3.0):
        model = PublicGAT(graph, dataclasses.replace(options, beta=beta))
        model.learn(ROWS, targets, 1)
        public = torch.from_numpy(model.embed()[ROWS])
        distances.append(embedding_loss(public, torch.from_numpy(targets)).item())
    assert distances[1] < 0.5 * distances[0]


def test_beta_zero_is_training_without_targets():
    graph = make_client()
    local, alone, pulled = (
        PublicGAT(graph, dataclasses.replace(SETTINGS, beta=beta)) for beta in (0.0, 2.0, 2.0)
    )
    losses = [
        local.learn(ROWS, make_targets(), 1),
        alone.learn(ROWS, None, 1),
        pulled.learn(ROWS, make_targets(), 1),
    ]
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(local.embed(), alone.embed())
    assert np.abs(local.embed() - pulled.embed()).max() > 1e-4


def test_no_public_rows_are_no_targets():
    graph, none = make_client(), np.empty(0, np.int64)
    empty, alone = PublicGAT(graph, SETTINGS), PublicGAT(graph, SETTINGS)
    assert empty.learn(none, np.empty((0, D), np.float32), 1) == alone.learn(none, None, 1)
    np.testing.assert_array_equal(empty.embed(), alone.embed())


def test_going_on_from_a_state_is_going_on():
    graph, targets = make_client(), make_targets()
    whole, first, second = (PublicGAT(graph, SETTINGS) for _ in range(3))
    whole.learn(ROWS, None, 1)
    first.learn(ROWS, None, 1)
    second.load_state_dict({name: one.clone() for name, one in first.state_dict().items()})
    first.learn(ROWS, targets, 2)  # must not reach the copy
    assert second.learn(ROWS, targets, 2) == whole.learn(ROWS, targets, 2)
    np.testing.assert_array_equal(second.embed(), whole.embed())
    assert int(second.state_dict()["step"]) == 2 * SETTINGS.epochs


def test_same_seed_same_bits_and_others_differ():
    graph = make_client()

    def trained(graph: Client, seed: int = 7, server_round: int = 1) -> np.ndarray:
        torch.rand(3)  # moves PyTorch's own generator on, which must not show
        model = PublicGAT(graph, dataclasses.replace(SETTINGS, seed=seed))
        model.learn(ROWS, make_targets(), server_round)
        return model.embed()

    np.testing.assert_array_equal(trained(graph), trained(graph))
    other_client = dataclasses.replace(graph, client=3)
    for other in (trained(graph, seed=8), trained(graph, server_round=2), trained(other_client)):
        assert np.abs(other - trained(graph)).max() > 1e-4


def test_pytorchs_own_generator_is_left_alone():
    model = PublicGAT(make_client(), SETTINGS)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model.learn(ROWS, None, 1)
    assert torch.equal(torch.rand(3), expected)


def test_sparse_features_are_dense_ones():
    graph = make_client()
    sparse = dataclasses.replace(graph, x=graph.x.to_sparse_csr())
    results = []
    for one in (graph, sparse):
        model = PublicGAT(one, SETTINGS)
        model.learn(ROWS, make_targets(), 1)
        results.append(model.embed())
    np.testing.assert_array_equal(*results)


def test_features_that_a_client_never_sees_change_nothing():
    graph = make_client()
    wider = dataclasses.replace(graph, x=functional.pad(graph.x, (0, 4)))
    weights = [PublicGAT(one, SETTINGS).state_dict()["weight"] for one in (graph, wider)]
    assert weights[0].shape == weights[1].shape
    # Only the bound of the draws depends on the number of features.
    ratio = weights[1][: F * D] / weights[0][: F * D]
    assert torch.allclose(ratio, torch.tensor(math.sqrt((F + D) / (F + 4 + D))))


def test_isolated_nodes_and_a_graph_without_edges():
    graph = make_client()
    bare = dataclasses.replace(graph, edge_index=torch.empty(2, 0, dtype=torch.int64))
    full, empty = PublicGAT(graph, SETTINGS), PublicGAT(bare, SETTINGS)
    # An isolated node attends to itself alone, whatever the other edges.
    np.testing.assert_allclose(full.embed()[-2:], empty.embed()[-2:], rtol=1e-6)
    assert np.isfinite(empty.learn(ROWS, make_targets(), 1))
    assert np.isfinite(empty.embed()).all() and empty.embed().std(0).min() > 0


def test_a_judged_label_is_never_read():
    graph = make_client()
    hidden = dataclasses.replace(graph, train_y=torch.where(graph.train_mask, graph.y, -1))
    results = []
    for one in (graph, hidden):
        model = PublicGAT(one, SETTINGS)
        model.learn(ROWS, make_targets(), 1)
        results.append(model.embed())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("shape", [(4, D + 1), (3, D), (4 * D,)])
def test_wrong_targets(shape: tuple[int, ...]):
    model = PublicGAT(make_client(), SETTINGS)
    with pytest.raises(ValueError, match=r"client 2: targets are .*; allowed are \(4, 6\)"):
        model.learn(ROWS, np.zeros(shape, np.float32), 1)


def test_no_training_node():
    graph = make_client()
    unlabelled = dataclasses.replace(graph, train_y=torch.full((N,), -1))
    with pytest.raises(ValueError, match="client 2 has no training node with a label"):
        PublicGAT(unlabelled, SETTINGS)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="heads: 4 cannot share an embedding of 6 numbers"):
        dataclasses.replace(SETTINGS, heads=4)


def test_state_of_another_model():
    small = PublicGAT(make_client(), SETTINGS)
    before = small.embed()
    other = PublicGAT(make_client(), dataclasses.replace(SETTINGS, classes=C + 1))
    with pytest.raises(ValueError, match=r"client 2: state 'weight' is .*; allowed is a tensor"):
        small.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="client 2: state 'step' is nothing"):
        small.load_state_dict({n: t for n, t in small.state_dict().items() if n != "step"})
    np.testing.assert_array_equal(small.embed(), before)
