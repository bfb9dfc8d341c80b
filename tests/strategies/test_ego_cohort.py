"""The steps of FedSCem's clients as one program, its baselines, and the figures of its tables."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ego_helpers import FEATURES, HIDDEN, PROJECTION, SETTINGS, start_of, toy_egos, toy_shared
from ego_strategy_helpers import client_app, seven_egos
from flwr.app import Context, RecordDict
from graph_helpers import Outcome
from plain.fedscem import Client, run_baseline
from torch import Tensor

from flower_graph.client.learner import NODES
from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.data.partition.client_graphs import split_global
from flower_graph.data.sources.datasets import cached_data
from flower_graph.engine.cohort import MiniBatch, epochs_of
from flower_graph.outputs.files import Snapshot, read_models
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem import (
    EgoFedAvg,
    EgoFedProx,
    EgoModelClient,
    EgoNetworkClient,
    SelfTraining,
    tables,
)
from flower_graph.strategies.fedscem.algorithm import EgoCohort, EgoGroup, Shared, train_alone
from flower_graph.strategies.fedscem.config import (
    EgoSettings,
    FedSCemConfig,
    ModelConfig,
    PartitionConfig,
    StrategyConfig,
)
from flower_graph.strategies.fedscem.method import METHOD, ego_settings
from flower_graph.strategies.fedscem.modules import first_model

SOME = [108, 101, 105]


def full_round(cohort: EgoCohort, clients: Sequence[int] | None = None) -> None:
    """Take a step of each kind."""
    egos = {ego.client: ego for ego in toy_egos()}
    with cohort.part(clients) as group:
        shared = toy_shared([egos[client] for client in group.graph.clients])
        group.train(1)
        group.fuse(shared, 1)
        group.fuse(shared, 1, variant="iter")


def by_client(cohort: EgoCohort) -> dict[int, Tensor]:
    """Return each client's weights and moments, one behind the other."""
    found = {}
    for place, client in enumerate(cohort.clients):
        index = {name: cohort._index(name, [place]) for name in cohort.tensors if "/b" not in name}
        parts = [cohort.tensors[name][at].double().flatten() for name, at in index.items()]
        found[client] = torch.cat(parts)
    return found


def group_of(egos: Sequence[ClientGraph], settings: EgoSettings = SETTINGS) -> EgoGroup:
    cohort = EgoCohort(egos, settings)
    return EgoGroup(cohort.group(cohort.clients), settings)


def test_a_choice_is_these_clients_alone_and_leaves_the_others() -> None:
    egos = toy_egos()
    cohort, alone = EgoCohort(egos, SETTINGS), EgoCohort([egos[1], egos[5], egos[8]], SETTINGS)
    full_round(cohort)
    before = by_client(cohort)
    for _ in range(3):
        full_round(cohort, SOME)
    after = by_client(cohort)
    # From here on the clients have taken different numbers of steps.
    full_round(cohort)
    mixed = by_client(cohort)
    for rounds, found in ((4, after), (1, mixed)):
        for _ in range(rounds):
            full_round(alone)
        own = {client: found[client] for client in sorted(SOME)}
        torch.testing.assert_close(own, by_client(alone), rtol=0, atol=1e-6)
    for client in set(before) - set(SOME):
        assert torch.equal(before[client], after[client])
    with pytest.raises(ValueError, match="7"), cohort.part([7]):
        pass


def test_embeddings_are_kept_until_the_weights_change() -> None:
    cohort = EgoCohort(toy_egos(), SETTINGS)
    seen = []
    for change in (lambda: None, lambda: full_round(cohort), lambda: full_round(cohort, SOME)):
        change()
        with cohort.part() as group:
            seen.append(group.embed())
            assert group.embed().data_ptr() == seen[-1].data_ptr()
    anew = EgoCohort(toy_egos(), SETTINGS, {n: t.clone() for n, t in cohort.tensors.items()})
    with anew.part() as group:
        torch.testing.assert_close(group.embed(), seen[-1], rtol=0, atol=1e-6)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_nobody_has_shared_nodes() -> None:
    nothing = Shared(torch.empty(0, dtype=torch.long), torch.empty(0, HIDDEN))
    fused, trained = group_of(toy_egos()), group_of(toy_egos())
    assert fused.fuse(nothing, 1).isnan().all()
    trained.train(1)
    torch.testing.assert_close(fused.embed(), trained.embed(), rtol=0, atol=0)
    fused.fuse(nothing, 1, variant="iter")
    assert fused.embed().isfinite().all()


