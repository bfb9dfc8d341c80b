"""Means over clients that Flower's weighted means over SuperNodes can carry.

A SuperNode says the sum over its clients and how many of them have a value, ``has-<name>``, both
divided by its ``num-examples``. Flower's mean of each, weighted by that number, is the sum over all
clients divided by a number that is the same for all: the quotient of the two is the clients' mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def sums(name: str, values: Tensor, weight: int) -> dict[str, float]:
    """Add up what is not NaN, and count it, both divided by the weight."""
    known = ~values.isnan()
    total = float(values[known].double().sum())
    return {name: total / weight, f"has-{name}": float(known.sum()) / weight}


def mean_of(metrics: Mapping[str, Any], name: str) -> float:
    """Return the mean over clients from Flower's mean of the sums; NaN where no client has any."""
    share = metrics.get(f"has-{name}", 0.0)
    return metrics[name] / share if isinstance(share, float) and share > 0 else math.nan
