"""Clients of the user's own: one, from a folder of graphs, or from one graph of all clients."""

import json
import logging
import os
import pickle
import re
import stat
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_helpers import RATIOS, SPLIT, mask, roles, tables
from torch import Tensor
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig, PartitionSection
from flower_graph.data.features import ReadOptions
from flower_graph.data.folders.client_folder import (
    client_graphs,
    clients_path,
    ego_from_data,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.folders.party import (
    CLIENTS,
    SERVER,
    RunFolder,
    deciding_settings,
    graph_tensors,
    matrix_tensors,
    open_folder,
    read_graph,
    read_matrix,
    write_folder,
)
from flower_graph.data.graph import ClientGraph
from flower_graph.data.partition.statistics import client_statistics
from flower_graph.data.sources.datasets import saved_at
from flower_graph.errors import DataError, OutputError
from flower_graph.method.load import load_config, to_dict
from flower_graph.strategies.ppfl.config import PartitionConfig

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
    how = PartitionSection(split=split, ratios=RATIOS)
    return load_folder(folder, how, 0, identified=True)


def load_shared(folder: Path, ratios: Any = LATE, seed: int = 0) -> list[Any]:
    return load_overlapping_folder(folder, PartitionConfig(ratios=ratios), seed)


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
    clients = first, second, third = load_folder(folder, SPLIT, 0)
    assert [one.client for one in clients] == [0, 1, 2]
    assert [one.is_graphless for one in clients] == [True, False, True]
    assert second.edge_index is not None and second.edge_index.tolist() == [[0, 1], [1, 0]]
    assert first.hidden_edges is None and second.nodes.tolist() == list(range(6))
    assert second.x.dtype == torch.float32 and second.x[1].tolist() == [2.0, 3.0]
    assert roles(first) == [[0, 1], [], [4]]
    for drawn in (second, third):
        found = torch.stack([drawn.train_mask, drawn.val_mask, drawn.test_mask])
        assert found.sum(1).tolist() == [3, 1, 1] and found.sum(0).tolist() == [1] * 5 + [0]
    draws = [load_folder(folder, SPLIT, seed)[1].train_mask.tolist() for seed in range(6)]
    assert draws[0] == second.train_mask.tolist() and any(draw != draws[0] for draw in draws)
    assert load_folder(folder, SPLIT, 0, how=ReadOptions(features="row"))[1].x[
        1
    ].tolist() == pytest.approx([0.4, 0.6])


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
    ({"val_mask": flags(1, 1, 0)}, "for train"),
    ({"y": torch.full((3,), -1)}, "3 nodes"),
]
LOADERS: dict[str, tuple[Callable[[Path], Any], list[tuple[dict[str, Any], str]]]] = {
    "graphs": (lambda path: load_folder(path, SPLIT, 0), []),
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
    data = Data(**graph(1, 2, 3, y=torch.tensor([1, -1, 0]), **masks))
    ego = ego_from_data(7, data, torch.tensor([30, 10, 20]))
    assert (ego.client, ego.identities, ego.names) == (7, [30, 10, 20], None)
    assert ego.y.tolist() == [1, -1, 0] and roles(ego) == [[30], [], [20]]
    named = ego_from_data(0, data, ["b", "c", "a"])
    assert named.identities == ("b", "c", "a") and named.nodes.tolist() == [0, 1, 2]
    # The error travels to the server as the reason for which a SuperNode failed.
    with pytest.raises(DataError, match=r"^client 7: 1") as caught:
        ego_from_data(7, data, ["secret", "secret", "c"])
    assert "secret" not in str(caught.value)
    with pytest.raises(DataError, match=r"^client 7: .*int, str"):
        ego_from_data(7, data, [1, "b", 3])


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
    figures = client_statistics(egos).figures
    assert (figures["nodes"], figures["shared-share"]) == (19, 5 / 19)
    train = torch.eye(12, dtype=torch.bool)
    first = graph(*range(12), **names, train_mask=train[8])
    saved(folder, first, graph(*range(12), **turned, test_mask=train[10]))
    with pytest.raises(DataError, match=r"b\.pt.*'person 8'"):
        load_egos(folder, "global")
    assert len(load_egos(folder)) == 2


def test_clients_without_common_nodes_or_kinds_of_labels_are_warned_of(tmp_path, caplog):
    # `identity` goes before `n_id`
    first = graph(1, 2, identity=torch.tensor([5, 6]))
    load_egos(saved(tmp_path / "c", first, graph(1, 2)))
    load_egos(saved(tmp_path / "d", graph(1, 2), graph(2, 4)))
    egos = load_egos(saved(tmp_path / "e", graph(1, 2), graph(2, 4, y=["cat", "1"])))
    shared, labels = (one.getMessage() for one in caplog.records if one.levelname == "WARNING")
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
    clients = load_folder(one, PartitionSection(ratios=[1 / 3, 1 / 3, 1 / 3]), 0)
    assert [client.y.tolist() for client in clients] == [[0, 1, 0], [0, 1, 1]]
    # anna, bert, cora, emil: dora is no client's
    a, b = load_shared(one)
    assert (a.nodes.tolist(), b.nodes.tolist()) == ([0, 1, 3], [0, 1, 2])
    assert a.public.tolist() == b.public.tolist() == [True, True, False]
    assert b.x.tolist() == [[2], [7], [4]] and b.edge_index.tolist() == [[0, 1, 2, 2], [2, 2, 0, 1]]
    lines = [re.sub("bern|zug", "", line) for line in NODES.splitlines()]
    (one / "nodes.csv").write_text("\n".join(lines), encoding="utf-8")
    assert clients_path(DataConfig(str(one))) == one  # by its column, though that is empty
    with pytest.raises(DataError, match=r"people.*client"):
        load_egos(one)


def test_a_saved_graph_says_it_by_numbers_which_put_clients_in_order(tmp_path):
    who, path = torch.tensor([10, 9, 10, 9]), tmp_path / "g.pt"
    torch.save(graph(1, 2, 3, 4, client=who), path)
    named = [f"file {path}, client {name}" for name in (9, 10)]
    assert [one.where for one in client_graphs(path)] == named
    nine, ten = load_egos(path)
    assert (nine.identities, ten.identities) == ([2, 4], [1, 3])
    torch.save(graph(1, 2, 3, 4), tmp_path / "whole.pt")
    assert clients_path(DataConfig(str(tmp_path / "whole.pt"))) is None
    torch.save(graph(1, 2, 3, 4, client=["7", "x", "10", "07"]), path)
    assert [one.where.split()[-1] for one in client_graphs(path)] == ["07", "7", "10", "x"]
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
    (tmp_path / ".#a.json").symlink_to("nowhere")  # Emacs's lock
    assert saved_at(str(one)) == seen[2] and saved_at("csbm") == 0
    assert saved_at(str(tmp_path)) == seen[-1]


# Folders with one party's data --------------------------------------------------------------------

SETTINGS: dict[str, Any] = {"app": "fedgls", "seed": 0, "data.name": "Cora", "ratios": [0.5, 0.5]}


def manifest(**changes: Any) -> RunFolder:
    counts = {"num_clients": 5, "features": 4, "classes": 2}
    return RunFolder(**{"role": CLIENTS, "settings": SETTINGS, "clients": [3], **counts, **changes})


@pytest.fixture
def folder(tmp_path):
    """Write a folder of one tensor."""
    path = tmp_path / "client-0003"
    tensors = {"3.y": torch.arange(4)}
    write_folder(path, manifest(details={"graphless-clients": 2}, tensors=tensors))
    return path


def test_what_was_written_is_read_back_by_its_owner_alone(folder):
    found = there = open_folder(folder, SETTINGS, CLIENTS)
    assert (there.role, there.clients) == ("clients", [3])
    assert (there.num_clients, there.features, there.classes) == (5, 4, 2)
    assert there.settings == SETTINGS and found.detail("graphless-clients", int) == 2
    assert torch.equal(found.tensors["3.y"], torch.arange(4))
    with pytest.raises(DataError, match=r"manifest\.json"):
        found.detail("graphless", list)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes == {"client-0003": 0o700, "data.safetensors": 0o600, "manifest.json": 0o600}
    with pytest.raises(OutputError, match="client-0003"):
        write_folder(folder, manifest())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ("[]", "list"),
        ("{}", "'format'"),
        ({"format": 1}, "format: 1"),
        ({"clients": None}, "'clients'"),
        ({"clients": [5]}, "clients: [5]"),
        ({"num_clients": "5"}, "num_clients: '5'"),
        ({"sha256": "00"}, "sha256: '00'"),
        ({"role": "thief"}, "role: 'thief'"),
    ],
)
def test_a_manifest_that_is_none_or_says_something_else(changes, reason, folder):
    file, text = folder / "manifest.json", changes
    if isinstance(changes, dict):  # None takes an entry out
        record = json.loads(file.read_text(encoding="utf-8")) | changes
        text = json.dumps({key: value for key, value in record.items() if value is not None})
    file.write_text(str(text), encoding="utf-8")
    with pytest.raises(DataError, match=re.escape(f"{file}: ") + f".*{re.escape(reason)}"):
        open_folder(folder, SETTINGS, CLIENTS)


