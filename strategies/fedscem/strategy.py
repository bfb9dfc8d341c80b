"""FedSCem: node classification over ego-networks by averaging embeddings that nobody sees.

Xie, Xiong and Yang, "Federated Node Classification over Distributed Ego-Networks with Secure
Contrastive Embedding Sharing", CIKM 2024. Every client holds an ego-network, its own GNN and
classifier, and a projection head ``f``. Ego-networks overlap: of the same node, one
client may know neighbours that another client lacks.

Once, before the first round:

1. clients make keys, and the server hands the public ones on;
2. *secure alignment* (section 4.3.1): all clients agree on one order of the *slots*, the nodes
   that at least two clients hold; the server learns neither nodes nor holders.

Round ``t``, in two exchanges. The first brings the sums of round ``t - 1``:

3. client: takes the sums' pads off, ``h~_v = sum / count`` (equation 7), for its own slots;
4. client: *contrastive fusion*, a step on ``L_nc + mu L_ct``, NT-Xent between ``f(h)`` and
   ``f(h~)`` (equations 8 to 11);
5. client: a step on ``L_nc`` (equation 3), then ``H = GNN(X, A)`` (equation 1);
6. client -> server: embeddings by slot and a one for each slot that it holds, under pads and masks
   (*secure aggregation*, section 4.3.2), and its measurements after step 4;
7. server: adds up, and in the second exchange takes the masks away; clients prepare the keys of
   round ``t + 1`` in the same message.

After the last round one more pass does steps 3, 4 and 6; step 6 then sends measurements alone.

*Variants.* ``full`` is FedSCem. ``minus`` (FedSCem−) has no step 5. ``iter`` (FedSCem_iter) steps
on ``mu L_ct`` alone in step 4, so that the two losses alternate. *Model sharing*: with ``fedavg``
or ``fedprox`` the clients' weights are added up as well, and every round begins with their mean.

*Absent clients* keep their weights. A round in which too few clients answer is skipped: nothing of
it is revealed, and step 4 goes on without ``L_ct``.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flower_graph.config.rules import ABOVE_ZERO, choice
from flower_graph.errors import NoClientsError
from flower_graph.outputs.files import NO_CLIENT, Snapshot
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.node_config import (
    LEAST_HOLDERS,
    MOST_BLOCK,
    MOST_POINTS,
    USUAL_DIFFERENCE,
    Limits,
)
from flower_graph.secure.sum.service import as_record
from flower_graph.server.round_strategy import OwnRounds
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.fedscem.cohort import EgoSettings
from flower_graph.strategies.fedscem.config import (
    AGGREGATIONS,
    ALIGNMENTS,
    MODEL_SHARING,
    VARIANTS,
)
from flower_graph.strategies.fedscem.kept import common_model
from flower_graph.strategies.fedscem.messages import (
    NO_SLOTS,
    EgoReply,
    EgoRequest,
    write_save,
)
from flower_graph.strategies.fedscem.server_state import EgoServerState
from flower_graph.strategies.fedscem.session import EgoSession

FINE = 2.0**-20  # step of fixed-point weights: in a round they change by less than embeddings do
# Aggregation, alignment and model sharing with which a lying server learns no client's data
READ_BY_NOBODY = ("masked", "psi", "none")


class MaskedEmbeddingAveraging(OwnRounds[EgoRequest, EgoReply]):
    """Server of FedSCem, for clients that answer as ``EgoNetworkClient`` does.

    Parameters
    ----------
    settings : EgoSettings
        The clients' models and training.
    variant : str
        ``"full"``, ``"iter"`` or ``"minus"``.
    model_sharing : str
        ``"none"``, ``"fedavg"`` or ``"fedprox"`` (with ``settings.proximal``).
    alignment : str
        ``"psi"``: blinded identities. ``"plain"``: in the clear.
    aggregation : str
        ``"masked"`` or ``"plain"``.
    limit, resolution : float
        Largest size of a number in an embedding, and step of the fixed-point numbers; where models
        are shared, a step of 2^-20 at most.
    dropout : float
        Share of a round's clients that may vanish.
    block_cap : int
        Most points of a client's block in the alignment ``"psi"``: the power of two above the
        number of its identities. A client with more is left out.
    most_points : int
        Most points of all clients of one SuperNode; clients beyond that number are left out.
    least_holders : int
        Least number of clients that hold a summed node; 2 or more, above 2 with the alignments
        ``"psi"`` and ``"plain"``.
    registry : Path or str, optional
        File of the SuperNodes' registered keys, for clients that do not trust the server (their
        ``trust``): masked sums and ``"psi"`` with proofs, from five SuperNodes on.
    differ_by : int
        Least number of SuperNodes by which two of these sums differ; see ``PartySums``.
    **more
        ``participation``, the share of the clients asked each round, above 0 and at most 1;
        ``min_nodes``, SuperNodes to wait for before a round; ``checkpoint_dir`` and
        ``checkpoint_every``, where and every how many rounds to save everything, 0 for never.

    Notes
    -----
    A client must answer ``query`` with its keys, ``train.align`` and ``train.union`` with its part
    of the alignment, ``train`` with the vector, ``train.unmask`` with shares and keys,
    ``train.save`` and ``train.finish`` with nothing (``messages.py`` beside this file).
    """

    session: EgoSession
    usual_rounds = 400

    def __init__(
        self,
        settings: EgoSettings,
        *,
        variant: str = "full",
        model_sharing: str = "none",
        alignment: str = "psi",
        aggregation: str = "masked",
        limit: float = 32.0,
        resolution: float = 2.0**-12,
        dropout: float = 0.3,
        block_cap: int = MOST_BLOCK,
        most_points: int = MOST_POINTS,
        least_holders: int = LEAST_HOLDERS,
        registry: Path | str | None = None,
        differ_by: int = USUAL_DIFFERENCE,
        **more: object,
    ) -> None:
        for name, value, allowed in (
            ("variant", variant, VARIANTS),
            ("model_sharing", model_sharing, MODEL_SHARING),
            ("alignment", alignment, (*ALIGNMENTS, NO_SLOTS)),
            ("aggregation", aggregation, AGGREGATIONS),
        ):
            choice(*allowed).check(name, value)
        ABOVE_ZERO.check("tau", settings.tau)
        if registry is not None and (aggregation, alignment, model_sharing) != READ_BY_NOBODY:
            raise ValueError(
                f"aggregation={aggregation!r}, alignment={alignment!r}, model_sharing="
                f"{model_sharing!r}: with a registry they are {READ_BY_NOBODY}"
            )
        super().__init__(
            EgoSession(
                settings,
                alignment=alignment,
                aggregation=aggregation,
                limit=limit,
                resolution=resolution if model_sharing == "none" else min(resolution, FINE),
                dropout=dropout,
                limits=Limits(block_cap, most_points, least_holders),
                registry=registry,
                differ_by=differ_by,
                **more,
            )
        )
        shares_model = model_sharing != "none"
        self.kept = EgoServerState(settings, variant=variant, shares_model=shares_model)
        self.num_classes = settings.num_classes
        self._early: list[dict[str, object]] = []  # left out before the first report

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        return self.kept.ledger.payload

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        self.kept.counting = self.counting

    def round(self, server_round: int) -> RoundReport | None:
        """Do steps 3 to 7; return the report of the round before."""
        # A round's measurements come with the next round's vectors.
        session, kept = self.session, self.kept
        if session.admit(server_round):
            kept.forget_sums()
        if session.is_masked and not session.sums.clients:
            session.prepare(server_round, session.sample(server_round))
        base, layout = kept.request(server_round, session), kept.layout(server_round, session)
        requests = session.requests(server_round, base, layout.length)
        self.answers = session.ask(server_round, requests, layout.length)
        if requests and not self.answers:  # without requests the round is skipped
            raise NoClientsError(
                f"round {server_round}: none of {len(requests)} SuperNodes gave a usable answer "
                f"within {session.timeout:g} s; the log names the reasons"
            )
        silent = list(session.rejected)  # clients that fail after this have sent their vector
        result = session.close(server_round, self.answers)
        session.rejected = silent
        result.rejected += [{"node": one.node_id, "reason": one.reason} for one in silent]
        asked = sum(map(len, session.asked.values()))
        means = kept.take(layout, result, base.ring, self.answers.values(), asked)
        self.counts = kept.counts
        contrast = 0.0 if math.isnan(means.contrast) else means.contrast
        report = self.report(
            server_round - 1,
            session.became_of(result),
            means._asdict(),
            loss=means.cross_entropy + kept.settings.mu * contrast,
            cross_entropy=means.cross_entropy,
            regulariser=means.contrast,
            bytes=self.payload,
            parts=result.parts,
            skipped=result.skipped,
        )
        report.rejected = result.rejected
        if server_round == session.members.resume.server_round + 1:
            self._early = report.rejected
            return None
        report.rejected[:0], self._early = _others(self._early, report.rejected), []
        return report

    def rejoin(self) -> list[str]:
        """Have the clients load a checkpoint, and count its bytes, since it sets up a new run."""
        return self.session.rejoin()

    def finish(self, server_round: int) -> None:
        self.session.tell_all(server_round, as_record({}), "train.finish")

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Return the mean model; empty if models are not shared.

        ``first`` ``[f, h]``, ``bias-1`` ``[h]``, ``weight-2``, ``bias-2``, ``classifier``,
        ``classifier-bias``, ``projection`` and ``projection-bias``.
        """
        return self.kept.model_arrays()

    def snapshot(self) -> Snapshot | None:
        if (model := self.kept.started) is None:
            return None
        return Snapshot(None, [common_model(model, self.kept.settings, [NO_CLIENT])])

    def clients_save(self, server_round: int) -> dict[int, str]:
        saved = {node: reply.not_saved for node, reply in self.answers.items()}
        order = write_save(self.kept.settings, server_round, self.session.checkpoints.run)
        return self.session.have_saved(server_round, as_record(order), saved)

    def fixed_settings(self) -> dict[str, object]:
        kept = self.kept
        local = {"variant": kept.variant, "shares_model": kept.model is not None}
        return {**kept.settings._asdict(), **local}

    def state(self) -> dict[str, object]:
        return self.kept.state_dict() | {"excluded": sorted(self.session.sums.server.excluded)}

    def load_state(self, state: StateDict) -> None:
        self.kept.load_state_dict(state)
        self.session.sums.server.exclude(state.get("excluded", ()))


def _others(
    early: list[dict[str, object]], later: list[dict[str, object]]
) -> list[dict[str, object]]:
    repeated = [(entry.get("node"), entry.get("client")) for entry in later]
    return [entry for entry in early if (entry.get("node"), entry.get("client")) not in repeated]
