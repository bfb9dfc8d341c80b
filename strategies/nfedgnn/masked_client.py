"""The users of one SuperNode, if all users have one first layer that the server cannot see.

The sum of the users' gradients leaves the SuperNode under masks, which cancel in the sum over all
SuperNodes, and under pads, which only the common key takes off (``secure.common_key``). First
weights and dropout come from the same key, so the server cannot follow the layer by itself.

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
from torch import Tensor

from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure.client import MaskingClient
from flower_graph.secure.common_key import CommonKey, KeyPacket, ShareKeyRequest
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.journal import Journal
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.sum.messages import RING, MaskRequest
from flower_graph.strategies.nfedgnn.common_client import CommonLayerClient
from flower_graph.strategies.nfedgnn.common_layer import CommonSettings, bounded
from flower_graph.strategies.nfedgnn.common_messages import (
    Advance,
    CommonEnrolment,
    GradientRequest,
    MaskedEnrolment,
)
from flower_graph.wire.keys import SUM_STATE
from flower_graph.wire.numpy_client import Answer, Config, Parameters

GRADIENTS = "sum of gradients"  # the purpose of the sums
STEPS = b"steps of the layer"  # in the journal
WORD, LEAST_FRACTION_BITS = 64, 40  # with fewer, Adam makes of the rounding what can be seen
# Clients of the sum that stand for a SuperNode's users: two, since there is no sum of one client;
# where SuperNodes have keys of their own these are counted
IN_SUM, AS_PARTY = 2, 1


def detail_of(server_round: int, layer_round: int) -> bytes:
    """Describe a sum: the round of its gradients, and the round of their layer."""
    return struct.pack("<qq", server_round, layer_round)


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
        self._key = CommonKey(context, trust)

    def share_key(self, parameters: Parameters, config: Config) -> Answer:
        request = ShareKeyRequest.from_config(config)
        self._key.public  # noqa: B018  # its pair is there from then on
        return [], self.users.numel(), self._key.share(request).to_config()

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._key.drop()
        self.context.state.pop(SUM_STATE, None)
        return super().finish(parameters, config)

    def _enrolment(self, of_layer: CommonEnrolment) -> CommonEnrolment:
        key = self._key
        return MaskedEnrolment(
            **vars(of_layer), public=key.public, key_check=key.check, signed_by=key.signed_by
        )

    def _take_key(self, config: Config) -> None:
        if config.get("key-packet") is not None:
            self._key.take(KeyPacket.from_config(config))

    def _seed(self, settings: CommonSettings) -> int:
        # Without a key a layer is never begun: a SuperNode that is asked has a key, or is sent one.
        return self._key.seed() if self._key.check.any() else settings.seed

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

    @property
    def _checks(self) -> int:
        return 0 if self.trust is None else CHECKS

    def _summed(
        self, request: GradientRequest, total: NDArray[np.float64], config: Config
    ) -> Answer:
        if "mask-run" not in config:
            raise RefusedError("a sum of gradients is asked for without masks: nothing is sent")
        mask, ring = MaskRequest.from_config(config), RING.from_config(config)
        if ring.word != WORD or ring.fraction_bits < LEAST_FRACTION_BITS:
            raise RefusedError(
                f"words of {ring.word} bits with {ring.fraction_bits} of a fraction; sums of "
                f"gradients take {WORD} with at least {LEAST_FRACTION_BITS}"
            )
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

    def _seal(self, data: bytes) -> bytes:
        return self._key.seal(data)

    def _open(self, data: bytes) -> bytes:
        return self._key.open(data)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Take the last step, then answer with latent vectors; refuse without the common key."""
        if not self._key.check.any() and config.get("key-packet") is None:
            raise StateLostError("the common key is not here")
        return super().fit(parameters, config)
