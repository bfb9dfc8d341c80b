"""FedGCN: sums by hand, the GCN of the whole graph, and what goes wrong before the first round."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import METHODS, Done, at
from torch import Tensor

import flower_graph as fg
from flower_graph.apps.cli.audit import audit_run
from flower_graph.audit.attacks import guess_variance
from flower_graph.config.common import RunConfig
from flower_graph.data.graph import ClientGraph, Graph, cut_out
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError
from flower_graph.method.registry import method_of
from flower_graph.models import GCN
from flower_graph.ops.graph import gcn_adjacency, propagate
from flower_graph.strategies import fedgcn
from flower_graph.strategies.fedgcn import Near, own_parts

SETUP = METHODS["fedgcn"].with_("partition.method=random", "strategy.timeout=2")
# The path 0 - 1 - 2 - 3 with a triangle 0 - 1 - 2: client 0 has 0 and 1, client 1 has 2 and 3.
EDGES = torch.tensor([[0, 1, 1, 2, 0, 2, 2, 3], [1, 0, 2, 1, 2, 0, 3, 2]])
X = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 4.0], [3.0, 3.0]])
WHOLE = Graph(X, EDGES, torch.tensor([0, 1, 0, 1]), 2)
TWO = cut_out(WHOLE, [torch.tensor([0, 1]), torch.tensor([2, 3])], keeps_cut=True)
STEP = 2.0**-14


def test_two_clients_by_hand() -> None:
    """Degrees with the self-loop: 3, 3, 4, 2."""
    one, other = (Near.of(graph, 2) for graph in TWO)
    assert (one.n, one.foreign.tolist(), one.touched.tolist()) == (2, [2], [0, 1, 2])
    assert (other.foreign.tolist(), other.ends.tolist()) == ([0, 1], [0])
    root = 3**0.5
    both = [3 / root, 1 / root, 2.0]  # of nodes 0 and 1, which are each other's neighbours
    torch.testing.assert_close(own_parts(TWO[0].x, one), torch.tensor([both] * 3))
    near_2, end = [0 + 3 / 2**0.5, 2 + 3 / 2**0.5, 2.0], [0.0, 2.0, 1.0]
    found = own_parts(TWO[1].x, other)
    torch.testing.assert_close(found, torch.tensor([near_2, near_2, end, end]))
    sums = torch.tensor(both) + torch.tensor(end)  # of node 0, and of node 1
    wanted = propagate(gcn_adjacency(EDGES, 4), X)
    torch.testing.assert_close(fedgcn.first_layer_rows(sums[None])[0], wanted[0])
    torch.testing.assert_close(wanted[0], wanted[1])


def whole_rows(graphs: list[ClientGraph], x: Tensor) -> Tensor:
    """Add up all clients' parts in the clear, ``[N, f + 1]``."""
    total = torch.zeros(len(x), x.shape[1] + 1)
    for graph in graphs:
        near = Near.of(graph, 2)
        total.index_add_(0, torch.cat([graph.nodes, near.foreign]), own_parts(graph.x, near))
    return total


def held(done: Done) -> dict[int, tuple[Tensor, list[int]]]:
    """Return the sums that each SuperNode holds, and whether its clients are in them."""
    kept = {}
    for context in done.grid.contexts.values():
        tensors: Any = vars(context)["live"].held[1]
        number = int(context.node_config["partition-id"])
        kept[number] = tensors["sums"], tensors["in-sum"].tolist()
    return kept


def graphs_of(config: RunConfig) -> tuple[list[ClientGraph], Any]:
    method: Any = method_of(config)
    return method.graphs(config), cached_data(config)


@pytest.mark.parametrize("hops", [1, 2])
def test_sums_are_the_plain_ones_and_the_model_the_whole_graphs(hops: int, tmp_path: Path) -> None:
    done = SETUP.run(tmp_path / "run", f"strategy.hops={hops}", "rounds=2", state_dir=None)
    graphs, whole = graphs_of(SETUP.load(f"strategy.hops={hops}"))
    x = whole.x.to_dense()
    plain, left = whole_rows(graphs, x), fg.load_run(done.out)
    assert plain[:, -1].tolist() == (1 + torch.bincount(whole.edge_index[0])).tolist()
    for number, (sums, in_sum) in held(done).items():
        near = Near.of(graph := graphs[number], hops)
        nodes = torch.cat([graph.nodes, near.foreign])[near.wanted]
        assert in_sum == [1]
        torch.testing.assert_close(sums, plain[nodes], rtol=0, atol=len(graphs) * STEP / 2)
        model: Any = left.model(number)
        assert type(model) is GCN
        with torch.no_grad():
            first = propagate(gcn_adjacency(whole.edge_index, len(x)), x) @ model.first.weight.T
            hidden = (first + model.first.bias).relu()
            if hops == 1:  # the second aggregation knows the client's edges alone
                logits = model.classify(hidden[graph.nodes], graph.edges)
            else:
                logits = model(x, whole.edge_index)[graph.nodes]
        found = left.predictions(number)
        wanted = logits.softmax(1).amax(1).numpy()
        np.testing.assert_allclose(found.probability, wanted, atol=2e-3)
    bytes_ = done.reports[-1].bytes
    assert bytes_["up"]["sums"] == 4 * len(graphs) * done.result["neighbour-sums"]["nodes"] * 25


