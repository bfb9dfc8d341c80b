"""Baselines of FedSCem: training alone, FedAvg and FedProx, on the same ego-networks.

They are the project's one FedAvg (``fed_avg.py``), FedProx and local training, with FedSCem's
model. Every client has weight 1, so the mean model is the mean over clients (FedSCem, equation 5).
Adam's moments stay with the client, and rows of the first layer whose feature a client does not
have come back unchanged: weight decay alone would move them by Adam's full step, against the
clients that have the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch
from flwr.app import Context
from flwr.serverapp.strategy import FedProx
from torch import Tensor, nn

from flower_graph.client.learner import GraphOnDevice, LocalGraph
from flower_graph.client.module_client import ModuleClient, ModuleSettings
from flower_graph.data.graph import EgoNetwork
from flower_graph.engine.graph_batch import check_sizes
from flower_graph.engine.mini_batches import BatchOrder, epochs_of
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.outputs.build import form_of
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.strategies.fedscem.cohort import FIRST, first_model
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import EgoGCN


def made_of(
    settings: EgoSettings, *, averages: bool
) -> tuple[Callable[[], nn.Module], ModuleSettings]:
    """Return what both halves have: the first model, and how it is trained."""
    how = ModuleSettings(
        settings.learning_rate,
        settings.weight_decay,
        local_epochs=settings.local_epochs,
        keep_optimiser=True,
        local=() if averages else ("*",),
        seed=settings.seed,
    )
    return partial(first_model, settings), how


class EgoModelClient(ModuleClient):
    """The ego-networks of one SuperNode, which train the server's model or each its own.

    Parameters
    ----------
    context, egos, settings, **more
        As of ``EgoNetworkClient``.
    averages : bool
        Whether models are averaged; otherwise none leaves its client.
    """

    first_layers: ClassVar[tuple[str, ...]] = (FIRST,)
    made_of = staticmethod(made_of)

    # Any: arguments of ``ModuleClient``
    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        settings: EgoSettings,
        *,
        averages: bool = True,
        **more: Any,
    ) -> None:
        for ego in egos:
            check_sizes(ego, settings.num_features, settings.num_classes)
        super().__init__(context, egos, *self.made_of(settings, averages=averages), **more)
        self._ego = settings

    def examples(self, graph: LocalGraph) -> int:
        return 1

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Return ``L_nc``; the head that it does not use decays as all weights do."""
        assert isinstance(module, EgoGCN)
        idle = torch.stack([part.sum() for part in module.projection.parameters()]).sum()
        return super().loss(module, graph) + 0 * idle

    def steps(self, graph: GraphOnDevice, server_round: int) -> Iterator[GraphOnDevice]:
        """Yield a step for each batch of a client's training nodes."""
        train, how = graph.masks["train"], self._ego
        order = BatchOrder(how.batch_size, how.seed, server_round, "local")
        for epoch in epochs_of(train, graph.ptr, graph.clients, order, epochs=how.local_epochs):
            for part in epoch:
                nodes = train if part.nodes is None else train & part.nodes
                moves = part.moves if self.first_layers else None
                yield graph._replace(masks=graph.masks | {"train": nodes}, moves=moves)


class EgoFedAvg(ModuleFedAvg):
    """FedAvg for ``EgoModelClient``; other arguments as for ``ReportedFedAvg``."""

    usual_rounds, averages = 400, True

    # Any: arguments are those of its parent
    def __init__(self, settings: EgoSettings, **more: Any) -> None:
        shared = made_of(settings, averages=self.averages)
        super().__init__(*shared, classes=settings.num_classes, **more)
        self.ego = settings

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the number of a SuperNode's clients: each has weight 1."""
        return len(self.session.members.clients.get(node, ())) or None

    def snapshot(self) -> Snapshot | None:
        if not self.averages:
            return None
        state = {name: torch.from_numpy(value) for name, value in self.weights().items()}
        model = form_of(self.make_module(), self.make_module, NO_CLIENT)
        return Snapshot(None, [replace(model, shared=state, own={})])

    def fixed_settings(self) -> dict[str, object]:
        return super().fixed_settings() | asdict(self.ego)


class EgoFedProx(EgoFedAvg, FedProx):
    """FedProx for ``EgoModelClient``; the weight is ``settings.proximal``."""

    # Any: arguments are those of its parent
    def __init__(self, settings: EgoSettings, **more: Any) -> None:
        super().__init__(settings, proximal_mu=settings.proximal, **more)


class SelfTraining(EgoFedAvg):
    """Local training, for ``EgoModelClient`` with ``averages=False``: no array travels."""

    averages = False
