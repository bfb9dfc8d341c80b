"""The scale of the numbers that nodes learn, common to all clients of a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Scale(NamedTuple):
    """Mean and deviation of the training nodes' numbers, by which they are standardised."""

    mean: float = 0.0
    deviation: float = 1.0

    @classmethod
    def of(cls, parts: Iterable[Tensor]) -> Scale:
        """Return the scale of several clients' numbers; the deviation is 1 if all are equal."""
        numbers = torch.cat([part.double() for part in parts])
        if not numbers.numel():
            return cls()
        deviation = float(numbers.std(correction=0))
        return cls(float(numbers.mean()), deviation if deviation > 0 else 1.0)

    def apply(self, numbers: Tensor) -> Tensor:
        return (numbers - self.mean) / self.deviation

    def undo(self, numbers: Tensor) -> Tensor:
        return numbers * self.deviation + self.mean

    def check(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.deviation < math.inf):
            raise ValueError(f"scale {[*self]}: a mean, and a deviation above 0, must be finite")
