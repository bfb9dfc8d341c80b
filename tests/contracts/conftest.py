"""One thread, quiet logs of Flower's own, and a record of what the faults came to."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from flower_graph.report.writer import RunWriter


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small graphs: several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out: they take longer than the runs, and no fault touches them."""
    monkeypatch.setattr(RunWriter, "_draw", lambda *_: None)
