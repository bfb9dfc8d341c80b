"""One thread, quiet logs of Flower's own, and a record of what the faults came to."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small graphs: several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    yield
    torch.set_num_threads(before)
