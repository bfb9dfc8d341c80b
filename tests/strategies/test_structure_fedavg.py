"""FedGLS and its baselines in process: against plain clients, however they are assigned."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federation import round_of
from flwr.app import Array, Context, Message, RecordDict
from plain.fedgls import Client, Drops, Federation
from structure_helpers import (
    METHODS,
    Outcome,
    assert_as_plain,
    assert_judged_as_plain,
    client_app,
    close,
    cohort_of,
    layers_of,
    plain_federation,
    run,
    settings_of,
    toy_clients,
)

from flower_graph.data.graph import ClientGraph
from flower_graph.ops.dropout import draw_mask
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.config import FEDGLS, StructureSettings
from flower_graph.strategies.fedgls.modules import LEARNER

ROUNDS = 3
SIMILARITIES = ("cosine", "euclidean", "inner")


def drops_of(own: StructureSettings, number: int) -> Callable[[Client, int], Drops]:
    """Read what dropout leaves of each client in a round, whoever shares its cohort."""
    how, steps = own.model, own.strategy.local_epochs

    def drops(client: Client, model: int) -> Drops:
        x, rng = client.x, generator(own.seed, "dropout", client.graph.client, model == 1, number)
        inputs, hidden = Drops()
        if how.input_dropout:
            inputs = torch.zeros(steps, *x.shape)
            kept = draw_mask((steps, int((x != 0).sum())), how.input_dropout, rng)
            inputs[:, x != 0] = kept
        if how.dropout:
            hidden = draw_mask((steps, len(x), how.hidden), how.dropout, rng)
        return Drops(inputs, hidden)

    return drops


def assert_as_one_by_one(
    own: StructureSettings, deal: list[list[int]], rounds: int = ROUNDS
) -> None:
    """Run a method and hold all that it leaves and reports against plain clients."""
    outcome = run(own, rounds=rounds, supernodes=len(deal), deal=deal)
    federation = plain_federation(own)
    for number in range(1, rounds + 1):
        federation.train(drops_of(own, number))
        federation.average()
    assert_as_plain(outcome, federation)
    assert_judged_as_plain(outcome, federation.clients)
    contrast = [client.contrast for client in federation.clients if client.learner is not None]
    last = outcome.reports[-1]
    close(torch.tensor(last.regulariser), torch.tensor(contrast).mean())  # NaN without learners
    assert (last.asked, last.answered, last.rejected) == (6, 6, [])
    has_graphs = own.strategy.name in (FEDGLS, "fed-gnn-knn")
    assert all(bool(report.structure) == has_graphs for report in outcome.reports)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("deal", [[range(6)], [[4], [1, 2], [3, 0], [5]]])
def test_twenty_steps_are_those_of_the_plain_reference(method: str, deal: list[list[int]]) -> None:
    assert_as_one_by_one(settings_of(method, strategy={"local_epochs": 4}), deal, rounds=5)


DROPOUT = {"model": {"dropout": 0.5, "input_dropout": 0.25}}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, DROPOUT) for method in (FEDGLS, "fed-gnn-mlp")),
        *((method, {"strategy": {"optimiser": "reset"}}) for method in (FEDGLS, "fed-gnn-knn")),
        *((FEDGLS, {"graph": {"similarity": name, "layers": 1}}) for name in SIMILARITIES[1:]),
        # By distance: nodes with one number above 0 all have a cosine of 1, and rounding decides
        ("fed-gnn-knn", {"graph": {"knn_on": "encoder", "similarity": "euclidean"}}),
        # kNN graphs compare the features as they are, whatever the encoder.
        *(
            ("fed-gnn-knn", {"graph": {"encoder": "mlp", "similarity": name}})
            for name in SIMILARITIES
        ),
    ],
)
def test_other_settings_give_what_plain_clients_give(method: str, changes: dict[str, Any]) -> None:
    assert_as_one_by_one(settings_of(method, **changes), [[0, 3, 4], [5, 1, 2]])


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_the_gradient_of_every_graph_learner(encoder: str, layers: int, similarity: str) -> None:
    # After one step Adam's first moment is a tenth of the gradient. The weights themselves say
    # little: where a dead unit makes the gradient zero, Adam takes a full step along its rounding.
    chosen = {"encoder": encoder, "layers": layers, "similarity": similarity, "width": 16}
    own, largest = settings_of(graph=chosen), 0.0
    (cohort,), federation = run(own, rounds=1, supernodes=1).cohorts, plain_federation(own)
    federation.train()
    for place, client in enumerate(federation.clients):
        if client.learner is not None:
            grads = torch.cat([part.grad.flatten() for part in client.learner.parts])
            at, first = cohort.rows.at([place]), cohort.tensors["learner-first/exp_avg"]
            moments = {"learner-first": torch.zeros(own.num_features, first.shape[1])}
            moments["learner-first"][cohort.rows.feature[at]] = first[at]
            if "learner-rest" in cohort.tensors:
                moments["learner-rest"] = cohort.tensors["learner-rest/exp_avg"][place]
            close(10 * torch.cat([part.flatten() for part in layers_of(moments, own)]), grads)
            largest = max(largest, float(grads.abs().max()))
    assert largest > 1e-3


def only(graphless: bool) -> list[ClientGraph]:
    return [graph for graph in toy_clients() if graph.is_graphless == graphless]


def test_fed_gnn_mlp_where_all_have_edges_is_fed_gnn() -> None:
    own = settings_of("fed-gnn-mlp")
    one, other = (run(how, graphs=only(False)) for how in (own, settings_of("fed-gnn")))
    close(one.figures, other.figures)
    start = run(own, graphs=only(False), rounds=1).arrays
    for name in ("encoder-first", "encoder-rest"):
        assert torch.equal(one.arrays[name], start[name])  # nobody's: they stay
    assert one.arrays["gnn-rest"].isfinite().all()


def assert_went_well(outcome: Outcome) -> None:
    assert outcome.figures[:, 0].isfinite().all()
    assert all(part.isfinite().all() for own in outcome.clients.values() for part in own.values())
    assert all(report.rejected == [] for report in outcome.reports)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("graphless", [True, False])
def test_one_client_alone(method: str, graphless: bool) -> None:
    assert_went_well(run(settings_of(method), graphs=only(graphless)[:1], supernodes=1))


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "inner"])
def test_constant_features_make_some_graph(similarity: str, value: float) -> None:
    graphs = [
        replace(g, x=torch.full_like(g.x.to_dense(), value)) if g.client != 20 else g
        for g in toy_clients()
    ]
    assert_went_well(run(settings_of(graph={"similarity": similarity}), graphs=graphs))


NOT_FINITE = "weights are not finite"
Mod = Callable[[Message, Context, Callable[..., Message]], Message]


def poisoned(clients: Sequence[int], number: int = 2) -> Mod:
    """Make a mod that spoils what Adam keeps of clients: the next step makes their weights NaN."""

    def mod(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        if message.metadata.message_type == "train" and round_of(message) == number:
            cohort = cohort_of(context)
            gone = [at for at, one in enumerate(cohort) if one.graph.client in clients]
            for part in ("gnn-rest", "encoder-rest"):
                if f"{part}/exp_avg" in cohort.tensors:
                    cohort.tensors[f"{part}/exp_avg"][gone] = torch.nan
        return call_next(message, context)

    return mod


def plain_without(own: StructureSettings, *bad: int) -> Federation:
    """One client at a time: in round 2 some have no part in the mean, and begin anew."""
    federation = plain_federation(own)
    for number in (1, 2, 3):
        federation.train()
        left_out = bad if number == 2 else ()
        for client in federation.clients:
            if client.graph.client in left_out:  # begins anew
                client.__init__(client.graph, own, federation.models, federation.phi)
        federation.average(left_out)
    return federation


@pytest.mark.parametrize(
    ("method", "supernodes"), [(FEDGLS, 6), *((method, 2) for method in METHODS)]
)
def test_a_client_that_diverges_is_named_and_recovers(method: str, supernodes: int) -> None:
    own = settings_of(method)
    outcome = run(own, app=client_app(own, mods=[poisoned([22])]), supernodes=supernodes)
    ((place, why),) = outcome.reasons(2)
    assert place == 2 % supernodes
    assert f"22: {NOT_FINITE}" in why or f"clients [22]: {NOT_FINITE}" in why
    assert outcome.reasons(1) == outcome.reasons(3) == []
    assert_as_plain(outcome, plain_without(own, 22))
    assert outcome.figures[:, [0, 2, 3, 4]].isfinite().all()


def numbers(content: RecordDict) -> list[np.ndarray]:
    """Give all that can be read as numbers, bytes too."""
    values = [value for record in content.values() for value in record.values()]
    found = [value.numpy() if isinstance(value, Array) else np.asarray(value) for value in values]
    found += [np.frombuffer(v, np.float32) for v in values if isinstance(v, bytes)]
    return [one.astype(np.float32).ravel() for one in found if one.dtype.kind in "iuf"]


@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_nothing_of_the_graph_learner_leaves_its_client(encoder: str) -> None:
    own = settings_of(graph={"encoder": encoder})
    said, learned, shapes = list[np.ndarray](), list[np.ndarray](), set[tuple[int, ...]]()

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        reply: Message = call_next(message, context)
        for content in (message.content, reply.content):
            said.extend(numbers(content))
            for record in content.array_records.values():
                shapes.update(tuple(array.shape) for array in record.values())
        if message.metadata.message_type != "query":  # nobody has learnt anything yet
            for one in cohort_of(context):
                state = one.module.state_dict()
                parts = [state[name] for name in state if name.startswith(LEARNER)]
                learned.extend(part.clone().flatten().numpy() for part in parts)
        return reply

    run(own, app=client_app(own, mods=[spy]), supernodes=3)
    assert shapes == {(8, 5), (5 + 5 * 4 + 4,)}
    secret = np.setdiff1d(np.concatenate(learned), [0.0, 1.0])  # an attentive one starts with ones
    assert secret.size > 20 and not np.isin(np.concatenate(said), secret).any()
