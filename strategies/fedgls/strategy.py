"""FedGLS: federated graph learning with graphless clients.

Fu et al., "Federated Graph Learning with Graphless Clients", TMLR 2024. Every client has node
features; some, the *graphless* ones, have no edges. All train a GNN ``H = GNN(X, A; theta)`` and a
feature encoder ``Z = MLP(X; omega)`` that learns the GNN's output without edges. A graphless client
also has a graph learner ``A^ = P(Gen(X; phi))`` and uses ``A^`` for ``A``. Theta and omega together
carry knowledge of structure from client to client.

Round ``t``:

1. server -> clients: ``theta``, ``omega``;
2. graphless client: one step of phi on ``L_c``, NT-Xent between ``h_i`` and ``z_i`` of each node
   (equations 8 and 9); phi never leaves the client. Then ``A^`` is made anew and stays for the
   round;
3. client, ``E`` times: theta steps on the cross-entropy of its labelled nodes (equation 10), omega
   on ``KL(softmax(H) || softmax(Z))`` with ``H`` fixed (equation 11);
4. client -> server: theta, omega, and its number of nodes;
5. server: the mean weighted by nodes (equation 12), which is Flower's ``FedAvg``;
6. server -> clients: the new means, to be measured (Flower's ``evaluate``).

The server's half adds nothing to the averaging, so any Flower strategy that averages arrays can
take its place: ``FedAdam(...).start(grid, initial_arrays(settings), num_rounds=100)``.

A SuperNode with several clients trains a round's clients in one program. It answers with their mean
weighted by nodes, and with the sum of their nodes, so the server's mean is the same as with one
client a SuperNode. If the server has another average, the answer has a row for each client.

*Baselines*, by ``strategy.name``: Fed-GNN_k (``fed-gnn-knn``; ``graph.knn_on`` chooses features or
the hidden layer of the server's last model), Fed-GNN (``fed-gnn``), Fed-MLP (``fed-mlp``) and
Fed-GNNMLP (``fed-gnn-mlp``) are the same program with other graphs. Local-GNN_k and FedProto are
``local_training.py`` and ``fed_proto.py`` on these clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.cohort_client import CohortClient
from flower_graph.client.module_client import NO_EXAMPLE, ModuleClient
from flower_graph.engine.graph_batch import count_batch
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import RefusedError
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.ops.graph_learner import edge_agreement
from flower_graph.outputs.files import Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.server.averaging import Combined, ReportedFedAvg
from flower_graph.strategies.fedgls.cohort import StructureCohort, initial_models
from flower_graph.strategies.fedgls.config import OWN, StructureSettings
from flower_graph.strategies.fedgls.modules import snapshot_of
from flower_graph.wire.arrays import Answer, Config, Measurements, Parameters, encode_array
from flower_graph.wire.averaging import (
    Asked,
    ClientMean,
    ClientReply,
    Measured,
    PerClient,
    RoundRequest,
    Rows,
    Trained,
    mean_of,
    sums,
)
from flower_graph.wire.keys import ARRAY_NAMES

NOT_FINITE = "weights are not finite"
NONE = torch.zeros(0)  # numbers of no client
FIGURES = ("precision", "recall", "homophily", "true-homophily", "degree", "true-degree")

# Messages ----------------------------------------------------------------------------------------


def array_shapes(settings: StructureSettings) -> dict[str, tuple[int, ...]]:
    """Return the arrays that travel: of each model the first layer, and the flat rest.

    Of Fed-GNNMLP's two models no client has both: an array is sent as the sum over the clients that
    have it, divided by the weight of all, and ``share`` is the weight of those divided by the same.
    """
    f, h, k = settings.num_features, settings.model.hidden, settings.num_classes
    parts: dict[str, tuple[int, ...]] = {"first": (f, h), "rest": (h + h * k + k,)}
    if settings.graphs == OWN:
        parts["share"] = (1,)
    models = ("gnn", "encoder")[: settings.num_models]
    return {f"{model}-{part}": shape for model in models for part, shape in parts.items()}


def to_arrays(
    models: Sequence[ModelWeights], shares: Sequence[float], settings: StructureSettings
) -> dict[str, NDArray[np.float32]]:
    """Return models as they travel, by name."""
    values: list[NDArray[np.float32]] = []
    for model, share in zip(models, shares, strict=True):
        values += [model.first.cpu().numpy(), model.rest.cpu().numpy()]
        values += [np.array([share], np.float32)] if settings.graphs == OWN else []
    return dict(zip(array_shapes(settings), values, strict=True))


def to_models(arrays: Parameters, settings: StructureSettings) -> list[ModelWeights]:
    """Read the server's models; ``ValueError`` if the server has other settings."""
    shapes, why = array_shapes(settings), "server and clients must have the same settings"
    if len(arrays) != len(shapes):
        raise ValueError(f"{len(arrays)} arrays came, expected {len(shapes)}: {why}")
    for (name, shape), values in zip(shapes.items(), arrays, strict=True):
        if values.shape != shape:
            raise ValueError(f"{name} has shape {values.shape}, expected {shape}: {why}")
    came = [torch.from_numpy(np.ascontiguousarray(values, np.float32)) for values in arrays]
    step = len(shapes) // settings.num_models
    return [ModelWeights(came[at], came[at + 1]) for at in range(0, len(came), step)]


