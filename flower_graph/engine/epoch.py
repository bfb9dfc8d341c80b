"""What one epoch of a network that is trained in one place came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Epoch:
    """Training loss and accuracies after one epoch."""

    cross_entropy: float
    val_accuracy: float
    test_accuracy: float
