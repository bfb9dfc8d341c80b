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

*Baselines*, by ``settings.graphs``: Fed-GNN_k (``knn``; ``settings.knn_on`` chooses features or the
hidden layer of the server's last model), Fed-GNN (``true``), Fed-MLP (``none``), Fed-GNNMLP
(``own``, with ``SharewiseFedAvg``); and below Local-GNN_k (``LocalTraining``) and FedProto: Tan,
Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from torch import Tensor

from flower_graph.client.cohort_client import CohortClient
from flower_graph.engine.graph_batch import count_batch
from flower_graph.outputs.files import Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.server.averaging import Combined, ReportedFedAvg
from flower_graph.strategies.fedgls.cohort import StructureCohort, Trained
from flower_graph.strategies.fedgls.messages import (
    SHARE_END,
    SharedModels,
    SharedPrototypes,
    StructureMeasured,
    StructureTrained,
)
from flower_graph.strategies.fedgls.modules import snapshot_of
from flower_graph.strategies.fedgls.networks import OWN, StructureSettings, initial_models
from flower_graph.wire.arrays import Answer, Config, Measurements, Parameters
from flower_graph.wire.averaging import Asked, ClientReply, RoundRequest, Rows, mean_of
from flower_graph.wire.keys import ARRAYS

NOT_FINITE = "weights are not finite"
NOBODYS = torch.zeros(0)  # losses of no client

# Client ------------------------------------------------------------------------------------------


class StructureClient(CohortClient[StructureCohort]):
    """The clients of one SuperNode: usually one, in a simulation any number.

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
    has_mean = True  # whether clients classify with the server's models

    def most_examples(self) -> int:
        return sum(graph.x.shape[0] for graph in self.graphs)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Train from the server's models; return the clients' mean models (steps 2 to 4)."""
        return self._answer(*self.train(parameters, config))

    def fit_each(self, parameters: Parameters, config: Config) -> Rows:
        cohort, trained = self.train(parameters, config)
        rows = dict[int, Answer]()
        for at, client in enumerate(cohort.clients):
            if client not in trained.diverged:
                learnt = at - cohort.with_edges  # graphless clients come last
                contrast = trained.contrast[learnt : learnt + 1] if learnt >= 0 else NOBODYS
                own = Trained(contrast, trained.distillation[at : at + 1], [])
                rows[client] = self._answer(cohort, own, alone=client)
        return Rows(rows, dict.fromkeys(trained.diverged, NOT_FINITE))

    def train(
        self, parameters: Parameters, config: Config, prototypes: Tensor | None = None
    ) -> tuple[StructureCohort, Trained]:
        # They keep their state even if nobody is left to average.
        server_round = RoundRequest.from_config(config).server_round
        chosen = Asked.from_config(config).chosen(self._clients)
        with self.opened() as cohort:
            self.receive(cohort, parameters)
            with cohort.taking_part(chosen) as part:
                trained = part.train(server_round, prototypes)
        return part, trained

    def _answer(
        self, cohort: StructureCohort, trained: Trained, alone: int | None = None
    ) -> Answer:
        others = () if alone is None else [one for one in cohort.clients if one != alone]
        models, shares, nodes = cohort.mean_models([*trained.diverged, *others])
        shared = SharedModels.of(models, shares if self.settings.graphs == OWN else None)
        return training_answer(shared, nodes, cohort.size - len(others), trained)

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        """Measure every client's present model (step 6)."""
        with self.opened() as cohort:
            self.receive(cohort, parameters)
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
            counts=count_batch(cohort.own, logits, ~metrics.loss.isnan(), request.counting),
            **{name.replace("-", "_"): values for name, values in graphs.items()},
        )
        return self._state.save_if_asked(config, measured.answer(), self._makers)

    def snapshot(self) -> Snapshot:
        cohort = self._state.look(self._makers)
        return snapshot_of(cohort, shared=self.has_mean, classes=self._classes)

    def receive(self, cohort: StructureCohort, parameters: Parameters) -> None:
        cohort.start_from(SharedModels.of_server(parameters, self.settings).models)

    def opened(self) -> AbstractContextManager[StructureCohort]:
        """Work with the cohort; keep changes only if the block ends without an error."""
        return self._state.opened(self._makers)


class LocalClient(StructureClient):
    """Clients that train alone (Local-GNN_k): they send no array."""

    has_mean = False

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        cohort, trained = self.train(parameters, config)
        return training_answer(None, int(cohort.nodes.sum()), cohort.size, trained)

    def receive(self, cohort: StructureCohort, parameters: Parameters) -> None:
        """Leave every client its own model."""


