"""Warnings of a run: a repeated warning is shown a few times, then counted."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

LOG = logging.getLogger(__name__)
LIBRARY = logging.getLogger(__name__.partition(".")[0])  # all our loggers are below it

MOST_TOLD = 10  # of one kind in a run
NUMBERS = re.compile(r"\W*\d(?:[\W\d]|e[+-])*")


@contextmanager
def counted_warnings() -> Iterator[None]:
    """Pass on the first warnings of each kind; at the end of the block log their number."""
    if any(isinstance(handler, _Counting) for handler in LIBRARY.handlers):
        yield  # a run inside a run, or beside it: counted there
        return
    counting, before = _Counting(), LIBRARY.propagate
    LIBRARY.addHandler(counting)
    LIBRARY.propagate = False
    try:
        yield
    finally:
        LIBRARY.propagate = before
        LIBRARY.removeHandler(counting)
        words = "%d warnings as this one in the run, of which %d were shown: %s"
        for kind, last in counting.last.items():
            LOG.warning(words, counting.counts[kind], MOST_TOLD, last)


class _Counting(logging.Handler):
    """Stands between the library's loggers and the handlers of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[tuple[str, str]]()
        self.last: dict[tuple[str, str], str] = {}  # of the kinds that are not shown any more

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            # Of one kind are warnings of one logger in the same words but for numbers: not of one
            # template, since many templates take a reason
            kind = record.name, NUMBERS.sub(" # ", record.getMessage())
            self.counts[kind] += 1
            if self.counts[kind] > MOST_TOLD:
                self.last[kind] = record.getMessage()
                return
        logging.getLogger().callHandlers(record)
