"""What each key, packet and commitment of the secure sum is for; both sides write it alike."""

from __future__ import annotations

from flower_graph.secure.channel import context, derive


def self_mask_key(seed: bytes, run_id: bytes, number: int, client: int) -> bytes:
    """Return the stream key of a client's self mask in round ``number``."""
    return derive(seed, context(b"self mask", run_id, number, client))


def pair_mask_key(secret: bytes, run_id: bytes, number: int, one: int, other: int) -> bytes:
    """Return the stream key of the mask between two clients, from what their mask keys agree on."""
    low, high = sorted((one, other))
    return derive(secret, context(b"pair mask", run_id, number, low, high))


def pair_sign(own: int, other: int) -> int:
    """Of two clients, the lower number adds their mask and the higher takes it away."""
    return 1 if own < other else -1


def packet_context(run_id: bytes, number: int, dealer: int, holder: int) -> bytes:
    """Return what the packet with a dealer's shares for a holder is for."""
    return context(b"packet", run_id, number, dealer, holder)


def seed_context(run_id: bytes, number: int, client: int) -> bytes:
    """Return what the commitment to a client's seed is for."""
    return context(b"seed", run_id, number, client)


def share_contexts(run_id: bytes, number: int, dealer: int) -> tuple[bytes, bytes]:
    """Return what commitments to shares of seed and mask key are for, without the holder."""
    # The holder's ``name_bytes`` follow. In two parts, because a dealer has many holders.
    return (
        context(b"share of the seed", run_id, number, dealer),
        context(b"share of the mask key", run_id, number, dealer),
    )


def name_bytes(client: int) -> bytes:
    """Write a client's number as in ``context``."""
    return client.to_bytes(8, "little", signed=True)
