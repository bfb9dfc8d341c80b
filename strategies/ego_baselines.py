"""What FedSCem is compared with: training alone, FedAvg and FedProx, on the same ego-networks.

*Self-training*: every client takes its local steps, nothing is shared; the server gets what the
clients measure, added up.

*FedAvg* (McMahan et al., 2017) and *FedProx* (Li et al., 2020) are Flower's own strategies. The
clients of one SuperNode answer with the mean of their weights and say how many they are, so that
Flower's mean over SuperNodes weighted by that number is the mean over clients (FedSCem, equation
5). Round ``t``:

1. server -> clients: the mean model, ``[f, h]`` first layer and ``[D]`` all the rest;
2. client: takes it over, ``local_epochs`` steps of its own Adam on ``L_nc``, for FedProx with
   ``proximal / 2 ||w - w_t||^2``;
3. client -> server: the weights; Flower averages them;
4. server -> clients: the new mean, to be measured (Flower's ``evaluate``).

Adam's moments stay with the client. Rows of the first layer whose feature a client does not have
travel too, as they came: it has nothing to say about them (``ChosenEgos.inactive_rows``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, Result
from numpy.typing import NDArray

from flower_graph.data.ego_networks import EgoNetwork
from flower_graph.ego_cohort import EgoSettings, ModelWeights, initial_weights
from flower_graph.ego_host import EgoHost
from flower_graph.ego_secrets import NO_SLOTS
from flower_graph.ego_vector import mean_metrics, mean_weights, measure
from flower_graph.ledger import ByteLedger, count_bytes
from flower_graph.records.ego import METRIC_NAMES, read_settings, write_settings
from flower_graph.records.keys import ARRAY_NAMES, FIRST, METRICS, NUM_EXAMPLES, REST
from flower_graph.relay import resolve_device
from flower_graph.report import RoundReport, format_round
from flower_graph.strategies.masked_embedding_averaging import MaskedEmbeddingAveraging

LOG = logging.getLogger(__name__)


class SelfTraining(MaskedEmbeddingAveraging):
    """Clients that train alone, with ``EgoNetworkClient``; arguments as there."""

    def __init__(
        self,
        settings: EgoSettings,
        *,
        participation: float = 1.0,
        min_nodes: int = 1,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        super().__init__(
            settings._replace(proximal=0.0),
            variant="iter",  # without anything shared, its one step is the local one
            alignment=NO_SLOTS,
            aggregation="plain",
            participation=participation,
            min_nodes=min_nodes,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )


# Client of FedAvg and FedProx --------------------------------------------------------------------


class EgoModelClient(NumPyClient):
    """The ego-networks of one SuperNode, training the server's model.

    Parameters
    ----------
    context : Context
        The ClientApp's context; Adam's moments live behind it.
    egos : sequence of EgoNetwork
        The clients' graphs.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    """

    def __init__(self, context: Context, egos: Sequence[EgoNetwork], *, device: str = "cpu"):
        self.host = EgoHost(context, egos, device=resolve_device(device), checkpoint_dir=None)

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Train the model on every client and return the mean of their weights (steps 2, 3)."""
        settings = read_settings(config)
        if "proximal-mu" in config:  # Flower's FedProx says so
            settings = settings._replace(proximal=float(config["proximal-mu"]))
        with self.host.opened(settings) as clients:
            clients.start_from(_model(parameters))
            clients.train()
            weights = mean_weights(clients)
        return weights, len(self.host.egos), {ARRAY_NAMES: [FIRST, REST]}

    def evaluate(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Measure the model on every client (step 4)."""
        with self.host.opened(read_settings(config)) as clients:
            clients.start_from(_model(parameters))
            measured = measure(clients.judge(clients.embed()), None, 1.0).mean(0)
        metrics = dict(zip(METRIC_NAMES, measured.tolist(), strict=True))
        return metrics["cross-entropy"], len(self.host.egos), metrics


# Server of FedAvg and FedProx --------------------------------------------------------------------


