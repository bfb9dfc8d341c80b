"""The ego-network clients of one SuperNode: FedSCem's with their secrets, and the baselines'."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.learner import NODES, SharedModule, saved_rows
from flower_graph.client.module_client import ModuleClient
from flower_graph.client.state import CohortState, Tensors, check_graphs
from flower_graph.config.rules import choice
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Learner, check_sizes
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import OutOfRangeError, RefusedError, StateLostError, UnreadableSumError
from flower_graph.ops.grouped import one_thread
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Snapshot, predictions_from
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext import PlaintextAlignmentClient
from flower_graph.secure.align.slots import SlotTable
from flower_graph.secure.client import MaskingClient
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import KeyReply, MaskRequest
from flower_graph.strategies.fedscem.cohort import (
    FIRST,
    FUSED,
    TRAINED,
    EgoCohort,
    EgoGroup,
    Shared,
    first_model,
)
from flower_graph.strategies.fedscem.config import ALIGNMENTS, EgoSettings
from flower_graph.strategies.fedscem.messages import (
    VERIFIED,
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    Layout,
    VectorEncoding,
    add_noise,
    measure,
    round_terms,
    union_terms,
)
from flower_graph.wire.arrays import Answer, Config, Parameters
from flower_graph.wire.keys import ALIGN_STAGE, ARRAY_NAMES, HANDLED, SUM_STATE, SUMS, TOTAL

LOG = logging.getLogger(__name__)

FUSIONS, TABLE = b"fusions", b"table of tokens"  # in the journal
PLAIN = "plain"  # the form of alignment in which the server learns identities
Aligner = AlignmentClient | PlaintextAlignmentClient
NAME = "ego-alignment"  # in Context.state


class Hiding(NamedTuple):
    """What a run's config hides from the server.

    Attributes
    ----------
    masked : bool
        Whether sums are masked: then a client sends no vector without masks.
    alignment : str
        The form of the alignment. If it is not plain, a client refuses plain.
    noise : ClientNoise, optional
        The noise on each client's embeddings, before masks and pads.
    """

    masked: bool = False
    alignment: str = PLAIN
    noise: ClientNoise | None = None


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

    actions = ("align", "union", "unmask", "save", "finish", *MaskingClient.party_actions)

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
        places = "cohort-client", [ego.client for ego in self.graphs], checkpoint_dir
        self._state = CohortState[EgoCohort](context, *places, self._made)
        super().__init__(context, [ego.client for ego in self.graphs], trust)
        self._identities = {ego.client: ego.identities for ego in egos}

    def get_properties(self, config: Config) -> Config:
        enrolment = EgoEnrolment.from_config(config)
        if enrolment.alignment == PLAIN != (own := self._hiding.alignment):
            raise RefusedError(f"identities are asked for, the run's config has {own}")
        if self._state.is_due(enrolment.resume):
            self._refuse_going_back()
        had_state = bool(self._state.version)
        self._state.restore(enrolment.resume)
        handled = self._state.processed()
        if had_state and not handled:
            self.context.state.pop(NAME, None)  # clients without their state are aligned again
        reply = self._begin(enrolment.run_id, enrolment.alignment)
        return reply.to_config() | {HANDLED: handled}

    def _refuse_going_back(self) -> None:
        """Refuse a checkpoint from before a sum of this run: a round's sums could be compared."""
        with suppress(StateLostError):
            if self.keys().mark:
                raise RefusedError(
                    "this SuperNode has sent vectors in this run: it loads no checkpoint from "
                    "before, as two sums of a round can be compared"
                )

    def _begin(self, run_id: bytes, form: str) -> KeyReply:
        """Make the secrets of a run; keep the existing secrets if the SuperNode is back."""
        if (self.trust is not None) != (form == VERIFIED):
            raise RefusedError(
                f"alignment is {form!r:.40}: with a key of its own a SuperNode takes part in "
                f"{VERIFIED} alone, without one in all but that"
            )
        choice(*ALIGNMENTS, VERIFIED).check("alignment", form)
        aligner: Any = None
        with suppress(StateLostError):  # the secrets of another run are of no more use
            if (host := self.keys()).run_id == run_id:
                aligner = self._aligner(host)
        if aligner is None or isinstance(aligner, PlaintextAlignmentClient) != (form == PLAIN):
            if form == PLAIN:
                aligner = PlaintextAlignmentClient(self._identities)
            else:
                aligner = AlignmentClient(run_id, self._identities, self.trust)
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
                Journal(self.trust.journal).contribute(union.epoch, TABLE, self.trust.run)
            ready = set(aligner.finished)
            present = [client for client in mask.clients.tolist() if client in ready]
            table = aligner.sketch(union.cells, present)
            reply = host.mask(mask, present, table, union_terms(union.epoch), [table])
            self._keep(host)
        return [reply.total], 1, reply.to_config() | {ARRAY_NAMES: [f"{SUMS}/{TOTAL}"]}

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Fuse, train, embed and send the masked vector (steps 3 to 6)."""
        return self.round(EgoRequest.from_numpy(parameters, config)).to_numpy()

    def unmask(self, parameters: Parameters, config: Config) -> Answer:
        """Reveal shares of the last sum, and prepare the next sum; both are optional (step 7)."""
        return self.sum_unmask(parameters, config)

    def _enrolled(self, config: Config) -> SumClient:
        return self.keys()  # only ``query`` makes them, with an alignment

    def save(self, parameters: Parameters, config: Config) -> Answer:
        return [], 1, {**self._state.save_asked(config)}

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._state.drop()
        for name in (NAME, SUM_STATE):
            self.context.state.pop(name, None)
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

    # Any: an ``Aligner`` in the form that the run has, which the caller knows
    def _aligner(self, host: SumClient) -> Any:
        """Return the alignment that is kept; ``StateLostError`` without it."""
        # Any: entries of a record that ``_keep_aligner`` wrote
        record: Any = self.context.state.config_records.get(NAME)
        if record is None:
            who = f"client {self.context.node_id}"
            raise StateLostError(f"{who}: its alignment of this run is not here")
        source, aligner = self._state.live.beside
        if source != self._source(record["state"]):  # to read it takes long
            if record["plain"]:
                aligner = PlaintextAlignmentClient.from_bytes(record["state"], self._identities)
            else:
                of = host.run_id, self._identities, self.trust
                aligner = AlignmentClient.from_bytes(record["state"], *of)
            self._state.live.beside = self._source(record["state"]), aligner
        if isinstance(aligner, AlignmentClient) and (epoch := host.epoch) is not None:
            aligner.begin(epoch.digest, epoch.parties.tolist(), epoch.points)
        return aligner

    def _source(self, state: bytes) -> tuple[object, ...]:
        """Return what an alignment is read from."""
        return state, None if self.trust is None else self.trust.registry.digest

    def _keep_aligner(self, aligner: Aligner) -> None:
        state, is_plain = aligner.to_bytes(), isinstance(aligner, PlaintextAlignmentClient)
        self.context.state[NAME] = ConfigRecord({"plain": is_plain, "state": state})
        self._state.live.beside = self._source(state), aligner

    # Any: as from ``_aligner``
    @contextmanager
    def _aligning(self, host: SumClient) -> Iterator[Any]:
        """Work with the alignment; keep its changes if the block ends without an error."""
        aligner = self._aligner(host)
        self._state.live.beside = None, None
        yield aligner
        self._keep_aligner(aligner)

    # A round

    def round(self, request: EgoRequest) -> EgoReply:
        started = time.perf_counter()
        if self._hiding.masked and request.mask is None:
            raise RefusedError("no masks are asked for, and the run's config has masked sums")
        number, clients, host = request.server_round, request.clients.tolist(), self.keys()
        if ALIGN_STAGE in request.slots:
            with self._aligning(host) as aligner:
                aligner.answer(request.slots)
        aligner = self._aligner(host)
        order = aligner.order if isinstance(aligner, AlignmentClient) else None
        last, now = (round_terms(one, request.ring, order) for one in (number - 1, number))
        if self.trust is not None:
            check_request(request, aligner)
        if request.mask is not None:
            host.receive(request.mask, request.ring)
        table: SlotTable = aligner.slots
        origin = 0 if request.sums is None else request.sums.origin[0]
        layout, pads = Layout(table.num_slots, self.settings.hidden), last.pad_context
        reading = VectorEncoding(layout, table, request.ring, pads(host.sum_run), origin)
        with (
            self._state.opened() as cohort,
            one_thread(len(clients) > 1),
            cohort.part(clients) as group,
        ):
            trained = self._trained(cohort, group, request, reading)
            (logits, measured, is_unread), h = trained, group.embed()
        not_saved = ""
        if request.checkpoint:
            not_saved = self._state.save(number - 1, request.run)
        trained_at = time.perf_counter()
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
        seconds = trained_at - started, time.perf_counter() - trained_at
        if request.mask is None:
            here = np.array(present, np.int64)
            return EgoReply(number, total, *seconds, not_saved, here, left_out)
        state = [np.array(request.is_last), h.cpu().numpy()]
        reply = host.mask(request.mask, present, total, now, state)
        self._keep(host)
        reply.left_out.update(left_out)
        return EgoReply(number, reply.total, *seconds, not_saved, masked=reply.to_config())

    def _trained(
        self, cohort: EgoCohort, group: EgoGroup, request: EgoRequest, reading: VectorEncoding
    ) -> tuple[Tensor, NDArray[np.float64], bool]:
        """Fuse, and train (steps 4 and 5)."""
        # Returns the logits and the measurements of after step 4, and whether the means could not
        # be read.
        number, clients = request.server_round, list(group.graph.clients)
        if request.weights is not None:
            # The models of a checkpoint may have begun the round already: with the fusion, and
            # after the last round even without the local step.
            is_new = cohort.last(TRAINED, clients) < number
            is_new &= cohort.last(FUSED, clients) < number - 1
            weights = torch.from_numpy(request.weights)
            cohort.start_from(group, weights, replace=bool(is_new.any()))
        contrast, is_unread = self._fuse(cohort, group, request, reading)
        due = bool((cohort.last(TRAINED, clients) < number).any())
        logits = None
        if due and not request.is_last:
            if number > 1:
                cohort.write(cohort.group(group.graph.clients))
                self.outputs.candidate(number - 1, lambda: self._taken(cohort))
            cohort.note(TRAINED, clients, number)
            # With batches `iter` alternates these steps with the fusion's steps.
            if request.variant != "minus" and not self._alternates(request):
                # The step begins with the forward pass that is measured.
                logits = group.train(number)
        logits = group.logits() if logits is None else logits
        judged = group.judged(logits)
        loss = NODES.training_loss(judged).cpu()
        accuracy = torch.stack(NODES.shares(judged), 1).cpu()
        if (due or request.is_last) and number > 1:  # else repeated after the step
            both = loss if contrast is None else loss + self.settings.mu * contrast.nan_to_num(0.0)
            nodes = np.diff(group.graph.ptr)
            figures = {"loss": both.numpy(), "accuracy": accuracy.numpy(), "nodes": nodes}
            self.outputs.measured(number - 1, clients, **figures)
        return logits, measure(accuracy, loss, contrast, self.settings.tau), is_unread

    def _fuse(
        self, cohort: EgoCohort, group: EgoGroup, request: EgoRequest, reading: VectorEncoding
    ) -> tuple[Tensor | None, bool]:
        """Co-train with the means of the round before (equation 11)."""
        # Returns the result of ``EgoGroup.fuse``, if it was called, and whether means could not
        # be read.
        before, is_unread, is_shared = request.server_round - 1, False, False
        clients = list(group.graph.clients)
        if before < 1 or bool((cohort.last(FUSED, clients) >= before).all()):
            return None, is_unread
        cohort.note(FUSED, clients, before)
        # If nothing was shared, only the classification loss is left.
        empty = torch.zeros(0, dtype=torch.long, device=self._device)
        shared = Shared(empty, torch.zeros(0, self.settings.hidden, device=self._device))
        if request.sums is not None and self.settings.mu:
            try:
                if self.trust is not None:  # every change has the same consequence
                    with Journal(self.trust.journal).one_trial(before, FUSIONS, self.trust.run):
                        reading.check(request.sums)
                shared = reading.means(request.sums, clients, self._device)
                is_shared = reading.layout.slots > 0
            except (RefusedError, UnreadableSumError) as error:  # for this round only
                # A sum that passed is not counted: a client that also has the common key, and
                # colludes with the server, could ask about slots of other clients.
                is_unread = self.trust is None or isinstance(error, RefusedError)
                LOG.warning(
                    "round %d: the means cannot be read and are not used: %s", before, error
                )
        # All clients count, not only the clients here: who hosts a client changes nothing.
        if request.variant == "iter" and not is_shared:
            if self._alternates(request):
                group.train(before)
            return None, is_unread
        return group.fuse(shared, before, classify=request.variant != "iter"), is_unread

    def _alternates(self, request: EgoRequest) -> bool:
        """Whether batches train both losses in turn, so that there is no local step."""
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
