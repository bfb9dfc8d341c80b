"""Two resumes at once, and sizes that nobody can have: refused by name, before they cost much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attack_helpers import peak

from flower_graph import ClientGraph
from flower_graph.apps.run import run
from flower_graph.data import as_graph
from flower_graph.errors import ConfigError, DataError, OutputError
from flower_graph.method import load_config, method_of
from flower_graph.secure.ring import Ring
from flower_graph.strategies.fedgls.networks import StructureSettings, initial_models
from flower_graph.strategies.fedscem.cohort import EgoSettings
from flower_graph.strategies.fedscem.cohort import initial_weights as first_of

TINY = [
    "app=fedgls", "data.name=csbm", "data.nodes=40", "data.classes=2", "data.num_features=8",
    "data.active=3", "partition.clients=2", "partition.method=random", "save=none",
    "checkpoint_every=2", "strategy.name=fed-gnn",
]  # fmt: skip
MB = 1 << 20


def rounds_of(out: Path) -> list[int]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["round"] for line in lines]


@pytest.mark.parametrize("meets", [False, True], ids=["one after the other", "at once"])
def test_a_second_resume_never_leaves_rounds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meets: bool
) -> None:
    """Two resumes of a run with two rounds; the second begins while the first runs."""
    short, long = (load_config("fedgls/cora", [*TINY, f"rounds={n}"]) for n in (2, 4))
    more = load_config("fedgls/cora", [*TINY, "rounds=6"])
    out = tmp_path / "run"
    run(short, out)
    method, resumed = type(method_of(long)), False
    baselines = method.baselines

    def other_first(self: Any, config: Any) -> Any:
        nonlocal resumed
        if not resumed:
            resumed = True
            run(long, out, resume=True)
        return baselines(self, config)

    if not meets:
        monkeypatch.setattr(method, "baselines", other_first)
        run(more, out, resume=True)
        assert rounds_of(out) == [1, 2, 3, 4, 5, 6]
        return
    why: list[str] = []

    def other_then(_: Any) -> None:
        if not why:
            with pytest.raises(OutputError) as caught:
                run(more, out, resume=True)
            why.append(str(caught.value))

    run(long, out, resume=True, progress=other_then)
    assert "another run writes there" in why[0]
    assert rounds_of(out) == [1, 2, 3, 4]


def test_a_ring_for_numbers_that_no_float_can_scale() -> None:
    with pytest.raises(ValueError, match=r"1e\+300.*resolution 1e-300"):
        Ring.fit(10, 1e300, 1e-300)
    assert Ring.fit(10, 1e-300, 1e-300).word == 32
    with pytest.raises(ConfigError, match=r"strategy.resolution: 1e-300"):
        load_config("fedscem/cora", ["strategy.limit=1e300", "strategy.resolution=1e-300"])


def graph_with(label: int) -> ClientGraph:
    y = torch.tensor([0, 1, label])
    parts = ("train_mask", "val_mask", "test_mask")
    masks = {part: torch.full((3,), part == parts[0]) for part in parts}
    edges = torch.tensor([[0, 1], [1, 0]])
    return ClientGraph(0, torch.arange(3), torch.ones(3, 2), y, edges, None, **masks)


def test_a_label_that_is_no_class_is_named() -> None:
    from flower_graph.data.description import check_clients, server_graph

    with pytest.raises(DataError, match=r"client 0.*\[2\]"):
        check_clients([graph_with(10**12)])
    with pytest.raises(DataError, match=r"y\[2\]"):
        server_graph(graph_with(10**12))
    check_clients([graph_with(99_999)])


@pytest.mark.parametrize("make", ["as_graph", "structure", "ego"])
def test_a_billion_classes_are_refused_before_anything_is_made(make: str) -> None:
    def refused() -> str:
        with pytest.raises(ValueError, match=r"num_classes.*1000000000") as caught:
            if make == "as_graph":
                as_graph(graph_with(2), num_classes=10**9)
            elif make == "structure":
                initial_models(StructureSettings(2, 10**9))
            else:
                first_of(EgoSettings(2, 10**9))
        return str(caught.value)

    said, used = peak(refused)
    assert "100000" in said
    assert used < MB


def test_a_servers_word_of_classes_is_checked_by_clients() -> None:
    from flower_graph.strategies.fedscem.messages import (
        read_settings,
        write_settings,
    )

    with pytest.raises(ValueError, match=r"num-classes.*1000000000"):
        read_settings(write_settings(EgoSettings(2, 10**9)))
