"""The benchmarks run, with tiny sizes; nothing here looks at a time."""

import json
from pathlib import Path

import pytest

from benchmarks import gpu, measure, run

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def bench(parts: str, folder: Path) -> int:
    """Measure some parts with tiny sizes."""
    where = ["--results", str(folder / "results.json"), "--page", str(folder / "page.md")]
    return run.main(["--only", parts, "--quick", *where])


@pytest.mark.release
def test_quick_run_writes_json_and_a_page_with_every_table(tmp_path: Path) -> None:
    assert bench("round,sum,alignment,scale", tmp_path) == 0
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert list(found["parts"]) == ["round", "sum", "alignment", "scale"]
    for part in found["parts"].values():
        for one in part["tables"]:
            assert f"## {one['title']}\n" in page and one["rows"]
            assert all(len(row) == len(one["head"]) for row in one["rows"])
    users = [row[:2] for row in found["parts"]["scale"]["tables"][0]["rows"]]
    assert ["memory", "200"] in users and ["summed", "4,000"] in users
    assert page.count("mean nothing") == 4 and "nan" not in page


def test_a_part_that_is_not_asked_for_keeps_its_figures(tmp_path: Path) -> None:
    kept = {"measured": "then", "seconds": 1, "load": 0.0, "quick": False, "tables": []}
    old = {"machine": measure.machine(), "parts": {"start": kept}}
    (tmp_path / "results.json").write_text(json.dumps(old), encoding="utf-8")
    assert run._kept(tmp_path / "results.json", {"cpu": "another"})["parts"] == {}
    assert bench("alignment", tmp_path) == 0
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["parts"]["start"] == kept
    assert "Measured then" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_a_part_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.PARTS, "scale", "nothing_of_this_name")
    assert bench("scale", tmp_path) == 1
    assert not (tmp_path / "results.json").exists()
    with pytest.raises(SystemExit):
        bench("rounds", tmp_path)


@pytest.mark.parametrize("name", gpu.CASES)
def test_rounds_are_compared_with_a_device_that_stands_in(name: str) -> None:
    entry = gpu.compare(name, gpu.CASES[name][1][0], "cpu")
    assert entry["equal"] and entry["loss-difference"] == 0
