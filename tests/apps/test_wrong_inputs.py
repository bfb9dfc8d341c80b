"""A wrong input is one line and exit code 2, writes nothing, and has its words in Python too.

What rules of settings refuse, and what a YAML file or a graph may not be, is tested in
``tests/config`` and ``tests/data``.
"""

import re
from pathlib import Path

import pytest
import torch
from graph_helpers import small_graph
from torch_geometric.data import Data

from flower_graph.apps.cli.main import OUR_ERRORS, main
from flower_graph.apps.run import check_run
from flower_graph.method.load import load_config

N = 30
# What is typed after `flower-graph`, and what the line names
WRONG = {
    # Settings
    "run quickstart rounds=0": r"rounds: 0",
    "run quickstart data.name=cora-lings": r"'cora-lings'.*'cora-linqs'",
    "run quickstart data.name=nowhere.pt": r"nowhere.pt",
    "run quickstart device=cuda:99": r"device: 'cuda:99'",
    "run mine.yaml": r"config mine.yaml",
    # Arguments
    "": r"required: COMMAND",
    "run": r"CONFIG: missing",
    "run quikstart": r"config 'quikstart': unknown; did you mean quickstart",
    "run quickstart --seeds 0,x": r"--seeds: '0,x'",
    "run quickstart --supernodes 0": r"supernodes: 0",
    "run quickstart --supernodes 99999": r"supernodes: 99999 for 2708 clients",
    "run quickstart --out a --resume b": r"--resume",
    "run --resume nowhere": r"--resume nowhere: no run to resume",
    "run quickstart --out graph.pt": r"graph.pt",
    "run quickstart --out .": r"exists and is not empty",
    "run quickstart --out new/out device=cuda:99": r"device: 'cuda:99'",
    "run quickstart --engine flwr device=cuda:99": r"device: 'cuda:99'",
    "partition quickstart --supernodes 99999": r"99999",
    "partition fedscem/cora-linqs partition.clients=9999": r"partition.clients: 9999",
    "partition quickstart --supernodes 3 --seeds 0,1": r"--supernodes 3: 2 seeds",
    "partition quickstart --true-edges": r"--true-edges",
    "reproduce nfedgnn --only data": r"--only 'data'",
    "reproduce nfedgnn --only dta=Cora": r"dta: unknown key",
    "reproduce nfedgnn --only data=Coral": r"--only data=Coral: unknown",
    "reproduce nfedgnn --rounds 0": r"--rounds: 0",
    "check": r"",
    "check nothing.pt": r"nothing.pt",
    "check nothing/": r"nothing.*no such folder",
    # Saved graphs, through the doors that read them
    "run nfedgnn/own-graph data.name=nan.pt data.split=public": r"x\[3, 1\]",
    "run nfedgnn/own-graph data.name=untrained.pt data.split=public": r"train_mask",
    "run nfedgnn/own-graph data.name=cut.pt": r"cut.pt",
    "run nfedgnn/own-graph data.name=list.pt": r"list.pt",
    "run nfedgnn/own-graph data.name=empty.pt": r"empty.pt|x ",
    "run nfedgnn/own-graph data.name=other.pt": r"other.pt",
    "run nfedgnn/own-graph data.name=folder.pt": r"folder.pt",
    # Folders of clients
    "run fedgls/own-graph data.name=with-nan/": r"x\[3, 1\]",
    "run fedgls/own-graph data.name=wider/": r"9",
    "run fedgls/own-graph data.name=nobody/": r"nobody",
    "run fedgls/own-graph data.name=broken/": r"0.pt",
}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write all files that the commands name; since nothing may be written, they share it."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "mine.yaml").write_text("data: {name: [\n", encoding="utf-8")
    bad = small_graph(30).x.clone()
    bad[3, 1] = float("nan")
    graphs = {
        "graph": small_graph(30),
        "nan": small_graph(30, x=bad),
        "untrained": small_graph(30, train_mask=torch.zeros(N, dtype=torch.bool)),
        "list": [Data(), Data()],
        "empty": Data(),
        "other": {"model": torch.zeros(3)},
    }
    for name, graph in graphs.items():
        torch.save(graph, folder / f"{name}.pt")
    whole = (folder / "graph.pt").read_bytes()
    (folder / "cut.pt").write_bytes(whole[: len(whole) // 2])
    shared = {"identity": torch.arange(N), "public": torch.arange(N) < N // 2}
    for name, changes in {"with-nan": {"x": bad}, "wider": {"x": torch.rand(N, 9)}}.items():
        (folder / name).mkdir()
        for number, more in enumerate(({}, changes)):
            torch.save(small_graph(30, **shared, **more), folder / name / f"{number}.pt")
    for name in ("folder.pt", "nobody", "broken"):
        (folder / name).mkdir()
    (folder / "broken" / "0.pt").write_bytes(b"not a graph")
    return folder


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_input_is_one_line_exit_2_and_nothing_written(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(folder)
    before, words = {*folder.rglob("*")}, line.split()
    try:
        status = main(words)
    except SystemExit as end:  # as argparse ends
        status = int(end.code or 0)
    shown = capsys.readouterr()
    assert status == 2, shown
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    assert re.search(WRONG[line], shown.err) and shown.out == ""
    assert {*folder.rglob("*")} == before
    if words[:1] == ["run"] and not any("--" in word for word in words):
        config, *overrides = words[1:] or [""]
        with pytest.raises(OUR_ERRORS) as caught:
            check_run(load_config(config, overrides))
        if "=" not in config and config:  # without a config the command line has words of its own
            assert f"error: {caught.value}\n" == shown.err
