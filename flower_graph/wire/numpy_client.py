"""The types of arguments and results of a ``NumPyClient``'s methods."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scalar = bool | bytes | float | int | str
# Entries of a message; lists of them too, which Flower's type leaves out.
Config = dict[str, Scalar]
Parameters = list[NDArray[np.generic]]
Answer = tuple[Parameters, int, Config]  # arrays, their weight, further entries
Measurements = tuple[float, int, Config]  # the loss, its weight, further figures
