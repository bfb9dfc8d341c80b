"""Sphinx's settings for the site: `make docs` builds it, `flower-graph docs` opens it.

The pages are the Markdown of this folder, as a repository shows it. While they are read, tables
that code declares are filled in (``generate.py``), and links out of this folder become links into
the repository, or words where its address is not known.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
generate = import_module("generate")  # a file of this folder

PYPROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = PYPROJECT["tool"]["flower-graph"]["repository"].rstrip("/")
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")
AS_HTML = ("text/html", "image/svg+xml")  # outputs of notebooks that are shown as they are

project = "flower-graph"
author = "The authors of flower-graph"
version = release = PYPROJECT["project"]["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
napoleon_use_ivar = True  # attributes are described once
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = f"flower-graph {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
myst_heading_anchors = 6  # as GitHub makes them
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80


def _of_site(page: Path, link: re.Match[str]) -> str:
    """Write a link as the site can follow it: to a page, into the repository, or as words."""
    picture, words, target, anchor = link.groups()
    file = (page.parent / target).resolve()
    if file.is_dir() and DOCS in file.parents and (file / "README.md").is_file():
        return f"[{words}]({target.rstrip('/')}/README.md)"
    is_built = DOCS in file.parents
    if is_built and file.suffix in (".md", ".svg"):
        return link[0]
    name = file.relative_to(DOCS.parent).as_posix()
    if REPOSITORY:
        return f"[{words}]({REPOSITORY}/blob/v{release}/{name}{anchor or ''})"
    return f"{words} (`{name}` in the repository)" if picture else words


def as_page(notebook: Path) -> str:
    """Return an executed notebook as a page."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _of_cell(cell)) + "\n"


def _of_cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {"text/plain": output.get("text", "")})
        kind = next((one for one in AS_HTML if one in data), "text/plain")
        text = "".join(data[kind]).rstrip()
        yield f"```{{raw}} html\n{text}\n```" if kind in AS_HTML else f"```text\n{text}\n```"


def _read(app: object, name: str, source: list[str]) -> None:
    page = DOCS / f"{name}.md"
    notebook = page.with_suffix(".ipynb")
    text = as_page(notebook) if notebook.is_file() else source[0]
    text = generate.filled(name.rpartition("/")[2], text)
    text = LINK.sub(lambda link: _of_site(page, link), text)
    if name.startswith("results/") and name != "results/README":
        text = f"---\norphan: true\n---\n{text}"  # found from other pages, not from the list
    source[0] = text


def setup(app: Any) -> dict[str, bool]:
    """Have pages filled in while they are read."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True}
