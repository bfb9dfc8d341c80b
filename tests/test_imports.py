"""Imports go one way: apps → strategies → flower_graph → flower_graph/ops."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("ops", "library", "strategies", "apps")  # each may import itself and what is before it
# Parts that a script without Flower, Ray or PyG must be able to use.
PURE = (
    "flower_graph/models.py",
    "flower_graph/cohort.py",
    "flower_graph/dropout.py",
    "flower_graph/ego_cohort.py",
    "flower_graph/graph_batch.py",
    "flower_graph/graph_learners.py",
    "flower_graph/judgement.py",
    "flower_graph/public_gat.py",
    "flower_graph/stacked_weights.py",
    "flower_graph/structure_cohort.py",
    "flower_graph/structure_networks.py",
    "flower_graph/ops/*.py",
)
# What a user starts stands above all layers, wherever its file lies.
ENTRIES = ("flower_graph/cli.py", "flower_graph/cli_audit.py", "flower_graph/cli_run.py")


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "flower_graph" else ("flower_graph", *parts)
    return ".".join(parts)


def _layer(module: str) -> str:
    part = [*module.split("."), ""][1]
    return part if part in LAYERS else "library"


def _imports(source: str, module: str = "") -> set[str]:
    """Return the names of all modules that a source imports at run time, at any depth."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            # `from flower_graph import ops` names a module only with what is imported.
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
        todo += ast.iter_child_nodes(node)
    return names


def _upward(source: str, module: str) -> set[str]:
    allowed = LAYERS[: LAYERS.index(_layer(module)) + 1]
    ours = {name for name in _imports(source, module) if name.split(".")[0] == "flower_graph"}
    return {name for name in ours if name != "flower_graph" and _layer(name) not in allowed}


SOURCES = sorted(
    path
    for folder in ("flower_graph", "strategies", "apps")
    for path in (ROOT / folder).rglob("*.py")
    if str(path.relative_to(ROOT)) not in ENTRIES
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert _upward(source, _module(path)) == set()
    tops = {name.split(".")[0] for name in _imports(source, _module(path))}
    assert not tops & {"strategies", "apps", "conf"}, "the full flower_graph.… name is needed"


def test_the_check_finds_what_it_looks_for() -> None:
    upward = "def f():\n    from flower_graph.strategies.relay import Relay\n"
    assert _upward(upward, "flower_graph.ops.graph") == {
        "flower_graph.strategies.relay",
        "flower_graph.strategies.relay.Relay",
    }
    assert _upward(upward, "flower_graph.apps.server_app") == set()
    assert _upward("from flower_graph import apps", "flower_graph.client")
    assert _upward("from ..apps import server_app", "flower_graph.ops.graph")
    assert _upward("from flower_graph.ops import graph", "flower_graph.client") == set()
    assert _upward("if TYPE_CHECKING:\n    import flower_graph.apps", "flower_graph.ops.a") == set()


def test_pure_parts_import_neither_flower_nor_ray_nor_pyg() -> None:
    paths = [path for pattern in PURE for path in ROOT.glob(pattern)]
    assert len(paths) >= len(PURE)
    for path in paths:
        tops = {name.split(".")[0] for name in _imports(path.read_text(encoding="utf-8"))}
        assert not tops & {"flwr", "ray", "torch_geometric"}, path


def _loaded(statement: str) -> set[str]:
    """Return the names of the top-level modules that a fresh interpreter then has."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_importing_the_package_is_cheap() -> None:
    assert not _loaded("import flower_graph") & {"flwr", "torch", "numpy", "ray"}


def test_engine_loads_no_flower_at_run_time() -> None:
    loaded = _loaded(
        "import flower_graph.cohort, flower_graph.ego_cohort, flower_graph.models, flower_graph.ops"
    )
    assert "torch" in loaded
    assert not loaded & {"flwr", "ray", "torch_geometric"}
