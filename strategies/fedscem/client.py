"""The ego-network clients of one SuperNode: FedSCem's with their secrets, and their messages.

``algorithm.py`` has what a client does in a round, ``vector.py`` the vector that it adds to the
sum. Here is what carries it: messages, the alignment, what a message that comes twice may do.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.learner import NODES, saved_rows
from flower_graph.client.state import CohortState, Tensors, check_graphs
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import check_sizes
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import (
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
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.client import MaskingClient, SumClient
from flower_graph.secure.sum.messages import RING, KeyReply, MaskedReply, MaskRequest, SumTerms
from flower_graph.strategies.fedscem.algorithm import EgoCohort, EgoGroup, Shared, measure
from flower_graph.strategies.fedscem.config import ALIGNMENTS, EgoSettings
from flower_graph.strategies.fedscem.modules import first_model
from flower_graph.strategies.fedscem.vector import (
    Layout,
    Sums,
    VectorEncoding,
    add_noise,
)
from flower_graph.wire import codec, keys
from flower_graph.wire.arrays import Answer, Config, FloatArray, IntArray, Parameters
from flower_graph.wire.codec import Clients, Flag, Message, Part, Resume, Whole, Word
from flower_graph.wire.counts import Counting
from flower_graph.wire.keys import ALIGN_STAGE, SUM_STATE

VERIFIED = "verified"  # blinded identities under a server that may lie
PLAIN_SUM = codec.Tensor(
    f"{keys.SUMS}/{keys.TOTAL}", shape="L", dtype="float64", limit=None, when="is_plain"
)


class EgoEnrolment(Message, down="query"):
    """Server to client: asks for its clients and keys, and names a checkpoint.

    The answer: ``KeyReply``.
    """

    run_id: Annotated[bytes, codec.Raw("sum-run", group="Set-up of the sum")]
    alignment: Annotated[str, Word()]  # `psi`, `verified` or `plain`: what will follow
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)


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
        return Layout(slots, hidden, weights, *about, checked)


class EgoReply(Message, up="train"):
    """Client to server: the sum of its clients' vectors."""

    server_round: Annotated[int, Whole()]  # as asked
    # plain: sum of the clients' vectors, whose parts are embeddings by slot, ones for slots held,
    # nine measurements, whether the last means could not be read, weights, counts if they are asked
    # for (`Layout`). A masked sum has checks, too, where the server may lie
    total: Annotated[NDArray[np.float64] | None, PLAIN_SUM] = None
    not_saved: codec.NotSaved = ""
    # plain: who is in the sum
    clients: Annotated[IntArray, Clients("present", shape="q")] = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )
    # plain: `number:reason` for each that is not in the sum
    left_out: Annotated[dict[int, str], codec.Reasons()] = field(default_factory=dict)
    # the secure sum's reply, with its entries, which travel beside it
    masked: tuple[MaskedReply, Config] | None = None

    def check(self, known: codec.Known) -> None:
        """Refuse clients of a plain sum that are not among those ``asked``."""
        if not known.get("is_plain"):
            return
        if not self.clients.size:
            raise MalformedReplyError("present: there is no client")
        if (strange := np.setdiff1d(self.clients, known["asked"])).size:
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
            terms = union_terms(union.epoch)
            reply, entries = self.mask(host, mask, present, table, terms, [table])
        return [reply.total], 1, entries

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Fuse, train, embed and send the masked vector (steps 3 to 6)."""
        reply = self.round(EgoRequest.from_numpy(parameters, config), config)
        arrays, weight, entries = reply.to_numpy()
        if reply.masked is None:
            return arrays, weight, entries
        masked, beside = reply.masked
        return [masked.total], weight, entries | beside

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
        checked, hidden = self.trust is not None, self.settings.hidden
        layout, pads = Layout(table.num_slots, hidden, is_checked=checked), last.pad_context
        reading = VectorEncoding(layout, table, request.ring, pads(host.sum_run), origin)
        opened = self._state.opened
        with opened() as cohort, one_thread(len(clients) > 1), cohort.part(clients) as group:
            logits, measured, is_unread = self._trained(cohort, group, request, reading)
            h = group.embed()
        not_saved = self._state.save(number - 1, request.run) if request.checkpoint else ""
        sum_round = request.mask.server_round if request.mask else number
        layout = request.vector_layout(self.settings, table.num_slots, checked=checked)
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
        masked = self.mask(host, request.mask, present, total, now, state, left_out)
        return EgoReply(number, None, not_saved, masked=masked)

    def _trained(
        self, cohort: EgoCohort, group: EgoGroup, request: EgoRequest, reading: VectorEncoding
    ) -> tuple[Tensor, NDArray[np.float64], bool]:
        """Fuse, and train (steps 4 and 5), each once however often the message comes."""
        # Returns the logits and the measurements of after step 4, and whether the means could not
        # be read.
        number, clients = request.server_round, list(group.graph.clients)
        before, now = 2 * (number - 1), 2 * number - 1
        fuses, trains = (cohort.is_behind(clients, step) for step in (before, now))
        if request.weights is not None:
            # The models of a checkpoint may have begun the round already: with the fusion, and
            # after the last round even without the local step.
            cohort.start_from(group, torch.from_numpy(request.weights), is_new=fuses)
        contrast, logits, is_unread = None, None, False
        if fuses:
            cohort.note(clients, before)
            shared, is_unread = self._means(request, reading, clients)
            contrast = group.fuse(shared, number - 1, request.variant)
        if trains and not request.is_last:
            if number > 1:
                cohort.write(cohort.group(group.graph.clients))
                self.outputs.candidate(number - 1, lambda: self._taken(cohort))
            cohort.note(clients, now)
            if group.steps_locally(request.variant):
                # The step begins with the forward pass that is measured.
                logits = group.train(number)
        logits = group.logits() if logits is None else logits
        judged = group.graph.judged(logits)
        loss = NODES.training_loss(judged).cpu()
        accuracy = torch.stack(NODES.shares(judged), 1).cpu()
        if (trains or request.is_last) and number > 1:  # else repeated after the step
            both = loss if contrast is None else loss + self.settings.mu * contrast.nan_to_num(0.0)
            figures = {"loss": both.numpy(), "accuracy": accuracy.numpy()}
            self.outputs.measured(number - 1, clients, nodes=np.diff(group.graph.ptr), **figures)
        return logits, measure(accuracy, loss, contrast, self.settings.tau), is_unread

    def _means(
        self, request: EgoRequest, reading: VectorEncoding, clients: Sequence[int]
    ) -> tuple[Shared | None, bool]:
        """Read the means (step 3), and whether they could not be read; None without means."""
        if request.sums is None or not self.settings.mu:
            return None, False
        before = request.server_round - 1
        try:
            with ExitStack() as stack:
                if self.trust is not None:  # every change has the same consequence
                    stack.enter_context(self.trust.journal.one_trial(before, FUSIONS))
                words = reading.opened(request.sums)
            shared = reading.means(words, request.sums.origin[1], clients, self._device)
        except (RefusedError, UnreadableSumError) as error:  # for this round only
            LOG.warning("round %d: the means are not used: %s", before, error)
            # A sum that passed is not counted: a client that also has the common key, and
            # colludes with the server, could ask about slots of other clients.
            return None, self.trust is None or isinstance(error, RefusedError)
        # All clients count, not only the clients here: who hosts a client changes nothing.
        return shared if reading.layout.slots else None, False


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
