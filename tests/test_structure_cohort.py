"""Cohorts that share weights against plain PyG clients, one by one."""

from __future__ import annotations

import pytest
import torch
from plain_structure import FEDGLS, METHODS, Drops, PlainFederation
from structure_helpers import (
    SETTINGS,
    learners_of,
    settings_of,
    toy_clients,
    weights_of,
)
from torch import Tensor

from flower_graph.strategies.structure_fedavg.cohort import StructureCohort, Trained
from flower_graph.strategies.structure_fedavg.networks import StructureSettings


class Batched:
    """All clients in one cohort, with as much of a server as they need."""

    def __init__(self, method: str, settings: StructureSettings) -> None:
        self.cohort = StructureCohort(toy_clients(), settings)
        self.plain = PlainFederation(toy_clients(), method, settings, self.drops)

    def drops(self, client: int, model: int, number: int) -> Drops:
        """Read what the engine's dropout leaves."""
        kept, batch = self.cohort._dropout(number), self.cohort.batch
        place = self.cohort.clients.index(client) + model * self.cohort.size
        nodes = slice(batch.ptr[place], batch.ptr[place + 1])
        x = next(graph.x.to_dense() for graph in toy_clients() if graph.client == client)
        inputs, hidden = torch.ones(1, 1, 1), torch.ones(1, 1, 1)
        if kept.hidden is not None:
            hidden = kept.hidden[:, nodes]
        if kept.inputs is not None:
            begin, end = batch.x.matrix.crow_indices()[[nodes.start, nodes.stop]].tolist()
            inputs = torch.zeros(kept.inputs.shape[0], *x.shape)
            inputs[:, x != 0] = kept.inputs[:, begin:end]
        return Drops(inputs, hidden)

    def train(self, number: int) -> Trained:
        """Let both take a round from what the plain server has."""
        settings, plain = self.cohort.settings, self.plain
        if plain.shares_models:
            self.cohort.start_from(plain.models[: settings.num_models])
        goal = None
        if plain.method == "fedproto":
            goal = torch.full((settings.num_classes, settings.hidden), torch.nan)
            for label, vector in plain.prototypes.items():
                goal[label] = vector
        trained = self.cohort.train(number, goal)
        plain.train(number)
        return trained


def close(one: Tensor, other: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def assert_weights_equal(batched: Batched) -> None:
    """Compare all models and graph learners, row by row that the client has."""
    found, learners = weights_of(batched.cohort), learners_of(batched.cohort)
    seen = 0
    for client in batched.plain.clients:
        has = (client.x != 0).any(0)
        for number, model in client.models().items():
            ours = found[client.graph.client, number]
            close(ours.first[has], model.first[has])
            close(ours.rest, model.rest)
            seen += 1
        if client.learner is not None:
            for ours_, part in zip(
                learners[client.graph.client], client.learner.parts, strict=True
            ):
                rows = has if part.shape[0] == has.numel() else slice(None)
                close(ours_[rows], part.detach()[rows])
    assert seen == len(found)


def assert_losses_equal(batched: Batched, trained: Trained) -> None:
    cohort, plain = batched.cohort, {c.graph.client: c for c in batched.plain.clients}
    contrast = [plain[client].contrast for client in cohort.clients[cohort.with_edges :]]
    distilled = [plain[client].distillation for client in cohort.clients]
    is_fedgls = batched.plain.method == FEDGLS
    close(trained.contrast, torch.tensor(contrast if is_fedgls else []))
    close(trained.distillation, torch.tensor(distilled if is_fedgls else []))


def assert_models_equal(batched: Batched) -> None:
    models, _, nodes = batched.cohort.mean_models([])
    batched.plain.average()
    assert nodes == sum(client.nodes for client in batched.plain.clients)
    shares = _shares(batched)
    for ours, theirs, share in zip(models, batched.plain.models, shares, strict=True):
        close(ours.first / share, theirs.first)
        close(ours.rest / share, theirs.rest)


def _shares(batched: Batched) -> list[float]:
    """The part of the nodes whose clients have each model."""
    clients, num = batched.plain.clients, batched.cohort.settings.num_models
    nodes = [sum(c.nodes for c in clients if n in c.models()) for n in range(num)]
    return [part / sum(c.nodes for c in clients) for part in nodes]


def assert_judged_equal(batched: Batched) -> None:
    judged = batched.cohort.evaluate()
    theirs = {client.graph.client: client.judge() for client in batched.plain.clients}
    for place, number in enumerate(batched.cohort.clients):
        accuracy, loss = theirs[number]
        close(judged.accuracy[place], torch.tensor(accuracy, dtype=torch.float64))
        assert judged.loss[place].item() == pytest.approx(loss, abs=1e-5)


def follow(method: str, settings: StructureSettings) -> Batched:
    """Compare everything after each of five rounds."""
    batched = Batched(method, settings)
    for number in range(1, 6):
        trained = batched.train(number)
        assert trained.diverged == []
        assert_losses_equal(batched, trained)
        assert_weights_equal(batched)
        if batched.plain.shares_models:
            assert_models_equal(batched)
            batched.cohort.start_from(batched.plain.models[: settings.num_models])
        else:
            batched.plain.average()
        assert_judged_equal(batched)
    return batched


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("method", METHODS)
def test_batched_is_one_by_one(method: str, dropout: float) -> None:
    follow(method, settings_of(method, dropout=dropout, input_dropout=dropout / 2))


SIMILARITIES = ("cosine", "euclidean", "inner")


@pytest.mark.parametrize("similarity", SIMILARITIES[1:])
def test_other_similarities(similarity: str) -> None:
    learner = SETTINGS.learner._replace(similarity=similarity, layers=1)
    follow(FEDGLS, settings_of(FEDGLS, learner=learner))


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_the_gradient_of_every_graph_learner(encoder: str, layers: int, similarity: str) -> None:
    # After one step Adam's first moment is a tenth of the gradient. The weights themselves say
    # little: where a dead unit makes the gradient zero, Adam takes a full step along its rounding.
    chosen = {"encoder": encoder, "layers": layers, "similarity": similarity}
    settings = settings_of(FEDGLS, learner=SETTINGS.learner._replace(width=16, **chosen))
    batched = Batched(FEDGLS, settings)
    batched.train(1)
    moments, largest = learners_of(batched.cohort, "exp-avg"), 0.0
    for client in batched.plain.clients:
        if client.learner is None:
            continue
        for ours, part in zip(moments[client.graph.client], client.learner.parts, strict=True):
            assert part.grad is not None
            close(10 * ours, part.grad)
            largest = max(largest, float(part.grad.abs().max()))
    assert largest > 1e-3


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_knn_graphs_compare_the_features_as_they_are(similarity: str) -> None:
    learner = SETTINGS.learner._replace(encoder="mlp", similarity=similarity)
    follow("local-gnn-knn", settings_of("local-gnn-knn", learner=learner))


@pytest.mark.parametrize("method", [FEDGLS, "local-gnn-knn"])
def test_a_new_optimiser_every_round(method: str) -> None:
    follow(method, settings_of(method, keep_optimiser=False))
