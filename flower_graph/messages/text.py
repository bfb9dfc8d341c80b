"""A peer's own words, as a log or a report may have them."""

from __future__ import annotations

MAX_REASON = 300  # characters of a peer's own words that reach a log or a report


def one_line(text: str, limit: int = MAX_REASON) -> str:
    """Keep a peer's words from breaking a log: one line, printable, short."""
    # Of a long text the last line is kept: Ray sends whole tracebacks, which end with the error.
    if len(text) > limit:
        text = text.rstrip().rpartition("\n")[2]
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."
