"""What the clients of one SuperNode keep secret: their part of the secure sum and of the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from flower_graph.errors import StateLostError
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.align.plaintext_client import (
    PlaintextAlignmentClient,
    PolynomialAlignmentClient,
)
from flower_graph.secure.secret_store import SecretStore
from flower_graph.secure.sum.client import SumClient
from flower_graph.secure.sum.messages import KeyReply

if TYPE_CHECKING:
    from flwr.app import Context

Identities = Mapping[int, Sequence[object]]
Aligner = AlignmentClient | PolynomialAlignmentClient | PlaintextAlignmentClient
FORMS = ("psi", "polynomial", "plain")
NO_SLOTS = "none"  # nothing is aligned: no embedding is shared


class EgoSecrets:
    """Keys, shares and slots, from message to message."""

    def __init__(self, context: Context, identities: Identities) -> None:
        self._identities = identities
        self._vault: SecretStore[tuple[str, SumClient, Aligner]] = SecretStore(
            context, "ego-secrets"
        )

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

    def load(self) -> tuple[str, SumClient, Aligner]:
        """Return the form of alignment and both objects; ``StateLostError`` without them."""
        return self._vault.load(self._read)

    def keep(self, form: str, host: SumClient, aligner: Aligner) -> None:
        """Keep them for the next message."""
        self._vault.keep((form, host, aligner), _write)

    def drop(self) -> None:
        """Forget the run."""
        self._vault.drop()

    def _read(self, data: bytes) -> tuple[str, SumClient, Aligner]:
        name, size, rest = data.split(b"|", 2)
        form, cut = name.decode(), int(size)
        host, local = SumClient.from_bytes(rest[:cut]), rest[cut:]
        if set(host.clients) != set(self._identities):
            raise StateLostError("the keys that were kept belong to other clients")
        if form == "psi":
            return form, host, AlignmentClient.from_bytes(local, host.run_id, self._identities)
        kind = PolynomialAlignmentClient if form == "polynomial" else PlaintextAlignmentClient
        return form, host, kind.from_bytes(local, self._identities)


def _write(kept: tuple[str, SumClient, Aligner]) -> bytes:
    form, host, aligner = kept
    keys = host.to_bytes()
    return b"|".join([form.encode(), str(len(keys)).encode(), keys + aligner.to_bytes()])


def _aligner(form: str, run_id: bytes, identities: Identities) -> Aligner:
    if form == "psi":
        return AlignmentClient(run_id, identities)
    if form == "polynomial":
        return PolynomialAlignmentClient(identities)
    if form in ("plain", NO_SLOTS):
        return PlaintextAlignmentClient(identities)
    raise ValueError(f"alignment is {form!r}, must be one of {', '.join(FORMS)}")
