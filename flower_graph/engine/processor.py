"""The processor of this machine, which rounding and speed depend on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's name if the kernel tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
