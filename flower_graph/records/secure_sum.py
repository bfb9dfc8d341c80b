"""Messages of the three stages of the secure sum: prepare, mask and unmask.

Each message writes itself into config entries and reads itself from them; entries of different
stages have different keys, so they may travel in one Flower message. Per-client things are blocks
with a leading client axis. *Pairs* are (own client, foreign partner), row by row as in ``partners``
or ``live``; what concerns two clients of one SuperNode never travels.

Reading checks lengths and that numbers agree with each other. Whether clients, rounds and words
are those that were asked for is checked by ``SumServer`` and ``SumHost``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.records import keys
from flower_graph.records.fields import (
    Config,
    read_block,
    read_clients,
    read_integer,
    read_reasons,
    read_run,
)
from flower_graph.records.keys import pack_integers, unpack_integers
from flower_graph.records.sum_setup import Bytes, Integers, KeyReply, KeyRequest
from flower_graph.secure.channel import COMMITMENT_BYTES, KEY_BYTES, TAG_BYTES
from flower_graph.secure.ring import RingArray
from flower_graph.secure.shamir import SHARE_BYTES

__all__ = [
    "MASK_KEY",
    "NOTHING",
    "PACKET_BYTES",
    "SEED",
    "Bytes",
    "Integers",
    "KeyReply",
    "KeyRequest",
    "MaskRequest",
    "MaskedReply",
    "PrepareReply",
    "PrepareRequest",
    "UnmaskReply",
    "UnmaskRequest",
]

PACKET_BYTES = 2 * SHARE_BYTES + TAG_BYTES
# What is asked of a holder for each of its partners
NOTHING, SEED, MASK_KEY = 0, 1, 2


@dataclass
class PrepareRequest:
    """Server to client: make the keys and shares of a round.

    Attributes
    ----------
    run_id, server_round : bytes, int
        The run and the round that is prepared.
    threshold : int
        Shares that give a secret back.
    minimum : int
        Fewer contributors than this, and nothing is to be revealed.
    clients : ndarray
        ``[p]`` the SuperNode's clients that take part.
    partners : ndarray
        ``[p, k]`` partners of each, in the server's mirrored order.
    channel_keys : ndarray
        ``[f, 32]`` public channel keys of the partners at other SuperNodes, pair by pair.
    """

    run_id: bytes
    server_round: int
    threshold: int
    minimum: int
    clients: Integers
    partners: Integers
    channel_keys: Bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            keys.PREPARE_RUN: self.run_id,
            keys.PREPARE_ROUND: self.server_round,
            keys.PREPARE_THRESHOLD: self.threshold,
            keys.PREPARE_MINIMUM: self.minimum,
            keys.PREPARE_CLIENTS: pack_integers(self.clients),
            keys.PREPARE_PARTNERS: pack_integers(self.partners),
            keys.PREPARE_CHANNEL_KEYS: self.channel_keys.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> PrepareRequest:
        """Read the message at the client."""
        clients = read_clients(config, keys.PREPARE_CLIENTS)
        partners = unpack_integers(config.get(keys.PREPARE_PARTNERS), keys.PREPARE_PARTNERS)
        if partners.size % clients.size:
            raise MalformedReplyError(
                f"{keys.PREPARE_PARTNERS}: {partners.size} numbers for {clients.size} clients"
            )
        return cls(
            read_run(config, keys.PREPARE_RUN),
            read_integer(config, keys.PREPARE_ROUND),
            read_integer(config, keys.PREPARE_THRESHOLD),
            read_integer(config, keys.PREPARE_MINIMUM),
            clients,
            partners.reshape(clients.size, -1),
            read_block(config, keys.PREPARE_CHANNEL_KEYS, (-1, KEY_BYTES)),
        )


@dataclass
class PrepareReply:
    """Client to server: public keys, commitments and sealed shares of a round.

    Attributes
    ----------
    run_id, server_round : bytes, int
        Of the request.
    clients : ndarray
        ``[p]`` clients that are prepared.
    round_keys : ndarray
        ``[p, 32]`` public mask keys.
    seed_commitments : ndarray
        ``[p, 16]`` commitments to the seeds of the self masks.
    share_commitments : ndarray
        ``[p, k, 2, 16]`` commitments to the partners' shares of seed and mask key.
    packets : ndarray
        ``[f, 82]`` sealed shares for the partners at other SuperNodes, pair by pair.
    """

    run_id: bytes
    server_round: int
    clients: Integers
    round_keys: Bytes
    seed_commitments: Bytes
    share_commitments: Bytes
    packets: Bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            keys.PREPARE_RUN: self.run_id,
            keys.PREPARE_ROUND: self.server_round,
            keys.PREPARE_CLIENTS: pack_integers(self.clients),
            keys.PREPARE_ROUND_KEYS: self.round_keys.tobytes(),
            keys.PREPARE_SEED_COMMITMENTS: self.seed_commitments.tobytes(),
            keys.PREPARE_SHARE_COMMITMENTS: self.share_commitments.tobytes(),
            keys.PREPARE_PACKETS: self.packets.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> PrepareReply:
        """Read and check the reply."""
        clients = read_clients(config, keys.PREPARE_CLIENTS)
        p = clients.size
        shares = read_block(config, keys.PREPARE_SHARE_COMMITMENTS, (-1, p, 2, COMMITMENT_BYTES))
        return cls(
            read_run(config, keys.PREPARE_RUN),
            read_integer(config, keys.PREPARE_ROUND),
            clients,
            read_block(config, keys.PREPARE_ROUND_KEYS, (p, KEY_BYTES)),
            read_block(config, keys.PREPARE_SEED_COMMITMENTS, (p, COMMITMENT_BYTES)),
            shares.reshape(p, -1, 2, COMMITMENT_BYTES),
            read_block(config, keys.PREPARE_PACKETS, (-1, PACKET_BYTES)),
        )


@dataclass
class MaskRequest:
    """Server to client: mask the vectors of a round; with what the other SuperNodes prepared.

    Attributes
    ----------
    run_id, server_round : bytes, int
        The run and the round.
    length, word : int
        Numbers of a vector, and bits of a number.
    clients : ndarray
        ``[p]`` the SuperNode's clients that may contribute.
    live : ndarray
        ``[p, k]`` bool, which of their partners take part.
    round_keys, share_commitments, packets : ndarray
        ``[f, 32]``, ``[f, 2, 16]``, ``[f, 82]``: public mask keys of the live partners at other
        SuperNodes, and their shares for our clients, pair by pair.
    """

    run_id: bytes
    server_round: int
    length: int
    word: int
    clients: Integers
    live: NDArray[np.bool_]
    round_keys: Bytes
    share_commitments: Bytes
    packets: Bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            keys.MASK_RUN: self.run_id,
            keys.MASK_ROUND: self.server_round,
            keys.MASK_LENGTH: self.length,
            keys.MASK_WORD: self.word,
            keys.MASK_CLIENTS: pack_integers(self.clients),
            keys.MASK_LIVE: self.live.tobytes(),
            keys.MASK_ROUND_KEYS: self.round_keys.tobytes(),
            keys.MASK_SHARE_COMMITMENTS: self.share_commitments.tobytes(),
            keys.MASK_PACKETS: self.packets.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> MaskRequest:
        """Read the message at the client."""
        clients = read_clients(config, keys.MASK_CLIENTS)
        round_keys = read_block(config, keys.MASK_ROUND_KEYS, (-1, KEY_BYTES))
        f = round_keys.shape[0]
        return cls(
            read_run(config, keys.MASK_RUN),
            read_integer(config, keys.MASK_ROUND),
            read_integer(config, keys.MASK_LENGTH),
            read_integer(config, keys.MASK_WORD),
            clients,
            read_block(config, keys.MASK_LIVE, (-1, clients.size)).reshape(clients.size, -1) > 0,
            round_keys,
            read_block(config, keys.MASK_SHARE_COMMITMENTS, (f, 2, COMMITMENT_BYTES)),
            read_block(config, keys.MASK_PACKETS, (f, PACKET_BYTES)),
        )


@dataclass
class MaskedReply:
    """Client to server: the masked sum of a SuperNode's clients.

    Attributes
    ----------
    run_id, server_round : bytes, int
        Of the request.
    clients : ndarray
        ``[q]`` clients whose vectors are in the sum.
    total : ndarray
        ``[L]`` ring words. Travels beside the config entries, as an array.
    refused : ndarray
        ``[n, 2]`` (own client, partner): the partner's packet did not open.
    left_out : dict[int, str]
        Own clients that are not in the sum, with the reason.
    """

    run_id: bytes
    server_round: int
    clients: Integers
    total: RingArray
    refused: Integers
    left_out: dict[int, str] = field(default_factory=dict)

    def to_config(self) -> dict[str, Any]:
        """Write all but ``total``."""
        entries = {
            keys.MASK_RUN: self.run_id,
            keys.MASK_ROUND: self.server_round,
            keys.MASK_CLIENTS: pack_integers(self.clients),
        }
        if self.refused.size:  # Flower's size mods stop at an entry of no bytes
            entries[keys.MASK_REFUSED] = pack_integers(self.refused)
        if self.left_out:
            entries[keys.MASK_LEFT_OUT] = [f"{c}:{why}" for c, why in self.left_out.items()]
        return entries

    @classmethod
    def from_config(cls, config: Config, total: RingArray) -> MaskedReply:
        """Read and check the reply."""
        refused = unpack_integers(config.get(keys.MASK_REFUSED, b""), keys.MASK_REFUSED)
        if refused.size % 2:
            raise MalformedReplyError(f"{keys.MASK_REFUSED}: {refused.size} numbers are no pairs")
        return cls(
            read_run(config, keys.MASK_RUN),
            read_integer(config, keys.MASK_ROUND),
            read_clients(config, keys.MASK_CLIENTS),
            total,
            refused.reshape(-1, 2),
            read_reasons(config, keys.MASK_LEFT_OUT),
        )


@dataclass
class UnmaskRequest:
    """Server to client: reveal shares of a round.

    Attributes
    ----------
    run_id, server_round : bytes, int
        The run and the round.
    contributors : int
        How many clients are in the sum.
    clients : ndarray
        ``[p]`` the SuperNode's clients, as holders of shares.
    kinds : ndarray
        ``[p, k]`` what is asked of each about each of its partners: ``NOTHING``, the share of the
        ``SEED`` of a partner in the sum, or that of the ``MASK_KEY`` of one that is missing.
    """

    run_id: bytes
    server_round: int
    contributors: int
    clients: Integers
    kinds: Bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            keys.UNMASK_RUN: self.run_id,
            keys.UNMASK_ROUND: self.server_round,
            keys.UNMASK_CONTRIBUTORS: self.contributors,
            keys.UNMASK_CLIENTS: pack_integers(self.clients),
            keys.UNMASK_KINDS: self.kinds.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> UnmaskRequest:
        """Read the message at the client."""
        clients = read_clients(config, keys.UNMASK_CLIENTS)
        return cls(
            read_run(config, keys.UNMASK_RUN),
            read_integer(config, keys.UNMASK_ROUND),
            read_integer(config, keys.UNMASK_CONTRIBUTORS),
            clients,
            read_block(config, keys.UNMASK_KINDS, (-1, clients.size)).reshape(clients.size, -1),
        )


@dataclass
class UnmaskReply:
    """Client to server: the shares that it reveals.

    Attributes
    ----------
    run_id, server_round : bytes, int
        Of the request.
    clients : ndarray
        ``[p]`` holders.
    kinds : ndarray
        ``[p, k]`` as in the request, ``NOTHING`` where the holder has no share.
    shares : ndarray
        ``[n, 33]`` one share for each entry of ``kinds`` that is not ``NOTHING``.
    """

    run_id: bytes
    server_round: int
    clients: Integers
    kinds: Bytes
    shares: Bytes

    def to_config(self) -> dict[str, Any]:
        """Write the message."""
        return {
            keys.UNMASK_RUN: self.run_id,
            keys.UNMASK_ROUND: self.server_round,
            keys.UNMASK_CLIENTS: pack_integers(self.clients),
            keys.UNMASK_KINDS: self.kinds.tobytes(),
            keys.UNMASK_SHARES: self.shares.tobytes(),
        }

    @classmethod
    def from_config(cls, config: Config) -> UnmaskReply:
        """Read and check the reply."""
        clients = read_clients(config, keys.UNMASK_CLIENTS)
        kinds = read_block(config, keys.UNMASK_KINDS, (-1, clients.size)).reshape(clients.size, -1)
        return cls(
            read_run(config, keys.UNMASK_RUN),
            read_integer(config, keys.UNMASK_ROUND),
            clients,
            kinds,
            read_block(config, keys.UNMASK_SHARES, (int((kinds != NOTHING).sum()), SHARE_BYTES)),
        )
