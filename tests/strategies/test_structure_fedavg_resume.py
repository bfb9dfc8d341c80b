"""FedGLS or a baseline that goes on from a checkpoint ends where the uninterrupted run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import METHODS as SETUPS
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi
from plain_structure import FEDGLS
from structure_helpers import Outcome, run, settings_of

from flower_graph.errors import CheckpointError
from flower_graph.storage import checkpoint
from flower_graph.strategies.structure_fedavg.strategy import StructureFedAvg

DROPOUT = {"dropout": 0.4, "input_dropout": 0.2}  # depends on the round


def saving(folder: Path, rounds: int, method: str = FEDGLS, **options: Any) -> Outcome:
    own = {"checkpoint_dir": folder, "checkpoint_every": 2, "settings": settings(method)}
    return run(method, rounds=rounds, **{**own, **options})


def settings(method: str) -> Any:
    return settings_of(method, **DROPOUT)


def assert_same(whole: Outcome, resumed: Outcome, first: int) -> None:
    """Compare what was reported from a round on, and everything in the end, bit by bit."""
    after = whole.reports[first - 1 :]
    assert [r.round for r in resumed.reports] == [r.round for r in after]
    rows = whole.figures[first - 1 :]
    assert torch.equal(rows.nan_to_num(-1), resumed.figures.nan_to_num(-1))
    for one, other in zip(after, resumed.reports, strict=True):
        assert one.participation == other.participation
        assert (one.bytes, one.answered) == (other.bytes, other.answered)
    for name, values in whole.arrays.items():
        assert torch.equal(values, resumed.arrays[name])
    assert_same_clients(whole, resumed)


def assert_same_clients(whole: Outcome, resumed: Outcome) -> None:
    for one, other in zip(whole.cohorts, resumed.cohorts, strict=True):
        assert one.clients == other.clients
        kept = other.tensors()
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, kept[name]), name


def test_wire_bytes_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = saving(tmp_path / "whole", 4)
    saving(tmp_path / "half", 2)
    resumed = saving(tmp_path / "half", 4, resume=True)
    assert [r.wire_bytes for r in resumed.reports] == [r.wire_bytes for r in whole.reports[2:]]


class Adam(StructureFedAvg, FedAdam):
    """FedAdam keeps moments at the server."""


class Yogi(StructureFedAvg, FedYogi):
    """FedYogi too."""


class Momentum(StructureFedAvg, FedAvgM):
    """FedAvgM keeps a list of arrays."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Adam, {"eta": 0.01}), (Yogi, {"eta": 0.01}), (Momentum, {"server_momentum": 0.5})],
)
def test_what_another_strategy_keeps_is_saved_too(
    tmp_path: Path, kind: type[StructureFedAvg], options: dict[str, Any]
) -> None:
    whole = run(rounds=4, strategy=kind, settings=settings(FEDGLS), **options)
    saving(tmp_path, 2, strategy=kind, **options)
    resumed = saving(tmp_path, 4, strategy=kind, resume=True, **options)
    assert_same(whole, resumed, 3)
    plain = run(rounds=4, settings=settings(FEDGLS))
    assert not torch.equal(plain.arrays["gnn-rest"], resumed.arrays["gnn-rest"])


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class Remembers(StructureFedAvg):
        """Keeps what no checkpoint can."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            self.last = {"seen": {server_round}}
            return super().aggregate_train(server_round, replies)

    with pytest.raises(CheckpointError, match=r"Remembers\.last\['seen'\] has changed.*is a set"):
        saving(tmp_path, 2, strategy=Remembers)
    assert checkpoint.complete_rounds(tmp_path) == []


def test_a_supernode_that_comes_again_keeps_what_it_has(tmp_path: Path) -> None:
    """After a resumption it gets another id: it is asked again, and does not go back."""
    setup, out = SETUPS["fedgls"], tmp_path / "out"
    whole = setup.run(tmp_path / "whole", "rounds=6")
    setup.run(out, "rounds=2", "checkpoint_every=2")
    restarts: dict[str, Any] = {"restarts": {2: [0]}, "new_id": True, "final": setup.final}
    resumed = setup.run(out, "rounds=6", "checkpoint_every=2", resume=True, **restarts)
    assert resumed.grid.restarted == 1 and not resumed.result["rejected"]
    assert resumed.figures == pytest.approx(whole.figures, abs=1e-6, nan_ok=True)


# Refusals ----------------------------------------------------------------------------------------


def test_what_does_not_fit(tmp_path: Path) -> None:
    saving(tmp_path, 2)
    own = settings(FEDGLS)
    with pytest.raises(CheckpointError, match=r"its tau is 0\.5, this run's is 0\.6"):
        saving(tmp_path, 4, resume=True, settings=own._replace(tau=0.6))
    with pytest.raises(
        CheckpointError, match="its strategy is StructureFedAvg, this run's is Adam"
    ):
        saving(tmp_path, 4, resume=True, strategy=Adam)
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        run(resume=True)
    with pytest.raises(ValueError, match="checkpoint_every: 3 needs a checkpoint_dir"):
        run(checkpoint_every=3)
    with pytest.raises(ValueError, match="fraction_evaluate is 0: clients save a checkpoint when"):
        saving(tmp_path, 2, fraction_evaluate=0.0)
