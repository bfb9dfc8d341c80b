"""Keys, shares and slots of ego-network clients, kept from message to message."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from flwr.app import ConfigRecord, Context

from flower_graph.config.rules import choice
from flower_graph.errors import RefusedError, StateLostError
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext import PlaintextAlignmentClient
from flower_graph.secure.node_config import least_clients
from flower_graph.secure.parties.alignment import VerifiedAlignmentClient
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.messages import BindReply
from flower_graph.secure.parties.party import PartyClient
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import KeyReply
from flower_graph.storage.files import IN_PROCESS, STATE_DIR
from flower_graph.strategies.fedscem.config import ALIGNMENTS
from flower_graph.strategies.fedscem.messages import NO_SLOTS, VERIFIED

PLAIN = "plain"  # the form of alignment in which the server learns identities
Identities = Mapping[int, Sequence[object]]
Aligner = AlignmentClient | PlaintextAlignmentClient
Host = SumClient | PartyClient
Kept = tuple[str, Host, Aligner]  # begins with the form of alignment
NAME = "ego-secrets"  # in Context.state
# The objects with their tokens, by run and SuperNode
_LIVE: dict[tuple[int, int], tuple[str, Kept]] = {}


class EgoSecrets:
    """Keeps the clients' secrets of sums and alignment from message to message."""

    # They are small objects, not tensors: ``Context.state`` holds them as bytes, and comes with the
    # next message. The process that handled the last message still has the objects; a token tells
    # whether they are those of the context. With the in-process engine (``state-dir = ":memory:"``)
    # nothing is written, as the process is the only one.

    def __init__(
        self, context: Context, identities: Identities, trust: TrustSettings | None = None
    ) -> None:
        self._context, self._identities, self._trust = context, identities, trust
        self._least = least_clients(context.node_config)
        self._key = (context.run_id, context.node_id)
        self._in_process = context.node_config.get(STATE_DIR, "") == IN_PROCESS

    def begin(self, run_id: bytes, form: str) -> KeyReply | BindReply:
        """Make the keys of a run; return the existing keys if the SuperNode is back."""
        if (self._trust is not None) != (form == VERIFIED):
            raise RefusedError(
                f"alignment is {form!r:.40}: with a key of its own a SuperNode takes part in "
                f"{VERIFIED} alone, without one in all but that"
            )
        kept = None
        with suppress(StateLostError):
            kept = self.load()
        if kept is None or (kept[0], kept[1].run_id) != (form, run_id):
            kept = self._new(run_id, form)  # the secrets of another run are of no more use
        host = kept[1]
        reply = host.bind() if isinstance(host, PartyClient) else host.keys()
        self.keep(*kept)
        return reply

    def refuse_going_back(self) -> None:
        """Refuse a checkpoint from before a sum of this run: a round's sums could be compared."""
        with suppress(StateLostError):
            if isinstance(host := self.load()[1], PartyClient) and host.has_sent:
                raise RefusedError(
                    "this SuperNode has sent vectors in this run: it loads no checkpoint from "
                    "before, as two sums of a round can be compared"
                )

    def load(self) -> Kept:
        """Return the form of alignment and both objects; ``StateLostError`` without them."""
        record = self._context.state.config_records.get(NAME)
        if record is None:
            raise StateLostError(f"client {self._key[1]}: its keys of this run are not here")
        token, live = _LIVE.get(self._key, ("", None))
        if live is not None and token == record["token"]:
            host = live[1]
            if isinstance(host, PartyClient) and (
                self._trust is None or host.trust.registry.digest != self._trust.registry.digest
            ):
                raise StateLostError("the registry is another one: bind again")
            return live
        if self._in_process:
            raise StateLostError(f"client {self._key[1]}: its keys were in another process")
        data = record["data"]
        assert isinstance(data, bytes)
        return self._read(data)

    def keep(self, form: str, host: Host, aligner: Aligner) -> None:
        record = ConfigRecord({"token": secrets.token_hex(8)})
        if not self._in_process:
            keys = host.to_bytes()
            size = str(len(keys)).encode()
            record["data"] = b"|".join([form.encode(), size, keys + aligner.to_bytes()])
        self._context.state[NAME] = record
        _LIVE[self._key] = (str(record["token"]), (form, host, aligner))

    # Any: ``Host`` and ``Aligner`` in the form that the run has, which the caller knows
    @contextmanager
    def opened(self) -> Iterator[tuple[Any, Any]]:
        """Work with both objects; keep them if the block ends without an error."""
        form, host, aligner = self.load()
        yield host, aligner
        self.keep(form, host, aligner)

    def drop(self) -> None:
        self._context.state.pop(NAME, None)
        _LIVE.pop(self._key, None)

    def _read(self, data: bytes) -> Kept:
        name, size, rest = data.split(b"|", 2)
        form, cut = name.decode(), int(size)
        keys, local = rest[:cut], rest[cut:]
        if (self._trust is not None) != (form == VERIFIED):
            raise StateLostError("the kept keys were made for another setting of strategy.trust")
        clients, trust = self._identities, self._trust
        host: Host
        if trust is None:
            host = SumClient.from_bytes(keys, self._least)
        else:
            host = PartyClient.from_bytes(keys, trust)
        if set(host.clients) != set(clients):
            raise StateLostError("the keys that were kept belong to other clients")
        if isinstance(host, PartyClient):
            aligner = VerifiedAlignmentClient.from_bytes(local, host.run_id, clients, host.trust)
            begin_alignment(host, aligner)
            return form, host, aligner
        if form == "psi":
            return form, host, AlignmentClient.from_bytes(local, host.run_id, clients)
        return form, host, PlaintextAlignmentClient.from_bytes(local, clients)

    def _new(self, run_id: bytes, form: str) -> Kept:
        numbers, identities = list(self._identities), self._identities
        if self._trust is not None:
            verified = VerifiedAlignmentClient(run_id, identities, self._trust)
            return form, PartyClient(run_id, numbers, self._trust, verified.points), verified
        choice(*ALIGNMENTS, NO_SLOTS).check("alignment", form)
        aligner: Aligner
        if form == "psi":
            aligner = AlignmentClient(run_id, identities)
        else:  # idle without slots
            aligner = PlaintextAlignmentClient(identities)
        return form, SumClient(run_id, numbers, least=self._least), aligner


def begin_alignment(party: PartyClient, aligner: VerifiedAlignmentClient) -> None:
    """Give the alignment what the parties of an epoch have agreed on."""
    if (epoch := party.epoch) is not None:
        aligner.begin(epoch.digest, epoch.parties.tolist(), epoch.points)


def pad_run(host: Host) -> bytes:
    """Return the id from which pads are made: sums are numbered anew in each epoch."""
    if not isinstance(host, PartyClient):
        return host.run_id
    if host.epoch is None:
        raise RefusedError("no epoch has begun")
    return host.epoch.id
