"""FedSCem's baselines: FedAvg, FedProx and local training of its model.

They are the project's one FedAvg (``fed_avg.py``), FedProx and local training, with FedSCem's
model. Every client has weight 1, as in the risk of FedSCem's equation 5, so the mean model is the
mean over clients. Adam's moments stay with the client.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp.strategy import FedProx

from flower_graph.client.learner import SharedModule
from flower_graph.client.module_client import ModuleClient
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Learner
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.outputs.build import form_of
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.strategies.fedscem.algorithm import FIRST, EgoGroup
from flower_graph.strategies.fedscem.client import checked
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import first_model


def shared_by(settings: EgoSettings, *, averages: bool) -> SharedModule:
    """Return the model of both halves of a baseline."""
    return SharedModule(partial(first_model, settings), settings.seed, () if averages else ("*",))


class EgoModelClient(ModuleClient):
    """The ego-networks of one SuperNode, which train the server's model or each its own.

    Parameters
    ----------
    context, egos, settings, **more
        As of ``EgoNetworkClient``, and ``device``, ``checkpoint_dir``, ``outputs``.
    averages : bool
        Whether models are averaged; otherwise none leaves its client.
    """

    first_layers: tuple[str, ...] = (FIRST,)
    shared_by = staticmethod(shared_by)

    # Any: arguments of ``ModuleClient``
    def __init__(
        self,
        context: Context,
        egos: Sequence[ClientGraph],
        settings: EgoSettings,
        *,
        averages: bool = True,
        **more: Any,
    ) -> None:
        shared = self.shared_by(settings, averages=averages)
        super().__init__(context, checked(egos, settings), shared, settings.training, **more)
        self._ego = settings

    def examples(self, graph: ClientGraph) -> int:
        return 1

    def _train(self, learner: Learner, server_round: int, proximal: float) -> None:
        EgoGroup(learner, self._ego, self.received, proximal).train(server_round)


class EgoFedAvg(ModuleFedAvg):
    """FedAvg for ``EgoModelClient``; other arguments as for ``ReportedFedAvg``."""

    usual_rounds, averages, shared_by = 400, True, staticmethod(shared_by)

    # Any: arguments are those of its parent
    def __init__(self, settings: EgoSettings, **more: Any) -> None:
        shared = self.shared_by(settings, averages=self.averages)
        super().__init__(shared, settings.training, classes=settings.num_classes, **more)
        self.ego = settings

    def most_examples(self, node: int, *, training: bool) -> int | None:
        return len(self.session.members.clients.get(node, ())) or None

    def snapshot(self) -> Snapshot | None:
        if not self.averages:
            return None
        state = {name: torch.from_numpy(value) for name, value in self.weights().items()}
        model = form_of(self.shared.make(), self.shared.make, NO_CLIENT)
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
