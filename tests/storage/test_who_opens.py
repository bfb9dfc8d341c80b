"""Files are opened in one place, ``flower_graph.storage``: within bounds, and through no link."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("flower_graph", "strategies", "apps")
# Methods and functions that open what they are given
READS = {"read_text", "read_bytes", "fromfile", "loadtxt", "genfromtxt", "memmap", "safe_open"}
READS |= {"np.load", "numpy.load", "torch.load", "json.load", "pickle.load", "OmegaConf.load"}
READS |= {"zipfile.ZipFile", "tarfile.open", "gzip.open", "sqlite3.connect"}
# ... and that write, make, rename or delete it
WRITES = {"write_text", "write_bytes", "mkdir", "makedirs", "rmdir", "unlink", "rmtree", "touch"}
WRITES |= {"rename", "renames", "symlink", "symlink_to", "hardlink_to", "link", "mknod", "mkfifo"}
WRITES |= {"chmod", "chown", "truncate", "save_file", "savetxt", "savefig", "tofile", "copytree"}
WRITES |= {"copyfile", "copy2", "NamedTemporaryFile", "mkdtemp", "mkstemp", "SummaryWriter"}
WRITES |= {"from_file", "FileHandler", "TemporaryDirectory", "export_chrome_trace", "memmap"}
WRITES |= {"os.replace", "os.remove", "os.link", "shutil.copy", "shutil.move", "print_png"}
WRITES |= {"np.save", "np.savez", "np.savez_compressed", "torch.save", "json.dump", "pickle.dump"}
GATE = "flower_graph/storage/files.py"
# Why other modules may: reading needs no bounds there, and writing goes through the gate
ALLOWED = """
read  flower_graph/client/resident.py read_text: the kernel's
read  flower_graph/lazy.py read_text: the package's own source
read  apps/cli/launch.py open: copies the log that it wrote itself
read  apps/cli/run.py open: new lines of the metrics that its own run writes
read  flower_graph/method/registry.py read_text: the package's own source
read  flower_graph/data/cora_linqs/__init__.py np.load read_text: the package's own
read  flower_graph/engine/machine.py read_text: the kernel's
read  flower_graph/outputs/client.py fromfile: of a stream that storage opened
write flower_graph/client/resident.py chmod: a socket, by its open folder
write flower_graph/data/sources/datasets.py torch.save: into a stream that the gate opened
write flower_graph/outputs/files.py np.savez: into a stream that the gate opened
write flower_graph/outputs/client.py tofile: into a stream that the gate opened
write flower_graph/outputs/files.py rename: columns of a table
write flower_graph/report/plots.py print_png: into a stream that the gate opened
write flower_graph/report/trackers.py SummaryWriter: a folder of the gate's
write flower_graph/storage/row_file.py from_file: maps what the gate opened
write flower_graph/storage/row_file.py truncate: a stream that the gate opened
write flower_graph/storage/formats.py save_file: by a path in a folder that the gate opened
write strategies/fedscem/tables.py os.open: /dev/null
write apps/cli/main.py os.open: /dev/null
"""


def calls(source: str) -> Iterator[str]:
    """Name the calls that open a file, after "read" or "write"."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, is_method = ast.unparse(node.func), isinstance(node.func, ast.Attribute)
        own, text = name.rpartition(".")[2], ast.unparse(node)
        if own == "open":
            mode = _mode(node)
            if name == "os.open":
                mode = "w" * bool(re.search("O_(WRONLY|RDWR|CREAT|TRUNC|APPEND)", text))
                mode += "r" * bool(re.search("O_(RDONLY|RDWR)", text))
            if set(mode) & set("wax+"):
                yield f"write {name if name == 'os.open' else own}"
            if set(mode) & set("r+"):
                yield f"read {name if name == 'os.open' else own}"
        # `read_text(path)` is storage's own; a path's method is meant
        elif is_method and not {own, name}.isdisjoint(READS):
            yield f"read {name if name in READS else own}"
        elif name.removeprefix("files.") != "write_text" and not {own, name}.isdisjoint(WRITES):
            yield f"write {name if name in WRITES else own}"


def _mode(call: ast.Call) -> str:
    """Return the mode of ``open(path, mode)`` or ``path.open(mode)``: "r" by default."""
    is_function = isinstance(call.func, ast.Name)
    given = [*call.args[is_function:], *(one.value for one in call.keywords if one.arg == "mode")]
    if not given or isinstance(given[0], ast.Constant):
        return str(given[0].value) if given else "r"  # type: ignore[attr-defined]
    # One that nobody can read here is any; else it is no file's: `grid.open(one, other)`
    return "r" if is_function else ""


def test_no_module_but_the_gate_opens_or_writes_a_file() -> None:
    found = set()
    for path in (path for part in PARTS for path in (ROOT / part).rglob("*.py")):
        module = path.relative_to(ROOT).as_posix()
        for kind, call in map(str.split, calls(path.read_text(encoding="utf-8"))):
            if module != GATE and not (kind == "read" and "storage/" in module):
                found.add((kind, module, call))
    lines = (line.partition(":")[0].split() for line in ALLOWED.strip().splitlines())
    assert found == {(kind, module, call) for kind, module, *calls in lines for call in calls}