class StructureTrained(Trained, up="train", kw_only=True):
    """The entries of ``fit`` besides arrays."""

    # Flower needs the same names from all, even from SuperNodes without graphless clients.

    # with `distillation`: losses summed over clients, divided by `num-examples`
    contrast: Annotated[PerClient, ClientMean()] = NONE
    distillation: Annotated[PerClient, ClientMean()] = NONE


class StructureMeasured(Measured, up="evaluate", kw_only=True):
    """The measurements of ``evaluate``."""

    # this and the rest: learnt graphs against true ones, graphless clients
    precision: Annotated[PerClient, ClientMean()] = NONE
    recall: Annotated[PerClient, ClientMean()] = NONE
    homophily: Annotated[PerClient, ClientMean()] = NONE
    true_homophily: Annotated[PerClient, ClientMean()] = NONE
    degree: Annotated[PerClient, ClientMean()] = NONE
    true_degree: Annotated[PerClient, ClientMean()] = NONE

    def to_report(self) -> dict[str, object]:
        figures = {name: getattr(self, name.replace("-", "_")) for name in FIGURES}
        numbers = {name: value for name, value in figures.items() if value == value}
        return super().to_report() | {"structure": numbers}


# Client ------------------------------------------------------------------------------------------


class StructureClient(CohortClient[StructureCohort]):
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
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir, output_dir : Path, optional
        Folders for checkpoints, and for predictions, models and figures, if the SuperNode has no
        folder of its own (``state-dir``).
    classes : sequence of str, optional
        Names of the classes, for predictions.
    """

    cohort = StructureCohort
    all_train = False

    def most_examples(self) -> int:
        return max(1, sum(len(graph.y) for graph in self.graphs if graph.train_mask.any()))

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Train from the server's models; return the clients' mean models (steps 2 to 4)."""
        asked, left_out, losses = self._train(parameters, config)
        return self._answer(asked, left_out, losses)

    def fit_each(self, parameters: Parameters, config: Config) -> Rows:
        asked, left_out, losses = self._train(parameters, config)
        rows, order = dict[int, Answer](), self._state.look(self._makers).clients
        for client in (one for one in asked if one not in left_out):
            at = order.index(client)
            own = {name: values[at : at + 1] for name, values in losses.items()}
            rows[client] = self._answer([client], {}, own)
        return Rows(rows, left_out)

    def _train(
        self, parameters: Parameters, config: Config
    ) -> tuple[list[int], dict[int, str], dict[str, Tensor]]:
        """Train clients; return who was asked, who is left out and why, and all losses."""
        server_round = RoundRequest.from_config(config).server_round
        asked = Asked.from_config(config).chosen(self._clients)
        able = {graph.client for graph in self.graphs if graph.train_mask.any()} & set(asked)
        with self.opened() as cohort:
            cohort.start_from(to_models(parameters, self.settings))
            trained = cohort.train(server_round, able)
        left_out = dict.fromkeys(set(asked) - able, NO_EXAMPLE)
        left_out |= dict.fromkeys(trained.diverged, NOT_FINITE)
        if len(left_out) == len(asked):  # they keep their state even so
            why = " and ".join(sorted(set(left_out.values())))
            raise RefusedError(f"clients {sorted(left_out)}: {why}; nobody is left")
        return asked, left_out, trained.losses

    def _answer(
        self, asked: Sequence[int], left_out: dict[int, str], losses: Mapping[str, Tensor]
    ) -> Answer:
        """Answer a ``train``: arrays, their weight, losses, and which clients are left out."""
        cohort = self._state.look(self._makers)
        models, shares, nodes = cohort.mean_models(set(asked) - left_out.keys())
        arrays = to_arrays(models, shares, self.settings)
        reply = StructureTrained(weight=nodes, clients=len(asked), left_out=left_out, **losses)
        return list(arrays.values()), nodes, {ARRAY_NAMES: list(arrays)} | reply.to_config()

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        """Measure every client's present model (step 6)."""
        with self.opened() as cohort:
            cohort.start_from(to_models(parameters, self.settings))
            logits = cohort.logits()
            metrics, graphs = cohort.evaluate(logits), cohort.structure() or {}
        train, val, test = metrics.accuracy.T
        request, figures = RoundRequest.from_config(config), metrics._asdict()
        self.outputs.measured(request.server_round, cohort.clients, nodes=cohort.nodes, **figures)
        measured = StructureMeasured(
            weight=cohort.size,
            cross_entropy=metrics.loss,
            train=train,
            val=val,
            test=test,
            counts=count_batch(cohort.own, logits, cohort.sound(metrics.loss), request.counting),
            **{name.replace("-", "_"): values for name, values in graphs.items()},
        )
        loss, weight, said = measured.answer()
        if not any(graph.train_mask.any() for graph in self.graphs):
            loss = 0.0  # no client here has one; NaN says that training failed
        return self._state.save_if_asked(config, (loss, weight, said), self._makers)

    def snapshot(self) -> Snapshot:
        return snapshot_of(self._state.look(self._makers), self._classes)

    def opened(self) -> AbstractContextManager[StructureCohort]:
        """Work with the cohort; keep changes only if the block ends without an error."""
        return self._state.opened(self._makers)


