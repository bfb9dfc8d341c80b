"""What an attack costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any


def peak(work: Callable[[], Any]) -> tuple[Any, int]:
    """Return what work returns, and how much memory it took at most."""
    tracemalloc.start()
    try:
        found = work()
        return found, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
