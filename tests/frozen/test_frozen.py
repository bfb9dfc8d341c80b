"""What every method gives is what was frozen; ``compare.py --write`` freezes anew."""

import pytest
from compare import LOOSELY, compare, read
from runs import COMPARED, DECIDED_BY_ROUNDING, METHODS, Run, in_process, on_ray


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


@pytest.mark.parametrize("method", [name for name in METHODS if name not in COMPARED])
def test_what_is_frozen_is_the_same_on_ray_and_in_this_process(method: str) -> None:
    frozen = read()
    ray = frozen[f"ray/{method}"]["metrics.jsonl"]
    # The same settings in this process; on Ray there are two rounds and other SuperNodes
    _, small, nodes = METHODS[method]
    like = (run for run in in_process() if run[3:] == (small, (), nodes, False))
    (name,) = (run.name for run in like if run.name.startswith(f"{method}/"))
    here = frozen[name]["metrics.jsonl"]
    tolerance = LOOSELY if DECIDED_BY_ROUNDING.search(f"ray/{method}") else 1e-5
    assert ray["round"] == [1, 2]
    for key in ("loss", "test-accuracy", "participation/answered"):
        expected = here[key][:2]
        assert ray[key] == (
            expected if "/" in key else pytest.approx(expected, abs=tolerance, nan_ok=True)
        )
