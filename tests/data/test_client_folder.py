"""Clients of the user's own: one, from a folder of graphs, or from one graph of all clients."""

from __future__ import annotations

import logging
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_helpers import RATIOS, mask, roles, tables
from torch import Tensor
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig
from flower_graph.data.folders.client_folder import (
    client_graphs,
    clients_path,
    ego_from_data,
    load_ego_folder,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.partition.statistics import ego_statistics
from flower_graph.data.sources.datasets import saved_at
from flower_graph.errors import DataError

LATE = [0.0, 0.0, 1.0]  # all nodes are judged: what a test needs that is not about roles
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


def graph(*ids: int, **changes: Any) -> dict[str, Any]:
    """Give a path over some nodes; a node's label and features follow its id."""
    n_id, path = torch.tensor(ids), torch.arange(len(ids) - 1)
    given = {
        "x": torch.stack([n_id, n_id % 2], 1).float(),
        "y": n_id % 3,
        "edge_index": torch.stack([path, path + 1]),
        "n_id": n_id,
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


def saved(folder: Path, *clients: dict[str, Any]) -> Path:
    """Save a folder of clients, as a, b and so on."""
    folder.mkdir(exist_ok=True)
    for name, content in zip("abc", clients, strict=False):
        torch.save(Data(**content) if name == "a" else content, folder / f"{name}.pt")
    return folder


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def words(*ids: int) -> list[str]:
    return [f"person {i}" for i in ids]


def load_egos(folder: Path, split: str = "per-client") -> Any:
    return load_ego_folder(folder, split, RATIOS, 0)


def load_shared(folder: Path, ratios: Any = LATE, seed: int = 0) -> list[Any]:
    return load_overlapping_folder(folder, ratios, seed)


def public(client: Any) -> list[int]:
    return client.nodes[client.public].tolist()


def role_of(client: Any) -> dict[int, int]:
    """Give the role of each node that has one."""
    return {node: role for role, nodes in enumerate(roles(client)) for node in nodes}


# Graphs of their own ------------------------------------------------------------------------------


def test_files_become_clients_with_their_masks_or_drawn_ones(tmp_path):
    y, masks = torch.tensor([0, 1, 0, 1, 0, -1]), {"train_mask": mask(0, 1), "test_mask": mask(4)}
    own = {"x": torch.arange(12).reshape(6, 2), "y": y, "n_id": None}
    loop = {"edge_index": torch.tensor([[1, 2], [0, 2]])}  # 0 - 1, given once, and a self-loop
    first = graph(*range(6), **own, **masks)
    folder = saved(tmp_path / "c", first | {"edge_index": None}, graph(*range(6), **own, **loop))
    torch.save({**graph(*range(6), **own), "edge_index": None}, folder / "c.pt")
    (folder / "README.txt").write_text("not a client", encoding="utf-8")
    clients = first, second, third = load_folder(folder, RATIOS, seed=0)
    assert [one.client for one in clients] == [0, 1, 2]
    assert [one.is_graphless for one in clients] == [True, False, True]
    assert second.edge_index is not None and second.edge_index.tolist() == [[0, 1], [1, 0]]
    assert first.hidden_edges is None and second.nodes.tolist() == list(range(6))
    assert second.x.dtype == torch.float32 and second.x[1].tolist() == [2.0, 3.0]
    assert roles(first) == [[0, 1], [], [4]]
    for drawn in (second, third):
        found = torch.stack([drawn.train_mask, drawn.val_mask, drawn.test_mask])
        assert found.sum(1).tolist() == [3, 1, 1] and found.sum(0).tolist() == [1] * 5 + [0]
    draws = [load_folder(folder, RATIOS, seed)[1].train_mask.tolist() for seed in range(6)]
    assert draws[0] == second.train_mask.tolist() and any(draw != draws[0] for draw in draws)
    assert load_folder(folder, RATIOS, 0, features="row")[1].x[1].tolist() == pytest.approx(
        [0.4, 0.6]
    )


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"n_id": None}, "n_id"),
    ({"n_id": torch.tensor([1, 1, 2])}, "1 identities"),
    ({"n_id": torch.tensor([1, 2])}, "2 identities.*3"),
    ({"n_id": torch.tensor([0.5, 1.0, 2.0])}, "float"),
    ({"n_id": 3}, "n_id"),
    ({"identity": ["a", "b", "c"]}, r"identities.*a\.pt"),
    ({"identity": "abc"}, "identity"),
    ({"names": 0.5}, "names"),
    ({"x": torch.ones(3, 5)}, r"x .*5.*a\.pt"),
    ({"x": torch.tensor(5.0)}, "x "),
    ({"num_classes": "two"}, "num_classes.*'two'"),
    ({"edge_index": None}, "edge_index"),
    ({"train_mask": flags(1, 1)}, r"train_mask is torch.bool \[2\]"),
]
UNSHARED: list[tuple[dict[str, Any], str]] = [
    ({"n_id": torch.tensor([1, -2, 3])}, "-2"),
    ({"n_id": torch.tensor([6, 7, 8])}, "public"),
    ({"public": flags(1, 0)}, r"public is torch.bool \[2\]"),
    ({"public": flags(0, 0, 0)}, "public"),
    ({"val_mask": flags(1, 1, 0)}, "for training"),
    ({"y": torch.full((3,), -1)}, "3 nodes"),
]
LOADERS: dict[str, tuple[Callable[[Path], Any], list[tuple[dict[str, Any], str]]]] = {
    "graphs": (lambda path: load_folder(path, RATIOS, 0), []),
    "egos": (load_egos, UNFIT),
    "shared": (lambda path: load_shared(path, [1, 0, 0]), UNFIT + UNSHARED),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_unfit_folders_and_clients_are_refused_by_name(loader, tmp_path):
    read, unfit = LOADERS[loader]
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match=r"data\.name"):
            read(folder)
    whole, folder = graph(1, 2, 3), tmp_path / "c"
    for changes, said in unfit:
        saved(folder, whole, graph(1, 2, 3, **changes), whole)
        with pytest.raises(DataError, match=rf"b\.pt: .*{said}"):
            read(folder)
    saved(folder, whole)
    (folder / "b.pt").write_bytes(pickle.dumps(whole, protocol=2)[:40])
    with pytest.raises(DataError, match=r"b\.pt"):
        read(folder)


