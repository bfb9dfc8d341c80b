"""An ordinary Flower app, the same with each strategy, and one for Flower's hub."""

import importlib
import io
import itertools
import json
import logging
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, RecordDict

from flower_graph import flower_compat
from flower_graph.apps.cli import launch
from flower_graph.flower_compat import build_fab_from_disk
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies import secure_average

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "existing-app.md"
APPS = ("existing-app", "with-flower-graph", "secure-average", "one-node-per-user")
METHODS = ("fedgls", "fedscem", "nfedgnn", "ppfl")
FAST, LONG = "fedscem", (5, 20)
MARKS = pytest.mark.slow, pytest.mark.release
SUM_SERVER = "flower_graph.server.sums"


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Import a module of one app."""

    def load(name: str, module: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES / name)
        return importlib.import_module(f"{package(name)}{module}")

    yield load
    packages = {package(name) for name in APPS}
    for module in [m for m in sys.modules if m.partition(".")[0] in packages]:
        del sys.modules[module]


def package(name: str) -> str:
    return name.replace("-", "_")


def project_of(name: str) -> dict[str, Any]:
    return tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text(encoding="utf-8"))


def settings_of(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = project_of(name)["tool"]["flwr"]["app"]["config"]
    return settings


def run_here(name: str, supernodes: int, settings: dict[str, Any], imports: Any) -> None:
    """Run an app in this process, as `flwr run` would."""
    server, client = (imports(name, f".{part}_app").app for part in ("server", "client"))
    grid = InProcessGrid(client, num_supernodes=supernodes, run_config=settings)
    server(grid, Context(grid.run.run_id, 0, {}, RecordDict(), settings))


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
    ("method", "supernodes", "rounds"),
    [
        pytest.param(name, *size, marks=[*MARKS[: 1 + (name != FAST)]] if size == LONG else [])
        for name, size in [("", LONG), *itertools.product(METHODS, [(2, 3), LONG])]
    ],
)
def test_each_runs_with_every_client_in_every_round_and_says_what_federation_gives(
    method: str,
    supernodes: int,
    rounds: int,
    imports: Callable[[str, str], Any],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "with-flower-graph" if method else "existing-app"
    usual = settings_of(name)
    settings = usual | {"num-server-rounds": rounds} | ({"method": method} if method else {})
    run_here(name, supernodes, settings, imports)
    said = capsys.readouterr().out
    assert f"Rounds: {rounds}\n" in said
    faults = [r for r in caplog.records if r.name != "flwr" and r.levelno >= logging.WARNING]
    # A sum whose server is trusted says so once: it is no fault
    caveats = [r for r in faults if r.name == SUM_SERVER]
    assert len(caveats) == (method == "fedscem")
    assert faults == caveats, faults
    if rounds == usual["num-server-rounds"]:
        by_itself, federated = figures(said)
        assert federated > by_itself + 3
        assert [by_itself, federated] == pytest.approx(on_the_page(method or name), abs=2)


def test_the_app_for_the_hub_learns_from_data_of_the_package(
    imports: Callable[[str, str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of("one-node-per-user") | {"num-server-rounds": 30}
    run_here("one-node-per-user", 3, settings, imports)
    (best,) = re.findall(r"Test accuracy: ([\d.]+)% in round", capsys.readouterr().out)
    assert float(best) > 55  # the commonest class has 12


def test_two_lines_make_a_secure_sum_of_an_ordinary_app(
    imports: Callable[[str, str], Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower's quickstart gives the same without the two lines."""
    settings, found = settings_of("secure-average"), list[float]()
    for is_plain in (False, True):
        if is_plain:
            for module in [m for m in sys.modules if m.startswith("secure_average")]:
                del sys.modules[module]
            monkeypatch.setattr(secure_average, "SecureAverage", lambda strategy: strategy)
            monkeypatch.setattr(secure_average, "secure_average_mod", lambda *a: a[2](*a[:2]))
        run_here("secure-average", 5, settings, imports)
        said = capsys.readouterr().out
        found += map(float, re.findall(r"Test accuracy after 3 rounds: ([\d.]+)%", said))
    assert found[0] > 85 and found[0] == pytest.approx(found[1], abs=0.3)


