"""Files as a run, a SuperNode and users write them, and what reads each."""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [
    str(Path(__file__).resolve().parents[up] / part) for up, part in ((1, "outputs"), (2, "."))
]

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from run_folders import GRAPH, make_run

from flower_graph import errors
from flower_graph.apps.cli.run import Job
from flower_graph.apps.cli.run import _done as done
from flower_graph.client.adaptor import read_state, write_state
from flower_graph.data.folders.party import CLIENTS, Manifest, open_folder, write_folder
from flower_graph.data.sources.pyg import load_file
from flower_graph.data.splits import geom_gcn_split
from flower_graph.errors import StateLostError
from flower_graph.method.load import load_config
from flower_graph.method.run import load_run
from flower_graph.outputs.client import IN_RUN
from flower_graph.outputs.figures import CLIENTS as CLIENTS_TABLE
from flower_graph.outputs.figures import CURVES, FigureLog, merge_clients, write_figures
from flower_graph.outputs.files import (
    Embeddings,
    SavedModels,
    SparseRows,
    read_embeddings,
    read_models,
    write_outputs,
)
from flower_graph.records.rounds import RoundReport, read_reports
from flower_graph.secure.parties.identity import Identity, Registry, new_identity, read_public
from flower_graph.secure.parties.journal import Journal
from flower_graph.storage import checkpoint
from flower_graph.storage.reading import reading
from flower_graph.storage.sealed import StateKey

NAMED = tuple(
    one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)
)
RUN = "0123456789abcdef" * 2
SETTINGS = {"app": "fedgls", "seed": 0}
MODULE = "flower_graph.outputs.modules.GCN"
SIZES = {"features": 3, "hidden": 4, "classes": 2}


class Target(NamedTuple):
    """A file, and what reads it."""

    path: Path
    read: Callable[[], Any]


def use_run(folder: Path) -> None:
    """Read all that a run's folder has."""
    run = load_run(folder)
    for look in (
        lambda: run.predictions().of_client(0).of_role("train").accuracy(),
        lambda: repr(run.predictions()),
        lambda: run.kept_rounds,
        lambda: run.model(0),
        lambda: run.predict(**GRAPH, client=0),
        lambda: repr(run.metrics),
        lambda: read_reports(folder / "metrics.jsonl"),
        lambda: (run.seeds, run.result),
    ):
        try:
            look()
        except NAMED:
            continue


def use_models(folder: Path) -> None:
    """Read models of several clients, and write out the weights of each."""
    for one in read_models(folder):
        for client in one.clients:
            one.state_dict(client)


def use_state(file: Path) -> None:
    """Read a SuperNode's state as it does when it starts."""
    with reading(file, StateLostError):
        read_state(file)


def make_several(folder: Path) -> None:
    """Write models that have rows of their own, and embeddings."""
    shared = {"lin.weight": torch.ones(4, 3), "lin.bias": torch.ones(4)}
    rows = SparseRows(
        "lin.weight", torch.ones(3, 4), torch.tensor([0, 2, 1]), torch.tensor([0, 2, 3]), True
    )
    models = [
        SavedModels(MODULE, SIZES, [0, 1], shared, {"own": torch.ones(2, 5)}, rows),
        SavedModels(MODULE, SIZES, [2, 3, 4], {}, {"own": torch.ones(3, 2)}),
    ]
    number = np.arange(4)
    beside = Embeddings(number, number, number, number > 1, np.ones((4, 3), np.float32))
    write_outputs(folder, None, models, beside)


def make_graphs(folder: Path) -> list[Path]:
    """Write one graph in every form."""
    folder.mkdir()
    edges, y = torch.tensor([[0, 1, 2], [1, 2, 3]]), torch.tensor([0, 1, 0, 1])
    masks = {f"{part}_mask": y == 0 for part in ("train", "val", "test")}
    graph = {"x": torch.rand(4, 3), "edge_index": edges, "y": y, "names": tuple("abcd")}
    torch.save(graph | {"x": torch.eye(4).to_sparse()}, folder / "g.pt")
    torch.save(graph | masks, folder / "old.pt", _use_new_zipfile_serialization=False)
    nodes = [{"id": one, "label": "u" if k % 2 else "v", "age": k, "list": [1, k]}
             for k, one in enumerate("abcd")]  # fmt: skip
    links = [{"source": "a", "target": "b"}, {"source": "b", "target": "d"}]
    (folder / "g.json").write_text(json.dumps({"nodes": nodes, "links": links}))
    head = '<graphml><key id="k" for="node" attr.name="label"/><key id="v" for="node" attr.name='
    body = "".join(f'<node id="{one}"><data key="k">{one}</data><data key="v">1</data></node>'
                   for one in "abcd")  # fmt: skip
    tail = '<edge source="a" target="b"/></graph></graphml>'
    (folder / "g.graphml").write_text(f'{head}"age"/><graph>{body}{tail}')
    tables = folder / "tables"
    tables.mkdir()
    (tables / "nodes.csv").write_text(
        "name,label,age\n" + "".join(f"{one},u,1\n" for one in "abcd")
    )
    (tables / "edges.csv").write_text("source,target\na,b\nb,c\n")
    return [*(folder / f"{one}" for one in ("g.pt", "old.pt", "g.json", "g.graphml"))]