class NearestClient(ModuleClient):
    """Local-GNN_k's clients, which also measure the graphs of nearest neighbours."""

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        loss, weight, metrics = super().evaluate(parameters, config)
        found: dict[str, list[Tensor]] = {name: [NONE] for name in FIGURES}
        for graph in self.graphs:
            true, made = getattr(graph, "hidden_edges", None), graph.edge_index
            if true is not None and made is not None:
                n = graph.y.numel()
                for name, value in edge_agreement(made, true, graph.y, [0, n]).items():
                    found[name].append(value)
        for name, values in found.items():
            metrics |= sums(name, torch.cat(values), weight)
        return loss, weight, metrics


# Server ------------------------------------------------------------------------------------------


class ReportsGraphs:
    """A part of strategies whose clients compare learnt graphs with true ones."""

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
        reply = StructureMeasured.from_config(evaluated)
        return reply.to_report() | {"regulariser": mean_of(trained, "contrast")}

    def draw_pictures(self, out: Path, reports: Sequence[RoundReport], title: str) -> None:
        if any(report.structure for report in reports):
            from flower_graph.strategies.fedgls.plots import save_structure  # clients draw nothing

            save_structure(out / "structure.png", reports, title=title)


class NearestTraining(ReportsGraphs, ModuleFedAvg):
    """Local-GNN_k's server, for ``NearestClient``; parameters as of ``ModuleFedAvg``."""


def initial_arrays(settings: StructureSettings) -> ArrayRecord:
    """Return the models from which a run starts, for any Flower strategy's ``start``."""
    models = initial_models(settings)
    arrays = to_arrays(models, [1.0] * len(models), settings)
    return ArrayRecord({name: encode_array(name, values) for name, values in arrays.items()})


class StructureFedAvg(ReportsGraphs, ReportedFedAvg):
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
        super().__init__(seed=settings.seed, **more)
        self.num_classes = settings.num_classes
        self.settings, self.num_nodes = settings, num_nodes

    def fixed_settings(self) -> dict[str, object]:
        how = self.settings.strategy
        names = ("name", "local_epochs", "learning_rate", "weight_decay", "optimiser")
        own = {f"strategy.{name}": getattr(how, name) for name in names}
        return super().fixed_settings() | self.settings._asdict() | {"strategy": own}

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the weight that a SuperNode declared, at most the number of all nodes."""
        limits = [super().most_examples(node, training=training)]
        limits += [self.num_nodes] if training else []
        return min((most for most in limits if most is not None), default=None)

    def first_arrays(self) -> ArrayRecord:
        return initial_arrays(self.settings)

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        """Average the models (step 5); of Fed-GNNMLP's two, each over the clients that have it."""
        arrays = super().combine(replies)
        if self.settings.graphs != OWN or not isinstance(arrays, ArrayRecord):
            return arrays
        result = {}
        for name, array in arrays.items():
            values, share = array.numpy(), arrays[f"{name.partition('-')[0]}-share"].numpy()
            if not share > 0:  # nobody had a part: the last mean stays
                values = self.arrays[name].numpy()
            elif not name.endswith("-share"):
                values = values / share
            result[name] = Array(values.astype(np.float32))
        return ArrayRecord(result)
