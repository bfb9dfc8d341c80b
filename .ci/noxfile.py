"""Tests of what touches Flower: with the oldest that is allowed, the newest, and the next one.

``make test-versions`` runs it, each version in an environment of its own below ``build``. The
newest is that of ``constraints.txt``; the files of constraints beside this one lay others over it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("dev", "deepwalk", "metis", "dp")
# What sends messages through Flower, or is called by it
TESTS = (
    *("tests/test_flower_compat.py", "tests/test_simulation.py", "tests/test_plain_clients.py"),
    *("tests/client", "tests/server", "tests/contracts", "tests/privacy"),
    *("tests/strategies/test_flower_parts.py", "tests/strategies/test_structure_fedavg.py"),
    *("tests/strategies/test_fed_sage.py", "tests/strategies/test_relay_server.py"),
    *("tests/test_existing_app.py", "tests/test_launch.py"),  # on Ray, the last
)
# Not with the oldest: the scripts in deploy/ have SuperNodes and `flwr run` at one port of the
# SuperLink, where 1.39 has two.
DEPLOYMENT = (
    "tests/deployment/test_deployments.py::test_each_method_gives_what_the_simulation_gives",
    "tests/deployment/test_deployments.py::test_a_supernode_is_restarted_and_later_killed",
)
# Left out of `make test`: a run of an ordinary Flower app on Ray, Flower's bundle of ours, and what
# happens when one of Flower's actors dies
SLOW = (
    "tests/test_existing_app.py::test_an_ordinary_app_and_the_root_run_by_the_commands_of_their_pages",
    "tests/test_wheel.py::test_flower_app_bundle_has_all_that_it_needs",
    "tests/server/test_actors_on_ray.py",
)
# Run in the new environment: what the Flower that is there asks for, with its extras
NEEDS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for one in map(Requirement, requires(sys.argv[1])):
    if not one.marker or any(one.marker.evaluate({"extra": e}) for e in ("simulation", "dp")):
        print(one.name, ",".join(one.extras), one.specifier, sep=";")
"""

nox.options.envdir = str(ROOT / "build" / "versions")
nox.options.default_venv_backend = "venv"


@nox.session
@nox.parametrize("flower", ["oldest", "newest", "nightly"])
def versions(session: nox.Session, flower: str) -> None:
    """Install one version of Flower and what it needs; run the tests."""
    session.chdir(ROOT)
    pinned, other = pins(ROOT / "constraints.txt"), ROOT / ".ci" / f"constraints-{flower}.txt"
    pinned |= pins(other) if other.exists() else {}
    package = "flwr-nightly" if flower == "nightly" else "flwr"
    # Not in `create_tmp()`: it becomes TMPDIR, and the names of Ray's sockets then are too long.
    file = Path(session.virtualenv.location) / "constraints.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in pinned.items()))
    # Flower alone, and then what it asks for in the pinned versions: a registry may lack the very
    # newest of something that any version will do of.
    session.install("--no-deps", f"{package}=={pinned[package]}")
    said = session.run("python", "-c", NEEDS, package, silent=True)
    needed = [needs(line, pinned) for line in str(said).split()]
    session.install("--constraint", str(file), *needed, *own_needs())
    session.install("--no-deps", "--editable", ".")
    pytest = ("python", "-m", "pytest", "--numprocesses", "3", "--dist", "loadfile")
    session.run(*pytest, "-m", "not slow", *(session.posargs or TESTS))
    if not session.posargs:
        session.run(*pytest, *SLOW, *(() if flower == "oldest" else DEPLOYMENT))


def pins(file: Path) -> dict[str, str]:
    """Read which version each package has."""
    found = re.findall(r"^([\w.-]+)==(\S+)", file.read_text(), re.MULTILINE)
    return {re.sub(r"[._-]+", "-", name).lower(): version for name, version in found}


def needs(line: str, pinned: dict[str, str]) -> str:
    """Write a requirement of Flower's, without its bounds where a version is pinned."""
    name, extras, bounds = line.split(";")
    bounds = "" if name.lower() in pinned else bounds
    return f"{name}[{extras}]{bounds}" if extras else f"{name}{bounds}"


def own_needs() -> list[str]:
    """Read what this project needs besides Flower."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for name in EXTRAS for one in project["optional-dependencies"][name]]
    return [one for one in (*project["dependencies"], *extras) if not one.startswith("flwr")]
