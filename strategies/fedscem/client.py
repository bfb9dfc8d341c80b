"""The ego-network clients of one SuperNode: FedSCem's with their secrets, and the baselines'.

The vector that a client adds to the sum has its parts in a row (``Layout``): embeddings by slot, a
one for each slot that the client holds, its measurements, and, if models are shared, its weights.
It is written as words of a ring, under two kinds of pads that the server does not know
(``secure.align.client``), or as plain float64. Embeddings that are too long for the ring are
shortened. If a client's other numbers do not fit, the client is left out, never clipped.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.learner import NODES, SharedModule, saved_rows
from flower_graph.client.module_client import ModuleClient
from flower_graph.client.state import CohortState, Tensors, check_graphs
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Learner, check_sizes
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import (
    CHANGED_SUM,
    MalformedReplyError,
    OutOfRangeError,
    RefusedError,
    StateLostError,
    UnreadableSumError,
)
from flower_graph.ops.grouped import one_thread
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Snapshot, predictions_from
from flower_graph.privacy.noise import ClientNoise
from flower_graph.secure.align.client import AlignmentClient, SlotTable
from flower_graph.secure.channel import framed
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.ring import CHECKS, Ring, checks_of
from flower_graph.secure.sum.client import MaskingClient, SumClient
from flower_graph.secure.sum.messages import RING, KeyReply, MaskRequest, SumTerms
from flower_graph.strategies.fedscem.config import ALIGNMENTS, EgoSettings
from flower_graph.strategies.fedscem.modules import (
    FIRST,
    EgoCohort,
    EgoGroup,
    Shared,
    first_model,
    largest_of,
)
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import Answer, Config, FloatArray, IntArray, Parameters
from flower_graph.wire.codec import Clients, Flag, Message, Part, Resume, Whole, Word
from flower_graph.wire.counts import Counting, counts_size
from flower_graph.wire.keys import ALIGN_STAGE, ARRAY_NAMES, SUM_STATE, SUMS, TOTAL

# What a client measures, as sums over clients: accuracies with the number of clients that have
# such nodes, losses with the number of clients that have them.
METRIC_NAMES = (
    *("train", "has-train", "val", "has-val", "test", "has-test"),
    *("cross-entropy", "contrast", "has-contrast"),
)
# Summed besides: how many clients could not read the means of the round before. They are not named,
# since a client that notices a wrong word holds its slot.
UNREAD = "unread"
SUMMED_NAMES = (*METRIC_NAMES, UNREAD)
VERIFIED = "verified"  # blinded identities under a server that may lie
# Any: ring words, or plain numbers; the round has a ring or not
SumArray = NDArray[Any]
# A sum, or a part of one
SumTensor = partial(codec.Tensor, dtype="uint32, uint64 or float64")


@dataclass
class Layout:
    """Sizes of the parts of a vector, and where each part is."""

    slots: int  # Slots, and numbers in an embedding
    hidden: int
    weights: int = 0  # Numbers in a model; 0 where models are not shared
    classes: int = 0  # Of predictions that are counted, and what is: see ``ops.counts``
    counting: str = ""
    checks: int = 0  # Of the embeddings and counts, where the server may lie

    def __post_init__(self) -> None:
        sizes = self.slots * self.hidden, self.slots, len(SUMMED_NAMES), self.weights
        predictions = counts_size(self.classes, self.counting)
        ends = list(accumulate([*sizes, predictions, self.checks], initial=0))
        self.length = ends[-1]
        parts = [slice(*both) for both in pairwise(ends)]
        # Embeddings and ones slot by slot; a model's parameters one behind the other
        self.embeddings, self.counts, self.metrics, self.model, self.predictions, self.tags = parts
        self.relayed = slice(0, self.counts.stop)  # what the clients get back


class EgoEnrolment(Message, down="query"):
    """Server to client: asks for its clients and keys, and names a checkpoint.

    The answer: ``KeyReply``.
    """

    run_id: Annotated[bytes, codec.Raw("sum-run", group="Set-up of the sum")]
    alignment: Annotated[str, Word()]  # `psi`, `verified` or `plain`: what will follow
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)


class Sums(NamedTuple):
    """The server's sums of a round, for the clients."""

    server_round: Annotated[int, Whole("sums-round")]  # round of `sums`; left out without
    # number of the secure sum, which the pads belong to, and how many clients are in it
    origin: Annotated[list[int], codec.Numbers("contributors", shape="2", whole=True)]
    # the last round's sum of embeddings, under pads (plain: float64, without)
    embeddings: Annotated[SumArray, SumTensor(f"{keys.SUMS}/embeddings", shape="slots·h")]
    # how many clients are in each slot, likewise
    counts: Annotated[SumArray, SumTensor(f"{keys.SUMS}/{keys.HOLDER_COUNTS}", shape="slots")]
    # where the server may lie: the clients in it, each of which has a pad on its checks
    members: Annotated[IntArray | None, Clients("sums-members", shape="q")] = None
    # likewise: checks of embeddings and counts, words of 64 bits under these pads
    checks: Annotated[codec.Bytes | None, codec.Block("sums-checks", shape=f"{CHECKS} 8")] = None


