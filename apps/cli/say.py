"""Printing for all commands: names of data and classes may have control characters."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from typing import TextIO

from flower_graph.errors import printable


def say(*lines: object, to: TextIO | None = None, end: str = "\n") -> None:
    """Print lines without the characters that would control a terminal."""
    stream = to or sys.stdout
    print(*(printable(str(line)) for line in lines), sep="\n", end=end, file=stream, flush=True)


def hand_over(text: str) -> None:
    """Print a table; another program gets it as it is, a terminal as ``say`` prints."""
    say(text, end="") if sys.stdout.isatty() else print(text, end="", flush=True)


@contextmanager
def withheld(name: str, level: int) -> Iterator[list[logging.LogRecord]]:
    """Collect a logger's messages from a level on, which are then not printed."""
    log, handler = logging.getLogger(name), BufferingHandler(sys.maxsize)
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    log.propagate = False
    try:
        yield handler.buffer
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        log.propagate = True


class Printable(logging.Formatter):
    """Formats log lines without the characters that would control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
