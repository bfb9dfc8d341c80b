"""``flower-graph reproduce nfedgnn``, cut down to seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flower_graph.apps.reproduce import command as reproduce
from flower_graph.apps.reproduce.nfedgnn import METHODS, WEIGHTS
from flower_graph.errors import ConfigError, DataError

KEYS = {"table", "data", "model", "method", "metric", "paper", "mean", "std", "values", "seeds"}
ONLY = {"data": ["Cora"], "model": ["GCN"], "method": ["nFedGNN", "CNFGNN", "centralised"]}


def rows_of(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "table.json").read_text())
    return rows


@pytest.mark.slow
def test_a_cut_of_the_table(
    data_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(WEIGHTS, "Cora", (1, 100))
    reproduce.main("nfedgnn", tmp_path, only=ONLY, seeds=[0], rounds=2)
    rows = rows_of(tmp_path)
    for row in rows:
        assert row.keys() == KEYS | {"settings"}
        assert (row["data"], row["model"], row["seeds"]) == ("Cora", "GCN", [0])
        assert len(row["values"]) == 1
        assert row["mean"] == row["values"][0]
        assert row["std"] == 0.0
        assert row["settings"]["rounds"] == 2
    compared = [r for r in rows if r["table"] == "Figure 4"]
    assert {r["method"] for r in compared} == set(ONLY["method"])
    sweep = {r["method"] for r in rows if r["table"] == "Figure 5"}
    assert sweep == {f"lambda={weight:g}" for weight in WEIGHTS["Cora"]}
    # The chosen lambda is the one that validates best.
    validated = {
        r["method"]: r["mean"]
        for r in rows
        if r["table"] == "Figure 5" and r["metric"] == "best-val-accuracy"
    }
    (ours,) = (
        r for r in compared if r["method"] == "nFedGNN" and r["metric"] == "best-val-accuracy"
    )
    assert ours["mean"] == max(validated.values())
    uplink = {r["method"]: r["mean"] for r in rows if r["table"] == "Table 1"}
    assert uplink["nFedGNN"] == 2708 * 16 * 4 * 2 / 2**20
    assert uplink["CNFGNN"] > 1000 * uplink["nFedGNN"]
    page = (tmp_path / "table.md").read_text()
    assert "| Cora | GCN | CNFGNN |" in page
    for name in ("figure-4.png", "figure-5.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

    # What is there is not run again, and what is left out is not in the table.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    reproduce.main("nfedgnn", tmp_path, only=ONLY | {"method": ["CNFGNN"]}, seeds=[0], rounds=2)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == before
    assert {r["method"] for r in rows_of(tmp_path)} == {"CNFGNN"}


@pytest.mark.parametrize(
    ("paper", "only", "said"),
    [
        ("nfedgcn", {}, "'nfedgcn' is unknown; did you mean 'nfedgnn'"),
        ("nfedgnn", {"dat": ["Cora"]}, "dat"),
        ("nfedgnn", {"data": ["Coral"]}, "data=Coral: unknown; allowed are Cora, CiteSeer"),
        ("nfedgnn", {"model": ["gcn2"]}, "model=gcn2: unknown; allowed are GCN, GAT"),
        ("nfedgnn", {"method": ["x"]}, f"allowed are {METHODS[0]}"),
    ],
)
def test_unknown_words_are_refused(
    paper: str, only: dict[str, list[str]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        reproduce.main(paper, tmp_path / "out", only=only, seeds=[0], rounds=1)
    assert not (tmp_path / "out").exists()


def test_without_data_there_is_nothing_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(tmp_path / "root"))
    monkeypatch.setattr("flower_graph.apps.reproduce.nfedgnn.cached_data", _missing)
    with pytest.raises(
        DataError, match="none of the data sets is there: Cora: not in the data root"
    ):
        reproduce.main("nfedgnn", tmp_path / "out", only={"data": ["Cora"]}, seeds=[0], rounds=1)


def _missing(config: Any) -> Any:
    raise DataError("not on disk")
