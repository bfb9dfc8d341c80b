"""SuperNodes that die and come back with their files: the run ends as if they had not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from restarts import Restarting

from flower_graph import state
from flower_graph.apps.common import client_app, method_of
from flower_graph.config import load_config
from flower_graph.state import forget_run


@dataclass(frozen=True)
class Setup:
    """A run; the type of its rounds' last message; whether sums depend on the order of nodes."""

    config: str
    overrides: tuple[str, ...]
    final: str = "train"
    is_ordered: bool = False


EGOS = ("partition.clients=6", "rounds=4")
SMALL = ("partition.public_share=0.15", "partition.private_share=0.05", "judge.every=5")
PUBLIC = ("rounds=5", "judge.mlp=false", "gat.epochs=2", *SMALL)
PUBLIC_4 = "ppfl/cora-linqs-gat"
SETUPS = {
    "nfedgnn": Setup("quickstart", ("rounds=4",)),
    "fedscem": Setup("fedscem/cora-linqs", EGOS, "train.unmask"),
    "fedscem-plain": Setup(
        "fedscem/cora-linqs",
        (*EGOS, "strategy.alignment=plain", "strategy.aggregation=plain"),
        is_ordered=True,
    ),
    "fedgls": Setup("fedgls/cora-linqs", ("rounds=4",), "evaluate", is_ordered=True),
    "ppfl-pairs": Setup(PUBLIC_4, PUBLIC),
    "ppfl-consensus": Setup(PUBLIC_4, (*PUBLIC, "strategy.alignment=consensus")),
    "ppfl-secure": Setup(PUBLIC_4, (*PUBLIC, "strategy.alignment=secure"), "train.sum_unmask"),
    "ppfl-local": Setup(PUBLIC_4, (*PUBLIC, "strategy.name=local")),
    "ppfl-deepwalk": Setup(PUBLIC_4, (*PUBLIC, "model.name=deepwalk", "deepwalk.walks=1")),
}

METHODS = {
    "nfedgnn": "nFedGNN",
    "fedscem": "FedSCem",
    "fedgls": "FedGLS",
    "ppfl-pairs": "PPFL-GNN",
}


@dataclass
class Ended:
    """What a run came to."""

    figures: np.ndarray
    weights: dict[str, Any]
    rejected: list[Any]
    restarted: int


def play(setup: Setup, folder: Path | None, *, new_id: bool = False, **more: Any) -> Ended:
    """Run with three SuperNodes, of which some are started anew."""
    config = load_config(setup.config, setup.overrides)
    grid = Restarting(
        client_app(config, None),
        num_supernodes=3,
        final=setup.final,
        state_dir=folder,
        new_id=new_id,
        **{"restarts": {}, **more},
    )
    strategy, reports = method_of(config).build_strategy(config, None), []
    try:
        strategy.start(grid, num_rounds=config.rounds, timeout=5.0, on_round=reports.append)
    finally:
        forget_run(grid.run.run_id)
    figures = [[r.loss, r.test_accuracy, r.val_accuracy, r.answered] for r in reports]
    weights = {name: np.asarray(torch.as_tensor(v)) for name, v in strategy.weights().items()}
    rejected = [entry for report in reports for entry in report.rejected]
    return Ended(np.array(figures), weights, rejected, grid.restarted)


def assert_same(setup: Setup, left: Ended, right: Ended) -> None:
    tolerance = 1e-5 if setup.is_ordered else 0.0
    np.testing.assert_allclose(left.figures, right.figures, rtol=tolerance, atol=tolerance)
    assert left.weights.keys() == right.weights.keys()
    for name, value in left.weights.items():
        np.testing.assert_allclose(value, right.weights[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("new_id", [True, False], ids=["new-id", "same-id"])
@pytest.mark.parametrize("name", SETUPS)
def test_they_go_on_where_they_were(
    name: str, new_id: bool, tmp_path: Path, outcome: Callable[[str, str, str], None]
) -> None:
    setup = SETUPS[name]
    whole = play(setup, None)
    restarts = {1: [0], 2: [1, 2], 3: [0, 2]}
    ended = play(setup, tmp_path, new_id=new_id, restarts=restarts)
    assert ended.restarted == 5
    assert ended.rejected == []
    assert_same(setup, ended, whole)
    for file in tmp_path.rglob("*.*"):
        assert file.is_dir() or file.stat().st_mode & 0o777 == 0o600
    if name in METHODS:
        outcome(
            "a SuperNode is restarted in mid-run",
            METHODS[name],
            "five restarts in four rounds, with the same node id and with another: the figures are "
            "those of the run without them",
        )


@pytest.mark.parametrize("name", ["nfedgnn", "fedscem", "fedgls", "ppfl-pairs", "ppfl-secure"])
def test_they_go_on_with_files_of_any_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors above a limit lie in files of their own."""
    setup = SETUPS[name]
    whole = play(setup, None)
    monkeypatch.setattr(state, "SMALL_BYTES", 0)
    ended = play(setup, tmp_path, new_id=True, restarts={2: [0, 1]})
    assert ended.rejected == []
    assert_same(setup, ended, whole)


@pytest.mark.parametrize("name", ["nfedgnn", "fedscem"])
def test_nothing_is_left_after_a_run_that_ends_with_a_message(name: str, tmp_path: Path) -> None:
    play(SETUPS[name], tmp_path, restarts={2: [1]})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("new_id", [True, False], ids=["new-id", "same-id"])
@pytest.mark.parametrize("name", ["nfedgnn", "fedscem", "ppfl-pairs", "ppfl-secure", "ppfl-local"])
def test_without_a_place_what_is_lost_is_said_and_the_run_goes_on(
    name: str, new_id: bool, caplog: pytest.LogCaptureFixture
) -> None:
    setup = SETUPS[name]
    ended = play(setup, None, new_id=new_id, restarts={2: [1]})
    assert np.isfinite(ended.figures[-1, 0])
    whole = play(setup, None).figures[:, 3]
    assert ended.figures[-1, 3] == whole[-1], "it takes part again"
    said = [r.getMessage() for r in caplog.records if "has lost its state" in r.getMessage()]
    assert len(said) == 1, said
