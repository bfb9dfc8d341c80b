"""One thread instead of spinning ones, if torch was imported before this package."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flower_graph import torch_was_loaded

LOG = logging.getLogger(__name__)
SPINNING = (
    "torch was imported before flower_graph, and its threads spin while they wait: this run uses "
    "one thread; for all of them import flower_graph first, or set OMP_WAIT_POLICY=passive"
)


@contextmanager
def waiting_threads() -> Iterator[None]:
    """Use one thread in this block if torch's threads would spin, which is slow on busy cores."""
    # Measured on two busy cores: 2.0 to 3.5 s a round with two threads that spin, 0.15 s with one,
    # 0.15 s with two that do not.
    before = torch.get_num_threads()
    if not torch_was_loaded or before == 1:
        yield
        return
    LOG.warning(SPINNING)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
