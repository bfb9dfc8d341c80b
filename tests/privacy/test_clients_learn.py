"""What clients learn of each other: rows `clients alone` of the pages on privacy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from federation import ALL, Federation
from flwr.app import RecordDict
from numpy.typing import NDArray
from public_helpers import make_grid, still_member

from flower_graph.apps.run import client_app
from flower_graph.method.registry import method_of
from flower_graph.ops import orthogonal_procrustes
from flower_graph.strategies.ppfl.secure_consensus import (
    SecureConsensus,
    first_points,
)

Exchanged = dict[int, tuple[RecordDict, RecordDict]]  # by node: what it was sent, what it answered


def rounds_of(name: str, supernodes: int) -> list[Exchanged]:
    """Run a method for two rounds; give what its clients were sent and answered in training."""
    config = ALL[name].load()
    grid = Federation(client_app(config, None), num_supernodes=supernodes)
    _built(config).start(grid, num_rounds=2, timeout=5.0)
    trained = [pair for pair in grid.exchanged if pair[0].metadata.message_type == "train"]
    return [
        {
            sent.metadata.dst_node_id: (sent.content, reply.content)
            for sent, reply in trained[first : first + supernodes]
        }
        for first in range(0, len(trained), supernodes)
    ]


def _built(config: Any) -> Any:
    return method_of(config).build_strategy(config, None)


def flat(content: RecordDict) -> NDArray[np.float64]:
    """Lay all arrays of a message in one line."""
    arrays = [
        a.numpy().ravel() for record in content.array_records.values() for a in record.values()
    ]
    return np.concatenate(arrays).astype(np.float64)


def test_of_two_supernodes_each_learns_the_others_models_from_the_mean() -> None:
    first, second = rounds_of("fedgls", 2)
    one, other = first
    weight = {
        node: float(reply.metric_records["metrics"]["num-examples"])  # type: ignore[arg-type]
        for node, (_, reply) in first.items()
    }
    mean, own = flat(second[one][0]), flat(first[one][1])
    found = (mean * sum(weight.values()) - own * weight[one]) / weight[other]
    assert np.allclose(found, flat(first[other][1]), atol=1e-5)
    assert not np.allclose(found, own, atol=1e-3)


def test_users_are_sent_nobody_elses_vector() -> None:
    first, second = rounds_of("nfedgnn", 3)
    for node in second:
        sent = {row.tobytes() for row in _rows(second[node][0])}
        others = [row for other in first if other != node for row in _rows(first[other][1])]
        assert sent
        assert not sent & {row.tobytes() for row in others}


def _rows(content: RecordDict) -> NDArray[Any]:
    rows: NDArray[Any] = content.array_records["arrays"]["relay"].numpy()
    return rows


@pytest.mark.parametrize("secure", [False, True])
def test_of_two_clients_each_learns_the_others_embeddings_but_for_a_turn(secure: bool) -> None:
    """In the clear from its own means, in the secure form from the common one."""
    chance = np.random.default_rng(0)
    vectors = [chance.normal(size=(5, 3)) for _ in range(2)]
    members = [still_member(i, rows.tolist(), range(5)) for i, rows in enumerate(vectors)]
    grid = make_grid(members, 2, secure=secure)
    strategy: Any = SecureConsensus(dropout=0.0) if secure else _built(ALL["deepwalk"].load())
    strategy.start(grid, num_rounds=1, timeout=5.0)
    if secure:  # all know the first points, which it turned to itself
        own = vectors[0] @ orthogonal_procrustes(vectors[0], first_points(0, 5, 3))
        mean = strategy.mean.rows
    else:
        own, mean = vectors[0], strategy.clients.targets[0]
    other = 2 * mean - own
    assert np.allclose(other @ other.T, vectors[1] @ vectors[1].T, atol=1e-3)
