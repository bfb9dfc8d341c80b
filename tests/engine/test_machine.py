import subprocess
import sys
from pathlib import Path

import pytest

from flower_graph.engine.machine import peak_memory

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept():
    """In a process of its own: a block of 64 MiB is made of one of 256 MiB that was freed."""
    code = (
        "import torch, resource\n"
        "from flower_graph.engine.machine import keep_freed_memory\n"
        "if not keep_freed_memory(): raise SystemExit(77)\n"
        "def faults(size):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(size)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "large, small = faults(1 << 26), faults(1 << 24)\n"
        "assert small < large / 40, (large, small)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("another C library")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own count")
def test_peak_memory_is_what_was_held_at_most():
    block = 1 << 26
    before = peak_memory()
    held = bytearray(b"x") * block
    after = peak_memory()
    del held
    slack = 1 << 20  # each core counts some pages before it tells the kernel
    assert before >= 10 << 20
    assert after >= max(before, block) - slack
    assert peak_memory() >= after - slack  # freed, but it was there
