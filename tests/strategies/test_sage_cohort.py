"""Generators and classifiers of FedSage+: formulas node by node, and what a cohort does."""

from __future__ import annotations

import pytest
import torch
from sage_helpers import CLASSES, networks, ring
from torch import Tensor
from torch.nn import functional as F

from flower_graph.errors import StateLostError
from flower_graph.strategies.fed_sage import neighbour_generation
from flower_graph.strategies.fed_sage.cohort import (
    CLASSIFIER_NAMES,
    FEATURE_NAMES,
    SageCohort,
    SageSettings,
)
from flower_graph.strategies.fed_sage.neighbour_generation import (
    CODE,
    HIDDEN_SHARE,
    LATENT,
    NEIGHBOURS,
    judge,
    predict_numbers,
    rounded,
)

SETTINGS = SageSettings(6, 0.02, 5e-4, 1, 3, 5)
CPU = torch.device("cpu")


def test_numbers_are_relu_and_are_rounded_into_the_slots() -> None:
    weights = {
        "number.weight": torch.ones(1, LATENT, 1),
        "number.bias": torch.full((1, 1), -1.0),
    }
    z = torch.tensor([0.0, 1.4, 2.6, 99.0])[:, None].expand(-1, LATENT) / LATENT
    numbers = predict_numbers(weights, z, [0, 4])
    torch.testing.assert_close(numbers, torch.tensor([0.0, 0.4, 1.6, 98.0]))
    assert rounded(numbers).tolist() == [0, 0, 2, NEIGHBOURS]


