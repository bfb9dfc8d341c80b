"""What the methods of a ``NumPyClient`` take and return, in the types that Flower gives them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Scalar = bool | bytes | float | int | str
# Entries of a message. Lists of them travel too, which Flower's type leaves out.
Config = dict[str, Scalar]
Parameters = list[NDArray[np.generic]]
Answer = tuple[Parameters, int, Config]  # arrays, what they count for, entries beside them
Measurements = tuple[float, int, Config]  # the loss, what it counts for, figures beside it
