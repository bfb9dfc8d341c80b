"""Every method's accuracies stand beside those of a guess and of a regression on features alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from federation import EACH, METHODS, Done

from flower_graph.config.common import CutRunConfig
from flower_graph.method.registry import method_of
from flower_graph.report.result import describe_result


def figures_of(done: Done) -> dict[str, float]:
    """Read the test figures that a run has written, each of which is a share."""
    written = json.loads((done.out / "result.json").read_text(encoding="utf-8"))["baselines"]
    for figures in written.values():
        assert all(value is None or 0 <= value <= 1 for value in figures.values())
    return {name: one["test"] for name, one in written.items() if one["test"] is not None}


OF_ALL = ("logistic-regression", "label-propagation")


@pytest.mark.parametrize("name", EACH)
def test_a_result_has_baselines(name: str, tmp_path: Path) -> None:
    setup = METHODS[name]
    done = setup.run(tmp_path / "run", "rounds=1")
    found = figures_of(done)
    alone = {"majority-per-client"} if name == "nfedgnn" else set()  # a client is one node
    assert found.keys() == {"majority", "majority-per-client", *OF_ALL} - alone
    config = setup.load("rounds=1")
    assert found["majority"] == method_of(config).baselines(config)["majority"]["test"]


@pytest.mark.parametrize("name", EACH)
def test_the_last_lines_say_that_nobody_beats_what_cannot_be_beaten(
    name: str, tmp_path: Path
) -> None:
    """Features are the class, so a regression is always right; neighbours are of all classes."""
    setup = METHODS[name]
    place = torch.arange(160)
    y = place % 3
    ring = torch.stack([place.repeat(3), torch.cat([(place + k) % 160 for k in (1, 2, 4)])])
    x = torch.nn.functional.one_hot(y, 24).float()
    torch.save({"x": x, "y": y, "edge_index": ring}, tmp_path / "told.pt")
    how = ("rounds=1", "data.nodes=90", f"data.name={tmp_path / 'told.pt'}")
    if isinstance(setup.load(), CutRunConfig):
        how = (*how, "partition.method=random")
    done = setup.run(tmp_path / "run", *how)
    text = describe_result(setup.config, done.result, done.out)
    assert "logistic regression on features alone 1.000" in text
    assert "not better than logistic regression on features alone" in text
