"""Committed rows that are run again, each with a tolerance of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import InlinePool

from flower_graph.apps import parallel
from flower_graph.apps.cli.main import main
from flower_graph.apps.reproduce import command as again
from flower_graph.apps.reproduce.runs import RUNS
from flower_graph.apps.reproduce.table import TEST
from flower_graph.errors import ConfigError, DataError
from flower_graph.storage.files import write_packed

SMALL = [
    "data.name=csbm",
    "data.nodes=60",
    "data.classes=3",
    "data.num_features=24",
    "data.active=6",
]
SMALL += ["partition.clients=3", "model.hidden=4", "strategy.name=fed-gnn"]


def row(**other: Any) -> dict[str, Any]:
    settings = {"config": "fedgls/cora-linqs", "overrides": SMALL, "rounds": 2}
    settings["centralised"] = False
    made = {"table": "Table 1", "data": "Small", "model": "GCN", "method": "Fed-GNN"}
    made |= {"metric": TEST, "values": [0.5, 0.7], "seeds": [0, 1], "settings": settings}
    return made | other


def keep(folder: Path, *rows: dict[str, Any]) -> None:
    write_packed(folder / RUNS, {"rows": rows, "choices": [], "runs": []})


def test_cells_are_those_that_can_be_run_and_were_asked_for() -> None:
    rows = [row(), row(metric="test-accuracy-last"), row(table="Table 2"), row(client=1)]
    rows.append(row(settings=row()["settings"] | {"centralised": True}))
    cells = again.runs_of_rows(rows, {"table": ["Table 1"]}, ())
    assert [(run.seed, run.rounds, len(of)) for run, of in cells.items()] == [(0, 2, 1)]
    assert len(again.runs_of_rows(rows, {}, (0, 1, 9))) == 2  # two tables have the same cells


@pytest.mark.parametrize(
    ("values", "near"),
    [
        ([0.5, 0.5, 0.5], True),
        ([0.51, 0.51, 0.51], False),  # no run of its own differs
        ([0.51, 0.51, 0.515], True),  # as chaotic as that
        ([0.51, None, None], False),  # nobody knows
    ],
)
def test_a_row_is_near_within_what_its_own_runs_differ_by(
    values: list[float | None], near: bool
) -> None:
    found = again.compared(row(), 0, values)
    assert found["near"] == near
    assert found["seeds_deviate"] == pytest.approx(0.2 / 2**0.5)


def test_changed_weights_differ_by_little_and_unchanged_ones_not_at_all() -> None:
    drawn = []
    for draw in (0, 1, 1, 2):
        with again.perturbed(0, draw) as count:
            drawn.append(torch.nn.init.xavier_uniform_(torch.empty(9, 9), generator=_fixed()))
            assert len(count) == 1
    plain = torch.nn.init.xavier_uniform_(torch.empty(9, 9), generator=_fixed())
    assert torch.equal(drawn[0], plain) and torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[1], drawn[3])
    assert 0 < (drawn[1] - plain).abs().max() < 1e-6


def _fixed() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_the_command_runs_a_cell_again_and_writes_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "ProcessPoolExecutor", InlinePool)
    keep(tmp_path, row(values=[0.0, 2.0]))
    words = ["reproduce", "fedgls", "--again", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(words) == 1  # no accuracy is 2
    (found,) = json.loads((tmp_path / "out" / "again.json").read_text())["rows"]
    assert 0 < found["again"] <= 1 and len(found["changed"]) == again.DRAWS
    keep(tmp_path, row(values=[found["again"], 2.0]))
    assert main(words) == 0
    assert "| near |" in (tmp_path / "out" / "again.md").read_text()


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        again.run_again("fedgls", tmp_path, tmp_path / "out", {}, ())
    keep(tmp_path, row())
    with pytest.raises(ConfigError, match="--only"):
        again.run_again("fedgls", tmp_path, tmp_path / "out", {"data": ["Cora"]}, ())
