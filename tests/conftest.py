"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The tests' tensors are tiny: more threads only wait for each other, 20 times as long when the
# machine has other work. It must be set before PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def data_root() -> Path:
    """Folder of raw data outside the package; without it the test is skipped."""
    value = os.environ.get("FLOWER_GRAPH_DATA")
    if not value:
        pytest.skip("FLOWER_GRAPH_DATA is unset: no raw data outside the package")
    return Path(value)
