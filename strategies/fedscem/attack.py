"""Attacks on FedSCem: find which client holds which node, and which clients share nodes."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.audit import attacks
from flower_graph.audit.deviating import of_alignment, of_sums
from flower_graph.secure.align import blinded
from flower_graph.strategies.fedscem.config import FEDSCEM, FedSCemConfig
from flower_graph.wire import keys
from flower_graph.wire.arrays import unpack_integers

Identities = Sequence[int | str]
# How identities are aligned, how vectors are summed
FORMS = (("psi", "masked"), ("psi", "plain"), ("plain", "masked"))


def vectors(
    exchanges: Sequence[attacks.Exchange], clients: int, hidden: int
) -> dict[str, NDArray[np.float64]]:
    """Return the last vector of each client: counts ``[c, slots]``, embeddings ``[c, slots h]``."""
    last = dict[int, attacks.Exchange]()
    for one in attacks.of_kind(exchanges, "train"):
        config = attacks.config_of(one.request)
        if not config[keys.IS_LAST]:  # else measurements alone
            (client,) = unpack_integers(config[keys.CLIENTS], keys.CLIENTS).tolist()
            last[client] = one
    if len(last) < clients:
        raise ValueError(f"vectors of {len(last)} of {clients} clients were recorded")
    ordered = [last[client] for client in sorted(last)]
    slots = attacks.array_of(ordered[0].request, keys.SUMS, keys.HOLDER_COUNTS).size
    # Words of a ring are read as numbers around zero, as if no mask were on them.
    rows = np.stack([attacks.array_of(one.reply, keys.SUMS, keys.TOTAL) for one in ordered])
    rows, split = rows.view(rows.dtype.str.replace("u", "i")).astype(float), slots * hidden
    return {"counts": rows[:, split : split + slots], "embeddings": rows[:, :split]}


def alignment(
    exchanges: Sequence[attacks.Exchange], candidates: Identities, clients: int
) -> tuple[list[Any], list[set[Any]]]:
    """Return how candidates would be named in the clients' messages, and the names in each."""
    named, is_plain = dict[int, set[Any]](), False
    for one in exchanges:
        stage = attacks.config_of(one.request).get(keys.ALIGN_STAGE)
        if stage == blinded.BLIND:
            blind = blinded.BlindReply.read(one.reply)
            named.setdefault(int(blind.clients[0]), {row.tobytes() for row in blind.points})
        elif stage == blinded.IDENTITIES:
            plain, is_plain = blinded.PlainReply.read(one.reply), True
            named.setdefault(int(plain.clients[0]), {row.tobytes() for row in plain.tokens})
    if len(named) < clients:
        raise ValueError(f"the alignment of {len(named)} of {clients} clients was recorded")
    texts = blinded.canonical(candidates, "the server")
    sent = [named[client] for client in sorted(named)]
    if is_plain:
        return [blinded.plain_token(text) for text in texts], sent
    # Without the blind, which only the client has, no candidate's point is among its points.
    requests = map(attacks.config_of, (one.request for one in exchanges))
    run = next(config["sum-run"] for config in requests if "sum-run" in config)
    return [blinded.hash_to_group(run, text) for text in texts], sent


class EgoAudit(attacks.Audit[FedSCemConfig]):
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

    def deviations(self, config: FedSCemConfig, method: Any) -> list[attacks.Deviation]:
        result = list[attacks.Deviation]()
        if config.strategy.alignment == "psi":
            held = [list(one.identities) for one in method.graphs(config)]
            parts = attrgetter("session.sums.server.run_id", "session.members.aligner")
            result += of_alignment(parts, held)
        if config.strategy.aggregation == "masked":
            result += of_sums(attrgetter("session.sums.server"))
        return result

    def attack(
        self, config: FedSCemConfig, grid: attacks.RecordingGrid, method: Any
    ) -> list[attacks.Finding]:
        sets = [set(one.identities) for one in method.graphs(config)]
        candidates = sorted(set().union(*sets), key=str)
        truth = np.array([[node in mine for node in candidates] for mine in sets])
        known, sent = alignment(grid.exchanges, candidates, len(sets))
        members = np.array([[one in mine for one in known] for mine in sent], float)
        pairs = np.triu_indices(len(sets), 1)
        linked = (truth.astype(int) @ truth.T.astype(int))[pairs] > 0
        # Of two clients that have not as many nodes
        sizes = np.array([[len(mine) for mine in one] for one in (sent, sets)])
        more, has_more = (one[pairs[0]] - one[pairs[1]] for one in sizes)
        differ, common = has_more != 0, "which clients have nodes in common, from the"
        from_sizes = "which of two clients has more nodes, from the alignment"
        rows = vectors(grid.exchanges, len(sets), config.model.hidden)
        return [
            attacks.ranking("who holds which node, from the alignment", members, truth),
            attacks.ranking(from_sizes, more[differ], has_more[differ] > 0),
            attacks.ranking(f"{common} alignment", (members @ members.T)[pairs], linked),
            *(attacks.alike(f"{common} {what}", found, linked) for what, found in rows.items()),
        ]
