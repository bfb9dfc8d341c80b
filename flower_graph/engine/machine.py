"""Properties of this machine: device, memory, threads and processor."""

import ctypes
import logging
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flower_graph import torch_was_loaded
from flower_graph.errors import ConfigError
from flower_graph.ops.grouped import one_thread

LOG = logging.getLogger(__name__)
# Numbers of glibc's mallopt(3)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 1 << 30  # bytes; larger blocks come from and go back to the system as before
KEPT = (1 << 31) - 1  # bytes; the most that mallopt's int can say
SPINNING = "torch was imported before flower_graph, and its threads spin: this run uses one thread"


def resolve_device(name: str) -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into a device that exists."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is none of auto, cpu, cuda, cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r} is not there; {torch.cuda.device_count()} GPUs found")
    return device


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next allocations."""
    # A round makes and frees the same tensors again and again. By default glibc returns every block
    # of more than 32 MiB to the system at once, and the system clears each page when it is touched
    # anew: with a million users, a third of a round.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    settings = (M_MMAP_THRESHOLD, LARGEST), (M_TRIM_THRESHOLD, KEPT)
    return mallopt is not None and all(mallopt(*setting) for setting in settings)


def peak_memory() -> float:
    """Return the peak memory of this process in bytes."""
    # Linux has a figure of this program alone. ``getrusage`` begins with what the process that
    # started this one held.
    status = Path("/proc/self/status")
    if status.exists() and (line := re.search(r"VmHWM:\s*(\d+)", status.read_text())):
        return 1024.0 * int(line[1])
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


@contextmanager
def waiting_threads() -> Iterator[None]:
    """Use one thread in this block if torch's threads would spin, which is slow on busy cores."""
    # Measured on two busy cores: 2.0 to 3.5 s a round with two threads that spin, 0.15 s with one,
    # 0.15 s with two that do not.
    spins = torch_was_loaded and torch.get_num_threads() > 1
    if spins:
        LOG.warning("%s; import flower_graph first, or set OMP_WAIT_POLICY=passive", SPINNING)
    with one_thread(spins):
        yield


def processor() -> str:
    """Return the processor's name if the kernel tells it, else its kind."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    name = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return platform.machine() if name is None else name[1]
