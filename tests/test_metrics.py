"""Accuracy and loss of each client, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from graph_helpers import toy

from flower_graph.engine.graph_batch import pack_graphs
from flower_graph.engine.metrics import evaluate, node_losses

LOGITS = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [0.0, 0.0], [5.0, 0.0]])


def batch():
    x = [[1.0]] * 3
    return pack_graphs(
        [toy(7, x, [0, 0, 0], roles="tve"), toy(9, x[:2], [1, -1], roles="t-")],
    )


def test_accuracy_and_loss_by_hand():
    accuracy, loss = evaluate(batch(), LOGITS)
    # Client 7: node 0 right, node 1 wrong, node 2 right. Client 9: the tie goes to class 0.
    assert accuracy[0].tolist() == [1.0, 0.0, 1.0]
    assert accuracy[1, 0] == 0.0
    assert accuracy[1, 1:].isnan().all()
    assert loss.tolist() == pytest.approx([math.log(1 + math.exp(-2)), math.log(2)])
    assert accuracy.dtype == loss.dtype == torch.float64


def test_a_client_without_training_nodes_has_no_loss():
    graph = toy(1, [[1.0], [1.0]], [0, 1], roles="vv")
    accuracy, loss = evaluate(pack_graphs([graph]), LOGITS[:2])
    assert loss.isnan().all()
    assert accuracy[0].isnan().tolist() == [True, False, True]
    assert accuracy[0, 1] == 1.0


def test_weights_that_are_no_numbers_show_in_the_loss_of_that_client_alone():
    logits = LOGITS.clone()
    logits[3] = math.nan
    loss = evaluate(batch(), logits).loss
    assert loss.isnan().tolist() == [False, True]


def test_losses_of_nodes_want_a_gradient():
    logits = LOGITS.clone().requires_grad_()
    node_losses(batch(), logits)[3].backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad[3], torch.tensor([0.5, -0.5]))
    assert not logits.grad[:3].any()
