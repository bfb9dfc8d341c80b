import sys

import pytest

from flower_graph.engine.machine import peak_memory


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
