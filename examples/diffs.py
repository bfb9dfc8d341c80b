"""Write the differences between the existing app and its variants into docs/existing-app.md.

Usage: ``python examples/diffs.py [--check]``. With ``--check`` nothing is written; it fails if the
page is not up to date.
"""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
PAGE = EXAMPLES.parent / "docs" / "existing-app.md"
FILES = ("pyproject.toml", "existing_app/server_app.py", "existing_app/client_app.py")
FILES += ("existing_app/task.py",)
BLOCK = re.compile(r"(<!-- diff (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def difference(variant: str) -> str:
    """Give what a variant changes, as a block of Markdown."""
    lines: list[str] = []
    for name in FILES:
        before, after = (
            (EXAMPLES / folder / name).read_text(encoding="utf-8").splitlines()
            for folder in ("existing_app", variant)
        )
        lines += difflib.unified_diff(before, after, name, name, n=1, lineterm="")
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    files = sum(line.startswith("+++") for line in lines)
    counts = f"{files} files, {added - files} lines more, {removed - files} less."
    return "\n".join([counts, "", "```diff", *lines, "```", ""])


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
