"""FedSCem's clients of the user's own: who their nodes are, and which of them train."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_helpers import RATIOS
from torch_geometric.data import Data

from flower_graph.config.common import DataConfig
from flower_graph.data.folders.client_files import client_graphs, clients_path
from flower_graph.data.folders.client_folder import (
    load_ego_folder,
    load_folder,
    load_overlapping_folder,
)
from flower_graph.data.partition.statistics import ego_statistics
from flower_graph.data.sources.datasets import saved_at
from flower_graph.errors import DataError


def graph(*ids: int, **changes: Any) -> dict[str, Any]:
    """Give a path over some nodes; a node's label and features follow its id."""
    n_id = torch.tensor(ids)
    path = torch.arange(len(ids) - 1)
    given = {
        "x": torch.stack([n_id, n_id % 2], 1).float(),
        "y": n_id % 3,
        "edge_index": torch.stack([path, path + 1]),
        "n_id": n_id,
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


def saved(folder: Path, **clients: dict[str, Any]) -> Path:
    """Save a folder of clients."""
    folder.mkdir(exist_ok=True)
    for name, content in clients.items():
        torch.save(Data(**content), folder / f"{name}.pt")
    return folder


def load_ego(folder: Path) -> list[Any]:
    return load_ego_folder(folder, "per-client", RATIOS, 0)


def load_overlapping(folder: Path) -> list[Any]:
    return load_overlapping_folder(folder, [0, 0.5, 0.5], 0)


def words(*ids: int) -> list[str]:
    return [f"person {i}" for i in ids]


def test_files_become_clients_with_their_identities_masks_or_drawn_ones(tmp_path: Path) -> None:
    first, second = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    first[0] = second[2] = True
    own = graph(7, 3, 9, train_mask=first, test_mask=second)
    folder = saved(tmp_path / "c", b=graph(*range(3, 13)), a=own)
    a, b = load_ego_folder(folder, "per-client", RATIOS, 0)
    assert (a.client, a.ego, a.identities, b.identities) == (0, 7, [7, 3, 9], [*range(3, 13)])
    assert a.x.tolist() == [[7, 1], [3, 1], [9, 1]] and a.y.tolist() == [1, 0, 0]
    assert a.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    masks = [[one.tolist() for one in (a.train_mask, a.val_mask, a.test_mask)]]
    assert masks == [[first.tolist(), [False] * 3, second.tolist()]]
    drawn = torch.stack([b.train_mask, b.val_mask, b.test_mask])
    assert drawn.sum(1).tolist() == [6, 2, 2] and drawn.sum(0).tolist() == [1] * 10
    again = load_ego_folder(folder, "per-client", RATIOS, 0)[1]
    assert torch.equal(again.train_mask, b.train_mask)


def test_globally_a_node_has_one_role_and_two_are_refused(tmp_path: Path) -> None:
    names = {"identity": words(*range(12)), "n_id": None}
    turned = {"identity": words(*range(18, 6, -1)), "n_id": None}
    folder = saved(tmp_path / "c", a=graph(*range(12), **names), b=graph(*range(12), **turned))
    a, b = load_ego_folder(folder, "global", RATIOS, 0)
    roles: dict[int | str, set[int]] = {}
    for ego in (a, b):
        role = torch.stack([ego.train_mask, ego.val_mask, ego.test_mask]).int().argmax(0)
        for who, what in zip(ego.identities, role.tolist(), strict=True):
            roles.setdefault(who, set()).add(what)
    assert len(roles) == 19 and all(len(found) == 1 for found in roles.values())
    figures = ego_statistics([a, b]).figures
    assert (figures["nodes"], figures["shared-share"]) == (19, 5 / 19)
    train = torch.eye(12, dtype=torch.bool)
    saved(folder, a=graph(*range(12), **names, train_mask=train[8]))
    saved(folder, b=graph(*range(12), **turned, test_mask=train[10]))
    with pytest.raises(DataError, match=r"b\.pt.*'person 8'"):
        load_ego_folder(folder, "global", RATIOS, 0)
    assert len(load_ego_folder(folder, "per-client", RATIOS, 0)) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_id": None}, ".*n_id"),
        ({"n_id": torch.tensor([1, 1, 2])}, "1 identities"),
        ({"n_id": torch.tensor([1, 2])}, "2.*3"),
        ({"n_id": torch.tensor([0.5, 1.0, 2.0])}, ".*float"),
        ({"identity": ["a", "b", "c"]}, r".*a\.pt"),
        ({"x": torch.ones(3, 5)}, r"x .*5.*a\.pt"),
        ({"n_id": 3}, "n_id"),
        ({"identity": "abc"}, "identity"),
        ({"x": torch.tensor(5.0)}, "x "),
        ({"names": 0.5}, "names"),
        ({"num_classes": "two"}, "num_classes.*'two'"),
        ({"edge_index": None}, ".*edge_index"),
    ],
)
def test_unfit_clients_are_refused_by_file(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "c", a=graph(1, 2, 3), b=graph(1, 2, 3, **changes))
    with pytest.raises(DataError, match=rf"b\.pt: {said}"):
        load_ego_folder(folder, "per-client", RATIOS, 0)


