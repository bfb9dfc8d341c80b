"""Any torch module on clients' graphs: against a loop by hand, however clients are spread."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from graph_helpers import Outcome
from structure_helpers import toy_clients
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv, SGConv

from flower_graph import models
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.module_client import GraphOnDevice, ModuleClient, SharedModule
from flower_graph.config.common import TrainingSection
from flower_graph.errors import RefusedError
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.ops.graph import gcn_adjacency, propagate
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import seeded
from flower_graph.server.averaging import client_means
from flower_graph.simulation import InProcessGrid

GRAPHS = toy_clients()
FEATURES, CLASSES = GRAPHS[0].x.shape[1], 1 + max(int(graph.y.max()) for graph in GRAPHS)
SETTINGS = TrainingSection(learning_rate=0.05, local_epochs=2, weight_decay=0.0, optimiser="reset")
SEED = 3
# Without a decay some of an attention's gradients are rounding alone, which Adam blows up
DECAYING = replace(SETTINGS, weight_decay=0.01)


class Net(nn.Module):
    """A GCN layer with everything that a state can have: counters, drop-out, a part of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        # Without a bias, whose gradient would be nothing but rounding, blown up by Adam
        self.first = nn.Linear(FEATURES, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = propagate(gcn_adjacency(edge_index, x.shape[0]), self.first(x))
        hidden = functional.dropout(self.norm(hidden).relu(), 0.3, self.training)
        return self.head(hidden)


class Convolved(nn.Module):
    """Two layers of PyG, with dropout between them."""

    def __init__(self, kind: type[nn.Module], **how: Any) -> None:
        super().__init__()
        self.first, self.second = kind(FEATURES, 4, **how), kind(4, CLASSES, **how)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = functional.dropout(self.first(x, edge_index).relu(), 0.3, self.training)
        return self.second(hidden, edge_index)


def perceptron(width: int, out: int) -> GINConv:
    layers = nn.Sequential(nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, out))
    return GINConv(layers, train_eps=True)


LAYERS: dict[str, Any] = {
    "gcn": GCNConv,
    "gat": partial(GATConv, dropout=0.2),
    "sage": SAGEConv,
    "gin": perceptron,
    "sgc": SGConv,
}
MODULES = {name: partial(Convolved, kind) for name, kind in LAYERS.items()}
MODULES |= {"batch-norm": Net, "ours": partial(models.GCN, FEATURES, 4, CLASSES, 0.5, 0.3)}


def run(
    rounds: int = 3,
    supernodes: int = 2,
    settings: TrainingSection = SETTINGS,
    make: Any = Net,
    client: type[ModuleClient] = ModuleClient,
    local: tuple[str, ...] = (),
    **options: Any,
) -> tuple[ModuleFedAvg, list[RoundReport]]:
    def client_fn(context: Context) -> ModuleClient:
        own = GRAPHS[int(context.node_config["partition-id"]) :: supernodes]
        return client(context, own, shared, settings)

    shared = SharedModule(make, SEED, local)
    app = make_client_app(client_fn)
    grid = InProcessGrid(app, num_supernodes=supernodes)
    outcome = Outcome(ModuleFedAvg(shared, settings, **options), grid).run(rounds, timeout=30.0)
    return outcome.strategy, outcome.reports


def called(net: nn.Module, graph: Any) -> Tensor:
    """Give the logits of a client's nodes; it may have no edges."""
    none = torch.zeros((2, 0), dtype=torch.int64)
    result: Tensor = net(graph.x.to_dense(), none if graph.edge_index is None else graph.edge_index)
    return result


