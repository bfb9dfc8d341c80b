"""An ordinary Flower app, and the same with each strategy dropped in."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps.cli import launch
from flower_graph.simulation import InProcessGrid

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
VARIANTS = ("with_fedgls", "with_fedscem", "with_nfedgnn", "with_ppfl")
# What a variant may change besides the two apps, and how many lines at most
CHANGED = {
    "with_fedgls": {"task.py"},
    "with_fedscem": set[str](),
    "with_nfedgnn": set[str](),
    "with_ppfl": {"task.py"},
}


def run(name: str, supernodes: int) -> None:
    """Run an app in this process, as `flwr run` would; the modules of all have one name."""
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
    settings = project["tool"]["flwr"]["app"]["config"]
    folder = str(EXAMPLES / name)
    sys.path.insert(0, folder)
    try:
        server = importlib.import_module("existing_app.server_app").app
        client = importlib.import_module("existing_app.client_app").app
        grid = InProcessGrid(client, num_supernodes=supernodes, run_config=settings)
        server(grid, Context(grid.run.run_id, 0, {}, RecordDict(), settings))
    finally:
        sys.path.remove(folder)
        for module in [m for m in sys.modules if m.partition(".")[0] == "existing_app"]:
            del sys.modules[module]


@pytest.mark.parametrize("supernodes", [2, 5])
@pytest.mark.parametrize("name", ["existing_app", *VARIANTS])
def test_each_runs_with_every_client_in_every_round(
    name: str,
    supernodes: int,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run(name, supernodes)
    assert "Rounds: 3" in capsys.readouterr().out
    faults = [r for r in caplog.records if r.name != "flwr" and r.levelno >= logging.WARNING]
    assert not faults, faults


def test_the_app_is_written_without_this_library() -> None:
    texts = [path.read_text() for path in (EXAMPLES / "existing_app").rglob("*.*") if path.suffix]
    sources = [text for text in texts if "import" in text]
    assert sources and not any("import flower_graph" in text for text in sources)
    assert not any("from flower_graph" in text for text in sources)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_no_more_than_the_page_says(name: str) -> None:
    for path in (EXAMPLES / "existing_app" / "existing_app").glob("*.py"):
        same = path.read_text() == (EXAMPLES / name / "existing_app" / path.name).read_text()
        changed = path.name in CHANGED[name] | {"client_app.py", "server_app.py"}
        assert same != changed, path.name
    before, after = (
        (EXAMPLES / which / "pyproject.toml").read_text() for which in ("existing_app", name)
    )
    assert after.replace('"flower-graph", ', "") == before


def test_the_page_has_the_differences_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "diffs.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.flwr
def test_flwr_runs_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own folder; the launcher gives it a home folder and ports of its own."""
    monkeypatch.setattr(launch, "_write_app", lambda folder, settings: EXAMPLES / "existing_app")
    log: list[str] = []
    launch._launch({}, 2, log.append)
    assert any("Rounds: 3" in line for line in log), "\n".join(log)
