"""The whole method against slow versions, by hand, masked and plain; clients that come later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient, average
from ego_strategy_helpers import (
    FINE,
    RESOLUTION,
    assert_same,
    ego,
    faulty,
    rounded,
    run,
    seven_egos,
    three_egos,
)
from flwr.app import ArrayRecord
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.cohort import ChosenEgos, Shared, initial_weights
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging

# Written densely ---------------------------------------------------------------------------------


def means(clients: list[PlainClient]) -> dict[int, Tensor]:
    """Average embeddings by node over at least two holders."""
    held: dict[int, list[Tensor]] = {}
    for client in clients:
        for node, row in zip(client.ego.nodes.tolist(), client.embed().detach(), strict=True):
            held.setdefault(node, []).append(row)
    return {node: torch.stack(rows).mean(0) for node, rows in held.items() if len(rows) > 1}


def shared_by(network: EgoNetwork, mean: dict[int, Tensor]) -> Shared:
    rows = [(place, mean[n]) for place, n in enumerate(network.nodes.tolist()) if n in mean]
    place = torch.tensor([place for place, _ in rows], dtype=torch.long)
    return Shared(place, torch.stack([row for _, row in rows]) if rows else torch.zeros(0, 1))


def slow_run(
    egos: list[EgoNetwork], rounds: int, variant: str, sharing: str, settings: Any
) -> list[PlainClient]:
    """Run the method with one dense PyG model a client; return them as after the last fusion."""
    model = initial_weights(settings)
    clients = [PlainClient(network, model, settings) for network in egos]
    mean: dict[int, Tensor] | None = None
    for number in range(1, rounds + 2):
        if sharing != "none":
            for client in clients:
                client.load(model)
        for client in clients:
            if mean is not None:
                for _ in range(settings.local_epochs):
                    client.step(shared_by(client.ego, mean), classify=variant != "iter")
        if number > rounds:
            break
        for client in clients:
            for _ in range(settings.local_epochs if variant != "minus" else 0):
                client.step()
        mean = means(clients)
        model = average(clients)
    return clients


@pytest.mark.parametrize(
    ("variant", "sharing", "changes"),
    [
        ("full", "none", {}),
        ("iter", "none", {}),
        ("minus", "none", {"local_epochs": 2}),
        ("full", "fedavg", {}),
        ("full", "fedprox", {"proximal": 0.5}),
        ("iter", "fedprox", {"proximal": 0.5, "local_epochs": 2}),
    ],
)
def test_equals_dense_clients(variant: str, sharing: str, changes: dict[str, Any]) -> None:
    settings, egos = SETTINGS._replace(**changes), seven_egos()
    how = {"aggregation": "plain", "variant": variant, "model_sharing": sharing}
    fast = run(egos, settings=settings, **how)
    slow = slow_run(egos, 3, variant, sharing, settings)
    for place, client in enumerate(slow):
        found = fast.last[egos[place].client]
        torch.testing.assert_close(found, client.active(), atol=2e-5, rtol=0)


# One round by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "alignment", "supernodes"),
    [
        ("masked", "psi", 3),
        ("masked", "plain", 1),
        ("plain", "psi", 1),
        ("plain", "plain", 3),
    ],
)
def test_clients_get_the_means_over_holders(
    aggregation: str, alignment: str, supernodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, Shared] = {}
    fuse = ChosenEgos.fuse

    def spy(chosen: ChosenEgos, shared: Shared, server_round: int, **how: Any) -> Tensor:
        for client, start, end in zip(
            chosen.batch.clients, chosen.batch.ptr, chosen.batch.ptr[1:], strict=False
        ):
            own = (shared.place >= start) & (shared.place < end)
            found[client] = Shared(shared.place[own] - start, shared.mean[own])
        return fuse(chosen, shared, server_round, **how)

    monkeypatch.setattr(ChosenEgos, "fuse", spy)
    egos = three_egos()
    run(egos, rounds=1, supernodes=supernodes, aggregation=aggregation, alignment=alignment)
    h = {}
    for network in egos:
        client = PlainClient(network, initial_weights(SETTINGS), SETTINGS)
        client.step()
        h[network.client] = client.embed().detach()
    two, three = (h[7][1] + h[8][0]) / 2, (h[7][2] + h[8][1] + h[9][0]) / 3
    assert two.abs().max() > 0.01
    # Nodes 1 and 4 have one holder each: of them nothing comes back.
    expected = {7: ([1, 2], [two, three]), 8: ([0, 1], [two, three]), 9: ([0], [three])}
    for client, (place, mean) in expected.items():
        assert found[client].place.tolist() == place
        torch.testing.assert_close(
            found[client].mean, torch.stack(mean), atol=2 * RESOLUTION, rtol=1e-6
        )


# Masks, dealings, seeds --------------------------------------------------------------------------


@pytest.mark.parametrize(("egos", "rounds"), [(seven_egos(), 5), (three_egos()[:2], 3)])
def test_masked_and_plain_train_alike(egos: list[EgoNetwork], rounds: int) -> None:
    count = len(egos)
    masked = run(egos, rounds=rounds, supernodes=count)
    assert masked.answered == [count] * rounds
    # With vectors rounded as the ring rounds them nothing at all differs; without, the means
    # differ by half a step of the ring at most.
    exact = run(egos, rounds=rounds, supernodes=count, aggregation="plain", mods=[rounded])
    assert_same(masked, exact, 0.0)
    plain = run(egos, rounds=rounds, aggregation="plain")
    coarse = run(egos, rounds=rounds, resolution=2.0**-8)
    far = [float((o.figures - plain.figures).nan_to_num().abs().max()) for o in (masked, coarse)]
    assert far[0] <= rounds * RESOLUTION
    assert far[0] < far[1] <= rounds * 2.0**-8
    assert SETTINGS.mu < 1  # or the contrastive loss, times mu, would be further off


# Clients with nothing in common, and clients that come later -------------------------------------


@pytest.mark.parametrize("alignment", ["psi", "plain"])
def test_nobody_has_shared_nodes(alignment: str) -> None:
    egos = [ego(1, [1, 2], [(1, 2)]), ego(2, [3, 4], [(3, 4)]), ego(3, [5])]
    outcome = run(egos, supernodes=3, rounds=3, alignment=alignment)
    assert outcome.answered == [3] * 3
    assert outcome.figures[:, 2].isnan().all()  # no contrast
    assert outcome.figures[:, 0].isfinite().all()


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (5, {}),
        (8, {"model_sharing": "fedavg"}),
    ],
)
def test_a_client_joins_after_three_rounds(count: int, options: dict[str, Any]) -> None:
    # With five clients the newcomer changes the size of the ring as well. It brings node 30 with
    # it, which only one client held before: a new slot.
    others = [ego(k, [k, k + 1, k + 2], [(k, k + 1)]) for k in range(1, count)]
    egos = [*others, ego(60, [2, count + 1, 30], [(2, 30)])]
    egos[0] = ego(1, [1, 2, 3, 30], [(1, 30)])
    absent = faulty({(count - 1, "gone", number): "" for number in (1, 2, 3)})
    outcome = run(egos, rounds=7, supernodes=count, make_grid=absent, **options)
    # A round's report says who took part in its measurement, with the next round's vectors.
    assert outcome.answered == [count - 1] * 2 + [count] * 5
    assert not any(report.skipped or report.rejected for report in outcome.reports)
    assert outcome.figures[:, 0].isfinite().all()
    assert outcome.figures[3:, 2].isfinite().all()  # all of them fuse again
    assert 60 in outcome.last
    # Two more slots: node 30, and the last of the others' nodes.
    assert outcome.strategy.session.num_slots == count + 1


# What does not fit together ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "half"}, "variant: 'half'"),
        ({"model_sharing": "all"}, "model_sharing: 'all'"),
        ({"alignment": "guess"}, "alignment: 'guess'"),
        ({"aggregation": "open"}, "aggregation: 'open'"),
        ({"participation": 1.5}, "participation: 1.5"),
        ({"checkpoint_every": 2}, "checkpoint_every: 2.*checkpoint_dir"),
        ({"dropout": 1.0}, "dropout.*1.0"),
        ({"limit": float("nan")}, "limit.*nan"),
        ({"resolution": -1.0}, "resolution.*-1.0"),
        ({"resolution": 2.0**-70}, "resolution"),
        ({"settings": SETTINGS._replace(tau=0.0)}, "tau: 0.0"),
        ({"registry": "none.json", "aggregation": "plain"}, "registry"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedEmbeddingAveraging(**{"settings": SETTINGS, **FINE, **options})


def test_there_is_no_model_to_start_from() -> None:
    grid = InProcessGrid(lambda *_: None, num_supernodes=1)
    with pytest.raises(ValueError, match="initial_arrays"):
        MaskedEmbeddingAveraging(SETTINGS).start(grid, ArrayRecord(), num_rounds=1)
