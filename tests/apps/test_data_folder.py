"""Runs whose parties each have a folder of their own data, and nothing else.

Folders, partitions and versions that do not fit are each refused with what to do.
"""

import json
import logging
import re
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from app_helpers import context_of
from federation import METHODS, one_fast, tried
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from flower_graph.apps.cli import main as cli
from flower_graph.apps.run import client_app, run_server, simulate_whole
from flower_graph.config.common import RunConfig
from flower_graph.data.folders import party
from flower_graph.data.graph import PARTS
from flower_graph.data.sources import datasets as cached
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError, MembershipError, NoClientsError
from flower_graph.method import base as method
from flower_graph.method.load import to_yaml
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls import method as fedgls
from flower_graph.strategies.fedgls.config import FedGLSConfig
from flower_graph.strategies.fedscem import method as fedscem
from flower_graph.strategies.ppfl import method as ppfl
from flower_graph.wire import keys

APPS = {"nfedgnn": "nfedgnn", "fedscem": "fedscem", "fedgls": "fedgls", "ppfl": "gat"}
RUNS: dict[str, tuple[str, list[str], int, list[str]]] = {
    "nfedgnn": ("nfedgnn", ["strategy.share=averaged", "strategy.average_every=2"], 90, []),
    "nfedgnn, three SuperNodes": ("nfedgnn", [], 3, []),
    "fedscem": ("fedscem", [], 6, []),
    "fedscem, two SuperNodes": ("fedscem", [], 2, []),
    "fedscem, fedavg": ("fedscem", ["strategy.name=fedavg"], 6, []),
    "fedscem, fed-sage": ("fedscem", ["strategy.name=fed-sage"], 6, []),
    "fedgls": ("fedgls", [], 4, []),
    "fedgls, three SuperNodes": ("fedgls", ["seed=3"], 3, []),
    "fedgls, true edges": ("fedgls", [], 4, ["--true-edges"]),
    "fedgls, fed-gnn": ("fedgls", ["strategy.name=fed-gnn"], 4, ["--true-edges"]),
    "fedgls, fedproto": ("fedgls", ["strategy.name=fedproto"], 4, []),
    "fedgcn": ("fedgcn", ["partition.method=random"], 4, []),
    "ppfl": ("gat", [], 4, []),
    "ppfl, deepwalk": ("deepwalk", [], 2, []),
}
LEARNED = ("fedgls", "fedgls, three SuperNodes", "fedgls, true edges")  # runs that learn graphs


def config_of(app: str, *overrides: str) -> RunConfig:
    return METHODS[APPS.get(app, app)].load("rounds=2", *overrides)


def partition(config: RunConfig, out: Path, *words: str) -> Path:
    """Have the command write the folders of a config."""
    file = out.with_suffix(".yaml")
    file.write_text(to_yaml(config), encoding="utf-8")
    assert cli.main(["partition", str(file), "--out", str(out), *words]) == 0
    return out


def folders_of(out: Path) -> list[Path]:
    return sorted(out.glob("client*"))


def run_from(config: RunConfig, out: Path) -> tuple[list[RoundReport], dict[str, Any]]:
    """Run a config in this process, every party with its own folder."""
    server = party.server_folder(config, str(out / "server"))
    grid = grid_of(config, folders_of(out))
    for context in grid.contexts.values():
        del context.node_config["partition-id"], context.node_config["num-partitions"]
    method, reports = method_of(config), list[RoundReport]()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    strategy = method.build_strategy(config, None, server)
    strategy.start(grid, num_rounds=config.rounds, on_round=reports.append)
    return reports, method.final_figures(config, strategy, server)


def plain(reports: list[RoundReport]) -> list[dict[str, Any]]:
    """Give reports without what differs from run to run, and comparable where NaN."""
    left_out = ("seconds", "structure")
    return [
        {k: repr(v) for k, v in asdict(report).items() if k not in left_out} for report in reports
    ]


def grid_of(config: RunConfig, folders: list[Path]) -> InProcessGrid:
    """Make a grid of as many nodes as folders."""
    own = [{"data-folder": str(folder)} for folder in folders]
    app = client_app(config, None)
    return InProcessGrid(app, num_supernodes=len(own), seed=config.seed, node_config=own)


def forbid_whole_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a party read the whole data")

    monkeypatch.setattr(cached, "load_graph", refuse)
    for module in (fedgls, method):
        monkeypatch.setattr(module, "cached_clients", refuse)