class EgoRequest(Message, down="train"):
    """Server to client: the last round's sums; asks for this round's vector.

    When slots are new, the alignment's last message travels with it.
    """

    server_round: Annotated[int, Whole()]  # the round
    clients: Annotated[IntArray, Clients(shape="p")]  # who takes part
    variant: Annotated[str, Word()]  # `full`, `iter` or `minus`
    # Of the round before; None before the first, and where it was skipped
    sums: Annotated[Sums | None, Part(make=Sums, when="sums-round")] = None
    shares_model: Annotated[bool, Flag()] = False  # whether `model` is there
    # the model to start from, where models are shared: the parameters of `EgoGCN` in a row
    weights: Annotated[
        FloatArray | None, codec.Tensor("model/weights", shape="D", when="shares_model")
    ] = None
    # How numbers are written, and the secure sum's part; None for plain sums
    ring: Annotated[Ring | None, RING] = None
    mask: Annotated[MaskRequest | None, Part("Mask", make=MaskRequest, when=keys.RING_WORD)] = None
    is_last: Annotated[bool, Flag()] = False  # after the last round: only measure
    checkpoint: codec.Saves = False
    run: codec.Token = ""
    counting: Counting = ""

    def vector_layout(self, settings: EgoSettings, slots: int, *, checked: bool) -> Layout:
        """Return the parts of this round's vectors; after the last round, measurements alone."""
        hidden, about = settings.hidden, (settings.num_classes, self.counting)
        if self.is_last:
            return Layout(0, hidden, 0, *about)
        weights = 0 if self.weights is None else self.weights.size
        return Layout(slots, hidden, weights, *about, CHECKS if checked and slots else 0)


class EgoReply(Message, up="train"):
    """Client to server: the sum of its clients' vectors."""

    server_round: Annotated[int, Whole()]  # as asked
    # sum of the clients' vectors: embeddings by slot, ones for slots held, nine measurements,
    # whether the last means could not be read, weights, counts if they are asked for, checks where
    # the server may lie (`Layout`); masked ring words, or plain
    total: Annotated[SumArray, SumTensor(f"{keys.SUMS}/{TOTAL}", shape="L", limit=None)]
    not_saved: codec.NotSaved = ""
    # plain: who is in the sum
    clients: Annotated[IntArray, Clients("present", shape="q")] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    # plain: `number:reason` for each that is not in the sum
    left_out: Annotated[dict[int, str], codec.Reasons()] = field(default_factory=dict)
    masked: Config = field(default_factory=dict)  # entries of the ``MaskedReply`` beside it

    def check(self, known: codec.Known) -> None:
        """Refuse clients of a plain sum that are not among those ``asked``."""
        if (asked := known.get("asked")) is None:
            return
        if not self.clients.size:
            raise MalformedReplyError("present: there is no client")
        if (strange := np.setdiff1d(self.clients, asked)).size:
            raise MalformedReplyError(f"present: client {strange[0]} was not asked here")


def union_terms(epoch: int) -> SumTerms:
    """Return the terms of the sum of token tables; its length is the table's."""
    # Each alignment has another key, so its tables have nothing in common with others.
    return SumTerms(f"FedSCem union {epoch}", None)


def round_terms(server_round: int, ring: Ring | None, order: NDArray[np.uint8] | None) -> SumTerms:
    """Return the terms of a round's sum; server and clients put in their own order of slots."""
    # order [s, 12]: their tokens; None where identities are not blinded
    slots = b"" if order is None else hashlib.sha256(order.tobytes()).digest()
    return SumTerms("FedSCem round", ring, framed(b"%d" % server_round, slots), padded=True)


def are_counts(found: NDArray[np.float64], clients: int) -> bool:
    """Return whether all are whole numbers that this many clients can reach."""
    return bool(((found >= 0) & (found <= clients) & (found == np.rint(found))).all())


