"""What every method gives is what was frozen; ``compare.py --write`` freezes anew."""

import pytest
from compare import compare
from runs import in_process


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_tenth_run_and_all_that_show_settings() -> None:
    sample = [run for n, run in enumerate(in_process()) if n % 10 == 0 or run.command == "show"]
    assert compare(sample) == []


@pytest.mark.release
@pytest.mark.timeout(1800)
def test_all_runs() -> None:
    assert compare(in_process()) == []
