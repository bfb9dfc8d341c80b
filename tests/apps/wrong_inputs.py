"""A corpus of wrong inputs: overrides, YAML files, arguments, saved graphs and folders of clients.

Each case is a command that must end with exit code 2 and one line, and write nothing. What rules
of settings refuse, and what a YAML file may not have, is tested in ``tests/config``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from app_helpers import own_graph
from torch_geometric.data import Data


class Case(NamedTuple):
    """One wrong input."""

    name: str
    words: tuple[str, ...]  # of the command behind `flower-graph`, `{here}` for the folder
    said: str  # what the line names: the place, as a regular expression
    make: Callable[[Path], None] = lambda folder: None  # writes the files that it needs


def all_cases() -> list[Case]:
    """Give the whole corpus."""
    cases = [*_settings(), *_arguments(), *_files(), *_client_folders()]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    return cases


# Settings ----------------------------------------------------------------------------------------

OVERRIDES = {
    "rounds": r"override 'rounds'",
    "rounds=0": r"rounds: 0",
    "round=3": r"round: .*rounds",
    "app=os": r"app: 'os'",
    "app=no.such.module": r"app: 'no.such.module'",
    "data.name=''": r"data.name: ''",
    "data.name=cora-lings": r"'cora-lings'.*'cora-linqs'",
    "data.name=WebKB/Oxford": r"data.name = 'WebKB/Oxford'",
    "data.name=nowhere.pt": r"nowhere.pt",
    "data.name=nowhere/": r"nowhere/",
    "data.split=geom-gcn": r"data.split",
    "device=cuda:99": r"device: 'cuda:99'",
}
YAMLS = {
    "malformed": ("data: {name: [\n", r"config mine.yaml"),
}


def _settings() -> Iterator[Case]:
    for override, said in OVERRIDES.items():
        yield Case(f"override {override}", ("run", "quickstart", override), said)
    for name, (text, said) in YAMLS.items():
        write = _writes("mine.yaml", text)
        yield Case(f"YAML {name}", ("run", "mine.yaml"), said, write)


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
    "run quickstart --out . --seeds 0,1": r"exists and is not empty",
    "run quickstart --out new/out device=cuda:99": r"device: 'cuda:99'",
    "run quickstart --seeds 0,1 device=cuda:99": r"device: 'cuda:99'",
    "run quickstart --engine flwr device=cuda:99": r"device: 'cuda:99'",
    "run quickstart --engine flwr data.name=nowhere.pt": r"nowhere.pt",
    "run quickstart --out graph.pt/out": r"graph.pt",
    "list more": r"more",
    "list --json": r"--json",
    "show": r"CONFIG",
    "show nothing": r"config 'nothing': unknown",
    "show quickstart rounds=0": r"rounds: 0",
    "partition": r"CONFIG",
    "partition nothing": r"config 'nothing'",
    "partition quickstart --supernodes 99999": r"99999",
    "partition quickstart --supernodes 0": r"supernodes: 0",
    "partition quickstart --out .": r"exists and is not empty",
    "partition fedscem/cora-linqs partition.clients=9999": r"partition.clients = 9999",
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


def _with(tensor: torch.Tensor, at: Any, value: float) -> torch.Tensor:
    result = tensor.clone()
    result[at] = value
    return result


def _graph_faults() -> dict[str, tuple[dict[str, Any], str]]:
    """Give what is changed in a graph of 30 nodes, and what the line names.

    What else a graph and a file may not be, ``tests/data/test_description.py`` and
    ``tests/data/test_pyg.py`` have.
    """
    good = own_graph()
    return {
        "NaN feature": ({"x": _with(good.x, (3, 1), float("nan"))}, r"x\[3, 1\]"),
        "nobody trains": ({"train_mask": torch.zeros(N, dtype=torch.bool)}, r"train_mask"),
    }


NFEDGNN = ("run", "nfedgnn/own-graph", "data.name=graph.pt", "data.split=public")
# Every fault goes through the first door; the others are tried with one graph and one file.
DOORS = {
    "nfedgnn": NFEDGNN,
    "fedscem": ("run", "fedscem/own-graph", "data.name=graph.pt"),
    "partition": ("partition", "fedgls/own-graph", "data.name=graph.pt"),
    "check": ("check", "graph.pt"),
}


def _files() -> Iterator[Case]:
    faults = {
        name: (_saves("graph.pt", **how), said) for name, (how, said) in _graph_faults().items()
    }
    faults |= {
        name: (_writes("graph.pt", content), said) for name, (content, said) in FILES.items()
    }
    for name, (write, said) in faults.items():
        for door in DOORS if name in ("NaN feature", "a truncated file") else ("nfedgnn",):
            yield Case(f"{door}: {name}", DOORS[door], said, write)


def _truncated(folder: Path) -> None:
    _saves("graph.pt")(folder)
    whole = (folder / "graph.pt").read_bytes()
    (folder / "graph.pt").write_bytes(whole[: len(whole) // 2])


FILES: dict[str, tuple[Any, str]] = {
    "a truncated file": (_truncated, r"graph.pt"),
    "a list of graphs": ([Data(), Data()], r"graph.pt"),
    "an empty graph": (Data(), r"graph.pt|x "),
    "a mapping of other things": ({"model": torch.zeros(3)}, r"graph.pt"),
    "a folder of that name": (lambda folder: (folder / "graph.pt").mkdir(), r"graph.pt"),
}


# Folders of clients ------------------------------------------------------------------------------


def _client_folders() -> Iterator[Case]:
    words = ("run", "fedgls/own-graph", "data.name=clients/")
    changes, said = _graph_faults()["NaN feature"]
    yield Case("client 1: NaN feature", words, said, _saves_clients(**changes))
    wide = {"x": torch.rand(N, 9)}
    yield Case("client 1: other features", words, r"9", _saves_clients(**wide))
    yield Case("a folder without files", words, r"clients", _makes("clients"))
    broken = _writes("clients/0.pt", b"not a graph")
    yield Case("a broken file", words, r"0.pt", broken)
    yield Case("ppfl: a broken file", ("run", "ppfl/own-graph", words[2]), r"0.pt", broken)


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