def contrast_scale(tau: float) -> float:
    """Return the divisor of the contrastive loss on the wire, which grows with ``1 / tau``."""
    # The quotient is below ``2 + log(2 n_c)``, which fits the ring at any temperature.
    return 1 + 1 / tau


LOG = logging.getLogger(__name__)

FUSIONS, TABLE = b"fusions", b"table of tokens"  # in the journal
PLAIN = "plain"  # the form of alignment in which the server learns identities
NAME = "ego-alignment"  # in Context.state


class Hiding(NamedTuple):
    """What a run's config hides from the server."""

    masked: bool = False  # whether sums are masked: then no vector leaves without masks
    alignment: str = PLAIN  # its form; if it is not plain, a client refuses plain
    noise: ClientNoise | None = None  # on each client's embeddings, before masks and pads


NOTHING = Hiding()


class EgoNetworkClient(MaskingClient):
    """The ego-networks of one SuperNode: one in a deployment, many in a simulation.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps weights and secrets.
    egos : sequence of ClientGraph
        The clients' graphs, with node identities that mean the same at all clients.
    settings : EgoSettings
        Models and training, the same at all clients and at the server.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where checkpoints are saved, if the SuperNode has no folder of its own.
    outputs : ClientOutputs, optional
        Where outputs go without such a folder, and the names of the classes.
    hiding : Hiding
        What the run's config hides from the server.
    trust : TrustSettings, optional
        The SuperNode's key and the parties that it trusts, if it does not trust the server. It
        then takes part only in masked sums and in the alignment with proofs.
    """

    actions = ("align", "union", "save", "finish", *MaskingClient.actions)

    def __init__(
        self,
        context: Context,
        egos: Sequence[ClientGraph],
        settings: EgoSettings,
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        outputs: ClientOutputs | None = None,
        hiding: Hiding = NOTHING,
        trust: TrustSettings | None = None,
    ) -> None:
        self.graphs, self.settings, self._hiding = checked(egos, settings), settings, hiding
        self._device, self.outputs = resolve_device(device), outputs or ClientOutputs(context)
        clients = [ego.client for ego in self.graphs]
        self._state = CohortState[EgoCohort](context, clients, checkpoint_dir, self._made)
        super().__init__(context, clients, trust)
        self._identities = {ego.client: ego.identities for ego in egos}

    def get_properties(self, config: Config) -> Config:
        enrolment = EgoEnrolment.from_config(config)
        # With a key of its own a SuperNode takes part in the alignment with proofs alone
        hidden = ALIGNMENTS if self._hiding.alignment == PLAIN else (self._hiding.alignment,)
        if enrolment.alignment not in (allowed := (VERIFIED,) if self.trust else hidden):
            got = f"{enrolment.alignment!r:.40} is asked for"
            raise RefusedError(f"alignment: {got}, here it is {' or '.join(allowed)}")
        if self._state.is_due(enrolment.resume):
            self._refuse_going_back()
        had_state = bool(self._state.version)
        self._state.restore(enrolment.resume)
        handled = self._state.processed()
        if had_state and not handled:
            self.context.state.pop(NAME, None)  # clients without their state are aligned again
        reply = self._begin(enrolment.run_id, enrolment.alignment)
        reply.handled = handled
        return reply.to_config()

    def _refuse_going_back(self) -> None:
        """Refuse a checkpoint from before a sum of this run: a round's sums could be compared."""
        with suppress(StateLostError):
            if self.keys().mark:
                raise RefusedError(
                    "this SuperNode has sent vectors in this run: it loads no checkpoint from "
                    "before, as two sums of a round can be compared"
                )

    def _begin(self, run_id: bytes, form: str) -> KeyReply:
        aligner, is_plain = None, form == PLAIN
        with suppress(StateLostError):  # the secrets of another run are of no more use
            if (host := self.keys()).run_id == run_id:
                aligner = self._aligner(host)
        if aligner is None or aligner.plain != is_plain:
            aligner = AlignmentClient(run_id, self._identities, self.trust, plain=is_plain)
            points = aligner.points if self.trust else None
            host = SumClient(run_id, self.clients, self.trust, points, least=self._fewest())
            self._keep_aligner(aligner)
        reply = host.keys()
        self._keep(host)
        return reply

    def align(self, parameters: Parameters, config: Config) -> Answer:
        with self._aligning(self.keys()) as aligner:
            return [], 1, aligner.answer(config)

    def union(self, parameters: Parameters, config: Config) -> Answer:
        """Take the key-holders' answers, add the table of tokens to a masked sum (step 2)."""
        mask, host = MaskRequest.from_config(config), self.keys()
        with self._aligning(host) as aligner:
            host.receive(mask, None)
            union = aligner.unite(config)
            if self.trust is not None:
                # Two sums of tables in one alignment, one of them without us, differ by our table.
                self.trust.journal.contribute(union.epoch, TABLE)
            ready = set(aligner.finished)
            present = [client for client in mask.clients.tolist() if client in ready]
            table = aligner.sketch(union.cells, present)
            reply = host.mask(mask, present, table, union_terms(union.epoch), [table])
            self._keep(host)
        return [reply.total], 1, reply.to_config() | {ARRAY_NAMES: [f"{SUMS}/{TOTAL}"]}

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Fuse, train, embed and send the masked vector (steps 3 to 6)."""
        reply = self.round(EgoRequest.from_numpy(parameters, config), config)
        arrays, weight, entries = reply.to_numpy()
        return arrays, weight, entries | reply.masked

    def _enrolled(self, config: Config) -> SumClient:
        return self.keys()  # only ``query`` makes them, with an alignment

    def save(self, parameters: Parameters, config: Config) -> Answer:
        return [], 1, {**self._state.save_asked(config)}

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._state.drop(NAME, SUM_STATE)
        return [], 1, {}

    def snapshot(self) -> Snapshot:
        return self._taken(self._state.look())

    @torch.no_grad()
    def _taken(self, cohort: EgoCohort) -> Snapshot:
        with cohort.part() as group:
            logits = group.logits()
        nodes = [node for ego in self.graphs for node in ego.called or ego.identities]
        predictions = predictions_from(self.graphs, logits, self.outputs.classes, nodes)
        return Snapshot(predictions, saved_rows(cohort, partial(first_model, self.settings)))

    def _made(self, tensors: Tensors | None) -> tuple[EgoCohort, Tensors]:
        cohort = EgoCohort(self.graphs, self.settings, tensors, self._device)
        return cohort, cohort.tensors

    # The alignment, with its secrets

    def _aligner(self, host: SumClient) -> AlignmentClient:
        """Return the alignment that is kept; ``StateLostError`` without it."""
        # Any: an entry of a record that ``_keep_aligner`` wrote
        state: Any = self.context.state.config_records.get(NAME, ConfigRecord()).get("state")
        if state is None:
            who = f"client {self.context.node_id}"
            raise StateLostError(f"{who}: its alignment of this run is not here")
        source, aligner = self._state.live.beside
        if source != self._source(state):  # to read it takes long
            of = host.run_id, self._identities, self.trust
            aligner = AlignmentClient.from_bytes(state, *of)
            self._state.live.beside = self._source(state), aligner
        if (epoch := host.epoch) is not None:
            aligner.begin(epoch.digest, epoch.parties.tolist(), epoch.points)
        return cast(AlignmentClient, aligner)

    def _source(self, state: bytes) -> tuple[object, ...]:
        return state, None if self.trust is None else self.trust.registry.digest

    def _keep_aligner(self, aligner: AlignmentClient) -> None:
        state = aligner.to_bytes()
        self.context.state[NAME] = ConfigRecord({"state": state})
        self._state.live.beside = self._source(state), aligner

    @contextmanager
    def _aligning(self, host: SumClient) -> Iterator[AlignmentClient]:
        """Work with the alignment; keep its changes if the block ends without an error."""
        aligner = self._aligner(host)
        self._state.live.beside = None, None
        yield aligner
        self._keep_aligner(aligner)

    # A round

    def round(self, request: EgoRequest, slots: Config | None = None) -> EgoReply:
        if self._hiding.masked and request.mask is None:
            raise RefusedError("no masks are asked for, and the run's config has masked sums")
        number, clients, host = request.server_round, request.clients.tolist(), self.keys()
        if slots and ALIGN_STAGE in slots:
            with self._aligning(host) as aligner:
                aligner.answer(slots)
        aligner = self._aligner(host)
        order = None if aligner.plain else aligner.order
        last, now = (round_terms(one, request.ring, order) for one in (number - 1, number))
        if self.trust is not None:
            check_request(request, aligner)
        if request.mask is not None:
            host.receive(request.mask, request.ring)
        table: SlotTable = aligner.slots
        origin = 0 if request.sums is None else request.sums.origin[0]
        layout, pads = Layout(table.num_slots, self.settings.hidden), last.pad_context
        reading = VectorEncoding(layout, table, request.ring, pads(host.sum_run), origin)
        opened = self._state.opened
        with opened() as cohort, one_thread(len(clients) > 1), cohort.part(clients) as group:
            logits, measured, is_unread = self._trained(cohort, group, request, reading)
            h = group.embed()
        not_saved = self._state.save(number - 1, request.run) if request.checkpoint else ""
        sum_round = request.mask.server_round if request.mask else number
        layout = request.vector_layout(
            self.settings, table.num_slots, checked=self.trust is not None
        )
        pads = now.pad_context
        writing = VectorEncoding(layout, table, request.ring, pads(host.sum_run), sum_round)
        counted: Tensor | None = logits
        if (noise := self._hiding.noise) is not None:
            h, measured = add_noise(noise, self.context.state, h, measured, writing, clients)
            counted = None if noise.withholds else logits
        measured = np.pad(measured, ((0, 0), (0, 1)), constant_values=float(is_unread))
        total, present, left_out = writing.add_up(cohort, group, h, measured, counted)
        if not present:
            raise OutOfRangeError("; ".join(f"client {c}: {w}" for c, w in left_out.items()))
        if request.mask is None:
            here = np.array(present, np.int64)
            return EgoReply(number, total, not_saved, here, left_out)
        state = [np.array(request.is_last), h.cpu().numpy()]
        reply = host.mask(request.mask, present, total, now, state)
        self._keep(host)
        reply.left_out.update(left_out)
        return EgoReply(number, reply.total, not_saved, masked=reply.to_config())

    def _trained(
        self, cohort: EgoCohort, group: EgoGroup, request: EgoRequest, reading: VectorEncoding
    ) -> tuple[Tensor, NDArray[np.float64], bool]:
        """Fuse, and train (steps 4 and 5)."""
        # Returns the logits and the measurements of after step 4, and whether the means could not
        # be read.
        number, clients = request.server_round, list(group.graph.clients)
        before, now = 2 * (number - 1), 2 * number - 1
        if request.weights is not None:
            # The models of a checkpoint may have begun the round already: with the fusion, and
            # after the last round even without the local step.
            weights, is_new = torch.from_numpy(request.weights), cohort.is_behind(clients, before)
            cohort.start_from(group, weights, replace=is_new)
        contrast, is_unread = self._fuse(cohort, group, request, reading)
        due = cohort.is_behind(clients, now)
        logits = None
        if due and not request.is_last:
            if number > 1:
                cohort.write(cohort.group(group.graph.clients))
                self.outputs.candidate(number - 1, lambda: self._taken(cohort))
            cohort.note(clients, now)
            # With batches `iter` alternates these steps with the fusion's steps.
            if request.variant != "minus" and not self._alternates(request):
                # The step begins with the forward pass that is measured.
                logits = group.train(number)
        logits = group.logits() if logits is None else logits
        judged = group.graph.judged(logits)
        loss = NODES.training_loss(judged).cpu()
        accuracy = torch.stack(NODES.shares(judged), 1).cpu()
        if (due or request.is_last) and number > 1:  # else repeated after the step
            both = loss if contrast is None else loss + self.settings.mu * contrast.nan_to_num(0.0)
            figures = {"loss": both.numpy(), "accuracy": accuracy.numpy()}
            self.outputs.measured(number - 1, clients, nodes=np.diff(group.graph.ptr), **figures)
        return logits, measure(accuracy, loss, contrast, self.settings.tau), is_unread

    def _fuse(
        self, cohort: EgoCohort, group: EgoGroup, request: EgoRequest, reading: VectorEncoding
    ) -> tuple[Tensor | None, bool]:
        # Returns the result of ``EgoGroup.fuse``, if it was called, and whether means could not
        # be read.
        before, is_unread, is_shared = request.server_round - 1, False, False
        clients = group.graph.clients
        if not cohort.is_behind(clients, 2 * before):
            return None, is_unread
        cohort.note(clients, 2 * before)
        # If nothing was shared, only the classification loss is left.
        empty = torch.zeros(0, dtype=torch.long, device=self._device)
        shared = Shared(empty, torch.zeros(0, self.settings.hidden, device=self._device))
        if request.sums is not None and self.settings.mu:
            try:
                if self.trust is not None:  # every change has the same consequence
                    with self.trust.journal.one_trial(before, FUSIONS):
                        reading.check(request.sums)
                shared = reading.means(request.sums, clients, self._device)
                is_shared = reading.layout.slots > 0
            except (RefusedError, UnreadableSumError) as error:  # for this round only
                # A sum that passed is not counted: a client that also has the common key, and
                # colludes with the server, could ask about slots of other clients.
                is_unread = self.trust is None or isinstance(error, RefusedError)
                LOG.warning("round %d: the means are not used: %s", before, error)
        # All clients count, not only the clients here: who hosts a client changes nothing.
        if request.variant == "iter" and not is_shared:
            if self._alternates(request):
                group.train(before)
            return None, is_unread
        return group.fuse(shared, before, classify=request.variant != "iter"), is_unread

    def _alternates(self, request: EgoRequest) -> bool:
        return request.variant == "iter" and self.settings.batch_size is not None


def checked(egos: Sequence[ClientGraph], settings: EgoSettings) -> list[ClientGraph]:
    """Refuse ego-networks that do not fit the settings; return them in order."""
    for ego in egos:
        check_sizes(ego, settings.num_features, settings.num_classes)
    return check_graphs(egos)


def check_request(request: EgoRequest, aligner: AlignmentClient) -> None:
    """Refuse requests that contradict what the clients have agreed on."""
    if request.mask is None or request.ring is None:
        raise RefusedError("a vector is asked for without masks: nothing is sent")
    if request.weights is not None:
        raise RefusedError("weights are asked for, whose sums the server would read")
    if request.clients.tolist() != aligner.finished:
        raise RefusedError(
            f"clients {request.clients.tolist()!s:.60} are asked, {aligner.finished!s:.60} are "
            "aligned here: two sums over different clients could differ by a single client's vector"
        )


# A vector ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorEncoding:
    """The encoding of a round's vectors, and of their sum."""

    layout: Layout  # Their parts
    table: SlotTable  # Which client holds which slot
    ring: Ring | None  # None for plain sums
    pads: bytes  # the run and the sum that pads are made for
    sum_round: int  # Number of the secure sum of this round

    def add_up(
        self,
        cohort: EgoCohort,
        group: EgoGroup,
        h: Tensor,
        metrics: NDArray[np.float64],
        logits: Tensor | None = None,
    ) -> tuple[SumArray, list[int], dict[int, str]]:
        """Add up the vectors of a group's clients."""
        # h [n, h], metrics [c, 10], logits [n, k]; without these predictions are not counted
        layout, ring, clients = self.layout, self.ring, group.graph.clients
        if ring:
            h = _shortened(h, ring.limit)
        left_out = self._unfit(group, h, metrics)
        present = [client for client in clients if client not in left_out]
        good = torch.tensor([client in present for client in clients], device=h.device)
        total = np.zeros(layout.length, np.int64 if ring else np.float64)
        slots = np.zeros(0, np.int64)
        if layout.slots:
            here = good[group.graph.owner].cpu().numpy()
            slots = np.where(here, self._slots(clients), -1)
            kept = slots >= 0
            rows, slots = self._encode(h[torch.from_numpy(kept)]), slots[kept]
            summed = rows.new_zeros(layout.slots, layout.hidden)
            summed.index_add_(0, torch.from_numpy(slots), rows)
            total[layout.embeddings] = summed.numpy().ravel()
            one = self._encode(torch.ones(1)).numpy()
            total[layout.counts] = np.bincount(slots, minlength=layout.slots) * one
        total[layout.metrics] = self._encode(torch.from_numpy(metrics)[good.cpu()]).sum(0).numpy()
        if layout.weights:
            once = dict.fromkeys(present, 1)
            names = [name for name, _ in cohort.module.named_parameters()]
            sums = [cohort.total(name, once, self._encode).flatten() for name in names]
            total[layout.model] = torch.cat(sums).numpy()
        if layout.counting and logits is not None:
            judged = group.graph.judged(logits)
            masks = {role: mask & good[group.graph.owner] for role, mask in judged.masks.items()}
            counts = NODES.count(judged._replace(masks=masks), layout.counting)
            assert counts is not None
            # A node is one step of the ring's numbers, however long these are: sums are exact.
            total[layout.predictions] = counts.flat().numpy() << (ring.guard_bits if ring else 0)
        if ring is None:
            return total, present, left_out
        words = total.view(np.uint64)
        if self.table.group_key and layout.slots:  # the server must not see sums
            words = self._padded(words, slots, present)
        return words.astype(ring.dtype), present, left_out

    def means(self, sums: Sums, clients: Sequence[int], device: torch.device) -> Shared:
        """Remove the pads and divide: mean embeddings of nodes with two or more holders."""
        layout, table, ring = self.layout, self.table, self.ring
        counts, (_, contributors) = sums.counts, sums.origin
        embeddings = sums.embeddings.reshape(layout.slots, layout.hidden)
        slots, held = self._slots(clients), table.held
        if ring is None:
            counts, values = counts.astype(np.int64), embeddings[held]
        else:
            words, ones = embeddings[held], counts
            if table.group_key:
                common = self._common(ring, contributors)
                ones = ones - common[layout.counts]
                words = words - common[layout.embeddings].reshape(embeddings.shape)[held]
            decoded = ring.decode(ones)
            if not are_counts(decoded, contributors):
                raise UnreadableSumError(f"a number of holders is not from 0 to {contributors}")
            counts = decoded.astype(np.int64)
            if table.group_key:
                added = table.pads(self.pads, self.sum_round, layout.hidden).astype(ring.dtype)
                words = words - counts[held, None].astype(ring.dtype) * added
            values = ring.decode(words)
            ring.check_sums(values, counts[held, None])
        mean = np.zeros(embeddings.shape, np.float32)
        mean[held] = values / np.maximum(counts[held, None], 1)
        none = np.zeros(slots.size, bool)
        is_shared = (slots >= 0) & (counts[slots] >= 2) if counts.size else none
        place = torch.from_numpy(np.flatnonzero(is_shared))
        return Shared(place.to(device), torch.from_numpy(mean[slots[is_shared]]).to(device))

    def check(self, sums: Sums) -> None:
        """Refuse sums that differ from what the contributors sent, before any number is read."""
        assert self.ring is not None
        dtype, (_, contributors) = self.ring.dtype, sums.origin
        words = np.concatenate([sums.embeddings.ravel(), sums.counts]).astype(dtype)
        if sums.members is not None and sums.checks is not None:
            common, members = self._common(self.ring, contributors), sums.members.tolist()
            if words.size == common.size and len(members) == contributors:
                words = words - common
                pads = self.table.check_pads(self.pads, self.sum_round, members)
                tags = sums.checks.view("<u8").ravel() - pads
                check = self.table.check(self.pads, self.sum_round, words.size)
                if np.array_equal(checks_of(words, check), tags.astype(dtype)):
                    return
        raise RefusedError(CHANGED_SUM)

    def _slots(self, clients: Sequence[int]) -> NDArray[np.int64]:
        return np.concatenate([self.table.by_client[client] for client in clients])

    def _common(self, ring: Ring, count: int) -> NDArray[np.unsignedinteger]:
        """Return the pads that all clients add to embeddings and counts, to hide the holders."""
        pad = self.table.group_pad(self.pads, self.sum_round, self.layout.relayed.stop)
        return (pad * np.uint64(count)).astype(ring.dtype)

    def _encode(self, values: Tensor) -> Tensor:
        if self.ring is None:
            return values.detach().double().cpu()
        words = self.ring.encode(values.detach().cpu().numpy())
        return torch.from_numpy(words.view(f"<i{self.ring.word // 8}").astype(np.int64))

    def _unfit(self, group: EgoGroup, h: Tensor, metrics: NDArray[np.float64]) -> dict[int, str]:
        limit = self.ring.limit if self.ring else float(np.finfo(np.float32).max)
        clients = group.graph.clients
        worst = {
            "an embedding": largest_of(h, group.graph.owner, len(clients)),
            "a measurement": largest_of(torch.from_numpy(metrics), None, len(clients)),
        }
        if self.layout.weights:
            worst["a weight"] = group.largest()
        left_out = {}
        for what, values in worst.items():
            for client, value in zip(clients, values.tolist(), strict=True):
                if not value <= limit:
                    left_out[client] = f"{what} is outside the range of -{limit:g} to {limit:g}"
                    # For the client's own log: the server does not learn how large.
                    LOG.warning("client %d: %s: %.3g", client, left_out[client], value)
        return left_out

    def _padded(
        self, words: NDArray[np.uint64], slots: NDArray[np.int64], present: list[int]
    ) -> NDArray[np.uint64]:
        """Add the pads that hide the sums from the server, holders' and common, and the checks."""
        layout, table, what, result = self.layout, self.table, self.pads, words.copy()
        count = np.bincount(slots, minlength=layout.slots)[table.held]
        spread = result[layout.embeddings].reshape(layout.slots, layout.hidden)
        pads = table.pads(what, self.sum_round, layout.hidden)
        spread[table.held] += pads * count[:, None].astype(np.uint64)
        relayed = result[layout.relayed]
        if layout.checks:
            check = table.check(what, self.sum_round, relayed.size)
            tags = checks_of(relayed, check) + table.check_pads(what, self.sum_round, present)
            result[layout.tags] = tags
        relayed += table.group_pad(what, self.sum_round, relayed.size) * np.uint64(len(present))
        return result