def test_judgement_is_the_gradient_of_the_cross_client_term(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


# Cohorts -----------------------------------------------------------------------------------------


def cohort(egos: list | None = None) -> SageCohort:  # type: ignore[type-arg]
    return SageCohort(networks() if egos is None else egos, CLASSES, SETTINGS, CPU)


def dense_gcn(edges: Tensor, n: int) -> Tensor:
    linked = torch.eye(n)
    linked[edges[1], edges[0]] = 1
    root = linked.sum(1).rsqrt()
    return root[:, None] * linked * root


def slow_generator_loss(own: dict[str, Tensor], one: SageCohort, noise: Tensor) -> Tensor:
    """Loss of one client, node by node, with dense matrices."""
    graph = one.graph
    kept, missing = graph.impaired.kept, graph.impaired.missing
    x, y, train = graph.x[kept], graph.y[kept], graph.masks[0][kept]
    z, adjacency = x, dense_gcn(graph.impaired.edge_index, kept.numel())
    for layer in ("encoder-1", "encoder-2"):
        z = torch.relu(adjacency @ z @ own[f"{layer}.weight"] + own[f"{layer}.bias"])
    numbers = torch.relu(z @ own["number.weight"] + own["number.bias"])[:, 0]
    loss = F.smooth_l1_loss(numbers, missing.float())
    codes = torch.relu((z + noise) @ own["generator-1.weight"] + own["generator-1.bias"])
    codes = torch.relu(codes @ own["generator-2.weight"] + own["generator-2.bias"])
    codes = codes.view(-1, NEIGHBOURS, CODE)
    made = torch.tanh(codes @ own["generator-3.weight"] + own["generator-3.bias"])
    rows, edges = [x], [graph.impaired.edge_index]
    n = kept.numel()
    for node in range(kept.numel()):
        is_hidden = torch.ones(graph.x.shape[0], dtype=torch.bool)
        is_hidden[kept] = False
        neighbours = graph.edge_index[1, graph.edge_index[0] == kept[node]]
        hidden = neighbours[is_hidden[neighbours]]
        for place in range(min(NEIGHBOURS, hidden.numel())):
            nearest = (made[node, place] - graph.x[hidden]).square().sum(1).min()
            loss = loss + nearest / kept.numel()
        for place in range(min(NEIGHBOURS, int((numbers[node] + 0.5).floor()))):
            rows.append(made[node, place][None])
            edges.append(torch.tensor([[node, n], [n, node]]))
            n += 1
    hidden_rows, adjacency = torch.cat(rows), dense_gcn(torch.cat(edges, 1), n)
    for layer in ("classifier-1", "classifier-2"):
        hidden_rows = adjacency @ hidden_rows @ own[f"{layer}.weight"] + own[f"{layer}.bias"]
        hidden_rows = torch.relu(hidden_rows)
    logits = hidden_rows[: kept.numel()] @ own["classifier-3.weight"] + own["classifier-3.bias"]
    return loss + (F.cross_entropy(logits[train], y[train]) if train.any() else 0.0)


def test_generator_loss_equals_a_slow_one_with_its_gradient() -> None:
    egos = networks()
    together = cohort(egos)
    together.pretrain()  # so that the clients differ
    names = [n for n in together.tensors if "." in n and not n.startswith(("exp", "step", "mean"))]
    weights = together._weights(tuple(names))
    found = together._generator_loss(weights, together._noise("together", 1))
    grads = torch.autograd.grad(found.sum(), list(weights.values()), allow_unused=True)
    for place, ego in enumerate(egos):
        one = cohort([ego])
        own = {name: w[place].detach().clone().requires_grad_() for name, w in weights.items()}
        loss = slow_generator_loss(own, one, one._noise("together", 1))
        torch.testing.assert_close(found[place], loss, atol=1e-5, rtol=1e-4)
        wanted = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        for grad, slow in zip(grads, wanted, strict=True):
            assert grad is not None
            slow = torch.zeros_like(grad[place]) if slow is None else slow
            torch.testing.assert_close(grad[place], slow, atol=1e-5, rtol=1e-4)


def test_hidden_nodes_depend_on_seed_and_client_alone() -> None:
    egos = networks()
    kept = [set(cohort([ego]).graph.impaired.kept.tolist()) for ego in egos]
    hidden = [set(range(e.nodes.numel())) - own for e, own in zip(egos, kept, strict=True)]
    sizes = [int(HIDDEN_SHARE * ego.nodes.numel()) for ego in egos]
    assert [len(part) for part in hidden] == sizes
    found, start = set(cohort(egos).graph.impaired.kept.tolist()), 0
    for ego, own in zip(egos, kept, strict=True):
        size = ego.nodes.numel()
        assert {node - start for node in found if start <= node < start + size} == own
        start += size


def test_learning_together_follows_the_mean_of_own_and_foreign_gradients() -> None:
    """With Adam's first step the weights move by its rate against the sign of the gradient."""
    whole = cohort()
    whole.pretrain()
    before = {name: whole.tensors[name].clone() for name in whole.tensors}
    weights = whole._weights(FEATURE_NAMES)
    frozen = {n: t for n, t in whole.tensors.items() if n not in FEATURE_NAMES}
    own = whole._generator_loss(weights | frozen, whole._noise("together", 1)).sum()
    grads = torch.autograd.grad(own, list(weights.values()))
    foreign = whole.judge(whole.upload(1), whole.clients)
    whole.learn(1, foreign, others=5)
    kept = torch.tensor(whole.graph.rest.ptr).diff()
    for name, grad in zip(FEATURE_NAMES, grads, strict=True):
        mean = (grad + foreign[name] / kept.view(-1, *[1] * (grad.dim() - 1))) / 6
        mean = mean + 1e-4 * before[name]  # weight decay
        moved = whole.tensors[name] - before[name]
        clear = mean.abs() > 1e-5
        assert clear.any()
        torch.testing.assert_close(moved[clear], -1e-3 * mean.sign()[clear], atol=5e-6, rtol=5e-3)
    for name in before:
        if not any(name.endswith(own_name) for own_name in (*FEATURE_NAMES, "epoch")):
            assert torch.equal(before[name], whole.tensors[name]), name


def test_pretraining_lowers_the_loss_and_the_rounds_start_afresh() -> None:
    whole, noise = cohort(), cohort()._noise("local", 0)
    with pytest.raises(StateLostError):
        whole.begin()
    first = {name: whole.tensors[name].clone() for name in CLASSIFIER_NAMES}
    before = whole._generator_loss(whole.tensors, noise)
    whole.pretrain()
    after = whole._generator_loss(whole.tensors, noise)
    assert after.sum() < before.sum()
    assert not torch.equal(whole.tensors["classifier-1.weight"], first["classifier-1.weight"])
    whole.begin()
    for name in CLASSIFIER_NAMES:
        assert torch.equal(whole.tensors[name], first[name])
        assert not whole.tensors[f"exp-avg.{name}"].any()
    whole.train(1, torch.tensor([0, 2]))
    trained = whole.tensors["classifier-1.weight"].clone()
    whole.train(1, torch.tensor([0, 2]))  # came twice
    whole.begin()
    assert torch.equal(whole.tensors["classifier-1.weight"], trained)
    moved = (trained != first["classifier-1.weight"]).flatten(1).any(1)
    assert moved.tolist() == [True, False, True, False, False, False]


def test_scores_by_hand() -> None:
    whole = cohort([ring(0, 12), ring(3, 1)])
    whole.pretrain()
    always = {name: torch.zeros_like(whole.tensors[name][0]) for name in CLASSIFIER_NAMES}
    always["classifier-3.bias"] = torch.tensor([0.0, 1.0, 0.0])  # class 1 for every node
    scores = whole.score(always)
    # 12 nodes, classes 0000 1111 2222, roles T T v t three times.
    assert scores.size.tolist() == [[6, 3, 3], [1, 0, 0]]
    assert scores.correct.tolist() == [[2, 1, 1], [0, 0, 0]]
    total = torch.tensor([0.0, 1.0, 0.0]).exp().sum().log()
    torch.testing.assert_close(scores.loss, torch.stack([total - 1 / 3, total]))
