"""Baselines of FedSCem: training alone, FedAvg and FedProx, on the same ego-networks.

*Self-training*: every client takes its local steps and shares nothing; the server gets the sum of
the clients' measurements.

*FedAvg* (McMahan et al., 2017) and *FedProx* (Li et al., 2020) are Flower's own strategies. A
SuperNode answers with the mean of its clients' weights and with their number. Flower weighs the
SuperNodes by that number, so the result is the mean over clients (FedSCem, equation 5). Round
``t``:

1. server -> clients: the mean model, ``[f, h]`` first layer and ``[D]`` all the rest;
2. client: takes it over, ``local_epochs`` epochs of its own Adam on ``L_nc``, for FedProx with
   ``proximal / 2 ||w - w_t||^2``;
3. client -> server: the weights; Flower averages them;
4. server -> clients: the new mean, to be measured (Flower's ``evaluate``).

Adam's moments stay with the client. Rows of the first layer whose feature a client does not have
are sent back unchanged (``EgoCohort.inactive_rows``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedProx
from torch import Tensor

from flower_graph.engine.graph_batch import count_batch, evaluate
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.strategies.fedscem.cohort import (
    EgoCohort,
    EgoSettings,
    common_model,
    initial_weights,
    predictions_of,
)
from flower_graph.strategies.fedscem.cohort_client import EgoCohortClient, model_of
from flower_graph.strategies.fedscem.messages import (
    METRIC_NAMES,
    NO_SLOTS,
)
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging
from flower_graph.strategies.fedscem.vector import mean_metrics, measure
from flower_graph.wire.arrays import Answer, Config, Measurements, Parameters
from flower_graph.wire.averaging import Asked, Rows
from flower_graph.wire.counts import CountReply
from flower_graph.wire.keys import (
    ARRAY_NAMES,
    CLIENTS,
    COUNTING,
    FIRST,
    REST,
    ROLES,
    SERVER_ROUND,
)


class SelfTraining(MaskedEmbeddingAveraging):
    """Server for clients that train alone, ``EgoNetworkClient``; arguments as of its parent."""

    # Any: arguments are those of its parent
    def __init__(self, settings: EgoSettings, **sampling_and_saving: Any) -> None:
        super().__init__(
            settings,
            variant="iter",  # nothing is shared, so its one step is the local one
            alignment=NO_SLOTS,
            aggregation="plain",
            **sampling_and_saving,
        )


# Client of FedAvg and FedProx --------------------------------------------------------------------


class EgoModelClient(EgoCohortClient):
    """The ego-networks of one SuperNode, which train the server's model.

    Parameters
    ----------
    context, egos, settings, **more
        As of ``EgoNetworkClient``; the context keeps Adam's moments.
    """

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Train the model on the clients that are asked; return their mean weights (steps 2, 3)."""
        with self._trained(parameters, config) as clients:
            return _answer(clients, torch.ones(clients.batch.size))

    def fit_each(self, parameters: Parameters, config: Config) -> Rows:
        with self._trained(parameters, config) as clients:
            own = zip(clients.batch.clients, torch.eye(clients.batch.size), strict=True)
            return Rows({client: _answer(clients, share) for client, share in own})

    @contextmanager
    def _trained(self, parameters: Parameters, config: Config) -> Iterator[EgoCohort]:
        asked = Asked.from_config(config).chosen(self._clients)
        with self._state.opened(self._makers) as cohort:
            # Flower's FedProx sends the weight.
            proximal = float(config.get("proximal-mu", 0.0))
            cohort.settings = self.settings._replace(proximal=proximal)
            clients = cohort.part(asked)
            clients.start_from(model_of(parameters))
            clients.train(int(config.get(SERVER_ROUND, 0)))
            cohort.put(clients)
            yield clients

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        with self._state.opened(self._makers) as clients:
            clients.start_from(model_of(parameters))
            logits = clients.classify(clients.embed())
            judged = evaluate(clients.batch, logits)
        self._measured(int(config.get(SERVER_ROUND, 0)), clients, judged, judged.loss)
        measured = measure(judged, None, 1.0).mean(0)
        metrics: dict[str, Any] = dict(zip(METRIC_NAMES, measured.tolist(), strict=True))
        good, counting = torch.ones(len(self._clients)) > 0, str(config.get(COUNTING, ""))
        counts = count_batch(clients.batch, logits, good, counting)
        metrics |= CountReply(counts).to_config()
        answer = metrics["cross-entropy"], len(self._clients), metrics
        return self._state.save_if_asked(config, answer, self._makers)

    def _taken(self, chosen: EgoCohort) -> Snapshot:
        model = chosen.begun()
        chosen.start_from(model)  # a client that was not measured has trained since
        predictions = predictions_of(chosen, self._classes)
        return Snapshot(predictions, [common_model(model, chosen.settings, chosen.batch.clients)])


def _answer(clients: EgoCohort, shares: Tensor) -> Answer:
    # shares [c], 0 or 1
    count = int(shares.sum())
    (mean,) = clients.weighted_sums(shares, divisor=float(count))
    # a list is no Scalar
    entries: dict[str, Any] = {ARRAY_NAMES: [FIRST, REST], CLIENTS: count}
    return [mean.first.cpu().numpy(), mean.rest.cpu().numpy()], count, entries


# Server of FedAvg and FedProx --------------------------------------------------------------------


class EgoFedAvg(ReportedFedAvg):
    """Flower's ``FedAvg`` for ``EgoModelClient``; other arguments as for ``ReportedFedAvg``."""

    # Any: arguments are those of its parent
    def __init__(self, settings: EgoSettings, **more: Any) -> None:
        super().__init__(seed=settings.seed, **more)
        self.settings = settings
        self.num_classes = settings.num_classes

    usual_rounds = 400

    def first_arrays(self) -> ArrayRecord:
        start = initial_weights(self.settings)
        return ArrayRecord({FIRST: Array(start.first.numpy()), REST: Array(start.rest.numpy())})

    def snapshot(self) -> Snapshot:
        model = model_of([array.numpy() for array in self.arrays.values()])
        return Snapshot(None, [common_model(model, self.settings, [NO_CLIENT])])

    def fixed_settings(self) -> dict[str, object]:
        return super().fixed_settings() | self.settings._asdict()

    def most_examples(self, node: int, *, training: bool) -> int | None:
        """Return the number of a SuperNode's clients: each has weight 1."""
        return len(self.session.members.clients.get(node, ())) or None

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
        sums = dict.fromkeys(METRIC_NAMES, 0.0)
        sums |= {name: value for name, value in evaluated.items() if isinstance(value, float)}
        means = mean_metrics(sums, self.settings.tau)
        loss, contrast = means["cross-entropy"], means["contrast"]
        accuracies = {f"{role}_accuracy": means[role] for role in ROLES}
        losses: dict[str, object] = {"loss": loss, "cross_entropy": loss, "regulariser": contrast}
        return losses | accuracies


class EgoFedProx(EgoFedAvg, FedProx):
    """Flower's ``FedProx`` for ``EgoModelClient``; the weight is ``settings.proximal``."""

    def __init__(self, settings: EgoSettings, **more: object) -> None:
        super().__init__(settings, proximal_mu=settings.proximal, **more)