def by_hand(rounds: int, settings: TrainingSection, make: Any = Net) -> dict[str, Tensor]:
    """Train one client after the other, without Flower."""
    model = SharedModule(make, SEED).first().state_dict()
    weights = [float(graph.train_mask.sum()) for graph in GRAPHS]
    kept: dict[int, Any] = {}
    for number in range(1, rounds + 1):
        total: dict[str, Any] = dict.fromkeys(model, 0.0)
        for graph, weight in zip(GRAPHS, weights, strict=True):
            net = make()
            net.load_state_dict(model)
            rates = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
            adam = torch.optim.Adam(net.parameters(), **rates)
            if settings.optimiser == "keep" and graph.client in kept:
                adam.load_state_dict(kept[graph.client])
            with seeded(torch.device("cpu"), SEED, "module-client", graph.client, number):
                for _ in range(settings.local_epochs):
                    adam.zero_grad()
                    logits = called(net, graph)[graph.train_mask]
                    functional.cross_entropy(logits, graph.y[graph.train_mask]).backward()
                    adam.step()
            kept[graph.client] = adam.state_dict()
            for name, value in net.state_dict().items():
                total[name] = total[name] + weight * value.double()
        mean = {name: value / sum(weights) for name, value in total.items()}
        model = {n: v.round().long() if "num_b" in n else v.float() for n, v in mean.items()}
    return model


