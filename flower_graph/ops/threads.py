"""Many tiny products one after the other: a second thread costs more than it helps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(groups: int) -> Iterator[None]:
    """Compute on one thread inside the block if it goes over several groups."""
    # A product of one ego-network takes microseconds, as long as waking a thread does: two threads
    # take up to three times as long. A single group may be large, and keeps all threads.
    before = torch.get_num_threads()
    if groups < 2 or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
