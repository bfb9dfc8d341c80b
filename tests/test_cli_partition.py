"""``flower-graph partition``: what it prints and writes, for every partitioner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from flower_graph.apps.cli import main as cli
from flower_graph.config.load import load_config
from flower_graph.config.registry import method_named
from flower_graph.data import load_graph
from flower_graph.data.folders.client_folder import load_folder
from flower_graph.data.folders.overlapping_folder import load_overlapping_folder
from flower_graph.data.partition.client_graphs import partition_graph
from flower_graph.data.partition.ego_networks import partition_egos
from flower_graph.data.partition.overlapping import overlapping_graphs
from flower_graph.data.partition.statistics import (
    client_statistics,
    ego_statistics,
    overlap_statistics,
)
from flower_graph.errors import OutputError
from flower_graph.report.plots.base import plot_counts

Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[1]
EGOS = """
app: fedscem
data: {name: csbm, nodes: 200, classes: 3, degree: 3, features: 40, active: 5}
partition: {clients: 8, min_nodes: 6}
"""
COMMUNITIES = """
app: fedgls
data: {name: csbm, nodes: 200, classes: 3, degree: 6, features: 40, active: 5}
partition: {clients: 4}
"""
OVERLAPS = """
app: ppfl
data: {name: csbm, nodes: 200, classes: 3, degree: 6, features: 40, active: 5}
partition: {public: cover, public_share: 0.1}
"""


@pytest.fixture
def egos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the name of a config of small ego-networks, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "egos.yaml").write_text(EGOS, encoding="utf-8")
    return "egos.yaml"


def test_ego_networks(egos: str, tmp_path: Path, capsys: Captured) -> None:
    words = ["partition", egos, "partition.clients=5", "--out", "here", "seed=3"]
    assert cli.main(words) == 0
    config = load_config(egos, ["partition.clients=5", "seed=3"])
    expected = ego_statistics(partition_egos(load_graph(config.data), config.partition, seed=3))
    record = json.loads((tmp_path / "here" / "partition.json").read_text(encoding="utf-8"))
    assert (record["seeds"], record["config"]["partition"]["clients"]) == ([3], 5)
    assert {key: value["mean"] for key, value in record["figures"].items()} == expected.figures
    assert sum(record["distributions"][0]["nodes per client"].values()) == 5
    shown = capsys.readouterr().out
    page = (tmp_path / "here" / "partition.md").read_text(encoding="utf-8")
    assert shown.startswith("Partition of egos.yaml, seed 3\n")
    mean = f"{expected.figures['nodes-per-client']:.2f}".removesuffix(".00")
    assert f"| nodes-per-client | {mean} |\n" in page
    assert f"nodes-per-client          {mean}\n" in shown
    assert imread(tmp_path / "here" / "partition.png").std() > 0


@pytest.fixture
def communities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the name of a config of small communities, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "communities.yaml").write_text(COMMUNITIES, encoding="utf-8")
    return "communities.yaml"


def test_communities(communities: str, tmp_path: Path, capsys: Captured) -> None:
    words = ["partition", communities, "partition.method=random", "graph.graphless_ratio=0.25"]
    assert cli.main([*words, "seed=3", "--out", "here"]) == 0
    config = load_config(communities, ["partition.method=random", "seed=3"])
    graph = load_graph(config.data)
    expected = client_statistics(partition_graph(graph, config.partition, 0.25, seed=3), graph)
    record = json.loads((tmp_path / "here" / "partition.json").read_text(encoding="utf-8"))
    assert {key: value["mean"] for key, value in record["figures"].items()} == expected.figures
    assert expected.figures["graphless-clients"] == 1
    assert record["distributions"][0]["nodes per client"] == {"50": 4}
    shown = capsys.readouterr().out
    assert "  nodes-per-client           50\n" in shown
    page = (tmp_path / "here" / "partition.md").read_text(encoding="utf-8")
    assert "| nodes-per-client | 50 |\n" in page
    assert "paper" not in record and "paper" not in page + shown
    assert imread(tmp_path / "here" / "partition.png").std() > 0


def test_clients_of_a_folder(communities: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine").mkdir()
    for client in range(3):
        content = {"x": torch.eye(10), "y": torch.arange(10) % 2}
        edges = torch.tensor([[0, 1], [2, client + 3]])
        torch.save(content | ({"edge_index": edges} if client else {}), f"mine/{client}.pt")
    words = ["partition", communities, "data.name=mine", "--out", "here", "seed=5"]
    assert cli.main([*words, "partition.seed=2"]) == 0
    expected = client_statistics(load_folder(Path("mine"), [0.6, 0.2, 0.2], 2), None)
    record = json.loads((tmp_path / "here" / "partition.json").read_text(encoding="utf-8"))
    assert {key: value["mean"] for key, value in record["figures"].items()} == expected.figures
    assert (expected.figures["clients"], expected.figures["graphless-clients"]) == (3, 1)
    assert "  edges-per-client           2\n" in capsys.readouterr().out


def test_the_papers_figures_stand_beside_ours(
    tmp_path: Path, capsys: Captured, data_root: Path
) -> None:
    words = ["partition", "fedgls/cora", f"data.root={data_root}", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    page = (tmp_path / "out" / "partition.md").read_text(encoding="utf-8")
    record = json.loads((tmp_path / "out" / "partition.json").read_text(encoding="utf-8"))
    assert "(paper: 192)\n" in shown and "(paper: 695)\n" in shown
    assert "| figure | value | paper |\n| --- | --- | --- |\n| clients | 8 | 8 |\n" in page
    assert "| features | 1,433 | 1,433 |\n" in page
    assert record["paper"]["directed-edges-per-client"] == 695
    figures = record["figures"]
    # The paper does not give its seed: ours are within a tenth of it.
    assert figures["nodes-per-client"]["mean"] == pytest.approx(192, rel=0.1)
    assert figures["directed-edges-per-client"]["mean"] == pytest.approx(695, rel=0.1)


@pytest.fixture
def overlaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give the name of a config of small clients that overlap, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "overlaps.yaml").write_text(OVERLAPS, encoding="utf-8")
    return "overlaps.yaml"


def test_overlapping_clients(overlaps: str, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["partition", overlaps, "seed=3", "--out", "here"]) == 0
    config = load_config(overlaps, ["seed=3"])
    graph = load_graph(config.data)
    expected = overlap_statistics(overlapping_graphs(graph, config.partition, 3), graph)
    record = json.loads((tmp_path / "here" / "partition.json").read_text(encoding="utf-8"))
    assert {key: value["mean"] for key, value in record["figures"].items()} == expected.figures
    shown = capsys.readouterr().out
    assert "  nodes-per-client       50\n" in shown and "  public-per-client      20\n" in shown
    assert imread(tmp_path / "here" / "partition.png").std() > 0


def test_overlapping_clients_of_a_folder(overlaps: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine").mkdir()
    for client in range(3):
        ids = torch.arange(10) + 5 * client
        edges = torch.tensor([[0, 1], [2, client + 3]])
        torch.save(
            {"x": torch.eye(10), "y": ids % 2, "n_id": ids, "edge_index": edges},
            f"mine/{client}.pt",
        )
    words = ["partition", overlaps, "data.name=mine", "--out", "here", "seed=5"]
    assert cli.main([*words, "partition.seed=2", "partition.ratios=[0, 0, 1]"]) == 0
    expected = overlap_statistics(load_overlapping_folder(Path("mine"), [0, 0, 1], 2), None)
    record = json.loads((tmp_path / "here" / "partition.json").read_text(encoding="utf-8"))
    assert {key: value["mean"] for key, value in record["figures"].items()} == expected.figures
    assert expected.figures["public-per-client"] == pytest.approx((5 + 10 + 5) / 3)
    assert "  private-per-client     3.33\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "nodes"),
    [
        ("partition.public=cover", 1489),
        ("data.name=Planetoid/CiteSeer", 1829),
        ("data.name=PubMed", None),
        ("partition.public_share=0.1", None),
        ("partition.clients=3", None),
    ],
)
def test_the_papers_sizes_are_for_its_shares_alone(override: str, nodes: int | None) -> None:
    found = method_named("ppfl").paper_figures(load_config("ppfl/cora-gat", [override]))
    assert found.get("nodes-per-client") == nodes


@pytest.mark.parametrize(
    ("override", "nodes"),
    [
        ("data.name=Planetoid/CiteSeer", 149),
        ("data.name=CitationFull/Cora", None),
        ("partition.clients=9", None),
        ("partition.method=random", None),
    ],
)
def test_the_papers_figures_are_for_its_settings_alone(override: str, nodes: int | None) -> None:
    found = method_named("fedgls").paper_figures(load_config("fedgls/cora", [override]))
    assert found.get("nodes-per-client") == nodes


def test_other_apps_have_no_figures_of_a_paper() -> None:
    assert method_named("fedscem").paper_figures(load_config("fedscem/cora")) == {}


def test_nodes_as_clients(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert cli.main(["partition", "quickstart", "--out", str(out), "--supernodes", "9"]) == 0
    figures = json.loads((out / "partition.json").read_text(encoding="utf-8"))["figures"]
    expected = {"clients": 2708, "edges": 5278, "isolated": 0, "train": 140, "val": 500}
    assert {key: figures[key]["mean"] for key in expected} == expected
    assert "  clients                2,708\n" in capsys.readouterr().out
    assert imread(out / "partition.png").std() > 0


def test_several_seeds_are_averaged(egos: str, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["partition", egos, "--seeds", "0,1", "--out", "two"]) == 0
    assert cli.main(["partition", egos, "seed=1", "--out", "one"]) == 0
    two, one = (
        json.loads((tmp_path / name / "partition.json").read_text(encoding="utf-8"))
        for name in ("two", "one")
    )
    sizes = two["figures"]["nodes-per-client"]
    assert two["seeds"] == [0, 1] and len(two["distributions"]) == 2
    assert sizes["values"][1] == one["figures"]["nodes-per-client"]["mean"]
    assert sizes["values"][0] != sizes["values"][1]
    assert sizes["mean"] == pytest.approx(sum(sizes["values"]) / 2)
    assert sizes["std"] == pytest.approx(abs(sizes["values"][0] - sizes["values"][1]) / 2**0.5)
    shown = capsys.readouterr().out
    assert "Partition of egos.yaml, mean ± deviation over seeds 0, 1\n" in shown
    # What all seeds agree on has no deviation to show.
    assert "  clients                   8\n" in shown and " ± " in shown


def test_the_folder_has_the_configs_name(egos: str, tmp_path: Path) -> None:
    assert cli.main(["partition", egos]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("partition-egos-")
    assert {path.name for path in folder.iterdir()} == {
        "partition.json",
        "partition.md",
        "partition.png",
        "server",
        *(f"client-000{client}" for client in range(8)),
    }


def test_every_supernode_gets_a_folder(egos: str, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["partition", egos, "--out", "here", "--supernodes", "3"]) == 0
    names = {path.name for path in (tmp_path / "here").iterdir() if path.is_dir()}
    assert names == {"server", "clients-0000-0001", "clients-0002-0004", "clients-0005-0007"}
    assert "server, and 3 for 8 clients\n" in capsys.readouterr().out


def test_of_several_seeds_no_folder_is_written(egos: str, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["partition", egos, "--out", "here", "--seeds", "0,1"]) == 0
    assert not [path for path in (tmp_path / "here").iterdir() if path.is_dir()]
    assert "none: 2 seeds; they are written for one seed\n" in capsys.readouterr().out
    assert cli.main(["partition", egos, "--out", "there", "--seeds", "1"]) == 0
    settings = json.loads((tmp_path / "there/server/manifest.json").read_text(encoding="utf-8"))
    assert settings["settings"]["seed"] == 1


def test_more_folders_than_anybody_wants_are_not_written(
    egos: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flower_graph.apps.cli.partition.MOST_FOLDERS", 7)
    assert cli.main(["partition", egos, "--out", "here"]) == 0
    assert not [path for path in (tmp_path / "here").iterdir() if path.is_dir()]
    assert "none: 8 are more than 7; --supernodes N deals the clients to" in capsys.readouterr().out
    assert cli.main(["partition", egos, "--out", "there", "--supernodes", "7"]) == 0
    assert (tmp_path / "there" / "server").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--supernodes", "9"], "num-supernodes: 9 SuperNodes for 8 clients; at most one each"),
        (["--supernodes", "0"], "num-supernodes: 0 SuperNodes for 8 clients"),
        (["--supernodes", "2", "--seeds", "0,1"], "--supernodes 2: 2 seeds, and data folders are"),
        (["--true-edges"], "--true-edges: app=fedscem has no clients without edges"),
        (["partition.clients=201"], "partition.clients = 201: the graph has 200 nodes"),
        (["partition.min_nodes=201"], "0 of 200 nodes have a 2-hop ego-network"),
        (["--seeds", "0,x"], "--seeds '0,x': write whole numbers"),
        (["partition.hops=0"], "partition.hops: 0 is not allowed"),
    ],
)
def test_what_cannot_be_dealt_is_said_in_one_line_and_leaves_no_folder(
    egos: str, tmp_path: Path, capsys: Captured, words: list[str], message: str
) -> None:
    assert cli.main(["partition", egos, "--out", "out", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_with_files_is_left_alone(egos: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine", encoding="utf-8")
    assert cli.main(["partition", egos, "--out", "out"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_a_distribution_of_nothing_is_drawn_empty(tmp_path: Path) -> None:
    plot_counts(tmp_path / "a.png", {"none": {}, "one": {3: 2}, "wide": {0: 1, 999: 1}}, title="t")
    assert imread(tmp_path / "a.png").std() > 0


def test_no_distributions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one distribution"):
        plot_counts(tmp_path / "a.png", {}, title="t")
    with pytest.raises(OutputError, match="cannot write"):
        plot_counts(tmp_path / "missing" / "a.png", {"one": {1: 1}}, title="t")


PLACES = [(0, "cora"), (1, "citeseer"), (2, "pubmed")]


@pytest.mark.parametrize(
    ("app", "title", "place", "name"),
    [
        *(("fedscem", "Ego-net", *place) for place in PLACES),
        *(("fedgls", "Communities", *place) for place in PLACES),
        *(("ppfl", "Clients that overlap", *place) for place in PLACES[:2]),
    ],
)
def test_the_documented_figures_are_those_that_the_command_wrote(
    app: str, title: str, place: int, name: str
) -> None:
    page = (ROOT / "docs" / "results" / "partition.md").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "partition.md").read_text(encoding="utf-8")
    [section] = [part for part in page.split("\n## ") if part.startswith(title)]
    documented = _table(section)
    path = ROOT / "docs" / "results" / app / "partition" / name / "partition.md"
    for figure, (_, value, *_) in _table(path.read_text(encoding="utf-8")).items():
        if figure in ("figure", "clients", "---"):
            continue
        row = documented[figure]
        assert figure == "features" or f"`{figure}`" in guide, (
            "docs/partition.md says what it means"
        )
        # The first table has the paper's figure before ours, the second what a figure means.
        ours = row[2::2] if len(row) == 7 else row[2:]
        assert ours[place] == value, figure


def _table(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines() if "|" in line]
    rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines)
    return {row[0]: row for row in rows}
