"""Deletes an old run, so that a new run can use its folder; other files stay."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from flower_graph.config.common import CHECKPOINTS
from flower_graph.config.foreign import CONFIG, DATA, RUN_OF, is_of_run
from flower_graph.errors import OutputError
from flower_graph.storage.files import FolderLock, holds_something
from flower_graph.storage.reading import MOST_SETTINGS, read_text, reading
from flower_graph.storage.writing import remove, remove_empty, remove_folder, saying

# What a run leaves in its folder, and what it had begun to write when it was killed
WRITTEN = (
    *(CONFIG, DATA, "metrics.jsonl", "result.json", "weights.safetensors", "outputs.json"),
    *("predictions.*", "embeddings.npz", "links.npz", "model.*", "models.*", "measured.bin"),
    *("clients.csv", "curves.csv", "*.png", "flower.log", "trackers.json", ".*.[0-9]*"),
    *(".running", ".probe", ".partial-*", CHECKPOINTS, "clients", "embeddings", "rows"),
    *("snapshots", "tensorboard", "wandb"),
)
SUMMARY = "summary.json"  # of several seeds


def runs_to_clear(folder: Path) -> list[Path]:
    """Return the folders of the runs in a folder: itself, or one for each seed, or none.

    ``OutputError`` if the folder is no run's, or contains a file that no run writes.
    """
    if not folder.is_dir():
        return []
    seeds = sorted(one for one in folder.glob("seed-*") if re.fullmatch(r"seed-\d+", one.name))
    for run in seeds or [folder]:
        if run.is_symlink() or not run.is_dir() or (holds_something(run) and not _is_run(run)):
            raise _kept(folder, f"{run.name} is not a run's")
        _refuse_others(run, WRITTEN)
    if seeds:
        _refuse_others(folder, [SUMMARY, *(one.name for one in seeds)])
    return seeds or [folder]


def clear_runs(folder: Path) -> None:
    """Delete the runs in a folder, but not the folder; raises as ``runs_to_clear`` does."""
    for run in runs_to_clear(folder):
        with saying(run):
            lock = FolderLock(run)
            try:
                for path in run.iterdir():
                    is_folder = path.is_dir() and not path.is_symlink()
                    remove_folder(path) if is_folder else remove(path)
            finally:
                lock.release()
            if run != folder:
                remove_empty(run)
    remove(folder / SUMMARY)


def _is_run(folder: Path) -> bool:
    file = folder / CONFIG
    with reading(file, OutputError):
        return is_of_run(str(file)) and read_text(file, MOST_SETTINGS).startswith(RUN_OF)


def _refuse_others(folder: Path, known: Sequence[str]) -> None:
    for path in folder.iterdir():
        if not any(fnmatch(path.name, name) for name in known):
            raise _kept(folder, f"no run writes {path.name!r}")


def _kept(folder: Path, why: str) -> OutputError:
    return OutputError(f"output folder {folder}: {why}, so it is not overwritten; choose another")
