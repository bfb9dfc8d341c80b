"""Checkpoints of LocalSage+ and FedSage+: the server's half of saving and going on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flower_graph.records.fed_sage import Arrays
from flower_graph.run_checkpoints import RunCheckpoints
from flower_graph.sage_session import SageSession


class SageCheckpoints:
    """Saves and resumes a run; the averaged classifier is changed in place.

    Parameters
    ----------
    name : str
        Of the strategy, which may not change.
    session : SageSession
        To ask the clients with.
    classifier : dict of ndarray
        The averaged classifier; empty if there is none.
    folder, every : Path or None, int
        Where and every how many rounds to save everything; 0 for never.
    """

    def __init__(
        self,
        name: str,
        session: SageSession,
        classifier: Arrays,
        folder: Path | None,
        every: int,
    ) -> None:
        self._run = RunCheckpoints(folder, every)
        self._session, self._classifier = session, classifier
        self._settings = {"strategy": name, **session.settings._asdict()}

    def save(self, server_round: int, rounds: int) -> None:
        """Complete the round's checkpoint, if one is due and all clients save theirs."""
        if not self._run.is_due(server_round, rounds):
            return
        missing = self._session.save(server_round, self._run.run)
        state = {
            "settings": self._settings,
            "book": self._session.book.state_dict(),
            "classifier": {name: torch.from_numpy(v) for name, v in self._classifier.items()},
            "wire": self._session.exchange.ledger.state_dict(),
        }
        self._run.save(server_round, state, missing)

    def resume(self, rounds: int) -> int:
        """Load the newest checkpoint that the server and all clients have; return its round."""
        session, wire = self._session, dict[str, Any]()

        def load(state: Mapping[str, Any]) -> None:
            session.book.load_state_dict(state["book"])
            self._classifier.update({n: v.numpy() for n, v in state["classifier"].items()})
            wire.update(state["wire"])

        def ask(server_round: int) -> list[str]:
            session.resume = self._run.resume
            refused = session.reach()
            # Not counted: the clients were asked who they are in the run's first part already.
            session.exchange.ledger.load_state_dict(wire)
            return refused

        return self._run.go_on(rounds, self._settings, load, ask)
