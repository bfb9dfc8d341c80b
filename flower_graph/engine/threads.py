"""Threads that wait without taking the cores from each other, where torch was loaded before."""

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
    """Use one thread for a while if torch's would spin: with others on the cores these are slow."""
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