def make_all(place: Path) -> list[Target]:
    """Write honest files of every kind; give them with their readers."""
    run, several = make_run(place / "run"), place / "several"
    report = RoundReport(1, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0, 2, 2).to_record()
    (run / "metrics.jsonl").write_text(f"{json.dumps(report)}\n" * 3)
    (run / "clients" / "0" / "outputs.json").write_text('{"round": 3}')
    make_several(several)
    targets = [Target(one, lambda: use_run(run)) for one in sorted(run.rglob("*")) if one.is_file()
               and one.suffix != ".csv" and "1" not in one.parts]  # fmt: skip
    targets += [Target(several / f"models.{end}", lambda: use_models(several))
                for end in ("json", "safetensors")]  # fmt: skip
    targets.append(Target(several / "embeddings.npz", lambda: read_embeddings(several)))
    for file in make_graphs(place / "graphs"):
        targets.append(Target(file, lambda file=file: load_file(file)))  # type: ignore[misc]
    tables = place / "graphs" / "tables"
    targets += [
        Target(tables / f"{one}.csv", lambda: load_file(tables)) for one in ("nodes", "edges")
    ]
    masks = {f"{part}_mask": np.ones(5, bool) for part in ("train", "val", "test")}
    np.savez_compressed(place / "split.npz", **masks)
    targets.append(Target(place / "split.npz", lambda: geom_gcn_split(place / "split.npz", 5)))
    return targets + of_figures(place) + of_parties(place) + of_supernode(place)


def of_figures(place: Path) -> list[Target]:
    """Write what clients of a simulation measured, and the result of the command line's run."""
    out, log = place / "simulated", FigureLog(place / "figures")
    for number in range(3):
        log.add(number, [0, 1], loss=[0.5, 0.25], accuracy=np.eye(2, 3), nodes=[4, 5])
    tables = out / IN_RUN / "0"
    tables.mkdir(parents=True)
    write_figures(tables, log.read(), {"last": 2, "best": 1}, 1)
    job = Job("fedgls", [], load_config("quickstart"), out)
    (out / "result.json").write_text('{"config": {"rounds": 3}}')
    return [
        Target(place / "figures", lambda: FigureLog(place / "figures").read(2)),
        *(Target(tables / name, lambda: merge_clients(out)) for name in (CLIENTS_TABLE, CURVES)),
        Target(out / "result.json", lambda: done(job)),
    ]


def of_parties(place: Path) -> list[Target]:
    """Write a registry, keys and a journal."""
    keys = [new_identity(place / f"key-{number}") for number in range(5)]
    registry = Registry({}, 10)
    for number, key in enumerate(keys):
        registry = registry.with_party(key, [range(10 * number, 10 * number + 10)])
    registry.write(place / "registry.json")
    journal = Journal(place / "own.journal")
    journal.contribute(3, b"a run")
    return [
        Target(place / "registry.json", lambda: Registry.read(place / "registry.json")),
        Target(place / "key-0", lambda: Identity.read(place / "key-0", registry)),
        Target(place / "key-0.pub", lambda: read_public(place / "key-0.pub")),
        Target(place / "own.journal", lambda: Journal(place / "own.journal").last(b"a run")),
    ]


def of_supernode(place: Path) -> list[Target]:
    """Write checkpoints, a data folder, a state, a state's key and settings."""
    saved = place / "checkpoints"
    client = checkpoint.round_folder(saved, 1) / "client-0.safetensors"
    checkpoint.save_client(client, {"a": torch.arange(6.0), "b": torch.tensor(2)}, RUN)
    state = {"w": torch.arange(40.0), "clients": [1, 2, 3], "known": {"up": {"a": 1}}}
    checkpoint.save_server(saved, 1, state)
    folder = place / "client-0003"
    said = Manifest(CLIENTS, SETTINGS, [3], 5, 4, 2)
    write_folder(folder, said, {"3.y": torch.arange(4)})
    context = place / "state" / "run-1" / "context-0.state"
    write_state(context, RecordDict({"a": ConfigRecord({"b": [1, 2]})}), 3)
    secret, given = place / "secret", {"state-key": str(place / "secret")}
    secret.write_text("a passphrase of ours")
    secret.chmod(0o600)
    (place / "mine.yaml").write_text("app: fedgls\nrounds: 3\ndata: {name: cora-linqs}\n")
    return [
        Target(client, lambda: checkpoint.load_client(client, RUN)),
        Target(client.with_name("server.safetensors"), lambda: checkpoint.load_server(saved, 1)),
        *(Target(folder / name, lambda: open_folder(folder, SETTINGS, CLIENTS))
          for name in ("manifest.json", "data.safetensors")),
        Target(context, lambda: use_state(context)),
        Target(secret, lambda: StateKey.of(given, place)),
        Target(place / "mine.yaml", lambda: load_config(str(place / "mine.yaml"))),
    ]  # fmt: skip
