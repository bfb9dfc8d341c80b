"""FedGLS and its baselines in process: against plain clients, however they are assigned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_structure import FEDGLS, METHODS, Drops, MakeDrops, PlainFederation
from structure_helpers import (
    SETTINGS,
    Outcome,
    assert_as_plain,
    assert_judged_as_plain,
    client_app,
    close,
    cohort_of,
    run,
    settings_of,
    toy_clients,
)

from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.cohort import StructureCohort
from flower_graph.strategies.fedgls.networks import StructureSettings
from flower_graph.strategies.fedgls.strategy import initial_arrays

ROUNDS = 3
SIMILARITIES = ("cosine", "euclidean", "inner")


def drops_of(own: StructureSettings) -> MakeDrops:
    """Read what the engine's dropout leaves; of each client, whoever shares its cohort."""
    cohort = StructureCohort(toy_clients(), own)
    features = {graph.client: graph.x.to_dense() for graph in toy_clients()}

    def drops(client: int, model: int, number: int) -> Drops:
        kept, batch, x = cohort._dropout(number), cohort.batch, features[client]
        place = cohort.clients.index(client) + model * cohort.size
        nodes = slice(batch.ptr[place], batch.ptr[place + 1])
        inputs, hidden = torch.ones(1, 1, 1), torch.ones(1, 1, 1)
        if kept.hidden is not None:
            hidden = kept.hidden[:, nodes]
        if kept.inputs is not None:
            begin, end = batch.x.matrix.crow_indices()[[nodes.start, nodes.stop]].tolist()
            inputs = torch.zeros(kept.inputs.shape[0], *x.shape)
            inputs[:, x != 0] = kept.inputs[:, begin:end]
        return Drops(inputs, hidden)

    return drops


@lru_cache
def plain(method: str, own: StructureSettings) -> PlainFederation:
    """What the method gives after some rounds, one client at a time."""
    federation = PlainFederation(toy_clients(), method, own, drops_of(own))
    for number in range(1, ROUNDS + 1):
        federation.round(number)
    return federation


def assert_as_one_by_one(method: str, own: StructureSettings, deal: list[list[int]]) -> None:
    """Run a method and hold all that it leaves and reports against plain clients."""
    outcome = run(method, rounds=ROUNDS, supernodes=len(deal), deal=deal, settings=own)
    federation = plain(method, own)
    assert_as_plain(outcome, federation)
    assert_judged_as_plain(outcome, federation.clients)
    contrast = [client.contrast for client in federation.clients if client.learner is not None]
    last = outcome.reports[-1]
    close(torch.tensor(last.regulariser), torch.tensor(contrast).mean())  # NaN without learners
    assert (last.asked, last.answered, last.rejected) == (6, 6, [])
    has_graphs = method == FEDGLS or method.endswith("-knn")
    assert all(bool(report.structure) == has_graphs for report in outcome.reports)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=3)
@given(place=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_any_dealing_gives_what_plain_clients_give(method: str, place: list[int]) -> None:
    hosts = sorted(set(place))
    deal = [[client for client in range(6) if place[client] == host] for host in hosts]
    assert_as_one_by_one(method, settings_of(method), deal)


DROPOUT = {"dropout": 0.5, "input_dropout": 0.25}
MLP = SETTINGS.learner._replace(encoder="mlp")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, DROPOUT) for method in METHODS),
        *((method, {"keep_optimiser": False}) for method in (FEDGLS, "local-gnn-knn")),
        *(
            (FEDGLS, {"learner": SETTINGS.learner._replace(similarity=name, layers=1)})
            for name in SIMILARITIES[1:]
        ),
        # kNN graphs compare the features as they are, whatever the encoder.
        *(("local-gnn-knn", {"learner": MLP._replace(similarity=name)}) for name in SIMILARITIES),
    ],
)
def test_other_settings_give_what_plain_clients_give(method: str, changes: dict[str, Any]) -> None:
    assert_as_one_by_one(method, settings_of(method, **changes), [[0, 3, 4], [5, 1, 2]])


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_losses_and_the_gradient_of_every_graph_learner(
    encoder: str, layers: int, similarity: str
) -> None:
    # After one step Adam's first moment is a tenth of the gradient. The weights themselves say
    # little: where a dead unit makes the gradient zero, Adam takes a full step along its rounding.
    chosen = {"encoder": encoder, "layers": layers, "similarity": similarity}
    own = settings_of(FEDGLS, learner=SETTINGS.learner._replace(width=16, **chosen))
    cohort = StructureCohort(toy_clients(), own)
    federation = PlainFederation(toy_clients(), FEDGLS, own)
    cohort.start_from(federation.models)
    trained = cohort.train(1)
    federation.train(1)
    plain_of = {client.graph.client: client for client in federation.clients}
    every = [plain_of[number] for number in cohort.clients]
    close(trained.distillation, torch.tensor([client.distillation for client in every]))
    learning = [client for client in every if client.learner is not None]
    close(trained.contrast, torch.tensor([client.contrast for client in learning]))
    assert cohort.learners is not None
    state, ptr, largest = cohort.learners.tensors(), cohort.learners.batch.row_ptr, 0.0
    for place, client in enumerate(learning):
        grads, has = [part.grad for part in client.learner.parts], (client.x != 0).any(0)
        first, *rest = grads if encoder == "mlp" else [torch.stack(grads, 1)]
        close(10 * state["exp-avg.first"][ptr[place] : ptr[place + 1]], first[has])
        close(
            10 * state["exp-avg.rest"][place], torch.cat([torch.zeros(0), *map(torch.ravel, rest)])
        )
        largest = max(largest, *(float(grad.abs().max()) for grad in grads))
    assert largest > 1e-3


