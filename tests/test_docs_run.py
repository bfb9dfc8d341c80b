"""The pages: their commands and Python run as they stand, and say what the pages say."""

import csv
import json
import math
import re
import runpy
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from doc_helpers import DOCS, run_blocks
from federation import one_fast
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from own_graphs import valued
from torch_geometric.data import Data

from flower_graph import MaskedEmbeddingAveraging
from flower_graph.apps.cli import main as cli
from flower_graph.client.adaptor import make_client_app
from flower_graph.config.common import DataConfig
from flower_graph.data.sources.datasets import load_graph, read_file
from flower_graph.data.sources.tables import IDENTITY, OWN
from flower_graph.flower_compat import Mod
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.strategy import StructureFedAvg, initial_arrays
from flower_graph.strategies.fedscem.config import EgoSettings

Captured = pytest.CaptureFixture[str]

# README -------------------------------------------------------------------------------------------


README = DOCS.parent / "README.md"
README_TEXT = README.read_text(encoding="utf-8")


def test_its_figures_stand_before_the_link_to_the_table_that_they_are_from() -> None:
    for said, table in re.findall(r"(.*?)\[table\]\(([^)]+)\)", README_TEXT, re.DOTALL):
        found = (DOCS.parent / table).read_text(encoding="utf-8")
        figures = re.findall(r"\d\.\d+ ± \d\.\d+", said)
        assert figures and all(figure in found for figure in figures)


def test_its_methods_and_settings_are_known(capsys: Captured) -> None:
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    (table,) = re.findall(r"## Which method\n\n(.*?)\n\n", README_TEXT, re.DOTALL)
    named = set(re.findall(r"`([a-z]+)`", table))
    assert len(named) >= 6
    assert all(re.search(rf"\b{name}\b", listed) for name in named)
    for config in re.findall(r"flower-graph (?:run|sweep) ([\w/-]+)", README_TEXT):
        assert cli.main(["show", config, "--plain"]) == 0
        if key := re.search(rf"sweep {config} \S+ (\S+)=", README_TEXT):
            shown = capsys.readouterr().out
            assert key[1].split(".")[-1] in shown


@pytest.mark.slow
def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(README, 1)
    space = run_blocks(README, 1)  # again, in the folders of the first
    said = capsys.readouterr().out
    assert "difference" in said and "client 3, test nodes: 0." in said
    assert space["found"].client.tolist() == [3] * len(space["right"])


# docs/using-a-run.md ------------------------------------------------------------------------------


USING = DOCS / "using-a-run.md"
USING_TEXT = USING.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_pages_first_commands_and_python_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = load_graph(DataConfig())
    new = {"x": (graph.x[:300] > 0).float(), "edge_index": graph.edge_index}
    inside = (new["edge_index"] < 300).all(0)
    torch.save(new | {"edge_index": new["edge_index"][:, inside]}, "new-papers.pt")
    first, *others = re.findall(r"```\n(flower-graph .+?)```", USING_TEXT, re.DOTALL)
    deployed = next(block for block in others if "--data-folder" in block)
    for line in first.splitlines():
        words = shlex.split(line, comments=True)[1:]
        words = [word.replace("rounds=20", "rounds=2") for word in words]
        assert cli.main(words) == 0, capsys.readouterr().err
    assert len(Path("cora.csv").read_text().splitlines()) > 500
    capsys.readouterr()
    space = run_blocks(USING, 1, space={"__name__": "page"})
    assert "right" in capsys.readouterr().out
    run = space["run"]
    assert run.config.model.hidden == 32 and run.seeds[0] is run
    shown = [shlex.split(line)[1:] for line in deployed.splitlines()]
    assert all(words[:2] == ["predict", "--data-folder"] for words in shown)


# docs/own-data.md ---------------------------------------------------------------------------------


PAGE = DOCS / "own-data.md"
TEXT = PAGE.read_text(encoding="utf-8")
COMMANDS = re.findall(r"^flower-graph (.+)$", TEXT, re.MULTILINE)
QUICK = ["rounds=2", "device=cpu"]
BRIEF = ["judge.mlp=false", "gat.epochs=5"]  # the classifiers of PPFL-GNN take most of its time
LABELS = ("cat", "dog", "cow")


