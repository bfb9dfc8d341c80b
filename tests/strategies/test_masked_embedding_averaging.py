"""The whole method against slow versions, by hand, and however the clients are assigned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient
from ego_strategy_helpers import (
    FINE,
    RESOLUTION,
    assert_same,
    faulty,
    rounded,
    run,
    seven_egos,
    three_egos,
)
from flwr.app import ArrayRecord
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.masked_embedding_averaging.cohort import (
    ChosenEgos,
    Shared,
    initial_weights,
)
from flower_graph.strategies.masked_embedding_averaging.strategy import MaskedEmbeddingAveraging

# Written densely ---------------------------------------------------------------------------------


def means(vectors: dict[int, tuple[EgoNetwork, Tensor]]) -> dict[int, Tensor]:
    """Average embeddings by node over at least two holders."""
    held: dict[int, list[Tensor]] = {}
    for network, h in vectors.values():
        for node, row in zip(network.nodes.tolist(), h, strict=True):
            held.setdefault(node, []).append(row.detach())
    return {node: torch.stack(rows).mean(0) for node, rows in held.items() if len(rows) > 1}


def shared_by(network: EgoNetwork, mean: dict[int, Tensor]) -> Shared:
    rows = [(place, mean[n]) for place, n in enumerate(network.nodes.tolist()) if n in mean]
    place = torch.tensor([place for place, _ in rows], dtype=torch.long)
    return Shared(place, torch.stack([row for _, row in rows]) if rows else torch.zeros(0, 1))


def average(clients: list[PlainClient]) -> ModelWeights:
    models = [client.model() for client in clients]
    first, rest = (torch.stack([getattr(m, part) for m in models]) for part in ("first", "rest"))
    return ModelWeights(first.mean(0), rest.mean(0))


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
        mean = means({c.ego.client: (c.ego, c.embed()) for c in clients})
        model = average(clients)
    return clients


@pytest.mark.parametrize(
    ("variant", "sharing", "changes"),
    [
        ("full", "none", {}),
        ("minus", "none", {"local_epochs": 2}),
        ("full", "fedavg", {}),
        ("full", "fedprox", {"proximal": 0.5}),
        ("iter", "fedprox", {"proximal": 0.5, "local_epochs": 2}),
    ],
)
def test_equals_dense_clients(variant: str, sharing: str, changes: dict[str, Any]) -> None:
    settings, egos = SETTINGS._replace(**changes), seven_egos()
    fast = run(
        egos,
        settings=settings,
        aggregation="plain",
        variant=variant,
        model_sharing=sharing,
    )
    slow = slow_run(egos, 3, variant, sharing, settings)
    for place, client in enumerate(slow):
        model, network = client.model(), egos[place]
        active = (network.x != 0).any(0)
        expected = torch.cat([model.first[active].reshape(-1), model.rest])
        torch.testing.assert_close(fast.last[network.client], expected, atol=2e-5, rtol=0)


# One round by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "alignment", "supernodes"),
    [
        ("masked", "psi", 3),
        ("masked", "plain", 1),
        ("masked", "polynomial", 3),
        ("plain", "psi", 1),
        ("plain", "polynomial", 3),
    ],
)
def test_clients_get_the_means_over_holders(
    aggregation: str, alignment: str, supernodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, Shared] = {}
    fuse = ChosenEgos.fuse

    def spy(chosen: ChosenEgos, shared: Shared, **how: Any) -> Tensor:
        for client, start, end in zip(
            chosen.batch.clients, chosen.batch.ptr, chosen.batch.ptr[1:], strict=False
        ):
            own = (shared.place >= start) & (shared.place < end)
            found[client] = Shared(shared.place[own] - start, shared.mean[own])
        return fuse(chosen, shared, **how)

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


@pytest.mark.parametrize(
    ("variant", "fusing", "local"), [("full", 1, 1), ("iter", 1, 1), ("minus", 1, 0)]
)
@pytest.mark.parametrize("epochs", [1, 3])
def test_steps_of_a_round(variant: str, fusing: int, local: int, epochs: int) -> None:
    # Round t fuses what round t - 1 shared, so the first has nothing to fuse.
    outcome = run(
        rounds=3, variant=variant, settings=SETTINGS._replace(local_epochs=epochs), supernodes=1
    )
    every = epochs * (fusing + local)
    expected = [epochs * local + every * t for t in range(3)] + [epochs * (local + 2 * local + 3)]
    found = [set(outcome.seen.steps[t].values()) for t in (1, 2, 3, 4)]
    assert found == [{steps} for steps in expected]


@pytest.mark.parametrize("sharing", ["none", "fedavg"])
def test_iter_takes_the_contrastive_step_alone(
    sharing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    fuse = ChosenEgos.fuse

    def spy(chosen: ChosenEgos, shared: Shared, *, classify: bool = True) -> Tensor:
        calls.append(classify)
        return fuse(chosen, shared, classify=classify)

    monkeypatch.setattr(ChosenEgos, "fuse", spy)
    for variant in ("full", "minus", "iter"):
        run(rounds=2, supernodes=1, variant=variant, model_sharing=sharing)
    assert calls == [True, True, True, True, False, False]


# Masks, dealings, seeds --------------------------------------------------------------------------


def test_masked_and_plain_train_alike() -> None:
    egos = seven_egos()
    masked = run(egos, rounds=8, supernodes=7)
    # With vectors rounded as the ring rounds them nothing at all differs; without, the means
    # differ by half a step of the ring at most.
    exact = run(egos, rounds=8, supernodes=7, aggregation="plain", mods=[rounded])
    assert_same(masked, exact, 0.0)
    plain = run(egos, rounds=8, aggregation="plain")
    torch.testing.assert_close(
        masked.figures, plain.figures, atol=8 * RESOLUTION, rtol=0, equal_nan=True
    )


def test_same_seed_same_run_other_seed_other_run() -> None:
    one, same, other = (
        run(settings=SETTINGS._replace(seed=seed), participation=0.5) for seed in (3, 3, 4)
    )
    assert_same(one, same, 0.0)
    assert not torch.allclose(one.figures, other.figures, equal_nan=True)


def test_participation_of_less_than_two_still_makes_a_sum() -> None:
    outcome = run(three_egos(), supernodes=3, participation=0.1)
    assert outcome.answered == [2, 2, 2]
    assert not any(report.skipped for report in outcome.reports)


def test_two_clients() -> None:
    outcome = run(three_egos()[:2], supernodes=2, rounds=4)
    assert outcome.answered == [2] * 4
    assert outcome.figures[:, 2].isfinite().all()
    assert outcome.figures[-1, 0] < outcome.figures[0, 0]
    assert_same(outcome, run(three_egos()[:2], supernodes=1, rounds=4, aggregation="plain"), 1e-4)


# What does not fit together ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "half"}, "variant is 'half', must be one of full, iter, minus"),
        ({"model_sharing": "all"}, "model_sharing is 'all', must be one of none, fedavg"),
        ({"alignment": "guess"}, "alignment is 'guess', must be one of psi, polynomial, plain"),
        ({"aggregation": "open"}, "aggregation is 'open', must be one of masked, plain"),
        ({"participation": 0.0}, "participation: 0.0 is not above 0"),
        ({"participation": 1.5}, "participation: 1.5 is not above 0"),
        ({"participation": float("nan")}, "participation: nan is not above 0"),
        ({"min_nodes": 0}, "min_nodes: 0"),
        ({"checkpoint_every": -1}, "checkpoint_every: -1"),
        ({"checkpoint_every": 2}, "checkpoint_every: 2 needs a checkpoint_dir"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"limit": 0.0}, "limit is 0.0"),
        ({"limit": float("nan")}, "limit is nan"),
        ({"resolution": -1.0}, "resolution is -1.0"),
        ({"resolution": 2.0**-70}, "lower the limit or take a larger resolution"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedEmbeddingAveraging(SETTINGS, **{**FINE, **options})


@pytest.mark.parametrize("tau", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive(tau: float) -> None:
    with pytest.raises(ValueError, match=r"tau is .*, must be above 0"):
        MaskedEmbeddingAveraging(SETTINGS._replace(tau=tau))


def test_what_start_refuses() -> None:
    server = MaskedEmbeddingAveraging(SETTINGS)
    grid = InProcessGrid(lambda *_: None, num_supernodes=1)
    with pytest.raises(ValueError, match="num_rounds: 0"):
        server.start(grid, num_rounds=0)
    with pytest.raises(ValueError, match="initial_arrays"):
        server.start(grid, ArrayRecord(), num_rounds=1)
    done = run(three_egos(), rounds=1).strategy
    with pytest.raises(ValueError, match="has run already"):
        run(three_egos(), strategy=done)


def test_what_the_result_holds() -> None:
    without, shared = run(three_egos()), run(three_egos(), model_sharing="fedavg")
    assert without.strategy.weights() == {}
    assert [*shared.strategy.weights()][:3] == ["first", "bias-1", "weight-2"]
    grid = faulty({})
    result = MaskedEmbeddingAveraging(SETTINGS, **FINE).start(
        run(three_egos(), make_grid=grid).grid, num_rounds=2
    )
    assert sorted(result.train_metrics_clientapp) == [1, 2]
    assert result.train_metrics_clientapp[2]["answered"] == 3
