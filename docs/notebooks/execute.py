"""Runs the notebooks and writes each with its outputs: `NAME.ipynb` beside its source `NAME.md`.

    python docs/notebooks/execute.py [NAME ...]

The sources are Markdown of jupytext's. A notebook runs in an empty folder; what tells of this
machine or of time is not kept.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
SECONDS = 300  # that a cell may take


def sources() -> list[Path]:
    """List the notebooks' sources."""
    return sorted(FOLDER.glob("*.md"))


def read(source: Path) -> NotebookNode:
    """Read a source as a notebook without outputs, its cells numbered."""
    notebook = jupytext.read(source, fmt="md")
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL))
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", NotebookNode()
    return notebook


def execute(source: Path) -> NotebookNode:
    """Run a notebook in an empty folder; ``CellExecutionError`` for a cell that fails."""
    notebook = read(source)
    # Commands of this environment are found, as in a shell where it is active.
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment = os.environ | {"PATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as sockets:
        manager = KernelManager(
            kernel_name=KERNEL["name"], transport="ipc", ip=str(Path(sockets) / "kernel")
        )
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            km=manager,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute(env=environment)
        finally:
            manager.shutdown_kernel(now=True)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [_kept(one, folder) for one in cell.outputs if _is_result(one)]
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL))
    return notebook


def _is_result(output: NotebookNode) -> bool:
    """Whether an output is the notebook's, and not a warning or a progress bar."""
    return output.get("name") != "stderr"


def _kept(output: NotebookNode, folder: str) -> NotebookNode:
    """Take the folder of this run out of an output."""
    real = os.path.realpath(folder)
    if "text" in output:
        output.text = output.text.replace(f"{real}/", "").replace(f"{folder}/", "")
    return output


def main() -> None:
    """Run those that are named, or all."""
    names = [one.stem for one in sources()]
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    for name in parser.parse_args().names or names:
        nbformat.write(execute(FOLDER / f"{name}.md"), FOLDER / f"{name}.ipynb")
        print(FOLDER / f"{name}.ipynb", flush=True)


if __name__ == "__main__":
    main()
