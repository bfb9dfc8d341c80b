"""FedGLS against the plain reference; its models, newcomers and figures."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import round_of
from flwr.app import Array, Context, Message, RecordDict
from graph_helpers import Largest
from plain import fedgls as plain
from plain.fedgls import Client, Drops, Federation
from structure_helpers import (
    METHODS,
    SETTINGS,
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

from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.errors import DataError, OutputError
from flower_graph.method.load import load_config
from flower_graph.ops.dropout import draw_mask
from flower_graph.ops.graph_learner import edge_agreement
from flower_graph.outputs.build import build_module, form_of
from flower_graph.outputs.files import SavedModels
from flower_graph.rng import generator
from flower_graph.strategies.fedgls import modules
from flower_graph.strategies.fedgls.algorithm import LEARNER
from flower_graph.strategies.fedgls.config import FEDGLS, StructureSettings
from flower_graph.strategies.fedgls.method import METHOD
from flower_graph.strategies.fedgls.strategy import StructureClient

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


@pytest.mark.parametrize(
    ("method", "deal"),
    [(FEDGLS, [range(6)]), *((method, [[4], [1, 2], [3, 0], [5]]) for method in METHODS)],
)
def test_twenty_steps_are_those_of_the_plain_reference(method: str, deal: list[list[int]]) -> None:
    assert_as_one_by_one(settings_of(method, strategy={"local_epochs": 4}), deal, rounds=5)


RESET = (FEDGLS, "fed-gnn-knn", "fed-gnn-mlp")
DROPOUT = {"model": {"dropout": 0.5, "input_dropout": 0.25}}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, DROPOUT) for method in (FEDGLS, "fed-gnn-mlp")),
        *((method, {"strategy": {"optimiser": "reset"}}) for method in RESET),
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
@pytest.mark.parametrize(("encoder", "layers"), [("attentive", 3), ("mlp", 1), ("mlp", 3)])
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


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_features_make_some_graph(value: float) -> None:
    """Of one client, and of all but one."""
    graphs = [
        replace(g, x=torch.full_like(g.x.to_dense(), value)) if g.client != 20 else g
        for g in toy_clients()
    ]
    for outcome in (run(graphs=graphs), run(graphs=graphs[1:2], supernodes=1)):
        assert outcome.figures[:, 0].isfinite().all()
        assert all(p.isfinite().all() for own in outcome.clients.values() for p in own.values())
        assert all(report.rejected == [] for report in outcome.reports)


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


@pytest.mark.parametrize(("method", "supernodes"), [(FEDGLS, 6), (FEDGLS, 2), ("fed-gnn-mlp", 2)])
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


def test_nothing_of_the_graph_learner_leaves_its_client() -> None:
    own = settings_of(graph={"encoder": "mlp"})
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


def changed(place: int, **values: Any) -> list[ClientGraph]:
    graphs = toy_clients()
    graphs[place] = replace(graphs[place], **values)
    return graphs


@pytest.mark.parametrize("method", [FEDGLS, "fed-gnn-knn"])
def test_learned_graphs_against_the_true_ones(method: str) -> None:
    own = settings_of(method)
    report, federation = run(own, rounds=1).reports[-1], plain_federation(own)
    federation.train()
    federation.average()
    wanted = []
    for client in (one for one in federation.clients if one.graph.is_graphless):
        learned, y = (client.adjacency > 0).nonzero().T, client.graph.y
        wanted.append(edge_agreement(learned, client.graph.hidden_edges, y, [0, len(y)]))
    assert report.structure.keys() == wanted[0].keys()
    for name, value in report.structure.items():
        assert value == pytest.approx(float(torch.cat([one[name] for one in wanted]).nanmean()))


def test_graphs_are_not_compared_where_nobody_knows_the_true_ones() -> None:
    graphs = changed(3, hidden_edges=None)
    assert run(graphs=graphs, supernodes=1, rounds=1).reports[0].structure == {}
    with_edges = [graph for graph in graphs if not graph.is_graphless]
    assert run(graphs=with_edges, supernodes=1, rounds=1).reports[0].structure == {}
    with pytest.raises(ValueError, match="client 23"):
        StructureClient(Context(1, 2, {}, RecordDict(), {}), graphs, settings_of("fed-gnn"))


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        ([], "graphs"),
        (changed(1, client=20), "numbers.*20, 20"),
        (changed(1, x=torch.ones(7, 9)), "client 21.*9"),
        (changed(1, y=torch.full((7,), 4)), "client 21.*4"),
    ],
)
def test_clients_that_do_not_fit_are_refused(graphs: list[ClientGraph], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StructureClient(Context(1, 2, {}, RecordDict(), {}), graphs, SETTINGS)


@pytest.mark.parametrize("encoder", ["attentive", "mlp"])
def test_a_step_holds_no_matrix_of_nodes_times_nodes(encoder: str) -> None:
    n, f = 4000, 12
    own = settings_of(graph={"encoder": encoder})._replace(num_features=f)
    x = torch.rand(n, f, generator=torch.Generator().manual_seed(1))
    model = modules.first_model(own).on(x * (x > 0.5), None)
    model.logits()
    with Largest() as largest:
        model.contrast()[0].sum().backward()
        model.logits()
    assert n * f // 2 <= largest.numbers <= n * n // 50


def trained(
    settings: StructureSettings, graphs: list[ClientGraph] | None = None
) -> tuple[list[SavedModels], plain.Federation]:
    """Give the models of clients after three rounds, and plain clients that did the same."""
    graphs = toy_clients() if graphs is None else graphs
    (cohort,) = run(settings, graphs=graphs, supernodes=1).cohorts
    federation = plain_federation(settings, graphs)
    for _ in range(3):
        federation.train()
        federation.average()
    forms = [form_of(one.module, modules.StructureModel, one.graph.client) for one in cohort]
    return SavedModels.join(forms), federation


# By distance: nodes with one number above 0 all have a cosine of 1, and rounding decides
IN_HIDDEN = {"knn_on": "encoder", "similarity": "euclidean"}
LEARNERS: list[dict[str, Any]] = [
    {"similarity": "euclidean", "layers": 1},
    {"encoder": "mlp"},
    {"encoder": "mlp", "layers": 1, "similarity": "inner"},
]


@pytest.mark.parametrize(
    ("method", "learner"),
    [
        *((method, {}) for method in (FEDGLS, "fed-gnn")),
        *((FEDGLS, learner) for learner in LEARNERS),
        ("fed-gnn-knn", IN_HIDDEN),
    ],
)
def test_saved_models_compute_what_the_clients_do(method: str, learner: dict[str, Any]) -> None:
    (cohort,) = run(settings_of(method, graph=learner), supernodes=1).cohorts
    forms = [form_of(one.module, modules.StructureModel, one.graph.client) for one in cohort]
    with torch.no_grad(), cohort.learners([20, 21, 22, 23, 24, 25]) as (group,):
        logits = group.module.logits().split([len(graph.y) for graph in toy_clients()])
    for form, graph, wanted in zip(forms, toy_clients(), logits, strict=True):
        edges = graph.hidden_edges if method == "fed-gnn" and graph.is_graphless else None
        edges = graph.edge_index if edges is None else edges
        close(build_module(form)(graph.x.to_dense(), edges), wanted)


def test_a_mean_is_there_once_and_phi_for_each_client() -> None:
    (form,), _ = trained(SETTINGS)
    assert {*form.shared} == {"gnn-first", "gnn-rest", "encoder-first", "encoder-rest"}
    assert {*form.own} == {"learner-first"}
    # Nobody has the last feature: its row is the first one
    assert torch.equal(form.shared["gnn-first"][-1], modules.first_model(SETTINGS)["gnn-first"][-1])
    phi = form.state_dict(24)["learner-first"]
    assert torch.equal(phi[[0, -1]], torch.ones(2, 2)) and bool((phi[1:-1] != 1).all())


NEW = toy_clients()[0]  # with edges; the run has the others
STEPS = 4


def given(*, edges: bool) -> NewGraph:
    x = NEW.x.to_dense()
    return NewGraph(x, NEW.edge_index if edges else None, torch.full((len(x),), -1))


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_is_a_client_with_the_runs_models(method: str, edges: bool) -> None:
    settings = settings_of(method)
    (form,), federation = trained(settings, toy_clients()[1:])
    model = build_module(form)
    assert isinstance(model, modules.StructureModel)
    modules.draw_learner(model, settings.graph, 0)
    if method == "fed-gnn" and not edges:
        with pytest.raises(DataError):
            modules.predict(model, given(edges=edges), STEPS)
        return
    graph = NEW if edges else replace(NEW, edge_index=None, hidden_edges=NEW.edge_index)
    (client,) = plain_federation(settings, [graph]).clients
    client.begin(federation.models)
    for _ in range(STEPS if client.learner is not None else 0):
        client.learn()
    wanted = client.nets[0](client.x, client.adjacency).detach()
    close(modules.predict(model, given(edges=edges), STEPS), wanted, atol=2e-5)


def test_whose_model_it_is_is_known_where_there_is_one() -> None:
    config = load_config("fedgls/cora-linqs", ["graph.neighbours=2"])
    (form,), _ = trained(SETTINGS, toy_clients()[1:])
    graph = given(edges=False)
    alone = SavedModels(form.module, form.arguments, [21], form.state_dict(21), {})
    found: Any = SimpleNamespace(
        clients=[21], all_saved=lambda: [alone], saved=lambda client: (alone, 21)
    )
    ones = METHOD.predict(config, found, graph, None)
    model = build_module(form, 21)
    assert isinstance(model, modules.StructureModel)
    close(ones, modules.predict(model, graph).softmax(1))
    found.all_saved, found.clients = lambda: [form], [0, 1]
    assert not torch.allclose(ones, METHOD.predict(config, found, graph, None), atol=1e-4)


def test_what_a_graph_lacks_is_said() -> None:
    model = modules.first_model(SETTINGS)
    few = NewGraph(torch.eye(2, 8), None, torch.full((2,), -1))
    with pytest.raises(DataError, match="2 nodes"):
        modules.predict(model, few)
    own = settings_of("fed-gnn-mlp")
    with_edges = [graph for graph in toy_clients()[1:] if not graph.is_graphless]
    (form,), _ = trained(own, with_edges)
    without_mlp = build_module(form)
    assert isinstance(without_mlp, modules.StructureModel)
    with pytest.raises(OutputError):
        modules.predict(without_mlp, given(edges=False))
