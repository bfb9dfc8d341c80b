"""The client's side of the secure sum, for all clients that one SuperNode hosts.

Each client has a channel key for the run and, for each round, a seed and a mask key, both shared
among its partners. What it adds to its vector is the stream of its seed, and for each partner *at
another SuperNode* a stream that the two agree on and that one adds and the other takes away. Two
clients of one SuperNode need no mask against each other: only their sum leaves it. For the same
reason their shares do not travel.

Every key is used once. A round is prepared once, masked once and unmasked once; the second time is
refused, as is a round that is not newer than the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from flower_graph.errors import RefusedError, StateLostError, brief
from flower_graph.secure import channel
from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, pieces, rows_of
from flower_graph.secure.ring import WORDS, RingArray, add_streams
from flower_graph.secure.shamir import SECRET_BYTES, SHARE_BYTES, split_secrets
from flower_graph.secure.sum.client_round import (
    ARRAYS,
    CHANGING,
    NUMBERS,
    ClientRound,
    check_terms,
    check_unmask,
)
from flower_graph.secure.sum.messages import (
    KEPT_ROUNDS,
    MASK_KEY,
    NOTHING,
    PACKET_BYTES,
    SEED,
    KeyReply,
    MaskedReply,
    MaskRequest,
    PrepareReply,
    PrepareRequest,
    UnmaskReply,
    UnmaskRequest,
)
from flower_graph.secure.sum.partners import LEAST_CLIENTS
from flower_graph.secure.sum.terms import SumTerms
from flower_graph.wire.fields import Bytes, Integers
from flower_graph.wire.numpy_client import Config


class Received(NamedTuple):
    """What partners sealed for a round, opened."""

    kept: ClientRound
    request: MaskRequest
    rows: Integers  # [p] of the request's clients
    is_present: NDArray[np.bool_]  # [p] who of them is to be in the sum
    held: Bytes  # as ``ClientRound`` has them
    has: NDArray[np.bool_]
    refused: Integers  # [n, 2] own client and partner whose packet does not open


class SumClient:
    """The clients of one SuperNode in a secure sum."""

    def __init__(
        self,
        run_id: bytes,
        clients: Sequence[int],
        own: tuple[bytes, bytes] | None = None,
        least: int = 1,
    ) -> None:
        # own: the private and public channel key of the only client, where it has one
        # least: contributors without whom nothing is revealed, whatever the server asks
        numbers = [int(client) for client in clients]
        if not numbers or len(set(numbers)) != len(numbers):
            raise ValueError(f"clients are {numbers!r:.60}, must be some, each there once")
        pairs = [channel.new_key() for _ in numbers] if own is None else [own]
        self.run_id, self._least = run_id, least
        self._channels = {c: private for c, (private, _) in zip(numbers, pairs, strict=True)}
        self._public = rows_of([public for _, public in pairs], -1, KEY_BYTES)
        self._rounds: dict[int, ClientRound] = {}
        self._last = -1  # the newest round that was prepared
        self._agreed = channel.Agreements()

    @property
    def clients(self) -> list[int]:
        """Numbers of the hosted clients."""
        return list(self._channels)

    def keys(self) -> KeyReply:
        """Return the public channel keys."""
        return KeyReply(self.run_id, np.array(self.clients, np.int64), self._public)

    def prepare(self, request: PrepareRequest) -> PrepareReply:
        """Make the keys, shares and commitments of a round."""
        self._check_prepare(request)
        is_foreign = ~np.isin(request.partners, request.clients)
        kept = ClientRound.begin(request, is_foreign, self._agree(request, is_foreign))
        shares, share_commitments = self._share(kept)
        kept.deliver(shares)
        self._last = kept.number
        older = sorted(self._rounds)[1 - KEPT_ROUNDS :]
        self._rounds = {number: self._rounds[number] for number in older} | {kept.number: kept}
        return PrepareReply(
            self.run_id,
            kept.number,
            kept.clients,
            kept.public,
            self._commit_to_seeds(kept),
            share_commitments,
            self._seal(kept, shares),
        )

    def mask(
        self, request: MaskRequest, present: Sequence[int], total: RingArray, terms: SumTerms
    ) -> MaskedReply:
        """Mask the sum of some clients' vectors; ``terms`` say what it is of."""
        return self.mask_received(self.receive(request, present), total, terms)

    def receive(self, request: MaskRequest, present: Sequence[int]) -> Received:
        """Open what partners sealed for the clients that are to be in a sum."""
        kept = self._round(request.run_id, request.server_round)
        if kept.is_masked:
            raise RefusedError(f"round {kept.number} is masked already: no mask is used twice")
        rows = kept.rows(request.clients)
        is_present = np.isin(request.clients, np.array(present, np.int64))
        if not 0 < is_present.sum() == len(present):
            raise RefusedError(f"present is {brief(present)}, must be some of the request's")
        held, has, refused = self._receive(kept, request, rows)
        few = is_present & (has[rows].sum(1) < kept.threshold)
        if few.any():
            raise RefusedError(
                f"client {request.clients[few][0]}: fewer than {kept.threshold} of its partners "
                f"take part in round {kept.number}"
            )
        return Received(kept, request, rows, is_present, held, has, refused)

    def mask_received(self, came: Received, total: RingArray, terms: SumTerms) -> MaskedReply:
        """Mask a sum, as ``mask`` does, once what partners sealed is opened."""
        # total [L]
        kept, request, rows, is_present = came.kept, came.request, came.rows, came.is_present
        terms.check_guard(kept.minimum)
        _check_total(request, total)
        kept.held, kept.has = came.held, came.has
        kept.live[rows], kept.sent[rows] = request.live, is_present
        masked = np.array(total)
        bound = terms.digest(request.length, request.word, kept.threshold, kept.minimum)
        add_streams(masked, self._masks(kept, request, rows, rows[is_present], bound))
        clients = request.clients[is_present]
        return MaskedReply(self.run_id, kept.number, clients, masked, came.refused)

    def unmask_and_prepare(self, config: Config) -> Config:
        """Reveal shares of one sum, prepare the next, or both, as the request's entries ask."""
        answer: Config = {}
        if "unmask-run" in config:
            answer |= self.unmask(UnmaskRequest.from_config(config)).to_config()
        if "prepare-run" in config:
            answer |= self.prepare(PrepareRequest.from_config(config)).to_config()
        return answer

    def unmask(self, request: UnmaskRequest) -> UnmaskReply:
        """Reveal one share about each partner that the server asks about; never two."""
        # Of a round in which nothing left this SuperNode, it has nothing to give.
        kept = self._round(request.run_id, request.server_round)
        if request.contributors < kept.minimum:
            raise RefusedError(
                f"{request.contributors} clients contributed to round {kept.number}, at least "
                f"{kept.minimum} must have: nothing is revealed"
            )
        rows = kept.rows(request.clients)
        if request.kinds.shape != (rows.size, kept.k) or request.kinds.max() > MASK_KEY:
            raise RefusedError(f"kinds have shape {request.kinds.shape}, or unknown entries")
        if kept.is_masked:
            check_unmask(kept, request, rows)
        shows = kept.has[rows] & kept.is_masked
        kinds = np.where(shows, request.kinds, np.uint8(NOTHING))
        row, column = np.nonzero(kinds)
        shares = kept.held[rows[row], column, kinds[row, column] - SEED]
        del self._rounds[kept.number]
        return UnmaskReply(self.run_id, kept.number, request.clients, kinds, shares)

    def to_bytes(self) -> bytes:
        """Write the state; it holds secrets."""
        arrays = {
            "run": np.frombuffer(self.run_id, np.uint8),
            "last": np.array([self._last]),
            "clients": np.array(self.clients, np.int64),
            "channels": rows_of(self._channels.values(), -1, KEY_BYTES),
            "public": self._public,
        }
        for number, kept in self._rounds.items():
            numbers = [getattr(kept, name) for name in NUMBERS]
            arrays[f"{number}/numbers"] = np.array(numbers, np.int64)
            for name in (*ARRAYS, *CHANGING):
                arrays[f"{number}/{name}"] = np.ascontiguousarray(getattr(kept, name))
        return bytes(save(arrays))

    @classmethod
    def from_bytes(cls, state: bytes, least: int = 1) -> SumClient:
        """Read what ``to_bytes`` wrote; ``StateLostError`` if it is something else."""
        host = cls.__new__(cls)
        host._agreed, host._rounds, host._least = channel.Agreements(), {}, least
        try:
            arrays = load(state)
            for name in [name for name in arrays if name.endswith("/numbers")]:
                head = number, *_ = arrays[name].tolist()
                fixed = [arrays[f"{number}/{part}"] for part in ARRAYS]
                changing = [arrays[f"{number}/{part}"].copy() for part in CHANGING]
                host._rounds[number] = ClientRound(*head, *fixed, *changing)
            host.run_id, host._last = arrays["run"].tobytes(), int(arrays["last"][0])
            channels = zip(arrays["clients"].tolist(), arrays["channels"], strict=True)
            host._channels = {client: private.tobytes() for client, private in channels}
            host._public = arrays["public"].astype(np.uint8, copy=False)
        except (SafetensorError, KeyError, ValueError, IndexError) as error:
            raise StateLostError(f"the state of the secure sum cannot be read: {error}") from error
        return host

    def _round(self, run_id: bytes, number: int) -> ClientRound:
        self._check_run(run_id)
        kept = self._rounds.get(number)
        if kept is None:
            raise RefusedError(f"round {number} is not open; open: {sorted(self._rounds)}")
        return kept

    def _check_run(self, run_id: bytes) -> None:
        if run_id != self.run_id:
            raise RefusedError(f"run {run_id.hex()}, expected {self.run_id.hex()}")

    def _check_prepare(self, request: PrepareRequest) -> None:
        self._check_run(request.run_id)
        if request.server_round <= self._last:
            raise RefusedError(
                f"round {request.server_round} is not newer than {self._last}, the last prepared"
            )
        check_terms(request)
        if request.minimum < self._least:
            raise RefusedError(
                f"a sum of {request.minimum} clients may be opened, and here {LEAST_CLIENTS} is "
                f"{self._least}"
            )
        for client in request.clients.tolist():
            if client not in self._channels:
                raise RefusedError(f"client {client} is not hosted here")

    def _agree(self, request: PrepareRequest, is_foreign: NDArray[np.bool_]) -> Bytes:
        """Agree on a secret with every partner at another SuperNode, ``[f, 32]``."""
        owners = request.clients[np.nonzero(is_foreign)[0]].tolist()
        if len(owners) != request.channel_keys.shape[0]:
            raise RefusedError(
                f"{request.channel_keys.shape[0]} channel keys for {len(owners)} foreign partners"
            )
        pairs = list(zip(owners, pieces(request.channel_keys), strict=True))
        return rows_of(self._agreed.look_up(self._channels, pairs), -1, KEY_BYTES)

    def _share(self, kept: ClientRound) -> tuple[Bytes, Bytes]:
        """Split secrets into shares ``[p, k, 2, 33]``; commit to some of them, ``[f, 2, 32]``."""
        secrets = np.stack([kept.seeds, kept.private], 1).reshape(-1, SECRET_BYTES)
        shares = split_secrets(secrets, kept.threshold, kept.k)  # [2 p, k, 33]
        shares = np.moveaxis(shares.reshape(-1, 2, kept.k, SHARE_BYTES), 1, 2)
        # To what stays here there is none: dealer and holder are one machine, at fault together.
        commitments = []
        for row, dealer in enumerate(kept.clients.tolist()):
            contexts = channel.share_contexts(self.run_id, kept.number, dealer)
            foreign = kept.is_foreign[row]
            given = pieces(shares[row, foreign].reshape(-1, SHARE_BYTES))
            for at, holder in enumerate(kept.partners[row, foreign].tolist()):
                both = given[2 * at : 2 * at + 2]
                name = channel.name_bytes(holder)
                commitments += channel.commit_to_shares(contexts, name, both)
        return np.ascontiguousarray(shares), rows_of(commitments, -1, 2, COMMITMENT_BYTES)

    def _commit_to_seeds(self, kept: ClientRound) -> Bytes:
        seeds = zip(kept.clients.tolist(), pieces(kept.seeds), strict=True)
        result = [channel.commit_to_seed(self.run_id, kept.number, *seed) for seed in seeds]
        return rows_of(result, -1, COMMITMENT_BYTES)

    def _seal(self, kept: ClientRound, shares: Bytes) -> Bytes:
        """Seal the shares of the partners at other SuperNodes, ``[f, 82]``."""
        row, column = np.nonzero(kept.is_foreign)
        parts = zip(
            kept.clients[row].tolist(),
            kept.partners[row, column].tolist(),
            pieces(kept.secrets),
            pieces(kept.public[row]),
            pieces(shares[row, column].reshape(-1, 2 * SHARE_BYTES)),
            strict=True,
        )
        packets = [
            channel.seal(secret, self._packet(kept, dealer, holder), round_key, plain)
            for dealer, holder, secret, round_key, plain in parts
        ]
        return rows_of(packets, -1, PACKET_BYTES)

    def _receive(
        self, kept: ClientRound, request: MaskRequest, rows: Integers
    ) -> tuple[Bytes, NDArray[np.bool_], Integers]:
        """Open the packets; return all shares, which of them came, and the pairs that failed."""
        row, column = kept.foreign_pairs(request, rows)
        secret_at = np.cumsum(kept.is_foreign).reshape(kept.is_foreign.shape) - 1
        held, has = kept.held.copy(), np.zeros_like(kept.has)
        has[rows] = request.live & ~kept.is_foreign[rows]
        holders, dealers = kept.clients[row].tolist(), kept.partners[row, column].tolist()
        parts = zip(
            holders,
            dealers,
            pieces(kept.secrets[secret_at[row, column]]),
            pieces(request.round_keys),
            pieces(request.packets),
            pieces(request.share_commitments.reshape(-1, 2 * COMMITMENT_BYTES)),
            strict=True,
        )
        opened = []
        for holder, dealer, secret, round_key, packet, promised in parts:
            plain = channel.unseal(secret, self._packet(kept, dealer, holder), round_key, packet)
            both = (plain[:SHARE_BYTES], plain[SHARE_BYTES:]) if plain else (b"", b"")
            contexts = channel.share_contexts(self.run_id, kept.number, dealer)
            commitments = channel.commit_to_shares(contexts, channel.name_bytes(holder), both)
            opened.append(b"".join(both if b"".join(commitments) == promised else ()))
        good = np.array([plain != b"" for plain in opened], np.bool_)
        held[row[good], column[good]] = rows_of(opened, -1, 2, SHARE_BYTES)
        has[row[good], column[good]] = True
        return held, has, np.stack([kept.clients[row], kept.partners[row, column]], 1)[~good]

    def _packet(self, kept: ClientRound, dealer: int, holder: int) -> bytes:
        return channel.packet_context(self.run_id, kept.number, dealer, holder)

    def _masks(
        self,
        kept: ClientRound,
        request: MaskRequest,
        rows: Integers,
        chosen: Integers,
        terms: bytes,
    ) -> list[tuple[bytes, int]]:
        """Return the self masks, and the pair masks with live partners at other SuperNodes."""
        number, run_id = kept.number, self.run_id
        seeds = zip(pieces(kept.seeds[chosen]), kept.clients[chosen].tolist(), strict=True)
        masks = [(channel.self_mask_key(seed, run_id, number, c, terms), 1) for seed, c in seeds]
        row, column = kept.foreign_pairs(request, rows)
        for own_row in np.intersect1d(chosen, row).tolist():
            mine = row == own_row
            local, private = int(kept.clients[own_row]), kept.private[own_row].tobytes()
            others = kept.partners[own_row, column[mine]].tolist()
            secrets = channel.agree(private, pieces(request.round_keys[mine]))
            for other, secret in zip(others, secrets, strict=True):
                key = channel.pair_mask_key(secret, run_id, number, local, other, terms)
                masks.append((key, channel.pair_sign(local, other)))
        return masks


def _check_total(request: MaskRequest, total: RingArray) -> None:
    dtype = WORDS.get(request.word)
    if total.shape != (request.length,) or total.dtype != dtype:
        raise ValueError(
            f"the sum has shape {total.shape} and type {total.dtype}, "
            f"but ({request.length},) and {dtype} were asked for"
        )
