"""FedGLS for Flower: the messages, the clients of a SuperNode, and the strategy.

The method is in ``algorithm.py``, which is to be read first. The server's half adds nothing to the
averaging, so any Flower strategy that averages arrays can take its place:
``FedAdam(...).start(grid, initial_arrays(settings), num_rounds=100)``.

A SuperNode with several clients answers with their mean weighted by nodes, and with the sum of
their nodes, so the server's mean is the same as with one client a SuperNode. If the server has
another average, the answer has a row for each client.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from torch import Tensor, nn

from flower_graph.client.learner import SharedModule
from flower_graph.client.module_client import ModuleClient
from flower_graph.config.common import LASTS, RESET
from flower_graph.data.graph import ClientGraph
from flower_graph.data.partition.client_graphs import check_neighbours
from flower_graph.engine.cohort import (
    Cohort,
    GraphOnDevice,
    Learner,
    check_sizes,
    trained_parameters,
)
from flower_graph.errors import ConfigError
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.ops.dropout import DropoutMask, draw_kept
from flower_graph.ops.graph_learner import edge_agreement
from flower_graph.ops.grouped import one_thread
from flower_graph.rng import generator
from flower_graph.server.averaging import ClientReply, Combined
from flower_graph.strategies.fedgls import modules
from flower_graph.strategies.fedgls.algorithm import (
    LEARNER,
    MLP,
    SHARE,
    mean_of_holders,
    networks_of,
)
from flower_graph.strategies.fedgls.config import (
    GRAPHS,
    KNN,
    LEARNED,
    LOCAL,
    OWN,
    TRUE,
    StructureSettings,
)
from flower_graph.wire import averaging
from flower_graph.wire.arrays import Config, Measurements, Parameters

NONE = torch.zeros(0)  # numbers of no client
FIGURES = ("precision", "recall", "homophily", "true-homophily", "degree", "true-degree")
# Numbers of all hidden layers up to which a round takes two threads 1.3 to 1.5 times as long as one
SMALL_NUMBERS = 2**17

# Messages ----------------------------------------------------------------------------------------


class StructureTrained(averaging.Trained, up="train", kw_only=True):
    """The entries of ``fit`` besides arrays."""

    # Flower needs the same names from all, even from SuperNodes without graphless clients.
    # `L_c` summed over clients, divided by `num-examples`
    contrast: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE


class StructureMeasured(averaging.Measured, up="evaluate", kw_only=True):
    """The measurements of ``evaluate``."""

    # this and the rest: learnt graphs against true ones, graphless clients
    precision: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE
    recall: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE
    homophily: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE
    true_homophily: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE
    degree: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE
    true_degree: Annotated[averaging.PerClient, averaging.ClientMean()] = NONE

    def to_report(self) -> dict[str, object]:
        figures = {name: getattr(self, name.replace("-", "_")) for name in FIGURES}
        numbers = {name: value for name, value in figures.items() if value == value}
        return super().to_report() | {"structure": numbers}


def shared_by(settings: StructureSettings) -> SharedModule:
    """Return the model of both halves; phi never leaves its client."""
    local = ("*",) if settings.strategy.name == LOCAL else (f"{LEARNER}-*",)
    return SharedModule(partial(modules.first_model, settings), settings.seed, local)


# Client ------------------------------------------------------------------------------------------


def check_edges(graphs: Sequence[ClientGraph], name: str, neighbours: int) -> None:
    """Refuse graphless clients of whom a method needs more than they have."""
    unknown = [g.client for g in graphs if g.is_graphless and g.hidden_edges is None]
    if GRAPHS[name] == TRUE and unknown:
        remedy = "set strategy.name=fed-gnn-knn, or make folders with `partition --true-edges`"
        raise ConfigError(
            f"strategy.name: {name} needs true edges; client {unknown[0]} has none; {remedy}"
        )
    if GRAPHS[name] in (LEARNED, KNN):
        check_neighbours(graphs, neighbours)


class StructureClient(ModuleClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    A client without training nodes does not train; it measures and predicts with the mean.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps optimisers and graph learners.
    graphs : sequence of ClientGraph
        The clients' data, some without edges.
    settings : StructureSettings
        Models and training, the same at all clients and at the server.
    **more
        As of ``ModuleClient``: ``device``, ``checkpoint_dir``, ``outputs``.
    """

    graphs: list[ClientGraph]

    # Any: arguments are those of its parent
    def __init__(
        self,
        context: Context,
        graphs: Sequence[ClientGraph],
        settings: StructureSettings,
        **more: Any,
    ) -> None:
        self.first_layers = tuple(f"{part}-first" for part in modules.parts_of(settings.graphs))
        how = replace(settings.strategy, optimiser=LASTS)  # phi's in any case
        super().__init__(context, graphs, shared_by(settings), how, **more)
        for graph in graphs:
            check_sizes(graph, settings.num_features, settings.num_classes)
        check_edges(graphs, settings.strategy.name, settings.graph.neighbours)
        self.structure = settings
        self._contrast: dict[int, Tensor] = {}  # L_c in this message, by client
        self._drops: list[list[DropoutMask]] = []  # of a round's further steps, for each network

    # What a ready client may say anew

    def examples(self, graph: ClientGraph) -> int:
        return len(graph.y) if graph.train_mask.any() else 0

    def logits(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        return self._holding(module, graph).logits()

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        return self._holding(module, graph).loss(self._drops.pop(0))

    def begin(self, learner: Learner, server_round: int) -> None:
        """Step phi, with theta and omega as the server gave them (step 2)."""
        model, adam = self._holding(learner.module, learner.graph), learner.optimiser
        if self.structure.strategy.optimiser == RESET:
            for name, value in trained_parameters(model):
                for moment in () if name.startswith(LEARNER) else adam.state[value].values():
                    moment.zero_()
        for at, loss in model.learn(adam).items():
            self._contrast[learner.graph.clients[at]] = loss.detach().cpu()

    def finish(self, learner: Learner) -> None:
        self._holding(learner.module, learner.graph).tell_shares()

    # Answers

    def counted(self, name: str, clients: Mapping[int, int]) -> Mapping[int, int]:
        if self.structure.graphs != OWN or name.endswith(SHARE):
            return clients
        wanted = name.startswith(MLP)  # what a client lacks counts nothing in the sum
        return {one: w for one, w in clients.items() if self._graph_of[one].is_graphless == wanted}

    def measured(self, clients: Sequence[int], weight: int) -> dict[str, float]:
        values = [self._contrast[one] for one in clients if one in self._contrast]
        return averaging.sums("contrast", torch.stack(values) if values else NONE, weight)

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        loss, weight, metrics = super().evaluate(parameters, config)
        cohort: Cohort = self._state.look()
        with torch.no_grad(), cohort.learners(self._clients) as (learner,):
            found = self._agreement(learner)
        for name in FIGURES:
            metrics |= averaging.sums(name, found.get(name, NONE), weight)
        return loss, weight, metrics

    def _agreement(self, learner: Learner) -> dict[str, Tensor]:
        """Compare the made graphs with the true ones, if these are known."""
        model = self._holding(learner.module, learner.graph)
        made = [one for one in self.graphs if one.is_graphless]
        true = [one.hidden_edges for one in made if one.hidden_edges is not None]
        if model.graphless is None or len(true) < len(made):
            return {}
        ptr, learned = model.graphless.data.ptr, model.made_graph(model.graphless).edges()
        edges = torch.cat([own + start for own, start in zip(true, ptr, strict=False)], 1)
        y = torch.cat([one.y for one in made])
        found = edge_agreement(learned, edges.to(self.device), y.to(self.device), ptr)
        return {name: values.cpu() for name, values in found.items()}

    def place(self, graph: ClientGraph) -> GraphOnDevice:
        return super().place(modules.used_graph(graph, self.structure.graphs))

    def _holding(self, module: nn.Module, graph: GraphOnDevice) -> modules.StructureModel:
        """Return a model that has the graphs of its clients."""
        assert isinstance(module, modules.StructureModel)
        if not module.is_held:
            graphs = [self._graph_of[client] for client in graph.clients]
            lone = {at: self.place(one) for at, one in enumerate(graphs) if one.is_graphless}
            module.hold(graph, lone)
        return module

    def _take_over(self, cohort: Cohort, learner: Learner, begun: Mapping[int, Parameters]) -> None:
        super()._take_over(cohort, learner, begun)
        self._holding(learner.module, learner.graph).forget_neighbours()

    @contextmanager
    def _drawing(self, graph: GraphOnDevice, server_round: int) -> Iterator[None]:
        """Draw the dropout of all steps, by client, network and round."""
        how, steps, drawn = self.structure.model, self.how.local_epochs, list[DropoutMask]()
        sizes = steps, how.hidden, how.input_dropout, how.dropout
        for part in networks_of(self.structure.graphs):
            words = [(client, part == MLP, server_round) for client in graph.clients]
            chances = [generator(self.shared.seed, "dropout", *one) for one in words]
            drawn.append(draw_kept(graph.x, graph.ptr, chances, *sizes))
        self._drops = [
            [DropoutMask(*(part if part is None else part[step] for part in one)) for one in drawn]
            for step in range(steps)
        ]
        yield

    @contextmanager
    def _opened(self) -> Iterator[Cohort]:
        nodes = sum(len(graph.y) for graph in self.graphs)
        small = nodes * self.structure.model.hidden <= SMALL_NUMBERS
        with self._state.opened() as cohort, one_thread(small):
            yield cohort


# Server ------------------------------------------------------------------------------------------


def initial_arrays(settings: StructureSettings) -> ArrayRecord:
    """Return the models from which a run starts, for any Flower strategy's ``start``."""
    return StructureFedAvg(settings).first_arrays()


class StructureFedAvg(ModuleFedAvg):
    """Flower's ``FedAvg`` for ``StructureClient``, with a report a round.

    Parameters
    ----------
    settings : StructureSettings
        The same settings as the clients'.
    num_nodes : int, optional
        Number of all clients' nodes, the largest possible weight of a reply.
    **more
        As for ``ReportedFedAvg``; the seed is the settings'.
    """

    weighted_sum = True

    # Any: further arguments are those of the parent
    def __init__(
        self, settings: StructureSettings, *, num_nodes: int | None = None, **more: Any
    ) -> None:
        shared, classes = shared_by(settings), settings.num_classes
        super().__init__(shared, settings.strategy, classes=classes, **more)
        self.structure, self.num_nodes = settings, num_nodes

    def fixed_settings(self) -> dict[str, object]:
        return super().fixed_settings() | self.structure._asdict()

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the weight that a SuperNode declared, at most the number of all nodes."""
        limits = [super().most_examples(node, training=training)]
        limits += [self.num_nodes] if training else []
        return min((most for most in limits if most is not None), default=None)

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Average the models (step 5); of Fed-GNNMLP's two, each over the clients that have it."""
        arrays = super().combine(replies)
        if self.structure.graphs != OWN or not isinstance(arrays, ArrayRecord):
            return arrays
        means, last = ({n: a.numpy() for n, a in one.items()} for one in (arrays, self.arrays))
        return mean_of_holders(means, last)

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
        reply = StructureMeasured.from_config(evaluated)
        return reply.to_report() | {"regulariser": averaging.mean_of(trained, "contrast")}
