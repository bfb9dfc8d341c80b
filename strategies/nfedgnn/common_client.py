"""The users of one SuperNode, if all users share one first layer.

A message brings the sum for the last step; a SuperNode that has missed a step first gets a copy of
the layer. The same sum is applied only once, however often it comes.

In the masked form the server can see neither layer nor sums. The sum of the users' gradients leaves
the SuperNode under masks, which cancel in the sum over all SuperNodes, and under pads, which only
the common key takes off (``secure.common_key``). First weights and dropout come from the same key,
so the server cannot follow the layer by itself.

A SuperNode that does not trust the server sums only with SuperNodes that have keys of their own,
and takes the common key only from them. It never steps with a changed sum: from its addition
the server would know how the layer moved, and so, by the next latent vectors, each user's features.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from flower_graph.client.state import Makers, Tensors
from flower_graph.errors import RefusedError, StateLostError
from flower_graph.ops.active_rows import pack
from flower_graph.outputs.files import SavedModels
from flower_graph.secure.client import MaskingClient
from flower_graph.secure.common_key import CommonKey, KeyPacket, ShareKeyRequest
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.sum.messages import RING, MaskRequest
from flower_graph.strategies.nfedgnn.cohort_client import UsersClient
from flower_graph.strategies.nfedgnn.messages import (
    Advance,
    CommonEnrolment,
    CopyReply,
    CopyRequest,
    EnrolmentReply,
    EnrolmentRequest,
    GradientRequest,
    LatentReply,
    LatentRequest,
    MaskedEnrolment,
    SumReply,
)
from flower_graph.strategies.nfedgnn.users import (
    CommonLayer,
    Layer,
    LinearLayer,
    ModuleLayer,
    UserSettings,
    bounded,
    common_model,
)
from flower_graph.wire.arrays import Answer, Config, Parameters
from flower_graph.wire.keys import SUM_STATE

GRADIENTS = "sum of gradients"  # the purpose of the sums
STEPS = b"steps of the layer"  # in the journal
WORD, LEAST_FRACTION_BITS = 64, 40  # with fewer, Adam makes of the rounding what can be seen
# Clients of the sum that stand for a SuperNode's users: two, since there is no sum of one client;
# where SuperNodes have keys of their own these are counted
IN_SUM, AS_PARTY = 2, 1


def detail_of(server_round: int, layer_round: int) -> bytes:
    """Describe a sum: the round of its gradients, and the round of their layer."""
    return struct.pack("<qq", server_round, layer_round)


class CommonLayerClient(UsersClient):
    """The users of one SuperNode, with the layer and the optimiser that all users share.

    Parameters
    ----------
    context, x, users, user_model, **more
        As of ``NodeClient``; ``user_model`` is the same for all users.
    """

    actions: tuple[str, ...] = ("finish", "add_up", "copy_layer")
    state_name, copies = "common-layer", True
    _common_key: CommonKey | None = None  # seals the layer, in the masked form

    def _restore(self, question: EnrolmentRequest, makers: Makers[CommonLayer]) -> None:
        # All users share the layer, so it fits after users came or went.
        before = question.before
        self._state.restore(question.resume, makers, lambda saved, *_: saved if before else None)

    def _enrolment(self, reply: EnrolmentReply, makers: Makers[CommonLayer]) -> EnrolmentReply:
        layer_round = self._state.look(makers).round if reply.handled else 0
        return CommonEnrolment(**vars(reply), layer_round=layer_round)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = LatentRequest.from_numpy(parameters, config)
        self._remember(request.settings)
        makers = self._makers(request.settings)
        with self._state.opened(makers) as layer:
            layer.settings = self._seeded(request.settings)
            self._advance(layer, request.advance)
            reply = LatentReply(request.server_round, layer.round)
            if request.trains:
                users = self._unless_all(self._places(request.users))
                reply.latent = layer.forward(users, request.server_round).cpu().numpy()
            if request.measured.size:
                users = self._unless_all(self._places(request.measured))
                reply.measured = layer.forward(users).cpu().numpy()
        if request.checkpoint:
            saved = request.server_round - 1, request.run
            reply.not_saved = self._state.save(*saved, makers)
        return reply.to_numpy(request.users.size)

    def add_up(self, parameters: Parameters, config: Config) -> Answer:
        request = GradientRequest.from_numpy(parameters, config)
        layer = self._state.look(self._makers(request.settings))
        layer.settings = self._seeded(request.settings)
        if layer.round != request.layer_round:
            text = f"the layer is of round {layer.round}, the gradients of {request.layer_round}"
            raise StateLostError(text)
        gradient, place = torch.from_numpy(request.gradient), self._places(request.users)
        total = layer.gradient(place, gradient, request.server_round)
        return self._summed(request, total.cpu().numpy(), config)

    def copy_layer(self, parameters: Parameters, config: Config) -> Answer:
        layer = self._state.look(self._makers(CopyRequest.from_config(config).settings))
        data = save({name: t.cpu().contiguous() for name, t in layer.tensors.items()})
        data = data if self._common_key is None else self._common_key.seal(data)
        return CopyReply(layer.round, np.frombuffer(data, np.uint8).reshape(-1, 4)).to_numpy()

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._forget()
        return [], self.users.numel(), {}

    def _halves(self, settings: UserSettings) -> SavedModels:
        layer = self._state.look(self._makers(settings))
        return common_model(self.users.tolist(), layer.weight, settings.bias)

    def _advance(self, layer: CommonLayer, advance: Advance) -> None:
        if layer.round == advance.layer_round:
            return
        if layer.round != advance.before and advance.copy is not None:
            sealed, key = advance.copy.tobytes(), self._common_key
            copy = load(sealed if key is None else key.open(sealed))
            for name, tensor in layer.tensors.items():
                if name not in copy or copy[name].shape != tensor.shape:
                    raise ValueError(f"the copy of the layer does not fit: {name}")
                tensor.copy_(copy[name])
        if layer.round == advance.before and (total := self._total(advance)) is not None:
            layer.step(total, advance.layer_round, advance.learning_rate)
        if layer.round != advance.layer_round:
            text = f"the layer is of round {layer.round}, the others' of {advance.layer_round}"
            raise StateLostError(text)

    # What is otherwise where the server is to read no sum and no weight

    def _seeded(self, settings: UserSettings) -> UserSettings:
        # Without a key a layer is never begun: a SuperNode that is asked has a key, or is sent one.
        key = self._common_key
        if key is None or not key.check.any():
            return settings
        return settings._replace(seed=key.seed())

    def _total(self, advance: Advance) -> Tensor | None:
        return torch.from_numpy(advance.total) if advance.total is not None else None

    def _summed(
        self, request: GradientRequest, total: NDArray[np.float64], config: Config
    ) -> Answer:
        answer = SumReply(request.server_round, total.astype(np.float32))
        return answer.to_numpy(request.users.size)

    def _makers(self, settings: UserSettings) -> Makers[CommonLayer]:
        settings = self._seeded(settings)

        def make() -> Layer:
            if self._model is not None:
                return ModuleLayer(self._x.to(self._device), self.users, self._model)
            rows = pack(self._x, bias=settings.bias).to(self._device)
            return LinearLayer(rows, self.users, settings)

        layer = self._state.store.once(make)

        def build(tensors: Tensors) -> tuple[CommonLayer, Tensors]:
            placed = {name: t.to(self._device) for name, t in tensors.items()}
            return CommonLayer(layer, settings, placed), placed

        return Makers(lambda: CommonLayer.start(layer, settings), build)


class MaskedLayerClient(CommonLayerClient, MaskingClient):
    """A ``CommonLayerClient`` whose server can see neither the layer nor the sums.

    Parameters
    ----------
    context, x, users, **more
        As of ``CommonLayerClient``.
    trust : TrustSettings, optional
        The SuperNode's key and the parties that it trusts, if it does not trust the server.
    """

    actions = (*CommonLayerClient.actions, *MaskingClient.actions, "share_key")

    # Any: arguments are those of its parent
    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        trust: TrustSettings | None = None,
        **more: Any,
    ) -> None:
        super().__init__(context, x, users, **more)
        count = IN_SUM if trust is None else AS_PARTY
        MaskingClient.__init__(self, context, self.users[:count].tolist(), trust)
        self._key = self._common_key = CommonKey(context, trust)
        self._checks = 0 if trust is None else CHECKS

    def share_key(self, parameters: Parameters, config: Config) -> Answer:
        request = ShareKeyRequest.from_config(config)
        self._key.public  # noqa: B018  # its pair is there from then on
        return [], self.users.numel(), self._key.share(request).to_config()

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._key.drop()
        self.context.state.pop(SUM_STATE, None)
        return super().finish(parameters, config)

    def _enrolment(self, reply: EnrolmentReply, makers: Makers[CommonLayer]) -> EnrolmentReply:
        common, key = super()._enrolment(reply, makers), self._key
        return MaskedEnrolment(
            **vars(common), public=key.public, key_check=key.check, signed_by=key.signed_by
        )

    def _total(self, advance: Advance) -> Tensor | None:
        if advance.total is not None:
            raise RefusedError("a sum came that the server can read: nobody here takes part")
        if (hidden := advance.hidden) is None:
            return None
        # Which sum it is follows from the step that it is for.
        of = hidden.sum_run, hidden.sum_round, detail_of(advance.layer_round, advance.before)
        trial: AbstractContextManager[None] = nullcontext()
        if (trust := self.trust) is not None:
            trial = Journal(trust.journal).one_trial(advance.layer_round, STEPS, trust.run)
        with trial:
            pad = self._key.pad(*of, hidden.ring, hidden.words.size - self._checks)
            total = pad.taken(hidden.ring, hidden.words, hidden.contributors)
        # At most as long as honest SuperNodes can make it: a liar cannot make it longer.
        return torch.from_numpy(bounded(total, hidden.contributors * hidden.ring.limit))

    def _summed(
        self, request: GradientRequest, total: NDArray[np.float64], config: Config
    ) -> Answer:
        if "mask-run" not in config:
            raise RefusedError("a sum of gradients is asked for without masks: nothing is sent")
        mask, ring = MaskRequest.from_config(config), RING.from_config(config)
        if ring.word != WORD or ring.fraction_bits < LEAST_FRACTION_BITS:
            form = f"words of {ring.word} bits with {ring.fraction_bits} of a fraction"
            raise RefusedError(f"{form}: {WORD} with at least {LEAST_FRACTION_BITS} are needed")
        # A SuperNode that refused a sum that is too long would tell of its users' features.
        total = bounded(total, ring.limit)
        first, *others = self.clients
        numbers = np.concatenate([total.ravel(), np.zeros(self._checks)])
        vectors = {first: numbers, **{other: np.zeros(numbers.size) for other in others}}
        detail = detail_of(request.server_round, request.layer_round)
        pad = self._key.pad(mask.run_id, mask.server_round, detail, ring, total.size)
        words = pad.added(ring, total.ravel())
        # Under pads two sums tell the server nothing: each is of a state of its own.
        state = [np.array([request.server_round, request.layer_round]), np.frombuffer(mask.run_id)]
        reply, entries = self.masked(config, vectors, GRADIENTS, detail, state, words)
        return [reply.total], request.users.size, entries

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Take the last step, then answer with latent vectors; refuse without the common key."""
        if config.get("key-packet") is not None:
            self._key.take(KeyPacket.from_config(config))
        elif not self._key.check.any():
            raise StateLostError("the common key is not here")
        return super().fit(parameters, config)
