"""The notebooks: they run from their sources, and the committed ones are those, without timings."""

import re
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from doc_helpers import DOCS, script
from nbformat import NotebookNode

FOLDER = DOCS / "notebooks"
SOURCES = sorted(FOLDER.glob("*.md"))
TIMES = re.compile(r"\b\d+(\.\d+)? (s|ms|seconds|minutes)\b|seconds|\d\d:\d\d|/tmp|/home")


@pytest.fixture(scope="module")
def execution() -> ModuleType:
    """Import the script that writes the notebooks."""
    return script(FOLDER / "execute.py")


def committed(source: Path) -> NotebookNode:
    """Read the notebook that is committed."""
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    """List the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(notebook: NotebookNode) -> list[list[list[str]]]:
    """Tell what kinds of outputs each cell has."""
    return [[sorted(one.get("data", ["text"])) for one in cell.outputs] for cell in code(notebook)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_committed_notebook_is_of_its_source_and_tells_no_time(
    execution: ModuleType, source: Path
) -> None:
    notebook, read = committed(source), execution.read(source)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in read.cells
    ], "write it anew: python docs/notebooks/execute.py"
    assert all(cell.metadata == {} and cell.id.startswith("cell-") for cell in notebook.cells)
    outputs = [one for cell in code(notebook) for one in cell.outputs]
    said = [one.get("text") or one.data.get("text/plain", "") for one in outputs]
    assert said and not [text for text in said if TIMES.search(text)]
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, len(code(notebook)) + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_from_its_source(execution: ModuleType, source: Path) -> None:
    assert kinds(execution.execute(source)) == kinds(committed(source))
