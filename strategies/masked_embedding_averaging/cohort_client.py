"""The ego-network clients that one SuperNode hosts: models, secrets, one round's work."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from flwr.client import NumPyClient
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.client.cohort_state import CohortState, Makers
from flower_graph.client.state import IN_PROCESS, Tensors
from flower_graph.config.rules import choice
from flower_graph.data.checked import check_clients
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.device import resolve_device
from flower_graph.engine.graph_batch import check_sizes, evaluate
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.errors import StateLostError, UnreadableSumError
from flower_graph.messages.fields import Resume
from flower_graph.messages.keys import (
    ALIGN_STAGE,
    ARRAY_NAMES,
    HANDLED,
    NOT_SAVED,
    RUN_TOKEN,
    SERVER_ROUND,
    SUMS,
    TOTAL,
)
from flower_graph.privacy.local import ClientNoise
from flower_graph.secure.align.blinded import UnionRequest
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext import PlaintextAlignmentClient
from flower_graph.secure.align.polynomial import PolynomialAlignmentClient
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import KeyReply, MaskRequest
from flower_graph.strategies.masked_embedding_averaging.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
)
from flower_graph.strategies.masked_embedding_averaging.config import ALIGNMENTS
from flower_graph.strategies.masked_embedding_averaging.messages import (
    NO_SLOTS,
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    read_settings,
)
from flower_graph.strategies.masked_embedding_averaging.vector import (
    VectorEncoding,
    add_noise,
    add_up,
    measure,
    put_masks,
    read_shared,
)

LOG = logging.getLogger(__name__)

# Per client: the last round that it trained for, and whose means it took in. A message that comes
# twice, or a run that goes on from a checkpoint, does neither a second time.
TRAINED, FUSED = "trained-round", "fused-round"
Opened = tuple[EgoCohort, Tensors]
Answer = tuple[list[Any], int, dict[str, Any]]
Identities = Mapping[int, Sequence[object]]
Aligner = AlignmentClient | PolynomialAlignmentClient | PlaintextAlignmentClient
OPEN_ALIGNERS: dict[str, type[PolynomialAlignmentClient] | type[PlaintextAlignmentClient]] = {
    "polynomial": PolynomialAlignmentClient,
    "plain": PlaintextAlignmentClient,
    NO_SLOTS: PlaintextAlignmentClient,  # idle
}
Kept = tuple[str, SumClient, Aligner]  # the form of alignment first
NAME = "ego-secrets"  # in Context.state
_LIVE: dict[tuple[int, int], tuple[str, Kept]] = {}  # with their tokens, by run and SuperNode


class EgoSecrets:
    """Keys, shares and slots, from message to message: the clients' part of sums and alignment."""

    # They are objects, not tensors, and small: ``Context.state`` holds them as bytes, and goes
    # wherever Flower takes the next message. In a process that has just handled a message the
    # objects themselves are still there; a token says whether they are the ones that the context
    # means. With the in-process engine (``state-dir = ":memory:"``) nothing is written, as the
    # process is the only one.

    def __init__(self, context: Context, identities: Identities) -> None:
        self._context, self._identities = context, identities
        self._key = (context.run_id, context.node_id)
        self._in_process = context.node_config.get("state-dir", "") == IN_PROCESS

    def begin(self, run_id: bytes, form: str) -> KeyReply:
        """Make the keys of a run, or show those that it has: its SuperNode may be back."""
        # What was kept of another run is of no more use.
        with suppress(StateLostError):
            known, host, _ = self.load()
            if host.run_id == run_id and known == form:
                return host.keys()
        host = SumClient(run_id, list(self._identities))
        self.keep(form, host, _aligner(form, run_id, self._identities))
        return host.keys()

    def load(self) -> Kept:
        """Return the form of alignment and both objects; ``StateLostError`` without them."""
        record = self._context.state.config_records.get(NAME)
        if record is None:
            raise StateLostError(f"client {self._key[1]}: its keys of this run are not here")
        token, live = _LIVE.get(self._key, ("", None))
        if live is not None and token == record["token"]:
            return live
        if self._in_process:
            raise StateLostError(f"client {self._key[1]}: its keys went with another process")
        data = record["data"]
        assert isinstance(data, bytes)
        return self._read(data)

    def keep(self, form: str, host: SumClient, aligner: Aligner) -> None:
        """Keep them for the next message."""
        record = ConfigRecord({"token": secrets.token_hex(8)})
        if not self._in_process:
            keys = host.to_bytes()
            size = str(len(keys)).encode()
            record["data"] = b"|".join([form.encode(), size, keys + aligner.to_bytes()])
        self._context.state[NAME] = record
        _LIVE[self._key] = (str(record["token"]), (form, host, aligner))

    @contextmanager
    def opened(self) -> Iterator[tuple[SumClient, Aligner]]:
        """Work with both objects; they are kept when the block ends well."""
        form, host, aligner = self.load()
        yield host, aligner
        self.keep(form, host, aligner)

    def drop(self) -> None:
        """Forget the run."""
        self._context.state.pop(NAME, None)
        _LIVE.pop(self._key, None)

    def _read(self, data: bytes) -> Kept:
        name, size, rest = data.split(b"|", 2)
        form, cut = name.decode(), int(size)
        host, local = SumClient.from_bytes(rest[:cut]), rest[cut:]
        if set(host.clients) != set(self._identities):
            raise StateLostError("the keys that were kept belong to other clients")
        if form == "psi":
            return form, host, AlignmentClient.from_bytes(local, host.run_id, self._identities)
        return form, host, OPEN_ALIGNERS[form].from_bytes(local, self._identities)


