"""A warning that comes again and again in a run is told a few times, then counted."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flower_graph.records.warned import LIBRARY, MOST_TOLD, counted_warnings

LOG = logging.getLogger("flower_graph.strategies.some_method")


@contextmanager
def _told(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.clear()
    told: list[str] = []
    with counted_warnings():
        yield told
    told += caplog.messages


def test_the_first_are_told_and_then_the_count(caplog: pytest.LogCaptureFixture) -> None:
    """A block in a block counts once, and after both all is as before."""
    before = [*LIBRARY.handlers], LIBRARY.propagate
    with _told(caplog) as told, counted_warnings():
        for number in range(2345):
            LOG.warning("client %d: an embedding is %.3g", number, 33.9 * 1.01**number)
    assert len(told) == MOST_TOLD + 1
    assert told[0] == "client 0: an embedding is 33.9"
    assert "2345" in told[-1]
    assert "client 2344" in told[-1]
    assert ([*LIBRARY.handlers], LIBRARY.propagate) == before


def test_reasons_are_kinds_and_few_are_told_whole(caplog: pytest.LogCaptureFixture) -> None:
    with _told(caplog) as told:
        for number in range(MOST_TOLD):
            for why in ("late", "too large"):
                LOG.warning("round %d: %s", number, why)
        LOG.info("as ever")
        logging.getLogger("another.library").warning("as ever")
    own = [text.partition(": ")[2] for text in told if text != "as ever"]
    assert told[-1] == "as ever" and own == ["late", "too large"] * MOST_TOLD
