"""What PPFL-GNN's clients leave: judges' predictions, plain modules, embeddings, figures."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict

from flower_graph.data.graph import OverlappingGraph
from flower_graph.method.load import load_config
from flower_graph.outputs.client import BEGIN, FINISH, ClientOutputs, KeepRequest
from flower_graph.outputs.files import (
    Embeddings,
    read_models,
)
from flower_graph.strategies.ppfl.cohort_client import PublicNodeClient
from flower_graph.strategies.ppfl.messages import PublicRequest
from flower_graph.strategies.ppfl.method import make_member

RUN, WIDTH, CLASSES = "0" * 32, 4, 3
SETTINGS = ["judge.folds=2", "judge.mlp=false", f"model.dimension={WIDTH}", "rounds=2"]


def graph_of(client: int, nodes: int = 36) -> OverlappingGraph:
    """Draw a graph: half its nodes are public, a third each trains, validates and tests."""
    draw = torch.Generator().manual_seed(client)
    upper = (torch.rand(nodes, nodes, generator=draw) < 0.2).triu(1)
    place = torch.arange(nodes)
    y, role = (place // 3) % CLASSES, place % 3
    y[5] = role[5] = -1  # without a label, and in no part
    ids = torch.where(place < 18, place, 1000 * (client + 1) + place)
    called = tuple(f"p{number}" for number in ids.tolist())
    masks = [role == number for number in range(3)]
    held = ids, torch.ones(nodes, 1), y, (upper | upper.T).nonzero().T, None, *masks, called
    return OverlappingGraph(client, *held, public=place < 18, train_y=y)


def test_embeddings_lie_beside_predictions_and_a_deepwalk_has_no_module(tmp_path: Path) -> None:
    config: Any = load_config("ppfl/cora-linqs-deepwalk", SETTINGS)
    graphs = [graph_of(0), graph_of(1)]
    members = [make_member(graph, config, CLASSES, ["a", "b", "c"]) for graph in graphs]
    context = Context(1, 2, {}, RecordDict(), {})
    host = PublicNodeClient(context, members, outputs=ClientOutputs(context, tmp_path))
    host.outputs.keep(KeepRequest(RUN, 0, 0, BEGIN), host.snapshot)
    nodes = [member.public for member in members]
    host.round(PublicRequest(1, [0, 1], nodes, [None, None], WIDTH))
    host.outputs.keep(KeepRequest(RUN, 1, 1, FINISH), host.snapshot)
    folder = tmp_path / "clients" / "0"
    found = Embeddings.read(folder)
    assert found is not None and read_models(folder) == []
    for graph in graphs:
        own = found.of_client(graph.client)
        assert own.node.tolist() == list(graph.called or ())
        assert own.number.tolist() == graph.nodes.tolist()
        assert own.public.tolist() == graph.public.tolist()
        assert own.embeddings.shape == (36, WIDTH) and own.embeddings.dtype == np.float32
