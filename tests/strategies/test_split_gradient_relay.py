"""nFedGNN on the in-process engine: the method written densely, and bytes by hand."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from relay_helpers import (
    CLASSES,
    FEATURES,
    Dense,
    Outcome,
    asked_users,
    run,
    small_graph,
)
from torch_geometric.data import Data

from flower_graph.models import build_server_model
from flower_graph.strategies.nfedgnn.users import UserSettings, shared_linear_weight

# Against the method written densely --------------------------------------------------------------


def compare(
    data: Data, *, model: str = "gcn", dropout: float = 0.0, bias: bool = False, **options: Any
) -> Outcome:
    """Run both; `options` are those that the two have in common."""
    rounds = 6
    server = build_server_model(model, hidden=4, heads=2, classes=CLASSES, dropout=dropout, seed=3)
    how = {"model": model, "dropout": dropout, "user_bias": bias, **options}
    outcome = run(data, rounds=rounds, supernodes=3, **how)
    settings = UserSettings(server.latent_size, bias, 5e-4, 3, "holders")
    dense = Dense(data, server, shared_linear_weight(FEATURES, settings), **options)
    losses = [dense.round(number) for number in range(1, rounds + 1)]
    assert outcome.losses == pytest.approx(losses, rel=2e-5)
    assert torch.allclose(outcome.weights["latent"], dense.latent, atol=2e-5)
    return outcome


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "gat"},
        {"model": "sage", "dropout": 0.5, "participation": 0.6},
        {"participation": 0.4, "dropout": 0.5},
        {"average_every": 2},
        {"average_every": 2, "participation": 0.5},
        {"average_every": 2, "average_over": "all"},
        {"average_every": 1, "average_over": "all", "reg_weight": 0.0},  # CNFGNN
        {"schedule": "cosine", "participation": 0.6},
        {"schedule": "warmup-cosine", "average_every": 2},
        {"gradient_norm": 0.05, "schedule": "cosine"},
    ],
)
def test_it_equals_the_method_written_densely(options: dict[str, Any], bias: bool) -> None:
    compare(small_graph(15), bias=bias, **options)


@pytest.mark.parametrize("lonely", [[3], range(15)], ids=["one", "all"])
def test_users_without_edges_take_part(lonely: Iterable[int]) -> None:
    data = small_graph(15)
    touched = torch.isin(data.edge_index, torch.tensor(list(lonely))).any(0)
    data.edge_index = data.edge_index[:, ~touched]
    for report in compare(data).reports:
        assert report.answered == 15
        assert (report.regulariser == 0) == bool(touched.all())


# Bytes -------------------------------------------------------------------------------------------


def test_bytes_by_hand() -> None:
    # 12 users, 4 latent numbers, 4 bytes: 192 in every round. The last gradients are delivered
    # after the last report.
    outcome = run(small_graph(12), rounds=3)
    assert [r.bytes["up"] for r in outcome.reports] == [{"latent": 192 * k} for k in (1, 2, 3)]
    assert [r.bytes["down"] for r in outcome.reports] == [{"gradient": 192 * k} for k in (0, 1, 2)]
    assert outcome.strategy.layer.ledger.payload["down"] == {"gradient": 3 * 192}


def test_bytes_of_averaging_by_hand() -> None:
    # (8 features + bias) x 4 latent numbers x 4 bytes = 144 a user, in rounds 2 and 4; the mean
    # of round 2 goes down in round 3, that of round 4 after the last report.
    outcome = run(small_graph(12), rounds=4, average_every=2, user_bias=True)
    assert [r.bytes["up"].get("weights", 0) for r in outcome.reports] == [0, 1728, 1728, 3456]
    assert [r.bytes["down"].get("weights", 0) for r in outcome.reports] == [0, 0, 1728, 1728]
    assert outcome.strategy.layer.ledger.payload["down"]["weights"] == 3456


def test_bytes_with_participation_by_hand() -> None:
    # 4 of 12 users a round, 16 bytes each way; a gradient goes down when its user is asked again.
    outcome = run(small_graph(12), rounds=3, participation=1 / 3)
    rounds = [set(asked_users(12, 1 / 3, 3, number).tolist()) for number in (1, 2, 3)]
    again = [0, len(rounds[1] & rounds[0]), len(rounds[2] & (rounds[0] | rounds[1]))]
    assert [r.bytes["up"]["latent"] for r in outcome.reports] == [64, 128, 192]
    found = [r.bytes["down"]["gradient"] for r in outcome.reports]
    assert found == [0, 16 * again[1], 16 * (again[1] + again[2])]
