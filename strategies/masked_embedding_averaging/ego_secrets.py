"""Keys, shares and slots of ego-network clients, from message to message."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from flwr.app import ConfigRecord, Context

from flower_graph.client.state import IN_PROCESS
from flower_graph.config.rules import choice
from flower_graph.errors import StateLostError
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext import PlaintextAlignmentClient
from flower_graph.secure.align.polynomial import PolynomialAlignmentClient
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import KeyReply
from flower_graph.strategies.masked_embedding_averaging.config import ALIGNMENTS
from flower_graph.strategies.masked_embedding_averaging.messages import NO_SLOTS

Identities = Mapping[int, Sequence[object]]
Aligner = AlignmentClient | PolynomialAlignmentClient | PlaintextAlignmentClient
OPEN_ALIGNERS: dict[str, type[PolynomialAlignmentClient] | type[PlaintextAlignmentClient]] = {
    "polynomial": PolynomialAlignmentClient,
    "plain": PlaintextAlignmentClient,
    NO_SLOTS: PlaintextAlignmentClient,  # idle
}
Kept = tuple[str, SumClient, Aligner]  # the form of alignment first
NAME = "ego-secrets"  # in Context.state
_LIVE: dict[tuple[int, int], tuple[str, Kept]] = {}  # with their tokens, by run and SuperNode


class EgoSecrets:
    """Keys, shares and slots, from message to message: the clients' part of sums and alignment."""

    # They are objects, not tensors, and small: ``Context.state`` holds them as bytes, and goes
    # wherever Flower takes the next message. In a process that has just handled a message the
    # objects themselves are still there; a token says whether they are the ones that the context
    # means. With the in-process engine (``state-dir = ":memory:"``) nothing is written, as the
    # process is the only one.

    def __init__(self, context: Context, identities: Identities) -> None:
        self._context, self._identities = context, identities
        self._key = (context.run_id, context.node_id)
        self._in_process = context.node_config.get("state-dir", "") == IN_PROCESS

    def begin(self, run_id: bytes, form: str) -> KeyReply:
        """Make the keys of a run, or show those that it has: its SuperNode may be back."""
        # What was kept of another run is of no more use.
        with suppress(StateLostError):
            known, host, _ = self.load()
            if host.run_id == run_id and known == form:
                return host.keys()
        host = SumClient(run_id, list(self._identities))
        self.keep(form, host, _aligner(form, run_id, self._identities))
        return host.keys()

    def load(self) -> Kept:
        """Return the form of alignment and both objects; ``StateLostError`` without them."""
        record = self._context.state.config_records.get(NAME)
        if record is None:
            raise StateLostError(f"client {self._key[1]}: its keys of this run are not here")
        token, live = _LIVE.get(self._key, ("", None))
        if live is not None and token == record["token"]:
            return live
        if self._in_process:
            raise StateLostError(f"client {self._key[1]}: its keys went with another process")
        data = record["data"]
        assert isinstance(data, bytes)
        return self._read(data)

    def keep(self, form: str, host: SumClient, aligner: Aligner) -> None:
        """Keep them for the next message."""
        record = ConfigRecord({"token": secrets.token_hex(8)})
        if not self._in_process:
            keys = host.to_bytes()
            size = str(len(keys)).encode()
            record["data"] = b"|".join([form.encode(), size, keys + aligner.to_bytes()])
        self._context.state[NAME] = record
        _LIVE[self._key] = (str(record["token"]), (form, host, aligner))

    @contextmanager
    def opened(self) -> Iterator[tuple[SumClient, Aligner]]:
        """Work with both objects; they are kept when the block ends well."""
        form, host, aligner = self.load()
        yield host, aligner
        self.keep(form, host, aligner)

    def drop(self) -> None:
        """Forget the run."""
        self._context.state.pop(NAME, None)
        _LIVE.pop(self._key, None)

    def _read(self, data: bytes) -> Kept:
        name, size, rest = data.split(b"|", 2)
        form, cut = name.decode(), int(size)
        host, local = SumClient.from_bytes(rest[:cut]), rest[cut:]
        if set(host.clients) != set(self._identities):
            raise StateLostError("the keys that were kept belong to other clients")
        if form == "psi":
            return form, host, AlignmentClient.from_bytes(local, host.run_id, self._identities)
        return form, host, OPEN_ALIGNERS[form].from_bytes(local, self._identities)


def _aligner(form: str, run_id: bytes, identities: Identities) -> Aligner:
    if form == "psi":
        return AlignmentClient(run_id, identities)
    choice(*ALIGNMENTS, NO_SLOTS).check("alignment", form)
    return OPEN_ALIGNERS[form](identities)
