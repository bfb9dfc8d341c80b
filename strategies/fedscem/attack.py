"""Attacks on FedSCem: find which client holds which node, and which clients share nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray

from flower_graph.audit.attacks import (
    Audit,
    Exchange,
    RecordingGrid,
    array_of,
    config_of,
    of_kind,
)
from flower_graph.audit.deviating import Deviation, of_alignment, of_sums
from flower_graph.audit.scores import Finding, ranking
from flower_graph.ops.peers import cosine_similarities
from flower_graph.secure.align.blinded import BLIND, BlindReply, canonical, hash_to_group
from flower_graph.secure.align.plaintext import IDENTITIES, PlainReply
from flower_graph.strategies.fedscem.config import FEDSCEM, FedSCemConfig
from flower_graph.wire import keys
from flower_graph.wire.arrays import unpack_integers

Identities = Sequence[int | str]
# How identities are aligned, how vectors are summed
FORMS = (("psi", "masked"), ("psi", "plain"), ("plain", "masked"))


def attack(exchanges: Sequence[Exchange], held: Sequence[Identities], hidden: int) -> list[Finding]:
    """Guess which client holds which node, from the alignment and the last round's vectors."""
    sets = [set(mine) for mine in held]
    candidates = sorted(set().union(*sets), key=str)
    truth = np.array([[node in mine for node in candidates] for mine in sets])
    messages = _alignments(exchanges, len(sets))
    members, sizes = _members(exchanges, candidates, messages)
    pairs = np.triu_indices(len(sets), 1)
    linked = (truth.astype(int) @ truth.T.astype(int))[pairs] > 0
    result = [
        ranking("who holds which node, from the alignment", members, truth),
        _larger("which of two clients has more nodes, from the alignment", sizes, truth.sum(1)),
        ranking(
            "which clients have nodes in common, from the alignment",
            (members @ members.T)[pairs],
            linked,
        ),
    ]
    counts, embeddings = vectors(exchanges, len(sets), hidden)
    for what, rows in (("counts", counts), ("embeddings", embeddings)):
        name = f"which clients have nodes in common, from the {what}"
        result.append(ranking(name, cosine_similarities(rows)[pairs], linked))
    return result


def vectors(
    exchanges: Sequence[Exchange], clients: int, hidden: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the last vector of each client: counts ``[c, slots]``, embeddings ``[c, slots h]``."""
    # Words of a ring are read as numbers around zero, as if no mask were on them.
    slots = 0
    last: dict[int, NDArray[np.float64]] = {}
    for one in of_kind(exchanges, "train"):
        config = config_of(one.request)
        if config[keys.IS_LAST]:
            continue  # measurements alone
        mine = unpack_integers(config[keys.CLIENTS], keys.CLIENTS)
        if keys.SUMS in one.request.array_records:
            slots = array_of(one.request, keys.SUMS, keys.HOLDER_COUNTS).size
        if mine.size == 1 and keys.SUMS in one.reply.array_records:
            last[int(mine[0])] = _centred(array_of(one.reply, keys.SUMS, keys.TOTAL))
    if not slots or len(last) < clients:
        raise ValueError(
            f"vectors of {len(last)} of {clients} clients, and {slots} slots, were recorded; "
            "two rounds with one client on each SuperNode are needed"
        )
    rows = np.stack([last[client] for client in sorted(last)])
    split = slots * hidden
    return rows[:, split : split + slots], rows[:, :split]


def _centred(words: NDArray[np.generic]) -> NDArray[np.float64]:
    """Read unsigned words as signed ones; other numbers stay."""
    return words.view(words.dtype.str.replace("u", "i")).astype(np.float64)


def _alignments(exchanges: Sequence[Exchange], clients: int) -> list[Exchange]:
    first: dict[int, Exchange] = {}
    for one in exchanges:
        config = config_of(one.request)
        if config.get(keys.ALIGN_STAGE) in (BLIND, IDENTITIES):
            (client,) = unpack_integers(config["align-clients"], "align-clients")
            first.setdefault(int(client), one)
    if len(first) < clients:
        raise ValueError(f"the alignment of {len(first)} of {clients} clients was recorded")
    return [first[client] for client in sorted(first)]


def _members(
    exchanges: Sequence[Exchange], candidates: Identities, messages: Sequence[Exchange]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Score each candidate for each client, ``[c, n]``, and each client's size, ``[c]``.

    The score is 1 if the client's message shows that it holds the candidate.
    """
    replies = []
    for one in messages:
        metrics = one.reply.metric_records.get(keys.METRICS, MetricRecord())
        replies.append(config_of(one.reply) | dict(metrics))
    texts = canonical(candidates, "the server")
    sent: list[set[Any]]
    if config_of(messages[0].request)[keys.ALIGN_STAGE] == IDENTITIES:
        known: list[Any] = [text.decode() for text in texts]
        sent = [set(PlainReply.from_config(reply).identities[0]) for reply in replies]
    else:
        # Without the blind, which only the client has, no candidate's point is among its points.
        run = next(
            c["sum-run"] for c in (config_of(e.request) for e in exchanges) if "sum-run" in c
        )
        known = [hash_to_group(run, text) for text in texts]
        points = [BlindReply.from_config(reply).points for reply in replies]
        sent = [{row.tobytes() for row in mine} for mine in points]
    members = np.array([[one in mine for one in known] for mine in sent], float)
    return members, np.array([len(mine) for mine in sent], float)


def _larger(name: str, sizes: NDArray[np.float64], truth: NDArray[np.int64]) -> Finding:
    first, second = np.triu_indices(truth.size, 1)
    differ = truth[first] != truth[second]
    first, second = first[differ], second[differ]
    return ranking(name, sizes[first] - sizes[second], truth[first] > truth[second])


def _alignment_of(strategy: Any) -> tuple[bytes, object]:
    return strategy.session.sums.server.run_id, strategy.session.members.aligner


class EgoAudit(Audit[FedSCemConfig]):
    """The attacks on a run of FedSCem."""

    rounds = 2
    notes = (
        "Candidates are all nodes of all clients. Words of a masked sum are read as numbers. "
        "How many nodes a client has, up to a power of two, shows with `psi` too: the number of "
        "its points.",
        "The sums themselves, which the server learns with `plain`, are not attacked here.",
    )
    audited = (FEDSCEM,)

    def counterparts(self, config: FedSCemConfig, noisy: Sequence[list[str]]) -> list[list[str]]:
        return [[], *([f"strategy.alignment={a}", f"strategy.aggregation={s}"] for a, s in FORMS)]

    def label(self, config: FedSCemConfig) -> str:
        form = f"{config.strategy.alignment}, {config.strategy.aggregation} sum"
        return f"{form}, {super().label(config)}" if config.privacy.is_on else form

    def deviations(self, config: FedSCemConfig, method: Any) -> list[Deviation]:
        result = list[Deviation]()
        if config.strategy.alignment == "psi":
            held = [list(one.identities) for one in method.graphs(config)]
            result += of_alignment(_alignment_of, held)
        if config.strategy.aggregation == "masked":
            result += of_sums(lambda strategy: strategy.session.sums.server)
        return result

    def attack(self, config: FedSCemConfig, grid: RecordingGrid, method: Any) -> list[Finding]:
        held = [list(one.identities) for one in method.graphs(config)]
        return attack(grid.exchanges, held, config.model.hidden)