# Identities ---------------------------------------------------------------------------------------


def test_an_ego_network_by_hand():
    masks = {"train_mask": flags(1, 0, 0), "test_mask": flags(0, 0, 1)}
    data = Data(**graph(1, 2, 3, y=torch.tensor([1, -1, 0]), edge_index=torch.tensor([[1, 1, 2],
                [0, 0, 2]]), **masks))  # fmt: skip
    ego = ego_from_data(7, data, torch.tensor([30, 10, 20]))
    assert (ego.client, ego.nodes.tolist(), ego.names) == (7, [30, 10, 20], None)
    assert ego.identities == [30, 10, 20] and ego.edge_index.tolist() == [[0, 1], [1, 0]]
    assert ego.x.dtype == torch.float32 and ego.x.tolist() == [[1, 1], [2, 0], [3, 1]]
    assert ego.y.tolist() == [1, -1, 0] and roles(ego) == [[30], [], [20]]
    named = ego_from_data(0, data, ["b", "c", "a"])
    assert named.identities == ("b", "c", "a") and named.nodes.tolist() == [0, 1, 2]
    # The error travels to the server as the reason for which a SuperNode failed.
    with pytest.raises(DataError, match=r"^client 7: 1") as caught:
        ego_from_data(7, data, ["secret", "secret", "c"])
    assert "secret" not in str(caught.value)
    with pytest.raises(DataError, match=r"^client 7: .*int, str"):
        ego_from_data(7, data, [1, "b", 3])


@pytest.mark.parametrize("read", [load_egos, load_shared])
def test_identities_may_be_numbers_and_go_before_n_id(read, tmp_path):
    other = {"n_id": torch.tensor([90, 80, 70])}
    first = graph(1, 2, 3, identity=torch.tensor([5, 6, 7]), **other)
    folder = saved(tmp_path / "c", first, graph(7, 6, 9, identity=[7, 6, 9], **other))
    assert [sorted(one.nodes.tolist()) for one in read(folder)] == [[5, 6, 7], [6, 7, 9]]


def test_ego_networks_have_their_masks_or_drawn_ones(tmp_path):
    own = graph(7, 3, 9, train_mask=flags(1, 0, 0), test_mask=flags(0, 0, 1))
    a, b = load_egos(saved(tmp_path / "c", own, graph(*range(3, 13))))
    assert (a.client, a.ego, a.identities, b.identities) == (0, 7, [7, 3, 9], [*range(3, 13)])
    assert a.x.tolist() == [[7, 1], [3, 1], [9, 1]] and a.y.tolist() == [1, 0, 0]
    assert a.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]] and roles(a) == [[7], [], [9]]
    drawn = torch.stack([b.train_mask, b.val_mask, b.test_mask])
    assert drawn.sum(1).tolist() == [6, 2, 2] and drawn.sum(0).tolist() == [1] * 10
    assert torch.equal(load_egos(tmp_path / "c")[1].train_mask, b.train_mask)