def test_a_method_that_there_is_not_is_named(imports: Callable[[str, str], Any]) -> None:
    settings = settings_of("with-flower-graph") | {"method": "fedavg"}
    with pytest.raises(ValueError, match=r"'fedavg'.*fedgls, fedscem, nfedgnn, ppfl"):
        run_here("with-flower-graph", 2, settings, imports)


@pytest.mark.parametrize("name", APPS)
def test_flower_builds_each_as_its_newest_format_has_it(name: str) -> None:
    project, readme = project_of(name), (EXAMPLES / name / "README.md").read_text("utf-8")
    assert project["project"]["name"] == name
    assert project["project"]["license"] == {"file": "LICENSE"}
    assert (EXAMPLES / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    about = yaml.safe_load(readme.split("---\n")[1])
    assert about.keys() == {"tags", "dataset", "framework"} and all(about.values())
    app = project["tool"]["flwr"]["app"]
    assert app["fab-format-version"] == 1
    assert app["flwr-version-target"] == f"{flower_compat.NEWEST}.0"
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(EXAMPLES / name))) as bundle:
        packed = {one for one in bundle.namelist() if not one.startswith(".info")}
    sources = {f"{package(name)}/{one.name}" for one in (EXAMPLES / name).rglob("*.py")}
    assert packed == {"pyproject.toml", "README.md", "LICENSE"} | sources


# As a newcomer types it -----------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """Give the first lines of code of a page, without what installs flower-graph."""
    (_, code, *_) = page.read_text(encoding="utf-8").split("```\n")
    return [line for line in code.splitlines() if re.match("export |flwr ", line)]


@pytest.fixture
def typed() -> Iterator[Callable[[Sequence[str]], str]]:
    """Type commands into one shell, with Flower's defaults but for home folder and ports."""
    home = Path(tempfile.mkdtemp(prefix="t-", dir=launch._short_temporary_folder()))
    # Nothing is downloaded; actors need not wait for all other work.
    more = {"UV_OFFLINE": "1", "RAY_worker_niceness": "0"}
    environment = launch.engine_environment(home) | more
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

    with launch.guarded("FLWR_HOME", str(home), home):
        yield run


def test_pages_begin_with_the_command() -> None:
    for name in APPS[:3]:
        assert f"flwr run examples/{name} --stream " in commands(EXAMPLES / name / "README.md")[-1]
    assert commands(PAGE) == commands(EXAMPLES / "with-flower-graph" / "README.md")


@pytest.mark.flwr
@pytest.mark.timeout(900)
def test_an_example_runs_by_the_command_of_its_page(typed: Callable[[Sequence[str]], str]) -> None:
    """By Flower's own defaults: it installs what an app depends on, and this has all of it."""
    said = typed(commands(EXAMPLES / "with-flower-graph" / "README.md"))
    assert "Installing application dependencies" in said
    by_itself, federated = figures(said)
    assert federated > by_itself
    # The SuperLink that is left ends by the command that the page has for it.
    (end,) = re.findall(
        r"^ +(kill .*)$", (EXAMPLES / "with-flower-graph" / "README.md").read_text(), re.M
    )
    home = "pgrep -f $FLWR_HOME/local-superlink"
    assert len(typed([home]).split()) == 1
    typed([end, f"while {home}; do sleep 0.2; done"])


@pytest.mark.flwr
@pytest.mark.timeout(900)
def test_an_ordinary_app_and_the_root_run_by_the_commands_of_their_pages(
    typed: Callable[[Sequence[str]], str], tmp_path: Path
) -> None:
    ordinary = commands(EXAMPLES / "existing-app" / "README.md")
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