class EgoCohortClient(NumPyClient):
    """Keeps the clients of one SuperNode from message to message."""

    # Parameters are those of ``EgoNetworkClient``.

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
    ) -> None:
        if not egos:
            raise ValueError("egos: none is given; a SuperNode hosts at least one")
        numbers = [ego.client for ego in egos]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"egos: client numbers {numbers!s:.60} are not all different")
        check_clients(egos)
        self.egos, self._device = list(egos), resolve_device(device)
        self._state = context.state
        self.secrets = EgoSecrets(context, {ego.client: ego.identities for ego in egos})
        self._kept = CohortState[Opened](context, "ego-client", numbers, checkpoint_dir)

    def restore(self, settings: EgoSettings, resume: Resume) -> None:
        """Go on from the checkpoint of these clients that the server names, if it names one."""
        self._kept.restore(resume, self._makers(settings))

    def handled(self, settings: EgoSettings) -> int:
        """Return how many messages the models have behind them; 0 if they are lost, too."""
        return self._kept.processed(self._makers(settings))

    @contextmanager
    def opened(self, settings: EgoSettings) -> Iterator[ChosenEgos]:
        """Work with all clients' models; what changed counts when the block ends well."""
        with self._kept.opened(self._makers(settings)) as (cohort, _):
            yield cohort.choose([ego.client for ego in self.egos])

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


class EgoNetworkClient(EgoCohortClient):
    """The ego-networks that one SuperNode hosts: in a deployment one, in a simulation many.

    Parameters
    ----------
    context : Context
        The ClientApp's context; weights and secrets live behind it.
    egos : sequence of EgoNetwork
        The clients' graphs, with node identities that mean the same at all clients.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where to save the clients' weights when the server asks for a checkpoint.
    noise : ClientNoise, optional
        What is added to each client's embeddings before masks and pads.
    """

    actions = ("align", "union", "unmask", "save", "finish")

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        *,
        noise: ClientNoise | None = None,
        **more: Any,
    ) -> None:
        super().__init__(context, egos, **more)
        self._noise = noise

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Make keys (step 1); go on from a checkpoint if the server does."""
        hello = EgoEnrolment.from_config(config)
        for ego in self.egos:
            check_sizes(ego, hello.settings.num_features, hello.settings.num_classes)
        self.restore(hello.settings, hello.resume)
        if self._kept.store.version and not self.handled(hello.settings):
            self.secrets.drop()  # clients that begin anew are aligned anew
        reply = self.secrets.begin(hello.run_id, hello.alignment)
        return reply.to_config() | {HANDLED: self.handled(hello.settings)}

    def align(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Answer one stage of the alignment (step 2)."""
        with self.secrets.opened() as (_, aligner):
            return [], 1, aligner.answer(config)

    def union(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Take the key-holders' answers, add the table of tokens to a masked sum (step 2)."""
        union, mask = UnionRequest.from_config(config), MaskRequest.from_config(config)
        with self.secrets.opened() as (host, aligner):
            assert isinstance(aligner, AlignmentClient)
            aligner.finish(union)
            ready = set(aligner.finished)
            present = [client for client in mask.clients.tolist() if client in ready]
            reply = host.mask(mask, present, aligner.sketch(union.cells, present))
        return [reply.total], 1, reply.to_config() | {ARRAY_NAMES: [f"{SUMS}/{TOTAL}"]}

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Fuse, train, embed and send the masked vector (steps 3 to 6)."""
        return self.round(EgoRequest.from_numpy(parameters, config)).to_numpy()

    def unmask(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Reveal shares of the last sum, prepare the next one; either may be left out (step 7)."""
        with self.secrets.opened() as (host, _):
            return [], 1, host.turn(config)

    def save(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Write a checkpoint, in a round that the clients take no part in."""
        number, run = int(config[SERVER_ROUND]), str(config[RUN_TOKEN])
        why = self._save(read_settings(config), number, run)
        return [], 1, {NOT_SAVED: why} if why else {}

    def finish(self, parameters: list[Any], config: dict[str, Any]) -> Answer:
        """Forget the run."""
        self._kept.drop()
        self.secrets.drop()
        return [], 1, {}

    # A round

    def round(self, request: EgoRequest) -> EgoReply:
        """Take in the means of the last round, measure, train, and add up this round's vectors."""
        started = time.perf_counter()
        with self.secrets.opened() as (host, aligner):
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
            writing = VectorEncoding.of(request, aligner.slots, host.run_id)
            if self._noise is not None:
                clients = chosen.batch.clients
                h, measured = add_noise(self._noise, self._state, h, measured, writing, clients)
            measured = np.pad(measured, ((0, 0), (0, 1)), constant_values=float(is_unread))
            total, present, left_out = add_up(chosen, h, measured, writing)
            entries, total = put_masks(host, request, total, present, left_out)
        masked = time.perf_counter()
        seconds = trained - started, masked - trained
        return EgoReply(request.server_round, entries, total, *seconds, not_saved)

    def _start_from(
        self, chosen: ChosenEgos, tensors: Tensors, place: Tensor, request: EgoRequest
    ) -> None:
        """Begin the round with the mean model; once only, should the message come again."""
        # What a checkpoint holds may have begun the round already: with the fusion, after the last
        # round even without the local step.
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


def model_of(parts: Sequence[NDArray[Any]]) -> ModelWeights:
    """Read a whole model from its two arrays."""
    return ModelWeights(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))


def _aligner(form: str, run_id: bytes, identities: Identities) -> Aligner:
    if form == "psi":
        return AlignmentClient(run_id, identities)
    choice(*ALIGNMENTS, NO_SLOTS).check("alignment", form)
    return OPEN_ALIGNERS[form](identities)