def test_globally_a_node_has_one_role_and_two_are_refused(tmp_path):
    names = {"identity": words(*range(12)), "n_id": None}
    turned = {"identity": words(*range(18, 6, -1)), "n_id": None}
    folder = saved(tmp_path / "c", graph(*range(12), **names), graph(*range(12), **turned))
    egos = load_egos(folder, "global")
    found = {}
    for ego in egos:
        role = torch.stack([ego.train_mask, ego.val_mask, ego.test_mask]).int().argmax(0)
        for who, what in zip(ego.identities, role.tolist(), strict=True):
            found.setdefault(who, set()).add(what)
    assert len(found) == 19 and all(len(each) == 1 for each in found.values())
    figures = ego_statistics(egos).figures
    assert (figures["nodes"], figures["shared-share"]) == (19, 5 / 19)
    train = torch.eye(12, dtype=torch.bool)
    first = graph(*range(12), **names, train_mask=train[8])
    saved(folder, first, graph(*range(12), **turned, test_mask=train[10]))
    with pytest.raises(DataError, match=r"b\.pt.*'person 8'"):
        load_egos(folder, "global")
    assert len(load_egos(folder)) == 2


def test_clients_without_common_nodes_or_kinds_of_labels_are_warned_of(tmp_path, caplog):
    load_egos(saved(tmp_path / "c", graph(1, 2), graph(3, 4)))
    load_egos(saved(tmp_path / "d", graph(1, 2), graph(2, 4)))
    egos = load_egos(saved(tmp_path / "e", graph(1, 2), graph(2, 4, y=["cat", "1"])))
    shared, labels = (one.getMessage() for one in caplog.records)
    assert "shared" in shared and "labels" in labels and egos.classes == ("1", "2", "cat")


# Clients that share nodes -------------------------------------------------------------------------


def test_nodes_of_several_clients_are_public_in_the_order_of_their_ids(tmp_path):
    first, second = load_shared(saved(tmp_path, graph(30, 10**15), graph(70, 90, 30)))
    assert (first.client, second.client) == (0, 1)
    assert (first.nodes.tolist(), second.nodes.tolist()) == ([30, 10**15], [30, 70, 90])
    # The path 70 - 90 - 30, both ways, by place.
    assert second.edge_index.tolist() == [[0, 1, 2, 2], [2, 2, 0, 1]]
    assert second.x[:, 0].tolist() == [30, 70, 90]
    assert second.y.tolist() == second.train_y.tolist() == [0, 1, 0]
    assert public(first) == public(second) == [30]
    graphs = load_shared(saved(tmp_path, graph(1, 2, 3, 4), graph(4, 5, 1), graph(5, 6, 7)))
    assert [public(one) for one in graphs] == [[1, 4], [1, 4, 5], [5]]
    # What a client holds back is not public elsewhere.
    mine = graph(1, 2, 3, 9, public=flags(0, 1, 1, 1))
    graphs = load_shared(saved(tmp_path, mine, graph(1, 2, 4), graph(3, 4)))
    # Its own word counts at the first client, for 9 too, which nobody else has.
    assert [public(one) for one in graphs] == [[2, 3, 9], [2, 4], [3, 4]]
    bare = graph(1, 2, edge_index=NO_EDGES)
    folder = saved(tmp_path / "bare", bare, graph(1, 2))
    assert load_shared(folder)[0].edge_index.shape == (2, 0)
    with pytest.raises(DataError, match="edge"):  # of none at all
        load_shared(saved(folder, bare, bare))


def test_a_drawn_role_is_the_same_everywhere(tmp_path):
    def both(*ids):
        return graph(*ids, y=torch.tensor(ids) % 2)

    saved(tmp_path, both(*range(40)), both(*range(20, 60)))
    draws = [load_shared(tmp_path, RATIOS, seed) for seed in (0, 0, 1)]
    first, second = map(role_of, draws[0])
    assert all(first[node] == second[node] for node in range(20, 40))
    merged = first | second
    assert sorted(merged) == list(range(60))
    for parity in (0, 1):  # each class has its shares
        mine = [role for node, role in merged.items() if node % 2 == parity]
        assert [mine.count(role) for role in range(3)] == [18, 6, 6]
    assert role_of(draws[1][0]) == first != role_of(draws[2][0])