def _shortened(h: Tensor, limit: float) -> Tensor:
    """Shorten embeddings with a number beyond the limit until it is there, in their direction."""
    # The direction is what the contrast compares (cosines, equation 9), whereas ``L_nc`` has
    # embeddings grow as long as clients train. Those with NaN or infinity stay without a number.
    largest = h.abs().amax(1, keepdim=True)
    # The product may be rounded up, hence the second bound.
    return torch.where(largest > limit, (h * (limit / largest)).clamp(-limit, limit), h)


def measure(
    accuracy: Tensor, loss: Tensor, contrast: Tensor | None, tau: float
) -> NDArray[np.float64]:
    """Return the measurements of ``METRIC_NAMES``, ``[c, 9]``; zeros without such nodes."""
    # accuracy [c, 3], loss, contrast [c]
    shares = torch.stack([accuracy.nan_to_num(0.0), (~accuracy.isnan()).to(accuracy)], 2)
    # A client without training nodes has no loss; the loss of one that diverged is NaN.
    loss = torch.where(accuracy[:, 0].isnan(), 0.0, loss)
    contrast = torch.full_like(loss, torch.nan) if contrast is None else contrast
    scaled = contrast.nan_to_num(0.0) / contrast_scale(tau)
    columns = [*shares.flatten(1).T, loss, scaled, ~contrast.isnan()]
    return torch.stack([column.double() for column in columns], 1).numpy()


