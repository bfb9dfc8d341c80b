"""A process without Flower and Ray, and the saved models that are called there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
BEGIN = """
import sys
sys.modules["flwr"] = sys.modules["ray"] = None  # an import of them fails
"""
CALL = """
from importlib import import_module
from pathlib import Path
import torch
from flower_graph.outputs.files import read_models
folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt")
for name, client, method, x, edges, wanted in given:
    (one,) = [form for form in read_models(folder / name) if client in form.clients]
    place, _, kind = one.module.rpartition(".")
    model = getattr(import_module(place), kind)(**one.arguments)
    model.load_state_dict(one.state_dict(client))
    said = getattr(model.eval(), method)(x, edges)
    torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)
print(len(given), "models")
"""
# Folder of the model, client, method that is called with features and edges, what it gives
Given = tuple[str, int, str, Any, Any, Any]


def run_without_flower(code: str, *arguments: Path) -> str:
    """Run code in such a process; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def call_saved(folder: Path, given: list[Given]) -> None:
    """Call saved models in sub-folders as plain modules there: they give what is wanted."""
    torch.save(given, folder / "given.pt")
    assert run_without_flower(CALL, folder) == f"{len(given)} models\n"
