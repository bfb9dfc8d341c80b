"""The ego-network clients that one SuperNode hosts: models, secrets, one round's work."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.cohort_state import CohortState, Makers, Measurements
from flower_graph.client.state import Tensors
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.graph_batch import check_sizes
from flower_graph.engine.metrics import evaluate
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import (
    OutOfRangeError,
    RefusedError,
    UnreadableSumError,
)
from flower_graph.messages.fields import Resume
from flower_graph.messages.keys import ALIGN_STAGE, RUN_TOKEN, SERVER_ROUND
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.messages import UnionRequest
from flower_graph.secure.sum.messages import (
    KeyReply,
    MaskedReply,
    MaskRequest,
)
from flower_graph.strategies.masked_embedding_averaging.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
)
from flower_graph.strategies.masked_embedding_averaging.messages import (
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    Layout,
    PlainEnrolment,
    read_settings,
)
from flower_graph.strategies.masked_embedding_averaging.secrets import EgoSecrets
from flower_graph.strategies.masked_embedding_averaging.vector import (
    VectorEncoding,
    add_noise,
    add_up,
    measure,
    read_shared,
)

if TYPE_CHECKING:
    from flwr.app import Context

LOG = logging.getLogger(__name__)

# Per client: the last round that it trained for, and whose means it took in. A message that comes
# twice, or a run that goes on from a checkpoint, does neither a second time.
TRAINED, FUSED = "trained-round", "fused-round"
Opened = tuple[EgoCohort, Tensors]


class EgoCohortClient:
    """Keeps the clients of one SuperNode from message to message."""

    # Parameters are those of ``EgoNetworkClient``.

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        device: torch.device,
        checkpoint_dir: Path | None,
        noise: ClientNoise | None = None,
    ) -> None:
        if not egos:
            raise ValueError("egos: none is given; a SuperNode hosts at least one")
        numbers = [ego.client for ego in egos]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"egos: client numbers {numbers!s:.60} are not all different")
        self.egos, self._device = list(egos), device
        self._noise, self._state = noise, context.state
        identities = {ego.client: ego.identities for ego in egos}
        self.secrets = EgoSecrets(context, identities)
        self._kept = CohortState[Opened](context, "ego-client", numbers, checkpoint_dir)

    # Set-up

    def hello(self, message: EgoEnrolment) -> KeyReply:
        """Make keys for a run; go on from a checkpoint if the server does."""
        self._check(message.settings)
        self.restore(message.settings, message.resume)
        if self._kept.store.version and not self.handled(message.settings):
            self.secrets.drop()  # clients that begin anew are aligned anew
        return self.secrets.begin(message.run_id, message.alignment)

    def align(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one stage of the alignment."""
        form, host, aligner = self.secrets.load()
        answer = aligner.answer(config)
        self.secrets.keep(form, host, aligner)
        return answer

    def unite(self, config: Mapping[str, Any]) -> MaskedReply:
        """Take the key-holders' answers and add the clients' tables of tokens to the sum."""
        form, host, aligner = self.secrets.load()
        assert isinstance(aligner, AlignmentClient)
        union, mask = UnionRequest.from_config(config), MaskRequest.from_config(config)
        aligner.finish(union)
        ready = set(aligner.finished)
        present = [client for client in mask.clients.tolist() if client in ready]
        reply = host.mask(mask, present, aligner.sketch(union.cells, present))
        self.secrets.keep(form, host, aligner)
        return reply

    def unmask(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Reveal shares of the last sum, and prepare the next one; either may be left out."""
        form, host, aligner = self.secrets.load()
        answer = host.turn(config)
        self.secrets.keep(form, host, aligner)
        return answer

    # A round

    def round(self, request: EgoRequest) -> EgoReply:
        """Take in the means of the last round, measure, train, and add up this round's vectors."""
        started = time.perf_counter()
        form, host, aligner = self.secrets.load()
        if ALIGN_STAGE in request.slots:
            aligner.answer(request.slots)
        with self._kept.opened(self._makers(request.settings)) as (cohort, tensors):
            chosen = cohort.choose(request.clients.tolist())
            place = torch.tensor(chosen.places)
            if request.model is not None:
                self._start_from(chosen, tensors, place, request)
            contrast, is_unread = self._fuse(
                chosen, tensors, place, request, aligner.slots, host.run_id
            )
            # The step begins with the very forward that is to be judged.
            logits = self._train(chosen, tensors, place, request)
            h = chosen.embed()
            judged = chosen.evaluate(h) if logits is None else evaluate(chosen.batch, logits)
            measured = measure(judged, contrast, request.settings.tau)
        not_saved = ""
        if request.checkpoint:
            not_saved = self._save(request.settings, request.server_round - 1, request.run)
        trained = time.perf_counter()
        writing = self._writing(request, aligner.slots, host.run_id)
        if self._noise is not None:
            h, measured = self._add_noise(chosen, h, measured, writing)
        measured = np.pad(measured, ((0, 0), (0, 1)), constant_values=float(is_unread))
        total, present, left_out = add_up(chosen, h, measured, writing)
        entries, total = _mask(host, request, total, present, left_out)
        self.secrets.keep(form, host, aligner)
        masked = time.perf_counter()
        seconds = trained - started, masked - trained
        return EgoReply(request.server_round, entries, total, *seconds, not_saved)

    def _add_noise(
        self, chosen: ChosenEgos, h: Tensor, measured: NDArray[np.float64], writing: VectorEncoding
    ) -> tuple[Tensor, NDArray[np.float64]]:
        """Protect what the clients share; after the last round that is nothing."""
        assert self._noise is not None
        if writing.layout.weights:
            raise RefusedError("the weights that are asked for would have no noise")
        clients = list(chosen.batch.clients)
        table = writing.table if writing.layout.slots else None
        return add_noise(self._noise, self._state, h, measured, table, clients)

    def save(self, config: Mapping[str, Any]) -> str:
        """Write a checkpoint without taking part in the round; return why not, or nothing."""
        return self._save(read_settings(config), int(config[SERVER_ROUND]), str(config[RUN_TOKEN]))

    def save_if_asked(self, config: Mapping[str, Any], answer: Measurements) -> Measurements:
        """Write a checkpoint, if the server wants one, before measurements are sent."""
        return self._kept.save_if_asked(config, answer, self._makers(read_settings(config)))

    def handled(self, settings: EgoSettings) -> int:
        """Return how many messages the models have behind them; 0 if they are lost, too."""
        return self._kept.processed(self._makers(settings))

    @contextmanager
    def opened(self, settings: EgoSettings) -> Iterator[ChosenEgos]:
        """Work with all clients' models; what changed counts when the block ends well."""
        with self._kept.opened(self._makers(settings)) as (cohort, _):
            yield cohort.choose([ego.client for ego in self.egos])

    def drop(self) -> None:
        """Forget the run."""
        self._kept.drop()
        self.secrets.drop()

    def _start_from(
        self, chosen: ChosenEgos, tensors: Tensors, place: Tensor, request: EgoRequest
    ) -> None:
        """Begin the round with the mean model; once only, should the message come again."""
        # What a checkpoint holds may have begun the round already: with the fusion, after the last
        # round even without the local step.
        assert request.model is not None
        first, rest = (torch.from_numpy(np.ascontiguousarray(part)) for part in request.model)
        number = request.server_round
        is_new = bool(((tensors[TRAINED] < number) & (tensors[FUSED] < number - 1))[place].any())
        chosen.start_from(ModelWeights(first, rest), replace=is_new)

    def _fuse(
        self,
        chosen: ChosenEgos,
        tensors: Tensors,
        place: Tensor,
        request: EgoRequest,
        table: Any,
        run_id: bytes,
    ) -> tuple[Tensor | None, bool]:
        """Co-train with the means of the round before (equation 11)."""
        # Returns what ``ChosenEgos.fuse`` does, if it was called, and whether there were means that
        # cannot be read.
        before, is_unread = request.server_round - 1, False
        if before < 1 or bool((tensors[FUSED][place] >= before).all()):
            return None, is_unread
        tensors[FUSED][place] = before
        # Where nothing was shared, what is left of the loss is the classification's.
        empty = torch.zeros(0, dtype=torch.long, device=self._device)
        shared = Shared(empty, torch.zeros(0, request.settings.hidden, device=self._device))
        if request.sums is not None and request.settings.mu:
            try:
                shared = read_shared(request.sums, chosen, table, request.ring, run_id)
            except UnreadableSumError as error:  # some client's fault, and for this round only
                is_unread = True
                LOG.warning("round %d: the means cannot be read, go on alone: %s", before, error)
        if request.variant == "iter" and not shared.place.numel():
            return None, is_unread
        return chosen.fuse(shared, classify=request.variant != "iter"), is_unread

    def _train(
        self, chosen: ChosenEgos, tensors: Tensors, place: Tensor, request: EgoRequest
    ) -> Tensor | None:
        """Take the round's local step, if there is one; return the logits from before it."""
        due = bool((tensors[TRAINED][place] < request.server_round).any())
        if request.is_last or not due:
            return None
        tensors[TRAINED][place] = request.server_round
        return None if request.variant == "minus" else chosen.train()

    def _writing(self, request: EgoRequest, table: Any, run_id: bytes) -> VectorEncoding:
        slots = 0 if request.is_last else table.num_slots
        weights = 0
        if request.model is not None and not request.is_last:
            weights = sum(part.size for part in request.model)
        layout = Layout(slots, request.settings.hidden, weights)
        sum_round = request.mask.server_round if request.mask else request.server_round
        return VectorEncoding(layout, table, request.ring, run_id, sum_round)

    # What lasts between messages

    def _check(self, settings: EgoSettings) -> None:
        for ego in self.egos:
            check_sizes(ego, settings.num_features, settings.num_classes)

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

    def _save(self, settings: EgoSettings, server_round: int, run: str) -> str:
        return self._kept.save(server_round, run, self._makers(settings))

    def restore(self, settings: EgoSettings, resume: Resume) -> None:
        """Go on from the checkpoint of these clients that the server names, if it names one."""
        self._kept.restore(resume, self._makers(settings))


def _mask(
    host: Any,
    request: EgoRequest,
    total: NDArray[Any],
    present: list[int],
    left_out: dict[int, str],
) -> tuple[dict[str, Any], NDArray[Any]]:
    """Put the sum under masks, if the round has them; return the reply's entries and the sum."""
    if not present:
        raise OutOfRangeError("; ".join(f"client {c}: {why}" for c, why in left_out.items()))
    if request.mask is None:
        return PlainEnrolment(np.array(present, np.int64), left_out).to_config(), total
    reply = host.mask(request.mask, present, total)
    reply.left_out.update(left_out)
    return reply.to_config(), reply.total
