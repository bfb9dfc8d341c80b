"""Accuracy against a privacy budget: what is tried, what is chosen, and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import own_graph
from federation import one_fast

from flower_graph.apps.reproduce import command, privacy
from flower_graph.apps.reproduce.command import main
from flower_graph.apps.reproduce.privacy import privacy_curve
from flower_graph.apps.reproduce.table import read_table
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError
from flower_graph.records.rounds import RoundReport

NAMES = ["nfedgnn", "ppfl"]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Have runs take no time: more budget, a larger norm and a later seed give more accuracy."""
    configs: list[RunConfig] = []

    def simulate(config: RunConfig) -> list[RoundReport]:
        configs.append(config)
        budget, norm = config.privacy.epsilon or 1e7, config.privacy.clipping_norm
        val = budget / 2e7 + norm / 100 + config.seed / 1000
        return [RoundReport(1, 1.0, 1.0, 0.0, 0.9, val, val + 0.125, 1, 1)]

    monkeypatch.setattr(privacy, "simulate", simulate)
    return configs


def small(name: str, **changes: Any) -> dict[str, Any]:
    spec = dict(read_table(name).privacy or {})
    return spec | {"epsilons": [10.0, 1e6], "constants": {}} | changes


@pytest.mark.parametrize("name", one_fast(NAMES, "nfedgnn"))
def test_the_first_seed_chooses_and_the_others_run_what_is_chosen(
    name: str, tmp_path: Path, ran: list[RunConfig]
) -> None:
    rows = privacy_curve(tmp_path, small(name), [3, 1])
    for row in rows:
        assert list(row["test"]) == list(row["val"]) == (["3", "1"] if row["chosen"] else ["3"])
        assert row["settings"]["rounds"] == row["rounds"]
    budgets = {(row["config"], row["epsilon"]) for row in rows if "epsilon" in row}
    for config, epsilon in budgets:
        same = [r for r in rows if (r["config"], r.get("epsilon")) == (config, epsilon)]
        (best,) = (row for row in same if row["chosen"])
        assert best["val"]["3"] == max(row["val"]["3"] for row in same)
        assert best["clipping-norm"] == max(row["clipping-norm"] for row in same)
        assert best["noise"] > 0 and epsilon <= 1e6
    levels = [row for row in rows if "epsilon" not in row]
    assert levels and all(row["chosen"] for row in levels)
    assert json.loads((tmp_path / "privacy.json").read_text()) == rows
    assert (tmp_path / "privacy.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "privacy.md").read_text()
    assert "| 1,000,000 |" in page and page.count(f"| {levels[0]['method']} |") >= 1
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1

    # What is there is not run again; what has other settings is.
    count = len(ran)
    assert privacy_curve(tmp_path, small(name), [3, 1]) == rows
    assert len(ran) == count
    privacy_curve(tmp_path, small(name), [3, 1], rounds=2)
    assert len(ran) > count and {config.rounds for config in ran[count:]} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_results_in_the_documentation_are_found_again(
    name: str, tmp_path: Path, ran: list[RunConfig]
) -> None:
    """Files of older versions lack some keys."""
    kept = Path(__file__).parents[2] / "docs" / "results" / name / "privacy.json"
    (tmp_path / "privacy.json").write_text(kept.read_text())
    table = read_table(name)
    rows = privacy_curve(tmp_path, {**(table.privacy or {}), "constants": {}})
    assert ran == []
    assert [row["test"] for row in rows] == [row["test"] for row in json.loads(kept.read_text())]


def test_it_is_run_if_it_is_asked_for_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "privacy_curve", lambda *given: asked.append(given))
    for name in NAMES:
        main(name, tmp_path, only={"table": ["privacy"]}, seeds=[3], rounds=2)
        assert asked.pop() == (tmp_path, read_table(name).privacy, [3], 2, ())
        with pytest.raises(ConfigError, match="table=privacyy"):
            main(name, tmp_path, only={"table": ["privacyy"]}, seeds=None, rounds=None)
    assert list(tmp_path.iterdir()) == asked == []


@pytest.mark.slow
def test_real_runs(tmp_path: Path) -> None:
    torch.save(own_graph(), tmp_path / "graph.pt")
    settings = [f"data.name={tmp_path / 'graph.pt'}", "data.split=public", "model.hidden=4"]
    spec = small("nfedgnn", constants=(read_table("nfedgnn").privacy or {})["constants"])
    rows = privacy_curve(tmp_path / "out", spec, [0, 1], 2, settings)
    assert all(0 <= value <= 1 for row in rows for value in row["test"].values())
    page = (tmp_path / "out" / "privacy.md").read_text()
    assert "| nFedGNN, no noise |  |  |  | 100 | 2 |" in page and "| the commonest class |" in page
