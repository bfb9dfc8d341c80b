"""What PPFL-GNN's clients leave: judges' predictions, plain modules, embeddings, figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.method.load import load_config
from flower_graph.outputs.client import BEGIN, FINISH, KeepRequest
from flower_graph.outputs.files import (
    Embeddings,
    Predictions,
    SavedModels,
    read_models,
)
from flower_graph.strategies.ppfl.cohort_client import PublicNodeClient
from flower_graph.strategies.ppfl.evaluation import GraphJudge
from flower_graph.strategies.ppfl.gat import PublicGAT
from flower_graph.strategies.ppfl.messages import PublicReply, PublicRequest
from flower_graph.strategies.ppfl.method import make_member

RUN, WIDTH, CLASSES = "0" * 32, 4, 3
SETTINGS = ["judge.folds=2", "judge.mlp=false", f"model.dimension={WIDTH}", "gat.epochs=2"]


def graph_of(client: int, nodes: int = 36) -> OverlappingGraph:
    """Draw a graph: half its nodes are public, a third each trains, validates and tests."""
    draw = torch.Generator().manual_seed(client)
    x = (torch.rand(nodes, 7, generator=draw) < 0.4).float()
    x[:, client] = 0  # a feature that the client never sees
    upper = (torch.rand(nodes, nodes, generator=draw) < 0.2).triu(1)
    place = torch.arange(nodes)
    y = (place // 3) % CLASSES
    role = place % 3
    y[5] = role[5] = -1  # without a label, and in no part
    ids = torch.where(place < 18, place, 1000 * (client + 1) + place)
    called = tuple(f"p{number}" for number in ids.tolist())
    edges = (upper | upper.T).nonzero().T
    masks = [role == number for number in range(3)]
    return OverlappingGraph(client, ids, place < 18, x, y, y, edges, *masks, called)


def config_of(model: str) -> Any:
    return load_config("ppfl/cora-linqs-gat", [f"model.name={model}", *SETTINGS])


def host_of(
    model: str, out: Path | None, state: RecordDict, *, every: int = 1
) -> tuple[PublicNodeClient, list[OverlappingGraph]]:
    config, graphs = config_of(model), [graph_of(0), graph_of(1)]
    config.judge.every = every
    members = [make_member(graph, config, CLASSES, ["a", "b", "c"]) for graph in graphs]
    context = Context(1, 2, {}, state, {})
    return PublicNodeClient(context, members, output_dir=out), graphs


def ask(host: PublicNodeClient, number: int) -> PublicReply:
    nodes = [member.public for member in host.members.values()]
    return host.round(PublicRequest(number, [*host.members], nodes, [None, None], WIDTH))


def keep(host: PublicNodeClient, action: str, server_round: int) -> str:
    request = KeepRequest(RUN, server_round, server_round, action)
    return host.outputs.keep(request, host.snapshot)


def left(model: str, out: Path) -> tuple[PublicReply, list[OverlappingGraph], Path]:
    """Answer two rounds, each in a process of its own as far as memory goes."""
    state = RecordDict()
    host, graphs = host_of(model, out, state)
    keep(host, BEGIN, 0)
    for number in (1, 2):
        reply = ask(host_of(model, out, state)[0], number)
    keep(host_of(model, out, state)[0], FINISH, 2)
    return reply, graphs, out / "clients" / "0"


def test_who_asks_for_a_snapshot_does_not_judge_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    real = GraphJudge.judge

    def judge(self: GraphJudge, embeddings: Any, *more: Any) -> Any:
        asked.extend([len(embeddings)] if more != ((),) else [])
        return real(self, embeddings, *more)

    monkeypatch.setattr(GraphJudge, "judge", judge)
    left("deepwalk", tmp_path / "one")
    assert len(asked) == 2 * 2, "two clients in two rounds, and nobody at the end"
    asked.clear()
    state = RecordDict()
    host, _ = host_of("deepwalk", tmp_path / "other", state, every=5)
    keep(host, BEGIN, 0)
    reply = ask(host, 1)  # nobody judges in this round
    assert not reply.judged
    keep(host, FINISH, 1)
    assert len(asked) == 2
    assert Predictions.read(tmp_path / "other" / "clients" / "0") is not None


def test_embeddings_lie_beside_predictions_and_a_deepwalk_has_no_module(tmp_path: Path) -> None:
    _, graphs, folder = left("deepwalk", tmp_path)
    found = Embeddings.read(folder)
    assert found is not None and read_models(folder) == []
    for graph in graphs:
        own = found.of_client(graph.client)
        assert own.node.tolist() == list(graph.called or ())
        assert own.number.tolist() == graph.nodes.tolist()
        assert own.public.tolist() == graph.public.tolist()
        assert own.embeddings.shape == (36, WIDTH) and own.embeddings.dtype == np.float32


def test_models_of_one_form_are_put_together() -> None:
    config = config_of("gat")
    one, two, other = (
        PublicGAT(
            replace(graph_of(number), x=graph_of(number).x[:, :width]), config, CLASSES
        ).saved()
        for number, width in ((0, 7), (1, 7), (2, 6))
    )
    joined = SavedModels.join([one, two, other])
    assert [each.clients for each in joined] == [[0, 1], [2]]
    for each in (one, two):
        (client,) = each.clients
        for name, value in each.state_dict(client).items():
            assert torch.equal(joined[0].state_dict(client)[name], value)
