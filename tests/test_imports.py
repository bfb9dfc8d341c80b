"""Imports go one way: apps → strategies → rooms of flower_graph in their order, in no circle."""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest
from without_flower import run_without_flower

import flower_graph
from flower_graph.lazy import declared

ROOT = Path(__file__).resolve().parents[1]
# Parts that a script without Flower, Ray or PyG must be able to use.
PURE = (
    "flower_graph/models.py",
    "strategies/*/algorithm.py",
    "strategies/*/modules.py",
    "strategies/nfedgnn/links.py",
    "flower_graph/engine/*.py",
    "flower_graph/ops/*.py",
)
# The only modules that are in no folder of the library; docs/architecture.md says why
AT_THE_ROOT = {"__init__", "__main__", "simulation", "errors", "rng", "models", "lazy"}
AT_THE_ROOT |= {"flower_compat", "handed"}
# The rooms of flower_graph/ from the ground up, and the floors above. Each imports itself and rows
# before its own: rooms of one row know nothing of each other.
ROOMS = (
    {"errors", "lazy", "ops"},
    {"flower_compat", "handed", "rng", "storage"},
    {"wire", "models"},
    {"engine", "records", "config"},
    {"secure", "data", "privacy"},
    {"outputs"},
    {"client", "server"},
    {"report", "simulation"},
    {"audit"},
    {"method"},
    {"strategies"},
    {"apps"},
)

FRONT_DOOR = "flower_graph"  # whose short names are of all floors; docs/architecture.md says why


def _module(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts if parts[0] == "flower_graph" else ["flower_graph", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    _module(path): path
    for folder in ("flower_graph", "strategies", "apps")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__main__.py"  # `python -m flower_graph` is the command
}


def _source(module: str) -> str:
    source = SOURCES[module].read_text(encoding="utf-8")
    if module != FRONT_DOOR:
        return source
    body = [node for node in ast.parse(source).body if not isinstance(node, ast.If)]
    return ast.unparse(ast.Module(body, []))


@cache
def _imports(module: str) -> set[str]:
    names: set[str] = set()
    is_package = SOURCES[module].name == "__init__.py"
    for node in ast.walk(ast.parse(_source(module))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = node.level - is_package
            base = ".".join(module.split(".")[: -up or None]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            # `from flower_graph import ops` names a module only with what is imported.
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names


def _circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    left = {module: set(targets) for module, targets in arrows.items()}
    while free := {module for module, targets in left.items() if not targets}:
        left = {m: targets - free for m, targets in left.items() if m not in free}
    return [[module, *sorted(targets)] for module, targets in sorted(left.items())]


def _room(module: str) -> str:
    return [*module.split("."), ""][1]


def _not_below(names: set[str], module: str) -> set[str]:
    row = next(number for number, rooms in enumerate(ROOMS) if _room(module) in rooms)
    below = {_room(module), *chain.from_iterable(ROOMS[:row])}
    return {name for name in names & SOURCES.keys() - {FRONT_DOOR} if _room(name) not in below}


def test_imports_go_one_way() -> None:
    for module, path in SOURCES.items():
        names = _imports(module)
        assert module == FRONT_DOOR or _not_below(names, module) == set(), path
        tops = {name.split(".")[0] for name in names}
        assert not tops & {"strategies", "apps", "conf"}, f"{path}: flower_graph.… is needed"
        assert not tops & {"benchmarks", "deploy", "examples", "tests"}, path


def test_no_modules_import_each_other_in_a_circle() -> None:
    arrows = {}
    for module in SOURCES:
        named = _imports(module)
        # `from a import b` reads the package `a` only where `b` is no module.
        packages = {name.rpartition(".")[0] for name in named & SOURCES.keys()}
        arrows[module] = (named & SOURCES.keys()) - packages - {module}
    assert _circles(arrows) == []


def test_dependencies_are_what_the_code_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"]]
    for name in ("completion", "deepwalk", "metis", "ogb", "mlflow", "optuna", "wandb"):
        asked += project["optional-dependencies"][name]
    names = {re.split(r"[\[<>=~! ]", one)[0].lower().replace("-", "_") for one in asked}
    called = {"nacl": "pynacl", "sklearn": "scikit_learn", "yaml": "pyyaml"}
    called["mlflow"] = "mlflow_skinny"
    imported = {n.partition(".")[0] for m in SOURCES for n in _imports(m)}
    imported -= {*sys.stdlib_module_names, FRONT_DOOR, "_typeshed"}  # the last is for mypy alone
    unseen = {"scipy"}  # PyG needs it to read Planetoid's files, and does not ask for it
    brought = {"ray"}  # by flwr[simulation], which names the version that it works with
    assert {called.get(name, name) for name in imported - brought} | unseen == names


def test_few_modules_are_in_no_folder() -> None:
    found = {path.stem for path in (ROOT / "flower_graph").glob("*.py")}
    assert found <= AT_THE_ROOT


def test_pure_parts_run_without_flower_ray_and_pyg() -> None:
    paths = [path for pattern in PURE for path in ROOT.glob(pattern)]
    assert len(paths) >= len(PURE)
    code = "sys.modules['torch_geometric'] = None\nfrom flower_graph import consensus, models\n"
    run_without_flower(code + "".join(f"import {_module(path)}\n" for path in paths))


def test_the_front_door_has_what_is_public_below_it() -> None:
    """Each short name is that of the module, and imports no more than that module."""
    door = declared(FRONT_DOOR)
    assert sorted(door) == flower_graph.__all__
    for name, (module, there) in door.items():
        assert getattr(flower_graph, name) is getattr(import_module(module), there)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flower_graph.nothing
