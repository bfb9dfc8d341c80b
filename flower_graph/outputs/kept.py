"""One folder of outputs during a run: measurements, and snapshots of good rounds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

from flower_graph.config.common import ALL, BEST
from flower_graph.outputs.figures import FigureLog, write_figures
from flower_graph.outputs.files import SAID, Snapshot, write_outputs
from flower_graph.outputs.messages import KeepRequest
from flower_graph.storage.checkpoint import round_folder, rounds_of
from flower_graph.storage.files import private_folder
from flower_graph.storage.writing import copy_file, move, remove, remove_folder, replaced

LOG = logging.getLogger(__name__)
SNAPSHOTS, CANDIDATE, LOG_FILE = "snapshots", "candidate", "measured.bin"
Take = Callable[[], Snapshot]


class KeptFolder:
    """The outputs of the clients of a SuperNode, or of the server.

    Until the end ``snapshots/round-N`` has the snapshot of round N. A run that is resumed from a
    checkpoint may need the best round of that time: such rounds are protected.
    """

    def __init__(self, folder: Path, save: str) -> None:
        self.folder, self._save = folder, save
        self.log = FigureLog(folder / LOG_FILE)

    def begin(self, server_round: int) -> None:
        """Make the folder; remove a stopped run's files after a round."""
        private_folder(self.folder)
        self.log.cut(server_round)

    def candidate(self, server_round: int, take: Take) -> None:
        """Keep a snapshot that the server may call the best; only the newest such."""
        snapshots = self.folder / SNAPSHOTS
        for old in snapshots.glob(f"{CANDIDATE}-*"):
            remove_folder(old)
        self._write(snapshots / f"{CANDIDATE}-{server_round}", take())

    def hold(self, request: KeepRequest, take: Take) -> None:
        """Keep the snapshots of the best round so far and of protected rounds."""
        snapshots, number = self.folder / SNAPSHOTS, request.server_round
        target, candidate = round_folder(snapshots, number), snapshots / f"{CANDIDATE}-{number}"
        remove_folder(target)
        if candidate.is_dir():
            move(candidate, target)
        else:
            self._write(target, take())
        for old in rounds_of(snapshots.glob("round-*")):
            if old not in (number, *request.protected):
                remove_folder(round_folder(snapshots, old))

    def figures(self, request: KeepRequest, traffic: dict[str, float]) -> None:
        """Write the measurements; ``traffic``: all clients' bytes since the last ones."""
        rows = self.log.read(request.server_round)
        if not rows.size:
            return
        is_last = rows["round"] == rows["round"].max()
        for way, count in traffic.items():
            rows[f"bytes-{way}"][is_last] += count / is_last.sum()
        at = {"last": request.server_round, "best": request.best_round}
        write_figures(self.folder, rows, at, request.every)

    def finish(self, request: KeepRequest, take: Take) -> str:
        """Write the final files; return the differences from the request, or nothing."""
        last, missing = request.server_round, ""
        wanted = request.best_round or last if request.keep == BEST else last
        held = round_folder(self.folder / SNAPSHOTS, wanted)
        if held.is_dir() and request.keep == BEST:
            for path in held.iterdir():
                copy_file(path, self.folder / path.name)
        else:
            if wanted != last:
                missing = f"round {wanted}, the best, is not held; what is kept is of round {last}"
                LOG.warning("%s: %s", self.folder, missing)
            self._write(self.folder, take())
        kept: dict[str, object] = {"run": request.run, "round": last if missing else wanted}
        kept |= {"last-round": last, "best-round": request.best_round}
        with replaced(self.folder / SAID) as stream:
            text = json.dumps(kept | {"keep": request.keep, "save": request.save}, indent=1)
            stream.write(f"{text}\n".encode())
        if not request.protected:  # otherwise the run may be resumed
            remove_folder(self.folder / SNAPSHOTS)
            remove(self.folder / LOG_FILE)
        return missing

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        models = snapshot.models if self._save == ALL else []
        write_outputs(folder, snapshot.predictions, models, *snapshot[2:])
