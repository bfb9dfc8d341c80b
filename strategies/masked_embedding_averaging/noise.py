"""Noise on the embeddings that FedSCem's clients share, before pads and masks go over them.

No mod can add it: words of a ring bear no noise, and a SuperNode's reply is already the sum over
its clients. Which slots a client holds, and so how many nodes it shares, gets no noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.errors import ConfigError
from flower_graph.privacy.client_noise import ClientNoise, client_noise
from flower_graph.secure.align.slots import SlotTable
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig

Floats = NDArray[np.float64]
# A noise so many deviations long comes once in 4e11 draws; a run draws fewer.
FARTHEST = 7


def embedding_noise(config: FedSCemConfig) -> ClientNoise | None:
    """Give the noise that FedSCem's clients add to embeddings before pads and masks."""
    noise, how = client_noise(config.privacy, config.rounds), config.strategy
    if noise is None or how.aggregation != "masked":
        return noise
    longest = noise.clipping_norm + FARTHEST * noise.deviation
    if longest > how.limit:
        raise ConfigError(
            f"strategy.limit: {how.limit:g} is too small for noise of {noise.deviation:.3g}, which "
            f"privacy.epsilon={config.privacy.epsilon:g} takes: clients would be left out; set "
            f"strategy.limit={math.ceil(longest)} or more, or a smaller privacy.clipping_norm"
        )
    return noise


def add_noise(
    noise: ClientNoise,
    state: RecordDict,
    h: Tensor,
    measured: Floats,
    table: SlotTable | None,
    clients: Sequence[int],
) -> tuple[Tensor, Floats]:
    """Clip and noise what each client shares, and withhold what it measured."""
    # h [n, h], measured [c, 9]
    shown = np.zeros_like(measured) if noise.withholds else measured
    if table is None:
        return torch.zeros_like(h), shown
    noise.count(state)
    local, start = h.detach().cpu().numpy(), 0
    result = np.zeros_like(local)
    for client in clients:
        slots = table.by_client[client]
        place = start + np.flatnonzero(slots >= 0)
        start += slots.size
        if not np.isfinite(local[place]).all():
            result[place] = np.nan  # cannot be clipped: the client alone is left out, by its reason
        elif place.size:
            result[place] = noise.protect(local[None, place])[0]
    return torch.from_numpy(result).to(h.device), shown
