"""The ego-network clients of one SuperNode: models, secrets, one round's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.state import CohortState, Makers, Tensors
from flower_graph.data.checked import check_clients
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.graph_batch import Metrics, check_sizes, evaluate
from flower_graph.engine.machine import resolve_device
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import RefusedError, StateLostError, UnreadableSumError
from flower_graph.flower_compat import NumPyClient
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import Snapshot
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.slots import SlotTable
from flower_graph.secure.client import PartyActions
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.strategies.fedscem.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
)
from flower_graph.strategies.fedscem.ego_secrets import (
    PLAIN,
    EgoSecrets,
    pad_run,
)
from flower_graph.strategies.fedscem.kept import own_models, predictions_of
from flower_graph.strategies.fedscem.messages import (
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    read_settings,
    round_terms,
    write_settings,
)
from flower_graph.strategies.fedscem.parties import (
    add_proved_table,
    add_table,
    answer_party,
    check_request,
)
from flower_graph.strategies.fedscem.vector import (
    VectorEncoding,
    add_noise,
    add_up,
    check_shared,
    measure,
    put_masks,
    read_shared,
)
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import (
    ALIGN_STAGE,
    ARRAY_NAMES,
    HANDLED,
    NOT_SAVED,
    RUN_TOKEN,
    SERVER_ROUND,
    SUMS,
    TOTAL,
)
from flower_graph.wire.numpy_client import Answer, Config, Parameters

LOG = logging.getLogger(__name__)

# For each client: the last round that it trained for, and the last whose means it used. A repeated
# message, or a resumed run, does neither a second time.
TRAINED, FUSED = "trained-round", "fused-round"
FUSIONS = b"fusions"  # in the journal
Opened = tuple[EgoCohort, Tensors]
SETTINGS = "ego-settings"  # in Context.state


class EgoCohortClient(NumPyClient):
    """The models of one SuperNode's clients; parameters as of ``EgoNetworkClient``."""

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
        classes: Sequence[str] | None = None,
        trust: TrustSettings | None = None,
    ) -> None:
        if not egos:
            raise ValueError("egos: none is given; a SuperNode hosts at least one")
        numbers = [ego.client for ego in egos]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"egos: client numbers {numbers!s:.60} are not all different")
        check_clients(egos)
        self.egos, self._device = list(egos), resolve_device(device)
        self._state, self._classes = context.state, classes
        self.outputs, self.trust = ClientOutputs(context, output_dir), trust
        self.secrets = EgoSecrets(context, {ego.client: ego.identities for ego in egos}, trust)
        self._kept = CohortState[Opened](context, "ego-client", numbers, checkpoint_dir)

    def restore(self, settings: EgoSettings, resume: Resume) -> None:
        # Kept, since a later request for a snapshot does not have the models' settings.
        self._state[SETTINGS] = ConfigRecord(write_settings(settings))
        self._kept.restore(resume, self._makers(settings))

    def handled(self, settings: EgoSettings) -> int:
        """Return how many messages the models have handled; 0 if they are lost."""
        return self._kept.processed(self._makers(settings))

    @contextmanager
    def opened(self, settings: EgoSettings) -> Iterator[ChosenEgos]:
        """Work with all clients' models; keep changes only if the block ends without an error."""
        with self._kept.opened(self._makers(settings)) as (cohort, _):
            yield self._everyone(cohort)

    def snapshot(self) -> Snapshot:
        if SETTINGS not in self._state:
            raise StateLostError("what was kept of this run is not here")
        settings = read_settings(dict(self._state.config_records[SETTINGS]))
        cohort, _ = self._kept.look(self._makers(settings))
        return self._taken(self._everyone(cohort))

    def _taken(self, chosen: ChosenEgos) -> Snapshot:
        return Snapshot(predictions_of(self.egos, chosen, self._classes), [own_models(chosen)])

    def _everyone(self, cohort: EgoCohort) -> ChosenEgos:
        return cohort.choose([ego.client for ego in self.egos])

    def _measured(
        self, server_round: int, chosen: ChosenEgos, judged: Metrics, loss: Tensor
    ) -> None:
        nodes = np.diff(chosen.batch.ptr)
        clients, accuracy = chosen.batch.clients, judged.accuracy.numpy()
        self.outputs.measured(
            server_round, clients, loss=loss.numpy(), accuracy=accuracy, nodes=nodes
        )

    def _save(self, settings: EgoSettings, server_round: int, run: str) -> str:
        return self._kept.save(server_round, run, self._makers(settings))

    def _makers(self, settings: EgoSettings) -> Makers[Opened]:
        def start() -> Tensors:
            never = torch.zeros(len(self.egos), dtype=torch.int32)
            counters = {TRAINED: never, FUSED: never.clone()}
            return EgoCohort(self.egos, settings, device=self._device).tensors() | counters

        def build(tensors: Tensors) -> tuple[Opened, Tensors]:
            counters = (TRAINED, FUSED, "step")
            placed = {k: t if k in counters else t.to(self._device) for k, t in tensors.items()}
            return (EgoCohort(self.egos, settings, placed, self._device), placed), placed

        return Makers(start, build)