def test_a_folder_of_another_run_is_refused_with_what_differs(folder):
    for theirs, reason in (
        ({"seed": 1}, "seed is 0"),
        ({"app": "ppfl", "seed": 4}, "app is 'fedgls'"),
        ({"clients": 9}, "clients is None, this run's is 9"),
        ({"seed": 1, "ratios": [1.0]}, "ratios is [0.5, 0.5], this run's is [1.0]"),
    ):
        other = f"data-folder {folder}: data folder of another run: .*{re.escape(reason)}"
        with pytest.raises(DataError, match=other):
            open_folder(folder, {**SETTINGS, **theirs}, CLIENTS)


def test_a_missing_folder_and_the_folder_of_the_other_role(tmp_path):
    keys = {CLIENTS: "data-folder", SERVER: "server-folder"}
    for role, other in ((CLIENTS, SERVER), (SERVER, CLIENTS)):
        with pytest.raises(DataError, match=f"{role}.*{keys[role]}"):
            open_folder(tmp_path / role, SETTINGS, role)
        write_folder(tmp_path / role, manifest(role=role, clients=[]))
        with pytest.raises(DataError, match=f"{keys[other]}.*role: '{role}'"):
            open_folder(tmp_path / role, SETTINGS, other)


# Which settings decide --------------------------------------------------------------------------


