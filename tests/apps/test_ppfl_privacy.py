"""Accuracy against the privacy budget: rows, what is run again, and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ppfl import SMALL, ring_graph

from flower_graph.apps.reproduce import ppfl_privacy
from flower_graph.apps.reproduce.ppfl_privacy import FED, LOC, NOISY, privacy_curve


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    torch.save(ring_graph(), tmp_path / "graph.pt")
    return [f"data.name={tmp_path / 'graph.pt'}", "partition.ratios=[0.4,0.2,0.4]", *SMALL]


def curve(
    out: Path, settings: list[str], seeds: list[int], norm: float = 5.0
) -> list[dict[str, Any]]:
    norms = {"ppfl/cora-deepwalk": norm}
    return privacy_curve(
        out, seeds=seeds, epsilons=[10.0, 1e6], clipping_norms=norms, overrides=settings
    )


@pytest.mark.slow
def test_rows_and_files(tmp_path: Path, settings: list[str]) -> None:
    rows = curve(tmp_path / "out", settings, seeds=[0, 1])
    assert [row["method"] for row in rows] == [LOC, FED, NOISY, NOISY]
    for row in rows:
        assert row["test"].keys() == row["val"].keys() == {"0", "1"}
        assert all(0 <= value <= 1 for value in row["test"].values())
    assert rows[2]["epsilon"] <= 10 < 9e5 < rows[3]["epsilon"] <= 1e6
    assert rows[2]["noise"] > rows[3]["noise"]
    assert json.loads((tmp_path / "out" / "privacy.json").read_text()) == rows
    assert (tmp_path / "out" / "privacy.png").exists()


def test_rows_of_several_configs(tmp_path: Path, settings: list[str]) -> None:
    norms = {"ppfl/cora-deepwalk": 1.0, "ppfl/cora-gat": 2.0}
    rows = privacy_curve(
        tmp_path, seeds=[0], epsilons=[10.0], clipping_norms=norms, overrides=settings
    )
    assert [row["config"] for row in rows] == [name for name in norms for _ in range(3)]
    assert [row["clipping-norm"] for row in rows if "epsilon" in row] == [1.0, 2.0]


def test_what_is_there_is_not_run_again(
    tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, float | None]] = []

    def note(row: dict[str, Any], seed: int) -> None:
        ran.append((row["method"], row.get("clipping-norm")))
        row["test"][str(seed)] = row["val"][str(seed)] = 0.5

    monkeypatch.setattr(ppfl_privacy, "_run", note)
    curve(tmp_path, settings, seeds=[0])
    assert len(ran) == 4
    curve(tmp_path, settings, seeds=[0])
    assert len(ran) == 4
    curve(tmp_path, settings, seeds=[0], norm=2.0)
    assert ran[4:] == [(NOISY, 2.0), (NOISY, 2.0)]
    curve(tmp_path, [*settings, "rounds=3"], seeds=[0], norm=2.0)
    assert len(ran) == 10


def test_another_methods_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'fedgls/cora' is of app 'fedgls', must be of ppfl"):
        privacy_curve(tmp_path, clipping_norms={"fedgls/cora": 1.0})
