"""Printing for commands: names of data and classes may have control characters."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from flower_graph.errors import printable


def say(*lines: object, to: TextIO | None = None, end: str = "\n") -> None:
    """Print lines without the characters that would control a terminal."""
    stream = to or sys.stdout
    print(*(printable(str(line)) for line in lines), sep="\n", end=end, file=stream, flush=True)


class Printable(logging.Formatter):
    """Formats log lines as ``say`` prints."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
