from __future__ import annotations

import torch

from flower_graph.ops.graph import gcn_adjacency
from flower_graph.ops.mending import slots
from flower_graph.ops.wide import wide_rows
from flower_graph.strategies.fed_sage import neighbour_generation
from flower_graph.strategies.fed_sage.neighbour_generation import (
    LATENT,
    NEIGHBOURS,
    Mended,
    classify,
    generate,
    initial_weights,
    judge,
    predict_numbers,
    rounded,
)


def stacked(clients: int, features: int = 4, classes: int = 3) -> dict[str, torch.Tensor]:
    start = initial_weights(features, 5, classes, 0)
    factor = torch.arange(1.0, clients + 1)
    return {n: w * factor.view(-1, *[1] * w.dim()) for n, w in start.items()}


def test_generated_neighbours_are_the_published_formula() -> None:
    weights = stacked(2)
    z = torch.randn(3, LATENT, generator=torch.Generator().manual_seed(1))
    made = generate(weights, z, [0, 1, 3], slots(torch.tensor([2, 0, 1])))
    for row, (client, node, place) in enumerate([(0, 0, 0), (0, 0, 1), (1, 2, 0)]):
        own = {name: value[client] for name, value in weights.items()}
        hidden = torch.relu(z[node] @ own["generator-1.weight"] + own["generator-1.bias"])
        codes = torch.relu(hidden @ own["generator-2.weight"] + own["generator-2.bias"])
        code = codes.view(NEIGHBOURS, -1)[place]
        wanted = torch.tanh(code @ own["generator-3.weight"] + own["generator-3.bias"])
        torch.testing.assert_close(made[row], wanted)


def test_numbers_are_relu_and_are_rounded_into_the_slots() -> None:
    weights = {
        "number.weight": torch.ones(1, LATENT, 1),
        "number.bias": torch.full((1, 1), -1.0),
    }
    z = torch.tensor([0.0, 1.4, 2.6, 99.0])[:, None].expand(-1, LATENT) / LATENT
    numbers = predict_numbers(weights, z, [0, 4])
    torch.testing.assert_close(numbers, torch.tensor([0.0, 0.4, 1.6, 98.0]))
    assert rounded(numbers).tolist() == [0, 0, 2, NEIGHBOURS]


def test_classifier_on_a_mended_graph_equals_dense_products() -> None:
    weights = stacked(1)
    draw = torch.Generator().manual_seed(2)
    real, made = torch.rand(2, 4, generator=draw), torch.rand(1, 4, generator=draw)
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    adjacency = gcn_adjacency(edges, 3)
    graph = Mended(wide_rows(real, [0, 2]), [0, 2], made, [0, 1], adjacency)
    logits = classify(weights, graph)
    root = torch.tensor([2.0, 3.0, 2.0]).rsqrt()
    linked = torch.tensor([[1.0, 1, 0], [1, 1, 1], [0, 1, 1]])
    dense = root[:, None] * linked * root
    hidden = torch.cat([real, made])
    for layer in ("classifier-1", "classifier-2"):
        own = hidden @ weights[f"{layer}.weight"][0]
        hidden = torch.relu(dense @ own + weights[f"{layer}.bias"][0])
    wanted = hidden @ weights["classifier-3.weight"][0] + weights["classifier-3.bias"][0]
    torch.testing.assert_close(logits, wanted[:2])


def test_judgement_is_the_gradient_of_the_cross_client_term(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    draw = torch.Generator().manual_seed(3)
    x, ptr = torch.rand(7, 4, generator=draw), [0, 3, 5, 7]
    made = torch.rand(6, 4, generator=draw).requires_grad_()
    author, judges = torch.tensor([4, 4, 8, 8, 9, 1]), torch.tensor([4, 8, 9])  # 1 is elsewhere
    total = torch.zeros(())
    for row, who in zip(made, author.tolist(), strict=True):
        for place, other in enumerate(judges.tolist()):
            if other != who:
                nodes = x[ptr[place] : ptr[place + 1]]
                total = total + (row - nodes).square().sum(1).min()
    (wanted,) = torch.autograd.grad(total, made)
    for table in (neighbour_generation.TABLE, 14):  # in one go, and two generated nodes at a time
        monkeypatch.setattr(neighbour_generation, "TABLE", table)
        found = judge(made.detach(), author, x.to_sparse_csr(), ptr, judges)
        torch.testing.assert_close(found, wanted)


def test_nobody_judges_itself() -> None:
    x = torch.rand(3, 4)
    found = judge(
        torch.rand(2, 4), torch.tensor([5, 5]), x.to_sparse_csr(), [0, 3], torch.tensor([5])
    )
    assert not found.any()
