"""LocalSage+ and FedSage+: classifiers on graphs mended by generated neighbours.

Zhang, Yang, Li, Sun and Yiu, "Subgraph Federated Learning with Missing Neighbor Generation",
NeurIPS 2021; here as baselines of FedSCem, on ego-networks and with FedSCem's classifier.

1. *Alone* (``train.generate``, epoch 0). Each client hides a quarter of its nodes and trains
   NeighGen on what is left: smooth L1 on the number of hidden neighbours, the squared distance of
   each generated neighbour to the nearest hidden one, and the classes on the mended graph.
2. *Together* (FedSage+, epochs 1, 2, ...). Each client shows its feature generator ``fGen`` and
   its encoded nodes, with noise. Every other client answers with the gradient, by the weights of
   ``fGen``, of ``sum ||g - x_u||^2``, where ``x_u`` is its own node nearest to the generated ``g``
   (``train.judge``). The author adds it to its own loss and steps ``fGen`` (``train.generate``).
3. Every client mends its whole ego-network, once.
4. *Rounds* (``train``). Each client trains the classifier on its mended ego-network. FedSage+
   averages the classifiers (FedAvg) and judges the mean in a second exchange (``evaluate``), as
   Flower does; LocalSage+ exchanges nothing but scores.

*Where we differ.* ``fGen`` is smaller (``neighbour_generation.py``). As in the paper, and unlike
its published code, nodes are hidden among all nodes, the number and feature losses run over all
that are left, and others compare with their nearest node, not a random one. Of a node's slots the
losses see as many as neighbours are hidden, ``NEIGHBOURS`` at most.

*Absent clients.* Figures have each client's last score; a client of LocalSage+ that never took
part has none. One that comes later trains its generator alone.
*Privacy.* The server sees generators, encoded nodes with unit noise, and gradients, unmasked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import Tensor

from flower_graph.averaging_checkpoints import restore_if_asked
from flower_graph.data.ego_networks import EgoNetwork
from flower_graph.ego_cohort import EgoSettings
from flower_graph.errors import NoClientsError
from flower_graph.neighbour_generation import initial_weights
from flower_graph.records import keys
from flower_graph.records.fed_sage import (
    Arrays,
    GeneratorRequest,
    Generators,
    Judgement,
    SageHello,
    SageRequest,
    SageScores,
    read_mean,
    read_settings,
)
from flower_graph.records.keys import ARRAY_NAMES, NUM_EXAMPLES, ROUND, IntArray
from flower_graph.relay import resolve_device
from flower_graph.report import RoundReport, format_round
from flower_graph.sage_book import SageBook, as_metrics
from flower_graph.sage_checkpoints import SageCheckpoints
from flower_graph.sage_cohort import CLASSIFIER_NAMES, SageSettings, Upload
from flower_graph.sage_host import SageHost
from flower_graph.sage_session import SageSession
from flower_graph.without_evaluate import WithoutEvaluate

LOG = logging.getLogger(__name__)
# Messages besides Flower's own that a SageClient answers.
ACTIONS = ("generate", "judge", "save", "finish")


# Client ------------------------------------------------------------------------------------------


class SageClient(NumPyClient):
    """The ego-networks that one SuperNode hosts: in a deployment one, in a simulation many.

    Parameters
    ----------
    context : Context
        The ClientApp's context; the clients' weights live behind it (``flower_graph.state``).
    egos : sequence of EgoNetwork
        The clients.
    num_classes : int
        Number of classes in the whole run.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where checkpoints are saved, if not in a place of the SuperNode's own (``state-dir``).
    """

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        num_classes: int,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
    ) -> None:
        where = resolve_device(device)
        self.host = SageHost(context, egos, num_classes, where, checkpoint_dir)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say which clients are here; go on from a checkpoint if the server does."""
        host, settings = self.host, read_settings(config)
        restore_if_asked(lambda resume: host.restore(settings, resume), config)
        handled = host.handled(settings)
        return SageHello(host.clients, host.features, host.classes, handled).to_properties()

    def generate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Train NeighGen alone, or step ``fGen`` with the others' judgement (steps 1 and 2)."""
        request = GeneratorRequest.from_numpy(parameters, config)
        with self.host.message(request.settings) as cohort:
            cohort.pretrain()
            if request.epoch:
                gradient = {name: torch.from_numpy(g) for name, g in request.gradient.items()}
                cohort.learn(request.epoch, gradient, request.others)
            if not request.share:
                return [], self.host.clients.size, {}
            shown = cohort.upload(request.epoch + 1)
        rows, missing, latent = (part.cpu().numpy() for part in shown[:3])
        weights = {name: weight.cpu().numpy() for name, weight in shown.weights.items()}
        clients = self.host.clients
        return Generators(request.epoch + 1, clients, rows, missing, latent, weights).to_numpy()

    def judge(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Compare what all clients generate with the nodes here (step 2)."""
        shown = Generators.from_numpy(parameters, config)
        parts = [torch.from_numpy(p) for p in (shown.rows, shown.missing, shown.encoded)]
        weights = {name: torch.from_numpy(weight) for name, weight in shown.weights.items()}
        upload = Upload(parts[0], parts[1], parts[2], weights)
        with self.host.message(read_settings(config)) as cohort:
            gradient = cohort.judge(upload, torch.from_numpy(shown.clients))
        arrays = {name: grad.cpu().numpy() for name, grad in gradient.items()}
        return Judgement(shown.epoch, arrays).to_numpy(self.host.clients.size)

    def fit(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Train the classifiers on the mended graphs (step 4).

        LocalSage+ answers with scores, FedSage+ with the mean classifier of the clients here,
        weighted by their training nodes.
        """
        request = SageRequest.from_numpy(parameters, config)
        places = self.host.places(request.clients)
        with self.host.message(request.settings) as cohort:
            cohort.begin()
            if request.weights:
                cohort.set_weights(request.server_round, places, _tensors(request.weights))
            cohort.train(request.server_round, places)
            if not request.weights:
                scores = SageScores.of(request.server_round, cohort.score(), places)
                return [], places.numel(), scores.to_metrics()
            mean, size = cohort.mean_weights(places)
        arrays = [value.cpu().numpy() for value in mean.values()]
        return arrays, size, {ROUND: request.server_round, ARRAY_NAMES: list(mean)}

    def evaluate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Judge the averaged classifier on mended graphs."""
        request = SageRequest.from_numpy(parameters, config)
        places = self.host.places(request.clients)
        with self.host.message(request.settings) as cohort:
            cohort.begin()
            found = cohort.score(_tensors(request.weights))
        scores = SageScores.of(request.server_round, found, places)
        return float(scores.losses.mean()), places.numel(), scores.to_metrics()

    def save(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Write a checkpoint."""
        why = self.host.save(read_settings(config), int(config[ROUND]), str(config[keys.RUN_TOKEN]))
        return [], self.host.clients.size, {keys.NOT_SAVED: why} if why else {}

    def finish(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Forget the run."""
        self.host.drop()
        return [], self.host.clients.size, {}


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


# Server ------------------------------------------------------------------------------------------


class LocalSage(WithoutEvaluate):
    """Server of LocalSage+, for clients that answer as ``SageClient`` does: it keeps the scores.

    Parameters
    ----------
    settings : EgoSettings
        Sizes, optimiser and seed of the classifier; the rest plays no part.
    participation : float
        Share of the clients that train in a round, above 0 and at most 1.
    seed : int
        Of the choice of participants.
    min_nodes : int
        SuperNodes to wait for before a round.
    generator_epochs : int
        Steps of NeighGen alone, at least 1; FedSage+ takes as many together after them.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where and every how many rounds to save everything; 0 for never.
    """

    averages = False  # whether classifiers are averaged and generators trained together

    def __init__(
        self,
        settings: EgoSettings,
        *,
        participation: float = 1.0,
        seed: int = 0,
        min_nodes: int = 1,
        generator_epochs: int = 20,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        if not 0 < participation <= 1:
            raise ValueError(f"participation: {participation} is not above 0 and at most 1")
        for name, value in (("min_nodes", min_nodes), ("generator_epochs", generator_epochs)):
            if value < 1:
                raise ValueError(f"{name}: {value} is not at least 1")
        s = settings
        self.settings = SageSettings(
            s.hidden, s.learning_rate, s.weight_decay, s.local_epochs, generator_epochs, s.seed
        )
        start = initial_weights(s.num_features, s.hidden, s.num_classes, s.seed)
        self.shapes = {name: tuple(weight.shape) for name, weight in start.items()}
        self.book = SageBook(s.num_features, s.num_classes, seed, participation)
        self.asked: dict[int, IntArray] = {}  # SuperNode to this round's clients there
        self.session = SageSession(
            self.book, self.settings, self.shapes, min_nodes=min_nodes, together=self.averages
        )
        # The averaged classifier; LocalSage+ has none.
        self.classifier: Arrays = (
            {name: start[name].numpy() for name in CLASSIFIER_NAMES} if self.averages else {}
        )
        self.checkpoints = SageCheckpoints(
            type(self).__name__, self.session, self.classifier, checkpoint_dir, checkpoint_every
        )

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Bytes that the method sent so far: direction to kind to bytes."""
        return self.book.ledger.payload

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with, as far as the server has it."""
        return _tensors(self.classifier)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 400,
        timeout: float = 600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        resume: bool = False,
    ) -> Result:
        """Run the method.

        Parameters
        ----------
        grid : Grid
            Flower's grid, or ``flower_graph.simulation.InProcessGrid``.
        initial_arrays, train_config, evaluate_config, evaluate_fn
            Refused: the weights come from the seed, and clients evaluate.
        num_rounds : int
            Rounds of the classifier; the generators learn before the first.
        timeout : float
            Seconds that an exchange may take.
        on_round : callable, optional
            Called with every round's report; without it, one line is logged.
        resume : bool
            Go on from the last checkpoint.

        Returns
        -------
        Result
            The averaged classifier, if there is one, and the metrics of every round.

        Raises
        ------
        CheckpointError
            If there is nothing to resume from, or what there is does not fit.
        NoClientsError
            If no client is there, or none gives a usable answer before the deadline.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds: {num_rounds} is not at least 1")
        refused = (initial_arrays, train_config, evaluate_config, evaluate_fn)
        if any(value is not None for value in refused):
            raise ValueError("initial_arrays, train_config, evaluate_config, evaluate_fn: not used")
        if self.session.is_open:
            raise ValueError("this strategy has run already: build a new one")
        self.session.open(grid, timeout)
        result = Result()
        done = self.checkpoints.resume(num_rounds) if resume else 0
        for server_round in range(done + 1, num_rounds + 1):
            started = time.perf_counter()
            report = self._round(server_round, grid)
            result.train_metrics_clientapp[server_round] = as_metrics(report)
            report.seconds = time.perf_counter() - started
            (on_round or (lambda done: LOG.info(format_round(done, num_rounds))))(report)
            self.checkpoints.save(server_round, num_rounds)
        self.session.finish(num_rounds)
        result.arrays = self._arrays()
        return result

    def _round(self, server_round: int, grid: Grid) -> RoundReport:
        """Run step 4."""
        messages = self.configure_train(server_round, ArrayRecord(), ConfigRecord(), grid)
        contents = {message.metadata.dst_node_id: message.content for message in messages}
        replies = self.session.send(contents, "train", server_round, self._reader(server_round))
        return self._learn(server_round, replies.values)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask this round's clients to train; the weights are the strategy's own."""
        if not self.session.is_open:  # Flower's own round loop is running
            self.session.open(grid, self.session.timeout)
        self.session.rejected = []
        connected = self.session.connected()
        self.asked = self.book.participants(server_round, connected)
        if not self.asked:
            raise NoClientsError(f"round {server_round}: no client who takes part is connected")
        for node, clients in self.asked.items():
            request = SageRequest(server_round, clients, self.settings, self.classifier)
            yield Message(request.to_record(), node, "train", group_id=str(server_round))

    def _reader(self, server_round: int) -> Callable[[int, RecordDict], Any]:
        """Return what reads a reply of the round."""
        return lambda node, content: SageScores.from_record(content, server_round, self.asked[node])

    def _learn(self, server_round: int, replies: Mapping[int, Any]) -> RoundReport:
        """Keep the scores."""
        self.session.must_have(server_round, replies)
        for node, scores in replies.items():
            self.book.keep_scores(self.asked[node], scores)
        return self.session.report(server_round, self.asked, replies)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Learn from replies that Flower's own round loop gathered; ``start`` needs it not."""
        values = self.session.read(server_round, replies, self._reader(server_round))
        return self._arrays(), as_metrics(self._learn(server_round, values))

    def summary(self) -> None:
        """Log the settings in one line."""
        LOG.info("%s: %s", type(self).__name__, self.settings)

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(value) for name, value in self.classifier.items()})


class FedSage(LocalSage):
    """LocalSage+ with generators trained together and classifiers averaged; parameters as there."""

    averages = True

    def _reader(self, server_round: int) -> Callable[[int, RecordDict], Any]:
        """Return what reads a mean classifier and its weight."""
        return lambda _, content: read_mean(content, server_round, self.shapes)

    def _learn(self, server_round: int, replies: Mapping[int, Any]) -> RoundReport:
        """Average the classifiers as FedAvg does, and have the mean judged."""
        self.session.must_have(server_round, replies)
        size = sum(value.nbytes for value in self.classifier.values())
        self.book.count_weights(self.asked, replies, size)
        weighted = [content for content, weight in replies.values() if weight]
        if weighted:
            mean = aggregate_arrayrecords(weighted, NUM_EXAMPLES)
            self.classifier |= {n: mean[n].numpy().astype(np.float32) for n in CLASSIFIER_NAMES}
        else:
            LOG.warning("round %d: no client has training nodes; nothing averaged", server_round)
        self.session.evaluate(server_round, self.classifier)
        return self.session.report(server_round, self.asked, replies)
