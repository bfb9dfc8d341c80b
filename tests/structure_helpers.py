"""Small clients with and without edges, and runs of FedGLS's strategies over them in process."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import graph_helpers
import torch
from flwr.app import Context
from graph_helpers import dealt
from plain import fedgls as plain
from torch import Tensor

from flower_graph.config.common import GCNSection
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Cohort
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.config import (
    AVERAGING,
    FEDGLS,
    FedGLSSection,
    GraphSection,
    StructureSettings,
)
from flower_graph.strategies.fedgls.modules import first_model
from flower_graph.strategies.fedgls.strategy import StructureClient, StructureFedAvg

FEATURES, CLASSES = 8, 4
PARTS = ("gnn", "encoder")
METHODS = (*AVERAGING, "fed-gnn-mlp")
SETTINGS = StructureSettings(
    FEATURES,
    CLASSES,
    GraphSection(neighbours=2, width=4, learning_rate=0.05, tau=0.5),
    GCNSection(hidden=5, dropout=0.0),
    FedGLSSection(learning_rate=0.02, weight_decay=0.01, local_epochs=3),
    seed=3,
)
GRAPHLESS = (21, 23, 24)


def settings_of(method: str = FEDGLS, **changes: Any) -> StructureSettings:
    """The settings of a method; changes by section."""
    changes["strategy"] = {"name": method, **changes.get("strategy", {})}
    own = {name: replace(getattr(SETTINGS, name), **keys) for name, keys in changes.items()}
    return SETTINGS._replace(**own)


def plain_federation(
    settings: StructureSettings, graphs: Sequence[ClientGraph] | None = None
) -> plain.Federation:
    """The plain reference, which begins as the engine does."""
    model = first_model(settings)
    starts = [
        plain.Weights(model[f"{part}-first"].detach(), model[f"{part}-rest"].detach())
        for part in PARTS
        if f"{part}-first" in model
    ]
    phi = layers_of(model, settings) if "learner-first" in model else []
    return plain.Federation(graphs or toy_clients(), settings, starts, phi)


def layers_of(values: Any, settings: StructureSettings) -> list[Tensor]:
    """The layers of a graph learner, of a model or of a client's part of the stacks."""
    first, w = values["learner-first"].detach(), settings.graph.width
    if settings.graph.encoder == "mlp":
        return [first, *values["learner-rest"].detach().view(-1, w, w)]
    return [*first.T]


def toy_clients() -> list[ClientGraph]:
    """Make clients 20 to 25 of 6 to 11 nodes; 21, 23 and 24 have no edges.

    No client has the last feature, 24 lacks the first as well, those of 22 are sparse. Nobody
    trains on class 3, client 25 alone on class 2; each client has a node without a label, and 20
    one without a neighbour.
    """
    return [_client(20 + place) for place in range(6)]


def _client(number: int) -> ClientGraph:
    draw, n = torch.Generator().manual_seed(number), number - 14
    x = torch.rand(n, FEATURES, generator=draw)
    x *= torch.rand(n, FEATURES, generator=draw) < 0.6
    x[:, FEATURES - 1] = 0
    x[:, 1] += 0.1  # no node is without features
    x[0, 2] = -0.7
    if number == 24:
        x[:, 0] = 0
    upper = (torch.rand(n, n, generator=draw) < 0.4).triu(1)
    if number == 20:
        upper[0] = False
    edges = (upper | upper.T).nonzero().T
    y = torch.randint(2, (n,), generator=draw)
    role = torch.arange(n) % 5 // 2  # of five nodes two train, two validate, one tests
    if number == 25:
        y[role == 0] = 2 - torch.arange(int((role == 0).sum())) % 2
    if number == 22:
        y[role == 2] = 3
    y[1] = -1
    if number == 22:
        x = x.to_sparse_csr()
    masks = [(role == k) & (y >= 0) for k in range(3)]
    true = edges if number in GRAPHLESS else None
    own = None if number in GRAPHLESS else edges
    nodes = torch.arange(n) + 100 * number
    return ClientGraph(number, nodes, x, y, own, true, *masks)