def test_masks_go_before_a_draw_and_two_roles_are_refused(tmp_path):
    masks = {"train_mask": flags(0, 0, 1, 1), "test_mask": flags(1, 0, 0, 0)}
    unlabelled = torch.tensor([0, -1, 1, 1, 0, 1])
    saved(tmp_path, graph(5, 6, 3, 4, **masks), graph(5, 6, 3, 1, 2, 0, y=unlabelled))
    first, second = load_shared(tmp_path, [0.5, 0.5, 0])
    assert role_of(first) == {5: 2, 3: 0, 4: 0}
    drawn = role_of(second)
    # 6 has no role in the masks and no label here; 2, the only one of class 0, trains.
    assert set(drawn) == {5, 3, 1, 2, 0} and (drawn[5], drawn[3]) == (2, 0)
    assert {drawn[1], drawn[0]} == {0, 1}
    other = graph(2, 3, 1, train_mask=flags(0, 1, 0), test_mask=flags(0, 0, 1))
    saved(tmp_path, graph(1, 2, 3, train_mask=flags(1, 1, 0)), other)
    with pytest.raises(DataError, match=r"b\.pt: node 1"):
        load_shared(tmp_path, RATIOS)


# One graph for all clients ------------------------------------------------------------------------

EDGES = "source,target\nb1,b2\nb2,b3\nz1,z2\nz3,z2\nb1,z1\nn1,b1\n"


NODES = """\
name,client,identity,label,age
b1,bern,anna,cat,1
z1,zug,anna,cat,2
b2,bern,bert,dog,3
z2,zug,cora,dog,4
n1,,dora,dog,5
b3,bern,emil,cat,6
z3,zug,bert,dog,7
"""


def test_one_graph_is_cut_into_the_clients_that_its_nodes_name(tmp_path, caplog):
    one = tables(tmp_path / "people", NODES, EDGES)
    assert clients_path(DataConfig(str(one))) == one
    with caplog.at_level(logging.INFO, "flower_graph.data"):
        bern, zug = load_egos(one)
    assert (bern.identities, zug.identities) == (("anna", "bert", "emil"), ("anna", "cora", "bert"))
    assert (bern.x.tolist(), zug.x.tolist()) == ([[1], [3], [6]], [[2], [4], [7]])
    assert (bern.y.tolist(), zug.y.tolist()) == ([0, 1, 0], [0, 1, 1])
    assert bern.edge_index.tolist() == zug.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    for said in ("2 edges between clients left out", "1 nodes without a client left out"):
        assert f"file {one}: {said}" in caplog.text
    clients = load_folder(one, [1 / 3, 1 / 3, 1 / 3], 0)
    assert [client.y.tolist() for client in clients] == [[0, 1, 0], [0, 1, 1]]
    # anna, bert, cora, emil: dora is no client's
    a, b = load_shared(one)
    assert (a.nodes.tolist(), b.nodes.tolist()) == ([0, 1, 3], [0, 1, 2])
    assert a.public.tolist() == b.public.tolist() == [True, True, False]
    assert b.x.tolist() == [[2], [7], [4]] and b.edge_index.tolist() == [[0, 1, 2, 2], [2, 2, 0, 1]]
    lines = [re.sub("bern|zug", "", line) for line in NODES.splitlines()]
    (one / "nodes.csv").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"people.*client"):
        load_egos(one)


def test_a_saved_graph_says_it_by_numbers_which_put_clients_in_order(tmp_path):
    who, path = torch.tensor([10, 9, 10, 9]), tmp_path / "g.pt"
    torch.save(graph(1, 2, 3, 4, client=who), path)
    named = [f"file {path}, client {name}" for name in (9, 10)]
    assert [where for where, _ in client_graphs(path)] == named
    nine, ten = load_egos(path)
    assert (nine.identities, ten.identities) == ([2, 4], [1, 3])
    torch.save(graph(1, 2, 3, 4), tmp_path / "whole.pt")
    assert clients_path(DataConfig(str(tmp_path / "whole.pt"))) is None
    for client in (who[:3], who.unsqueeze(1), [None] * 4, 7):
        torch.save(graph(1, 2, 3, 4, client=client), path)
        with pytest.raises(DataError, match=r"g\.pt: .*client"):
            load_egos(path)
    parts = torch.tensor([0, 0, 0, 1, 1, 1])
    torch.save(graph(5, 6, 7, 7, 6, 9, client=parts), path)
    a, b = load_shared(path)
    assert (a.nodes.tolist(), b.nodes.tolist()) == ([5, 6, 7], [6, 7, 9])
    assert a.public.tolist() == [False, True, True]


def test_a_change_of_any_file_is_noticed(tmp_path):
    one = tables(tmp_path / "people", NODES, EDGES)
    seen = [saved_at(str(tmp_path))]
    for number, file in enumerate((one / "nodes.csv", one / "edges.csv", tmp_path / "a.json")):
        file.touch()
        os.utime(file, ns=(0, seen[0] + (number + 1) * 10**9))
        seen.append(saved_at(str(tmp_path)))
    assert seen == sorted(set(seen)) and saved_at(str(tmp_path / "a.json")) == seen[-1]
    assert saved_at(str(one)) == seen[2] and saved_at("csbm") == 0
