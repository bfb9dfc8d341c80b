"""Runs of a small graph of one's own whose parties each have their own files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch_geometric.data import Data

from deploy.loopback import Loopback
from flower_graph.apps.cli import main as cli
from flower_graph.apps.run import run
from flower_graph.method.load import load_config
from flower_graph.method.run import latest_in
from flower_graph.outputs.files import NODE_ROLES, Predictions

OUTPUTS = {"config.yaml", "metrics.jsonl", "result.json"}
# What a simulation has in its output folder, and clients of a deployment in places of their own
AT_CLIENTS = {"clients", "clients.csv", "data.json", "embeddings"}
TIMEOUT = 700.0  # seconds that one run may take on a busy machine


@dataclass(frozen=True)
class Case:
    """One method on a small graph."""

    config: str
    overrides: tuple[str, ...]
    supernodes: int
    nodes: int = 60  # of the graph
    simulation_only: frozenset[str] = frozenset()  # outputs that need what nobody has

    @property
    def app(self) -> str:
        """The method's app."""
        return self.config.partition("/")[0]


CASES = {
    "nfedgnn": Case(
        "nfedgnn/cora", ("rounds=3", "model.hidden=4", "checkpoint_every=1"), 2, nodes=6
    ),
    "nfedgnn-masked": Case(
        "nfedgnn/cora-summed",
        ("rounds=1", "model.hidden=4", "strategy.aggregation=masked"),
        2,
        nodes=6,
    ),
    "fedgls": Case(
        "fedgls/cora",
        ("rounds=5", "partition.method=random", "partition.clients=2", "graph.neighbours=3"),
        2,
        simulation_only=frozenset({"structure.png"}),  # true edges of clients that have none
    ),
    "fedscem": Case(
        "fedscem/cora",
        (
            "rounds=1",
            "partition.clients=3",
            "partition.min_nodes=6",
            "partition.hops=1",
            "strategy.alignment=plain",
        ),
        2,  # each of whose messages is answered by a new process
    ),
    "fedgta": Case(  # any torch module of the clients' own, and models of each client's own
        "fedgta/cora",
        ("rounds=2", "partition.method=random", "partition.clients=2", "checkpoint_every=1"),
        2,
    ),
    "ppfl": Case(
        "ppfl/cora-gat",
        ("rounds=1", "partition.clients=2", "judge.folds=2", "judge.mlp=false"),
        2,
        nodes=150,
    ),
}


@dataclass
class Prepared:
    """A case with its data assigned: what a run of it needs."""

    case: Case
    folder: Path
    overrides: list[str]
    simulated: dict[str, Any]

    def clients(self) -> list[Path]:
        """Return the data folders of the SuperNodes."""
        return sorted((self.folder / "data").glob("client*"))

    def settings(self, out: str = "deployed", *more: str, **others: Any) -> dict[str, str | bool]:
        """Return the run config."""
        return {
            "config": self.case.config,
            "overrides": " ".join([*self.overrides, *more]),
            "output-dir": str(self.folder / out),
            "server-folder": str(self.folder / "data" / "server"),
            **others,
        }


def small_graph(nodes: int) -> Data:
    """Three classes on a ring with chords; every class has nodes of every role."""
    place = torch.arange(nodes)
    y = place % 3
    x = torch.rand(nodes, 12, generator=torch.Generator().manual_seed(1)).round()
    x[place, y] = 1.0
    steps = (1, 3, 6) if nodes > 6 else (3,)
    edges = [torch.stack([place, (place + step) % nodes]) for step in steps]
    masks = {
        f"{name}_mask": place * 3 // nodes == part
        for part, name in enumerate(("train", "val", "test"))
    }
    return Data(x=x, y=y, edge_index=torch.cat(edges, dim=1), **masks)


