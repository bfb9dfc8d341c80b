"""The weight-sharing clients of one SuperNode, kept from message to message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flower_graph.client.cohort_state import CohortState, Makers
from flower_graph.client.state import Tensors
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.graph_batch import check_sizes
from flower_graph.messages.averaging import Enrolment
from flower_graph.messages.fields import Resume
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort
from flower_graph.strategies.structure_fedavg.networks import StructureSettings

if TYPE_CHECKING:
    from flwr.app import Context

Opened = tuple[StructureCohort, Tensors]


class StructureCohortClient:
    """Keeps a cohort's optimisers and graph learners behind the ClientApp's context."""

    def __init__(
        self,
        context: Context,
        graphs: Sequence[ClientGraph],
        settings: StructureSettings,
        device: torch.device,
        checkpoint_dir: Path | None = None,
    ) -> None:
        check_graphs(graphs, settings)
        self.graphs, self.settings, self._device = list(graphs), settings, device
        self._state = CohortState[StructureCohort](
            context, "structure-client", self.clients, checkpoint_dir
        )
        self._makers = Makers(self._start, self._build)

    @property
    def clients(self) -> list[int]:
        """Numbers of the clients, in the order of their data."""
        return [graph.client for graph in self.graphs]

    def opened(self) -> AbstractContextManager[StructureCohort]:
        """Work with the cohort; what changed counts when the block ends well."""
        return self._state.opened(self._makers)

    def enrolment(self) -> Enrolment:
        """Say who is here."""
        nodes = sum(graph.x.shape[0] for graph in self.graphs)
        return Enrolment(self.clients, self._state.processed(self._makers), nodes)

    def save(self, server_round: int, run: str) -> str:
        """Write a round's checkpoint; return why it cannot be written, or nothing."""
        return self._state.save(server_round, run, self._makers)

    def restore(self, resume: Resume) -> None:
        """Go on from a checkpoint; ``CheckpointError`` if it cannot be used."""
        self._state.restore(resume, self._makers)

    def _start(self) -> Tensors:
        return StructureCohort(self.graphs, self.settings, device=self._device).tensors()

    def _build(self, tensors: Tensors) -> Opened:
        # Steps are counted on the CPU, where Adam wants them.
        placed = {
            key: value if key.endswith("step") else value.to(self._device)
            for key, value in tensors.items()
        }
        return StructureCohort(self.graphs, self.settings, placed, self._device), placed


def check_graphs(graphs: Sequence[ClientGraph], settings: StructureSettings) -> None:
    """Refuse data that the settings cannot work with; names the client."""
    if not graphs:
        raise ValueError("graphs: none is given; a SuperNode hosts at least one client")
    numbers = [graph.client for graph in graphs]
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"graphs: client numbers {numbers!s:.60} are not all different")
    for graph in graphs:
        check_sizes(graph, settings.num_features, settings.num_classes)
        if not graph.train_mask.any():
            raise ValueError(f"client {graph.client} has no training node: it cannot train")
