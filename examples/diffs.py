"""Write what the variants change in the existing app into docs/reference/diffs.md.

Usage: ``python examples/diffs.py [--check]``. With ``--check`` nothing is written; it fails if the
page is not up to date. Where several lines go in a row, the page says how many.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
PAGE = EXAMPLES.parent / "docs" / "reference" / "diffs.md"
FILES = ("pyproject.toml", "server_app.py", "client_app.py", "task.py")
SHORT = 1  # more lines that go in a row are only counted
BLOCK = re.compile(r"(<!-- diff (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def difference(variant: str) -> str:
    """Give what a variant changes, as a block of Markdown."""
    shown, changed, added, removed = [], [], 0, 0
    for name in FILES:
        part = "." if name == "pyproject.toml" else "existing_app"
        before, after = (
            (EXAMPLES / folder / part / name).read_text(encoding="utf-8").splitlines()
            for folder in ("existing_app", variant)
        )
        lines = [*difflib.unified_diff(before, after, n=1, lineterm="")][2:]
        added += sum(line.startswith("+") for line in lines)
        removed += sum(line.startswith("-") for line in lines)
        changed += [name] if lines else []
        if lines and name != "pyproject.toml":
            shown += [f"@@ {name}", *_shortened(lines)]
    counts = f"{len(changed)} files, {added} lines more, {removed} less."
    return "\n".join([counts, "", "```diff", *shown, "```", ""])


def _shortened(lines: list[str]) -> Iterator[str]:
    """Leave out the lines that say where, empty ones, and most of what goes."""
    kept = [line for line in lines if line.strip("+- ") and not line.startswith("@@")]
    for goes, group in groupby(kept, lambda line: line.startswith("-")):
        some = list(group)
        if goes and len(some) > SHORT:
            yield f"-… {len(some)} lines"
        else:
            yield from some


def main() -> int:
    """Write the page, or check it."""
    old = PAGE.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda found: found[1] + difference(found[2]) + found[3], old)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
    elif new != old:
        print(f"{PAGE.name} is not up to date: run python examples/diffs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
