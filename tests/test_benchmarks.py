"""The benchmarks run, with tiny settings; nothing here looks at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fedgls, fedgls_sizes, fedscem, gpu, measure, page, run

ROOT = Path(__file__).resolve().parents[1]
WHEN = {"measured": "now", "took-seconds": 1, "quick": False}
ALL_TABLES = Path("results") / "performance" / "README.md"  # in docs

pytestmark = pytest.mark.slow


def ratio_of(entry: dict[str, Any]) -> float:
    return float(entry["round"]["median"] / entry["epoch"]["median"])


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


@pytest.fixture
def document(tmp_path: Path) -> Path:
    return tmp_path / "docs" / "reference" / "performance.md"


def bench(parts: str, results: Path, document: Path) -> int:
    """Measure some parts with tiny sizes."""
    where = ["--results", str(results), "--page", str(document)]
    return run.main(["--only", parts, "--quick", *where])


def page_of(**parts: Any) -> str:
    return page.render({"machine": measure.machine(), "parts": parts})


def test_quick_run_writes_json_and_page(results: Path, document: Path):
    assert bench("round,scale,gpu,ego", results, document) == 0
    found = json.loads(results.read_text(encoding="utf-8"))
    assert set(found["parts"]) == {"round", "scale", "gpu", "ego"}
    (cora,) = found["parts"]["round"]["entries"]
    assert [entry["supernodes"] for entry in cora["runs"]] == [1, 2]
    assert all(entry["ratio"] == ratio_of(entry) for entry in cora["runs"])
    step = cora["user-step"]
    assert step["weights"] == (49_216 + 2_708) * 16, "the active rows of Cora, and a bias each"
    assert step["bytes"] == step["weights"] * 28
    scale = found["parts"]["scale"]
    assert [entry["users"] for entry in scale["entries"]] == [200, 800]
    assert all(entry["peak-bytes"] > 2**20 for entry in scale["entries"])
    few = scale["few-asked"]
    assert [len(few[form]["entries"]) for form in ("file", "summed")] == [2, 2]
    assert few["file"]["entries"][0]["disk-bytes"] > 0 == few["summed"]["entries"][0]["disk-bytes"]
    (egos,) = found["parts"]["ego"]["entries"]
    assert egos["clients"] == 100 and 0 < egos["shared"] <= egos["nodes"]
    for turn in egos["runs"]:
        assert turn["ratio"] == turn["engine"]["median"] / turn["plain"]["median"]
    text = (document.parents[1] / ALL_TABLES).read_text(encoding="utf-8")
    assert text == page.render(found)
    short = document.read_text(encoding="utf-8")
    assert f"| nFedGNN | {cora['data']} | 2,708 | 1 |" in short and "nan" not in short
    for words in ("2,708", "## Ego-networks", "at most 0.3", "## Scale", "## GPU", "mean nothing"):
        assert words in text
    assert "nan" not in text


def test_sums_and_alignment_are_measured_in_both_settings_of_trust(results: Path, document: Path):
    assert bench("secure,trust,sums,alignment", results, document) == 0
    parts = json.loads(results.read_text(encoding="utf-8"))["parts"]
    entries = parts["trust"]["entries"]
    assert [(e["clients"], e["corrupt"], e["trusted"]) for e in entries[:3]] == [
        (30, 0.0, True),
        (30, 0.0, False),
        (60, 0.0, True),
    ]
    for entry in entries:
        assert entry["partners"] >= entry["threshold"] > entry["partners"] / 2
        assert 0 < entry["vector-bytes"] < entry["bytes-up"]
        assert ("list" in entry["stages"]) != entry["trusted"]
    assert [e["clients"] for e in parts["sums"]["entries"]] == [2, 10, 20, 5, 10, 20]
    for entry in parts["alignment"]["entries"]:
        assert entry["ratio"] == entry["verified"] / entry["blinded"]
    short = document.read_text(encoding="utf-8")
    for words in ("| 60 | 10% | may lie | 50 | 32 |", "**Alignment by", "exact with 30 % lost"):
        assert words in short
    assert "nan" not in short


def test_a_part_that_is_not_asked_for_keeps_its_figures(results: Path, document: Path):
    kept = {"gpu": None, "tolerance": 1, "entries": [], "ego-entries": [], **WHEN}
    kept["measured"] = "then"
    old = {"format": run.FORMAT, "machine": measure.machine(), "parts": {"gpu": kept}}
    results.write_text(json.dumps(old | {"format": 0}), encoding="utf-8")
    assert run._kept(results, measure.machine())["parts"] == {}
    results.write_text(json.dumps(old), encoding="utf-8")
    assert run._kept(results, measure.machine()) == old
    assert run._kept(results, {"cpu": "another"})["parts"] == {}
    assert bench("state", results, document) == 0
    found = json.loads(results.read_text(encoding="utf-8"))
    assert found["parts"]["gpu"] == kept
    assert found["parts"]["state"]["context-bytes"] < 10_000, "the state itself does not travel"
    assert "two processes in turns" in document.read_text(encoding="utf-8")
    assert "Measured then" in (document.parents[1] / ALL_TABLES).read_text(encoding="utf-8")


def test_a_part_that_fails_is_reported(
    results: Path,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setitem(run.PARTS, "gpu", "nothing_of_this_name")
    assert bench("gpu", results, document) == 1
    assert "failed: gpu" in capsys.readouterr().err
    assert not results.exists()
    with pytest.raises(SystemExit):
        bench("rounds", results, document)
    assert "'rounds' is unknown; allowed: round, flwr" in capsys.readouterr().err


def test_gpu_script_needs_pytorch_alone(tmp_path: Path):
    code = (
        "import runpy, sys\n"
        "sys.argv = ['gpu.py', '--quick']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT / 'benchmarks' / 'gpu.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'flwr', 'ray', 'torch_geometric', 'omegaconf'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [entry["users"] for entry in found["entries"]] == [300]
    assert [entry["clients"] for entry in found["ego-entries"]] == [8]
    assert [entry["engine"] for entry in found["engines"]] == ["FedGLS", "PPFL-GNN's GAT"]
    assert [entry["form"] for entry in found["aligned"]] == ["pairs", "consensus"]
    assert found["gpu"] is not None or "CPU only" in done.stderr


def test_gpu_rounds_are_compared_with_a_device_that_stands_in():
    there = torch.device("cpu")
    entries = [gpu.compare(size, there) for size in gpu.QUICK]
    egos = [gpu.compare_egos(size, there) for size in gpu.EGO_QUICK]
    aligned = [
        gpu.compare_alignment(form, gpu.ALIGNED_QUICK[form][0], there) for form in gpu.ALIGNED
    ]
    engines = [gpu.compare_engine(name, gpu.ENGINE_QUICK[name][0], there) for name in gpu.ENGINES]
    for entry in entries + egos + aligned + engines:
        assert entry["equal"] and entry["transfer-seconds"] > 0
    (step,) = (entry["gpu-step"] for entry in entries)
    assert step["weights"] == 300 * 4 * 16 and step["bytes"] == step["weights"] * 28
    bound = step["bandwidth"] / step["bytes-per-second"]
    assert step["times-bound"] == pytest.approx(bound)
    shown = {"gpu": "stand-in", "tolerance": 1e-4, "entries": entries, **WHEN}
    text = page_of(gpu=shown | {"ego-entries": egos, "engines": engines, "aligned": aligned})
    assert text.count("| transfer |") == 4
    assert text.count("| 300 | CPU |") == text.count("| 300 | GPU |") == 1


def test_exponent_of_known_powers():
    sizes = [10, 100, 1_000]
    assert measure.exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert measure.exponent(sizes, [7, 7, 7]) == pytest.approx(0)


def test_missed_targets_are_said():
    times = {"median": 2.0, "min": 1.0, "max": 3.0, "count": 3}
    entry = {"supernodes": 2, "users": 9, "round": times, "total-seconds": 9.0, "target": 0.15}
    text = page_of(flwr={"config": "c", "entries": [entry], **WHEN})
    assert "| 2 | 9 | 2.000 | 1.00 s – 3.00 s | at most 0.15 | **missed** | 9.00 s |" in text


def test_two_machines_are_held_against_one():
    times = {"median": 0.3, "min": 0.2, "max": 0.4, "count": 3}
    entry = {"supernodes": 4, "one": times, "two": {**times, "median": 0.45}, "ratio": 1.5}
    found = {"config": "c", "target": 1.25, "entries": [entry], **WHEN}
    assert "| 1.50 | at most 1.25 | **missed** |" in page_of(cluster=found)


def test_whole_rounds_of_fedscem_are_measured_and_laid_out():
    tiny = ["partition.clients=4", "strategy.limit=1000"]
    one = fedscem.measure("fedscem/cora-linqs", "tiny", tiny, 1, 5, loop=True)
    two = fedscem.measure("fedscem/cora-linqs", "tiny", tiny, 2, 5, loop=False)
    assert one["clients"] == two["clients"] == 4 and one["slots"] == two["slots"] > 0
    assert {"train", "mask", "unmask"} <= one["parts"].keys()
    assert one["setup-seconds"] > 0 and one["round"]["count"] == 5 - fedscem.WARM_UP - 1
    fastest = min(times["median"] for times in one["loops"].values())
    assert one["ratio"] == one["round"]["median"] / fastest
    assert "loops" not in two
    one["ratio"], one["loops"] = 0.25, json.loads(json.dumps(one["loops"]))  # as results.json has
    ray = {"config": "c", "supernodes": 2, "round": two["round"], "above": 0.4}
    found = {
        "entries": [one, two],
        "skipped": ["fedscem/pubmed"],
        "flwr": ray,
        "targets": fedscem.TARGETS,
        "threads": 2,
        **WHEN,
    }
    text = page_of(fedscem=found)
    assert "| above the same in process | 400.0 ms | at most 300.0 ms | **missed** |" in text
    assert "| at most 0.15 | **missed** |" in text
    assert "`fedscem/pubmed` was not measured" in text
    one["setup-seconds"], two["setup-seconds"] = 0.5, 2.5
    text = page_of(fedscem=found)
    assert (
        text.count("| at most 2.00 s | met |") == text.count("| at most 2.00 s | **missed** |") == 1
    )
    assert text.count("| at most 1.7 rounds |") == 1
    assert text.count("at most 200.0 ms") == 1, "the target is for one SuperNode with masks"


def test_flwr_run_is_held_against_the_same_dealing_in_process(monkeypatch: pytest.MonkeyPatch):
    def ray(name: str, supernodes: int, rounds: int, single: bool) -> dict[str, Any]:
        assert (name, supernodes, single) == ("c", 2, False)
        return {"round": {"median": 0.75}}

    monkeypatch.setattr(fedscem.engines, "measure", ray)
    entries = [
        {"config": name, "supernodes": nodes, "round": {"median": seconds}}
        for name, nodes, seconds in (("c", 1, 0.1), ("d", 2, 0.2), ("c", 2, 0.5), ("c", 2, 0.6))
    ]
    assert fedscem._on_ray("c", entries)["above"] == 0.25


@pytest.fixture(scope="module")
def communities() -> dict[str, Any]:
    """Measure the parts on FedGLS with tiny sizes, in this process where that is possible."""
    sizes = fedgls.QUICK_CLIENTS
    clients = {m: [fedgls_sizes.measure_clients(m, n) for n in sizes] for m in fedgls.METHODS}
    fits = {method: {"all": 0.5, "last-step": 1.25} for method in fedgls.METHODS}
    threads = torch.get_num_threads()
    found = {
        "fedavg": fedgls.measure_fedavg(fedgls.LINQS, 1),
        "methods": fedgls.measure_methods(fedgls.LINQS, 1),
        "start": fedgls.CASES["start"](fedgls.LINQS, 1),
        "learner": [fedgls_sizes.measure_learner(n) for n in (50, 100)],
        "clients": clients,
        "exponents": fits,
        "targets": fedgls.TARGETS,
        **WHEN,
    }
    torch.set_num_threads(threads)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_the_loop_that_fedavg_is_held_against_learns_the_same(communities: dict[str, Any]):
    fedavg = communities["fedavg"]
    assert fedavg["clients"] == 10 and [run["threads"] for run in fedavg["runs"]] == [1, 2]
    assert all(0 < apart < 1e-4 for apart in fedavg["apart"].values()), "of weights up to 0.2"
    for run_ in fedavg["runs"]:
        assert all(run_[side]["min"] > 0 for side in ("round", "engine", "dense", "sparse"))


def test_fedgls_is_measured_beside_fed_gnn(communities: dict[str, Any]):
    for run_ in communities["methods"]["runs"]:
        assert all(run_[method]["count"] == fedgls.TURN for method in fedgls.METHODS)
    for method in fedgls.METHODS:
        assert [entry["nodes"] for entry in communities["clients"][method]] == [400, 800]
    assert communities["start"]["seconds"]["median"] > 0.1
    assert communities["start"]["peak-bytes"] > 100e6
    small, large = communities["learner"]
    assert large["square-bytes"] == 4 * 100**2 and small["entries"] == 50 * (2 * 15 + 1)


def test_every_part_of_fedgls_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[Any, ...]] = []

    def part(*case: Any) -> dict[str, Any]:
        asked.append(case)
        return {"round": {"median": 0.01 * case[-1]}}

    monkeypatch.setattr(fedgls, "_part", part)
    found = fedgls.measure_all(quick=True)
    assert {case for case, *_ in asked} == set(fedgls.CASES)
    assert found["exponents"]["fed-gnn"]["all"] == pytest.approx(1.0)
    assert ("clients", "structure-fedavg", 8) in asked and ("fedavg", fedgls.LINQS, 1) in asked