def prepare(case: Case, folder: Path, *more: str) -> Prepared:
    """Simulate the case, deal its data, and remove the graph, so that nobody can read it whole."""
    folder.mkdir(parents=True)
    graph = folder / "graph.pt"
    torch.save(small_graph(case.nodes), graph)
    overrides = [*case.overrides, f"data.name={graph}", "seed=2", *more]
    overrides += [f"strategy.min_nodes={case.supernodes}"]
    simulated = run(
        load_config(case.config, overrides), folder / "simulated", supernodes=case.supernodes
    )
    command = ["partition", case.config, *overrides, "--out", str(folder / "data")]
    assert cli.main([*command, "--supernodes", str(case.supernodes)]) == 0
    graph.unlink()
    return Prepared(case, folder, overrides, simulated)


def start_nodes(deployment: Loopback, prepared: Prepared, keys: list[Path]) -> list[str]:
    """Start one SuperNode for each data folder; return their names."""
    names = []
    for number, (key, data) in enumerate(zip(keys, prepared.clients(), strict=False)):
        names.append(f"{prepared.folder.name}-{number}")
        deployment.start_node(names[-1], {"data-folder": str(data)}, key=key)
    return names


def rounds_of(out: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl."""
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check_equal(prepared: Prepared, rounds: int | None = None) -> None:
    """Hold the first rounds of the deployment, or all, against those of the simulation."""
    here, there = (rounds_of(prepared.folder / out)[:rounds] for out in ("deployed", "simulated"))
    assert [one["round"] for one in here] == [one["round"] for one in there]
    for deployed, simulated in zip(here, there, strict=True):
        for key in ("loss", "cross-entropy", "regulariser"):
            _near(key, deployed[key], simulated[key], rel=1e-4, abs=1e-6)
        for key in ("train-accuracy", "val-accuracy", "test-accuracy"):
            _near(key, deployed[key], simulated[key], abs=1e-6)
        for key in ("asked", "answered", "rejected", "bytes"):
            assert deployed[key] == simulated[key], key


def check_outputs(prepared: Prepared) -> dict[str, Any]:
    """Hold the files of the deployment against those of the simulation; return the result."""
    out = prepared.folder / "deployed"
    simulated = {path.name for path in (prepared.folder / "simulated").iterdir()}
    # Of nFedGNN's users the server itself knows what it predicts: their table is its own.
    at_clients = AT_CLIENTS - ({"clients.csv"} if "nfedgnn" in prepared.case.config else set())
    expected = simulated - prepared.case.simulation_only - at_clients
    found = {path.name for path in out.iterdir()}
    assert found == expected, found ^ expected
    assert expected >= OUTPUTS
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert (result["engine"], result["clients"]) == ("flwr", prepared.simulated["clients"])
    return result


def check_kept(prepared: Prepared) -> None:
    """Hold what clients predict, where they live, against the accuracies that the server has."""
    result = json.loads((prepared.folder / "deployed" / "result.json").read_text("utf-8"))
    runs = [latest_in(folder) for folder in prepared.clients()]
    found = Predictions.join([one.predictions() for one in runs])
    assert all(one.model(one.predictions().client[0]) is not None for one in runs)
    for role in ("val", "test"):
        chosen = found.rows((found.role == NODE_ROLES.index(role)) & (found.label >= 0))
        right = chosen.predicted == chosen.label
        shares = [right[chosen.client == client].mean() for client in np.unique(chosen.client)]
        assert np.mean(shares) == pytest.approx(result[f"{role}-accuracy"], abs=1e-12), role


def check_one_layer(prepared: Prepared) -> None:
    """Hold the users' layers, where they live, against each other, and the server's vectors."""
    kept = [latest_in(folder) for folder in prepared.clients()]
    first, second = (one.model(one.clients[0]).state_dict() for one in kept)
    assert all(torch.equal(first[name], second[name]) for name in first)
    x, latent = small_graph(prepared.case.nodes).x, prepared.folder / "deployed/weights.safetensors"
    # The config's features sum to one. A run has a key of its own, from which first weights and
    # what is dropped come: its losses are not those of another run.
    expected = x / x.sum(1, keepdim=True) @ first["linear.weight"].T
    assert load_file(latent)["latent"].numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def _near(key: str, value: float | None, expected: float | None, **tolerance: float) -> None:
    """Hold a figure against another; what one run does not measure the other does not either."""
    if expected is None:
        assert value is None, key
    else:
        assert value == pytest.approx(expected, **tolerance), key
