"""Files are opened in one place, ``flower_graph.storage``: within bounds, and through no link."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("flower_graph", "strategies", "apps")
# Methods and functions that open what they are given
READS = {"read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt", "memmap", "safe_open"}
LOADS = {"np.load", "numpy.load", "torch.load", "json.load", "pickle.load", "OmegaConf.load"}
LOADS |= {"zipfile.ZipFile", "tarfile.open", "gzip.open", "sqlite3.connect"}
# Other modules that read, what by, and why no bounds are needed
ALLOWED = {
    ("flower_graph/client/resident/worker.py", "os.open"): "locks a folder, reads nothing",
    ("flower_graph/client/resident/worker.py", "read_text"): "the kernel's",
    ("flower_graph/lazy.py", "read_text"): "the package's own source",
    ("apps/cli/launch.py", "open"): "copies the log that it wrote itself",
    ("apps/cli/run.py", "open"): "new lines of the metrics that its own run writes",
    ("flower_graph/method/registry.py", "open"): "the package's own source",
    ("flower_graph/data/cora_linqs/__init__.py", "np.load"): "bytes that the package ships",
    ("flower_graph/data/cora_linqs/__init__.py", "read_bytes"): "bytes that the package ships",
    ("flower_graph/data/cora_linqs/__init__.py", "read_text"): "bytes that the package ships",
    ("flower_graph/engine/machine.py", "read_text"): "the kernel's",
    ("flower_graph/outputs/figures.py", "fromfile"): "of a stream that storage opened",
    ("flower_graph/secure/parties/journal.py", "os.open"): "locks a folder, reads nothing",
}


# Methods and functions that write, make, rename or delete what they are given
WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "rmdir", "unlink", "rmtree", "touch"}
WRITES |= {"rename", "renames", "symlink", "symlink_to", "hardlink_to", "link", "mknod", "mkfifo"}
WRITES |= {"chmod", "chown", "truncate", "save_file", "savetxt", "savefig", "tofile", "copytree"}
WRITES |= {"copyfile", "copy2", "NamedTemporaryFile", "mkdtemp", "mkstemp", "SummaryWriter"}
WRITES |= {"from_file", "FileHandler", "TemporaryDirectory", "export_chrome_trace", "memmap"}
WRITES |= {
    "os.replace",
    "os.remove",
    "os.link",
    "shutil.copy",
    "shutil.move",
    "np.save",
    "print_png",
}
# Which also take a stream
SAVES = {"np.savez", "np.savez_compressed", "torch.save", "json.dump", "pickle.dump"}
GATE = "flower_graph/storage/writing.py"
MAY_WRITE = {
    ("flower_graph/client/resident/worker.py", "chmod"): "a socket, by its open folder",
    ("flower_graph/client/resident/worker.py", "unlink"): "a socket, by its open folder",
    ("flower_graph/data/sources/pyg.py", "TemporaryDirectory"): "empty, for PyG's classes",
    ("flower_graph/outputs/figures.py", "tofile"): "into a stream that the gate opened",
    ("flower_graph/report/plots.py", "print_png"): "into a stream that the gate opened",
    ("flower_graph/report/trackers.py", "SummaryWriter"): "a folder of the gate's",
    ("flower_graph/storage/files.py", "truncate"): "a stream that the gate opened",
    ("flower_graph/storage/row_file.py", "from_file"): "maps what the gate opened",
    ("flower_graph/storage/row_file.py", "truncate"): "a stream that the gate opened",
    ("flower_graph/storage/tensors.py", "save_file"): "by a path in a folder that the gate opened",
    ("strategies/fedscem/tables.py", "TemporaryDirectory"): "a profile's trace",
    ("strategies/fedscem/tables.py", "export_chrome_trace"): "a profile's trace",
    ("strategies/fedscem/tables.py", "os.open"): "/dev/null",
    ("apps/cli/main.py", "os.open"): "/dev/null",
}


def written(source: str) -> Iterator[str]:
    """Name the calls that write, make, rename or delete a file or folder."""
    tree = ast.parse(source)
    streams = set(_streams(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        own = name.rpartition(".")[2]
        # `write_text(path, text)` is storage's own; a path's method is meant
        if name != "write_text" and (own in WRITES or name in WRITES):
            yield own if own in WRITES else name
        elif name in SAVES:
            targets = (
                node.args[:2] if name.startswith(("torch", "json", "pickle")) else node.args[:1]
            )
            if not {ast.unparse(one) for one in targets} & streams:
                yield name
        elif name == "os.open":
            if re.search("O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND", ast.unparse(node)):
                yield name
        elif own == "open" and set(_mode(node) or "") & set("wax+"):
            yield own


def _streams(tree: ast.AST) -> Iterator[str]:
    """Name the streams that the gate opened, and those in memory."""
    for node in ast.walk(tree):
        of_the_gate = isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call)
        if of_the_gate and ast.unparse(node.context_expr.func) in ("replaced", "written", "append"):
            yield ast.unparse(node.optional_vars) if node.optional_vars else ""
        elif isinstance(node, ast.Assign) and "BytesIO(" in ast.unparse(node.value):
            yield from map(ast.unparse, node.targets)


def _mode(call: ast.Call) -> str | None:
    """Return the mode of ``open(path, mode)`` or ``path.open(mode)``: "r" by default."""
    is_function = isinstance(call.func, ast.Name)
    given = [*call.args[is_function:], *(one.value for one in call.keywords if one.arg == "mode")]
    if not given or isinstance(given[0], ast.Constant):
        return str(given[0].value) if given else "r"  # type: ignore[attr-defined]
    # One that nobody can read here is any; else it is no file's: `grid.open(one, other)`
    return "r" if is_function else None


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
        elif own == "open":
            mode = _mode(node) or "w"
            if "+" in mode or not set(mode) & set("wax"):
                yield own


def found(calls: Callable[[str], Iterator[str]], is_gate: Callable[[str], bool]) -> set[Any]:
    """List the calls outside the gate, each with its module."""
    paths = (path for part in PARTS for path in (ROOT / part).rglob("*.py"))
    names = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {
        (name, call)
        for name, path in names.items()
        if not is_gate(name)
        for call in calls(path.read_text(encoding="utf-8"))
    }


def test_no_module_but_the_gate_opens_or_writes_a_file() -> None:
    assert found(opened, lambda name: "storage/" in name) == set(ALLOWED)
    assert found(written, lambda name: name == GATE) == set(MAY_WRITE)


WRITING = """open(p, 'w'); p.open('ab'); open(p, mode='x'); p.open('r+'); p.unlink()
p.write_text(t); os.open(p, os.O_RDWR); np.savez(p, a); torch.save(a, p); shutil.rmtree(p)
os.replace(a, b); p.mkdir(); save_file(t, p); p.rename(q)"""
READING = """open(p); open(p, 'rb'); p.open(); p.open(encoding='utf-8'); p.open('r+'); open(p, mode)
p.read_text(); np.fromfile(p, ROW); torch.load(p); os.open(p, os.O_RDONLY)"""
NEITHER = """text.replace(a, b); grid.open(a, b); read_text(p)
with replaced(p) as stream: torch.save(a, stream)
b = BytesIO(); torch.save(a, b)"""


def test_what_opens_or_writes_a_file_is_noticed() -> None:
    for calls, code, others in ((written, WRITING, "open(p)"), (opened, READING, "open(p, 'w')")):
        assert all(list(calls(one)) for line in code.splitlines() for one in line.split("; "))
        assert not any(list(calls(one)) for one in (NEITHER, others))
