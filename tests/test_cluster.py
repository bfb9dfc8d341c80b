"""Runs on a Ray cluster of machines that share no folder: as in one process, or a loss is named."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from own_graphs import alike

from deploy.raylets import Raylets
from flower_graph.apps.cli.launch import flwr_run
from flower_graph.apps.run import run
from flower_graph.method.load import load_config

pytestmark = [pytest.mark.flwr, pytest.mark.timeout(600)]
SHORT = ("rounds=2", "device=cpu")
SMALL = ["rounds=3", "data.name=csbm", "data.nodes=60", "data.classes=3", "data.num_features=40"]
SMALL += ["data.split=random", "data.ratios=[0.4,0.3,0.3]", "device=cpu"]
NODES = 4  # SuperNodes of each run, so each machine has two
UNSHOWN = (".log", ".png")  # files of Flower's engine, and pictures, which tests leave out
# What another run has otherwise: times, and Flower's numbers of SuperNodes
UNLIKE = ("seconds", "time", "node")


@pytest.fixture(scope="module")
def shared() -> Iterator[Raylets]:
    with Raylets() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Raylets) -> Iterator[Raylets]:
    yield shared
    assert shared.left() == []


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def comparable(value: Any) -> Any:
    """Leave out what two runs never have in common."""
    if not isinstance(value, Mapping):
        return value
    return {k: comparable(v) for k, v in value.items() if not any(word in k for word in UNLIKE)}


def files_of(out: Path) -> set[str]:
    paths = (path for path in out.rglob("*") if path.is_file() and path.suffix not in UNSHOWN)
    return {str(path.relative_to(out)) for path in paths}


def both(cluster: Raylets, config: str, settings: tuple[str, ...], folder: Path) -> None:
    """Make a run on the cluster and in this process, and compare all that they leave."""
    there, here, given = folder / "there", folder / "here", [*SHORT, *settings]
    flwr_run(config, given, there, supernodes=NODES, ray_address=cluster.address)
    run(load_config(config, given), here, supernodes=NODES)
    assert files_of(there) == files_of(here)
    assert [*map(comparable, lines_of(there))] == [*map(comparable, lines_of(here))]


def test_a_graph_that_the_driver_alone_has_gives_the_figures_of_one_process(
    cluster: Raylets, tmp_path: Path
) -> None:
    """The machines of a cluster see neither its file nor the run's folder."""
    torch.save(alike(), tmp_path / "graph.pt")
    both(cluster, "fedavg/own-graph", (f"data.name={tmp_path / 'graph.pt'}",), tmp_path)


@pytest.mark.release
@pytest.mark.parametrize("every", [0, 1])
def test_a_machine_that_goes_costs_a_round_of_its_supernodes(every: int, tmp_path: Path) -> None:
    """They come back elsewhere, with the last checkpoint or else anew, which is said."""
    said: list[str] = []
    settings = [*SMALL, "rounds=150", f"checkpoint_every={every}"]
    with Raylets() as cluster:
        echo = once_said("round +3/", cluster.machines[1].kill, said)
        out, address = tmp_path / "out", cluster.address
        flwr_run("quickstart", settings, out, supernodes=NODES, ray_address=address, echo=echo)
        assert cluster.left() == []
    lost = [line for line in lines_of(out) if line["rejected"]]
    assert 1 <= len(lost) <= 3 and all(line["round"] > 3 for line in lost)
    assert len({one["node"] for line in lost for one in line["rejected"]}) == NODES // 2
    assert any("begin anew" in line for line in said) == (every == 0)
    assert any("round 150/150" in line and "60/60 users" in line for line in said)


@pytest.mark.release
def test_a_machine_that_joins_late_is_used_once_the_run_is_resumed(tmp_path: Path) -> None:
    """A driver that is killed leaves nothing; resumed, its run ends as if never interrupted."""
    out, settings = tmp_path / "out", [*SMALL, "rounds=40", "checkpoint_every=1"]
    used: list[list[int]] = []
    with Raylets([1]) as cluster:

        def go(act: Callable[[], None], *, resume: bool) -> None:
            how = {"supernodes": NODES, "ray_address": cluster.address, "resume": resume}
            flwr_run("quickstart", settings, out, echo=once_said("round +3[0-9]?/", act, []), **how)

        with pytest.raises(RuntimeError):
            go(kill_driver, resume=False)
        assert cluster.left() == []
        cluster.add()
        go(lambda: used.append(workers_on(cluster)), resume=True)
    run(load_config("quickstart", settings), tmp_path / "whole", supernodes=NODES)
    assert used == [[1, 1]]
    whole = lines_of(tmp_path / "whole")
    assert [*map(comparable, lines_of(out))] == [*map(comparable, whole)]


def workers_on(cluster: Raylets) -> list[int]:
    return [sum("RayWorker" in name for name in one.actors()) for one in cluster.machines]


def kill_driver() -> None:
    (driver,) = (p for p in psutil.Process().children(True) if "flwr-simulation" in p.name())
    driver.kill()


def once_said(pattern: str, act: Callable[[], None], said: list[str]) -> Callable[[str], None]:

    def echo(line: str) -> None:
        is_first = not any(re.search(pattern, one) for one in said)
        said.append(line)
        print(line)  # pytest shows it where a test fails
        if is_first and re.search(pattern, line):
            act()

    return echo
