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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.device import resolve_device
from flower_graph.errors import NoClientsError
from flower_graph.messages import keys
from flower_graph.messages.fields import Resume
from flower_graph.messages.keys import ARRAY_NAMES, NUM_EXAMPLES, SERVER_ROUND
from flower_graph.report.rounds import RoundReport
from flower_graph.server.exchange import Replies
from flower_graph.server.participation import NOT_CONNECTED
from flower_graph.server.round_strategy import RoundStrategy
from flower_graph.server.session import Session
from flower_graph.strategies.fed_sage.cohort import CLASSIFIER_NAMES, SageSettings, Upload
from flower_graph.strategies.fed_sage.cohort_client import SageCohortClient
from flower_graph.strategies.fed_sage.generator_training import GeneratorTraining, sage_bytes
from flower_graph.strategies.fed_sage.messages import (
    Arrays,
    GeneratorRequest,
    Generators,
    PeerGradients,
    SageEnrolment,
    SageRequest,
    SageScores,
    read_mean,
    read_settings,
    write_settings,
)
from flower_graph.strategies.fed_sage.neighbour_generation import initial_weights
from flower_graph.strategies.fed_sage.server_state import SageMembership, SageServerState
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoSettings

LOG = logging.getLogger(__name__)
# Messages besides Flower's own that a SageClient answers.
ACTIONS = ("generate", "judge", "save", "finish")


# Client ------------------------------------------------------------------------------------------


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
        self.host = SageCohortClient(context, egos, num_classes, where, checkpoint_dir)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say which clients are here; go on from a checkpoint if the server does."""
        host, settings = self.host, read_settings(config)
        host.restore(settings, Resume.from_config(config))
        handled = host.handled(settings)
        return SageEnrolment(host.clients, host.features, host.classes, handled).to_config()

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
        return PeerGradients(shown.epoch, arrays).to_numpy(self.host.clients.size)

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
                return [], places.numel(), scores.to_config()
            mean, size = cohort.mean_weights(places)
        arrays = [value.cpu().numpy() for value in mean.values()]
        return arrays, size, {SERVER_ROUND: request.server_round, ARRAY_NAMES: list(mean)}

    def evaluate(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Judge the averaged classifier on mended graphs."""
        request = SageRequest.from_numpy(parameters, config)
        places = self.host.places(request.clients)
        with self.host.message(request.settings) as cohort:
            cohort.begin()
            result = cohort.score(_tensors(request.weights))
        scores = SageScores.of(request.server_round, result, places)
        return float(scores.losses.mean()), places.numel(), scores.to_config()

    def save(
        self, parameters: list[Any], config: dict[str, Any]
    ) -> tuple[list[Any], int, dict[str, Any]]:
        """Write a checkpoint."""
        why = self.host.save(
            read_settings(config), int(config[SERVER_ROUND]), str(config[keys.RUN_TOKEN])
        )
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


