"""Self-training, and Flower's FedAvg and FedProx over ego-networks, against dense clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient
from ego_strategy_helpers import client_app, run, seven_egos
from flwr.app import Message
from flwr.clientapp.mod import LocalDpMod, message_size_mod
from torch import Tensor

from flower_graph.client.adaptor import make_client_app
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import CheckpointError
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.masked_embedding_averaging.baselines import (
    EgoFedAvg,
    EgoFedProx,
    EgoModelClient,
    SelfTraining,
)
from flower_graph.strategies.masked_embedding_averaging.cohort import initial_weights

PROXIMAL = SETTINGS._replace(proximal=0.5, local_epochs=2)


@dataclass
class Outcome:
    """What a run of FedAvg or FedProx left."""

    strategy: EgoFedAvg
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def figures(self) -> Tensor:
        names = ("loss", "train_accuracy", "val_accuracy", "test_accuracy")
        return torch.tensor([[getattr(r, name) for name in names] for r in self.reports])

    @property
    def model(self) -> ModelWeights:
        parts = (torch.from_numpy(part.copy()) for part in self.strategy.weights().values())
        return ModelWeights(*parts)


def average(strategy: EgoFedAvg, app: Any, supernodes: int, rounds: int = 3) -> Outcome:
    outcome = Outcome(strategy)
    grid = InProcessGrid(app, num_supernodes=supernodes)
    strategy.start(grid, num_rounds=rounds, timeout=5, on_round=outcome.reports.append)
    return outcome


def run_average(
    strategy: EgoFedAvg, supernodes: int = 3, egos: Sequence[EgoNetwork] = (), **more: Any
) -> Outcome:
    app = client_app(egos or seven_egos(), client=EgoModelClient)
    return average(strategy, app, supernodes, **more)


def slow_average(settings: Any, rounds: int = 3) -> tuple[ModelWeights, list[float]]:
    """FedAvg or FedProx with dense PyG models: the model, and the mean loss after each round."""
    model, losses = initial_weights(settings), []
    clients = [PlainClient(network, model, settings) for network in seven_egos()]
    for _ in range(rounds):
        for client in clients:
            client.load(model)
            for _ in range(settings.local_epochs):
                client.step()
        models = [client.model() for client in clients]
        first, rest = (
            torch.stack([getattr(m, part) for m in models]).mean(0) for part in ("first", "rest")
        )
        model = ModelWeights(first, rest)
        found = []
        for client in clients:
            client.load(model)
            if client.ego.train_mask.any():
                found.append(float(client.losses(None)[0].detach()))
        losses.append(sum(found) / len(found))
    return model, losses


@pytest.mark.parametrize(("kind", "settings"), [(EgoFedAvg, SETTINGS), (EgoFedProx, PROXIMAL)])
def test_equals_dense_models(kind: type[EgoFedAvg], settings: Any) -> None:
    outcome = run_average(kind(settings), 3)
    model, losses = slow_average(settings)
    torch.testing.assert_close(outcome.model.first, model.first, atol=1e-5, rtol=0)
    torch.testing.assert_close(outcome.model.rest, model.rest, atol=1e-5, rtol=0)
    assert [report.loss for report in outcome.reports] == pytest.approx(losses, abs=1e-5)
    assert [report.answered for report in outcome.reports] == [7, 7, 7]


def test_the_proximal_term_shows_and_fedavg_has_none() -> None:
    plain = PROXIMAL._replace(proximal=0.0)
    with_term, without = run_average(EgoFedProx(PROXIMAL)), run_average(EgoFedProx(plain))
    assert not torch.allclose(with_term.model.rest, without.model.rest, atol=1e-5)
    torch.testing.assert_close(run_average(EgoFedAvg(PROXIMAL)).model.rest, without.model.rest)


def test_the_same_as_model_sharing_without_embeddings() -> None:
    # FedSCem with shared models, the contrastive step switched off, is FedAvg; but the start and
    # the mean are those of rounds one apart, and its last round has no mean of its own.
    settings = SETTINGS._replace(learning_rate=0.01)
    shared = run(
        seven_egos(),
        settings=settings._replace(mu=0.0),
        variant="iter",
        alignment="plain",
        aggregation="plain",
        model_sharing="fedavg",
        rounds=4,
    )
    averaged = run_average(EgoFedAvg(settings), rounds=4)
    weights = shared.strategy.weights()
    first = torch.from_numpy(weights.pop("first"))
    rest = torch.cat([torch.from_numpy(part).reshape(-1) for part in weights.values()])
    torch.testing.assert_close(first, averaged.model.first, atol=1e-5, rtol=0)
    torch.testing.assert_close(rest, averaged.model.rest, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        shared.figures[:, 3:], averaged.figures[:, 1:], atol=1e-5, rtol=0, equal_nan=True
    )


def test_bytes_are_those_of_the_models() -> None:
    outcome = run_average(EgoFedAvg(SETTINGS), supernodes=2)
    numbers = sum(part.numel() for part in (outcome.model.first, outcome.model.rest))
    payload = outcome.strategy.payload
    # Each client, three rounds; up once, down once to train and, not counted, to be measured.
    sent = len(seven_egos()) * 3
    assert payload["up"] == payload["down"]
    assert sent * 4 * numbers <= payload["up"]["weights"] < sent * (4 * numbers + 1000)  # headers


# Checkpoints -------------------------------------------------------------------------------------


def test_a_run_with_another_proximal_term_does_not_fit(tmp_path: Path) -> None:
    def part(settings: Any, resume: bool) -> None:
        app = client_app(seven_egos(), client=EgoModelClient, checkpoint_dir=tmp_path)
        strategy = EgoFedProx(settings, checkpoint_dir=tmp_path, checkpoint_every=2)
        strategy.start(InProcessGrid(app, num_supernodes=1), None, 2, 5, resume=resume)

    part(PROXIMAL, resume=False)
    with pytest.raises(CheckpointError, match=r"its proximal is 0\.5, this run's is 0\.25"):
        part(PROXIMAL._replace(proximal=0.25), resume=True)


# Flower's mods -----------------------------------------------------------------------------------


def modded(mods: list[Any], train_mods: list[Any]) -> Any:
    def client_fn(context: Any) -> EgoModelClient:
        part, parts = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
        return EgoModelClient(context, seven_egos()[part::parts])

    return make_client_app(client_fn, mods=mods, train_mods=train_mods)


def test_message_size_mod_changes_nothing() -> None:
    plain = run_average(EgoFedAvg(SETTINGS))
    with_mod = average(EgoFedAvg(SETTINGS), modded([message_size_mod], []), 3)
    torch.testing.assert_close(with_mod.model.rest, plain.model.rest, atol=1e-6, rtol=0)


def test_local_dp_mod_clips_and_adds_noise() -> None:
    sizes: list[float] = []

    def measure(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        (sent,), (got,) = ([*m.content.array_records.values()] for m in (message, reply))
        moved = [got[key].numpy() - sent[key].numpy() for key in got]
        sizes.append(float(sum((part**2).sum() for part in moved) ** 0.5))
        return reply

    local_dp = LocalDpMod(clipping_norm=0.01, sensitivity=0.01, epsilon=1e9, delta=1e-5)
    clipped = average(EgoFedAvg(SETTINGS), modded([], [measure, local_dp]), 3)
    assert max(sizes) == pytest.approx(0.01, rel=1e-3)
    assert torch.isfinite(clipped.model.rest).all()
    assert not torch.allclose(clipped.model.rest, run_average(EgoFedAvg(SETTINGS)).model.rest)


# Self-training -----------------------------------------------------------------------------------


def test_self_training_is_every_client_alone() -> None:
    egos = seven_egos()
    outcome = run(egos, strategy=SelfTraining(SETTINGS), rounds=4, supernodes=3)
    for network in egos:
        client = PlainClient(network, initial_weights(SETTINGS), SETTINGS)
        for _ in range(4):
            client.step()
        model, active = client.model(), (network.x != 0).any(0)
        expected = torch.cat([model.first[active].reshape(-1), model.rest])
        torch.testing.assert_close(outcome.last[network.client], expected, atol=1e-5, rtol=0)
    assert outcome.figures[:, 2].isnan().all()
    assert outcome.answered == [7] * 4
    assert "embeddings" not in {k for k, v in outcome.strategy.payload["up"].items() if v}
    assert not outcome.strategy.payload["down"]


def test_self_training_takes_no_proximal_term() -> None:
    one, other = (run(seven_egos(), strategy=SelfTraining(s)) for s in (SETTINGS, PROXIMAL))
    assert not torch.allclose(one.figures, other.figures, equal_nan=True)  # two epochs
    plain = run(seven_egos(), strategy=SelfTraining(PROXIMAL._replace(proximal=0.0)))
    assert torch.equal(plain.figures.nan_to_num(), other.figures.nan_to_num())
