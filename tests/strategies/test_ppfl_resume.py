"""What of PPFL-GNN's checkpoints no other method has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from public_helpers import toy_members

from flower_graph.client.adaptor import make_client_app
from flower_graph.report.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.procrustes_alignment.secure_consensus import (
    ACTIONS,
    SecureConsensus,
    SecureConsensusClient,
)
from flower_graph.strategies.procrustes_alignment.strategy import (
    ProcrustesAlignment,
    PublicNodeClient,
)

MEMBERS = toy_members(6)


def silent_once(message: Message, context: Context, call_next: Any) -> Message:
    """Let one SuperNode fail in round 4, before it does anything."""
    about = message.metadata
    if (about.message_type, about.group_id) == ("train", "4"):
        assert context.node_config["partition-id"] != 1, "away"
    return call_next(message, context)  # type: ignore[no-any-return]


def run(folder: Path, kind: Any, client: Any, rounds: int, *, resume: bool = False) -> Any:
    def client_fn(context: Context) -> Any:
        part = int(context.node_config["partition-id"])
        return client(context, MEMBERS[2 * part :][:2], checkpoint_dir=folder)

    app = make_client_app(client_fn, actions=ACTIONS, mods=[silent_once])
    strategy, reports = kind(checkpoint_dir=folder, checkpoint_every=2), list[RoundReport]()
    grid = InProcessGrid(app, num_supernodes=3)
    strategy.start(grid, num_rounds=rounds, timeout=0.5, on_round=reports.append, resume=resume)
    return strategy, reports


def test_who_did_not_answer_saves_in_an_exchange_of_its_own(tmp_path: Path) -> None:
    pairs = ProcrustesAlignment, PublicNodeClient
    whole, reports = run(tmp_path / "whole", *pairs, 6)
    assert reports[3].answered == 4
    run(tmp_path / "cut", *pairs, 4)
    assert checkpoint.complete_rounds(tmp_path / "cut") == [2, 4]
    resumed, later = run(tmp_path / "cut", *pairs, 6, resume=True)
    assert [report.loss for report in later] == [report.loss for report in reports[4:]]
    for name, value in whole.weights().items():
        np.testing.assert_array_equal(resumed.weights()[name], value)


def test_keys_are_in_no_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, SecureConsensus, SecureConsensusClient, 3)
    names = {
        name
        for path in tmp_path.rglob("client-*.safetensors")
        for name in checkpoint.load_client(path)
    }
    kept = {f"model.{k}.{name}" for k in range(6) for name in ("vectors", "rounds")}
    assert names == kept | {"clients"} | {str(k) for k in range(6)}
