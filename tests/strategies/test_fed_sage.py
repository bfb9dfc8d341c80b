"""LocalSage+ and FedSage+: what they learn, what travels, and what goes wrong."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ego_helpers import SETTINGS, toy_egos
from ego_strategy_helpers import client_app
from flwr.app import Context, RecordDict
from graph_helpers import Outcome
from torch import Tensor
from torch.nn import functional as F

from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import placed_on
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fed_sage import algorithm
from flower_graph.strategies.fed_sage import strategy as strategy_module
from flower_graph.strategies.fed_sage.algorithm import (
    ImpairedGraph,
    distance_gradient,
    generator_loss,
)
from flower_graph.strategies.fed_sage.modules import (
    CODE,
    LATENT,
    NEIGHBOURS,
    UNTRAINED,
    SageModel,
    split_like,
)
from flower_graph.strategies.fed_sage.strategy import (
    FedSage,
    GeneratorRequest,
    LocalSage,
    SageClient,
)

FEATURES = [f"lin{n}.{part}" for n in (1, 2, 3) for part in ("weight", "bias")]  # of fGen


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let generators take three steps, alone and together."""
    monkeypatch.setattr(algorithm, "GENERATOR_EPOCHS", 3)


def networks() -> list[ClientGraph]:
    """Usual clients, and one of one node, one without edges, one that does not train."""
    return [toy_egos()[place] for place in (0, 3, 4, 5, 7, 10)]


def new_client(*, averages: bool = True) -> SageClient:
    return SageClient(Context(1, 1, {}, RecordDict(), {}), networks(), SETTINGS, averages=averages)


def learners_of(client: SageClient) -> list[Any]:
    return [*client._state.look()]


def run_sage(
    kind: type[LocalSage] = LocalSage,
    *,
    rounds: int = 4,
    supernodes: int = 2,
    egos: list[ClientGraph] | None = None,
    client: type[SageClient] = SageClient,
    settings: Any = SETTINGS,
) -> tuple[LocalSage, list[RoundReport]]:
    strategy = kind(settings)
    how = {"client": client, "settings": settings, "averages": strategy.averages}
    grid = InProcessGrid(client_app(egos or networks(), **how), num_supernodes=supernodes)
    return strategy, Outcome(strategy, grid).run(rounds).reports


def test_local_sage_sends_no_payload_and_fed_sage_all_of_it() -> None:
    assert run_sage(LocalSage)[0].payload == {"up": {"weights": 0}, "down": {"weights": 0}}
    strategy, _ = run_sage(FedSage)
    state = {name: value.numel() for name, value in strategy.shared.make().state_dict().items()}
    classifier = 4 * sum(count for name, count in state.items() if "generator" not in name)
    made = 4 * sum(state[f"generator.{name}"] for name in FEATURES)
    up, down = strategy.payload["up"], strategy.payload["down"]
    assert up["weights"] == down["weights"] > 4 * 6 * classifier
    assert up["gradients"] == 3 * 6 * 5 * made  # epochs, authors, the other clients
    assert down["gradients"] == 3 * 6 * made
    encoded = up["generators"] - 3 * 6 * made
    assert encoded > 0
    assert encoded % (3 * 4 * LATENT) == 0
    assert down["generators"] == 5 * up["generators"]


