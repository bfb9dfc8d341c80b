"""Fixtures for all tests."""

from __future__ import annotations

import fcntl
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

# The tests' tensors are tiny: more threads only wait for each other, 20 times as long when the
# machine has other work. It must be set before PyTorch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Keep the collector of garbage from walking through thousands of tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def data_root() -> Path:
    """Folder of raw data outside the package; without it the test is skipped."""
    value = os.environ.get("FLOWER_GRAPH_DATA")
    if not value:
        pytest.skip("FLOWER_GRAPH_DATA is unset: no raw data outside the package")
    return Path(value)


Outcome = Callable[[str, str, str], None]


@pytest.fixture
def outcome(request: pytest.FixtureRequest) -> Outcome:
    """Note what a fault came to, for the table in docs/reliability.md.

    Called with the fault, the method and what happened. It writes only where
    ``FLOWER_GRAPH_RELIABILITY`` names a file, as ``benchmarks/reliability.py`` does.
    """

    def note(fault: str, method: str, happened: str) -> None:
        file = os.environ.get("FLOWER_GRAPH_RELIABILITY")
        if file is None:
            return
        test = request.node.nodeid.partition("[")[0]
        with Path(file).open("a+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # tests may run side by side
            stream.seek(0)
            known = json.loads(stream.read() or "{}")
            known.setdefault(fault, {})[method] = {"happened": happened, "test": test}
            stream.truncate(0)
            stream.write(json.dumps(known, indent=2, ensure_ascii=False, sort_keys=True) + "\n")

    return note