def add_noise(
    noise: ClientNoise,
    state: RecordDict,
    h: Tensor,
    measured: NDArray[np.float64],
    writing: VectorEncoding,
    clients: Sequence[int],
) -> tuple[Tensor, NDArray[np.float64]]:
    """Clip each client's embeddings, add noise, and remove its measurements."""
    # No mod can add it, since a SuperNode's reply is already the masked sum over its clients. A
    # client's slots, and so the number of nodes that it shares, get no noise.
    # h [n, h], measured [c, 9]
    if writing.layout.weights:
        raise RefusedError("the weights that are asked for would have no noise")
    shown = np.zeros_like(measured) if noise.withholds else measured
    if not writing.layout.slots:  # after the last round
        return torch.zeros_like(h), shown
    noise.count(state)
    local, start = h.detach().cpu().numpy(), 0
    result = np.zeros_like(local)
    for client in clients:
        slots = writing.table.by_client[client]
        place = start + np.flatnonzero(slots >= 0)
        start += slots.size
        if not np.isfinite(local[place]).all():
            result[place] = np.nan  # cannot be clipped: this client alone is left out, and told
        elif place.size:
            result[place] = noise.protect(local[None, place])[0]
    return torch.from_numpy(result).to(h.device), shown


# Baselines ----------------------------------------------------------------------------------------


