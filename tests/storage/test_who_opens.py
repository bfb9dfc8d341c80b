"""Files are opened for reading in one place, ``flower_graph.storage``, and so within bounds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Methods and functions that open what they are given
READS = {"read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt", "memmap", "safe_open"}
LOADS = {"np.load", "numpy.load", "torch.load", "json.load", "pickle.load", "OmegaConf.load"}
LOADS |= {"zipfile.ZipFile", "tarfile.open", "gzip.open", "sqlite3.connect"}
# Other modules that read, what by, and why no bounds are needed
ALLOWED = {
    ("flower_graph/client/resident/launch.py", "os.open"): "locks a folder, reads nothing",
    ("flower_graph/client/resident/worker.py", "read_text"): "the kernel's",
    ("flower_graph/lazy.py", "read_text"): "the package's own source",
    ("apps/cli/launch.py", "open"): "copies the log that it wrote itself",
    ("apps/cli/progress.py", "open"): "new lines of the metrics that its own run writes",
    ("flower_graph/method/load.py", "read_bytes"): "configs that the package ships",
    ("flower_graph/method/load.py", "read_text"): "configs that the package ships",
    ("flower_graph/method/registry.py", "open"): "the package's own source",
    ("apps/reproduce/table.py", "read_text"): "tables that the package ships",
    ("flower_graph/data/cora_linqs/__init__.py", "np.load"): "bytes that the package ships",
    ("flower_graph/data/cora_linqs/__init__.py", "read_bytes"): "bytes that the package ships",
    ("flower_graph/data/cora_linqs/__init__.py", "read_text"): "bytes that the package ships",
    ("flower_graph/data/cora_linqs/pack.py", "read_bytes"): "makes what the package ships",
    ("flower_graph/data/cora_linqs/pack.py", "zipfile.ZipFile"): "makes what the package ships",
    ("flower_graph/engine/machine.py", "read_text"): "the kernel's",
    ("flower_graph/outputs/figures.py", "fromfile"): "of a stream that storage opened",
    ("flower_graph/outputs/tables.py", "loadtxt"): "of lines that were read",
    ("flower_graph/secure/parties/journal.py", "os.open"): "locks a folder, reads nothing",
}


def opened(source: str) -> Iterator[str]:
    """Name the calls that open a file for reading."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        own = name.rpartition(".")[2]
        if isinstance(node.func, ast.Attribute) and (own in READS or name in LOADS):
            yield name if name in LOADS else own
        elif name == "os.open":
            if "O_RDONLY" in ast.unparse(node) or "O_RDWR" in ast.unparse(node):
                yield name
        elif own == "open" and _reads(node, name == own):
            yield own


def _reads(call: ast.Call, is_function: bool) -> bool:
    """Tell whether ``open(path, mode)`` or ``path.open(mode)`` reads."""
    given = [*call.args[is_function:], *(one.value for one in call.keywords if one.arg == "mode")]
    if not given or not isinstance(given[0], ast.Constant):
        # Without a mode, or one that nobody can read here; else no file's: `grid.open(one, other)`
        return not given or is_function
    return not set(str(given[0].value)) & set("wax") or "+" in str(given[0].value)


def test_no_module_but_storage_opens_a_file_for_reading() -> None:
    found = set[tuple[str, str]]()
    for folder in ("flower_graph", "strategies", "apps"):
        for path in (ROOT / folder).rglob("*.py"):
            if "storage" not in path.relative_to(ROOT).parts:
                name = path.relative_to(ROOT).as_posix()
                found |= {(name, one) for one in opened(path.read_text(encoding="utf-8"))}
    assert found == set(ALLOWED)


def test_what_opens_a_file_is_noticed() -> None:
    reads = (
        "open(p)",
        "open(p, 'rb')",
        "p.open()",
        "p.open(encoding='utf-8')",
        "p.open('r+')",
        "open(p, mode)",
    )
    reads += ("p.read_text()", "np.fromfile(p, ROW)", "torch.load(p)", "os.open(p, os.O_RDONLY)")
    assert all(list(opened(one)) for one in reads)
    others = (
        "open(p, 'w')",
        "p.open('ab')",
        "open(p, mode='x')",
        "grid.open(a, b)",
        "read_text(p)",
    )
    assert not any(list(opened(one)) for one in others)