def deciding(name: str, *overrides: str) -> dict[str, Any]:
    return deciding_settings(to_dict(load_config(name, overrides)))


@pytest.mark.parametrize(
    ("overrides", "decide"),
    [
        ("seed=1", True),
        ("data.name=PubMed", True),
        ("partition.clients=5", True),
        ("graph.graphless_ratio=0.25", True),
        ("partition.seed=0 seed=9", False),  # the partition's own stands for the run's
        ("partition.seed=0 data.split_seed=null", False),  # the run's is 0 as well
        ("partition.seed=0 data.split_seed=null seed=9", True),
        ("rounds=3 model.hidden=3 data.root=/data strategy.name=fed-mlp", False),
        # Keys of another way of cutting decide nothing
        ("partition.hops=3 partition.public=cover partition.draws=2", False),
    ],
)
def test_settings_that_decide_the_data(overrides, decide, tmp_path):
    assert (deciding("fedgls/cora", *overrides.split()) != deciding("fedgls/cora")) is decide
    here, there, other = (
        deciding("nfedgnn/cora", f"data.name={name}")
        for name in (tmp_path / "own.pt", "elsewhere/own.pt", "other.pt")
    )
    assert here == there != other


# Tensors ----------------------------------------------------------------------------------------


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse_csr()


@pytest.mark.parametrize("form", [Tensor.clone, sparse])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_matrix_comes_back_as_it_was(form, share):
    chance = torch.Generator().manual_seed(0)
    x = torch.rand(6, 9, generator=chance) * (torch.rand(6, 9, generator=chance) < share)
    kept = matrix_tensors("x", form(x))
    assert len(kept) == (1 if form is Tensor.clone and share > 0.5 else 4)
    found = read_matrix("x", kept)
    assert found.layout == form(x).layout
    assert torch.equal(found.to_dense() if form is sparse else found, x)


def client_graph(client: int, hidden: bool) -> ClientGraph:
    chance = torch.Generator().manual_seed(client)
    masks = [torch.arange(6) % 3 == part for part in range(3)]
    x = (torch.rand(6, 5, generator=chance) > 0.8).float()
    edges = torch.tensor([[0, 1], [1, 0]])
    own, true = (None, edges) if hidden else (edges, None)
    return ClientGraph(
        client, torch.arange(6) + 10 * client, x, torch.arange(6) % 2, own, true, *masks
    )


OPEN = client_graph(1, hidden=False)
NAMED = replace(OPEN, names=("Anna", "Zoë", "", "a b", "7", '"'))
SHARING = replace(OPEN, x=sparse(OPEN.x), public=OPEN.y > 0, train_y=1 - OPEN.y)


@pytest.mark.parametrize(
    "graph",
    [client_graph(3, True), OPEN, SHARING, NAMED],
    ids=["hidden", "open", "sharing", "named"],
)
def test_every_field_of_a_graph_comes_back(graph):
    tensors = {f"{graph.client}.{name}": t for name, t in graph_tensors(graph).items()}
    strangers = {f"1{name}": torch.zeros(1) for name in tensors}
    found = read_graph(graph.client, tensors | strangers)
    for field in fields(graph):
        mine, theirs = getattr(graph, field.name), getattr(found, field.name)
        if isinstance(mine, Tensor):
            assert mine.dtype == theirs.dtype and mine.layout == theirs.layout, field.name
            dense = [t.to_dense() if t.layout != torch.strided else t for t in (mine, theirs)]
            assert torch.equal(*dense), field.name
        else:
            assert mine == theirs, field.name
    del tensors[f"{graph.client}.y"]
    with pytest.raises(TypeError, match="'y'"):
        read_graph(graph.client, tensors)