class EgoNetworkClient(EgoCohortClient, PartyActions):
    """The ego-networks of one SuperNode: one in a deployment, many in a simulation.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps weights and secrets.
    egos : sequence of EgoNetwork
        The clients' graphs, with node identities that mean the same at all clients.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir, output_dir : Path, optional
        Where checkpoints and outputs are saved, if the SuperNode has no folder of its own.
    classes : sequence of str, optional
        Names of the classes, for predictions.
    noise : ClientNoise, optional
        The noise on each client's embeddings, before masks and pads.
    masked : bool
        Whether the run's config masks sums: then no vector is sent without masks.
    alignment : str
        The form of the alignment in the run's config. If it is not plain, the client refuses plain.
    trust : TrustSettings, optional
        The SuperNode's key and the parties that it trusts, if it does not trust the server. It
        then takes part only in masked sums and in the alignment with proofs.
    """

    actions = ("align", "union", "unmask", "save", "finish", *PartyActions.party_actions)

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        noise: ClientNoise | None = None,
        masked: bool = False,
        alignment: str = PLAIN,
        **more: Any,  # arguments of its parent
    ) -> None:
        super().__init__(context, egos, **more)
        self._noise, self._masked, self._alignment = noise, masked, alignment

    def get_properties(self, config: Config) -> Config:
        enrolment = EgoEnrolment.from_config(config)
        if enrolment.alignment == PLAIN != self._alignment:
            raise RefusedError(f"identities are asked for, the run's config has {self._alignment}")
        for ego in self.egos:
            check_sizes(ego, enrolment.settings.num_features, enrolment.settings.num_classes)
        if self._kept.store.is_due(enrolment.resume):
            self.secrets.refuse_going_back()
        self.restore(enrolment.settings, enrolment.resume)
        if self._kept.store.version and not self.handled(enrolment.settings):
            self.secrets.drop()  # clients without their state are aligned again
        reply = self.secrets.begin(enrolment.run_id, enrolment.alignment)
        return reply.to_config() | {HANDLED: self.handled(enrolment.settings)}

    def align(self, parameters: Parameters, config: Config) -> Answer:
        with self.secrets.opened() as (_, aligner):
            return [], 1, aligner.answer(config)

    def union(self, parameters: Parameters, config: Config) -> Answer:
        """Take the key-holders' answers, add the table of tokens to a masked sum (step 2)."""
        with self.secrets.opened() as (host, aligner):
            add = add_table if self.trust is None else add_proved_table
            reply = add(host, aligner, config)
        return [reply.total], 1, reply.to_config() | {ARRAY_NAMES: [f"{SUMS}/{TOTAL}"]}

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Fuse, train, embed and send the masked vector (steps 3 to 6)."""
        return self.round(EgoRequest.from_numpy(parameters, config)).to_numpy()

    def unmask(self, parameters: Parameters, config: Config) -> Answer:
        """Reveal shares of the last sum, and prepare the next sum; both are optional (step 7)."""
        if self.trust is not None:
            return [], 1, self.as_party("sum_unmask", config)
        with self.secrets.opened() as (host, _):
            return [], 1, host.unmask_and_prepare(config)

    def of_party(self, action: str, config: Config, trust: TrustSettings) -> Config:
        with self.secrets.opened() as (host, aligner):
            return answer_party(host, aligner, action, config)

    def save(self, parameters: Parameters, config: Config) -> Answer:
        number, run = int(config[SERVER_ROUND]), str(config[RUN_TOKEN])
        why = self._save(read_settings(config), number, run)
        return [], 1, {NOT_SAVED: why} if why else {}

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._kept.drop()
        self.secrets.drop()
        self._state.pop(SETTINGS, None)
        return [], 1, {}

    # A round

    def round(self, request: EgoRequest) -> EgoReply:
        started = time.perf_counter()
        if self._masked and request.mask is None:
            raise RefusedError("no masks are asked for, and the run's config has masked sums")
        with self.secrets.opened() as (host, aligner):
            if ALIGN_STAGE in request.slots:
                aligner.answer(request.slots)
            order = aligner.order if isinstance(aligner, AlignmentClient) else None
            run, now = pad_run(host), round_terms(request.server_round, request.ring, order)
            if self.trust is not None:
                check_request(request, host, aligner)
            with self._kept.opened(self._makers(request.settings)) as (cohort, tensors):
                chosen = cohort.choose(request.clients.tolist())
                place = torch.tensor(chosen.places)
                if request.model is not None:
                    self._start_from(chosen, tensors, place, request)
                before = round_terms(request.server_round - 1, request.ring, order)
                pads = before.pad_context(run)
                contrast, is_unread = self._fuse(
                    chosen, tensors, place, request, aligner.slots, pads
                )
                due = bool((tensors[TRAINED][place] < request.server_round).any())
                if due and not request.is_last:
                    self._hold(request.server_round - 1, cohort)
                # The step begins with the forward pass that is measured.
                logits = self._train(chosen, tensors, place, request) if due else None
                h = chosen.embed()
                logits = chosen.classify(h) if logits is None else logits
                judged = evaluate(chosen.batch, logits)
                if due or request.is_last:  # otherwise the message was repeated after the step
                    self._note_figures(request, chosen, judged, contrast)
                measured = measure(judged, contrast, request.settings.tau)
            not_saved = ""
            if request.checkpoint:
                not_saved = self._save(request.settings, request.server_round - 1, request.run)
            trained = time.perf_counter()
            writing = VectorEncoding.of(
                request, aligner.slots, now.pad_context(run), checks=self.trust is not None
            )
            if self._noise is not None:
                clients = chosen.batch.clients
                h, measured = add_noise(self._noise, self._state, h, measured, writing, clients)
                logits = None if self._noise.withholds else logits
            measured = np.pad(measured, ((0, 0), (0, 1)), constant_values=float(is_unread))
            total, present, left_out = add_up(chosen, h, measured, writing, logits)
            state = h.detach().cpu().numpy()
            entries, total = put_masks(host, request, total, present, left_out, now, state)
        masked = time.perf_counter()
        seconds = trained - started, masked - trained
        return EgoReply(request.server_round, entries, total, *seconds, not_saved)

    def _hold(self, server_round: int, cohort: EgoCohort) -> None:
        if server_round:
            self.outputs.candidate(server_round, lambda: self._taken(self._everyone(cohort)))

    def _note_figures(
        self, request: EgoRequest, chosen: ChosenEgos, judged: Metrics, contrast: Tensor | None
    ) -> None:
        loss, mu = judged.loss, request.settings.mu
        if contrast is not None:
            loss = loss + mu * contrast.nan_to_num(0.0)
        if request.server_round > 1:
            self._measured(request.server_round - 1, chosen, judged, loss)

    def _start_from(
        self, chosen: ChosenEgos, tensors: Tensors, place: Tensor, request: EgoRequest
    ) -> None:
        """Begin the round with the mean model; a repeated message changes nothing."""
        # The models of a checkpoint may have begun the round already: with the fusion, and after
        # the last round even without the local step.
        assert request.model is not None
        number = request.server_round
        is_new = bool(((tensors[TRAINED] < number) & (tensors[FUSED] < number - 1))[place].any())
        chosen.start_from(model_of(request.model), replace=is_new)

    def _fuse(
        self,
        chosen: ChosenEgos,
        tensors: Tensors,
        place: Tensor,
        request: EgoRequest,
        table: SlotTable,
        pads: bytes,
    ) -> tuple[Tensor | None, bool]:
        """Co-train with the means of the round before (equation 11)."""
        # Returns the result of ``ChosenEgos.fuse``, if it was called, and whether means could not
        # be read.
        before, is_unread, is_shared = request.server_round - 1, False, False
        if before < 1 or bool((tensors[FUSED][place] >= before).all()):
            return None, is_unread
        tensors[FUSED][place] = before
        # If nothing was shared, only the classification loss is left.
        empty = torch.zeros(0, dtype=torch.long, device=self._device)
        shared = Shared(empty, torch.zeros(0, request.settings.hidden, device=self._device))
        if request.sums is not None and request.settings.mu:
            try:
                if self.trust is not None:
                    self._check(request, table, pads, self.trust)
                shared = read_shared(request.sums, chosen, table, request.ring, pads)
                is_shared = table.num_slots > 0
            except (RefusedError, UnreadableSumError) as error:  # for this round only
                # A sum that passed is not counted: a client that also has the common key, and
                # colludes with the server, could ask about slots of other clients.
                is_unread = self.trust is None or isinstance(error, RefusedError)
                LOG.warning(
                    "round %d: the means cannot be read and are not used: %s", before, error
                )
        # With batches all clients count, not only the clients here.
        is_alone = not (is_shared if request.alternates else shared.place.numel())
        if request.variant == "iter" and is_alone:
            if request.alternates:
                chosen.train(before)
            return None, is_unread
        return chosen.fuse(shared, before, classify=request.variant != "iter"), is_unread

    def _check(
        self, request: EgoRequest, table: SlotTable, pads: bytes, trust: TrustSettings
    ) -> None:
        """Refuse sums that a server has changed; every change has the same consequence."""
        assert request.sums is not None and request.ring is not None  # a party is told of a ring
        step, hidden = request.server_round - 1, request.settings.hidden
        with Journal(trust.journal).one_trial(step, FUSIONS, trust.run):
            check_shared(request.sums, table, request.ring, pads, hidden)

    def _train(
        self, chosen: ChosenEgos, tensors: Tensors, place: Tensor, request: EgoRequest
    ) -> Tensor | None:
        if request.is_last:
            return None
        tensors[TRAINED][place] = request.server_round
        # With batches `iter` alternates these steps with the fusion's steps.
        is_without = request.variant == "minus" or request.alternates
        return None if is_without else chosen.train(request.server_round)


def model_of(parts: Sequence[NDArray[np.generic]]) -> ModelWeights:
    """Read a whole model from its two arrays."""
    return ModelWeights(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))
