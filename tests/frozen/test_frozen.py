"""What every method gives is what was frozen; ``compare.py --write`` freezes anew."""

import pytest
from compare import compare
from runs import Run, in_process, on_ray


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_tenth_run_in_process_and_all_that_show_settings() -> None:
    sample = [run for n, run in enumerate(in_process()) if n % 10 == 0 or run.command == "show"]
    assert compare(sample) == []


@pytest.mark.release
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "runs", [in_process(), pytest.param(on_ray(), marks=pytest.mark.flwr)], ids=["here", "on_ray"]
)
def test_all_runs(runs: list[Run]) -> None:
    assert compare(runs) == []
