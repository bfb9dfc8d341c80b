"""Toy clients for PPFL-GNN's tests: models whose every number is known."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import Federation, Tells, honest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from graph_helpers import Outcome
from torch import Tensor, nn

from flower_graph.client.adaptor import make_client_app
from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.data.folders.party import assigned
from flower_graph.errors import NoClientsError, RefusedError
from flower_graph.flower_compat import ClientAppCallable, Mod
from flower_graph.simulation import InProcessGrid
from flower_graph.storage.files import IN_PROCESS
from flower_graph.strategies.ppfl.algorithm import FloatArray, IntArray
from flower_graph.strategies.ppfl.client import (
    EmbeddingClient,
    PublicNodeClient,
    SecureConsensusClient,
)
from flower_graph.strategies.ppfl.strategy import ProcrustesAlignment, SecureConsensus


class ToyModel(nn.Module):
    """Vectors that targets replace and that turn a little every round: a model with a state."""

    vectors: Tensor
    rounds: Tensor

    def __init__(self, start: FloatArray) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.from_numpy(start.copy()))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.int64))

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        if targets is not None:
            self.vectors[torch.from_numpy(rows)] = torch.from_numpy(targets)
        angle = torch.tensor(0.1 * server_round)
        turn = torch.eye(self.vectors.shape[1])
        turn[0, 0] = turn[1, 1] = angle.cos()
        turn[0, 1], turn[1, 0] = angle.sin(), -angle.sin()
        self.vectors = self.vectors @ turn + 0.01 * self.vectors.flip(0)
        self.rounds += 1
        return float(self.vectors.square().mean())

    def embed(self) -> FloatArray:
        return self.vectors.numpy().copy()


def still(vectors: FloatArray) -> Any:
    """Make a model whose vectors never change, and that has no state to keep."""
    return SimpleNamespace(learn=lambda *_: 0.5, embed=lambda: vectors)


def toy_judge(embeddings: FloatArray, server_round: int, is_last: bool) -> dict[str, float]:
    found = {"val": min(server_round, 8) / 8, "test": len(embeddings) / 8}
    return found | ({"mlp-test": 0.25} if is_last else {})


def toy_members(count: int = 4, dimension: int = 3) -> list[EmbeddingClient]:
    """Clients of six nodes each; ids 10, 11, 12 are public at all, and client 0 lacks 12."""
    members = []
    for number in range(count):
        own = [100 * number + place for place in range(50, 53)]
        nodes = np.array([10, *own, 11, 12 if number else 13])
        rows = np.array([0, 4, 5] if number else [4, 0])
        start = np.random.default_rng(number).normal(size=(6, dimension)).astype(np.float32)
        members.append(
            EmbeddingClient(number, nodes, rows, dimension, partial(ToyModel, start), toy_judge)
        )
    return members


def still_member(
    number: int, vectors: Sequence[Sequence[float]], ids: Sequence[int]
) -> EmbeddingClient:
    """A client whose nodes are all public and never move."""
    values, nodes = np.array(vectors, np.float32), np.array(ids)
    rows, width = np.arange(nodes.size), values.shape[1]
    return EmbeddingClient(number, nodes, rows, width, partial(still, values))


def make_grid(
    members: Sequence[EmbeddingClient],
    supernodes: int,
    *,
    secure: bool = False,
    distrusts: bool = False,
    mods: list[Mod] | None = None,
    tells: Tells = honest,
    **client: Any,
) -> Federation:
    """Give members to SuperNodes; in the secure form mods see all messages, else those of train."""
    kind: Any = SecureConsensusClient if secure else PublicNodeClient

    def client_fn(context: Context) -> PublicNodeClient:
        part = int(context.node_config["partition-id"])
        hosted = assigned(part, supernodes, len(members))
        trust = {"trust": trust_of(context)} if distrusts else {}
        return kind(context, members[hosted.start : hosted.stop], **client, **trust)

    around: dict[str, Any] = {"mods" if secure else "train_mods": mods}
    app = make_client_app(client_fn, **around)
    return Federation(app, num_supernodes=supernodes, state_dir=IN_PROCESS, tells=tells)


def run(
    members: Sequence[EmbeddingClient],
    *,
    rounds: int = 3,
    supernodes: int | None = None,
    strategy: ProcrustesAlignment | None = None,
    **client: Any,
) -> Outcome:
    grid = make_grid(members, supernodes or len(members), **client)
    return start(grid, strategy or ProcrustesAlignment(), rounds=rounds)


def start(
    grid: InProcessGrid, strategy: ProcrustesAlignment, *, rounds: int = 4, skipped: bool = False
) -> Outcome:
    """Run a strategy over a grid; ``skipped``: all of its rounds are to be skipped."""
    outcome = Outcome(strategy, grid)
    with pytest.raises(NoClientsError) if skipped else nullcontext():
        outcome.run(rounds)
    return outcome


def make_distrusting(
    members: Sequence[EmbeddingClient], supernodes: int, **client: Any
) -> tuple[Federation, SecureConsensus]:
    """Make SuperNodes with keys of their own, and a server that they do not trust."""
    grid = make_grid(members, supernodes, secure=True, distrusts=True, **client)
    hosted = [assigned(part, supernodes, len(members)) for part in range(supernodes)]
    registry = throwaway_parties(grid.run.run_id, hosted)
    return grid, SecureConsensus(registry=registry, min_nodes=5)


def run_secure(
    members: Sequence[EmbeddingClient],
    *,
    rounds: int = 4,
    strategy: SecureConsensus | None = None,
    **how: Any,
) -> Outcome:
    return run(members, rounds=rounds, strategy=strategy or SecureConsensus(), secure=True, **how)


def silent(numbers: set[int], rounds: set[int]) -> Mod:
    """Make a mod: these SuperNodes fail in these rounds."""

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        here = int(context.node_config["partition-id"]) in numbers
        if here and int(message.metadata.group_id) in rounds:
            raise RefusedError("away")
        return call_next(message, context)

    return mod


def bytes_of(content: RecordDict) -> bytes:
    """Lay everything that a message holds in one line."""
    parts: list[bytes] = []
    for record in content.values():
        for key, value in record.items():
            items = value if isinstance(value, list) else [value]
            if isinstance(record, ArrayRecord):
                items = [value.numpy().tobytes()]
            elif items and isinstance(items[0], float):
                items = [*items, np.array(items).tobytes(), np.array(items, np.float32).tobytes()]
            items = [key, *items, str(value)]
            parts += [one if isinstance(one, bytes) else str(one).encode() for one in items]
    return b"|".join(parts)