class PrototypeClient(LocalClient):
    """FedProto's clients, each with its own model: a GNN, or an MLP for graphless clients."""

    # The *prototype* of a class is the mean hidden vector of its training nodes. The server sends
    # that of each class. In each step ``prototype_weight`` times the mean squared distance between
    # the hidden vectors of training nodes and their classes' prototypes is added to the loss. Back
    # go the sum of the hidden vectors of each class, and their number.

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        k, h = self.settings.num_classes, self.settings.hidden
        prototypes = SharedPrototypes.from_numpy(parameters, {}, k=k, h=h)
        means, share = map(torch.tensor, (prototypes.vectors, prototypes.share))
        goal = torch.where(share[:, None] > 0, means, torch.nan)
        cohort, trained = self.train(parameters, config, goal)
        sums, count = cohort.class_sums(trained.diverged)
        nodes = int(cohort.nodes.sum())
        parts = [(part / nodes).float().cpu().numpy() for part in (sums, count)]
        return training_answer(SharedPrototypes(*parts), nodes, cohort.size, trained)


def training_answer(
    arrays: SharedModels | SharedPrototypes | None, weight: int, clients: int, trained: Trained
) -> Answer:
    """Answer a ``train``: arrays, their weight, losses, and which clients are left out."""
    reply = StructureTrained(
        weight=weight,
        clients=clients,
        left_out=dict.fromkeys(trained.diverged, NOT_FINITE),
        contrast=trained.contrast,
        distillation=trained.distillation,
    )
    values, _, names = ([], 0, {}) if arrays is None else arrays.to_numpy()
    return values, weight, names | reply.to_config()


# Server ------------------------------------------------------------------------------------------


def initial_arrays(settings: StructureSettings) -> ArrayRecord:
    """Return the models from which a run starts, for any Flower strategy's ``start``."""
    models = initial_models(settings)
    shares = [1.0] * len(models) if settings.graphs == OWN else None
    return SharedModels.of(models, shares).to_record().array_records[ARRAYS]


class StructureFedAvg(ReportedFedAvg):
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

    # Any: further arguments are those of the parent
    def __init__(
        self, settings: StructureSettings, *, num_nodes: int | None = None, **more: Any
    ) -> None:
        super().__init__(seed=settings.seed, **more)
        self.num_classes = settings.num_classes
        self.settings, self.num_nodes = settings, num_nodes

    def fixed_settings(self) -> dict[str, object]:
        return super().fixed_settings() | self.settings._asdict()

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the weight that a SuperNode declared, at most the number of all nodes."""
        limits = [super().most_examples(node, training=training)]
        limits += [self.num_nodes] if training else []
        return min((most for most in limits if most is not None), default=None)

    def first_arrays(self) -> ArrayRecord:
        return initial_arrays(self.settings)

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
        reply = StructureMeasured.from_config(evaluated)
        return reply.to_report() | {"regulariser": mean_of(trained, "contrast")}

    def draw_pictures(self, out: Path, reports: Sequence[RoundReport], title: str) -> None:
        if any(report.structure for report in reports):
            from flower_graph.strategies.fedgls.plots import save_structure  # clients draw nothing

            save_structure(out / "structure.png", reports, title=title)


class SharewiseFedAvg(StructureFedAvg):
    """Means for arrays in which not every client has a part (Fed-GNNMLP, FedProto)."""

    # Such an array ``a`` is sent as a sum over the clients that have a part, with ``a-share``,
    # their total weight; both are divided by ``num-examples``. Flower averages both, and their
    # quotient is the mean. If nobody had a part, the last mean stays.

    weighted_sum = True

    def combine(self, replies: Sequence[ClientReply]) -> Combined:
        arrays = super().combine(replies)
        if not isinstance(arrays, ArrayRecord):
            return arrays
        result = {}
        for name, array in arrays.items():
            values, share = array.numpy(), arrays[name.partition("-")[0] + SHARE_END].numpy()
            wide = share.reshape(share.shape + (1,) * (values.ndim - share.ndim))
            with np.errstate(divide="ignore", invalid="ignore"):
                fresh = values if name.endswith(SHARE_END) else values / wide
            mean = np.where(wide > 0, fresh, self.arrays[name].numpy())
            result[name] = Array(mean.astype(np.float32))
        return ArrayRecord(result)


class LocalTraining(StructureFedAvg):
    """The server's half for ``LocalClient``: collects the clients' measurements."""

    def first_arrays(self) -> ArrayRecord:
        return ArrayRecord()


class FedProto(SharewiseFedAvg):
    """The server's half for ``PrototypeClient``; arguments as of ``StructureFedAvg``."""

    # A prototype is the mean over all clients' nodes of the class, weighted by nodes as in the
    # paper's equation 6. A class that nobody has keeps its last prototype.

    def first_arrays(self) -> ArrayRecord:
        """Return the first prototypes, which count no node."""
        k, h = self.settings.num_classes, self.settings.hidden
        nothing = SharedPrototypes(np.zeros((k, h), np.float32), np.zeros(k, np.float32))
        return nothing.to_record().array_records[ARRAYS]
