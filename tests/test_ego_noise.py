"""What FedSCem's clients share under a budget: clip and noise by client, before pads and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from flower_graph.errors import RefusedError
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.client import open_table
from flower_graph.strategies.masked_embedding_averaging.vector import add_noise

HELD = {4: [0, -1, 2], 7: [1, 2], 9: [-1]}
H = torch.arange(12.0).reshape(6, 2) + 1
MEASURED = np.arange(27.0).reshape(3, 9)
TABLE = open_table(3, {client: np.array(slots) for client, slots in HELD.items()})
CLIENTS = list(HELD)


def shared(noise: ClientNoise, h: torch.Tensor = H) -> tuple[np.ndarray, np.ndarray]:
    found, measured = add_noise(noise, RecordDict(), h, MEASURED, TABLE, CLIENTS)
    return found.numpy(), measured


def test_a_clients_shared_rows_are_one_vector_and_the_others_are_not_sent() -> None:
    found, _ = shared(ClientNoise(1.0, 1e-9, 1))
    own = H.numpy()[[0, 2]]
    assert np.allclose(found[[0, 2]], own / np.linalg.norm(own), atol=1e-6)
    assert np.allclose(np.linalg.norm(found[[3, 4]]), 1.0, atol=1e-6)
    assert not found[[1, 5]].any()
    assert np.allclose(shared(ClientNoise(1e6, 1e-9, 1))[0][[0, 2]], own, atol=1e-3)


def test_noise_goes_on_what_is_sent_alone() -> None:
    wide = torch.ones(6, 5000)
    found, _ = shared(ClientNoise(1.0, 3.0, 1), wide)
    assert abs(found[[0, 2, 3, 4]].std() / 3.0 - 1) < 0.05
    assert not found[[1, 5]].any()


def test_a_client_that_diverged_is_left_to_be_left_out_alone() -> None:
    h = H.clone()
    h[2, 1] = torch.inf
    found, _ = shared(ClientNoise(1.0, 1e-9, 1), h)
    assert np.isnan(found[[0, 2]]).all()
    assert np.isfinite(found[[1, 3, 4, 5]]).all()


def test_measurements_are_withheld_unless_they_are_to_be_reported() -> None:
    assert not shared(ClientNoise(1.0, 1.0, 1))[1].any()
    open_ = ClientNoise(1.0, 1.0, 1, withholds=False)
    assert np.array_equal(shared(open_)[1], MEASURED)


def test_the_budget_is_counted_and_the_last_measurement_is_not() -> None:
    noise, state = ClientNoise(1.0, 1.0, 2), RecordDict()
    for _ in range(2):
        add_noise(noise, state, H, MEASURED, TABLE, CLIENTS)
    found, _ = add_noise(noise, state, H, MEASURED, None, CLIENTS)
    assert not found.any()
    with pytest.raises(RefusedError, match="budget is spent: 2 of 2"):
        add_noise(noise, state, H, MEASURED, TABLE, CLIENTS)