def shared_by(settings: EgoSettings, *, averages: bool) -> SharedModule:
    """Return the model of both halves of a baseline."""
    return SharedModule(partial(first_model, settings), settings.seed, () if averages else ("*",))


class EgoModelClient(ModuleClient):
    """The ego-networks of one SuperNode, which train the server's model or each its own.

    Parameters
    ----------
    context, egos, settings, **more
        As of ``EgoNetworkClient``, and ``device``, ``checkpoint_dir``, ``outputs``.
    averages : bool
        Whether models are averaged; otherwise none leaves its client.
    """

    first_layers: tuple[str, ...] = (FIRST,)
    shared_by = staticmethod(shared_by)

    # Any: arguments of ``ModuleClient``
    def __init__(
        self,
        context: Context,
        egos: Sequence[ClientGraph],
        settings: EgoSettings,
        *,
        averages: bool = True,
        **more: Any,
    ) -> None:
        shared = self.shared_by(settings, averages=averages)
        super().__init__(context, checked(egos, settings), shared, settings.training, **more)
        self._ego = settings

    def examples(self, graph: ClientGraph) -> int:
        return 1

    def _train(self, learner: Learner, server_round: int, proximal: float) -> None:
        EgoGroup(learner, self._ego, self.received, proximal).train(server_round)
