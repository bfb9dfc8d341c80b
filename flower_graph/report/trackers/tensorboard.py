"""TensorBoard: event files in the folder ``tensorboard`` of a run."""

from __future__ import annotations

from collections.abc import Mapping

from flower_graph.report.trackers.base import Subject
from flower_graph.storage.writing import make_folder

FOLDER = "tensorboard"


class TensorBoard:
    """A run in TensorBoard; ``tensorboard --logdir`` shows all runs and seeds below a folder."""

    identity = ""  # the run's folder says which it is

    def __init__(self, subject: Subject) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rounds that a resumed run does again replace those that were shown.
        again = subject.first_round if subject.first_round > 1 else None
        make_folder(subject.out / FOLDER)  # a link is refused
        self._writer = SummaryWriter(str(subject.out / FOLDER), purge_step=again)
        self._settings = {key: str(value) for key, value in subject.settings.items()}

    def log(self, server_round: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def finish(self, final: Mapping[str, float] | None) -> None:
        """End the record; the tab HPARAMS compares settings and final figures of runs."""
        if final is not None:
            named = {f"final/{name}": value for name, value in final.items()}
            self._writer.add_hparams(self._settings, named, run_name=".")
        self._writer.close()


def start(subject: Subject) -> TensorBoard:
    """Start the record of a run."""
    return TensorBoard(subject)