def test_clients_without_common_nodes_or_kinds_of_labels_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flower_graph.data"):
        load_ego_folder(
            saved(tmp_path / "c", a=graph(1, 2), b=graph(3, 4)), "per-client", RATIOS, 0
        )
        load_ego_folder(
            saved(tmp_path / "d", a=graph(1, 2), b=graph(2, 4)), "per-client", RATIOS, 0
        )
        mixed = saved(tmp_path / "e", a=graph(1, 2), b=graph(2, 4, y=["cat", "1"]))
        egos = load_ego_folder(mixed, "per-client", RATIOS, 0)
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warned) == 2 and "shared" in warned[0]
    assert "labels" in warned[1] and egos.classes == ("1", "2", "cat")


# One graph for all clients ---------------------------------------------------------------------

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
EDGES = "source,target\nb1,b2\nb2,b3\nz1,z2\nz3,z2\nb1,z1\nn1,b1\n"


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """Write one graph whose nodes say which client has them."""
    (tmp_path / "people").mkdir()
    (tmp_path / "people" / "nodes.csv").write_text(NODES, encoding="utf-8")
    (tmp_path / "people" / "edges.csv").write_text(EDGES, encoding="utf-8")
    return tmp_path / "people"


def test_one_graph_is_cut_into_the_clients_that_its_nodes_name(
    one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert clients_path(DataConfig(str(one))) == one
    with caplog.at_level(logging.INFO, "flower_graph.data"):
        bern, zug = load_ego_folder(one, "per-client", RATIOS, 0)
    assert (bern.identities, zug.identities) == (("anna", "bert", "emil"), ("anna", "cora", "bert"))
    assert (bern.x.tolist(), zug.x.tolist()) == ([[1], [3], [6]], [[2], [4], [7]])
    assert (bern.y.tolist(), zug.y.tolist()) == ([0, 1, 0], [0, 1, 1])
    assert bern.edge_index.tolist() == zug.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    for said in ("2 edges between clients left out", "1 nodes without a client left out"):
        assert f"file {one}: {said}" in caplog.text


def test_a_column_of_clients_that_says_nothing_is_refused(one: Path) -> None:
    lines = [re.sub("bern|zug", "", line) for line in NODES.splitlines()]
    (one / "nodes.csv").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match="people"):
        load_ego_folder(one, "per-client", RATIOS, 0)