@pytest.mark.parametrize("app", one_fast(APPS, "fedgls"))
def test_clients_log_once_what_they_reach_alone_and_tell_nobody(app, tmp_path, monkeypatch):
    config, told = config_of(app), list[str]()
    out = partition(config, tmp_path / "out", "--supernodes", "2")
    flwr = logging.getLogger("flwr")
    monkeypatch.setattr(flwr, "info", lambda text, *values: told.append(text % values))
    folder, grid = (
        party.server_folder(config, str(out / "server")),
        grid_of(config, folders_of(out)),
    )
    result = run_server(config, grid, tmp_path / "run", engine="flwr", folder=folder)
    assert "baselines" not in result
    told = [line for line in told if "alone" in line]
    assert len(told) == (0 if app == "nfedgnn" else 2)  # nobody holds features and labels
    for line, folder in zip(told, folders_of(out), strict=False):
        own = party.open_folder(folder, party.deciding_settings(asdict(config)), party.CLIENTS)
        found = method_of(config).baselines(config, own)
        guess, fit = (found[name]["test"] for name in ("majority", "logistic-regression"))
        assert line.startswith("what clients here reach alone, told to nobody: ")
        assert line.endswith(f"{guess:.3f}, logistic regression on features alone {fit:.3f}")


@pytest.mark.parametrize("name", tried(RUNS, fast=("nfedgnn, three SuperNodes", "fedscem")))
def test_results_are_those_of_the_simulation(name, tmp_path, monkeypatch):
    app, overrides, supernodes, words = RUNS[name]
    config = config_of(app, *overrides)
    wanted, figures = simulate_whole(config, supernodes=supernodes)
    out = partition(config, tmp_path / "out", "--supernodes", str(supernodes), *words)
    assert len(folders_of(out)) == supernodes
    assert method_of(config).num_clients(
        config, party.server_folder(config, str(out / "server"))
    ) == (method_of(config).num_clients(config))
    forbid_whole_data(monkeypatch)
    found, found_figures = run_from(config, out)
    assert plain(found) == plain(wanted)
    assert repr(found_figures) == repr(figures)
    if app == "fedgls":
        # What is learnt is compared with the true edges, which only a simulation has.
        has_edges = "--true-edges" in words
        assert all(one.structure for one in wanted) == (name in LEARNED)
        assert [one.structure for one in found] == [
            one.structure if has_edges else {} for one in wanted
        ]


@pytest.mark.parametrize("identities", one_fast(["n_id", "identity"], "identity"))
def test_clients_of_a_folder_are_those_that_were_cut_and_run_from_their_own_folders(
    identities, tmp_path, monkeypatch
):
    whole = config_of("fedscem", "data.features=as-is")
    clients = tmp_path / "clients"
    clients.mkdir()
    for ego in method_of(whole).graphs(whole):
        tensors = {key: getattr(ego, key) for key in ("x", "edge_index", "y", *PARTS)}
        names = ego.nodes if identities == "n_id" else [f"node {node}" for node in ego.nodes]
        torch.save({**tensors, identities: names}, clients / f"{ego.client}.pt")
    config = config_of("fedscem", "data.features=as-is", f"data.name={clients}/")
    wanted = simulate_whole(whole, supernodes=6)[0]
    found = simulate_whole(config, supernodes=6)[0]
    assert [one.loss for one in found] == [one.loss for one in wanted]
    assert [one.test_accuracy for one in found] == [one.test_accuracy for one in wanted]
    out = partition(config, tmp_path / "out", "--supernodes", "6")
    for number in range(1, 6):
        (clients / f"{number}.pt").unlink()
    with pytest.raises(ConfigError, match=r"1 client.*2"):
        method_of(config).graphs(config)
    shutil.rmtree(clients)
    forbid_whole_data(monkeypatch)
    assert plain(run_from(config, out)[0]) == plain(found)


# What is in a folder -----------------------------------------------------------------------------


def test_a_user_has_its_own_features_and_the_server_none(tmp_path):
    config = config_of("nfedgnn")
    data = cached_data(config)
    out = partition(config, tmp_path / "out", "--supernodes", "90")
    for user, path in enumerate(folders_of(out)):
        tensors = load_file(path / "data.safetensors")
        assert set(tensors) == {"users", "x", "x.pointers", "x.columns", "x.form"}
        assert tensors["users"].tolist() == [user]
        assert torch.equal(tensors["x.columns"], data.x[user].nonzero().flatten())
        assert torch.equal(tensors["x"], data.x[user][data.x[user] != 0])
    server = load_file(out / "server" / "data.safetensors")
    assert set(server) == {"edge_index", "y", "train_mask", "val_mask", "test_mask"}