def people(nodes: int, start: int = 0, **more: Any) -> nx.Graph:
    """Make a ring with chords, whose nodes have classes, features and names."""
    graph = nx.Graph()
    draw = torch.Generator().manual_seed(start)
    for node in range(start, start + nodes):
        noise = torch.rand(4, generator=draw).tolist()
        said = {f"f{i}": noise[i] + (i == node % 3) for i in range(4)}
        graph.add_node(f"person {node}", label=LABELS[node % 3], **said, **more)
    names = list(graph)
    for place, name in enumerate(names):
        for step in (1, 3, 6):
            graph.add_edge(name, names[(place + step) % nodes])
    return graph


def write(path: Path, graph: nx.Graph) -> None:
    """Write a graph as the page has it for this kind of name."""
    if path.suffix == ".graphml":
        nx.write_graphml(graph, path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(nx.node_link_data(graph)), encoding="utf-8")
    elif path.suffix == ".pt":
        place = {name: row for row, name in enumerate(graph)}
        pairs = torch.tensor([[place[a], place[b]] for a, b in graph.edges]).T
        x = torch.tensor([[said[f"f{i}"] for i in range(4)] for said in graph.nodes.values()])
        y = [said["label"] for said in graph.nodes.values()]
        torch.save(Data(x=x, edge_index=pairs, y=y, identity=list(graph)), path)
    else:
        path.mkdir()
        keys = ["label", *(f"f{i}" for i in range(4))]
        with (path / "nodes.csv").open("w", encoding="utf-8", newline="") as stream:
            rows = ([name, *(said[key] for key in keys)] for name, said in graph.nodes.items())
            csv.writer(stream).writerows([["name", *keys], *rows])
        with (path / "edges.csv").open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows([["source", "target"], *graph.edges])


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write everything that the page's commands name, and go there."""
    monkeypatch.chdir(tmp_path)
    for name in ("people", "graph.graphml", "graph.json", "graph.pt", "new-people"):
        write(tmp_path / name, people(90))
    write(tmp_path / "people-now", people(95))
    torch.save(valued(), tmp_path / "incomes.pt")
    (tmp_path / "clients").mkdir()
    (names,) = re.findall(r"^clients/\n((?:  .+\n)+)", TEXT, re.MULTILINE)
    for number, line in enumerate(names.splitlines()):
        write(tmp_path / "clients" / line.split()[0].rstrip("/"), people(40, 15 * number))
    (tmp_path / "communities").mkdir()
    for number in range(3):
        write(tmp_path / "communities" / f"{number}.pt", people(30, 30 * number))
    graphless = Data(**{k: v for k, v in read_file(Path("communities/0.pt")).items()})
    graphless.edge_index = None
    torch.save(graphless, tmp_path / "communities" / "0.pt")
    return tmp_path


def go_on_from_a_run(words: list[str]) -> None:
    """Do the run that a command of the page goes on from; name users and rounds of the test's."""
    app, out = ("fedgls", "runs/people") if words[0] == "predict" else ("nfedgnn", "out")
    saves = ["checkpoint_every=2"] * (app == "nfedgnn")
    first = ["run", f"{app}/own-graph", "data.name=people/", *QUICK, *saves, "--out", out]
    assert cli.main(first) == 0
    for place, word in enumerate(words):
        if word.startswith("rounds="):
            words[place] = "rounds=4"
        elif word.startswith("data.remove="):
            words[place] = "data.remove=[person 1,person 2]"


@pytest.mark.parametrize(
    "command",
    # `check` tries every method, and PPFL-GNN's classifiers take seconds; a sweep is many runs.
    [
        pytest.param(
            one,
            marks=[pytest.mark.slow] * bool(re.match("check|sweep|run ppfl", one))
            + [pytest.mark.release] * one.startswith("sweep"),
        )
        for one in COMMANDS
    ],
)
def test_every_command_of_the_page_runs(command: str, files: Path, capsys: Captured) -> None:
    words = shlex.split(command)
    if words[0] == "predict" or "--resume" in words:
        go_on_from_a_run(words)
        assert cli.main(words) == 0, capsys.readouterr().err
        return
    if words[0] == "run":
        words += [*QUICK, *(BRIEF if words[1].startswith("ppfl") else ()), "--out", "out"]
    assert cli.main(words) == 0, capsys.readouterr().err
    if words[0] == "run":
        result = json.loads((files / "out" / "result.json").read_text(encoding="utf-8"))
        assert result["rounds"] == 2 and result["rejected"] == 0
        if "clients/" in command or "communities/" in command:
            assert result["clients"] == 3
    if words[0] == "check":
        record = json.loads((files / "found" / "check.json").read_text(encoding="utf-8"))
        assert record["figures"]["nodes"] == 90
    if words[0] == "partition":
        parties = sorted(path.name for path in (files / "parties").glob("*") if path.is_dir())
        assert parties == ["client-0000", "client-0001", "client-0002", "server"]


