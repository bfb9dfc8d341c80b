"""How the messages of sums under a server that may lie travel over Flower: both halves.

A sum takes three exchanges, masked vectors, the signed list and shares; the last also prepares the
next sum. An epoch begins, with three more, when SuperNodes have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, RecordDict

from flower_graph.errors import MalformedReplyError, RefusedError, StateLostError
from flower_graph.messages.arrays import decode_array
from flower_graph.messages.keys import ARRAYS, CONFIG, MASKED_SUM, SUM_STATE
from flower_graph.secure.identity import TrustSettings
from flower_graph.secure.ring import Ring, encode_sum
from flower_graph.secure.sum.messages import (
    RING,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.secure.sum.party import Party
from flower_graph.secure.sum.party_messages import (
    BindReply,
    BindRequest,
    EpochReply,
    EpochRequest,
    ListReply,
    ListRequest,
    Ready,
    RevealReply,
    RevealRequest,
    Signatures,
    SignedKey,
)
from flower_graph.secure.sum.party_server import PartyServer
from flower_graph.secure.sum.round import Skipped, SumResult
from flower_graph.server.ledger import reply_bytes, setup_bytes, sum_bytes

TRIES = 3  # lists of commitments, while parties show no seed
Send = Callable[..., Any]  # as ``Exchange.send``, with what is the same for all sums filled in


class PartySums:
    """The server's half: epochs and rounds of a ``PartyServer`` over an exchange."""

    def __init__(self, server: PartyServer, send: Send, ring_for: Callable[[int], Ring]) -> None:
        self.server, self._send, self._ring_for = server, send, ring_for
        self.number = -1  # of the newest sum
        self._is_ready = False  # whether it was prepared
        self._asked: set[int] = set()  # SuperNodes of this epoch, and those that want no part
        self._left_out: dict[int, str] = {}  # clients, in the newest sum

    def sum(
        self, server_round: int, length: int, config: Mapping[str, Any], nodes: set[int]
    ) -> tuple[Ring, SumResult | Skipped]:
        """Add up; contributors are numbers of clients."""
        self._meet(server_round, nodes)
        ring = self._ring_for(max(1, len(self.server.clients_of(self.server.parties))))
        if self.server.epoch is None:
            few = f"{len(self.server.parties)} parties, a sum needs {self.server.minimum}"
            return ring, Skipped(f"round {server_round} is skipped: {few}")
        if not self._is_ready:
            self._turn(server_round, reveal=False)
        self._mask(server_round, length, ring, config)
        self._list(server_round)
        number = self.number
        self._turn(server_round, reveal=True)
        result = self.server.result(number)
        if isinstance(result, Skipped):
            return ring, result
        parties = self.server.clients_of(result.contributors.tolist())
        clients = [client for client in parties if client not in self._left_out]
        return ring, SumResult(result.total, np.array(clients, np.int64))

    def _meet(self, server_round: int, nodes: set[int]) -> None:
        """Begin an epoch if SuperNodes have joined; those that are gone count as absent."""
        server = self.server
        for node in set(server.homes.values()) - nodes:
            server.forget(node)
        if nodes <= self._asked:
            return
        self._asked, self._is_ready = nodes, False
        for _ in range(TRIES):
            request = BindRequest(server.run_id).to_record()
            self._send(
                dict.fromkeys(sorted(nodes), request),
                server_round,
                lambda node, content: server.take_binding(node, BindReply.read(content)),
                message_type="train.sum_bind",
                max_reply_bytes=setup_bytes(server.registry.most_clients),
            )
            self._exchange(
                server.reveal_requests(),
                server_round,
                lambda node, content: server.take_seed(node, RevealReply.read(content)),
                "train.sum_reveal",
            )
            if requests := server.epoch_requests():
                self._exchange(
                    requests,
                    server_round,
                    lambda node, content: server.take_epoch(node, EpochReply.read(content)),
                    "train.sum_epoch",
                )
                return

    def _mask(self, server_round: int, length: int, ring: Ring, config: Mapping[str, Any]) -> None:
        self._left_out = {}
        masks = self.server.mask_requests(self.number, length, ring.word)
        requests = {
            node: _record(one.to_config(), ready.to_config(), RING.to_config(ring), config)
            for node, (one, ready) in masks.items()
        }

        def read(node: int, content: RecordDict) -> None:
            arrays = content.array_records.get(ARRAYS)
            if arrays is None or MASKED_SUM not in arrays:
                raise MalformedReplyError(f"the array {ARRAYS}/{MASKED_SUM} is missing")
            total = decode_array(MASKED_SUM, arrays[MASKED_SUM])
            reply = MaskedReply.read(content, total=total)
            self.server.take_masked(node, reply)
            hosted = set(self.server.clients_of(reply.clients.tolist()))
            self._left_out |= {c: why for c, why in reply.left_out.items() if c in hosted}

        clients = len(self.server.clients_of(self.server.parties))
        self._send(
            requests,
            server_round,
            read,
            message_type="train.sum_mask",
            max_reply_bytes=reply_bytes(length, clients),
        )

    def _list(self, server_round: int) -> None:
        self._exchange(
            self.server.list_requests(self.number),
            server_round,
            lambda node, content: self.server.take_list(node, ListReply.read(content)),
            "train.sum_list",
        )

    def _turn(self, server_round: int, *, reveal: bool) -> None:
        """Unmask the newest sum and prepare the next, in one exchange."""
        server = self.server
        unmask = server.unmask_requests(self.number) if reveal else {}
        self.number, self._is_ready = self.number + 1, True
        prepare = server.open_round(self.number)
        requests = {
            node: _record(
                *(part.to_config() for part in unmask.get(node, ())),
                prepare[node].to_config() if node in prepare else {},
            )
            for node in sorted(unmask.keys() | prepare.keys())
        }

        def read(node: int, content: RecordDict) -> None:
            if node in unmask:
                server.take_shares(node, UnmaskReply.read(content))
            if node in prepare:
                reply = PrepareReply.read(content)
                server.take_prepared(node, reply, SignedKey.read(content))

        self._send(
            requests,
            server_round,
            read,
            message_type="train.sum_unmask",
            max_reply_bytes=sum_bytes((one for one, _ in unmask.values()), prepare.values()),
        )

    def _exchange(
        self, requests: Mapping[int, Any], server_round: int, read: Any, message_type: str
    ) -> None:
        if requests:
            self._send(
                {node: request.to_record() for node, request in requests.items()},
                server_round,
                read,
                message_type=message_type,
                max_reply_bytes=setup_bytes(),
            )