@pytest.mark.parametrize("app", ["fedscem", "fedgls", "ppfl"])
def test_a_client_has_its_own_graph_and_the_server_counts(app, tmp_path):
    config = config_of(app)
    everyone = {"fedscem": fedscem, "fedgls": fedgls, "ppfl": ppfl}[app].METHOD.graphs(config)
    out = partition(config, tmp_path / "out")
    for graph, path in zip(everyone, folders_of(out), strict=True):
        assert sorted(file.name for file in path.iterdir()) == ["data.safetensors", "manifest.json"]
        tensors = load_file(path / "data.safetensors")
        assert {name.partition(".")[0] for name in tensors} == {str(graph.client)}
        # Rows: nothing has more of them than the client has nodes, but edges and features.
        assert torch.equal(tensors[f"{graph.client}.nodes"], graph.nodes)
        edges = tensors.get(f"{graph.client}.edge_index")
        if edges is not None:
            assert torch.equal(edges, graph.edge_index)
        assert (edges is None) == (graph.edge_index is None)
        assert f"{graph.client}.hidden_edges" not in tensors
        assert int(tensors[f"{graph.client}.x.form"][0]) == graph.nodes.numel()
    assert {file.name for file in (out / "server").iterdir()} == {"manifest.json", "members.csv"}


def test_true_edges_are_there_if_they_are_asked_for_and_the_server_alone_learns_who_lacks_them(
    tmp_path, capsys
):
    config, said = config_of("fedgls", "strategy.name=fed-gnn"), "; fed-gnn needs --true-edges wh"
    assert isinstance(config, FedGLSConfig)
    partition(config, tmp_path / "out")
    assert said in capsys.readouterr().out
    out = partition(config, tmp_path / "edges", "--true-edges")
    assert said not in capsys.readouterr().out
    for graph, path in zip(fedgls.METHOD.graphs(config), folders_of(out), strict=True):
        found = load_file(path / "data.safetensors").get(f"{graph.client}.hidden_edges")
        assert (found is None) == (not graph.is_graphless)
        assert found is None or torch.equal(found, graph.hidden_edges)  # type: ignore[arg-type]
    files = {path.parent.name: path for path in out.glob("*/manifest.json")}
    details = {name: json.loads(path.read_text())["details"] for name, path in files.items()}
    assert len(details.pop("server").pop("graphless")) == 2
    for each in details.values():  # the form is of all nodes: widths and classes
        assert each.keys() == {"data-form", "graphless-clients"} and each["graphless-clients"] == 2


# Which clients are where -------------------------------------------------------------------------


