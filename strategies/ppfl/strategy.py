"""PPFL-GNN: public nodes of overlapping graphs, aligned by Procrustes and averaged.

Zhang, Cai and Seo, "Privacy-Preserving Federated Graph Neural Network Learning on Non-IID Graph
Data", Wireless Communications and Mobile Computing 2023. Every client embeds its own graph; some
nodes, the *public* ones, are in several clients' graphs. The embeddings of two clients differ
at least by a rotation, so their plain mean would be noise: the server first rotates one client's
embeddings into the other's space.

Iteration ``t`` (Algorithms 1 and 2), one exchange:

1. server -> client ``i``: ``X'_i``, means for its public nodes; nothing in the first iteration;
2. client: takes ``X'_i`` (DeepWalk: they replace its vectors; GAT: its hidden layer is pulled
   towards them, equation 9), trains on its own graph, and embeds it;
3. client -> server: ``X_i``, the embeddings of its public nodes, and its measurements;
4. server: for each ordered pair ``W_ji``, the orthogonal matrix with the least
   ``||X_j W_ji - X_i||_F``, from the SVD of ``X_j^T X_i`` (equation 4);
5. server: ``X'_i = 1/m (X_i + sum_{j != i} X_j W_ji)``, by node, over the clients that hold it.

With ``alignment="consensus"`` steps 4 and 5 rotate all clients into one common space and back:
``m`` alignments instead of ``m (m - 1)``.

Steps 2 and 3 are ``PublicNodeClient``'s. Its model is any ``EmbeddingModel``: something that embeds
nodes and can take targets.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.config.rules import choice
from flower_graph.config.schema import check_settings
from flower_graph.ops import (
    align_pairs,
    alignment_precision,
    consensus,
    orthogonal_procrustes,
)
from flower_graph.records.participation import NOT_DRAWN, Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy
from flower_graph.server.session import Session
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.ppfl.config import (
    CONSENSUS,
    FORMS,
    LAST,
    PAIRS,
    PRECISIONS,
    StrategyConfig,
)
from flower_graph.strategies.ppfl.messages import (
    EmbeddingEnrolment,
    FloatArray,
    IntArray,
    PublicReply,
    PublicRequest,
)
from flower_graph.wire.counts import added, counts_size
from flower_graph.wire.exchange import Rejected, Replies
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import CHECKPOINT, CONFIG, LOSS, ROLES, RUN_TOKEN, SERVER_ROUND
from flower_graph.wire.ledger import reply_bytes

LOG = logging.getLogger(__name__)
MEASURED_PAIRS = 12  # ordered pairs whose alignment is measured in a round: all, up to 4 clients
TRIED_PAIRS = 1000  # of these some may share no node; all, up to 32 clients
DISAGREEMENT = "disagreement"
BY_CLIENT = ("embeddings", "targets", "ids")  # arrays that a checkpoint has of each client
ByClient = dict[str, dict[int, float]]  # measurements by name and client


class PublicMembership(Membership):
    """The clients of each SuperNode: their public nodes, last embeddings and next means."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings: dict[int, FloatArray] = {}  # [p, d] by client
        self.targets: dict[int, FloatArray] = {}  # [p, d] by client
        self.ids: dict[int, IntArray] = {}  # of each client's public nodes
        self.dimension = 0  # dimension of all embeddings; 0 before the first enrolment
        self.begun: set[int] = set()  # clients that have answered a round
        self.measured: ByClient = {}  # of the last round with an answer
        # Tells why an answer is refused, where clients do not trust the server
        self.refused: Callable[[EmbeddingEnrolment], str] = lambda answer: ""

    def question(self, resume: Resume) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord(resume.to_config())})

    def read(self, node: int, content: RecordDict) -> EmbeddingEnrolment:
        return EmbeddingEnrolment.read(content)

    def unasked(self) -> None:
        """Leave out SuperNodes that do not name their public nodes."""

    def in_order(
        self, answers: Mapping[int, EmbeddingEnrolment]
    ) -> list[tuple[int, EmbeddingEnrolment]]:
        """Choose the commonest dimension of embeddings if none is known yet."""
        if not self.dimension:
            counts = Counter(d for answer in answers.values() for d in answer.dimensions)
            self.dimension = max(counts, key=lambda d: (counts[d], -d), default=0)
        return super().in_order(answers)

    def refusal(self, answer: EmbeddingEnrolment) -> str:
        if why := self.refused(answer):
            return why
        claims = zip(answer.clients, answer.nodes, answer.dimensions, strict=True)
        for client, nodes, dimension in claims:
            # Its embeddings and means are in the order of these nodes.
            if not np.array_equal(self.ids.get(client, nodes), nodes):
                return f"client {client} has other public nodes than before: ids must stay the same"
            if dimension != self.dimension:
                return (
                    f"client {client} has embeddings of {dimension} numbers, the others of "
                    f"{self.dimension}; all must have the same"
                )
        return ""

    def enrolled(self, node: int, answer: EmbeddingEnrolment) -> None:
        lost = sorted(self.begun & set(answer.clients)) if answer.handled == 0 else []
        for client in lost:
            self.begun.remove(client)
            self.embeddings.pop(client, None)
            self.targets.pop(client, None)
        if lost:
            LOG.warning("node %d has lost its state: clients %s begin anew", node, lost)
        self.ids |= dict(zip(answer.clients, answer.nodes, strict=True))

    def take(self, replies: Iterable[PublicReply]) -> tuple[ByClient, dict[int, str]]:
        """Return what clients measured, and the clients that are left out, with the reason."""
        measured, failed = ByClient(), dict[int, str]()
        for reply in replies:
            failed |= reply.left_out
            figures = {**reply.judged, LOSS: reply.loss, DISAGREEMENT: reply.disagreement}
            for index, client in enumerate(reply.request.clients):
                x = reply.embeddings[index]
                if client in failed or (x is None and reply.request.wants_embeddings):
                    continue
                for name, values in figures.items():
                    measured.setdefault(name, {})[client] = values[index]
                if x is not None:
                    self.embeddings[client] = x
        self.begun |= measured.get(LOSS, {}).keys()
        self.measured = measured or self.measured
        return measured, failed

    def state_dict(self) -> dict[str, object]:
        arrays = {
            name: {client: torch.from_numpy(rows) for client, rows in getattr(self, name).items()}
            for name in BY_CLIENT
        }
        session = {"dimension": self.dimension, "begun": sorted(self.begun)}
        return arrays | session | {"measured": self.measured}

    def load_state_dict(self, state: StateDict) -> None:
        for name in BY_CLIENT:
            setattr(self, name, {int(client): rows.numpy() for client, rows in state[name].items()})
        self.measured = dict(state["measured"])
        self.dimension, self.begun = int(state["dimension"]), set(state["begun"])

    def stacked(self, clients: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Stack the embeddings of some clients, node by node."""
        ids = [self.ids[client] for client in clients]
        every = np.unique(np.concatenate(ids))
        slots = [torch.from_numpy(np.searchsorted(every, nodes)) for nodes in ids]
        width = self.embeddings[clients[0]].shape[1]
        x = torch.zeros(len(clients), every.size, width)
        held = torch.zeros(len(clients), every.size, dtype=torch.bool)
        for index, (client, slot) in enumerate(zip(clients, slots, strict=True)):
            x[index, slot] = torch.from_numpy(self.embeddings[client])
            held[index, slot] = True
        return x, held, slots


class ProcrustesAlignment(RoundStrategy[PublicRequest, PublicReply]):
    """The server: aligns the clients' public embeddings and sends means back.

    Parameters
    ----------
    settings : StrategyConfig, optional
        The section ``strategy``.
    seed : int
        Seed of the draws: of clients, and of the pairs that are measured.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    **fields
        Without ``settings``: fields of the section, such as ``alignment``, ``rotations_only``,
        ``absent``, ``participation`` and ``min_nodes``.
    """

    usual_rounds = 10
    idle = NOT_DRAWN  # why a connected client may not have been asked
    wants_embeddings = True
    forms: tuple[str, ...] = (PAIRS, CONSENSUS)  # of the alignment

    # Any: the section's fields have types of their own
    def __init__(
        self,
        settings: StrategyConfig | None = None,
        *,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **fields: Any,
    ) -> None:
        self.settings = settings or StrategyConfig(**{"alignment": self.forms[0]} | fields)
        check_settings(self.settings)
        choice(*self.forms).check("alignment", self.settings.alignment)
        self.clients = PublicMembership()
        super().__init__(
            Session(
                self.clients,
                min_nodes=self.settings.fewest_nodes,
                participation=self.settings.participation,
                seed=seed,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
            )
        )

    def draw_pictures(self, out: Path, reports: Sequence[RoundReport], title: str) -> None:
        if any(report.alignment for report in reports):
            from flower_graph.strategies.ppfl.plots import save_alignment  # clients draw nothing

            save_alignment(out / "alignment.png", reports, title=title)

    def ask(self, server_round: int) -> Mapping[int, PublicRequest]:
        """Step 1: return the round's requests, with the clients' means."""
        there = self.there(server_round)
        drawn = self.session.participants(server_round, there)
        return {n: self.request(server_round, there[n], some) for n, some in drawn.items()}

    def there(self, server_round: int) -> dict[int, list[int]]:
        # Ids of SuperNodes differ from run to run.
        there = self.session.gather(server_round, "no SuperNode hosts a client with public nodes")
        return dict(sorted(there.items(), key=lambda item: min(item[1])))

    def request(
        self, server_round: int, hosted: Sequence[int], clients: Sequence[int]
    ) -> PublicRequest:
        session, known = self.session, self.clients
        saves = session.is_due(server_round)
        return PublicRequest(
            server_round,
            list(clients),
            [known.ids[client] for client in clients],
            [self.target(client) for client in clients],
            known.dimension,
            wants_embeddings=self.wants_embeddings,
            is_last=server_round == session.rounds or session.stops_early(server_round),
            follows=not known.begun.isdisjoint(hosted),
            saves=saves,
            run=session.checkpoints.run if saves else "",
            counting=self.counting,
        )

    def target(self, client: int) -> FloatArray | None:
        return self.clients.targets.get(client)

    def read(self, node: int, content: RecordDict) -> PublicReply:
        return PublicReply.from_record(content, self.requests[node], self.num_classes)

    def reply_bytes(self, numbers: int = 0) -> int:
        asked = self.requests.values()
        rows = [sum(ids.size for ids in one.nodes) * one.dimension for one in asked]
        clients = max((len(one.clients) for one in asked), default=0)
        return reply_bytes(max(rows, default=0) + numbers + counts_size(*self.counted), clients)

    def learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        """Do steps 4 and 5 with the replies, and return the round's figures."""
        self.counts = added(reply.counts for reply in replies.values.values())
        measured, failed = self.clients.take(replies.values.values())
        answered = sorted(measured.get(LOSS, ()))
        precision = self.align(server_round, answered)
        who = self.participation(answered, failed)
        self.session.rejected += [
            Rejected(node, f"client {client}: {why}")
            for node, reply in replies.values.items()
            for client, why in reply.left_out.items()
        ]
        mean = defaultdict(lambda: math.nan, self.averages(measured))
        return self.report(
            server_round,
            who,
            {role: mean[role] for role in ROLES},
            loss=mean[LOSS],
            cross_entropy=mean[LOSS],
            regulariser=mean[DISAGREEMENT],
            bytes=self.count(),
            skipped="" if answered else f"none of {len(self.requests)} SuperNodes gave an answer",
            alignment=precision,
        )

    def averages(self, measured: ByClient) -> Mapping[str, float]:
        return {name: mean_of(dict(sorted(by.items())).values()) for name, by in measured.items()}

    def participation(self, answered: Collection[int], failed: Mapping[int, str]) -> Participation:
        return self.session.participation(answered, failed=failed, idle=self.idle)

    def align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Do steps 4 and 5, and return how precise the alignment is."""
        shown = sorted(self.clients.embeddings) if self.settings.absent == LAST else answered
        if not answered:
            return {}
        x, held, slots = self.clients.stacked(shown)
        means = self.means(x, held)
        for index, (client, slot) in enumerate(zip(shown, slots, strict=True)):
            self.clients.targets[client] = means[index, slot].numpy()
        rows = np.searchsorted(shown, answered)  # both ascend
        rng = generator(self.session.seed, "measured-pairs", server_round)
        return measure_alignment(x[rows], held[rows], self.settings.rotations_only, rng)

    def means(self, x: Tensor, held: Tensor) -> Tensor:
        """Return every client's means ``[m, u, d]`` of its nodes, in its own space."""
        # x [m, u, d], held [m, u]: which client has which node
        if self.settings.alignment == PAIRS:
            return align_pairs(x, held, rotations_only=self.settings.rotations_only)
        return consensus(x, held, rotations_only=self.settings.rotations_only).aligned

    def count(self) -> dict[str, dict[str, int]]:
        ledger = self.session.exchange.ledger
        for node, request in self.requests.items():
            ledger.count("down", "means", sum(x.nbytes for x in request.targets if x is not None))
            if node in self.answers:
                ledger.count("up", *self.came(node))
        return ledger.payload

    def came(self, node: int) -> tuple[str, int]:
        """Return the kind of a SuperNode's answer, and how many bytes of it are payload."""
        embeddings = self.answers[node].embeddings
        return "embeddings", sum(x.nbytes for x in embeddings if x is not None)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return, for each client N, the means of its public nodes and the nodes' ids.

        ``means-N`` ``[p, d]`` are in the client's own space; ``nodes-N`` is ``[p]``.
        """
        result: dict[str, NDArray[np.generic]] = {}
        for client, means in sorted(self.clients.targets.items()):
            result[f"means-{client}"], result[f"nodes-{client}"] = means, self.clients.ids[client]
        return result

    def measured(self, report: RoundReport) -> MetricRecord:
        return MetricRecord({**super().measured(report), **report.alignment})

    def clients_save(self, server_round: int) -> dict[int, str]:
        run = self.session.checkpoints.run
        order: dict[str, Any] = {CHECKPOINT: True, SERVER_ROUND: server_round, RUN_TOKEN: run}
        saved = {node: reply.not_saved for node, reply in self.answers.items()}
        content = RecordDict({CONFIG: ConfigRecord(order)})
        return self.session.have_saved(server_round, content, saved, "query")

    def fixed_settings(self) -> dict[str, object]:
        names = "alignment", "rotations_only", "absent", "participation"
        chosen = {name: getattr(self.settings, name) for name in names}
        return {"method": type(self).__name__, **chosen, "seed": self.session.seed}

    def state(self) -> dict[str, object]:
        return {"clients": self.clients.state_dict()}

    def load_state(self, state: StateDict) -> None:
        self.clients.load_state_dict(state["clients"])


class LocalEmbedding(ProcrustesAlignment):
    """The baseline: every client trains alone, and sends only its measurements."""

    wants_embeddings, forms = False, FORMS

    def align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        return {}


def mean_of(values: Iterable[float]) -> float:
    """Return the mean of all numbers that are not NaN; NaN without any."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def measure_alignment(
    x: Tensor, held: Tensor, rotations_only: bool, rng: torch.Generator
) -> dict[str, float]:
    """Return how often aligned embeddings of the same node are near (Figures 3 to 6)."""
    # x, held [m, u, d]
    result: list[Mapping[int, float]] = []
    for source, target in islice(draw_pairs(x.shape[0], rng), TRIED_PAIRS):
        common = held[source] & held[target]
        if not common.any():
            continue
        a, b = x[source, common], x[target, common]
        turn = orthogonal_procrustes(a, b, rotations_only=rotations_only)
        result.append(alignment_precision(a, b, turn))
        if len(result) == MEASURED_PAIRS:
            break
    return {name: mean_of([one[k] for one in result]) for name, k in PRECISIONS.items() if result}


def draw_pairs(count: int, rng: torch.Generator) -> Iterator[tuple[int, int]]:
    """Draw the ordered pairs of different numbers below ``count``, each once, one at a time."""
    # Thousands of clients have more pairs than fit into memory.
    for distance in (1 + torch.randperm(max(count - 1, 0), generator=rng)).tolist():
        for source in torch.randperm(count, generator=rng).tolist():
            yield source, (source + distance) % count
