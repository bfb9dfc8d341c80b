"""The clients of LocalSage+ and FedSage+ that one SuperNode hosts, kept from message to message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from flower_graph.records.keys import IntArray
from flower_graph.sage_cohort import SageCohort, SageSettings
from flower_graph.state import StateStore, Tensors

if TYPE_CHECKING:
    from flwr.app import Context

    from flower_graph.data.ego_networks import EgoNetwork

COUNTERS = ("round", "epoch")  # bookkeeping, stays on the CPU


class SageHost:
    """Keeps a cohort between messages.

    Parameters
    ----------
    context : Context
        The ClientApp's context; the clients' weights live behind it.
    networks : sequence of EgoNetwork
        The clients.
    classes : int
        Number of classes in the whole run.
    device : torch.device
        Where to compute.
    """

    def __init__(
        self,
        context: Context,
        networks: Sequence[EgoNetwork],
        classes: int,
        device: torch.device,
    ) -> None:
        numbers = [network.client for network in networks]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"networks: clients {numbers}; give at least one, each once")
        self.clients = np.array(numbers, dtype=np.int64)
        self.features, self.classes = int(networks[0].x.shape[1]), classes
        self._networks, self._device = networks, device
        self._store = StateStore(context, "sage-client")

    @contextmanager
    def message(self, settings: SageSettings) -> Iterator[SageCohort]:
        """Open the cohort for one message; it counts as handled when the block ends well."""
        cohort = self._open(settings)
        self._store.begin()
        yield cohort
        self._store.commit(cohort, cohort.tensors)

    def places(self, clients: IntArray) -> torch.Tensor:
        """Turn numbers of clients into places here, ``[p]``; refuse clients of others."""
        where = {number: place for place, number in enumerate(self.clients.tolist())}
        foreign = [number for number in clients.tolist() if number not in where]
        if foreign:
            raise ValueError(f"the message names clients {foreign[:5]}, who are not here")
        return torch.tensor([where[number] for number in clients.tolist()], dtype=torch.int64)

    def drop(self) -> None:
        """Forget the run."""
        self._store.drop()

    def _open(self, settings: SageSettings) -> SageCohort:
        def build(tensors: Tensors) -> SageCohort:
            placed = {k: t if k in COUNTERS else t.to(self._device) for k, t in tensors.items()}
            return SageCohort(self._networks, self.classes, settings, self._device, placed)

        if self._store.version:
            cohort = self._store.load(build)
            assert isinstance(cohort, SageCohort)
            return cohort
        cohort = SageCohort(self._networks, self.classes, settings, self._device)
        cohort.tensors = self._store.create(cohort.tensors)
        return cohort
