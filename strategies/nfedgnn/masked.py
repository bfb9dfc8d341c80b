"""nFedGNN with one first layer that the server cannot see, and sums that it cannot read.

Differences from ``summed.py``:

- Before the first round one SuperNode draws a common key and seals it for the others; the server
  carries the packets. First weights and dropout come from that key.
- The sum of gradients is a secure sum, ``SecureSum``, of 64-bit words with 40 fraction bits, under
  pads from the same key. The server adds up, takes the masks off, and sends the sum on, still under
  the pads.
- A copy of the layer travels under the same key.

Every SuperNode of a sum must stay until the sum is opened; otherwise nobody steps.

With a registry the SuperNodes have keys of their own, and do not trust the server. The sums are
then ``PartySums``, public keys for the common key are signed, and each sum ends in checks by which
clients know that it was not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from flower_graph.errors import MalformedReplyError, RefusedError
from flower_graph.secure.common_key import (
    NO_KEY,
    SIGNED_BY,
    KeyPacket,
    ShareKeyReply,
    ShareKeyRequest,
    check_signed,
)
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.sum.messages import MaskRequest
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import SumServer
from flower_graph.secure.sum.service import SecureSum
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.common_messages import (
    CommonEnrolment,
    GradientRequest,
    HiddenSum,
    MaskedEnrolment,
)
from flower_graph.strategies.nfedgnn.common_state import (
    CommonBook,
    CommonMembership,
    NoSum,
    Void,
)
from flower_graph.strategies.nfedgnn.masked_client import (
    AS_PARTY,
    GRADIENTS,
    IN_SUM,
    LEAST_FRACTION_BITS,
    detail_of,
)
from flower_graph.strategies.nfedgnn.messages import EnrolmentReply
from flower_graph.strategies.nfedgnn.summed import SummedGradientRelay
from flower_graph.wire.fields import Bytes
from flower_graph.wire.keys import CONFIG
from flower_graph.wire.ledger import reply_bytes, setup_bytes
from flower_graph.wire.numpy_client import Config


def _shared(count: int, node: int, content: RecordDict) -> ShareKeyReply:
    return ShareKeyReply.read(content, k=count)


class MaskedMembership(CommonMembership):
    """The users of each SuperNode, and which SuperNodes have the common key."""

    def __init__(self, state: CommonBook, check: Callable[[MaskedEnrolment], None]) -> None:
        super().__init__(state)
        self._check = check
        self.public: dict[int, Bytes] = {}  # key of each SuperNode
        self.signed_by: dict[int, Bytes | None] = {}
        self.checks: dict[int, bytes] = {}  # hash of the common key that it has

    def read(self, node: int, content: RecordDict) -> CommonEnrolment:
        answer = MaskedEnrolment.read(content, num_nodes=self.state.roster.size)
        self._check(answer)
        return answer

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        super().enrolled(node, answer)
        assert isinstance(answer, MaskedEnrolment)
        self.public[node], self.checks[node] = answer.public, answer.key_check.tobytes()
        self.signed_by[node] = answer.signed_by


class MaskedGradientRelay(SummedGradientRelay):
    """Server of nFedGNN with one first layer, for clients that are ``MaskedLayerClient``.

    Parameters
    ----------
    *data, **more
        As of ``SummedGradientRelay``.
    registry : Path or str, optional
        File of the SuperNodes' registered keys, for clients that do not trust the server.
    """

    def __init__(
        self,
        *data: Any,  # Any: arguments are those of its parent
        registry: Path | str | None = None,
        **more: Any,
    ) -> None:
        # Under pads two sums tell the server nothing, however few SuperNodes they differ by.
        self._parties = None if registry is None else PartySums(registry, differ_by=1)
        super().__init__(*data, **more)

    def membership(self) -> CommonMembership:
        return MaskedMembership(self.users, self._check)

    def _check(self, answer: MaskedEnrolment) -> None:
        """Refuse a SuperNode whose public key no other SuperNode would take."""
        if self._parties is not None:
            run = str(self.session.exchange.grid.run.run_id).encode()
            try:
                check_signed(self._parties.registry, run, answer.public, answer.signed_by)
            except RefusedError as error:
                raise MalformedReplyError(str(error)) from error

    @cached_property
    def sums(self) -> SecureSum:
        return SecureSum(
            self.session.exchange,
            limit=self.limit,
            resolution=2.0**-LEAST_FRACTION_BITS,
            server=self._parties or SumServer(dropout=0.0),
            timeout=self.session.timeout,
            guard=True,
        )

    def load_state(self, state: StateDict) -> None:
        """Go on from what ``state`` returned; keys of sums are made anew."""
        super().load_state(state)
        if self._parties is None:
            self.__dict__.pop("sums", None)

    def beside(self, server_round: int, nodes: Sequence[int]) -> dict[int, Config]:
        members = self.session.members
        assert isinstance(members, MaskedMembership)
        hosted = list(self.session.hosted())
        holders = [node for node in hosted if members.checks[node] != NO_KEY]
        check = members.checks[holders[0]] if holders else NO_KEY
        has_key = {node: bool(holders) and members.checks[node] == check for node in nodes}
        lacking = [node for node in nodes if not has_key[node]]
        if not lacking:
            return {}
        for donor in [node for node in holders if members.checks[node] == check] or hosted:
            others = [node for node in lacking if node != donor]
            public = np.array([members.public[node] for node in others], np.uint8).reshape(-1, 32)
            replies = self.session.send(
                {donor: ShareKeyRequest(public, not holders, self._signed(others)).to_record()},
                server_round,
                partial(_shared, len(others)),
                message_type="train.share_key",
                max_reply_bytes=setup_bytes(),
            )
            for reply in replies.values.values():
                members.checks |= dict.fromkeys([donor, *others], reply.key_check.tobytes())
                sender = members.public[donor], members.signed_by[donor]
                return {
                    node: KeyPacket(packet, *sender).to_config()
                    for node, packet in zip(others, reply.packets, strict=True)
                }
        return {}

    def _signed(self, nodes: Sequence[int]) -> Bytes | None:
        members = self.session.members
        assert isinstance(members, MaskedMembership)
        if self._parties is None:
            return None
        rows = [members.signed_by[node] for node in nodes]
        return np.array(rows, np.uint8).reshape(-1, SIGNED_BY)

    def add(self, server_round: int, requests: Mapping[int, GradientRequest]) -> HiddenSum | NoSum:
        """Have the sums added up under masks; return the padded sum, or why there is none."""
        session, sums = self.session, self.sums
        clients = session.members.clients
        count, checks = (IN_SUM, 0) if self._parties is None else (AS_PARTY, CHECKS)
        asked = {node: clients[node][:count] for node in requests}
        every = {one for local in asked.values() for one in local}
        if set(sums.clients) != every:
            sums.give_up()
        sums.prepare(server_round, asked)
        length = int(np.prod(self.users.weight_shape)) + checks
        ring = sums.ring
        entries = sums.requests(
            length, GRADIENTS, detail_of(server_round, self.users.last), padded=True
        )
        contents = {node: requests[node].to_record() for node in entries}
        for node, content in contents.items():
            content[CONFIG] = ConfigRecord({**content.config_records[CONFIG], **entries[node]})
        replies = session.send(
            contents,
            server_round,
            sums.take,
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(length, IN_SUM),
        )
        missing = [node for node in contents if node not in replies.values]
        for node in replies.values:
            self.users.added_up(requests[node].users, 8 * length)
        result = sums.close_padded(server_round)
        rejected = sums.take_rejected()
        session.rejected += rejected
        if missing:
            return NoSum.unanswered(missing)
        if isinstance(result, Skipped):
            silent = tuple({one.node_id for one in rejected} & requests.keys())
            return NoSum(Void.SKIPPED, str(result.reason), silent)
        if lost := every.difference(result.contributors.tolist()):
            text = f"{len(lost)} of {len(every)} parties were left out"
            nodes = (node for node, local in asked.items() if not lost.isdisjoint(local))
            return NoSum(Void.LEFT_OUT, text, tuple(nodes))
        mask = MaskRequest.from_config(next(iter(entries.values())))
        return HiddenSum(
            result.contributors.size, mask.run_id, mask.server_round, ring, result.total
        )
