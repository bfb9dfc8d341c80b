"""What every method gives is what was frozen; ``compare.py --write`` freezes anew."""

from __future__ import annotations

import pytest
from compare import compare
from runs import in_process, on_ray


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_runs_in_process() -> None:
    assert compare(in_process()) == []


@pytest.mark.slow
@pytest.mark.flwr
@pytest.mark.timeout(1800)
def test_runs_on_ray() -> None:
    assert compare(on_ray()) == []