class LocalSage(RoundStrategy):
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

    usual_rounds = 400
    unused = "not used"
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
        if generator_epochs < 1:
            raise ValueError(f"generator_epochs: {generator_epochs} is not at least 1")
        s = settings
        self.settings = SageSettings(
            s.hidden, s.learning_rate, s.weight_decay, s.local_epochs, generator_epochs, s.seed
        )
        start = initial_weights(s.num_features, s.hidden, s.num_classes, s.seed)
        self.shapes = {name: tuple(weight.shape) for name, weight in start.items()}
        self.scores = SageServerState()
        self.members = SageMembership(self.scores, self.settings, s.num_features, s.num_classes)
        super().__init__(
            Session(
                self.members,
                min_nodes=min_nodes,
                participation=participation,
                seed=seed,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
            )
        )
        self.generators = GeneratorTraining(self.session, self.scores, self.settings, self.shapes)
        # The averaged classifier; LocalSage+ has none.
        self.classifier: Arrays = (
            {name: start[name].numpy() for name in CLASSIFIER_NAMES} if self.averages else {}
        )

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Bytes that the method sent so far: direction to kind to bytes."""
        return self.scores.ledger.payload

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with, as far as the server has it."""
        return _tensors(self.classifier)

    def ask(self, server_round: int) -> dict[int, SageRequest]:
        """Have newcomers' generators trained (steps 1, 2), then ask the round's clients (4)."""
        session, members = self.session, self.members
        is_first = not members.clients and not members.resume.server_round
        members.new = []
        session.gather(server_round)
        if members.new:
            self.generators.train(members.new, together=self.averages and is_first)
        there = session.there()
        everyone = np.sort(np.concatenate(list(members.clients.values())))
        chosen = everyone[session.draw(everyone.size, server_round)]
        asked = {node: np.array(local) for node, local in there.items()}
        asked = {node: local[np.isin(local, chosen)] for node, local in asked.items()}
        if not any(local.size for local in asked.values()):
            raise NoClientsError(f"round {server_round}: no client who takes part is connected")
        return {
            node: SageRequest(server_round, local, self.settings, self.classifier)
            for node, local in asked.items()
            if local.size
        }

    def read(self, node: int, content: RecordDict) -> Any:
        """Read scores."""
        request = self.requests[node]
        return SageScores.from_record(content, request.server_round, request.clients)

    def reply_bytes(self) -> int:
        """Return the most bytes of any reply."""
        return sage_bytes(self.session, self.shapes)

    def learn(self, server_round: int, replies: Replies[Any]) -> RoundReport:
        """Keep the scores."""
        self.session.must_have(server_round, replies)
        for node, scores in replies.values.items():
            self.scores.keep_scores(self.requests[node].clients, scores)
        return self.summed_up(server_round, replies)

    def summed_up(self, server_round: int, replies: Replies[Any]) -> RoundReport:
        """Sum a round up from the clients' last scores."""
        session, result = self.session, self.scores.figures()
        absent = self.scores.known.difference(*session.members.clients.values())
        who = session.participation(
            session.clients_of(replies.values), left_out=dict.fromkeys(absent, NOT_CONNECTED)
        )
        return self.report(
            server_round,
            who,
            result,
            loss=result["loss"],
            cross_entropy=result["loss"],
            regulariser=0.0,
            bytes=self.payload,
        )

    def finish(self, server_round: int) -> None:
        """Let the clients forget the run."""
        self.session.tell_all(server_round, RecordDict(), "train.finish")

    def clients_save(self, server_round: int) -> dict[int, str]:
        """Have all clients that are there save a round."""
        order = {keys.SERVER_ROUND: server_round, keys.RUN_TOKEN: self.session.checkpoints.run}
        config = ConfigRecord(write_settings(self.settings) | order)
        return self.session.have_saved(server_round, RecordDict({keys.CONFIG: config}), {})

    def fixed_settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        return {"strategy": type(self).__name__, **self.settings._asdict()}

    def state(self) -> dict[str, Any]:
        """Return scores and classifier."""
        classifier = {name: torch.from_numpy(v) for name, v in self.classifier.items()}
        return {"book": self.scores.state_dict(), "classifier": classifier}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self.scores.load_state_dict(state["book"])
        self.classifier |= {name: v.numpy() for name, v in state["classifier"].items()}


class FedSage(LocalSage):
    """LocalSage+ with generators trained together and classifiers averaged; parameters as there."""

    averages = True

    def read(self, node: int, content: RecordDict) -> Any:
        """Read a mean classifier and its weight."""
        return read_mean(content, self.requests[node].server_round, self.shapes)

    def learn(self, server_round: int, replies: Replies[Any]) -> RoundReport:
        """Average the classifiers as FedAvg does, and have the mean evaluated."""
        session = self.session
        session.must_have(server_round, replies)
        size = sum(value.nbytes for value in self.classifier.values())
        self.scores.count_weights(session.asked, replies.values, size)
        weighted = [content for content, weight in replies.values.values() if weight]
        if weighted:
            mean = aggregate_arrayrecords(weighted, NUM_EXAMPLES)
            self.classifier |= {n: mean[n].numpy().astype(np.float32) for n in CLASSIFIER_NAMES}
        else:
            LOG.warning("round %d: no client has training nodes; nothing averaged", server_round)
        self._evaluate(server_round, size)
        return self.summed_up(server_round, replies)

    def _evaluate(self, server_round: int, size: int) -> None:
        """Have the mean classifier evaluated by all clients, whether they trained or not."""
        everyone = {node: np.array(local) for node, local in self.session.present().items()}
        requests = {
            node: SageRequest(server_round, local, self.settings, self.classifier).to_record()
            for node, local in everyone.items()
        }
        asked = sum(local.size for local in everyone.values())
        self.scores.ledger.count("down", "evaluation", asked * size)
        replies = self.session.send(
            requests,
            server_round,
            lambda node, content: SageScores.from_record(content, server_round, everyone[node]),
            message_type="evaluate",
            max_reply_bytes=self.reply_bytes(),
        )
        for node, scores in replies.values.items():
            self.scores.keep_scores(everyone[node], scores)