class _Reporting(FedAvg):
    """Flower's FedAvg, with a report a round; what ``EgoFedAvg`` and ``EgoFedProx`` share."""

    settings: EgoSettings
    ledger: ByteLedger
    _on_round: Callable[[RoundReport], None]
    _started: float
    _model: ArrayRecord
    _asked: int

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Count what is sent."""
        self._started = time.perf_counter()
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._count("down", messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Count what came, then average."""
        replies = list(replies)
        self._count("up", [reply for reply in replies if reply.has_content()])
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            self._model = arrays
        return arrays, metrics

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the measurements and report the round."""
        replies = list(replies)
        metrics = super().aggregate_evaluate(server_round, replies)
        good = [reply for reply in replies if not reply.has_error()]
        counts = [reply.content.metric_records[METRICS][NUM_EXAMPLES] for reply in good]
        answered = sum(count for count in counts if isinstance(count, int))
        self._asked = answered + len(replies) - len(good)  # what is silent counts as one client
        self._on_round(self._report(server_round, metrics or MetricRecord(), answered))
        return metrics

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the mean model."""
        return {name: array.numpy() for name, array in self._model.items()}

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.ledger.payload

    def run(
        self,
        grid: Grid,
        num_rounds: int,
        timeout: float,
        on_round: Callable[[RoundReport], None] | None,
    ) -> Result:
        """Run Flower's rounds with the clients' settings in every message."""
        config = write_settings(self.settings)
        start = initial_weights(self.settings)
        self._on_round = on_round or (lambda report: LOG.info(format_round(report, num_rounds)))
        self._model = ArrayRecord(
            {FIRST: Array(start.first.numpy()), REST: Array(start.rest.numpy())}
        )
        return super().start(
            grid,
            self._model,
            num_rounds,
            timeout,
            train_config=ConfigRecord(dict(config)),
            evaluate_config=ConfigRecord(dict(config)),
        )

    def _count(self, direction: str, messages: Sequence[Message]) -> None:
        for message in messages:
            size = count_bytes(message.content)
            self.ledger.count_wire(direction, size)
            arrays = message.content.array_records.values()
            self.ledger.count(direction, "weights", sum(r.count_bytes() for r in arrays))

    def _report(self, server_round: int, metrics: MetricRecord, answered: int) -> RoundReport:
        found = {name: metrics.get(name) for name in METRIC_NAMES}
        numbers = {n: v if isinstance(v, float) else 0.0 for n, v in found.items()}
        means = mean_metrics(numbers, self.settings.tau)
        return RoundReport(
            round=server_round,
            loss=means.cross_entropy,
            cross_entropy=means.cross_entropy,
            regulariser=means.contrast,
            train_accuracy=means.train,
            val_accuracy=means.val,
            test_accuracy=means.test,
            asked=self._asked,
            answered=answered,
            bytes=self.payload,
            wire_bytes=self.ledger.wire,
            seconds=time.perf_counter() - self._started,
        )


class EgoFedAvg(_Reporting):
    """Flower's ``FedAvg`` for ``EgoModelClient``.

    Parameters
    ----------
    settings : EgoSettings
        The clients' model and training.
    participation : float
        Share of the SuperNodes asked each round, above 0 and at most 1.
    min_nodes : int
        SuperNodes to wait for before a round.
    """

    def __init__(
        self, settings: EgoSettings, *, participation: float = 1.0, min_nodes: int = 1
    ) -> None:
        super().__init__(participation, 1.0, min_nodes, min_nodes, min_nodes)
        self.settings, self.ledger = settings._replace(proximal=0.0), ByteLedger()

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        num_rounds: int = 400,
        timeout: float = 600.0,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> Result:
        """Run the method; arguments and result as of ``MaskedEmbeddingAveraging.start``."""
        return self.run(grid, num_rounds, timeout, on_round)


class EgoFedProx(EgoFedAvg, FedProx):
    """Flower's ``FedProx`` for ``EgoModelClient``; the weight is ``settings.proximal``."""

    def __init__(
        self, settings: EgoSettings, *, participation: float = 1.0, min_nodes: int = 1
    ) -> None:
        counts = (min_nodes, min_nodes, min_nodes)
        FedProx.__init__(self, participation, 1.0, *counts, proximal_mu=settings.proximal)
        self.settings, self.ledger = settings._replace(proximal=0.0), ByteLedger()


def _model(parameters: list[NDArray[Any]]) -> ModelWeights:
    first, rest = (torch.from_numpy(np.ascontiguousarray(part)) for part in parameters)
    return ModelWeights(first, rest)