def assert_like(strategy: ModuleFedAvg, wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    found = strategy.weights()
    assert list(found) == list(wanted)
    for name, values in found.items():
        value = torch.as_tensor(wanted[name]).double()
        torch.testing.assert_close(
            torch.as_tensor(values).double(), value, atol=tolerance, rtol=1e-4
        )


@pytest.mark.parametrize(("optimiser", "supernodes"), [("keep", 1), ("reset", len(GRAPHS))])
@pytest.mark.parametrize("name", MODULES)
def test_it_is_what_a_loop_by_hand_gives(name: str, optimiser: str, supernodes: int):
    settings = replace(DECAYING, optimiser=optimiser, local_epochs=5)
    strategy, reports = run(2, supernodes, settings, make=MODULES[name])
    assert_like(strategy, by_hand(2, settings, MODULES[name]))
    assert all(report.rejected == [] and report.skipped == "" for report in reports)


class Pools(Convolved):
    """Mixes all nodes that it is given."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), edge_index)


class Draws(Convolved):
    """Draws from PyTorch's global stream."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.rand(1) * self.training, edge_index)


class OneMean(ModuleClient):
    """Has one mean for all nodes that it is given."""

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        train = graph.masks["train"]
        return functional.cross_entropy(self.logits(module, graph)[train], graph.y[train])


class ByNumber(ModuleClient):
    """Has a loss that depends on the client."""

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        return super().loss(module, graph) * (0.5 if graph.client == 0 else 1.0)


@pytest.mark.parametrize(
    ("make", "kind", "calls"),
    [
        *((MODULES[name], ModuleClient, 1) for name in ("ours", *LAYERS)),
        (Net, ModuleClient, len(GRAPHS)),
        *((partial(one, GCNConv), ModuleClient, len(GRAPHS)) for one in (Pools, Draws)),
        *((MODULES["gcn"], one, len(GRAPHS)) for one in (OneMean, ByNumber)),
    ],
)
def test_what_would_mix_clients_trains_one_by_one(
    make: Any, kind: type[ModuleClient], calls: int
) -> None:
    called: list[int] = []

    class Counts(kind):  # type: ignore[misc,valid-type]
        def _train(self, learner: Any, *how: Any) -> None:
            called.append(learner.graph.clients)
            super()._train(learner, *how)

    one, each = (
        run(1, supernodes, DECAYING, make=make, client=client)[0]
        for supernodes, client in ((1, Counts), (len(GRAPHS), kind))
    )
    assert_like(one, each.weights())
    assert len(called) == calls


@pytest.mark.parametrize("optimiser", ["reset", "keep"])
def test_some_clients_of_a_group_train(optimiser: str) -> None:
    settings, how = replace(DECAYING, optimiser=optimiser), {"participation": 0.5}
    one, each = (run(4, n, settings, make=MODULES["gat"], **how)[0] for n in (1, len(GRAPHS)))
    assert_like(one, each.weights())


@pytest.mark.parametrize("local", [(), ("*",)])
def test_a_client_that_diverges_is_named(local: tuple[str, ...]):
    class Breaks(ModuleClient):
        def loss(self, module: nn.Module, graph: Any) -> Tensor:
            return super().loss(module, graph) * (torch.nan if graph.client == 21 else 1.0)

    strategy, reports = run(1, 1, client=Breaks, local=local)
    assert reports[0].rejected[0]["reason"] == "client 21: weights are not finite"
    assert all(torch.as_tensor(v).isfinite().all() for v in strategy.weights().values())


def test_without_an_example_a_client_is_named_and_its_round_is_skipped():
    """Drawn alone it gives nothing to average, of a link task for example."""
    idle = {graph.client for graph in GRAPHS} - {21}

    class Idle(ModuleClient):
        def examples(self, graph: Any) -> int:
            return 0 if graph.client in idle else super().examples(graph)

    _, reports = run(9, 1, client=Idle, participation=1 / len(GRAPHS))
    skipped = [one for one in reports if one.skipped]
    assert 0 < len(skipped) < 9
    for report in skipped:
        (left,) = report.rejected
        assert any(f"[{client}]: no example" in left["reason"] for client in idle)
    _, (first,) = run(1, 1, client=Idle)
    assert sorted(entry["reason"] for entry in first.rejected) == [
        f"client {client}: no example to train on" for client in sorted(idle)
    ]
    assert first.answered == 1 and not first.skipped


def test_flowers_own_mean_is_one_of_those_who_have_such_a_number():
    graphs = [replace(GRAPHS[0], test_mask=torch.zeros_like(GRAPHS[0].test_mask)), *GRAPHS[1:]]

    def client_fn(context: Context) -> ModuleClient:
        own = graphs[int(context.node_config["partition-id"]) :: 3]
        return ModuleClient(context, own, SharedModule(Net, SEED), SETTINGS)

    ours = ModuleFedAvg(SharedModule(Net, SEED), SETTINGS)
    theirs = FedAvg(evaluate_metrics_aggr_fn=client_means)
    found, reports = list[Any](), list[RoundReport]()
    for strategy, more in ((ours, {"on_round": reports.append}), (theirs, {})):
        grid = InProcessGrid(make_client_app(client_fn), num_supernodes=3)
        found.append(strategy.start(grid, ours.first_arrays(), 2, **more))  # type: ignore[arg-type]
    for number, report in enumerate(reports, 1):
        said = found[1].evaluate_metrics_clientapp[number]
        for role in ("train", "val", "test"):
            assert said[role] == pytest.approx(getattr(report, f"{role}_accuracy"))
        assert not [name for name in said if name.startswith("has-")]


def test_a_client_with_another_number_of_features_is_left_out_by_name():
    class Wide(ModuleClient):
        def __init__(self, context: Context, graphs: Any, *args: Any, **how: Any) -> None:
            own = [replace(one, x=torch.ones(len(one.y), FEATURES + 1)) for one in graphs]
            super().__init__(context, own if own[0].client == odd else graphs, *args, **how)

    odd = GRAPHS[-1].client
    _, reports = run(1, len(GRAPHS), client=Wide)
    reasons = [one["reason"] for one in reports[0].rejected]
    assert reasons and all(f"client {odd}: x has not as many features" in one for one in reasons)


def test_who_diverges_begins_anew_and_without_a_loss_has_no_predictions() -> None:
    """What all others leave, ``contracts/test_predictions.py`` shows."""
    settings = replace(SETTINGS, learning_rate=1e30)
    make = partial(models.GCN, FEATURES, 5, CLASSES)
    context = Context(1, 2, {"partition-id": 0}, RecordDict(), {})
    client = ModuleClient(context, GRAPHS, SharedModule(make, SEED, ("*",)), settings)
    before = client.evaluate([], {"server-round": 0})
    for server_round in (1, 2):
        with pytest.raises(RefusedError, match="not finite"):
            client.fit([], {"server-round": server_round})
        assert client.evaluate([], {"server-round": server_round}) == before
    context = Context(1, 3, {"partition-id": 0}, RecordDict(), {})
    client = ModuleClient(context, GRAPHS, SharedModule(make, SEED), SETTINGS)
    lost = [np.full(p.shape, np.nan, np.float32) for p in make().state_dict().values()]
    client.evaluate(lost, {"server-round": 1})
    assert client.snapshot().predictions is None
