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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from flower_graph.errors import NoClientsError
from flower_graph.flower_compat import aggregate_arrayrecords
from flower_graph.records.participation import NOT_CONNECTED
from flower_graph.records.rounds import RoundReport
from flower_graph.server.round_strategy import RoundStrategy
from flower_graph.server.session import Session
from flower_graph.strategies.fed_sage.cohort import CLASSIFIER_NAMES, SageSettings
from flower_graph.strategies.fed_sage.messages import (
    Arrays,
    SageRequest,
    SageScores,
    read_mean,
    tensors_of,
    write_settings,
)
from flower_graph.strategies.fed_sage.neighbour_generation import initial_weights
from flower_graph.strategies.fed_sage.server_state import (
    SageExchanges,
    SageMembership,
    SageServerState,
)
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoSettings
from flower_graph.wire.exchange import Replies
from flower_graph.wire.keys import CONFIG, NUM_EXAMPLES, RUN_TOKEN, SERVER_ROUND

LOG = logging.getLogger(__name__)


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
        rates = s.learning_rate, s.weight_decay
        self.settings = SageSettings(
            s.hidden, *rates, s.local_epochs, generator_epochs, s.seed, s.batch_size
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
        self.exchanges = SageExchanges(self.session, self.scores, self.settings, self.shapes)
        # The averaged classifier; LocalSage+ has none.
        self.classifier: Arrays = (
            {name: start[name].numpy() for name in CLASSIFIER_NAMES} if self.averages else {}
        )

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Bytes that the method sent so far: direction to kind to bytes."""
        return self.scores.ledger.payload

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with, as far as the server has it.

        Returns
        -------
        dict of str to Tensor
            The averaged classifier's parameters, as its ``state_dict`` names and shapes them; of
            LocalSage+ nothing.
        """
        return tensors_of(self.classifier)

    def ask(self, server_round: int) -> dict[int, SageRequest]:
        """Have newcomers' generators trained (steps 1, 2), then ask the round's clients (4)."""
        session, members = self.session, self.members
        is_first = not members.clients and not members.resume.server_round
        members.new = []
        session.gather(server_round)
        if members.new:
            self.exchanges.train(members.new, together=self.averages and is_first)
        there = session.there()
        everyone = np.sort(np.concatenate(list(members.clients.values())))
        chosen = set(everyone[session.draw(everyone.size, server_round)].tolist())
        asked = {node: [c for c in local if c in chosen] for node, local in there.items()}
        if not any(asked.values()):
            raise NoClientsError(f"round {server_round}: no client who takes part is connected")
        return {
            node: SageRequest(server_round, np.array(local), self.settings, self.classifier)
            for node, local in asked.items()
            if local
        }

    def read(self, node: int, content: RecordDict) -> Any:
        """Read scores."""
        return SageScores.of_request(content, self.requests[node])

    def reply_bytes(self) -> int:
        """Return the most bytes of any reply."""
        return self.exchanges.reply_bytes()

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
        figures = {"loss": result["loss"], "cross_entropy": result["loss"], "regulariser": 0.0}
        return self.report(server_round, who, result, bytes=self.payload, **figures)

    def finish(self, server_round: int) -> None:
        """Let the clients forget the run."""
        self.session.tell_all(server_round, RecordDict(), "train.finish")

    def clients_save(self, server_round: int) -> dict[int, str]:
        """Have all clients that are there save a round."""
        order = {SERVER_ROUND: server_round, RUN_TOKEN: self.session.checkpoints.run}
        config = ConfigRecord(write_settings(self.settings) | order)
        return self.session.have_saved(server_round, RecordDict({CONFIG: config}), {})

    def fixed_settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        return {"strategy": type(self).__name__, **self.settings._asdict()}

    def state(self) -> dict[str, Any]:
        """Return scores and classifier."""
        return {"book": self.scores.state_dict(), "classifier": tensors_of(self.classifier)}

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
        self.exchanges.evaluate(server_round, self.classifier)
        return self.summed_up(server_round, replies)