def taken(cohort: EgoCohort, egos: Sequence[ClientGraph]) -> Snapshot:
    context = Context(1, 2, {"state-dir": ":memory:"}, RecordDict(), {})
    return EgoNetworkClient(context, egos, SETTINGS)._taken(cohort)


def test_the_first_layer_is_saved_by_rows_that_clients_have(tmp_path: Path) -> None:
    cohort = EgoCohort(toy_egos(), SETTINGS)
    for _ in range(3):
        full_round(cohort)
    Snapshot(None, taken(cohort, toy_egos()).models).write(tmp_path)
    (saved,) = read_models(tmp_path)
    assert saved.rows is not None
    assert saved.rows.values.shape == (cohort.rows.feature.numel(), HIDDEN)
    assert saved.shared["gnn.first.weight"].shape == (HIDDEN, FEATURES)  # once for all
    assert saved.own["projection.weight"].shape == (12, PROJECTION, HIDDEN)
    # A feature that a client has no node of is as it was when the run began.
    start = first_model(SETTINGS).gnn.first.weight.T
    for ego in toy_egos():
        has = (ego.x != 0).any(0)
        found = saved.state_dict(ego.client)["gnn.first.weight"].T
        assert torch.equal(found[~has], start[~has])
        assert not has.any() or not torch.isclose(found[has], start[has]).all()


def test_a_node_is_called_what_its_user_calls_it() -> None:
    egos = [replace(ego, called=tuple(f"n{node}" for node in ego.nodes)) for ego in toy_egos()]
    egos[2] = replace(egos[2], called=None, names=tuple("abcdef"))
    found = taken(EgoCohort(egos, SETTINGS), egos).predictions
    assert found is not None
    assert found.of_client(102).node.tolist() == list("abcdef")
    assert found.of_client(101).node.tolist() == list(egos[1].called or ())


def test_a_newcomer_that_trains_alone_is_a_plain_client() -> None:
    new = toy_egos()[8]
    found = train_alone(NewGraph(new.x, new.edge_index, new.y, **new.masks), SETTINGS, 3)
    alone = Client(new, start_of(), SETTINGS)
    for _ in range(3):
        alone.step()
    with torch.no_grad():
        expected = alone.classifier(alone.embed()).softmax(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


BATCHES = replace(SETTINGS, batch_size=3)


def batches(client: Client, among: Tensor, number: int, purpose: str) -> list[MiniBatch]:
    """Give one client's batches of its one epoch a round."""
    graph: Any = SimpleNamespace(ptr=[0, among.numel()], clients=[client.ego.client])
    sizes = BATCHES.batch_size, 1, BATCHES.seed
    return next(epochs_of(graph, among, *sizes, purpose, number))


def test_equals_plain_pyg_clients_batch_by_batch() -> None:
    """A client that has no more batches stands still: its weights, moments and count of steps."""
    chosen, shared = group_of(toy_egos(), BATCHES), toy_shared(toy_egos())
    plain = [Client(ego, start_of(), BATCHES) for ego in toy_egos()]
    for number in (1, 2):
        chosen.train(number)
        chosen.fuse(shared, number)
        chosen.fuse(shared, number + 9, variant="iter")
        for client in plain:
            means, every = toy_shared([client.ego]), torch.ones_like(client.ego.train_mask)
            for part in batches(client, client.ego.train_mask, number, "local"):
                client.step(None, part.nodes)
            for part in batches(client, every, number, "fusion"):
                client.step(means, part.nodes)
            local = batches(client, client.ego.train_mask, number + 9, "local")
            fusion = batches(client, every, number + 9, "fusion")
            for part, before in zip_longest(fusion, local):
                if before is not None:
                    client.step(None, before.nodes)
                client.step(means, part.nodes, classify=False)
    expected = torch.cat([client.embed().detach() for client in plain])
    torch.testing.assert_close(chosen.embed(), expected, rtol=0, atol=1e-5)


PROXIMAL = replace(SETTINGS, proximal=0.5, local_epochs=2)
ALONE = replace(PROXIMAL, proximal=0.0)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        (EgoFedAvg(SETTINGS), SETTINGS),
        (EgoFedAvg(PROXIMAL), ALONE),
        (EgoFedProx(PROXIMAL), PROXIMAL),
        (SelfTraining(SETTINGS), SETTINGS),
        (SelfTraining(PROXIMAL), ALONE),
    ],
)
def test_equals_dense_models(strategy: EgoFedAvg, settings: Any) -> None:
    how = {"client": EgoModelClient, "settings": strategy.ego, "averages": strategy.averages}
    grid = InProcessGrid(client_app(seven_egos(), **how), num_supernodes=3)
    outcome = Outcome(strategy, grid).run()
    assert outcome.answered == [7] * 3
    averages = strategy.averages
    model, wanted = run_baseline(seven_egos(), 3, start_of(), settings, averages=averages)
    assert outcome.losses == pytest.approx(wanted, abs=1e-5)
    found = [torch.from_numpy(value.ravel()) for value in outcome.weights.values()]
    if averages:
        torch.testing.assert_close(torch.cat(found), model, atol=1e-5, rtol=0)
    assert bool(found) == bool(strategy.payload["up"].get("weights")) == averages


