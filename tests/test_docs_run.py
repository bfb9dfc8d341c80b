"""The README, and the pages on graphs of one's own and on using a run: commands and Python run."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from doc_helpers import DOCS, run_blocks
from own_graphs import valued
from torch_geometric.data import Data

from flower_graph.apps.cli import main as cli
from flower_graph.config.common import DataConfig
from flower_graph.data.sources.datasets import load_graph, read_file
from flower_graph.data.sources.tables import IDENTITY, OWN

# README -------------------------------------------------------------------------------------------


README = DOCS.parent / "README.md"
README_TEXT = README.read_text(encoding="utf-8")


def test_its_figures_stand_before_the_link_to_the_table_that_they_are_from() -> None:
    for said, table in re.findall(r"(.*?)\[table\]\(([^)]+)\)", README_TEXT, re.DOTALL):
        found = (DOCS.parent / table).read_text(encoding="utf-8")
        figures = re.findall(r"\d\.\d+ ± \d\.\d+", said)
        assert figures and all(figure in found for figure in figures)


def test_its_methods_and_settings_are_known(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_its_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    # `check` tries every method, a sweep is many runs, and PPFL-GNN's classifiers take seconds.
    [
        pytest.param(one, marks=[pytest.mark.slow] if re.match("check|sweep|run ppfl", one) else [])
        for one in COMMANDS
    ],
)
def test_every_command_of_the_page_runs(
    command: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_python_of_the_page_runs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
