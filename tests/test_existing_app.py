"""An ordinary Flower app, and the same with each strategy dropped in."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict

from flower_graph.apps.cli import launch
from flower_graph.simulation import InProcessGrid

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "existing-app.md"
VARIANTS = ("with_fedgls", "with_fedscem", "with_nfedgnn", "with_ppfl")
FAST, LONG = "with_fedscem", (5, 20)
# What a variant may change besides the two apps, and how many lines at most
CHANGED = {
    "with_fedgls": {"task.py"},
    "with_fedscem": set[str](),
    "with_nfedgnn": set[str](),
    "with_ppfl": {"task.py"},
}

SUM_SERVER = "flower_graph.secure.sum.server"


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a module of one app; the modules of all have one name."""

    def load(name: str, module: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES / name)
        return importlib.import_module(f"existing_app{module}")

    yield load
    for module in [m for m in sys.modules if m.partition(".")[0] == "existing_app"]:
        del sys.modules[module]


def settings_of(name: str) -> dict[str, Any]:
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
    settings: dict[str, Any] = project["tool"]["flwr"]["app"]["config"]
    return settings


def figures(text: str) -> list[float]:
    """Read an app's last line: each client by itself, and federated, in per cent."""
    said = re.search(r"Test accuracy: ([\d.]+)% each client by itself, ([\d.]+)% federated", text)
    assert said, text
    return [float(figure) for figure in said.groups()]


def on_the_page(name: str) -> list[float]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][:3]
    head, *cells = ([cell.strip(" %`") for cell in row.split("|")[1:-1]] for row in rows)
    return [float(row[head.index(name)]) for row in cells]


