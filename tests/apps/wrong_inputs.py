"""A corpus of wrong inputs: settings, YAML files, arguments, saved graphs and folders of clients.

Each case is a command that must end with exit code 2 and one line, and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from app_helpers import own_graph
from torch_geometric.data import Data, HeteroData

from flower_graph.config.rules import Choice
from flower_graph.config.schema import Setting, settings_of
from flower_graph.method.registry import known_apps, schema_of


class Case(NamedTuple):
    """One wrong input."""

    name: str
    words: tuple[str, ...]  # of the command behind `flower-graph`, `{here}` for the folder
    said: str  # what the line names: the place, as a regular expression
    make: Callable[[Path], None] = lambda folder: None  # writes the files that it needs


def all_cases() -> list[Case]:
    """Give the whole corpus."""
    cases = [*_settings(), *_yamls(), *_arguments(), *_files(), *_client_folders()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return cases


# Settings: of every key of every method a value of the wrong type, and one that its rule refuses --


def _settings() -> Iterator[Case]:
    seen = set[str]()
    for app in known_apps():
        for one in settings_of(schema_of(app)):
            if one.key in seen or one.key == "app":
                continue
            seen.add(one.key)
            for value in _wrong_values(one):
                words = ("run", "mine.yaml", f"{one.key}={value}")
                write = _writes("mine.yaml", f"app: {app}\n")
                yield Case(f"{one.key}={value}", words, rf"{one.key}: ", write)


def _wrong_values(one: Setting) -> Iterator[str]:
    if any(isinstance(rule, Choice) for rule in one.rules):
        yield "nonsense"
    elif "list" in one.wanted:
        yield from ("half", "[0.6, 0.2]", "[0.9, 0.9, 0.9]")
    elif "number" in one.wanted and one.rules:
        yield "-1" if "whole" in one.wanted else "nan"
    elif "text" not in one.wanted:
        yield "several"


OVERRIDES = {
    "rounds": r"override 'rounds': write key=value",
    "rounds=": r"override 'rounds='",
    "=3": r"override '=3'",
    "round=3": r"round: unknown key; did you mean rounds\?",
    "data=cora": r"data: a section, not a setting",
    "strategy.nme=x": r"strategy.nme: unknown key",
    "data.name=[1": r"override 'data.name=\[1': malformed",
    "app=nfedgn": r"app: 'nfedgn' is not one of .* did you mean nfedgnn",
    "app=os": r"app: 'os'",
    "app=no.such.module": r"app: 'no.such.module'",
    "rounds=1e3": r"rounds: 1000.0 is not a whole number",
    "seed=1.5": r"seed: 1.5 is not a whole number",
    "rounds=null": r"rounds: null is not a whole number",
    "data.name=''": r"data.name: '' is not allowed",
    "data.name=cora-lings": r"'cora-lings': unknown data set; did you mean 'cora-linqs'",
    "data.name=WebKB/Oxford": r"data.name = 'WebKB/Oxford'",
    "data.name=nowhere.pt": r"nowhere.pt",
    "data.name=nowhere/": r"nowhere/",
    "data.split=geom-gcn": r"data.split",
    "device=cuda:99": r"device: 'cuda:99' is not there",
    "data.root=${nothing}": r"nothing",
}


def _yamls() -> Iterator[Case]:
    for override, said in OVERRIDES.items():
        yield Case(f"override {override}", ("run", "quickstart", override), said)
    for name, (text, said) in YAMLS.items():
        write = _writes("mine.yaml", text)
        yield Case(f"YAML {name}", ("run", "mine.yaml"), said, write)


YAMLS = {
    "malformed": ("data: {name: [\n", r"config mine.yaml: malformed YAML"),
    "with a tab": ("data:\n\tname: csbm\n", r"config mine.yaml: malformed YAML"),
    "list": ("- data\n- model\n", r"config mine.yaml: a list"),
    "text": ("just words\n", r"just words: unknown key.*mine.yaml"),
    "number": ("5\n", r"config mine.yaml"),
    "not UTF-8": (b"data: \xff\xfe", r"config file mine.yaml: it is not UTF-8"),
    "binary": (bytes(range(256)), r"config file mine.yaml"),
    "unknown key": ("dta: {name: csbm}\n", r"dta.name: unknown key.*mine.yaml"),
    "unknown section": ("modell:\n  hidden: 4\n", r"modell.hidden: unknown key.*mine.yaml"),
    "section as value": ("data: csbm\n", r"data: a section.*mine.yaml"),
    "value as section": ("rounds: {a: 1}\n", r"rounds"),
    "wrong type": ("rounds: many\n", r"rounds: 'many' is not a whole number.*mine.yaml"),
    "of another method": ("app: nfedgnn\npartition: {clients: 3}\n", r"partition.clients: unknown"),
    "unknown app": ("app: fedavg\n", r"app: 'fedavg'"),
    "app as number": ("app: 3\n", r"app: 3"),
    "app as list": ("app: [nfedgnn]\n", r"app: "),
    "no parent": ("defaults: nfedgnn/coral\n", r"nfedgnn/coral"),
    "own parent": ("defaults: mine.yaml\n", r"defaults: .*mine.yaml"),
    "two parents": ("defaults: [quickstart, nfedgnn/cora]\n", r"defaults: .*one config"),
    "missing parent file": ("defaults: other.yaml\n", r"other.yaml"),
    "interpolation to nowhere": ("data: {name: '${model.nme}'}\n", r"model.nme"),
    "twice the same key": ("rounds: 1\nrounds: 2\n", r"mine.yaml"),
    "alias to nowhere": ("data: *base\n", r"config mine.yaml: malformed YAML"),
    "two documents": ("rounds: 1\n---\nrounds: 2\n", r"config mine.yaml"),
    "a number as key": ("1: 2\n", r"1: unknown key"),
    "old key": ("data: {presence: true}\n", r"data.presence"),
    "budget with checkpoints": (
        "privacy: {epsilon: 1}\ncheckpoint_every: 5\n",
        r"checkpoint_every: 5 is not allowed with privacy.epsilon",
    ),
    "more features in use than there are": (
        "data: {name: csbm, active: 4000}\n",
        r"data.num_features: 512 .*data.active",
    ),
    "shares above one": (
        "app: ppfl\npartition: {clients: 4, private_share: 0.3}\n",
        r"partition.private_share: 0.3",
    ),
    "a sum over one client": ("app: fedscem\npartition: {clients: 1}\n", r"partition.clients: 1"),
    "GAT without labels": (
        "app: ppfl\nmodel: {name: gat}\npartition: {ratios: [0, 0.5, 0.5]}\n",
        r"partition.ratios",
    ),
}


# Arguments ---------------------------------------------------------------------------------------

ARGUMENTS = {
    "": r"required: COMMAND",
    "fly": r"invalid choice: 'fly'",
    "run": r"CONFIG: missing",
    "run rounds=3": r"CONFIG: missing",
    "run quikstart": r"config 'quikstart': unknown; did you mean quickstart",
    "run nothing.yaml": r"config file nothing.yaml",
    "run quickstart --seeds 0,x": r"--seeds '0,x'",
    "run quickstart --seeds 1,1": r"--seeds '1,1'",
    "run quickstart --seeds=-1": r"--seeds '-1'",
    "run quickstart --seeds": r"--seeds",
    "run quickstart --seed 1": r"--seed",
    "run quickstart --supernodes 0": r"--supernodes 0",
    "run quickstart --supernodes -3": r"--supernodes -3",
    "run quickstart --supernodes many": r"--supernodes",
    "run quickstart --supernodes 99999": r"supernodes: 99999 for 2708 clients",
    "run quickstart --engine ray": r"--engine",
    "run quickstart --out a --resume b": r"--resume",
    "run --resume nowhere": r"--resume nowhere: no run to resume",
    "run quickstart --resume nowhere": r"nowhere",
    "run quickstart --out graph.pt": r"graph.pt: is a file",
    "run quickstart --out .": r"exists and is not empty",
    "run quickstart --out graph.pt/out": r"graph.pt",
    "list more": r"more",
    "list --json": r"--json",
    "show": r"CONFIG",
    "show nothing": r"config 'nothing': unknown",
    "show quickstart rounds=0": r"rounds: 0",
    "partition": r"CONFIG",
    "partition nothing": r"config 'nothing'",
    "partition quickstart --supernodes 99999": r"99999",
    "partition quickstart --supernodes 3 --seeds 0,1": r"--supernodes 3: 2 seeds",
    "partition quickstart --true-edges": r"--true-edges",
    "partition quickstart --out graph.pt": r"graph.pt: is a file",
    "partition quickstart data.name=nowhere.pt": r"nowhere.pt",
    "reproduce": r"PAPER",
    "reproduce nothing": r"nothing",
    "reproduce nfedgnn --only data": r"--only 'data'",
    "reproduce nfedgnn --only dta=Cora": r"dta: unknown key",
    "reproduce nfedgnn --only data=Coral": r"--only data=Coral: unknown",
    "reproduce nfedgnn --rounds 0": r"--rounds 0",
    "reproduce nfedgnn --seeds x": r"--seeds 'x'",
    "audit": r"CONFIG: missing",
    "audit nothing": r"config 'nothing'",
    "audit quickstart --rounds 1": r"--rounds 1",
    "audit quickstart --epsilon none": r"--epsilon 'none'",
    "audit quickstart --epsilon -1": r"--epsilon",
    "audit quickstart --page .": r"--page",
    "audit --page .": r"--page",
    "audit quickstart data.name=nowhere.pt": r"nowhere.pt",
    "audit quickstart device=cuda:99": r"device: 'cuda:99' is not there",
    "check": r"",
    "check nothing.pt": r"nothing.pt",
    "check nothing": r"nothing",
    "check nothing/": r"nothing.*no such folder",
    "check quickstart rounds=0": r"rounds: 0",
    "check graph.pt device=cuda:99": r"device: 'cuda:99' is not there",
    "check graph.pt --out graph.pt": r"graph.pt: is a file",
    "check graph.pt rounds": r"override 'rounds'",
}


def _arguments() -> Iterator[Case]:
    for line, said in ARGUMENTS.items():
        yield Case(f"flower-graph {line}", tuple(line.split()), said, _saves("graph.pt"))


# Saved graphs, each through the doors that read them ---------------------------------------------

N = 30
NAN, INFINITE = float("nan"), float("inf")


def _with(tensor: torch.Tensor, at: Any, value: float) -> torch.Tensor:
    result = tensor.clone()
    result[at] = value
    return result


def _graph_faults() -> dict[str, tuple[dict[str, Any], str]]:
    """Give what is changed in a graph of 30 nodes, and what the line names."""
    good = own_graph()
    edges, y, mask = good.edge_index, good.y, good.train_mask
    return {
        "NaN feature": ({"x": _with(good.x, (3, 1), NAN)}, r"x\[3, 1\]"),
        "infinite feature": ({"x": _with(good.x, (4, 2), INFINITE)}, r"x\[4, 2\]"),
        "features of one dimension": ({"x": torch.rand(N)}, r"x "),
        "features of three dimensions": ({"x": torch.rand(N, 2, 2)}, r"x "),
        "fewer rows than labels": ({"x": torch.rand(N - 1, 3)}, r"\b(29|30)\b"),
        "complex features": ({"x": torch.rand(N, 3).to(torch.complex64)}, r"x "),
        "features as text": ({"x": ["a"] * N}, r"x "),
        "edge out of range": (
            {"edge_index": _with(edges, (1, 2), 99)},
            r"\[1, 2\] is 99",
        ),
        "negative edge": ({"edge_index": _with(edges, (0, 2), -1)}, r"\[0, 2\] is -1"),
        "edges in three rows": ({"edge_index": torch.cat([edges, edges[:1]])}, r"edge_index"),
        "edges as floats": ({"edge_index": edges.float() + 0.5}, r"edge_index"),
        "edges as text": ({"edge_index": "0-1"}, r"edge_index"),
        "labels missing": ({"y": None}, r"has no y"),
        "too few labels": ({"y": y[:-1]}, r"\b(29|30)\b"),
        "several labels a node": ({"y": torch.ones(N, 4)}, r"y "),
        "a fractional label": ({"y": _with(y.float(), 5, 0.5)}, r"y"),
        "a label that is NaN": ({"y": torch.full((N,), NAN)}, r"y"),
        "no node labelled": ({"y": torch.full_like(y, -1)}, r"y|label"),
        "a mask too short": ({"train_mask": mask[:-1]}, r"train_mask"),
        "masks of numbers": ({"train_mask": torch.arange(N)}, r"train_mask"),
        "masks that overlap": ({"val_mask": mask.clone()}, r"train_mask|val_mask"),
        "an unlabelled training node": ({"y": _with(y, 0, -1)}, r"train_mask|y\[0\]|node 0"),
    }


NFEDGNN = ("run", "nfedgnn/own-graph", "data.name=graph.pt", "data.split=public")
DOORS = {
    "nfedgnn": NFEDGNN,
    "fedscem": ("run", "fedscem/own-graph", "data.name=graph.pt"),
    "partition": ("partition", "fedgls/own-graph", "data.name=graph.pt"),
    "check": ("check", "graph.pt"),
}


def _files() -> Iterator[Case]:
    for name, (changes, said) in _graph_faults().items():
        for door, words in DOORS.items():
            yield Case(f"{door}: {name}", words, said, _saves("graph.pt", **changes))
    for name, (content, said) in FILES.items():
        for door in ("nfedgnn", "check"):
            write = _writes("graph.pt", content)
            yield Case(f"{door}: {name}", DOORS[door], said, write)


def _truncated(folder: Path) -> None:
    _saves("graph.pt")(folder)
    whole = (folder / "graph.pt").read_bytes()
    (folder / "graph.pt").write_bytes(whole[: len(whole) // 2])


FILES: dict[str, tuple[Any, str]] = {
    "an empty file": (b"", r"graph.pt"),
    "a truncated file": (_truncated, r"graph.pt"),
    "a text file": ("not a graph\n", r"graph.pt"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), r"graph.pt"),
    "a tensor": (torch.zeros(3), r"graph.pt"),
    "a list of graphs": ([Data(), Data()], r"graph.pt"),
    "an empty graph": (Data(), r"graph.pt|x "),
    "a heterogeneous graph": (HeteroData(), r"graph.pt.*|HeteroData"),
    "a mapping of other things": ({"model": torch.zeros(3)}, r"graph.pt"),
    "a folder of that name": (lambda folder: (folder / "graph.pt").mkdir(), r"graph.pt"),
}


# Folders of clients ------------------------------------------------------------------------------


def _client_folders() -> Iterator[Case]:
    doors = {
        "fedgls": ("run", "fedgls/own-graph", "data.name=clients/"),
        "ppfl": ("run", "ppfl/own-graph", "data.name=clients/"),
    }
    for door, words in doors.items():
        for name in ("NaN feature", "edge out of range", "a mask too short", "labels missing"):
            changes, said = _graph_faults()[name]
            yield Case(f"{door}, client 1: {name}", words, said, _saves_clients(**changes))
        wide = {"x": torch.rand(N, 9)}
        yield Case(f"{door}, client 1: other features", words, r"9", _saves_clients(**wide))
        empty = Case(f"{door}: a folder without files", words, r"clients", _makes("clients"))
        yield empty
        yield Case(f"{door}: no folder", words, r"clients")
        broken = _writes("clients/0.pt", b"not a graph")
        yield Case(f"{door}: a broken file", words, r"0.pt", broken)


# What cases write --------------------------------------------------------------------------------


def _saves(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(own_graph(**changes), folder / name)


def _makes(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).mkdir()


def _saves_clients(**changes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "clients").mkdir()
        for number in range(2):
            shared = {"identity": torch.arange(N), "public": torch.arange(N) < N // 2}
            data = own_graph(**shared, **(changes if number else {}))
            torch.save(data, folder / "clients" / f"{number}.pt")

    return make


def _writes(name: str, content: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if callable(content):
            content(folder)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            torch.save(content, path)

    return write