def test_a_saved_graph_says_it_by_numbers_which_put_clients_in_order(tmp_path: Path) -> None:
    who = torch.tensor([10, 9, 10, 9])
    torch.save(graph(1, 2, 3, 4, client=who), tmp_path / "g.pt")
    assert [where for where, _ in client_graphs(tmp_path / "g.pt")] == [
        f"file {tmp_path}/g.pt, client {name}" for name in (9, 10)
    ]
    nine, ten = load_ego_folder(tmp_path / "g.pt", "per-client", RATIOS, 0)
    assert (nine.identities, ten.identities) == ([2, 4], [1, 3])
    torch.save(graph(1, 2, 3, 4), tmp_path / "whole.pt")
    assert clients_path(DataConfig(str(tmp_path / "whole.pt"))) is None
    for client, said in (
        (who[:3], "x has 4 entries, and client 3"),
        (who.unsqueeze(1), "client "),
        ([None] * 4, "client "),
        (7, "client "),
    ):
        torch.save(graph(1, 2, 3, 4, client=client), tmp_path / "g.pt")
        with pytest.raises(DataError, match=rf"g\.pt: {said}"):
            load_ego_folder(tmp_path / "g.pt", "per-client", RATIOS, 0)


def test_other_methods_take_such_clients_and_other_files_too(one: Path, tmp_path: Path) -> None:
    bern, zug = load_folder(one, [1 / 3, 1 / 3, 1 / 3], 0)
    assert (bern.y.tolist(), zug.y.tolist()) == ([0, 1, 0], [0, 1, 1])
    clients = tmp_path / "clients"
    clients.mkdir()
    one.rename(clients / "b")
    torch.save(graph(1, 2, 3), clients / "c.pt")
    nodes = [{"id": i, "label": i % 2, "age": i} for i in range(5)]
    (clients / "a.json").write_text(json.dumps({"nodes": nodes, "links": []}), encoding="utf-8")
    where = [where for where, _ in client_graphs(clients)]
    assert where == [f"file {clients}/{name}" for name in ("a.json", "b", "c.pt")]
    (clients / "d.csv").touch()
    with pytest.raises(DataError, match=r"d\.csv.*nodes\.csv"):
        list(client_graphs(clients))


def test_a_change_of_any_file_is_noticed(one: Path, tmp_path: Path) -> None:
    seen = [saved_at(str(tmp_path))]
    for number, file in enumerate((one / "nodes.csv", one / "edges.csv", tmp_path / "a.json")):
        file.touch()
        os.utime(file, ns=(0, seen[0] + (number + 1) * 10**9))
        seen.append(saved_at(str(tmp_path)))
    assert seen == sorted(set(seen)) and saved_at(str(tmp_path / "a.json")) == seen[-1]
    assert saved_at(str(one)) == seen[2] and saved_at("csbm") == 0


def test_overlapping_clients_are_numbered_by_their_words(one: Path) -> None:
    a, b = load_overlapping_folder(one, [0, 0.5, 0.5], 0)
    # anna, bert, cora, emil: dora is no client's
    assert (a.nodes.tolist(), b.nodes.tolist()) == ([0, 1, 3], [0, 1, 2])
    assert a.public.tolist() == b.public.tolist() == [True, True, False]
    assert b.x.tolist() == [[2], [7], [4]] and b.edge_index.tolist() == [[0, 1, 2, 2], [2, 2, 0, 1]]


def test_overlapping_clients_are_numbered_by_n_id(tmp_path: Path) -> None:
    who = torch.tensor([0, 0, 0, 1, 1, 1])
    ids = torch.tensor([5, 6, 7, 7, 6, 9])
    torch.save(graph(*ids.tolist(), client=who), tmp_path / "g.pt")
    a, b = load_overlapping_folder(tmp_path / "g.pt", [0, 0.5, 0.5], 0)
    assert (a.nodes.tolist(), b.nodes.tolist()) == ([5, 6, 7], [6, 7, 9])
    assert a.public.tolist() == [False, True, True]


@pytest.mark.parametrize("load", [load_ego, load_overlapping])
def test_identities_may_be_numbers_and_go_before_n_id(
    load: Callable[[Path], list[Any]], tmp_path: Path
) -> None:
    other = {"n_id": torch.tensor([90, 80, 70])}
    folder = saved(
        tmp_path / "c",
        a=graph(1, 2, 3, identity=torch.tensor([5, 6, 7]), **other),
        b=graph(7, 6, 9, identity=[7, 6, 9], **other),
    )
    assert [sorted(one.nodes.tolist()) for one in load(folder)] == [[5, 6, 7], [6, 7, 9]]
