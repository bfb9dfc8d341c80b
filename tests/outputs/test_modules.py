"""A saved model's module computes what the engine's network does."""

from __future__ import annotations

import torch

from flower_graph import models
from flower_graph.data.graph import to_undirected
from flower_graph.outputs.modules import GCN

SAME = {
    "conv1.lin.weight": "first.weight",
    "conv1.bias": "first.bias",
    "conv2.lin.weight": "second.weight",
    "conv2.bias": "second.bias",
}


def test_a_gcn_is_the_engines() -> None:
    torch.manual_seed(0)
    x, edges = torch.rand(9, 5), to_undirected(torch.randint(0, 8, (2, 12)), 9)  # 8 is isolated
    engine, plain = models.GCN(5, 4, 3).eval(), GCN(5, 4, 3).eval()
    torch.nn.init.normal_(engine.first.bias)
    state = engine.state_dict()
    plain.load_state_dict({name: state[other] for name, other in SAME.items()})
    torch.testing.assert_close(plain(x, edges), engine(x, edges), atol=1e-6, rtol=1e-5)
