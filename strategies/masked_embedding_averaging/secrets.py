"""What the clients of one SuperNode keep secret: their part of the secure sum and of the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from flower_graph.errors import StateLostError
from flower_graph.secure.align.client import AlignHost
from flower_graph.secure.align.plaintext_client import PlainHost, PolynomialHost
from flower_graph.secure.secret_store import Vault
from flower_graph.secure.sum.client import SumHost
from flower_graph.secure.sum.messages import KeyReply

if TYPE_CHECKING:
    from flwr.app import Context

Identities = Mapping[int, Sequence[object]]
Aligner = AlignHost | PolynomialHost | PlainHost
FORMS = ("psi", "polynomial", "plain")
NO_SLOTS = "none"  # nothing is aligned: no embedding is shared


class EgoSecrets:
    """Keys, shares and slots, from message to message."""

    def __init__(self, context: Context, identities: Identities) -> None:
        self._identities = identities
        self._vault: Vault[tuple[str, SumHost, Aligner]] = Vault(context, "ego-secrets")

    def begin(self, run_id: bytes, form: str) -> KeyReply:
        """Make the keys of a run, or show those that it has: its SuperNode may be back."""
        # What was kept of another run is of no more use.
        with suppress(StateLostError):
            known, host, _ = self.load()
            if host.run_id == run_id and known == form:
                return host.keys()
        host = SumHost(run_id, list(self._identities))
        self.keep(form, host, _aligner(form, run_id, self._identities))
        return host.keys()

    def load(self) -> tuple[str, SumHost, Aligner]:
        """Return the form of alignment and both objects; ``StateLostError`` without them."""
        return self._vault.load(self._read)

    def keep(self, form: str, host: SumHost, aligner: Aligner) -> None:
        """Keep them for the next message."""
        self._vault.keep((form, host, aligner), _write)

    def drop(self) -> None:
        """Forget the run."""
        self._vault.drop()

    def _read(self, data: bytes) -> tuple[str, SumHost, Aligner]:
        name, size, rest = data.split(b"|", 2)
        form, cut = name.decode(), int(size)
        host, own = SumHost.from_bytes(rest[:cut]), rest[cut:]
        if set(host.clients) != set(self._identities):
            raise StateLostError("the keys that were kept belong to other clients")
        if form == "psi":
            return form, host, AlignHost.from_bytes(own, host.run_id, self._identities)
        kind = PolynomialHost if form == "polynomial" else PlainHost
        return form, host, kind.from_bytes(own, self._identities)


def _write(kept: tuple[str, SumHost, Aligner]) -> bytes:
    form, host, aligner = kept
    keys = host.to_bytes()
    return b"|".join([form.encode(), str(len(keys)).encode(), keys + aligner.to_bytes()])


def _aligner(form: str, run_id: bytes, identities: Identities) -> Aligner:
    if form == "psi":
        return AlignHost(run_id, identities)
    if form == "polynomial":
        return PolynomialHost(identities)
    if form in ("plain", NO_SLOTS):
        return PlainHost(identities)
    raise ValueError(f"alignment is {form!r}, must be one of {', '.join(FORMS)}")