def test_fed_sage_averages_by_training_nodes() -> None:
    """One round, from one start: the mean of what each client learns alone on its own graph."""
    strategy, _ = run_sage(FedSage, rounds=1)
    alone: dict[int, Any] = {}

    class Spy(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            reply = super().fit(parameters, config)
            alone[self.graphs[0].client] = reply
            return reply

    again, _ = run_sage(FedSage, rounds=1, supernodes=6, client=Spy)
    sizes = {ego.client: max(1, int(ego.train_mask.sum())) for ego in networks()}
    assert {client: reply[1] for client, reply in alone.items()} == sizes
    for place, (name, found) in enumerate(again.weights().items()):
        mean = sum(size * alone[client][0][place] for client, size in sizes.items())
        assert found == pytest.approx(mean / sum(sizes.values()), abs=1e-6)
        assert strategy.weights()[name] == pytest.approx(found, abs=1e-6)


def test_what_others_generated_is_compared_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each author's generator is a small product of its own; the comparison is a large one."""
    threads: dict[str, set[int]] = {"features_of": set(), "distance_gradient": set()}

    def note(name: str, real: Any) -> None:
        def noting(*given: Any) -> Any:
            threads[name].add(torch.get_num_threads())
            return real(*given)

        monkeypatch.setattr(algorithm, name, noting)

    for name in threads:
        note(name, getattr(algorithm, name))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_sage(FedSage, rounds=1)
    finally:
        torch.set_num_threads(before)
    assert threads == {"features_of": {1}, "distance_gradient": {2}}


def test_a_faulty_supernode_is_named_and_left_out() -> None:
    """Of three, one sends NaN from its first training on, and fails when it is to compare."""

    class Faulty(SageClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            arrays, size, metrics = super().fit(parameters, config)
            if self.graphs[0].client == 100:
                arrays[0][:] = np.nan
            return arrays, size, metrics

        def compare(self, parameters: Any, config: Any) -> Any:
            if self.graphs[0].client == 100:
                raise RuntimeError("no room")
            return super().compare(parameters, config)

    _, (first, *rest) = run_sage(FedSage, supernodes=3, client=Faulty)
    assert any("no room" in entry["reason"] for entry in first.rejected)
    for report in rest:
        (entry,) = report.rejected
        assert "arrays/conv1.bias" in entry["reason"]
    assert [one["clients"] for one in report.participation["failed"]] == ["100,105"]
    assert math.isfinite(report.loss)


def model() -> SageModel:
    return strategy_module._shared(SETTINGS, averages=True).make()


def impaired(ego: ClientGraph) -> ImpairedGraph:
    return ImpairedGraph.of(placed_on(ego, torch.device("cpu")), SETTINGS.seed)


def test_the_gradient_is_that_of_the_cross_client_term(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(3)
    x, ptr = torch.rand(7, 4, generator=draw), [0, 3, 5, 7]
    made = torch.rand(6, 4, generator=draw).requires_grad_()
    author, clients = torch.tensor([4, 4, 8, 8, 9, 1]), torch.tensor([4, 8, 9])  # 1 is elsewhere
    total = torch.zeros(())
    for row, who in zip(made, author.tolist(), strict=True):
        for place, other in enumerate(clients.tolist()):
            if other != who:
                nodes = x[ptr[place] : ptr[place + 1]]
                total = total + (row - nodes).square().sum(1).min()
    (wanted,) = torch.autograd.grad(total, made)
    for table in (algorithm.TABLE, 14):  # in one go, and two generated nodes at a time
        monkeypatch.setattr(algorithm, "TABLE", table)
        found = distance_gradient(made.detach(), author, x, ptr, clients)
        torch.testing.assert_close(found, wanted)


def dense_gcn(edges: Tensor, n: int) -> Tensor:
    linked = torch.eye(n)
    linked[edges[1], edges[0]] = 1
    root = linked.sum(1).rsqrt()
    return root[:, None] * linked * root


def slow_generator_loss(own: dict[str, Tensor], ego: ClientGraph, noise: Tensor) -> Tensor:
    """The loss node by node, with dense matrices."""
    graph = impaired(ego)
    kept, missing, edges = graph.impaired.kept, graph.impaired.missing, graph.impaired.edge_index
    x, y, train = ego.x[kept], ego.y[kept], ego.train_mask[kept]

    def linear(layer: str, rows: Tensor) -> Tensor:
        return rows @ own[f"{layer}.weight"].T + own[f"{layer}.bias"]

    def convolve(layer: str, rows: Tensor, adjacency: Tensor) -> Tensor:
        return torch.relu(adjacency @ rows @ own[f"{layer}.lin.weight"].T + own[f"{layer}.bias"])

    n = kept.numel()
    z = convolve("generator.conv1", x, dense_gcn(edges, n))
    z = convolve("generator.conv2", z, dense_gcn(edges, n))
    numbers = torch.relu(linear("generator.number", z))[:, 0]
    loss = F.smooth_l1_loss(numbers, missing.float())
    codes = torch.relu(linear("generator.lin2", torch.relu(linear("generator.lin1", z + noise))))
    made = torch.tanh(linear("generator.lin3", codes.view(-1, NEIGHBOURS, CODE)))
    rows, linked = [x], [edges]
    for node in range(kept.numel()):
        is_hidden = torch.ones(ego.x.shape[0], dtype=torch.bool)
        is_hidden[kept] = False
        neighbours = ego.edge_index[1, ego.edge_index[0] == kept[node]]
        hidden = neighbours[is_hidden[neighbours]]
        for place in range(min(NEIGHBOURS, hidden.numel())):
            nearest = (made[node, place] - ego.x[hidden]).square().sum(1).min()
            loss = loss + nearest / kept.numel()
        for place in range(min(NEIGHBOURS, int((numbers[node] + 0.5).floor()))):
            rows.append(made[node, place][None])
            linked.append(torch.tensor([[node, n], [n, node]]))
            n += 1
    hidden_rows, adjacency = torch.cat(rows), dense_gcn(torch.cat(linked, 1), n)
    hidden_rows = convolve("conv2", convolve("conv1", hidden_rows, adjacency), adjacency)
    logits = linear("classifier", hidden_rows[: kept.numel()])
    return loss + (F.cross_entropy(logits[train], y[train]) if train.any() else 0.0)


@pytest.mark.parametrize("place", range(len(networks())))
def test_generator_loss_equals_a_slow_one_with_its_gradient(place: int) -> None:
    ego, trained = networks()[place], model().requires_grad_()
    graph = impaired(ego)
    noise = trained.generator.noise(ego.client, "together", 1, torch.empty(len(graph.rest), LATENT))
    own = dict(trained.named_parameters())
    loss, slow = generator_loss(trained, graph, noise), slow_generator_loss(own, ego, noise)
    torch.testing.assert_close(loss, slow, atol=1e-5, rtol=1e-4)
    found = torch.autograd.grad(loss, list(own.values()))
    wanted = torch.autograd.grad(slow, list(own.values()), allow_unused=True)
    for grad, exact in zip(found, wanted, strict=True):
        exact = torch.zeros_like(grad) if exact is None else exact
        torch.testing.assert_close(grad, exact, atol=1e-5, rtol=1e-4)


def test_learning_together_follows_the_mean_of_own_and_foreign_gradients() -> None:
    """With Adam's first step the weights move by its rate against the sign of the gradient."""
    egos, client = networks(), new_client()
    first = GeneratorRequest(0, share=True)
    shown, _, entries = client.generate(*first.to_numpy()[::2])
    (gradient,), *_ = client.compare(shown, entries)
    before = [dict(one.module.generator.named_parameters()) for one in learners_of(client)]
    before = [{n: p.detach().clone() for n, p in own.items()} for own in before]
    grads = []
    for ego, one in zip(egos, learners_of(client), strict=True):
        graph, made_by = impaired(ego), one.module.generator
        noise = made_by.noise(ego.client, "together", 1, torch.empty(len(graph.rest), LATENT))
        loss = generator_loss(one.module, graph, noise)
        grads.append(torch.autograd.grad(loss, made_by.feature_weights()))
    request = GeneratorRequest(1, share=False, gradient=gradient, others=5)
    client.generate(*request.to_numpy()[::2])
    for place, (ego, one) in enumerate(zip(egos, learners_of(client), strict=True)):
        nodes = len(impaired(ego).rest)
        others = split_like(torch.from_numpy(gradient[place]), grads[place])
        for name, grad, other in zip(FEATURES, grads[place], others, strict=True):
            mean = (grad + other / nodes) / 6
            mean = mean + 1e-4 * before[place][name]  # weight decay
            moved = one.module.generator.get_parameter(name) - before[place][name]
            clear = mean.abs() > 1e-5
            torch.testing.assert_close(
                moved[clear], -1e-3 * mean.sign()[clear], atol=5e-6, rtol=5e-3
            )
        for name, value in one.module.generator.named_parameters():
            assert name in FEATURES or torch.equal(value, before[place][name]), name


def test_a_client_that_trains_has_a_generator_and_its_classifier_starts_again() -> None:
    client, begun = new_client(averages=False), model()
    assert all(one.module.generator.client == UNTRAINED for one in learners_of(client))
    client.evaluate([], {"server-round": 1})
    for ego, one in zip(networks(), learners_of(client), strict=True):
        graph, generator = impaired(ego), one.module.generator
        noise = generator.noise(ego.client, "local", 0, torch.empty(len(graph.rest), LATENT))
        assert int(generator.client) == ego.client
        assert generator_loss(one.module, graph, noise) < generator_loss(begun, graph, noise)
        for name, value in begun.state_dict().items():
            if "generator" not in name:
                assert torch.equal(one.module.state_dict()[name], value), name
    generators = [one.module.generator.lin1.weight.clone() for one in learners_of(client)]
    client.fit([], {"server-round": 1})
    for one, kept in zip(learners_of(client), generators, strict=True):
        assert torch.equal(one.module.generator.lin1.weight, kept)
        assert not torch.equal(one.module.conv1.lin.weight, begun.conv1.lin.weight)


def test_classifiers_train_by_batches() -> None:
    def figures(size: int | None, supernodes: int = 2) -> Tensor:
        settings = replace(SETTINGS, batch_size=size)
        _, reports = run_sage(settings=settings, supernodes=supernodes, rounds=2)
        names = ("loss", "train_accuracy", "val_accuracy", "test_accuracy", "answered")
        return torch.tensor([[getattr(one, name) for name in names] for one in reports])

    whole, batched = figures(None), figures(2)
    assert torch.equal(whole, figures(16))
    assert not torch.allclose(whole[:, 0], batched[:, 0], atol=1e-3)
    torch.testing.assert_close(batched, figures(2, supernodes=6), rtol=0, atol=1e-5)
