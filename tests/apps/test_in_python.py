"""``fg.run`` is the command for Python: settings in any form, the same checks, the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flower_graph as fg
from flower_graph.config.load import as_overrides, load_config
from flower_graph.errors import ConfigError, OutputError
from flower_graph.report.writer import RunWriter

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"name": "csbm", "nodes": 40, "classes": 2, "num_features": 8, "active": 3},
    "data.split": "random",
    "data.ratios": [0.4, 0.3, 0.3],
    "partition": {"clients": 2, "method": "random"},
    "model.hidden": 4,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunWriter, "_draw", lambda *_: None)
    monkeypatch.chdir(tmp_path)


def test_a_run_in_python_leaves_what_the_command_leaves() -> None:
    run = fg.run("fedgta/cora-linqs", SMALL, seed=3)
    assert run.path.parent == Path("runs").absolute() and (run.path / "result.json").is_file()
    assert run.config == load_config("fedgta/cora-linqs", [*as_overrides(SMALL), "seed=3"])
    assert len(run.predictions().node) == 40 and run.metrics[-1]["round"] == 1
    both = fg.run("fedgta/cora-linqs", as_overrides(SMALL), seed=(3, 4), out="both")
    assert list(both.seeds) == [3, 4] and both.seeds[3].metrics[0]["loss"] == run.metrics[0]["loss"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": {"name": "gat", "heads": 2}}, ['model.name="gat"', "model.heads=2"]),
        ({"model.name": "gat", "rounds": 3}, ['model.name="gat"', "rounds=3"]),
        (
            {"data": {"root": None, "ratios": [0.5, 0.5]}},
            ["data.root=null", "data.ratios=[0.5, 0.5]"],
        ),
        (["rounds=3"], ["rounds=3"]),
        (None, []),
    ],
)
def test_settings_in_any_form(given: Any, words: list[str]) -> None:
    assert as_overrides(given) == words


@pytest.mark.parametrize(
    ("config", "given", "how", "why"),
    [
        ("quikstart", None, {}, "did you mean quickstart"),
        ("quickstart", {"rounds": -1}, {}, "rounds: -1 is not allowed"),
        ("quickstart", {"model": {"nam": "gat"}}, {}, "did you mean model.name"),
        ("quickstart", "rounds=3", {}, "give a mapping or a list"),
        ("quickstart", {"rounds": object()}, {}, "not JSON serializable"),
        ("quickstart", None, {"supernodes": 0}, "at least 1 is needed"),
    ],
)
def test_what_the_command_refuses_is_refused(
    config: str, given: Any, how: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        fg.run(config, given, **how)
    assert list(Path().iterdir()) == []


def test_a_folder_that_holds_something_is_refused() -> None:
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="exists and is not empty"):
        fg.run("fedgta/cora-linqs", SMALL, out="out")
