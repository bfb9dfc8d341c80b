"""The audit of FedSCem: which client holds which node, and which clients share nodes."""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from flower_graph.audit import attacks, suite
from flower_graph.audit.deviating import of_alignment, of_sums
from flower_graph.ops.peers import cosine_similarities
from flower_graph.secure.align import blinded
from flower_graph.secure.ring import CHECKS
from flower_graph.strategies.fedscem.client import PLAIN, EgoEnrolment
from flower_graph.strategies.fedscem.config import FEDSCEM, FedSCemConfig
from flower_graph.wire import keys
from flower_graph.wire.arrays import unpack_integers

# How identities are aligned, how vectors are summed
FORMS = (("psi", "masked"), ("psi", "plain"), ("plain", "masked"))
NAMING, NAMES, SLOTS, VECTORS = "naming", "names", "slots", "vectors"
COMMON = "which clients have nodes in common, from the"


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

    def view(self, message: attacks.Exchange) -> Iterator[tuple[str, int, Any]]:
        request, reply = message.request, message.reply
        config = attacks.config_of(request)
        stage = config.get(keys.ALIGN_STAGE)
        if message.kind == "query":
            enrolment = EgoEnrolment.from_config(config)
            # Without the blind, which only the client has, no candidate's point is among its points
            points = partial(blinded.hash_to_group, enrolment.run_id)
            is_plain = enrolment.alignment == PLAIN
            yield NAMING, attacks.SERVER, blinded.plain_token if is_plain else points
        elif stage == blinded.BLIND:
            blind = blinded.BlindReply.read(reply)
            yield NAMES, int(blind.clients[0]), {row.tobytes() for row in blind.points}
        elif stage == blinded.IDENTITIES:
            plain = blinded.PlainReply.read(reply)
            yield NAMES, int(plain.clients[0]), {row.tobytes() for row in plain.tokens}
        elif message.kind == "train" and not config[keys.IS_LAST]:  # else measurements alone
            (client,) = unpack_integers(config[keys.CLIENTS], keys.CLIENTS).tolist()
            if keys.SUMS in request.array_records:  # not in the first round
                yield SLOTS, attacks.SERVER, attacks.array_of(request, keys.SUMS, keys.RELAYED).size
            masked, clear = (keys.ARRAYS, keys.MASKED_SUM), (keys.SUMS, keys.TOTAL)
            is_masked = keys.ARRAYS in reply.array_records
            words = attacks.array_of(reply, *(masked if is_masked else clear))
            # Words of a ring are read as numbers around zero, as if no mask were on them.
            yield VECTORS, client, words.view(words.dtype.str.replace("u", "i")).astype(float)

    def findings(
        self, config: FedSCemConfig, seen: attacks.Seen, method: Any
    ) -> list[attacks.Finding]:
        held = [set(one.identities) for one in method.graphs(config)]
        candidates = sorted(set().union(*held), key=str)
        truth = np.array([[node in mine for node in candidates] for mine in held])
        linked = truth.astype(int) @ truth.T.astype(int) > 0
        names = [one[0] for one in seen.of(NAMES, len(held))]
        members = suite.named(names, seen.of(NAMING)[0][0], candidates)
        rows = np.stack([one[-1] for one in seen.of(VECTORS, len(held))])
        checks = CHECKS if config.strategy.distrusts else 0
        relayed = seen.of(SLOTS)[0][-1] - checks  # an embedding and a count by slot
        ends = relayed - relayed // (config.model.hidden + 1), relayed
        embeddings, counts = map(cosine_similarities, np.split(rows, ends, axis=1)[:2])
        sizes = [[*map(len, names)], [*map(len, held)]]
        return [
            attacks.ranking("who holds which node, from the alignment", members, truth),
            suite.larger("which of two clients has more nodes, from the alignment", *sizes),
            suite.pairs(f"{COMMON} alignment", members @ members.T, linked),
            suite.pairs(f"{COMMON} counts", counts, linked),
            suite.pairs(f"{COMMON} embeddings", embeddings, linked),
        ]
