"""The distributions: what is in them, and that they work where no checkout is.

``make dist`` runs these tests and keeps the distributions, in the folder FLOWER_GRAPH_DIST.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from flower_graph.flower_compat import build_fab_from_disk

ROOT = Path(__file__).resolve().parents[1]
# What a checkout has besides its files
LEFT_OUT = (".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
FOLDERS = ("apps", "conf", "flower_graph", "strategies")
GUIDES = "flower_graph/docs"  # the pages as they are written
DATA = "flower_graph/data/cora_linqs"
SITE = "flower_graph/site"  # where `make docs` has built it, as CI and `make dist` do before
INDEX = ROOT / SITE / "index.html"
WHERE = """
import importlib.util, json
import flower_graph
from flower_graph.apps import client_app, server_app
from flower_graph import NodeClient
from flower_graph.strategies.nfedgnn import strategy as relay
print(json.dumps([flower_graph.__file__, relay.__file__, server_app.__file__]))
relay.SplitGradientRelay, NodeClient, client_app.app
assert not any(importlib.util.find_spec(n) for n in ("strategies", "apps", "conf"))
"""
METADATA = """
import setuptools.build_meta as backend
print(backend.prepare_metadata_for_build_wheel("."))
"""
LOAD = """
import flower_graph
from flower_graph.data import load_data
from flower_graph.config.common import DataConfig
data = load_data(DataConfig(name="cora-linqs"))
print(flower_graph.__file__, data.num_nodes, int(data.edge_index.shape[1]) // 2)
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what the distributions are built from: building writes beside its sources."""
    copy = tmp_path_factory.mktemp("source") / "flower-graph"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    runs = copy / "docs" / "results" / "fedgls" / "runs"
    runs.mkdir()
    (runs / "a.txt").touch()
    return copy


@pytest.fixture(scope="module")
def distributions(source: Path) -> Path:
    """Build the sdist, and the wheel from the sdist."""
    folder = Path(os.environ.get("FLOWER_GRAPH_DIST") or source / "dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return folder


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a new environment that borrows the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (wheel,) = distributions.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True)
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (site,) = folder.glob("lib/python*/site-packages")
    # Plain paths after its own: no .pth of theirs is read, so no editable install comes along.
    (site / "borrowed.pth").write_text("\n".join(sorted(paths)), encoding="utf-8")
    return folder


def _run(installed: Path, tmp_path: Path, *command: str) -> str:
    """Run a program of the environment, far from the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment["BROWSER"] = "true"  # which opens nothing
    environment.pop("FLOWER_GRAPH_DATA", None)
    run = subprocess.run(
        [str(installed / "bin" / command[0]), *command[1:]],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_twine_finds_nothing_wrong(distributions: Path) -> None:
    files = sorted(map(str, distributions.iterdir()))
    assert [Path(name).suffix for name in files] == [".whl", ".gz"]
    check = [sys.executable, "-m", "twine", "check", "--strict", *files]
    done = subprocess.run(check, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("PASSED")) == (0, 2), done.stdout + done.stderr


def test_wheel_installs_one_name_only(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {"flower_graph", "flower_graph-0.1.0.dist-info"}
    assert {name.split("/")[0] for name in names} == tops
    sources = _sources()
    expected = {n if n.startswith("flower_graph/") else f"flower_graph/{n}" for n in sources}
    site = {name for name in names if name.startswith(f"{SITE}/")}
    assert not INDEX.exists() or f"{SITE}/own-data.html" in site
    guides = {name for name in names if name.startswith(f"{GUIDES}/")}
    assert {f"{GUIDES}/own-data.md", f"{GUIDES}/generate.py"} <= guides
    assert {Path(name).suffix for name in guides} == {".md", ".py"}
    packed = {name for name in names if "dist-info" not in name} - site - guides
    assert packed == expected | {
        f"{DATA}/cora.npz.json",
        f"{DATA}/README.md",
        "flower_graph/py.typed",
    }


@pytest.mark.parametrize("address", ["", "https://git.example/team/flower-graph"])
def test_a_package_index_gets_no_relative_link(source: Path, tmp_path: Path, address: str) -> None:
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(source / name, tmp_path)
    for name in (*FOLDERS, "docs"):  # links: nothing is built, these only have to be there
        (tmp_path / name).symlink_to(source / name)
    project = (tmp_path / "pyproject.toml").read_text(encoding="utf-8")
    named = re.sub(r'^repository = ".*"$', f'repository = "{address}"', project, flags=re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(named, encoding="utf-8")
    command = [sys.executable, "-c", METADATA]
    made = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    found = message_from_string((tmp_path / made.split()[-1] / "METADATA").read_text("utf-8"))
    shown = found.get_payload()
    assert "](" in shown and not re.search(r"\]\((?!https?:|#)", shown)
    assert (f"({address}/blob/v0.1.0/CHANGELOG.md)" in shown) == bool(address)
    assert len(found.get_all("Project-URL", [])) == (4 if address else 0)


def _sources() -> set[str]:
    """Name all modules and configs, as paths in the checkout."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return {str(path.relative_to(ROOT)) for path in files if path.suffix in (".py", ".yaml")}


def test_sdist_has_all_that_a_build_needs(distributions: Path) -> None:
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", f"{DATA}/cora.npz.json"} <= names
    assert {"conf/quickstart.yaml", "apps/server_app.py"} <= names
    assert not any("/runs/" in name for name in names)
    assert sdist.stat().st_size < 4e6


def test_the_site_is_in_the_wheel_small_and_found(
    distributions: Path, installed: Path, tmp_path: Path
) -> None:
    if not INDEX.exists():
        pytest.skip("`make docs` has not been run")
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        parts = [one for one in archive.infolist() if one.filename.startswith(f"{SITE}/")]
    assert sum(part.compress_size for part in parts) < 3e6
    for page in ("own-data", "configuration", "results/heat-map"):
        found = _run(installed, tmp_path, "flower-graph", "docs", page, "--path")
        path = Path(found.strip().removeprefix("file://"))
        assert path.is_file() and path.is_relative_to(installed)


def test_installed_package_is_the_wheels_and_its_command_lists_shows_and_runs(
    installed: Path, tmp_path: Path
) -> None:
    for path in json.loads(_run(installed, tmp_path, "python", "-c", WHERE)):
        assert path.startswith(str(installed)), path
    listed = _run(installed, tmp_path, "flower-graph", "list")
    assert "nfedgnn/cora" in listed
    assert "quickstart" in listed
    assert "cora-linqs" in _run(installed, tmp_path, "flower-graph", "show", "quickstart")
    _run(installed, tmp_path, "flower-graph", "run", "quickstart", "rounds=2", "--out", "out")
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert (result["rounds"], result["clients"]) == (2, 2708)


def test_flower_app_bundle_has_all_that_it_needs(source: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "app.fab"
    bundle.write_bytes(build_fab_from_disk(source))
    with zipfile.ZipFile(bundle) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "app")
    assert _sources() <= names
    load = [sys.executable, "-c", LOAD]
    run = subprocess.run(load, cwd=tmp_path / "app", capture_output=True, text=True, check=True)
    origin, nodes, edges = run.stdout.split()
    assert (Path(origin).parents[1], nodes, edges) == (tmp_path / "app", "2708", "5278")
