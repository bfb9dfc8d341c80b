"""The PPFL-GNN server: carries the server's half of ``algorithm.py``, which has the iteration.

Its clients answer as ``PublicNodeClient`` and ``SecureConsensusClient`` of ``client.py`` do.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.config.rules import choice
from flower_graph.records.participation import NOT_READY, Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator
from flower_graph.secure.parties.registry import Registry
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy, Session
from flower_graph.server.sums import Added, PartySums, SecureSum, SumServer
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.ppfl import config
from flower_graph.strategies.ppfl.algorithm import (
    LEARNT_FROM,
    CommonMean,
    FloatArray,
    IntArray,
    Overlap,
    common_nodes,
    fewest_holders,
)
from flower_graph.strategies.ppfl.client import (
    MEANS,
    MEASURED,
    NOT_TOLD,
    RING_SIZE,
    UNSIGNED,
    Claims,
    EmbeddingEnrolment,
    Held,
    PublicReply,
    PublicRequest,
    SumOrder,
    claim_parts,
    digests_of,
    fewest_parties,
    joined,
    vector_parts,
)
from flower_graph.strategies.ppfl.config import StrategyConfig
from flower_graph.strategies.ppfl.evaluation import mean_of, measure_alignment
from flower_graph.wire import keys
from flower_graph.wire.codec import Resume
from flower_graph.wire.counts import added, as_counts, counts_size
from flower_graph.wire.exchange import Rejected, Replies
from flower_graph.wire.ledger import reply_bytes

DISAGREEMENT = "disagreement"
# What a checkpoint has of the clients
SAVED = ("embeddings", "targets", "ids", "form", "begun", "measured")
ByClient = dict[str, dict[int, float]]  # measurements by name and client


class PublicMembership(Membership):
    """The clients of each SuperNode: their public nodes, last embeddings and next means."""

    needs_query = True

    def __init__(self) -> None:
        super().__init__()
        self.embeddings: dict[int, FloatArray] = {}  # [p, d] by client
        self.targets: dict[int, FloatArray] = {}  # [p, d] by client
        self.ids: dict[int, IntArray] = {}  # of each client's public nodes
        self.begun: dict[int, None] = {}  # clients that have answered a round
        self.measured: ByClient = {}  # of the last round with an answer
        # With the registry of the SuperNodes' keys, each must have signed which public nodes its
        # clients hold in the run: the signed answers by party
        self.registry: Registry | None = None
        self.run_id: Callable[[], int] = lambda: 0
        self.claims: dict[int, EmbeddingEnrolment] = {}

    def question(self, resume: Resume) -> RecordDict:
        return resume.to_record()

    def read(self, node: int, content: RecordDict) -> EmbeddingEnrolment:
        return EmbeddingEnrolment.read(content)

    def form_of(self, answer: EmbeddingEnrolment) -> int:
        return answer.dimension

    def refusal(self, answer: EmbeddingEnrolment) -> str:
        held = answer.held
        if (registry := self.registry) is not None:
            hosts = (n for n in registry.active if registry.parties[n].may_host(held))
            party = next(hosts, None)
            if party is None or answer.signature is None:
                return "its claim of nodes is not signed, or no party may host all its clients"
            parts = claim_parts(self.run_id(), held)
            if not registry.verify(party, answer.signature.tobytes(), *parts):
                return f"party {party}: {UNSIGNED}"
            self.claims[party] = answer
        for client, nodes in held.items():
            # Its embeddings and means are in the order of these nodes.
            if not np.array_equal(self.ids.get(client, nodes), nodes):
                return f"client {client} has other public nodes than before: ids must stay the same"
        return super().refusal(answer)

    def enrolled(self, node: int, answer: EmbeddingEnrolment) -> None:
        for client in answer.clients if answer.handled == 0 else ():
            for kept in (self.begun, self.embeddings, self.targets):
                kept.pop(client, None)
        self.ids |= answer.held


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
        Without ``settings``: fields of the section, such as ``alignment``, ``absent``,
        ``participation`` and ``min_nodes``.
    """

    usual_rounds, asks_to_save = 10, ("query", {keys.CHECKPOINT: True})
    wants_embeddings = True
    forms: tuple[str, ...] = (config.PAIRS, config.CONSENSUS)  # of the alignment

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
        choice(*self.forms).check("alignment", self.settings.alignment)
        self.clients = PublicMembership()
        places = checkpoint_dir, checkpoint_every
        super().__init__(Session(self.clients, self.settings, seed, *places))

    def ask(self, server_round: int) -> Mapping[int, PublicRequest]:
        """Step 1: return the round's requests, with the clients' means."""
        there = self.session.gather(server_round)
        drawn = self.session.participants(server_round, there)
        return {n: self.request(server_round, there[n], some) for n, some in drawn.items()}

    def request(
        self, server_round: int, hosted: Sequence[int], clients: Sequence[int]
    ) -> PublicRequest:
        session, known = self.session, self.clients
        saves, nodes = session.is_due(server_round), [known.ids[client] for client in clients]
        marks, targets = joined(list(map(self.target, clients)), nodes, known.form)
        return PublicRequest(
            server_round,
            list(clients),
            nodes,
            known.form,
            marks,
            targets if self.wants_embeddings else None,
            wants_embeddings=self.wants_embeddings,
            is_last=server_round == session.rounds or session.stops_early(server_round),
            follows=not known.begun.keys().isdisjoint(hosted),
            saves=saves,
            run=session.run if saves else "",
            counting=self.counting,
        )

    def target(self, client: int) -> FloatArray | None:
        return self.clients.targets.get(client)

    def read(self, node: int, content: RecordDict) -> PublicReply:
        return PublicReply.answering(self.requests[node], content, self.num_classes)

    def reply_bytes(self, numbers: int = 0) -> int:
        asked = self.requests.values()
        rows = [sum(one.sizes) * one.dimension for one in asked]
        clients = max((len(one.clients) for one in asked), default=0)
        return reply_bytes(max(rows, default=0) + numbers + counts_size(*self.counted), clients)

    def learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        """Do steps 4 and 5 with the replies, and return the round's figures."""
        measured, failed = self.take()
        answered = sorted(measured.get(keys.LOSS, ()))
        aligns = answered and self.wants_embeddings
        precision = self.align(server_round, answered) if aligns else {}
        why = "" if answered else f"none of {len(self.requests)} SuperNodes gave an answer"
        who = self.session.participation(answered, failed=failed)
        return self.reported(server_round, who, means_of(measured), precision, why)

    def take(self) -> tuple[ByClient, dict[int, str]]:
        """Return what clients measured, and the clients that are left out, with the reason."""
        known, measured, failed = self.clients, ByClient(), dict[int, str]()
        for reply in self.answers.values():
            failed |= reply.left_out
            figures = {**reply.judged, keys.LOSS: reply.loss, DISAGREEMENT: reply.disagreement}
            of_clients = zip(reply.request.clients, reply.embeddings, strict=True)
            for index, (client, x) in enumerate(of_clients):
                if client in failed or (x is None and reply.request.wants_embeddings):
                    continue
                for name, values in figures.items():
                    measured.setdefault(name, {})[client] = values[index]
                if x is not None:
                    known.embeddings[client] = x
        known.begun |= dict.fromkeys(measured.get(keys.LOSS, ()))
        known.measured = measured or known.measured
        self.counts = added(reply.counts for reply in self.answers.values())
        return measured, failed

    def reported(
        self,
        server_round: int,
        who: Participation,
        figures: Mapping[str, float],
        precision: dict[str, float],
        skipped: str,
    ) -> RoundReport:
        self.session.rejected += [
            Rejected(node, f"client {client}: {why}")
            for node, reply in self.answers.items()
            for client, why in reply.left_out.items()
        ]
        ledger = self.session.ledger
        for node, request in self.requests.items():
            ledger.count("down", "means", sum(x.nbytes for x in request.means if x is not None))
            if node in self.answers:
                ledger.count("up", *self.came(node))
        mean = defaultdict(lambda: math.nan, figures)
        return self.report(
            server_round,
            who,
            {role: mean[role] for role in keys.ROLES},
            loss=mean[keys.LOSS],
            cross_entropy=mean[keys.LOSS],
            regulariser=mean[DISAGREEMENT],
            skipped=skipped,
            alignment=precision,
        )

    def align(self, server_round: int, answered: Sequence[int]) -> dict[str, float]:
        """Do steps 4 and 5, and return how precise the alignment is."""
        known, form = self.clients, self.settings.alignment
        chosen = known.embeddings if self.settings.absent == config.LAST else answered
        overlap = Overlap.of({client: known.embeddings[client] for client in chosen}, known.ids)
        known.targets |= overlap.means(in_pairs=form == config.PAIRS)
        rows = np.searchsorted(overlap.clients, answered)  # both ascend
        rng = generator(self.session.seed, "measured-pairs", server_round)
        return measure_alignment(overlap.x[rows], overlap.held[rows], rng)

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

    def fixed_settings(self) -> dict[str, object]:
        names = "alignment", "absent", "participation"
        chosen = {name: getattr(self.settings, name) for name in names}
        return {"method": type(self).__name__, **chosen, "seed": self.session.seed}

    def state(self) -> dict[str, object]:
        return {"clients": {name: getattr(self.clients, name) for name in SAVED}}

    def load_state(self, state: StateDict) -> None:
        vars(self.clients).update({name: state["clients"][name] for name in SAVED})


