"""Messages of FedGLS: sums that average to means."""

import math
from typing import Any

import torch

from flower_graph.strategies.fedgls.strategy import (
    FIGURES,
    StructureMeasured,
    StructureTrained,
)


def test_what_training_says_by_hand() -> None:
    losses = torch.tensor([3.0, math.nan])
    said = StructureTrained(weight=10, clients=3, left_out={3: "no"}, contrast=losses).to_config()
    assert said == {
        "clients": 3,
        "contrast": 0.3,
        "has-contrast": 0.1,
        "left-out": ["3:no"],
    }
    nothing = StructureTrained(weight=10, clients=3).to_config()
    assert "left-out" not in nothing
    # Flower wants the same names from all: a SuperNode without graphless clients has zeros.
    assert nothing.keys() | {"left-out"} == said.keys()
    assert nothing["contrast"] == nothing["has-contrast"] == 0


def measured(accuracy: list[list[float]], losses: list[float], **more: Any) -> dict[str, Any]:
    train, val, test = torch.tensor(accuracy).double().T
    loss, count = torch.tensor(losses).double(), len(losses)
    figures = {"cross_entropy": loss, "train": train, "val": val, "test": test}
    return StructureMeasured(weight=count, **figures, **more).to_config()


def test_measurements_by_hand() -> None:
    rows = [[1.0, 0.5, 0.0], [0.5, math.nan, 0.5]]
    names = [name.replace("-", "_") for name in FIGURES]
    said = measured(rows, [0.25, 0.75], **{name: torch.tensor([0.5]) for name in names})
    assert (said["val"], said["has-val"]) == (0.25, 0.5)
    report = StructureMeasured.from_config(said).to_report()
    assert [report[f"{role}_accuracy"] for role in ("train", "val", "test")] == [0.75, 0.5, 0.25]
    assert report["loss"] == report["cross_entropy"] == 0.5
    assert report["structure"] == dict.fromkeys(FIGURES, 0.5)
    without = measured(rows, [0.25, 0.75])
    assert without.keys() == said.keys()
    assert StructureMeasured.from_config(without).to_report()["structure"] == {}
    assert math.isnan(StructureMeasured.from_config({}).train)
