"""The secure sum and the alignment stand on the wire, storage and errors alone."""

import re
from pathlib import Path

import flower_graph

ALLOWED = {"secure", "wire", "storage", "errors", "lazy", "flower_compat"}


def test_secure_imports_nothing_else_of_the_library() -> None:
    folder = Path(flower_graph.__file__).parent / "secure"
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    found = set(re.findall(r"(?:from|import) flower_graph\.(\w+)", source))
    assert {"secure", "wire"} <= found <= ALLOWED
