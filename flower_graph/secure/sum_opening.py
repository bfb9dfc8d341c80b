"""Takes the masks off a round's sum with the secrets that the shares give back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from flower_graph.records.secure_sum import NOTHING, SEED
from flower_graph.secure import sum_keys
from flower_graph.secure.channel import agree, commitment, public_key
from flower_graph.secure.shamir import combine
from flower_graph.secure.stream import add_streams

if TYPE_CHECKING:
    from flower_graph.secure.sum_round import SumRound


class Opening:
    """The last step of a round at the server.

    Parameters
    ----------
    closed : SumRound
        A round that has collected its shares.
    """

    def __init__(self, closed: SumRound) -> None:
        self._round = closed
        self._secrets: dict[int, bytes] = {}

    def take_masks_away(self, blame: Callable[[int, str, bool], None]) -> str:
        """Recover all secrets, check them, and subtract the masks from ``total``.

        Parameters
        ----------
        blame : callable
            Told of each client whose secret is not the one that it committed to.

        Returns
        -------
        str
            Empty, or why the round is skipped; ``total`` is still masked then.
        """
        of = self._round
        needed = np.flatnonzero(of.kinds != NOTHING)
        few = needed[of.has[needed].sum(1) < of.threshold]
        if few.size:
            return (
                f"round {of.number} is skipped: too few shares came for {few.size} clients (the "
                f"first is {of.clients[few[0]]}: {of.has[few[0]].sum()} of {of.threshold})"
            )
        wrong = [row for row in needed.tolist() if not self._recover(row)]
        for row in wrong:
            why = f"round {of.number}: its shares do not give the secret that it committed to"
            blame(int(of.clients[row]), why, True)
        if wrong:
            return f"round {of.number} is skipped: client {of.clients[wrong[0]]} shared wrongly"
        masks: list[tuple[bytes, int]] = []
        for row in needed.tolist():
            masks += [self._self_mask(row)] if of.kinds[row] == SEED else self._pair_masks(row)
        add_streams(of.total, masks)
        return ""

    def _recover(self, row: int) -> bool:
        """Recover one client's secret; tell whether it is what the client committed to."""
        of = self._round
        columns = np.flatnonzero(of.has[row])[: of.threshold]
        shares = [share.tobytes() for share in of.shares[row, columns]]
        try:
            secret = combine((columns + 1).tolist(), shares)
        except ValueError:
            return False
        self._secrets[row] = secret
        if of.kinds[row] != SEED:
            return bool(public_key(secret) == of.round_keys[row].tobytes())
        what_for = sum_keys.seed_context(of.run_id, of.number, int(of.clients[row]))
        return bool(commitment(what_for, secret) == of.seed_commitments[row].tobytes())

    def _self_mask(self, row: int) -> tuple[bytes, int]:
        of = self._round
        client = int(of.clients[row])
        return sum_keys.self_mask_key(self._secrets[row], of.run_id, of.number, client), -1

    def _pair_masks(self, row: int) -> list[tuple[bytes, int]]:
        """Return what the partners of a vanished client at other SuperNodes added for it."""
        of = self._round
        partners = of.partners[row]
        there = partners[of.is_foreign[row] & of.contributed[partners]]
        secrets = agree(self._secrets[row], [key.tobytes() for key in of.round_keys[there]])
        other, masks = int(of.clients[row]), []
        for own, secret in zip(of.clients[there].tolist(), secrets, strict=True):
            key = sum_keys.pair_mask_key(secret, of.run_id, of.number, own, other)
            masks.append((key, -sum_keys.pair_sign(own, other)))
        return masks