class LocalEmbedding(ProcrustesAlignment):
    """The baseline: every client trains alone, and sends only its measurements."""

    wants_embeddings, forms = False, config.FORMS


def means_of(measured: ByClient) -> dict[str, float]:
    """Return the mean of each measurement over the clients."""
    return {name: mean_of(by[client] for client in sorted(by)) for name, by in measured.items()}


# The secure form --------------------------------------------------------------------------------


class SecureConsensus(ProcrustesAlignment):
    """The server: adds up embeddings that clients have rotated, and sends the mean back.

    All SuperNodes are asked in every iteration: sums over changing clients could be compared.

    Parameters
    ----------
    settings, seed, checkpoint_dir, checkpoint_every
        As of ``ProcrustesAlignment``; a checkpoint has everything but keys. The seed draws the
        first points, to which all clients rotate.
    dropout : float
        Share of the clients that may be missing from a sum. If more are missing, the iteration has
        no mean. A node is in no sum if only one of its holders might remain.
    **fields
        As of ``ProcrustesAlignment``: also ``registry``, the file of the SuperNodes' keys, where
        clients do not trust the server, ``least_holders`` and ``differ_by``.
    """

    forms = (config.SECURE,)

    # Any: as the base class
    def __init__(
        self, settings: StrategyConfig | None = None, *, dropout: float = 0.3, **given: Any
    ) -> None:
        self.dropout, self.mean = dropout, CommonMean()
        self._parties: PartySums | None = None
        self.contributors: list[int] = []  # to the last sum
        self._parts = 0, 0, 0  # of a vector, as ``vector_parts`` returns them
        self._layout = b""  # their meaning
        self.found: Added  # the last sum
        super().__init__(settings, **given)
        if (registry := self.settings.registry) is not None:
            differ_by = self.settings.differ_by
            self._parties = PartySums(registry, dropout=dropout, differ_by=differ_by)
            self.clients.registry = self._parties.registry
            self.clients.run_id = lambda: self.session.exchange.grid.run.run_id

    @cached_property
    def sums(self) -> SecureSum:
        return SecureSum(
            self.session.exchange,
            **RING_SIZE,
            server=self._parties or SumServer(dropout=self.dropout),
            timeout=self.session.timeout,
            min_nodes=self.session.min_nodes,
        )

    def ask(self, server_round: int) -> Mapping[int, PublicRequest]:
        mean, known = self.mean, self.clients
        # By clients: ids of SuperNodes differ from run to run, and means are sums of floats
        there = dict(sorted(self.session.gather(server_round).items(), key=lambda one: min(one[1])))
        nodes, claims = self._nodes(self.sums.prepare(server_round, there))
        everyone = (client for local in there.values() for client in local)
        mean.choose(nodes, {client: known.ids[client] for client in everyone}, known.form)
        order = SumOrder(NOT_TOLD[0], self.session.seed, mean.made >= LEARNT_FROM)
        told, shown = NOT_TOLD, {}
        if claims is not None:
            claims.means = digests_of(mean.rows) if mean.made else claims.means
            told, shown = (nodes, claims.means), claims.to_config()
        self._parts = vector_parts(mean.rows.size, claims is not None, *self.counted)
        requests = {n: self.request(server_round, local, local) for n, local in there.items()}
        self._layout = order.meaning(*told, next(iter(requests.values())))
        slots = {n: np.concatenate([mean.slots[c] for c in local]) for n, local in there.items()}
        self.entries = {n: replace(order, slots=slots[n]).to_config() | shown for n in there}
        return requests

    def exchange(
        self, server_round: int, contents: Mapping[int, RecordDict]
    ) -> Replies[PublicReply]:
        """Ask the SuperNodes of the sum, and add up what they send (steps 4 and 5)."""
        length = sum(self._parts)
        self.found = found = self.sums.add(
            server_round,
            contents,
            "train",
            length,
            MEANS,
            self._layout,
            read=self.read,
            most_bytes=self.reply_bytes(length),
        )
        self.requests = {n: self.requests[n] for n in contents if n in found.asked}
        self.session.leave_out(found.replies.rejected)
        return found.replies

    def target(self, client: int) -> FloatArray | None:
        return self.mean.of(client)

    def _nodes(self, ready: Sequence[int]) -> tuple[IntArray, Claims | None]:
        """Choose the nodes of the next sum, for untrusting clients with the claims of all."""
        known, claims, least = self.clients, None, self.settings.least_holders
        if self._parties is None:
            held: list[Held] = [{client: known.ids[client]} for client in ready]
            fewest = fewest_holders(len(held), self.dropout, least)
        else:
            members = [party for party in sorted(self._parties.members) if party in known.claims]
            claims = Claims.of([known.claims[party] for party in members])
            held = [known.claims[party].held for party in members]
            fewest = fewest_parties(len(held), least)
        nodes = common_nodes(held, fewest) if held else self.mean.nodes
        if len(held) > 1 and not nodes.size:
            why = "a sum could be one client's embedding; lower dropout, or align in the clear"
            raise ValueError(f"no public node has {fewest} holders among {len(held)}: {why}")
        return nodes, claims

    def read(self, node: int, content: RecordDict) -> PublicReply:
        # What clients count is in the sum.
        request = replace(self.requests[node], wants_embeddings=False, counting="")
        return PublicReply.answering(request, content)

    def learn(self, server_round: int, replies: Replies[PublicReply]) -> RoundReport:
        """Do step 5, and return the round's figures."""
        measured, failed = self.take()
        used = set(measured.get(keys.LOSS, ()))
        figures = means_of(measured) if self._parties is None else {}
        precision, skipped = dict[str, float](), ""
        found = self.found
        values = found.numbers()
        if values is None:  # the clients' measurements are still used
            self.contributors, skipped = [], f"no sum: {found.skipped}"
        else:
            self.contributors = found.contributors
            used &= set(self.contributors)
            rows, hidden, counts = np.split(values, np.cumsum(self._parts)[:2])
            self.mean.take(rows, self.contributors)
            if counts.size:  # a node is one step of the sum's numbers
                steps = np.rint(counts * 2.0**found.ring.fraction_bits).astype(np.int64)
                self.counts = as_counts(steps, *self.counted)
            if self._parties is not None:
                each = zip(MEASURED, *hidden.reshape(2, -1).tolist(), strict=True)
                figures = {name: one / of for name, one, of in each if of >= 1}
            precision = {name: figures[name] for name in config.PRECISIONS if name in figures}
        who = self.session.participation(sorted(used), failed=found.failed | failed, idle=NOT_READY)
        report = self.reported(server_round, who, figures, precision, skipped)
        report.rejected += found.rejected
        return report

    def came(self, node: int) -> tuple[str, int]:
        summed = set(self.requests[node].clients) & set(self.contributors)
        return "sums", len(summed) * self.mean.rows.size * (self.found.ring.word // 8)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return ``mean`` ``[u, d]`` and its ids ``nodes`` ``[u]``; empty before the first sum."""
        return {"mean": self.mean.rows, "nodes": self.mean.nodes} if self.mean.made else {}

    def state(self) -> dict[str, object]:
        mean = {name: getattr(self.mean, name) for name in ("nodes", "padded", "made")}
        return super().state() | {"mean": mean, "excluded": sorted(self.sums.server.excluded)}

    def load_state(self, state: StateDict) -> None:
        super().load_state(state)
        vars(self.mean).update(state["mean"])
        self.sums.server.exclude(state["excluded"])
