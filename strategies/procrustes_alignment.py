"""PPFL-GNN: public nodes of overlapping graphs, aligned by Procrustes and averaged.

Zhang, Cai and Seo, "Privacy-Preserving Federated Graph Neural Network Learning on Non-IID Graph
Data", Wireless Communications and Mobile Computing 2023. Every client embeds its own graph; some
nodes, the *public* ones, are in several clients' graphs. What two clients embed differs by a
rotation at least, so a plain mean of the two would be noise: one is turned into the other's space
first.

Iteration ``t`` (Algorithms 1 and 2), one exchange:

1. server -> client ``i``: ``X'_i``, means for its public nodes; nothing in the first iteration;
2. client: takes ``X'_i`` (DeepWalk: they replace its vectors; GAT: its hidden layer is pulled
   towards them, equation 9), trains on its own graph, and embeds it;
3. client -> server: ``X_i``, the embeddings of its public nodes, and what it measured;
4. server: for each ordered pair ``W_ji``, the orthogonal matrix with the least
   ``||X_j W_ji - X_i||_F``, from the SVD of ``X_j^T X_i`` (equation 4);
5. server: ``X'_i = 1/m (X_i + sum_{j != i} X_j W_ji)``, by node, over those clients that hold it.

With ``alignment="consensus"`` steps 4 and 5 turn all clients into one common space and back: ``m``
alignments in the place of ``m (m - 1)``.

The client's model is any ``EmbeddingModel``: something that embeds nodes and can take targets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.client import NumPyClient
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.alignment_measure import measure_alignment
from flower_graph.config_ppfl import CONSENSUS, LAST, LEAVE_OUT, PAIRS
from flower_graph.exchange import Rejected, Replies
from flower_graph.ops import align_pairs, consensus
from flower_graph.participation import Participation
from flower_graph.public_node_host import PublicNodeHost
from flower_graph.public_nodes import Member
from flower_graph.public_session import PublicBook, PublicSession, mean_of
from flower_graph.records.keys import CHECKPOINT, CONFIG, NOT_SAVED, RUN_TOKEN, SERVER_ROUND
from flower_graph.records.public_nodes import PublicReply, PublicRequest
from flower_graph.records.resume import Resume
from flower_graph.report import RoundReport, format_round
from flower_graph.rng import generator
from flower_graph.run_checkpoints import RunCheckpoints
from flower_graph.without_evaluate import WithoutEvaluate

LOG = logging.getLogger(__name__)

# Client ------------------------------------------------------------------------------------------


class PublicNodeClient(NumPyClient):
    """The clients of one SuperNode: usually one, in a simulation any number.

    Parameters
    ----------
    context : Context
        The ClientApp's context; what the models keep lives behind it.
    members : sequence of Member
        The clients.
    save_to : Path, optional
        Folder for the embeddings after the last iteration, a file for each client.
    checkpoint_dir : Path, optional
        Where to save the models when the server asks for a checkpoint.
    """

    def __init__(
        self,
        context: Context,
        members: Sequence[Member],
        *,
        save_to: Path | None = None,
        checkpoint_dir: Path | None = None,
    ) -> None:
        self.host = PublicNodeHost(context, members, save_to, checkpoint_dir)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say who is here, and which nodes each can share; load or save a checkpoint if asked."""
        if config.get(CHECKPOINT, False):
            why = self.host.save(int(config[SERVER_ROUND]), str(config[RUN_TOKEN]))
            return {NOT_SAVED: why} if why else {}
        self.host.restore(Resume.from_config(config))
        return self.host.hello().to_properties()

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[np.float32]], int, dict[str, Any]]:
        """Take the means, train, embed and measure (steps 2 and 3)."""
        request = PublicRequest.from_fit(parameters, config, self.host.public)
        reply = self.host.round(request)
        if request.save:
            reply.not_saved = self.host.save(request.server_round, request.save)
        return reply.to_fit(request)


# Server ------------------------------------------------------------------------------------------


