"""Noise on the embeddings that FedSCem's clients share, before pads and masks go over them.

No mod can add it: words of a ring bear no noise, and a SuperNode's reply is already the sum over
its clients. Which slots a client holds, and so how many nodes it shares, gets no noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client_noise import ClientNoise
from flower_graph.secure.slots import SlotTable

Floats = NDArray[np.float64]


def add_noise(
    noise: ClientNoise,
    state: RecordDict,
    h: Tensor,
    measured: Floats,
    table: SlotTable | None,
    clients: Sequence[int],
) -> tuple[Tensor, Floats]:
    """Clip and noise what each client shares, and withhold what it measured.

    Parameters
    ----------
    noise : ClientNoise
        A client's embeddings of all nodes with a slot are one vector for it.
    state : RecordDict
        The context's; counts how often the clients have sent embeddings.
    h : Tensor
        ``[n, h]`` embeddings of all nodes, client by client.
    measured : ndarray
        ``[c, 9]`` measurements of each client.
    table : SlotTable or None
        Who holds which slot; None if no embedding is to be sent.
    clients : sequence of int
        The clients, in order.

    Returns
    -------
    tuple
        ``[n, h]`` embeddings with noise, 0 for nodes that are not shared, so that nothing that
        comes later can depend on these; and the measurements, all 0 if they are withheld.
    """
    shown = np.zeros_like(measured) if noise.withholds else measured
    if table is None:
        return torch.zeros_like(h), shown
    noise.count(state)
    own, start = h.detach().cpu().numpy(), 0
    found = np.zeros_like(own)
    for client in clients:
        slots = table.by_client[client]
        place = start + np.flatnonzero(slots >= 0)
        start += slots.size
        if not np.isfinite(own[place]).all():
            found[place] = np.nan  # cannot be clipped: the client alone is left out, by its reason
        elif place.size:
            found[place] = noise.protect(own[None, place])[0]
    return torch.from_numpy(found).to(h.device), shown
