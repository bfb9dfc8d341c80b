"""nFedGNN's accuracy against the budget: what is tried, what is chosen, and the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from app_helpers import own_graph

from flower_graph.apps.reproduce import nfedgnn as reproduce_nfedgnn
from flower_graph.apps.reproduce import nfedgnn_privacy
from flower_graph.apps.reproduce.nfedgnn_privacy import privacy_curve
from flower_graph.errors import ConfigError


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    torch.save(own_graph(), tmp_path / "graph.pt")
    return [f"data.name={tmp_path / 'graph.pt'}", "data.split=public", "model.hidden=4"]


def curve(out: Path, settings: list[str], **more: Any) -> list[dict[str, Any]]:
    tried: dict[str, Any] = {"epsilons": (10.0, 1e6), "clipping_norms": (0.1, 1.0)}
    tried |= {"reg_weights": (1.0,), "rounds": (2, 3), "seeds": (0, 1)}
    return privacy_curve(out, overrides=settings, **(tried | more))


@pytest.mark.slow
def test_the_first_seed_chooses_and_the_others_run_what_is_chosen(
    tmp_path: Path, settings: list[str]
) -> None:
    rows = curve(tmp_path / "out", settings)
    assert len(rows) == 1 + 2 * 2 * 2
    chosen = [row for row in rows if row["chosen"]]
    assert [row.get("epsilon", 0) > 100 for row in chosen] == [False, False, True]
    for row in rows:
        assert list(row["test"]) == list(row["val"]) == (["0", "1"] if row["chosen"] else ["0"])
    for best in chosen[1:]:
        same = [row for row in rows if row.get("epsilon") == best["epsilon"]]
        assert best["val"]["0"] == max(row["val"]["0"] for row in same)
    assert rows[0]["rounds"] == 3 and "epsilon" not in rows[0]
    assert json.loads((tmp_path / "out" / "privacy.json").read_text()) == rows
    assert (tmp_path / "out" / "privacy.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "privacy.md").read_text()
    assert "| no noise | | | | 100 | 3 |" in page and "| the commonest class |" in page
    assert page.count("\n| ") == 5


@pytest.mark.slow
def test_what_is_there_is_not_run_again(
    tmp_path: Path, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = curve(tmp_path, settings, seeds=(0,))

    def never(*_: Any) -> None:
        raise AssertionError("it was run before")

    monkeypatch.setattr(nfedgnn_privacy, "simulate", never)
    assert curve(tmp_path, settings, seeds=(0,)) == before
    with pytest.raises(AssertionError, match="it was run before"):
        curve(tmp_path, settings, seeds=(0,), clipping_norms=(2.0,))


def test_it_is_run_if_it_is_asked_for_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(reproduce_nfedgnn, "cached_data", lambda config: None)  # there are all
    monkeypatch.setattr(
        reproduce_nfedgnn, "privacy_curve", lambda out, **more: asked.append({"out": out, **more})
    )
    reproduce_nfedgnn.reproduce(tmp_path, only={"table": ["privacy"]}, seeds=[3], rounds=2)
    assert asked == [{"out": tmp_path, "seeds": (3,), "rounds": (2,)}]
    with pytest.raises(ConfigError, match="table=privacyy: unknown"):
        reproduce_nfedgnn.reproduce(tmp_path, only={"table": ["privacyy"]}, seeds=None, rounds=None)
    with pytest.raises(ConfigError, match="no table has such a row"):
        only = {"method": ["nFedGNN, averaged"], "data": ["CiteSeer"]}
        reproduce_nfedgnn.reproduce(tmp_path, only=only, seeds=None, rounds=None)
    assert len(asked) == 1