class ProcrustesAlignment(WithoutEvaluate):
    """The server: aligns public embeddings and sends their means back.

    Parameters
    ----------
    alignment : str
        ``"pairs"``, as the paper has it, or ``"consensus"``.
    rotations_only : bool
        Leave reflections out.
    absent : str
        What of clients that did not answer: ``"leave-out"``, or ``"last"`` to go on with the
        embeddings that they sent last.
    participation : float
        Share of the SuperNodes asked each round, above 0 and at most 1.
    min_nodes : int
        SuperNodes to wait for before a round.
    seed : int
        Seed of the draws: of SuperNodes, and of the pairs that are measured.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    """

    def __init__(
        self,
        *,
        alignment: str = PAIRS,
        rotations_only: bool = False,
        absent: str = LEAVE_OUT,
        participation: float = 1.0,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
    ) -> None:
        if alignment not in (PAIRS, CONSENSUS):
            raise ValueError(f"alignment: {alignment!r} is neither {PAIRS!r} nor {CONSENSUS!r}")
        if absent not in (LEAVE_OUT, LAST):
            raise ValueError(f"absent: {absent!r} is neither {LEAVE_OUT!r} nor {LAST!r}")
        self.alignment, self.rotations_only, self.absent = alignment, rotations_only, absent
        self.seed, self.rounds = seed, 0
        self.session = PublicSession(participation=participation, min_nodes=min_nodes, seed=seed)
        self.book = PublicBook()
        self.checkpoints = RunCheckpoints(checkpoint_dir, checkpoint_every)
        self._saving = False  # whether this round's request asks for a checkpoint
        self.judged: dict[str, dict[int, float]] = {}  # the last measurements, by name and client
        self.requests: dict[int, PublicRequest] = {}  # of the current round, by SuperNode
        self._rejected: list[Rejected] = []
        self._wants_embeddings = True

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        num_rounds: int = 10,
        timeout: float = 600.0,
        *,
        on_round: Callable[[RoundReport], None] | None = None,
        resume: bool = False,
    ) -> Result:
        """Run the method.

        Parameters
        ----------
        grid : Grid
            Flower's grid, of any kind.
        num_rounds : int
            Iterations.
        timeout : float
            Seconds that an exchange may take.
        on_round : callable, optional
            Called with every iteration's report; without it, one line is logged.
        resume : bool
            Go on from the last complete checkpoint in ``checkpoint_dir``.

        Returns
        -------
        Result
            The last means, and the metrics of every iteration.

        Raises
        ------
        NoClientsError
            If no client is there that can take part.
        CheckpointError
            If there is nothing to resume from, or what there is does not fit.
        ValueError
            If an argument is impossible.
        """
        if num_rounds < 1:
            raise ValueError(f"num_rounds: {num_rounds} is not at least 1")
        self.rounds = num_rounds
        self.session.open(grid, timeout)
        result = Result()
        self.session.resume = self.checkpoints.resume
        first = self._go_on() + 1 if resume else 1
        for server_round in range(first, num_rounds + 1):
            started = time.perf_counter()
            self._ask(server_round)
            replies = self.session.send(server_round, self.requests)
            report = self._learn(server_round, replies)
            report.seconds = time.perf_counter() - started
            result.train_metrics_clientapp[server_round] = as_metrics(report)
            # In this order a run can be stopped anywhere: a checkpoint's rounds are reported.
            (on_round or self._log)(report)
            self._save(server_round, replies)
        result.arrays = self._arrays()
        return result

    def _ask(self, server_round: int) -> None:
        """Step 1: write the round's requests, with the means that wait."""
        asked, self._rejected = self._plan(server_round)
        self.requests = {
            node: PublicRequest(
                server_round,
                clients,
                [self.session.ids[client] for client in clients],
                [self.book.targets.get(client) for client in clients],
                self.session.dimension,
                is_last=server_round == self.rounds,
                wants_embeddings=self._wants_embeddings,
                **self._going_on(clients),
            )
            for node, clients in asked.items()
        }

    def _plan(self, server_round: int) -> tuple[dict[int, list[int]], list[Rejected]]:
        """See who is there, and whether a checkpoint is due; forget those that begin anew."""
        asked, rejected = self.session.plan(server_round)
        for client in self.session.anew:
            self.book.forget(client)
        self.session.anew.clear()
        self._saving = self.checkpoints.is_due(server_round, self.rounds)
        return asked, rejected

    def _going_on(self, clients: Sequence[int]) -> dict[str, Any]:
        """Say what a request asks of clients besides their round."""
        follows = bool(self.session.begun & set(clients))
        return {"follows": follows, "save": self.checkpoints.run if self._saving else ""}

    def _learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        """Do steps 4 and 5 with what came, and say what the round gave."""
        answered: dict[int, float] = {}  # loss of each client
        pulls: list[float] = []
        measured: dict[str, dict[int, float]] = {}
        rejected, failed = [*self._rejected, *replies.rejected], dict[int, str]()
        for node, reply in replies.values.items():
            clients = self.requests[node].clients
            rejected += [Rejected(node, why) for why in reply.left_out]
            failed |= reply.reasons(clients)
            for place, client in enumerate(clients):
                x = reply.embeddings[place]
                if client in failed or (x is None and self._wants_embeddings):
                    continue
                answered[client] = reply.loss[place]
                pulls.append(reply.disagreement[place])
                for name, values in reply.judged.items():
                    measured.setdefault(name, {})[client] = values[place]
                if x is not None:
                    self.book.embeddings[client] = x
        self.session.begun |= answered.keys()
        self.judged = measured or self.judged
        found = self._align(server_round, sorted(answered))
        who = self._participation(replies, answered, failed)
        loss = mean_of([answered[client] for client in sorted(answered)])
        return RoundReport(
            round=server_round,
            loss=loss,
            cross_entropy=loss,
            regulariser=mean_of(pulls),
            train_accuracy=mean_of(list(measured.get("train", {}).values())),
            val_accuracy=mean_of(list(measured.get("val", {}).values())),
            test_accuracy=mean_of(list(measured.get("test", {}).values())),
            asked=sum(len(request.clients) for request in self.requests.values()),
            answered=len(who.answered),
            rejected=[{"node": one.node_id, "reason": one.reason} for one in rejected],
            bytes=self._count(replies),
            wire_bytes=self.session.exchange.ledger.wire,
            skipped="" if answered else f"none of {len(self.requests)} SuperNodes gave an answer",
            alignment=found,
            participation=who.to_record(),
        )

    def _participation(
        self, replies: Replies[PublicReply], answered: Collection[int], failed: Mapping[int, str]
    ) -> Participation:
        """Say what became of every client; ``failed`` has the reasons of single ones."""
        return self.session.roll(self.requests, replies, answered, failed)

    def _align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Do steps 4 and 5, and return how precise the alignment is."""
        there = sorted(self.book.embeddings) if self.absent == LAST else answered
        if not answered:
            return {}
        x, held, slots = self.book.stacked(there, self.session.ids)
        means = self.means(x, held)
        for place, (client, slot) in enumerate(zip(there, slots, strict=True)):
            self.book.targets[client] = means[place, slot].numpy()
        places = np.searchsorted(there, answered)  # both ascend
        chance = generator(self.seed, "measured-pairs", server_round)
        return measure_alignment(x[places], held[places], self.rotations_only, chance)

    def means(self, x: Tensor, held: Tensor) -> Tensor:
        """Return every client's means, in its own space, where it holds the node.

        Parameters
        ----------
        x : Tensor
            Embeddings ``[m, u, d]``.
        held : Tensor
            Which client has which node, bool ``[m, u]``.

        Returns
        -------
        Tensor
            ``[m, u, d]``.
        """
        turns = {"rotations_only": self.rotations_only}
        if self.alignment == PAIRS:
            found: Tensor = align_pairs(x, held, **turns)
        else:
            found = consensus(x, held, **turns).aligned
        return found

    def _count(self, replies: Replies[PublicReply]) -> dict[str, dict[str, int]]:
        """Count the payload: means down, embeddings up."""
        ledger = self.session.exchange.ledger
        for node, request in self.requests.items():
            sent = [part.nbytes for part in request.targets if part is not None]
            ledger.count("down", "means", sum(sent))
            reply = replies.values.get(node)
            came = [] if reply is None else [x.nbytes for x in reply.embeddings if x is not None]
            ledger.count("up", "embeddings", sum(came))
        return ledger.payload

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the last means and the ids of their nodes, client by client."""
        found: dict[str, NDArray[Any]] = {}
        for client, means in sorted(self.book.targets.items()):
            found[f"means-{client}"], found[f"nodes-{client}"] = means, self.session.ids[client]
        return found

    def _arrays(self) -> ArrayRecord:
        return ArrayRecord({name: Array(values) for name, values in self.weights().items()})

    # Checkpoints

    def _save(self, server_round: int, replies: Replies[PublicReply]) -> None:
        """Complete the round's checkpoint, if one is due and all clients that are there saved."""
        if not self._saving:
            return
        state = {
            "settings": self._settings(),
            "strategy": self.state_dict(),
            "session": self.session.state_dict(),
            "ledger": self.session.exchange.ledger.state_dict(),
        }
        saved = {node: reply.not_saved for node, reply in replies.values.items()}
        missing = self.session.save_others(server_round, saved)
        self.checkpoints.save(server_round, state, missing)

    def _go_on(self) -> int:
        """Go on from the newest checkpoint that is here and at the clients; return its round."""
        ledger: dict[str, Any] = {}

        def load(state: Mapping[str, Any]) -> None:
            self.load_state_dict(state["strategy"])
            self.session.load_state_dict(state["session"])
            ledger.update(state["ledger"])

        def ask(server_round: int) -> list[str]:
            return self.session.go_on(self.checkpoints.resume)

        server_round = self.checkpoints.go_on(self.rounds, self._settings(), load, ask)
        # Not counted: the clients were asked who they are in the run's first part already.
        self.session.exchange.ledger.load_state_dict(ledger)
        return server_round

    def state_dict(self) -> dict[str, Any]:
        """Return what the server must find again, but for who is there."""
        return {"book": self.book.state_dict(), "judged": self.judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` returned."""
        self.book.load_state_dict(state["book"])
        self.judged = dict(state["judged"])

    def _settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed."""
        names = ("alignment", "rotations_only", "absent", "seed")
        own = {name: getattr(self, name) for name in names}
        return own | {"method": type(self).__name__, "participation": self.session.participation}

    # The same for Flower's own round loop, where another runs the rounds

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Step 1; no iteration is known to be the last."""
        if not self.session.is_open:
            self.session.open(grid, self.session.timeout)
        self._ask(server_round)
        for node, request in self.requests.items():
            content = request.to_record()
            content[CONFIG] = ConfigRecord({**config, **content.config_records[CONFIG]})
            yield Message(content, node, "train", group_id=str(server_round))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Do steps 4 and 5."""
        report = self._learn(server_round, self.session.read(self.requests, replies))
        return self._arrays(), as_metrics(report)

    def summary(self) -> None:
        """Log the settings in one line."""
        LOG.info("%s: %s, absent clients: %s", type(self).__name__, self.alignment, self.absent)

    def _log(self, report: RoundReport) -> None:
        LOG.info(format_round(report, self.rounds))


class LocalEmbedding(ProcrustesAlignment):
    """The baseline: every client trains alone, and nothing but its measurements travels."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._wants_embeddings = False

    def _align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        return {}


def as_metrics(report: RoundReport) -> MetricRecord:
    """Give a report's figures as Flower's metrics."""
    names = ("loss", "regulariser", "val_accuracy", "test_accuracy", "answered")
    own = {name.replace("_", "-"): getattr(report, name) for name in names}
    return MetricRecord(own | report.alignment)
