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
from flower_graph.strategies.fed_sage.cohort import SageCohort, SageSettings, Upload
from flower_graph.strategies.fed_sage.messages import (
    Arrays,
    GeneratorRequest,
    Generators,
    PeerGradients,
    SageEnrolment,
    SageRequest,
    SageScores,
)

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

    def enrol(self, settings: SageSettings, resume: Resume) -> SageEnrolment:
        """Go on from a checkpoint if the server does; say who is here, and what is kept."""
        makers = self._makers(settings)
        self._state.restore(resume, makers)
        handled = self._state.processed(makers)
        return SageEnrolment(self.clients, self.features, self.classes, handled)

    def generate(self, request: GeneratorRequest) -> Generators | None:
        """Train NeighGen alone, or step ``fGen`` with the others' judgement; show it if asked."""
        with self._opened(request.settings) as cohort:
            cohort.pretrain()
            if request.epoch:
                cohort.learn(request.epoch, tensors_of(request.gradient), request.others)
            if not request.share:
                return None
            shown = cohort.upload(request.epoch + 1)
        rows, missing, latent = (part.cpu().numpy() for part in shown[:3])
        weights = _arrays(shown.weights)
        return Generators(request.epoch + 1, self.clients, rows, missing, latent, weights)

    def judge(self, shown: Generators, settings: SageSettings) -> PeerGradients:
        """Compare what all clients generate with the nodes here."""
        parts = [torch.from_numpy(part) for part in (shown.rows, shown.missing, shown.encoded)]
        upload = Upload(parts[0], parts[1], parts[2], tensors_of(shown.weights))
        with self._opened(settings) as cohort:
            gradient = cohort.judge(upload, torch.from_numpy(shown.clients))
        return PeerGradients(shown.epoch, _arrays(gradient))

    def train(self, request: SageRequest) -> SageScores | tuple[Arrays, int]:
        """Train classifiers; give the mean of those that came with weights, else their scores."""
        places = self._places(request.clients)
        with self._opened(request.settings) as cohort:
            cohort.begin()
            if request.weights:
                cohort.set_weights(request.server_round, places, tensors_of(request.weights))
            cohort.train(request.server_round, places)
            if not request.weights:
                return SageScores.of(request.server_round, cohort.score(), places)
            mean, size = cohort.mean_weights(places)
        return _arrays(mean), size

    def evaluate(self, request: SageRequest) -> SageScores:
        """Measure the averaged classifier on mended graphs."""
        places = self._places(request.clients)
        with self._opened(request.settings) as cohort:
            cohort.begin()
            result = cohort.score(tensors_of(request.weights))
        return SageScores.of(request.server_round, result, places)

    def _opened(self, settings: SageSettings) -> AbstractContextManager[SageCohort]:
        """Open the cohort for one message; it counts as handled when the block ends well."""
        return self._state.opened(self._makers(settings))

    def _places(self, clients: IntArray) -> torch.Tensor:
        """Turn numbers of clients into places here, ``[p]``; refuse clients of others."""
        where = {number: place for place, number in enumerate(self.clients.tolist())}
        foreign = [number for number in clients.tolist() if number not in where]
        if foreign:
            raise ValueError(f"the message names clients {foreign[:5]}, who are not here")
        return torch.tensor([where[number] for number in clients.tolist()], dtype=torch.int64)

    def save(self, settings: SageSettings, server_round: int, run: str) -> str:
        """Write a round's checkpoint; return why it cannot be written, or nothing."""
        return self._state.save(server_round, run, self._makers(settings))

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


def tensors_of(arrays: Arrays) -> Tensors:
    """Give arrays as tensors."""
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def _arrays(tensors: Tensors) -> Arrays:
    return {name: value.cpu().numpy() for name, value in tensors.items()}
