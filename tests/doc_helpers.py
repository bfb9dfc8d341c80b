"""The Python of the docs: blocks on a page, run as they stand, and scripts."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def run_blocks(
    page: Path, count: int, chosen: slice = slice(None), space: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a page's blocks, of which the test knows the count; give what is defined then."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == count, f"{page.name} has other blocks than this test knows"
    names = {"__name__": "example", **(space or {})}
    for block in found[chosen]:
        exec(compile(block, str(page), "exec"), names)
    return names


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
