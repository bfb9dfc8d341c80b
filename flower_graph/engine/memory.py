"""Memory of this process: keeping what it frees, and the most that it held."""

from __future__ import annotations

import ctypes
import math
import re
import sys
from pathlib import Path

from flower_graph.errors import ConfigError

# Numbers of glibc's mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 1 << 30  # bytes; larger blocks come from and go back to the system as before
KEPT = (1 << 31) - 1  # bytes; the most that mallopt's int can say


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for what it allocates next."""
    # A round makes and frees the same tensors again and again. By default glibc returns every block
    # of more than 32 MiB to the system at once, and the system clears each page when it is touched
    # anew: with a million users, a third of a round.
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(
        mallopt(what, size)
        for what, size in ((M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT))
    )


def first_layer_bytes(used: int, size: int) -> int:
    """Return the bytes of `used` rows of a first layer, with both of Adam's moments."""
    return 3 * 4 * used * size


def refuse_too_large(least: int, what: str) -> None:
    """Refuse work that needs more memory than this machine has free."""
    import psutil  # not at the top: deployed clients need it not

    free = int(psutil.virtual_memory().available)
    if least > free:
        raise ConfigError(
            f"memory: the weights of {what} take at least {least / 2**30:.1f} GiB, and "
            f"{free / 2**30:.1f} GiB are free; set a smaller model.hidden, fewer features, or "
            "fewer clients"
        )


def peak_memory() -> float:
    """Return the peak memory of this process in bytes; NaN if the system does not count it."""
    # The kernel's own figure for this program alone. ``getrusage`` begins with what the process
    # that started this one held.
    status = Path("/proc/self/status")
    if not status.exists():
        return math.nan
    line = re.search(r"^VmHWM:\s*(\d+)", status.read_text(), re.MULTILINE)
    return 1024.0 * int(line[1]) if line else math.nan