def test_local_training_sends_no_number_of_a_model() -> None:
    outcome = run("local-gnn-knn", rounds=2)
    assert outcome.arrays == {}
    assert sum(outcome.strategy.payload["up"].values()) == 0
    assert sum(outcome.strategy.payload["down"].values()) == 0


# Odd clients: one kind alone, one client, no graph to be made ------------------------------------


def only(graphless: bool) -> list[ClientGraph]:
    return [graph for graph in toy_clients() if graph.is_graphless == graphless]


def test_fed_gnn_mlp_where_all_have_edges_is_fed_gnn() -> None:
    one = run("fed-gnn-mlp", graphs=only(False))
    other = run("fed-gnn", graphs=only(False))
    close(one.figures, other.figures)
    start = run("fed-gnn-mlp", graphs=only(False), rounds=1).arrays
    for name in ("encoder-first", "encoder-rest"):
        assert torch.equal(one.arrays[name], start[name])  # nobody's: they stay
    assert one.arrays["gnn-rest"].isfinite().all()


def test_fedproto_knows_no_prototype_of_a_class_that_nobody_has() -> None:
    outcome = run("fedproto", supernodes=3)
    assert (outcome.arrays["prototypes-share"] > 0).tolist() == [True, True, True, False]
    assert (outcome.arrays["prototypes"][3] == 0).all()


def assert_went_well(outcome: Outcome) -> None:
    assert outcome.figures[:, 0].isfinite().all()
    assert all(part.isfinite().all() for parts in outcome.learners.values() for part in parts)
    assert all(report.rejected == [] for report in outcome.reports)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graphless", [True, False])
def test_one_client_alone(method: str, graphless: bool) -> None:
    assert_went_well(run(method, graphs=only(graphless)[:1], supernodes=1))


# Clients that no graph can be made for -----------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "inner"])
def test_constant_features_make_some_graph(similarity: str, value: float) -> None:
    own = settings_of(FEDGLS)
    own = own._replace(learner=own.learner._replace(similarity=similarity))
    graphs = [
        replace(g, x=torch.full_like(g.x.to_dense(), value)) if g.client != 20 else g
        for g in toy_clients()
    ]
    assert_went_well(run(graphs=graphs, settings=own))


NOT_FINITE = "weights are not finite"
Mod = Callable[[Message, Context, Callable[..., Message]], Message]


def poisoned(clients: Sequence[int], number: int = 2) -> Mod:
    """Make a mod that spoils what Adam keeps of clients: the next step makes their weights NaN."""

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        if is_train(message, number):
            cohort = cohort_of(context)
            gone = [place for place, one in enumerate(cohort.batch.clients) if one in clients]
            cohort.tensors()["exp-avg.rest"][gone] = torch.nan
        return call_next(message, context)

    return mod


def is_train(message: Message, number: int) -> bool:
    kind = message.metadata.message_type
    return kind == "train" and message.content["config"]["server-round"] == number


@lru_cache
def plain_without(method: str, *bad: int) -> PlainFederation:
    """One client at a time: in round 2 some have no part in the mean, and begin anew."""
    federation = PlainFederation(toy_clients(), method, settings_of(method))
    for number in (1, 2, 3):
        federation.train(number)
        left_out = bad if number == 2 else ()
        for client in federation.clients:
            if client.graph.client in left_out:
                restart(client, federation)
        federation.average(left_out)
    return federation


def restart(client: Any, federation: PlainFederation) -> None:
    """Begin anew, from the models that all began with where there are no shared ones."""
    fresh = PlainFederation([client.graph], federation.method, client.settings)
    for net, new in zip(client.nets, fresh.clients[0].nets, strict=True):
        net.load(new.start)
        net.new_optimiser()


@pytest.mark.parametrize(
    ("method", "supernodes"), [(FEDGLS, 6), *((method, 2) for method in METHODS)]
)
def test_a_client_that_diverges_is_named_and_recovers(method: str, supernodes: int) -> None:
    app = client_app(method, mods=[poisoned([22])])
    outcome = run(method, app=app, supernodes=supernodes)
    ((place, why),) = outcome.reasons(2)
    assert place == 2 % supernodes
    assert f"22: {NOT_FINITE}" in why or f"clients [22]: {NOT_FINITE}" in why
    assert outcome.reasons(1) == outcome.reasons(3) == []
    assert_as_plain(outcome, plain_without(method, 22))
    assert outcome.figures[:, [0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("supernodes", [1, 6])
def test_a_round_in_which_everybody_diverges(supernodes: int) -> None:
    everyone = range(20, 26)
    outcome = run(app=client_app(FEDGLS, mods=[poisoned(everyone)]), supernodes=supernodes)
    assert len(outcome.reasons(2)) == supernodes
    assert all(f"{NOT_FINITE}; nobody is left" in why for _, why in outcome.reasons(2))
    assert outcome.reports[1].skipped.startswith("none of ")
    assert outcome.reports[1].loss == pytest.approx(outcome.reports[0].loss, abs=0.1)
    assert outcome.reasons(3) == []
    assert_as_plain(outcome, plain_without(FEDGLS, *everyone))


def test_flowers_fedavg_is_ours() -> None:
    grid = InProcessGrid(client_app(FEDGLS), num_supernodes=2)  # a sum of two has no order
    result = FedAvg().start(grid, initial_arrays(settings_of(FEDGLS)), num_rounds=3)
    ours, found = run(rounds=3, supernodes=2), result.arrays
    assert found is not None
    for name, values in ours.arrays.items():
        assert torch.equal(torch.from_numpy(found[name].numpy()), values)
    losses = [metrics["loss"] for metrics in result.evaluate_metrics_clientapp.values()]
    assert losses == pytest.approx([report.loss for report in ours.reports], abs=1e-7)
