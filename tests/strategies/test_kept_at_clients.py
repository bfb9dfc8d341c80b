"""Parties with data folders: clients keep what is theirs there, and the server gets none of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flower_graph.apps.cli.main import main
from flower_graph.apps.run import client_app, run_server
from flower_graph.audit.attacks import RecordingGrid
from flower_graph.data.folders.party import server_folder
from flower_graph.method.load import load_config
from flower_graph.method.run import latest_in
from flower_graph.wire.keys import CONFIG, MESSAGE_FORMAT, VERSION

DATA = (
    *("data.features=standardise", "rounds=2", "partition.clients=2", "partition.method=random"),
    *("model.hidden=4", "data.split=random", "data.ratios=[0.4,0.3,0.3]"),
)


def people(path: Path) -> torch.Tensor:
    """Save a graph whose nodes have names."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 5, generator=draw) * 9, torch.arange(40) % 2
    x[:, 0] += 4 * y
    ring = torch.stack([torch.arange(40), (torch.arange(40) + 2) % 40])
    names = [f"person {node}" for node in range(40)]
    torch.save({"x": x, "y": y, "edge_index": ring, "names": names}, path)
    return x


@pytest.fixture
def parties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Assign a graph to two clients and a server, and take the graph away."""
    people(tmp_path / "people.pt")
    overrides = [*DATA, f"data.name={tmp_path / 'people.pt'}"]
    data = str(tmp_path / "data")
    assert main(["partition", "fedgta/cora-linqs", *overrides, "--out", data]) == 0
    (tmp_path / "people.pt").unlink()
    return overrides


def run(folder: Path, out: Path, overrides: list[str]) -> set[tuple[str, str, str, str]]:
    """Run with a folder for each party; give what travelled: message, way, record and key."""
    config = load_config("fedgta/cora-linqs", overrides)
    own = [{"data-folder": str(one)} for one in sorted((folder / "data").glob("client*"))]
    grid = RecordingGrid(client_app(config, None), num_supernodes=2, node_config=own)
    there = server_folder(config, str(folder / "data" / "server"))
    run_server(config, grid, out, engine="in-process", folder=there)
    return {
        (one.kind, way, record, key)
        for one in grid.exchanges
        for way, content in (("down", one.request), ("up", one.reply))
        for record, entries in content.items()
        for key in entries
    }


def test_clients_keep_what_is_theirs(
    parties: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_it = run(tmp_path, tmp_path / "out", parties)
    names, shares = [], []
    for folder in sorted((tmp_path / "data").glob("client*")):
        kept = latest_in(folder)
        found = kept.predictions()
        names += found.node.tolist()
        test = found.role == 3
        shares.append((found.predicted == found.label)[test].mean())
        assert kept.config.data.features == "standardise"
        files = {one.name for one in kept.path.iterdir()}
        assert {"predictions.csv", "model.json", "model.safetensors", "data.json"} <= files
        assert all(one.stat().st_mode & 0o077 == 0 for one in kept.path.iterdir())
    assert sorted(names) == sorted(f"person {node}" for node in range(40))
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert np.mean(shares) == pytest.approx(result["test-accuracy"], abs=1e-12)

    # New nodes, as their user has them: standardised as all nodes were
    x = people(tmp_path / "new.pt")
    folder, table = sorted((tmp_path / "data").glob("client*"))[0], tmp_path / "new.csv"
    words = ["predict", "--data-folder", str(folder), "--data", str(tmp_path / "new.pt")]
    assert main([*words, "--out", str(table)]) == 0
    assert len(table.read_text().splitlines()) == 41
    standard = (x.double() - x.double().mean(0)) / x.double().std(0, unbiased=False)
    made = latest_in(folder).data.treatment.apply(x)
    torch.testing.assert_close(made, standard.float(), atol=1e-6, rtol=1e-6)
    assert "are right" in capsys.readouterr().err

    # Nothing of it reaches the server: what travels besides are requests and empty answers.
    kept_there = {one.name for one in (tmp_path / "out").rglob("*")}
    assert not {name for name in kept_there if name.startswith(("predictions", "model", "data."))}
    without = run(tmp_path, tmp_path / "other", [*parties, "save=none"])
    more = with_it - without
    assert {message for message, *_ in more} == {"query.keep"}
    answers = {tuple(entry) for _, way, *entry in more if way == "up"}
    assert answers == {(CONFIG, VERSION), (CONFIG, MESSAGE_FORMAT)}
