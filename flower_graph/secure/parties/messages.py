"""Further messages of the secure sum, for a server that may lie.

An epoch begins with ``sum_bind``, ``sum_reveal`` and ``sum_epoch``; each round has the exchange
``sum_list``. Signatures of keys and lists are entries of the messages of ``sum/messages.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import IdentityError
from flower_graph.secure.channel import KEY_BYTES, is_low_order
from flower_graph.secure.parties.identity import SIGNATURE_BYTES as SIGNATURE
from flower_graph.secure.parties.identity import Identity
from flower_graph.secure.parties.registry import Registry
from flower_graph.wire.codec import Message
from flower_graph.wire.fields import (
    Block,
    Bytes,
    Clients,
    Exact,
    Flags,
    Integers,
    Raw,
    Real,
    Whole,
)

SEED_BYTES = 32
BINDING = b"binding"  # what a signature is for
BindRun = Annotated[bytes, Raw("bind-run", "the run of the sums")]
RevealRun = Annotated[bytes, Raw("reveal-run", "the run of the sums")]
EpochRun = Annotated[bytes, Raw("epoch-run", "the run of the sums")]


def none_declared() -> Integers:
    """Return the declaration where nothing is to be aligned."""
    return np.zeros((0, 2), np.int64)


@dataclass
class BindRequest(Message, down="sum_bind"):
    """Server to client: state your clients."""

    run_id: BindRun


@dataclass
class BindReply(Message, up="sum_bind"):
    """Client to server: its clients, under the party's signature."""

    run_id: BindRun
    party: Annotated[int, Whole("bind-party", "its number in the registry", least=0)]
    clients: Annotated[Integers, Clients("bind-clients", "who is hosted", shape="c")]
    channel_key: Annotated[
        Bytes, Block("bind-channel-key", "its public channel key (X25519)", shape=f"{KEY_BYTES}")
    ]
    commitment: Annotated[
        Bytes, Block("bind-commitment", "to its part of the graph's seed", shape=f"{SEED_BYTES}")
    ]
    signature: Annotated[
        Bytes, Block("bind-signature", "over all these (Ed25519)", shape=f"{SIGNATURE}")
    ]
    declared: Annotated[
        Integers,
        Exact(
            "bind-declared",
            "clients and the points that each will bring to an alignment; left out without one",
            shape="c 2",
            optional=True,
        ),
    ] = field(default_factory=none_declared)

    def signed(self, identity: Identity, block_cap: int) -> BindReply:
        """Return it signed with the party's own key; ``IdentityError`` if it is not allowed."""
        self._check_grant(identity.registry, block_cap)
        if identity.party != self.party:
            raise IdentityError(f"the binding is of party {self.party}, not {identity.party}")
        signature = identity.sign(BINDING, *self._parts())
        return replace(self, signature=np.frombuffer(signature, np.uint8))

    def verify(self, registry: Registry, block_cap: int | None = None) -> None:
        """Refuse it unless the party signed it and the registry grants what it claims.

        ``block_cap`` is the most points that a client may bring. ``IdentityError`` names the party
        and the fault.
        """
        self._check_grant(registry, block_cap)
        if not registry.verify(self.party, self.signature.tobytes(), BINDING, *self._parts()):
            version = registry.digest.hex()[:16]
            why = f"its binding is not signed for this run and version of the registry, {version}"
            raise IdentityError(f"party {self.party}: {why}")

    def _parts(self) -> tuple[bytes, ...]:
        clients, blocks = (
            one.astype("<i8").tobytes() for one in (self.clients, self.declared[:, 1])
        )
        return self.run_id, clients, self.channel_key.tobytes(), self.commitment.tobytes(), blocks

    def _check_grant(self, registry: Registry, block_cap: int | None) -> None:
        who, clients, sizes = f"party {self.party}", self.clients.tolist(), self.declared[:, 1]
        registered = registry.parties.get(self.party)
        if registered is None or registered.revoked:
            raise IdentityError(f"{who} is {'revoked' if registered else 'not in the registry'}")
        if not clients or clients != sorted(set(clients)):
            raise IdentityError(f"{who}: its clients are none, not ascending or there twice")
        if foreign := [client for client in clients if not registered.may_host([client])]:
            raise IdentityError(f"{who}: client {foreign[0]} is not granted to it")
        if self.channel_key.size != KEY_BYTES or is_low_order(self.channel_key.tobytes()):
            raise IdentityError(f"{who}: its channel key is of low order or not {KEY_BYTES} bytes")
        if self.commitment.size != SEED_BYTES:
            raise IdentityError(f"{who}: its commitment has not {SEED_BYTES} bytes")
        if sizes.size and self.declared[:, 0].tolist() != clients:
            raise IdentityError(f"{who}: declares {sizes.size} blocks, for other clients")
        most = 2**62 if block_cap is None else block_cap
        if ((sizes < 1) | (sizes > most)).any():
            raise IdentityError(f"{who}: declares {sizes.max()} points, from 1 to {most}")