CONFIG = FedSCemConfig(
    rounds=30,
    device="cpu",
    partition=PartitionConfig(clients=9, min_nodes=20, split="global"),
    model=ModelConfig(hidden=16),
    strategy=StrategyConfig(learning_rate=0.01),
)
EGOS, TABLE_SETTINGS = METHOD.graphs(CONFIG), ego_settings(CONFIG)


def test_one_client_with_the_whole_graph_is_judged_like_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the one ego-network is the whole graph, the mean over clients is its own accuracy."""
    data = cached_data(CONFIG)
    graph = {"edge_index": data.edge_index, "x": data.x, "y": data.y}
    everything = replace(EGOS[0], nodes=torch.arange(data.y.numel()), **graph)
    (whole,) = split_global([everything], data.y, CONFIG.partition.ratios, 0)
    monkeypatch.setattr(METHOD, "graphs", lambda config: [whole])
    epochs = tables.train(replace(CONFIG, rounds=3))
    with EgoCohort([whole], TABLE_SETTINGS).part() as group:
        for epoch in epochs:
            group.train(1)
            judged = group.graph.judged(group.logits())
            assert epoch.test_accuracy == pytest.approx(float(NODES.shares(judged)[2]))
            assert epoch.cross_entropy == pytest.approx(float(NODES.training_loss(judged)))


def test_costs_of_groups_by_size() -> None:
    """PyTorch's count goes on from profile to profile; a group's must not depend on the others."""
    costs, again = (tables.costs_by_size(EGOS, TABLE_SETTINGS, groups=3) for _ in range(2))
    assert [keys for keys, _ in costs] == [{"group": n, "clients": 3} for n in (1, 2, 3)]
    ordered = sorted(EGOS, key=lambda ego: ego.nodes.numel())
    for place, ((_, one), (_, two)) in enumerate(zip(costs, again, strict=True)):
        egos = ordered[3 * place : 3 * place + 3]
        assert one["nodes"] == pytest.approx(sum(ego.nodes.numel() for ego in egos) / 3)
        assert one["edges"] == pytest.approx(sum(ego.edge_index.shape[1] for ego in egos) / 6)
        assert one["seconds-per-round"] > 0
        assert one["peak-mib"] == pytest.approx(two["peak-mib"], rel=0.01)
        state = EgoCohort(egos, TABLE_SETTINGS).tensors.values()
        held = sum(tensor.numel() * tensor.element_size() for tensor in state) / 3 / 2**20
        assert held < one["peak-mib"] < 20 * held
    few = tables.costs_by_size(EGOS[:2], TABLE_SETTINGS)
    assert [keys["clients"] for keys, _ in few] == [1, 1]
