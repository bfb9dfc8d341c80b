"""Weights & Biases: as its environment variables say; without a network ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from flower_graph.report.trackers.base import PROJECT, Subject

LEAST_TOLD = {"WANDB_ERROR_REPORTING": "false"}  # reports of errors have paths


class WeightsAndBiases:
    """A run in Weights & Biases, in the project ``flower-graph``; seeds are one group."""

    def __init__(self, subject: Subject) -> None:
        for name, value in LEAST_TOLD.items():
            os.environ.setdefault(name, value)
        import wandb

        # By default the library sends the command, the machine's name and figures, code and output.
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
        )
        self.identity = subject.known_as or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.identity,
            name=subject.name,
            group=subject.group,
            config=dict(subject.settings),
            dir=str(subject.out),
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        # Its own steps only grow, and a resumed run does some rounds again.
        self._run.define_metric("*", step_metric="round")

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        self._run.log({"round": server_round, **figures})

    def finish(self, final: Mapping[str, float] | None) -> None:
        if final is not None:
            self._run.summary.update({f"final/{name}": value for name, value in final.items()})
        self._run.finish(exit_code=int(final is None))


def start(subject: Subject) -> WeightsAndBiases:
    """Start the record of a run, or go on in it."""
    return WeightsAndBiases(subject)
