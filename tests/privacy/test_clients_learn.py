"""What clients learn of each other: rows `clients alone` of the pages on privacy."""

from typing import Any

import numpy as np
import pytest
from federation import ALL
from flwr.app import RecordDict
from numpy.typing import NDArray
from public_helpers import make_grid, still_member

from flower_graph.ops.procrustes import orthogonal_procrustes
from flower_graph.strategies.ppfl.algorithm import first_points
from flower_graph.strategies.ppfl.strategy import ProcrustesAlignment, SecureConsensus

Exchanged = dict[int, tuple[RecordDict, RecordDict]]  # by node: what it was sent, what it answered


def rounds_of(name: str, supernodes: int) -> list[Exchanged]:
    """Run a method for two rounds; give what its clients were sent and answered in training."""
    trained = [
        (sent.metadata.dst_node_id, (sent.content, reply.content))
        for sent, reply in ALL[name].whole("rounds=2", supernodes=supernodes).grid.exchanged
        if sent.metadata.message_type == "train"
    ]
    return [dict(trained[at : at + supernodes]) for at in range(0, len(trained), supernodes)]


def flat(content: RecordDict) -> NDArray[np.float64]:
    records = content.array_records.values()
    arrays = [array.numpy().ravel() for record in records for array in record.values()]
    return np.concatenate(arrays).astype(np.float64)


def relay(content: RecordDict) -> list[bytes]:
    return [row.tobytes() for row in content.array_records["arrays"]["relay"].numpy()]


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
    for node, (sent, _) in second.items():
        others = [row for other in first if other != node for row in relay(first[other][1])]
        assert relay(sent) and not set(relay(sent)) & set(others)


@pytest.mark.parametrize("secure", [False, True])
def test_of_two_clients_each_learns_the_others_embeddings_but_for_a_turn(secure: bool) -> None:
    """In the clear from its own means, in the secure form from the common one."""
    chance = np.random.default_rng(0)
    vectors = [chance.normal(size=(5, 3)) for _ in range(2)]
    members = [still_member(i, rows.tolist(), range(5)) for i, rows in enumerate(vectors)]
    grid = make_grid(members, 2, secure=secure)
    strategy: Any = SecureConsensus(dropout=0.0) if secure else ProcrustesAlignment()
    strategy.start(grid, num_rounds=1, timeout=5.0)
    if secure:  # all know the first points, which it turned to itself
        own = vectors[0] @ orthogonal_procrustes(vectors[0], first_points(0, 5, 3))
        mean = strategy.mean.rows
    else:
        own, mean = vectors[0], strategy.clients.targets[0]
    other = 2 * mean - own
    assert np.allclose(other @ other.T, vectors[1] @ vectors[1].T, atol=1e-3)
