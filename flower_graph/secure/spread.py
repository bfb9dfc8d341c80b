"""Work on many points or keys, shared among PyTorch's threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
WORTH_A_THREAD = 16  # curve operations: 1 ms, several times what starting a thread takes


def spread(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Do a curve operation on every item; libsodium releases Python's lock meanwhile."""
    import torch  # takes a second, and a command that makes keys does not need it

    threads = min(torch.get_num_threads(), len(items) // WORTH_A_THREAD)
    if threads < 2:
        return list(map(work, items))
    cuts = [len(items) * part // threads for part in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [pool.submit(list, map(work, items[a:b])) for a, b in pairwise(cuts)]
    return list(chain.from_iterable(part.result() for part in parts))