def test_python_of_the_page_runs(files: Path, capsys: Captured) -> None:
    run_blocks(PAGE, 1)
    assert capsys.readouterr().out.startswith("90 nodes, 3 classes: ")


def test_the_tables_of_the_page_are_read(tmp_path: Path) -> None:
    (nodes,) = re.findall(r"```\n(name,label,split.+?)```", TEXT, re.DOTALL)
    (edges,) = re.findall(r"```\n(source,target.+?)```", TEXT, re.DOTALL)
    (cut,) = re.findall(r"```\n(name,client.+?)```", TEXT, re.DOTALL)
    (tmp_path / "nodes.csv").write_text(nodes, encoding="utf-8")
    (tmp_path / "edges.csv").write_text(edges, encoding="utf-8")
    words = ["run", "nfedgnn/own-graph", f"data.name={tmp_path}/", *QUICK]
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    found = read_file(tmp_path)
    assert found["x"].tolist() == [[30, 1.5], [40, 2], [50, 3]]
    assert found["edge_index"].tolist() == [[0, 1], [1, 2]]
    (tmp_path / "nodes.csv").write_text(cut, encoding="utf-8")
    (tmp_path / "edges.csv").write_text("source,target\n", encoding="utf-8")
    assert read_file(tmp_path)[IDENTITY] == ["anna", "anna", "cora"]
    columns = re.findall(r"^\| (`.+?) \| ", TEXT, re.MULTILINE)
    named = {name for column in columns for name in re.findall(r"`(\w+)`", column)}
    assert {*OWN, "name", "id"} <= named


# docs/fedgls.md, docs/fedscem.md, docs/ppfl.md, docs/reference/alignment.md -----------------------

BLOCKS = {"fedgls": 3, "fedscem": 2, "ppfl": 3, "reference/alignment": 2}
PPFL_TEXT = (DOCS / "ppfl.md").read_text(encoding="utf-8")
FEDSCEM = EgoSettings(num_features=8, num_classes=3, learning_rate=0.01, mu=1.0, tau=1.0)


def blocks_of(page: str, *numbers: int, space: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run blocks of a page, which stand behind each other."""
    chosen = slice(numbers[0], numbers[-1] + 1)
    return run_blocks(DOCS / f"{page}.md", BLOCKS[page], chosen, space)


@cache
def defined(page: str) -> dict[str, Any]:
    """Run the page's first block of code: data, model or settings, both halves of the app."""
    return blocks_of(page, 0) | {"InProcessGrid": InProcessGrid}


@pytest.mark.slow
def test_fedgls_learns(capsys: Captured) -> None:
    space = blocks_of("fedgls", 1, space=defined("fedgls"))
    metrics = space["result"].evaluate_metrics_clientapp
    assert capsys.readouterr().out == f"test accuracy {metrics[20]['test-accuracy']:.3f}\n"
    first, last = (metrics[number]["test-accuracy"] for number in (1, 20))
    assert first < 0.7 < 0.85 < last


@pytest.mark.slow
def test_other_strategies_of_flower_take_fedgls_place(capsys: Captured) -> None:
    space = blocks_of("fedgls", 2, space=defined("fedgls"))
    said = dict(reversed(line.split()) for line in capsys.readouterr().out.splitlines())
    assert list(said) == [type(strategy).__name__ for strategy in space["strategies"]]
    assert min(float(value) for value in said.values()) > 0.75  # the start is below 0.5


@pytest.mark.parametrize(
    "who", one_fast(["the client", "the server, clipped by clients", "the server"], "the client")
)
def test_differential_privacy_of_flower_goes_around_both_halves(who: str) -> None:
    """The three ways that the page on privacy has, around the strategy with its checks."""
    strategy: Strategy = StructureFedAvg(defined("fedgls")["settings"])
    mods: list[Mod] = []
    if who == "the client":
        mods = [LocalDpMod(clipping_norm=2.0, sensitivity=0.01, epsilon=10.0, delta=1e-5)]
    elif who == "the server":
        strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 2.0, 8)
    else:
        strategy = DifferentialPrivacyClientSideFixedClipping(strategy, 0.1, 2.0, 8)
        mods = [fixedclipping_mod]
    app = make_client_app(defined("fedgls")["client_fn"], train_mods=mods)
    grid = InProcessGrid(app, num_supernodes=8)
    start = initial_arrays(defined("fedgls")["settings"])
    # The strategy itself knows what to start from; a wrapper has Flower's `start`.
    first = {} if isinstance(strategy, StructureFedAvg) else {"initial_arrays": start}
    found = strategy.start(grid, num_rounds=6, **first).evaluate_metrics_clientapp
    assert found[1]["test"] < 0.75 < 0.8 < found[6]["test"]