@given(count=st.integers(1, 200), parts=st.integers(1, 200))
def test_dealing_is_an_even_partition(count, parts):
    contexts = [context_of({"partition-id": p, "num-partitions": parts}) for p in range(parts)]
    if parts > count:
        with pytest.raises(ConfigError, match=f"{parts}.*{count}"):
            party.share(contexts[0], count)
        return
    shares = [list(range(count))[party.share(context, count)] for context in contexts]
    assert [client for one in shares for client in one] == list(range(count))
    sizes = [len(one) for one in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_partition_that_is_none():
    for part in ("one", True, 4, -1):
        with pytest.raises(ConfigError, match=f"partition-id: {part!r}"):
            party.share(context_of({"partition-id": part, "num-partitions": 4}), 8)
    for parts, said in ((None, "node-config num-p"), (9, "num-supernodes: 9"), (0, "nodes: 0")):
        with pytest.raises(ConfigError, match=said):
            party.share(context_of({"partition-id": 0, "num-partitions": parts}), 8)


@pytest.mark.parametrize("app", one_fast(APPS, "nfedgnn"))
@pytest.mark.parametrize(
    ("node_config", "message"),
    [
        ({"partition-id": "one"}, "node-config partition-id"),
        ({"partition-id": 9}, "partition-id:"),
        ({"data-folder": "/nowhere/x"}, "data-folder:"),
    ],
)
def test_what_no_supernode_can_work_with_stops_the_run_with_the_reason(
    app, node_config, message, tmp_path
):
    config = config_of(app)
    node = {"state-dir": str(tmp_path / "state"), **node_config}
    grid = InProcessGrid(client_app(config, None), num_supernodes=1, node_config=[node])
    with pytest.raises(NoClientsError) as error:
        method_of(config).build_strategy(config, None).start(grid, num_rounds=1, timeout=5)
    # The reason, and no value of the node's own.
    assert message in str(error.value) and "/nowhere" not in str(error.value)


def test_a_folder_is_a_path_and_without_one_every_party_makes_its_own_data():
    config = config_of("fedgls")
    for value in ("", 3, True):
        with pytest.raises(ConfigError, match=f"data-folder: {value!r}"):
            party.client_folder(config, context_of({"data-folder": value}))
    assert party.client_folder(config, context_of({"partition-id": 0, "num-partitions": 1})) is None
    assert party.server_folder(config, "") is None


def test_a_new_folder_in_the_same_place_is_read_anew(tmp_path):
    first, second = config_of("fedgls"), config_of("fedgls", "seed=1")
    context = context_of({"data-folder": str(tmp_path / "here" / "client-0000")})
    found = []
    for number, config in enumerate((first, second)):
        partition(config, tmp_path / "here")
        folder = party.client_folder(config, context)
        assert folder is not None
        found.append(folder.tensors["0.nodes"])
        (tmp_path / "here").rename(tmp_path / f"before-{number}")
    assert not torch.equal(*found)


# Two SuperNodes with one client, and other versions ----------------------------------------------


@pytest.mark.parametrize("app", one_fast(APPS, "ppfl"))
def test_one_folder_at_two_supernodes_is_one_s_by_the_list_alone(app, tmp_path, monkeypatch):
    config = config_of(app)
    out = partition(config, tmp_path / "out", "--supernodes", "3")
    folders, server = folders_of(out), party.server_folder(config, str(out / "server"))
    grid = grid_of(config, [*folders, folders[1]])
    nodes, go = list(grid.contexts), partial(run_server, config, grid, engine="flwr")
    with pytest.raises(MembershipError) as error:
        go(tmp_path / "stopped", folder=server)
    assert str(nodes[1]) in str(error.value) and str(nodes[3]) in str(error.value)

    members = party.read_members(out / "server")
    assert members is not None
    assert [one.folder for one in members] == [folder.name for folder in folders]
    held = [one._replace(node=node) for one, node in zip(members, nodes, strict=False)]
    party.write_members(out / "server" / party.MEMBERS, held)
    reports: list[RoundReport] = []
    go(tmp_path / "run", folder=server, on_round=reports.append)
    assert reports[-1].answered == method_of(config).num_clients(config)
    assert {nodes[3]} == {entry.get("node") for entry in reports[0].rejected}


BROKEN_LISTS = [
    *("client-0000,0,\n", "HEADa,0-2,\nb,2,\n", "HEADa,0,7\nb,1,7\n", "HEADa,x,\n"),
    *("HEADa,3-1,\n", "HEADa,0-99999999999,\n", "HEADa,0,-7\n", f"HEADa,0,{2**64}\n"),
    "HEADa,0\n",
]


@pytest.mark.parametrize("text", BROKEN_LISTS)
def test_a_list_that_is_broken_is_refused_by_its_name(text, tmp_path):
    text = text.replace("HEAD", "folder,clients,node-id\n")
    (tmp_path / party.MEMBERS).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=party.MEMBERS):
        party.read_members(tmp_path)


def test_a_list_is_read_as_it_was_written(tmp_path):
    members = (
        party.Member("a, b", frozenset({0, 1, 2, 7}), 2**64 - 1),
        party.Member("c", frozenset({5})),
    )
    assert party.read_members(tmp_path) is None
    party.write_members(tmp_path / party.MEMBERS, members)
    assert party.read_members(tmp_path) == members
    assert (tmp_path / party.MEMBERS).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("app", one_fast(APPS, "fedscem"))
def test_another_message_format_is_refused_by_name(app, tmp_path, monkeypatch):
    config = config_of(app)
    out = partition(config, tmp_path / "out", "--supernodes", "2")
    of_others = SimpleNamespace(**vars(keys) | {"FORMAT": keys.FORMAT + 1})
    monkeypatch.setattr("flower_graph.client.adaptor.keys", of_others)
    monkeypatch.setattr("flower_graph.client.adaptor.__version__", "0.3.0")
    grid = grid_of(config, folders_of(out))
    with pytest.raises(NoClientsError) as error:
        strategy = method_of(config).build_strategy(
            config, None, party.server_folder(config, str(out / "server"))
        )
        strategy.start(grid, num_rounds=1, timeout=5)
    said = rf"format {keys.FORMAT + 1} .*0\.3\.0.* {keys.FORMAT} "
    assert re.search(said, str(error.value))
