"""The benchmarks of PPFL-GNN run, with tiny settings; nothing here looks at a time."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from benchmarks import ppfl, ppfl_rounds, ppfl_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overlapping() -> dict[str, Any]:
    """Measure the parts on PPFL-GNN with tiny sizes, in this process and without Ray."""
    threads = torch.get_num_threads()
    growth = [ppfl.measure_alignment(*case) for case in ppfl.growth_cases(quick=True)]
    rounds = ppfl_rounds.WARM_UP + 2
    iterations = [ppfl.measure_rounds(name, ppfl.TINY, 1, rounds) for name in ppfl.CONFIGS]
    ray = {"config": "c", "settings": [], "round": iterations[0]["round"], "total-seconds": 9.0}
    server = {
        "goals": [ppfl.measure_alignment(*case) for case in ppfl.goal_cases(quick=True)],
        "growth": growth,
        "fits": ppfl.fitted(growth),
        "exchange": [ppfl.measure_exchange(form, (3, 20, 4), 1, 3) for form in ppfl.FORMS],
    }
    found = {
        "versions": {"gensim": "9.9"},
        "server": server,
        "deepwalk": [ppfl.measure_deepwalk(ppfl.CONFIGS[0], ppfl.TINY, 1)],
        "iterations": iterations,
        "flwr": [ppfl.above_own(ray, iterations[0])],
        "targets": ppfl.GOALS,
        "measured": "now",
        "took-seconds": 1,
        "quick": True,
    }
    torch.set_num_threads(threads)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_clients_whose_embeddings_are_aligned_have_one_in_common():
    x = ppfl_server.embeddings(ppfl_server.Size(200, 50, 4))
    assert x.shape == (200, 50, 4)
    means = ppfl_server.FORMS["consensus"](x).reference
    # What is common and the noise have 4 numbers of variance 1 each; the mean has no noise left.
    assert means.square().sum(1).mean() == pytest.approx(4, rel=0.25)
    alone = ppfl_server.embeddings(ppfl_server.Size(200, 50, 4), related=False)
    assert x.var() == pytest.approx(2, rel=0.25) and alone.var() == pytest.approx(1, rel=0.05)


def test_alignment_is_measured_along_every_axis(overlapping: dict[str, Any]):
    server = overlapping["server"]
    sizes = [tuple(e[axis] for axis in ("clients", "nodes", "dimension")) for e in server["growth"]]
    assert sizes == 2 * [(5, 40, 4), (10, 40, 4), (5, 80, 4), (5, 40, 8)]
    assert [(f["form"], f["axis"]) for f in server["fits"]] == [
        (form, axis)
        for form in ("pairs", "consensus")
        for axis in ("clients", "nodes", "dimension")
    ]
    assert [entry["related"] for entry in server["goals"]] == [True] * 4 + [False] * 2
    for entry in server["exchange"]:
        assert entry["payload-bytes"] == 2 * 3 * 20 * 4 * 4, (
            "float32 of all public nodes, both ways"
        )


def test_growth_is_fitted_along_one_axis_at_a_time():
    def entry(form: str, clients: int, nodes: int, dimension: int) -> dict[str, Any]:
        seconds = clients**2 * nodes * dimension**3 if form == "pairs" else clients * dimension
        size = {"clients": clients, "nodes": nodes, "dimension": dimension}
        return {"form": form, **size, "seconds": {"median": float(seconds)}}

    cases = ppfl.growth_cases(quick=False)
    fits = ppfl.fitted([entry(form, *size) for form, size, *_ in cases])
    goal = {"pairs": (2, 1, 3), "consensus": (1, 0, 1)}
    wanted = [power for form in ("pairs", "consensus") for power in goal[form]]
    for kind in ("all", "last-step"):
        assert [fit[kind] for fit in fits] == pytest.approx(wanted)


def test_iterations_are_measured_with_each_clients_own_work(overlapping: dict[str, Any]):
    for entry in overlapping["iterations"]:
        assert (entry["clients"], entry["nodes"], entry["public"]) == (4, 1_489, 1_083)
        assert entry["payload-bytes"] == 2 * 4 * 1_083 * 16 * 4 < entry["wire-bytes"]
        assert len(entry["own"]) == 4 and min(entry["own"]) > 0
        assert 0 < entry["learn"] < entry["round"]["max"] and entry["judge"] < entry["learn"]
        assert entry["round"]["count"] == 1, "neither the first ones nor the last"
        assert 0 < entry["last"]["judge"] < entry["last"]["seconds"]
    (walked,) = overlapping["deepwalk"]
    assert walked["first-ratio"] == walked["first"]["median"] / walked["first-gensim"]["median"]
    assert walked["nodes"] == 1_489 and 0 < walked["isolated"] < 400 < walked["edges"]


def test_an_iteration_on_ray_is_held_against_work_dealt_over_the_cores(
    monkeypatch: pytest.MonkeyPatch,
):
    assert ppfl_rounds.makespan([3.0, 1.0, 1.0, 2.0], 2) == 4.0
    assert ppfl_rounds.makespan([3.0, 1.0], 1) == 4.0
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = ppfl_rounds.above_own({"round": {"median": 5.5}}, {"own": [3.0, 1.0, 1.0, 2.0]})
    assert (found["own"], found["above"]) == (4.0, 1.5)