@dataclass
class RevealRequest(Message, down="sum_reveal"):
    """Server to client: all commitments; show the seed that you committed to."""

    run_id: RevealRun
    number: Annotated[int, Whole("reveal-epoch", "which epoch", least=0)]
    dropout: Annotated[float, Real("reveal-dropout", "share of parties that may vanish")]
    corrupt: Annotated[float, Real("reveal-corrupt", "share of parties that may collude")]
    minimum: Annotated[int, Whole("reveal-minimum", "parties without whom nothing is revealed")]
    differ_by: Annotated[
        int, Whole("reveal-differ-by", "parties that two sums differ by at least", least=1)
    ]
    limit: Annotated[float, Real("reveal-limit", "largest size of a number in their sums")]
    parties: Annotated[Integers, Clients("reveal-parties", "whose they are, ascending", shape="n")]
    commitments: Annotated[Bytes, Block("reveal-commitments", "of all", shape=f"n {SEED_BYTES}")]
    declared: Annotated[
        Integers,
        Exact(
            "reveal-declared",
            "all clients that are to be aligned, ascending, and the points of each; as above",
            shape="b 2",
            optional=True,
        ),
    ] = field(default_factory=none_declared)


@dataclass
class RevealReply(Message, up="sum_reveal"):
    """Client to server: its part of the graph's seed."""

    run_id: RevealRun
    number: Annotated[int, Whole("reveal-epoch", "as asked", least=0)]
    seed: Annotated[Bytes, Block("reveal-seed", "as committed to", shape=f"{SEED_BYTES}")]


@dataclass
class EpochRequest(Message, down="sum_epoch"):
    """Server to client: all seeds, and the statements that the client's partners signed."""

    run_id: EpochRun
    seeds: Annotated[Bytes, Block("epoch-seeds", "of all parties", shape=f"n {SEED_BYTES}")]
    # Of the partners, in the order of the graph
    channel_keys: Annotated[
        Bytes, Block("epoch-channel-keys", "the partners'", shape=f"k {KEY_BYTES}")
    ]
    signatures: Annotated[
        Bytes, Block("epoch-signatures", "their bindings'", shape=f"k {SIGNATURE}")
    ]
    counts: Annotated[Integers, Exact("epoch-counts", "clients that each hosts", shape="k")]
    clients: Annotated[Integers, Exact("epoch-clients", "these, one after another", shape="c")]


@dataclass
class EpochReply(Message, up="sum_epoch"):
    """Client to server: its view of the epoch."""

    run_id: EpochRun
    digest: Annotated[Bytes, Block("epoch-digest", "the epoch's hash", shape=f"{SEED_BYTES}")]


@dataclass
class ListRequest(Message, down="sum_list"):
    """Server to client: the parties in the sum."""

    run_id: Annotated[bytes, Raw("list-run", "the epoch")]
    server_round: Annotated[int, Whole("list-round", "number of the sum")]
    listed: Annotated[NDArray[np.bool_], Flags("list-parties", "who of the epoch", shape="n")]


@dataclass
class ListReply(Message, up="sum_list"):
    """Client to server: the list, signed."""

    run_id: Annotated[bytes, Raw("list-run", "the epoch")]
    server_round: Annotated[int, Whole("list-round", "as asked")]
    signature: Annotated[
        Bytes, Block("list-signature", "over epoch, round and list", shape=f"{SIGNATURE}")
    ]
