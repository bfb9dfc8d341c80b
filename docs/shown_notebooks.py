"""Notebooks as pages of the site: their text, code and outputs, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Kinds of outputs as they can be shown, the first that an output has
AS_HTML = ("text/html", "image/svg+xml")


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
