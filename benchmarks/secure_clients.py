"""The cost of a secure sum's round for one client, in both settings of trust.

One client is played by the code of a SuperNode, with its state read and written at each message.
It meets the others only in the packets of its partners and of the server, so these packets are made
here, as the protocol has them. In the malicious setting clients are *parties*, SuperNodes with keys
of their own, and the same number of them takes part.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cryptography.hazmat.primitives import serialization as pem
from flwr.app import ConfigRecord, Context, RecordDict

from benchmarks import parties
from benchmarks.measure import Table, duration, say, size, table
from flower_graph.secure import channel
from flower_graph.secure.channel import rows_of
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties.epoch import LIST, ROUND_KEY, Epoch, commit
from flower_graph.secure.parties.identity import Identity, TrustSettings
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import (
    RING,
    SECURE_SUM,
    SEED,
    EpochRequest,
    KeyReply,
    KeyRequest,
    ListRequest,
    MaskRequest,
    PrepareRequest,
    RevealRequest,
    SumTerms,
    UnmaskRequest,
    none_declared,
)
from flower_graph.secure.sum.partners import plan
from flower_graph.server.sums import as_record
from flower_graph.wire.keys import CONFIG
from flower_graph.wire.ledger import count_bytes

SIZES, QUICK_SIZES = (100, 1_000, 10_000), (30, 60)
COLLUDING = (0.0, 0.1)  # share of all
LENGTH, TIMES = 10_000, 5
DROPOUT, LIMIT, STEP = 0.3, 64.0, 2.0**-24  # so that words have 64 bits at all sizes
RUN, OWN = bytes(range(16)), 0  # the client that is played is number 0


class Hosted(SecureSumClient):
    """The client that is played, with a given vector."""

    def vectors(self, config: dict[str, Any]) -> Mapping[int, Any]:
        return {OWN: np.full(int(config["mask-length"]), 0.5)}


class Played:
    """One client of many under a trusted server, and the messages that it gets."""

    trusted = True

    def __init__(self, clients: int, corrupt: float, length: int, folder: Path) -> None:
        self.m, self.corrupt, self.length = clients, corrupt, length
        self.ring = Ring.fit(clients, LIMIT, STEP)
        self.spent: dict[str, float] = {}
        self.up = self.down = 0
        self._client(folder)
        self._meet()

    def _client(self, folder: Path) -> None:
        context = Context(1, 1, {}, RecordDict(), {})
        self.client = Hosted(context, [OWN])

    def _meet(self) -> None:
        self.k, self.threshold, vanished = plan(self.m, DROPOUT, self.corrupt)
        self.run, self.partners = RUN, np.arange(1, self.k + 1)
        self.minimum = max(2, self.threshold + 1, self.m - vanished)
        found = self.say("enroll", "sum_enroll", KeyRequest(RUN))
        self.own_key = KeyReply.from_config(found).channel_key.tobytes()
        self.channels = [channel.new_key() for _ in range(self.k)]

    def say(self, what: str, action: str, *messages: Any, **more: Any) -> dict[str, Any]:
        config = dict(as_record(*messages, more).config_records[CONFIG])
        self.down += _size(config)
        started = time.process_time()
        arrays, _, found = getattr(self.client, action)([], config)
        self.spent[what] = self.spent.get(what, 0.0) + time.process_time() - started
        self.up += _size(found) + sum(array.nbytes for array in arrays)
        return dict(found)

    def round(self, number: int) -> None:
        keys = rows_of([public for _, public in self.channels], self.k, -1)
        one = np.array([OWN])
        prepare = PrepareRequest(
            self.run, number, self.threshold, self.minimum, one, self.partners[None], keys
        )
        self.say("prepare", "sum_unmask", prepare)
        pairs = [channel.new_key() for _ in range(self.k)]
        shares = [(os.urandom(32) + b"\0", os.urandom(32) + b"\0") for _ in range(self.k)]
        packets, commitments = [], []
        for partner, (private, _), (_, public), both in zip(
            self.partners.tolist(), self.channels, pairs, shares, strict=True
        ):
            (secret,) = channel.agree(private, [self.own_key])
            what_for = channel.packet_context(self.run, number, partner, OWN)
            packets.append(channel.seal(secret, what_for, public, b"".join(both)))
            commitments += channel.commit_to_shares(self.run, number, partner, OWN, both)
        mask = MaskRequest(
            self.run,
            number,
            self.length,
            self.ring.word,
            one,
            np.ones(self.k, np.bool_),
            rows_of([public for _, public in pairs], self.k, -1),
            rows_of(commitments, self.k, 2, -1),
            rows_of(packets, self.k, -1),
        )
        self.sign_keys(mask, [public for _, public in pairs])
        self.say("mask", "sum_mask", mask, **RING.to_config(self.ring))
        kinds = np.full((1, self.k), SEED, np.uint8)
        unmask = UnmaskRequest(self.run, number, self.m, one, kinds)
        self.sign_list(unmask)
        self.say("unmask", "sum_unmask", unmask)

    def sign_keys(self, mask: MaskRequest, keys: list[bytes]) -> None:
        """Add what is signed under a server that may lie."""

    def sign_list(self, unmask: UnmaskRequest) -> None:
        """Add what is signed under a server that may lie."""


class PlayedParty(Played):
    """One party of many under a server that may lie."""

    trusted = False

    def _client(self, folder: Path) -> None:
        self.keys, registry = parties.registered([range(i, i + 1) for i in range(self.m)])
        registry.write(folder / "registry.json")
        file = folder / "key"
        file.touch(0o600)
        file.write_bytes(
            self.keys[OWN].private_bytes(
                pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.NoEncryption()
            )
        )
        node = {"identity-key": str(file), "registry": str(folder / "registry.json")}
        node["trust-corrupt"] = self.corrupt
        context = Context(1, 1, node, RecordDict(), {})
        started = time.process_time()
        self.client = Hosted(context, [OWN])  # reads the registry
        self.spent["registry"] = time.process_time() - started
        assert self.client.trust is not None
        self.trust: TrustSettings = self.client.trust

    def _sign(self, party: int, purpose: bytes, *parts: bytes) -> bytes:
        return Identity(self.keys[party], self.trust.registry).sign(purpose, *parts)

    def _meet(self) -> None:
        bound = KeyReply.from_config(self.say("epoch", "sum_enroll", KeyRequest(RUN, signed=True)))
        self.own_key = bound.channel_key.tobytes()
        seeds = [os.urandom(32) for _ in range(self.m)]
        promised = [commit(RUN, party, seed) for party, seed in enumerate(seeds)]
        promised[OWN] = bound.commitment.tobytes()
        numbers, rows = np.arange(self.m), rows_of(promised, self.m, -1)
        terms = DROPOUT, self.corrupt, self.trust.minimum, self.trust.differ_by, LIMIT
        request = RevealRequest(RUN, 0, *terms, numbers, rows, none_declared())
        seeds[OWN] = self.say("epoch", "sum_reveal", request)["reveal-seed"]
        shown = rows_of(seeds, self.m, -1)
        self.epoch = epoch = Epoch.agreed(request, self.trust.registry.digest, shown)
        self.run, self.partners = epoch.id, epoch.partners[OWN]
        (self.k, self.threshold), self.minimum = epoch.plan, epoch.minimum
        self.channels = [channel.new_key() for _ in range(self.k)]
        signatures = []
        for party, (_, public) in zip(self.partners.tolist(), self.channels, strict=True):
            key, commitment = (np.frombuffer(one, np.uint8) for one in (public, promised[party]))
            binding = KeyReply(RUN, np.array([party]), key, party, commitment)
            identity = Identity(self.keys[party], self.trust.registry)
            signatures.append(binding.signed(identity, self.trust.block_cap).signature.tobytes())
        keys = rows_of([public for _, public in self.channels], self.k, -1)
        ones, signed = np.ones(self.k, np.int64), rows_of(signatures, self.k, -1)
        self.say("epoch", "sum_epoch", EpochRequest(RUN, shown, keys, signed, ones, self.partners))

    def sign_keys(self, mask: MaskRequest, keys: list[bytes]) -> None:
        signed = [
            self._sign(party, ROUND_KEY, *self.epoch.key_parts(mask.server_round, key))
            for party, key in zip(self.partners.tolist(), keys, strict=True)
        ]
        mask.ready, mask.signatures = np.ones(self.m, np.bool_), rows_of(signed, self.k, -1)

    def sign_list(self, unmask: UnmaskRequest) -> None:
        number, present = unmask.server_round, np.ones(self.m, np.bool_)
        self.say("list", "sum_list", ListRequest(self.run, number, present))
        terms = SumTerms(SECURE_SUM, self.ring).digest(
            self.length, self.ring.word, self.threshold, self.minimum
        )
        parts = self.epoch.signed_parts(number, present, present, terms)
        chosen = self.partners[: self.threshold].tolist()
        signed = [self._sign(party, LIST, *parts) for party in chosen]
        unmask.columns = np.arange(self.threshold)
        unmask.signatures = rows_of(signed, self.threshold, -1)


def _size(config: Mapping[str, Any]) -> int:
    return count_bytes(RecordDict({"config": ConfigRecord(dict(config))}))


def measure(clients: int, corrupt: float, length: int, rounds: int) -> list[dict[str, Any]]:
    """Measure one client in both settings, in turns; return the least time of each round."""
    with TemporaryDirectory() as folder:
        both = [kind(clients, corrupt, length, Path(folder)) for kind in (Played, PlayedParty)]
        start = [(one.spent, one.up, one.down) for one in both]
        times: list[list[dict[str, float]]] = [[], []]
        for number in range(rounds):
            for one, kept in zip(both, times, strict=True):
                one.spent, one.up, one.down = {}, 0, 0
                one.round(number)
                kept.append(one.spent)
    return [
        {
            "clients": clients,
            "corrupt": corrupt,
            "trusted": one.trusted,
            "partners": one.k,
            "threshold": one.threshold,
            "stages": {stage: min(turn[stage] for turn in kept) for stage in kept[0]},
            "seconds": min(sum(turn.values()) for turn in kept),
            "bytes-up": one.up,
            "bytes-down": one.down,
            "vector-bytes": one.length * one.ring.word // 8,
            "start": {"seconds": spent, "bytes-up": up, "bytes-down": down},
        }
        for one, kept, (spent, up, down) in zip(both, times, start, strict=True)
    ]


def client_table(quick: bool) -> Table:
    """Measure one client of many in both settings of trust."""
    sizes, times = (QUICK_SIZES, 2) if quick else (SIZES, TIMES)
    rows = []
    for corrupt in COLLUDING:
        for clients in sizes:
            trusted, other = measure(clients, corrupt, LENGTH, times)
            for one, ratio in (
                (trusted, ""),
                (other, f"{other['seconds'] / trusted['seconds']:.2f}"),
            ):
                row = [f"{clients:,}", f"{corrupt:.0%}", "trusted" if one["trusted"] else "may lie"]
                row += [f"{one['partners']:,}", f"{one['threshold']:,}", duration(one["seconds"])]
                row += [ratio, size(one["bytes-up"] - one["vector-bytes"]), size(one["bytes-down"])]
                rows.append([*row, duration(sum(one["start"]["seconds"].values()))])
            say(f"{clients} clients, corrupt {corrupt:g}: {ratio} times")
    about = f"""Processor time of everything that the code of one SuperNode does in a round, its
        state read and written at each message, the least of several rounds; vectors of {LENGTH:,}
        words of 64 bits, bytes besides the vector. *Times* is to the same under a trusted server,
        *start* is before the first round."""
    head = [
        "clients",
        "collude",
        "server",
        "partners",
        "threshold",
        "a round",
        "times",
        "up",
        "down",
    ]
    return table("One client of many in a secure sum", about, [*head, "start"], rows)