class PartyHalf:
    """The client's half, for a SuperNode with a key of its own: answers by entries."""

    def __init__(self, context: Context, clients: Sequence[int], trust: TrustSettings) -> None:
        self._context, self._clients, self._trust = context, clients, trust

    def answer(self, action: str, config: dict[str, Any]) -> dict[str, Any]:
        """Answer anything but ``sum_mask``."""
        if action == "sum_bind":
            party = self._own(BindRequest.from_config(config).run_id)
            result = party.bind().to_config()
        elif action == "sum_enroll":
            raise RefusedError(
                "this SuperNode has a key of its own and takes part in no sum whose server is "
                "trusted"
            )
        else:
            party = self._kept()
            result = self._step(party, action, config)
        self._keep(party)
        return result

    def _step(self, party: Party, action: str, config: dict[str, Any]) -> dict[str, Any]:
        if action == "sum_reveal":
            return party.reveal(RevealRequest.from_config(config)).to_config()
        if action == "sum_epoch":
            return party.begin(EpochRequest.from_config(config)).to_config()
        if action == "sum_list":
            return party.sign_list(ListRequest.from_config(config)).to_config()
        answer: dict[str, Any] = {}
        if "unmask-run" in config:
            signed = Signatures.from_config(config)
            answer |= party.unmask(UnmaskRequest.from_config(config), signed).to_config()
        if "prepare-run" in config:
            reply, key = party.prepare(PrepareRequest.from_config(config))
            answer |= reply.to_config() | key.to_config()
        return answer

    def masked(self, config: dict[str, Any], vectors: Mapping[int, Any]) -> MaskedReply:
        """Add up the hosted clients' vectors and mask the sum."""
        party, request = self._kept(), MaskRequest.from_config(config)
        total, left_out = encode_sum(
            RING.from_config(config), vectors, party.clients, request.length
        )
        if len(left_out) == len(party.clients):
            raise ValueError(f"no client can take part: {next(iter(left_out.values()))}")
        reply = party.mask(request, Ready.from_config(config), total)
        reply.left_out = left_out
        self._keep(party)
        return reply

    def _own(self, run_id: bytes) -> Party:
        """Return the party of this run, made anew if it is another run's or clients changed."""
        try:
            known = self._kept()
            if known.run_id == run_id and known.clients == sorted(self._clients):
                return known
        except StateLostError:
            pass
        return Party(run_id, self._clients, self._trust)

    def _kept(self) -> Party:
        record = self._context.state.config_records.get(SUM_STATE)
        state = None if record is None else record.get(SUM_STATE)
        if not isinstance(state, bytes):
            raise StateLostError("there are no keys for the secure sum: bind first")
        return Party.from_bytes(state, self._trust)

    def _keep(self, party: Party) -> None:
        self._context.state[SUM_STATE] = ConfigRecord({SUM_STATE: party.to_bytes()})


def _record(*entries: Mapping[str, Any]) -> RecordDict:
    merged = {key: value for part in entries for key, value in part.items()}
    return RecordDict({CONFIG: ConfigRecord(merged)})
