"""What holds for the files of the repository as a whole, and for the versions that it pins."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import flower_graph
from flower_graph.apps.cli import launch
from flower_graph.errors import EngineFailedError

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".toml", ".yaml", ".md", ".txt", ".json", ".in", ".cfg", ""}
# Folders that only one machine has. `/tmp` is common to all, so code may name it on its own.
MACHINE_PATH = re.compile(r"(?<![\w./-])/(home|root|work|Users|mnt|tmp)/(?!\*)[\w.-]+")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _tracked() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = run.stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        names = [str(p.relative_to(ROOT)) for p in ROOT.glob("[a-zA-Z]*/**/*") if p.is_file()]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    this = Path(__file__).resolve()
    paths = [path for path in _tracked() if path.suffix in TEXT and path != this]
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in paths
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    for text in ("x = '/home/me/data'", "see /root/x", "(/mnt/disk)", "/tmp/run-1"):
        assert MACHINE_PATH.search(text)
    for text in ("network/mnt/x", "https://a.org/home/x", "apps/root/x", "/tmp", "./tmp/x"):
        assert not MACHINE_PATH.search(text)


def test_version_is_the_same_wherever_it_stands() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PYPROJECT["project"]["version"] == flower_graph.__version__ == cited["version"]
    assert cited["authors"] == PYPROJECT["project"]["authors"]


def test_every_package_is_listed_for_the_wheel() -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("flower_graph", "apps", "conf", "strategies")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    names = {n if n.split(".")[0] == "flower_graph" else f"flower_graph.{n}" for n in found}
    # The pages, whose folder is no package in a checkout
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == names | {"flower_graph.docs"}


def test_launcher_sets_the_run_config_that_the_root_app_declares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[dict[str, object]] = []

    def run_in(home: Path, app: Path, *_: object) -> list[str]:
        written = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        found.append(written["tool"]["flwr"]["app"]["config"])
        return []

    monkeypatch.setattr(launch, "_run_in", run_in)
    overrides = ["x=[1, 2]", "name='q\"\\\\'"]
    with pytest.raises(EngineFailedError):
        launch.flwr_run("a/b", overrides, tmp_path, seed=3, resume=True)
    assert set(found[0]) == set(PYPROJECT["tool"]["flwr"]["app"]["config"])
    assert shlex.split(str(found[0]["overrides"])) == overrides
    assert (found[0]["config"], found[0]["seed"], found[0]["resume"]) == ("a/b", "3", True)
