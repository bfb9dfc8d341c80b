"""FedGLS or a baseline that goes on from a checkpoint ends where the uninterrupted run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import METHODS as SETUPS
from flwr.serverapp.strategy import FedAdam, FedAvgM
from plain_structure import FEDGLS
from structure_helpers import Outcome, run, settings_of

from flower_graph.errors import CheckpointError
from flower_graph.strategies.fedgls.strategy import StructureFedAvg

OWN = settings_of(FEDGLS, dropout=0.4, input_dropout=0.2)  # dropout depends on the round


def saving(folder: Path, rounds: int, **options: Any) -> Outcome:
    own = {"checkpoint_dir": folder, "checkpoint_every": 2, "settings": OWN}
    return run(FEDGLS, rounds=rounds, **{**own, **options})


def assert_same(whole: Outcome, resumed: Outcome, first: int) -> None:
    """Compare what was reported from a round on, and everything in the end, bit by bit."""
    after = whole.reports[first - 1 :]
    rows = whole.figures[first - 1 :]
    assert torch.equal(rows.nan_to_num(-1), resumed.figures.nan_to_num(-1))
    for one, other in zip(after, resumed.reports, strict=True):
        for name in ("round", "participation", "bytes", "wire_bytes", "answered"):
            assert getattr(one, name) == getattr(other, name), name
    for name, values in whole.arrays.items():
        assert torch.equal(values, resumed.arrays[name])
    for own, again in zip(whole.cohorts, resumed.cohorts, strict=True):
        assert own.clients == again.clients
        kept = again.tensors()
        for name, tensor in own.tensors().items():
            assert torch.equal(tensor, kept[name]), name


class Adam(StructureFedAvg, FedAdam):
    """FedAdam keeps moments at the server."""


class Momentum(StructureFedAvg, FedAvgM):
    """FedAvgM keeps a list of arrays."""


@pytest.mark.parametrize(
    ("kind", "options"), [(Adam, {"eta": 0.01}), (Momentum, {"server_momentum": 0.5})]
)
def test_what_another_strategy_keeps_is_saved_too(
    tmp_path: Path, kind: type[StructureFedAvg], options: dict[str, Any]
) -> None:
    whole = saving(tmp_path / "whole", 4, strategy=kind, **options)
    saving(tmp_path / "half", 2, strategy=kind, **options)
    resumed = saving(tmp_path / "half", 4, strategy=kind, resume=True, **options)
    assert_same(whole, resumed, 3)
    plain = run(rounds=4, settings=OWN)
    assert not torch.equal(plain.arrays["gnn-rest"], resumed.arrays["gnn-rest"])


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
    with pytest.raises(CheckpointError, match=r"tau.*0\.5.*0\.6"):
        saving(tmp_path, 4, resume=True, settings=OWN._replace(tau=0.6))
    with pytest.raises(CheckpointError, match="StructureFedAvg"):
        saving(tmp_path, 4, resume=True, strategy=Adam)
    with pytest.raises(ValueError, match=r"fraction_evaluate.*0"):
        saving(tmp_path, 2, fraction_evaluate=0.0)
