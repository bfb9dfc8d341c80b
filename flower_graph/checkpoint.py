"""Checkpoints: a folder per round, written whole or not at all; the last two are kept.

``round-000100/client-0.safetensors`` is written by each client, ``round-000100/server.pt`` by the
server after all of them answered, so a folder with a server file is complete. Nothing here can
run code when it is read: safetensors, and ``torch.load`` with ``weights_only``.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from flower_graph.errors import CheckpointError

KEPT = 2


def check(folder: Path | None, every: int) -> None:
    """Refuse impossible settings: every how many rounds to save (0: never), and where."""
    if every < 0:
        raise ValueError(f"checkpoint_every: {every} is not at least 0")
    if every and folder is None:
        raise ValueError(f"checkpoint_every: {every} needs a checkpoint_dir")


def round_folder(folder: Path, server_round: int) -> Path:
    """Return the folder of one round's checkpoint."""
    return folder / f"round-{server_round:06d}"


def save_client(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a client's tensors, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part)
    os.replace(part, path)


def load_client(path: Path) -> dict[str, Tensor]:
    """Read a client's tensors; ``CheckpointError`` if there are none or they are damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def save_server(folder: Path, server_round: int, state: dict[str, Any]) -> None:
    """Write the server's state, which completes the round's checkpoint, and drop old rounds."""
    path = round_folder(folder, server_round) / "server.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(state, part)
    os.replace(part, path)
    for old in complete_rounds(folder)[:-KEPT]:
        shutil.rmtree(round_folder(folder, old), ignore_errors=True)


def load_server(folder: Path, server_round: int) -> dict[str, Any]:
    """Read the server's state of one round; ``CheckpointError`` if it is damaged."""
    path = round_folder(folder, server_round) / "server.pt"
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load has no error of its own for a damaged file
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return dict(state)


def complete_rounds(folder: Path) -> list[int]:
    """Return the rounds with a complete checkpoint, oldest first."""
    names = [path.parent.name for path in folder.glob("round-*/server.pt")]
    return sorted(int(m[1]) for name in names if (m := re.fullmatch(r"round-(\d+)", name)))


def last_round(folder: Path) -> int:
    """Return the last round with a complete checkpoint; ``CheckpointError`` if there is none."""
    rounds = complete_rounds(folder)
    if not rounds:
        raise CheckpointError(f"{folder}: no complete checkpoint is there to resume from")
    return rounds[-1]
