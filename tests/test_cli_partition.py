"""``flower-graph partition``: what it prints and writes, for every partitioner."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from federation import METHODS
from matplotlib.image import imread

from flower_graph.apps.cli import main as cli
from flower_graph.data import load_graph
from flower_graph.data.baselines import client_baselines
from flower_graph.data.partition.statistics import client_statistics
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of
from flower_graph.strategies.fedgls import method as fedgls
from flower_graph.strategies.ppfl import method as ppfl


def small(name: str, *overrides: str) -> list[str]:
    """Give the words of a small federation's config."""
    return [METHODS[name].config, *METHODS[name].overrides, *overrides]


EGOS = small("fedscem")


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def record_in(out: str) -> Any:
    return json.loads((Path(out) / "partition.json").read_text(encoding="utf-8"))


def means_in(out: str) -> dict[str, float]:
    return {key: value["mean"] for key, value in record_in(out)["figures"].items()}


def folders_in(out: str) -> set[str]:
    return {path.name for path in Path(out).iterdir() if path.is_dir()}


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (small("fedscem", "partition.clients=5"), {"clients": "5"}),
        (
            small("fedgls", "partition.method=random", "graph.graphless_ratio=0.25"),
            {"clients": "4", "graphless-clients": "1"},
        ),
        (small("gat", "partition.public_share=0.1"), {"public-per-client": "16"}),
    ],
    ids=["egos", "communities", "overlaps"],
)
def test_figures_are_printed_and_written(words, shown, capsys):
    assert cli.main(["partition", *words, "seed=3", "--out", "here"]) == 0
    config: Any = load_config(words[0], [*words[1:], "seed=3"])
    method: Any = method_of(config)
    graphs = method.load_graphs(config)
    expected = client_statistics(graphs, load_graph(config.data))
    guessed = client_baselines(graphs)
    own = {f"{name}-test": one["test"] for name, one in guessed.items() if one["test"] >= 0}
    assert means_in("here") == expected.figures | own
    record = record_in("here")
    counted = record["distributions"][0]["nodes per client"].values()
    assert (record["seeds"], record["config"]["partition"]["clients"]) == ([3], sum(counted))
    printed = capsys.readouterr().out
    assert printed.startswith(f"Partition of {words[0]}, seed 3\n")
    mean = f"{expected.figures['nodes-per-client']:.2f}".removesuffix(".00")
    for figure, value in (shown | {"nodes-per-client": mean}).items():
        assert re.search(rf"^  {figure} +{value}$", printed, re.MULTILINE)
    assert "paper" not in record and "paper" not in printed
    assert imread("here/partition.png").std() > 0


def test_the_papers_figures_stand_beside_ours(tmp_path, capsys, data_root):
    words = ["partition", "fedgls/cora", f"data.root={data_root}", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "partition.json").read_text(encoding="utf-8"))
    assert "(paper: 192)\n" in shown and "(paper: 695)\n" in shown
    assert record["paper"]["directed-edges-per-client"] == 695
    figures = record["figures"]
    # The paper does not give its seed: ours are within a tenth of it.
    assert figures["nodes-per-client"]["mean"] == pytest.approx(192, rel=0.1)
    assert figures["directed-edges-per-client"]["mean"] == pytest.approx(695, rel=0.1)


@pytest.mark.parametrize(
    ("config", "override", "nodes"),
    [
        ("ppfl/cora-gat", "partition.public=cover", 1489),
        ("ppfl/cora-gat", "data.name=PubMed", None),
        ("ppfl/cora-gat", "partition.public_share=0.1", None),
        ("fedgls/cora", "data.name=Planetoid/CiteSeer", 149),
        ("fedgls/cora", "data.name=CitationFull/Cora", None),
        ("fedgls/cora", "partition.method=random", None),
    ],
)
def test_the_papers_figures_are_for_its_settings_alone(config, override, nodes):
    found = {"fedgls": fedgls, "ppfl": ppfl}[config.partition("/")[0]].paper_sizes(
        load_config(config, [override])
    )
    assert found.get("nodes-per-client") == nodes


def test_several_seeds_are_averaged_and_folders_are_for_one(capsys):
    assert cli.main(["partition", *EGOS, "--seeds", "0,3", "--out", "two"]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["partition", *EGOS, "--seeds", "3", "--out", "one"]) == 0
    two = record_in("two")
    sizes = two["figures"]["nodes-per-client"]
    assert two["seeds"] == [0, 3] and len(two["distributions"]) == 2
    assert sizes["values"][1] == means_in("one")["nodes-per-client"] != sizes["values"][0]
    assert sizes["mean"] == pytest.approx(sum(sizes["values"]) / 2)
    assert sizes["std"] == pytest.approx(abs(sizes["values"][0] - sizes["values"][1]) / 2**0.5)
    assert f"Partition of {EGOS[0]}, mean ± deviation over seeds 0, 3\n" in shown
    # What all seeds agree on has no deviation to show.
    assert re.search(r"  clients +6\n", shown) and " ± " in shown
    assert "none: 2 seeds" in shown
    assert folders_in("two") == set()
    settings = json.loads(Path("one/server/manifest.json").read_text(encoding="utf-8"))
    assert settings["settings"]["seed"] == 3


def test_every_supernode_gets_a_folder_unless_there_are_more_than_anybody_wants(
    capsys, monkeypatch
):
    monkeypatch.setattr("flower_graph.apps.cli.partition.MOST_FOLDERS", 3)
    assert cli.main(["partition", *EGOS, "--out", "here", "--supernodes", "3"]) == 0
    names = {"server", "clients-0000-0001", "clients-0002-0003", "clients-0004-0005"}
    assert folders_in("here") == names
    assert "3 for 6 clients\n" in capsys.readouterr().out
    assert cli.main(["partition", *EGOS, "--out", "there"]) == 0
    assert folders_in("there") == set()
    assert "none: 6 are more than 3" in capsys.readouterr().out
