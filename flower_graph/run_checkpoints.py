"""The server's half of saving and going on, for methods that keep a state of their own."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flower_graph import checkpoint
from flower_graph.errors import CheckpointError
from flower_graph.records.resume import Resume

LOG = logging.getLogger(__name__)


class RunCheckpoints:
    """When to save, and which checkpoint to go on from.

    Parameters
    ----------
    folder : Path or None
        Folder of all checkpoints.
    every : int
        Every how many rounds to save; 0 for never.

    Attributes
    ----------
    resume : Resume
        What clients are told: the run's token, and the round that it goes on from.

    Raises
    ------
    ValueError
        If the arguments do not go together.
    """

    def __init__(self, folder: Path | None, every: int) -> None:
        checkpoint.check(folder, every)
        self.folder, self.every = folder, every
        self.resume = Resume(run=checkpoint.new_run())
        self._is_late = False  # whether one is due that could not be completed

    @property
    def run(self) -> str:
        """The run's token."""
        return self.resume.run

    def is_due(self, server_round: int, rounds: int) -> bool:
        """Whether this round is to be saved; the last one always is, if any are."""
        if not self.every or server_round < 1:
            return False
        return self._is_late or server_round % self.every == 0 or server_round == rounds

    def save(self, server_round: int, state: dict[str, Any], missing: Mapping[int, str]) -> None:
        """Complete a round's checkpoint.

        Parameters
        ----------
        server_round : int
            The round.
        state : dict
            What the server is to find again.
        missing : mapping
            SuperNodes whose clients have not saved theirs: node to reason. With any the checkpoint
            stays incomplete, and the next round tries again.
        """
        assert self.folder is not None
        for node, why in missing.items():
            LOG.warning(
                "round %d: no checkpoint: node %d: %s; the next round tries again",
                server_round,
                node,
                why,
            )
        self._is_late = bool(missing) or not checkpoint.save_server(
            self.folder, server_round, {"run": self.run, **state}
        )

    def go_on(
        self,
        rounds: int,
        settings: Mapping[str, Any],
        load: Callable[[Mapping[str, Any]], None],
        ask: Callable[[int], Sequence[str]],
    ) -> int:
        """Go on from the newest checkpoint that the server can read and all clients have.

        Parameters
        ----------
        rounds : int
            Of the whole run.
        settings : mapping
            What must be as it was; the saved state has it as ``settings``.
        load : callable
            Takes over the saved state at the server.
        ask : callable
            Has the clients load a round; returns why some cannot.

        Returns
        -------
        int
            The round.

        Raises
        ------
        CheckpointError
            If there is none that fits.
        """

        def take(server_round: int, state: dict[str, Any]) -> Sequence[str]:
            assert self.folder is not None
            try:
                check_same(state["settings"], settings)
                run = str(state["run"])
                load(state)
            except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
                folder = checkpoint.round_folder(self.folder, server_round)
                raise CheckpointError(f"{folder}: does not fit this run: {error}") from error
            self.resume = Resume(run, server_round, secrets.token_hex(8))
            return ask(server_round)

        return checkpoint.resume(self.folder, rounds, take)


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to go on with clients whose weights were made under other settings."""
    for name, value in wanted.items():
        if found[name] != value:
            raise ValueError(f"its {name} is {found[name]}, this run's is {value}")