def test_without_hops_it_is_fedavg(tmp_path: Path) -> None:
    how = ("partition.method=random", "strategy.local_epochs=3", "strategy.weight_decay=0")
    done = SETUP.run(tmp_path / "fedgcn", "strategy.hops=0", *how, "model.dropout=0")
    other = METHODS["fedavg"].run(tmp_path / "fedavg", *how, "model.dropout=0")
    assert done.figures == pytest.approx(other.figures, abs=1e-5, nan_ok=True)
    assert done.grid.kinds.isdisjoint(("train.neighbours", "train.sums", "train.share_key"))


def test_what_too_few_touch_is_not_added_up(tmp_path: Path) -> None:
    done = SETUP.run(tmp_path, "strategy.least_holders=3", "rounds=1")
    graphs, whole = graphs_of(SETUP.load())
    near = [Near.of(graph, 2) for graph in graphs]
    touched = [
        torch.cat([g.nodes, one.foreign])[one.touched] for g, one in zip(graphs, near, strict=True)
    ]
    holders = torch.bincount(torch.cat(touched), minlength=whole.num_nodes)
    told = done.result["neighbour-sums"]
    assert told == {
        "nodes": int((holders > 2).sum()),
        "touched-by-too-few": int((holders == 2).sum()),
    }
    assert min(told.values()) > 0
    for number, (sums, _) in held(done).items():
        assert (~sums[:, 0].isnan()).tolist() == (holders[touched[number]] > 2).tolist()


def test_a_sum_of_which_one_is_missing_is_made_before_the_next_round(tmp_path: Path) -> None:
    done = SETUP.run(tmp_path, faults=at("lost", [1], "train.neighbours"))
    assert [report.rejected != [] for report in done.reports] == [True, False, False]
    assert all(in_sum == [1] for _, in_sum in held(done).values())
    assert not any(report.skipped for report in done.reports)


def test_who_stops_two_sums_is_in_none_and_adds_its_own_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = SETUP.run(tmp_path, "rounds=4", faults=at("error", None, "train.neighbours"))
    graphs, whole = graphs_of(SETUP.load())
    assert {n: in_sum for n, (_, in_sum) in held(done).items()} == {0: [1], 1: [0], 2: [1], 3: [1]}
    plain = whole_rows([graph for graph in graphs if graph.client != 1], whole.x.to_dense())
    for number, (sums, _) in held(done).items():
        near = Near.of(graph := graphs[number], 2)
        nodes = torch.cat([graph.nodes, near.foreign])[near.touched]
        has = ~sums[:, 0].isnan()
        torch.testing.assert_close(sums[has], plain[nodes][has], rtol=0, atol=2 * STEP)
    # What client 1 trains on has its own part too: with it the sums are those of all
    context = next(c for c in done.grid.contexts.values() if c.node_config["partition-id"] == 1)
    client: Any = method_of(SETUP.load()).build_client(SETUP.load(), context, None)
    near, placed = Near.of(graphs[1], 2), client._state.look().graphs[1]
    sums = whole_rows(graphs, whole.x.to_dense())[torch.cat([graphs[1].nodes, near.foreign])]
    own = torch.arange(near.n)
    wanted = fedgcn.first_layer_rows(sums)[own]
    known = ~held(done)[1][0][:, 0].isnan()
    places = near.touched[known]
    places = places[places < near.n]
    torch.testing.assert_close(placed.x[places], wanted[places], rtol=0, atol=4 * STEP)


def test_a_neighbours_client_reads_features_and_the_server_reads_none() -> None:
    wide = ("data.num_features=60", "data.nodes=60", "rounds=2")
    (client, server), _ = audit_run(SETUP.load(*wide))
    assert client.success > 0.85
    assert abs(server.success - 0.5) < 4 * guess_variance(server) ** 0.5


def test_numbers_beyond_the_limit_leave_a_client_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(x: Tensor, near: Near) -> Tensor:
        return own_parts(x, near) * (1000 if near.n == largest else 1)

    sizes = [graph.y.numel() for graph in graphs_of(SETUP.load("seed=5"))[0]]
    largest = max(sizes)
    monkeypatch.setattr(fedgcn, "own_parts", too_large)
    done = SETUP.run(tmp_path, "seed=5", "rounds=4")
    assert [in_sum for _, (_, in_sum) in sorted(held(done).items())] == [
        [int(size < largest)] for size in sizes
    ]


REFUSED = (
    "strategy.hops=3", "strategy.least_holders=1", "partition.method=overlapping", "task=links",
    "partition.every_node=false", "privacy.epsilon=8", "model.name=gat",
)  # fmt: skip


@pytest.mark.parametrize("word", REFUSED)
def test_impossible_settings_are_refused_by_their_key(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        SETUP.with_("partition.method=louvain").load(word)
    key = {"partition.every_node": "partition.method"}.get(
        word.partition("=")[0], word.partition("=")[0]
    )
    assert error.value.key == key