@pytest.mark.slow
def test_fedscem_equals_a_run_in_the_clear(capsys: Captured) -> None:
    space = blocks_of("fedscem", 0, 1)
    result = space["result"]
    losses, metrics = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    assert sorted(metrics) == list(range(1, 21))
    said = re.fullmatch(r"12 clients, test accuracy (0\.\d{3}|1\.000)\n", capsys.readouterr().out)
    assert said is not None and float(said[1]) == round(metrics[20]["test-accuracy"], 3)
    assert metrics[1]["test-accuracy"] < 0.9 < 0.95 < metrics[20]["test-accuracy"]

    plain = MaskedEmbeddingAveraging(FEDSCEM, alignment="plain", aggregation="plain")
    clear = plain.start(InProcessGrid(space["client_app"], num_supernodes=12), num_rounds=1)
    # The first round's means, in steps of 2^-12, have been through one fusion.
    assert clear.train_metrics_clientapp[1]["loss"] == pytest.approx(losses[1]["loss"], abs=1e-3)
    assert math.isnan(metrics[1]["val-accuracy"])  # nobody has nodes for validation


def test_ppfl_learns_from_others(capsys: Captured) -> None:
    blocks_of("ppfl", 1, space=defined("ppfl"))
    said = re.fullmatch(r"accuracy (0\.\d\d)\nalone (0\.\d\d)\n", capsys.readouterr().out)
    assert said is not None
    together, alone = map(float, said.groups())
    assert alone < 0.82 < 0.87 < together
    ((first, second),) = re.findall(r"^It prints (0\.\d+) and (0\.\d+)\.", PPFL_TEXT, re.MULTILINE)
    assert (together, alone) == pytest.approx((float(first), float(second)), abs=0.03)


def test_ppfls_secure_form_learns_as_well(capsys: Captured) -> None:
    space = blocks_of("ppfl", 2, space=defined("ppfl"))
    (said,) = re.findall(r"^secure (0\.\d\d)$", capsys.readouterr().out, re.MULTILINE)
    (printed,) = re.findall(r"^It prints (0\.\d\d)\. `result.arrays`", PPFL_TEXT, re.MULTILINE)
    assert float(said) == pytest.approx(float(printed), abs=0.03)
    assert space["result"].arrays["nodes"].numpy().tolist() == defined("ppfl")["KNOWN"].tolist()


@pytest.mark.slow
def test_a_module_of_pytorch_is_a_model_as_it_stands(capsys: Captured) -> None:
    example = DOCS.parent / "examples" / "graphsage_for_ppfl.py"
    space = runpy.run_path(str(example), run_name="__main__")
    assert 0.75 < float(capsys.readouterr().out.removeprefix("GraphSAGE ")) <= 1
    metrics = space["result"].train_metrics_clientapp
    assert metrics[5]["loss"] < 0.5 * metrics[1]["loss"]


def test_embeddings_are_aligned(capsys: Captured) -> None:
    space = blocks_of("reference/alignment", 0)
    said = capsys.readouterr().out
    before, after = map(float, re.findall(r"P@1 \w+: ([01]\.\d+)", said))
    assert before < 0.05 < 0.95 < after
    own, pairs, both = map(float, re.findall(r"error (\d\.\d\d)", said))
    assert pairs < 0.6 * own and both == pytest.approx(pairs, abs=0.01)

    blocks_of("reference/alignment", 1, space=space)
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"means of client 3: \[-?\d\.\d+ +0\. +\]", first), first
    assert last == "clients per node: 3 4"
