"""The clients of LocalSage+ and FedSage+ that one SuperNode hosts, kept from message to message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from flower_graph.client.cohort_state import CohortState, Makers
from flower_graph.client.state import Tensors
from flower_graph.messages.arrays import IntArray
from flower_graph.messages.fields import Resume
from flower_graph.strategies.fed_sage.cohort import SageCohort, SageSettings

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.data.partition.ego_networks import EgoNetwork

COUNTERS = ("round", "epoch")  # bookkeeping, stays on the CPU


class SageCohortClient:
    """Keeps a cohort between messages."""

    def __init__(
        self,
        context: Context,
        networks: Sequence[EgoNetwork],
        classes: int,
        device: torch.device,
        checkpoint_dir: Path | None = None,
    ) -> None:
        numbers = [network.client for network in networks]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"networks: clients {numbers}; give at least one, each once")
        self.clients = np.array(numbers, dtype=np.int64)
        self.features, self.classes = int(networks[0].x.shape[1]), classes
        self._networks, self._device = networks, device
        self._state = CohortState[SageCohort](context, "sage-client", numbers, checkpoint_dir)

    def message(self, settings: SageSettings) -> AbstractContextManager[SageCohort]:
        """Open the cohort for one message; it counts as handled when the block ends well."""
        return self._state.opened(self._makers(settings))

    def places(self, clients: IntArray) -> torch.Tensor:
        """Turn numbers of clients into places here, ``[p]``; refuse clients of others."""
        where = {number: place for place, number in enumerate(self.clients.tolist())}
        foreign = [number for number in clients.tolist() if number not in where]
        if foreign:
            raise ValueError(f"the message names clients {foreign[:5]}, who are not here")
        return torch.tensor([where[number] for number in clients.tolist()], dtype=torch.int64)

    def handled(self, settings: SageSettings) -> int:
        """Return how many messages the clients have behind them; 0 if what they kept is lost."""
        return self._state.processed(self._makers(settings))

    def save(self, settings: SageSettings, server_round: int, run: str) -> str:
        """Write a round's checkpoint; return why it cannot be written, or nothing."""
        return self._state.save(server_round, run, self._makers(settings))

    def restore(self, settings: SageSettings, resume: Resume) -> None:
        """Go on from a checkpoint; ``CheckpointError`` if it cannot be used."""
        self._state.restore(resume, self._makers(settings))

    def drop(self) -> None:
        """Forget the run."""
        self._state.drop()

    def _makers(self, settings: SageSettings) -> Makers[SageCohort]:
        """Return what makes tensors of new clients, and what makes a cohort from tensors."""

        def start() -> Tensors:
            return SageCohort(self._networks, self.classes, settings, self._device).tensors

        def build(tensors: Tensors) -> tuple[SageCohort, Tensors]:
            placed = {k: t if k in COUNTERS else t.to(self._device) for k, t in tensors.items()}
            cohort = SageCohort(self._networks, self.classes, settings, self._device, placed)
            return cohort, cohort.tensors

        return Makers(start, build)