def cohort_of(context: Context) -> Cohort:
    """What a SuperNode's context keeps."""
    cohort, *_ = vars(context)["live"].held
    assert isinstance(cohort, Cohort)
    return cohort


def client_app(
    settings: StructureSettings = SETTINGS,
    graphs: Sequence[ClientGraph] | None = None,
    deal: Sequence[Sequence[int]] | None = None,
    **mods: Any,
) -> Any:
    """Deal clients out as `dealt` does."""
    everyone = toy_clients() if graphs is None else graphs
    return dealt(
        lambda context, local: StructureClient(context, local, settings), everyone, deal, **mods
    )


class Outcome(graph_helpers.Outcome):
    """What a run left."""

    @property
    def figures(self) -> Tensor:
        """Everything that the reports say of models and graphs."""
        names = ("loss", "regulariser", "train_accuracy", "val_accuracy", "test_accuracy")
        rows = ([*(getattr(r, n) for n in names), *r.structure.values()] for r in self.reports)
        return torch.tensor(list(rows))

    @property
    def arrays(self) -> dict[str, Tensor]:
        """What the server has."""
        return {k: torch.from_numpy(v.copy()) for k, v in super().weights.items()}

    @property
    def cohorts(self) -> list[Cohort]:
        return [cohort_of(context) for context in self.grid.contexts.values()]

    @property
    def clients(self) -> dict[int, dict[str, Tensor]]:
        """Every client's own tensors."""
        each = (one for cohort in self.cohorts for one in cohort)
        return {one.graph.client: deepcopy(one.module.state_dict()) for one in each}

    def reasons(self, number: int) -> list[tuple[int, str]]:
        """Who was left out of a round, as places of SuperNodes, and why."""
        ids = list(self.grid.contexts)
        rejected = self.reports[number - 1].rejected
        return [(ids.index(entry["node"]), entry["reason"]) for entry in rejected]


def run(
    settings: StructureSettings = SETTINGS,
    *,
    rounds: int = 3,
    supernodes: int = 2,
    app: Any = None,
    **dealt_out: Any,
) -> Outcome:
    """Run a method in process."""
    grid = InProcessGrid(app or client_app(settings, **dealt_out), num_supernodes=supernodes)
    return Outcome(StructureFedAvg(settings), grid).run(rounds, timeout=0.05)


def close(one: Tensor, other: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol, equal_nan=True)


def assert_as_plain(outcome: Outcome, federation: plain.Federation) -> None:
    """Compare the server's models with the plain ones, and every client's models and learner."""
    for part, model in zip(PARTS, federation.models, strict=False):
        close(outcome.arrays[f"{part}-first"], model.first)
        close(outcome.arrays[f"{part}-rest"], model.rest)
    clients = outcome.clients
    for client in federation.clients:
        has, own = (client.x != 0).any(0), clients[client.graph.client]
        for number, model in client.models().items():
            close(own[f"{PARTS[number]}-first"][has], model.first[has])
            close(own[f"{PARTS[number]}-rest"], model.rest)
        if client.learner is not None:
            layers = layers_of(own, outcome.strategy.structure)
            for layer, wanted in zip(layers, client.learner.parts, strict=True):
                rows = has if len(wanted) == len(has) else slice(None)
                close(layer[rows], wanted.detach()[rows])


def assert_judged_as_plain(outcome: Outcome, clients: Sequence[plain.Client]) -> None:
    """Compare what the last report says with the plain clients' means."""
    judged = []
    for client in clients:
        graph, logits = client.graph, client.nets[0](client.x, client.adjacency).detach()
        right, train = (logits.argmax(1) == graph.y).double(), graph.train_mask
        masks = (train, graph.val_mask, graph.test_mask)
        loss = torch.nn.functional.cross_entropy(logits[train], graph.y[train])
        judged.append(torch.stack([loss.double(), *(right[mask].mean() for mask in masks)]))
    last = outcome.reports[-1]
    ours = [last.loss, last.train_accuracy, last.val_accuracy, last.test_accuracy]
    close(torch.tensor(ours).double(), torch.stack(judged).mean(0))