@pytest.mark.parametrize(
    ("name", "supernodes", "rounds"),
    [
        pytest.param(name, *size, marks=[pytest.mark.release] * (size == LONG and name != FAST))
        for name, size in itertools.product(["existing_app", *VARIANTS], [(2, 3), LONG])
    ],
)
def test_each_runs_with_every_client_in_every_round_and_says_what_federation_gives(
    name: str,
    supernodes: int,
    rounds: int,
    imports: Callable[[str, str], Any],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In this process, as `flwr run` would."""
    settings = settings_of(name) | {"num-server-rounds": rounds}
    server, client = (imports(name, f".{part}_app").app for part in ("server", "client"))
    grid = InProcessGrid(client, num_supernodes=supernodes, run_config=settings)
    server(grid, Context(grid.run.run_id, 0, {}, RecordDict(), settings))
    said = capsys.readouterr().out
    assert f"Rounds: {rounds}\n" in said
    faults = [r for r in caplog.records if r.name != "flwr" and r.levelno >= logging.WARNING]
    # A sum whose server is trusted says so once: it is no fault
    caveats = [r for r in faults if r.name == SUM_SERVER]
    assert len(caveats) == (name == "with_fedscem")
    assert faults == caveats, faults
    if rounds == settings_of(name)["num-server-rounds"]:
        by_itself, federated = figures(said)
        assert federated > by_itself + 3
        assert [by_itself, federated] == pytest.approx(on_the_page(name), abs=2)


def test_the_app_is_written_without_this_library() -> None:
    paths = (EXAMPLES / "existing_app").rglob("*.*")
    # Who imports the app may leave byte-code there
    texts = [path.read_text() for path in paths if path.suffix and path.suffix != ".pyc"]
    sources = [text for text in texts if "import" in text]
    assert sources and not any("import flower_graph" in text for text in sources)
    assert not any("from flower_graph" in text for text in sources)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_changes_no_more_than_the_page_says(name: str) -> None:
    for path in (EXAMPLES / "existing_app" / "existing_app").glob("*.py"):
        same = path.read_text() == (EXAMPLES / name / "existing_app" / path.name).read_text()
        changed = path.name in CHANGED[name] | {"__init__.py", "client_app.py", "server_app.py"}
        assert same != changed, path.name
    before, after = (
        (EXAMPLES / which / "pyproject.toml").read_text() for which in ("existing_app", name)
    )
    app = after.partition("\n# Flower installs an app's dependencies")[0]
    assert app.replace('"flower-graph", ', "") == before
    # Whatever the app depends on is left out of what Flower installs.
    left_out = tomllib.loads(after)["tool"]["uv"]["override-dependencies"]
    names = [re.split(r"[\[>]", one)[0] for one in tomllib.loads(app)["project"]["dependencies"]]
    assert left_out == [f"{one}; python_version < '3'" for one in names]


def test_the_page_has_the_differences_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "diffs.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_the_first_import_says_what_to_do_where_flower_graph_is_missing(
    name: str, imports: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flower_graph", None)
    with pytest.raises(ModuleNotFoundError, match=r"app.*README\.md"):
        imports(name, "")


# As a newcomer types it -----------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """Give the first lines of code of a page, without what installs flower-graph."""
    lines = page.read_text(encoding="utf-8").splitlines()[2:6]
    code = [line.strip() for line in lines if line.strip() and not line.startswith("```")]
    return [line for line in code if re.match("export |flwr ", line)]


@pytest.fixture
def typed() -> Iterator[Callable[[Sequence[str]], str]]:
    """Type commands into one shell, with Flower's defaults but for home folder and ports."""
    home = Path(tempfile.mkdtemp(prefix="t-", dir=launch._short_temporary_folder()))
    # Nothing is downloaded; actors need not wait for all other work.
    more = {"UV_OFFLINE": "1", "RAY_worker_niceness": "0"}
    environment = launch._environment(home) | more
    del environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"]

    def run(lines: Sequence[str]) -> str:
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return launch.LINE_COLOURS.sub("", done.stdout)

    with launch.adopted_orphans():
        yield run
        launch.end_processes("FLWR_HOME", str(home))
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_pages_begin_with_the_command(name: str) -> None:
    (command,) = commands(EXAMPLES / name / "README.md")
    assert command.startswith(f"flwr run examples/{name} --stream ")
    assert commands(PAGE) == commands(EXAMPLES / "with_fedgls" / "README.md")


@pytest.mark.flwr
@pytest.mark.timeout(900)
def test_an_example_runs_by_the_command_of_its_page(typed: Callable[[Sequence[str]], str]) -> None:
    """By Flower's own defaults: it installs what an app depends on, and this has all of it."""
    said = typed(commands(EXAMPLES / "with_fedgls" / "README.md"))
    assert "Installing application dependencies" in said
    by_itself, federated = figures(said)
    assert federated > by_itself
    # The SuperLink that is left ends by the command that the page has for it.
    (end,) = re.findall(
        r"^ +(kill .*)$", (EXAMPLES / "with_fedgls" / "README.md").read_text(), re.M
    )
    home = "pgrep -f $FLWR_HOME/local-superlink"
    assert len(typed([home]).split()) == 1
    typed([end, f"while {home}; do sleep 0.2; done"])


@pytest.mark.flwr
@pytest.mark.timeout(900)
def test_an_ordinary_app_and_the_root_run_by_the_commands_of_their_pages(
    typed: Callable[[Sequence[str]], str], tmp_path: Path
) -> None:
    ordinary = commands(EXAMPLES / "existing_app" / "README.md")
    said = typed([*ordinary[:1], f"{ordinary[1]} --run-config num-server-rounds=1"])
    assert "Installing application dependencies" not in said and figures(said)
    # The root app by Flower's usual keys, from a file
    out, keys = tmp_path / "out", {"num-server-rounds": 2, "seed": 4, "local-epochs": 1}
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join([*lines, 'config = "fedgls/cora-linqs"', f'output-dir = "{out}"']))
    typed([*ordinary[:1], f"flwr run . --stream --run-config {file}"])
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert (result["rounds"], result["seed"], result["engine"]) == (2, 4, "flwr")
    assert result["config"]["strategy"]["local_epochs"] == 1
