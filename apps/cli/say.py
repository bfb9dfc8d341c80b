"""What commands print: names of data and classes may have signs that move a terminal's cursor."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from flower_graph.errors import printable


def say(*lines: object, to: TextIO | None = None, end: str = "\n") -> None:
    """Print lines, without signs that a terminal would obey."""
    stream = to or sys.stdout
    print(*(printable(str(line)) for line in lines), sep="\n", end=end, file=stream, flush=True)


class Printable(logging.Formatter):
    """Writes log lines as ``say`` prints."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record."""
        return printable(super().format(record))
