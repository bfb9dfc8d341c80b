"""The clients of LocalSage+ and FedSage+ that one SuperNode hosts, kept from message to message."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient

from flower_graph.client.cohort_state import CohortState, Makers
from flower_graph.client.state import Tensors
from flower_graph.data.checked import check_clients
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.device import resolve_device
from flower_graph.errors import StateLostError
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Snapshot
from flower_graph.strategies.fed_sage.cohort import SageCohort, SageSettings, Scores, Upload
from flower_graph.strategies.fed_sage.kept import models_of, predictions_of
from flower_graph.strategies.fed_sage.messages import (
    Arrays,
    GeneratorRequest,
    Generators,
    PeerGradients,
    SageEnrolment,
    SageRequest,
    SageScores,
    read_settings,
    tensors_of,
    write_settings,
)
from flower_graph.wire.arrays import IntArray
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import ARRAY_NAMES, NOT_SAVED, RUN_TOKEN, SERVER_ROUND

SETTINGS = "sage-settings"  # in Context.state
COUNTERS = ("round", "epoch", "averaged")  # bookkeeping, stays on the CPU
Answer = tuple[list[Any], int, dict[str, Any]]


class SageClient(NumPyClient):
    """The ego-networks that one SuperNode hosts: in a deployment one, in a simulation many.

    Parameters
    ----------
    context : Context
        The ClientApp's context; the clients' weights live behind it (``client.state``).
    egos : sequence of EgoNetwork
        The clients.
    num_classes : int
        Number of classes in the whole run.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir, output_dir : Path, optional
        Where checkpoints are saved, and where predictions, models and figures are left, if not in
        a place of the SuperNode's own (``state-dir``).
    classes : sequence of str, optional
        Names of the classes, for predictions.
    """

    actions = ("generate", "judge", "save", "finish")

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        num_classes: int,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        numbers = [network.client for network in egos]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"networks: clients {numbers}; give at least one, each once")
        check_clients(egos)
        self.clients = np.array(numbers, dtype=np.int64)
        self._networks, self._classes, self._device = egos, num_classes, resolve_device(device)
        self._names, self._record = classes, context.state
        self.outputs = ClientOutputs(context, output_dir)
        self._state = CohortState[SageCohort](context, "sage-client", numbers, checkpoint_dir)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say which clients are here; go on from a checkpoint if the server does."""
        makers = self._makers(read_settings(config))
        self._state.restore(Resume.from_config(config), makers)
        features, handled = int(self._networks[0].x.shape[1]), self._state.processed(makers)
        return SageEnrolment(self.clients, features, self._classes, handled).to_config()

    def generate(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Train NeighGen alone, or step ``fGen`` with the others' judgement (steps 1 and 2)."""
        request = GeneratorRequest.from_numpy(parameters, config)
        with self._opened(request.settings) as cohort:
            cohort.pretrain()
            if request.epoch:
                cohort.learn(request.epoch, tensors_of(request.gradient), request.others)
            if not request.share:
                return [], self.clients.size, {}
            shown = cohort.upload(request.epoch + 1)
        rows, missing, latent = (part.cpu().numpy() for part in shown[:3])
        weights = _arrays(shown.weights)
        reply = Generators(request.epoch + 1, self.clients, rows, missing, latent, weights)
        return reply.to_numpy()

    def judge(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Compare what all clients generate with the nodes here (step 2)."""
        shown = Generators.from_numpy(parameters, config)
        parts = [torch.from_numpy(part) for part in (shown.rows, shown.missing, shown.encoded)]
        upload = Upload(parts[0], parts[1], parts[2], tensors_of(shown.weights))
        with self._opened(read_settings(config)) as cohort:
            gradient = cohort.judge(upload, torch.from_numpy(shown.clients))
        return PeerGradients(shown.epoch, _arrays(gradient)).to_numpy(self.clients.size)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Train the classifiers on the mended graphs (step 4).

        LocalSage+ answers with scores, FedSage+ with the mean classifier of the clients here,
        weighted by their training nodes.
        """
        request = SageRequest.from_numpy(parameters, config)
        number, places = request.server_round, self._places(request.clients)
        with self._opened(request.settings) as cohort:
            cohort.begin()
            if request.weights:
                cohort.set_weights(number, places, tensors_of(request.weights))
            cohort.train(number, places)
            if not request.weights:
                result = cohort.score()
                self._measured(number, places, result)
                scores = SageScores.of(number, result, places)
                return [], request.clients.size, scores.to_config()
            mean, size = cohort.mean_weights(places)
        entries = {SERVER_ROUND: number, ARRAY_NAMES: list(mean)}
        return list(_arrays(mean).values()), size, entries

    def evaluate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Judge the averaged classifier on mended graphs."""
        request = SageRequest.from_numpy(parameters, config)
        places = self._places(request.clients)
        with self._opened(request.settings) as cohort:
            cohort.begin()
            result = cohort.score(tensors_of(request.weights))
        self._measured(request.server_round, places, result)
        scores = SageScores.of(request.server_round, result, places)
        loss = float(np.array(scores.losses, np.float32).mean())
        return loss, request.clients.size, scores.to_config()

    def save(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Write a checkpoint."""
        server_round, run = int(config[SERVER_ROUND]), str(config[RUN_TOKEN])
        why = self._state.save(server_round, run, self._makers(read_settings(config)))
        return [], self.clients.size, {NOT_SAVED: why} if why else {}

    def finish(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Forget the run."""
        self._state.drop()
        self._record.pop(SETTINGS, None)
        return [], self.clients.size, {}

    def snapshot(self) -> Snapshot:
        """Give predictions and models of all clients as they were last judged."""
        if SETTINGS not in self._record:
            raise StateLostError("what was kept of this run is not here")
        settings = read_settings(dict(self._record.config_records[SETTINGS]))
        cohort = self._state.look(self._makers(settings))
        return Snapshot(predictions_of(cohort, self._networks, self._names), [models_of(cohort)])

    def _measured(self, server_round: int, places: torch.Tensor, scores: Scores) -> None:
        """Write the figures of some clients, which stay here."""
        self.outputs.measured(
            server_round,
            self.clients[places],
            loss=scores.loss[places],
            accuracy=(scores.correct / scores.size)[places],  # of no nodes: NaN
            nodes=[self._networks[place].y.numel() for place in places.tolist()],
        )

    def _opened(self, settings: SageSettings) -> AbstractContextManager[SageCohort]:
        """Open the cohort for one message; it counts as handled when the block ends well."""
        # Noted, as who asks for a snapshot later does not say what models are made with.
        self._record[SETTINGS] = ConfigRecord(write_settings(settings))
        return self._state.opened(self._makers(settings))

    def _places(self, clients: IntArray) -> torch.Tensor:
        """Turn numbers of clients into places here, ``[p]``; refuse clients of others."""
        where = {number: place for place, number in enumerate(self.clients.tolist())}
        foreign = [number for number in clients.tolist() if number not in where]
        if foreign:
            raise ValueError(f"the message names clients {foreign[:5]}, who are not here")
        return torch.tensor([where[number] for number in clients.tolist()], dtype=torch.int64)

    def _makers(self, settings: SageSettings) -> Makers[SageCohort]:
        """Return what makes tensors of new clients, and what makes a cohort from tensors."""

        def start() -> Tensors:
            return SageCohort(self._networks, self._classes, settings, self._device).tensors

        def build(tensors: Tensors) -> tuple[SageCohort, Tensors]:
            placed = {k: t if k in COUNTERS else t.to(self._device) for k, t in tensors.items()}
            cohort = SageCohort(self._networks, self._classes, settings, self._device, placed)
            return cohort, cohort.tensors

        return Makers(start, build)


def _arrays(tensors: Tensors) -> Arrays:
    return {name: value.cpu().numpy() for name, value in tensors.items()}
