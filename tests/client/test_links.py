"""Clients that learn links: what they pass messages over, and what they are measured by."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from flower_graph.client.learner import GraphOnDevice, LinkTask, asked
from flower_graph.data.graph import ClientGraph
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import load_config
from flower_graph.models import GCN
from flower_graph.ops.links import both_directions, undirected
from flower_graph.records.rounds import RoundReport


def graph(n: int = 80, seed: int = 0, client: int = 3) -> ClientGraph:
    rng = torch.Generator().manual_seed(seed)
    pairs = torch.randint(n, (2, 5 * n), generator=rng)
    edges = both_directions(pairs[:, pairs[0] != pairs[1]]).unique(dim=1)
    mask = torch.ones(n) > 0
    x, y = torch.randn(n, 8, generator=rng), torch.zeros(n, dtype=torch.int64)
    return ClientGraph(client, torch.arange(n), x, y, edges, None, mask, ~mask, ~mask)


def test_a_network_never_passes_over_an_edge_that_it_is_judged_by() -> None:
    """Messages go from each node to its neighbours' rows: rows of ones count who is passed over."""
    task, local = LinkTask(0.1, 0.2, seed=1), graph()
    placed, n = task.place(local, torch.device("cpu")), 80
    seen: list[set[int]] = []

    def forward(given: GraphOnDevice) -> Tensor:
        seen.append(set(undirected(given.edge_index, n).tolist()))
        return given.x

    judged = task.judge(forward, placed)
    assert placed.links is not None
    numbers = placed.links.pairs[0] * n + placed.links.pairs[1]
    edges = {
        role: set(numbers[judged.masks[role] & placed.links.is_edge].tolist())
        for role in ("train", "val", "test")
    }
    early, late = seen
    assert early == edges["train"] and late == edges["train"] | edges["val"]
    assert not late & edges["test"] and edges["val"] and edges["test"]
    assert set(undirected(placed.edge_index, n).tolist()) == early  # while it trains
    assert set().union(*edges.values()) == set(undirected(local.edge_index, n).tolist())  # type: ignore[arg-type]
    assert not any(mask.any() for mask in placed.masks.values()) and bool((placed.y < 0).all())


def test_metrics_are_scikit_learns_of_all_clients_pairs() -> None:
    task = LinkTask(seed=2)
    locals_ = [graph(80, 0, 0), graph(50, 1, 1)]
    placed = [task.place(one, torch.device("cpu")) for one in locals_]
    judged = [task.judge(lambda g: g.x, one) for one in placed]
    report = RoundReport(1, 0, 0, 0, 0, 0, 0, 2, 2)
    report.note_counts(task.count_all(judged, "ranks"), ("auc", "ap", "hits@20", "hits@50", "mrr"))
    for role in ("val", "test"):
        rows = [(one.logits[m][:, 1], one.y[m]) for one in judged for m in [one.masks[role]]]
        score, truth = (torch.cat(column).numpy() for column in zip(*rows, strict=True))
        assert report.score("auc", role) == pytest.approx(roc_auc_score(truth, score), abs=0.002)
        precise = average_precision_score(truth, score)
        assert report.score("ap", role) == pytest.approx(precise, abs=0.002)
        # Each edge among its own client's pairs
        ranks = np.concatenate(
            [1 + (s[y == 0][None] > s[y == 1][:, None]).sum(1).numpy() for s, y in rows]
        )
        assert report.score("mrr", role) == pytest.approx((1 / ranks).mean(), abs=1e-5)
    loss, *_ = task.measure(judged[0])[0].tolist()
    assert loss > 0


def test_a_client_without_edges_is_named() -> None:
    bare = graph()
    lacking = ClientGraph(**{**vars(bare), "edge_index": torch.zeros(2, 0, dtype=torch.int64)})
    with pytest.raises(DataError, match="client 3"):
        LinkTask().place(lacking, torch.device("cpu"))


def test_a_module_that_takes_no_pairs_has_no_mlp() -> None:
    task, local = LinkTask(decoder="mlp"), graph()
    placed = task.place(local, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^links.decoder"):
        task.judge(lambda g: torch.ones(1) * len(asked(GCN(8, 4, 4), g)), placed)


def test_impossible_links_are_refused() -> None:
    overlapping, all_held_out = "partition.method=metis-overlapping", "links.val=0.5 links.test=0.5"
    for words in (overlapping, "metrics=[macro-f1]", all_held_out, "task=graphs"):
        key = words.split()[-1].partition("=")[0]
        with pytest.raises(ConfigError, match=rf"^{key}"):
            load_config("fedavg/cora", ["task=links", *words.split()])
    with pytest.raises(ConfigError, match=r"^metrics"):
        load_config("fedavg/cora", ["metrics=[mrr]"])
    with pytest.raises(ConfigError, match=r"^task"):
        load_config("fedproto/cora", ["task=links"])
