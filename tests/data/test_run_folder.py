"""Folders with one party's data: written whole, read back exactly, refused with a reason."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_graph.data.folders.party import (
    CLIENTS,
    SERVER,
    Manifest,
    assigned,
    deciding_settings,
    fingerprint,
    folder_name,
    graph_data,
    graph_tensors,
    matrix_tensors,
    open_folder,
    read_graph,
    read_matrix,
    write_folder,
    write_run,
)
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.errors import ConfigError, DataError, OutputError
from flower_graph.method.load import load_config, to_dict

SETTINGS: dict[str, Any] = {"app": "fedgls", "seed": 0, "data.name": "Cora", "ratios": [0.5, 0.5]}


def manifest(**changes: Any) -> Manifest:
    counts = {"num_clients": 5, "features": 4, "classes": 2}
    return Manifest(**{"role": CLIENTS, "settings": SETTINGS, "clients": [3], **counts, **changes})


@pytest.fixture
def folder(tmp_path):
    """Write a folder of one tensor."""
    path = tmp_path / "client-0003"
    write_folder(path, manifest(details={"graphless-clients": 2}), {"3.y": torch.arange(4)})
    return path


def test_what_was_written_is_read_back_by_its_owner_alone(folder):
    found = open_folder(folder, SETTINGS, CLIENTS)
    there = found.manifest
    assert (there.role, there.app, there.clients) == ("clients", "fedgls", [3])
    assert (there.num_clients, there.features, there.classes) == (5, 4, 2)
    assert there.settings == SETTINGS and found.detail("graphless-clients", int) == 2
    assert torch.equal(found.tensors["3.y"], torch.arange(4))
    record = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert record["fingerprint"] == fingerprint(SETTINGS)
    with pytest.raises(DataError, match=r"manifest\.json"):
        found.detail("graphless", list)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.iterdir()]}
    assert modes == {"client-0003": 0o700, "data.safetensors": 0o600, "manifest.json": 0o600}
    with pytest.raises(OutputError, match="client-0003"):
        write_folder(folder, manifest(), {})


def test_what_cannot_be_read_is_named(folder):
    file = folder / "data.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"data\.safetensors"):
        open_folder(folder, SETTINGS, CLIENTS)
    for one in (file, folder / "manifest.json"):
        one.unlink()
        with pytest.raises(DataError, match=one.name):
            open_folder(folder, SETTINGS, CLIENTS)
        one.mkdir()  # root may read every file, but not a folder as one
        with pytest.raises(DataError, match=f"{one.name}.*{os.getuid()}"):
            open_folder(folder, SETTINGS, CLIENTS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ("{", ""),
        ("[]", "list"),
        ("\udcff", ""),
        ("{}", "'format'"),
        ({"format": 2}, "format: 2"),
        ({"clients": None}, "'clients'"),
        ({"clients": [5]}, "clients: [5]"),
        ({"clients": "0"}, "clients: '0'"),
        ({"num-clients": "5"}, "num-clients: '5'"),
        ({"files": ["data.safetensors"]}, "files: ['data.safetensors']"),
        ({"files": {"../secret": "00"}}, "files: ['../secret']"),
        ({"role": "thief"}, "role: 'thief'"),
        ({"settings": {"app": "fedgls"}}, "fingerprint"),
    ],
)
def test_a_manifest_that_is_none_or_says_something_else(changes, reason, folder):
    file, text = folder / "manifest.json", changes
    if isinstance(changes, dict):  # None takes an entry out
        record = json.loads(file.read_text(encoding="utf-8")) | changes
        text = json.dumps({key: value for key, value in record.items() if value is not None})
    file.write_text(str(text), encoding="utf-8", errors="surrogateescape")
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
        write_folder(tmp_path / role, manifest(role=role, clients=[]), {})
        with pytest.raises(DataError, match=f"{keys[role]}.*give"):
            open_folder(tmp_path / role, SETTINGS, other)


# Which settings decide --------------------------------------------------------------------------


def deciding(name: str, *overrides: str) -> dict[str, Any]:
    return deciding_settings(to_dict(load_config(name, overrides)))


@pytest.mark.parametrize(
    ("overrides", "decide"),
    [
        ("seed=1", True),
        ("data.name=PubMed", True),
        ("data.features=as-is", True),
        ("data.signal=0.2", True),
        ("partition.clients=5", True),
        ("graph.graphless_ratio=0.25", True),
        ("partition.seed=0 seed=9", False),  # the partition's own stands for the run's
        ("partition.seed=0 data.split_seed=null", False),  # the run's is 0 as well
        ("partition.seed=0 data.split_seed=null seed=9", True),
        ("rounds=3", False),
        ("strategy.name=fed-mlp", False),
        ("model.hidden=3", False),
        ("data.root=/data", False),
        ("graph.neighbours=4", False),
        # Keys of another way of cutting decide nothing
        ("partition.hops=3 partition.min_nodes=3 partition.split=global", False),
        ("partition.public=cover partition.public_share=0.1 partition.private_share=0.1", False),
        ("partition.draws=2", False),
    ],
)
def test_settings_that_decide_the_data(overrides, decide):
    assert (deciding("fedgls/cora", *overrides.split()) != deciding("fedgls/cora")) is decide


def test_the_usual_signal_and_a_files_place_decide_nothing(tmp_path):
    assert "data.signal" not in deciding("fedgls/cora")  # as before there was a signal
    assert deciding("fedgls/cora", "data.signal=0.0")["data.signal"] == 0
    here, there = f"data.name={tmp_path}/own.pt", "data.name=elsewhere/own.pt"
    assert deciding("nfedgnn/cora", here) == deciding("nfedgnn/cora", there)
    assert deciding("nfedgnn/cora", here) != deciding("nfedgnn/cora", "data.name=other.pt")


# Tensors ----------------------------------------------------------------------------------------


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse_csr()


@pytest.mark.parametrize("form", [Tensor.clone, sparse])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_matrix_comes_back_as_it_was(form, share):
    chance = torch.Generator().manual_seed(0)
    x = torch.rand(6, 9, generator=chance) * (torch.rand(6, 9, generator=chance) < share)
    found = read_matrix("x", matrix_tensors("x", form(x)))
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
assert OPEN.edge_index is not None
MASKS = (OPEN.train_mask, OPEN.val_mask, OPEN.test_mask)
EGO = EgoNetwork(1, 12, OPEN.nodes, OPEN.edge_index, OPEN.x, OPEN.y, *MASKS)
NAMED = replace(EGO, names=("Anna", "Zoë", "", "a b", "7", '"'))
SHARING = OverlappingGraph(
    2, OPEN.nodes, OPEN.y > 0, sparse(OPEN.x), OPEN.y, 1 - OPEN.y, OPEN.edge_index, *MASKS
)


@pytest.mark.parametrize(
    "graph",
    [client_graph(3, True), client_graph(4, False), SHARING, EGO, NAMED],
    ids=["hidden", "open", "sharing", "ego", "named"],
)
def test_every_field_of_a_graph_comes_back(graph):
    tensors = {f"{graph.client}.{name}": t for name, t in graph_tensors(graph).items()}
    strangers = {f"1{name}": torch.zeros(1) for name in tensors}
    found = read_graph(type(graph), graph.client, tensors | strangers)
    for field in fields(graph):
        mine, theirs = getattr(graph, field.name), getattr(found, field.name)
        if isinstance(mine, Tensor):
            assert mine.dtype == theirs.dtype and mine.layout == theirs.layout, field.name
            dense = [t.to_dense() if t.layout != torch.strided else t for t in (mine, theirs)]
            assert torch.equal(*dense), field.name
        else:
            assert mine == theirs, field.name
    del tensors[f"{graph.client}.y"]
    with pytest.raises(KeyError, match="'y'"):
        read_graph(type(graph), graph.client, tensors)


# Dealing ----------------------------------------------------------------------------------------


def test_every_client_is_in_one_folder(tmp_path):
    graphs = [client_graph(number, False) for number in range(7)]
    for supernodes in (0, 8):
        with pytest.raises(ConfigError, match=f"num-supernodes: {supernodes}"):
            write_run(tmp_path, SETTINGS, graph_data(graphs, 2), supernodes)
    assert not [*tmp_path.iterdir()]
    write_run(tmp_path, SETTINGS, graph_data(graphs, 2), 3)
    names = ["clients-0000-0001", "clients-0002-0003", "clients-0004-0006", "server"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for number, name in enumerate(names[:3]):
        found = open_folder(tmp_path / name, SETTINGS, CLIENTS)
        here = assigned(number, 3, 7)
        assert found.manifest.clients == [*here]
        assert {key.partition(".")[0] for key in found.tensors} == {str(one) for one in here}
        for client in here:
            y = read_graph(ClientGraph, client, found.tensors).nodes
            assert torch.equal(y, graphs[client].nodes)
    server = open_folder(tmp_path / "server", SETTINGS, SERVER)
    assert (server.tensors, server.manifest.num_clients, server.manifest.clients) == ({}, 7, [])
    # Names are as wide as the largest number
    assert folder_name(range(3, 4), 10) == "client-0003"
    assert folder_name(range(0, 677), 2708) == "clients-0000-0676"
    assert folder_name(range(12, 13), 100_001) == "client-000012"
