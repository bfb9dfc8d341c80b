"""What a server that lies gets of PPFL-GNN's clients that do not trust it: refusals, and no sum."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from federation import Federation
from flwr.app import Array, Message
from graph_helpers import Outcome
from public_helpers import make_distrusting, run_secure, start, still_member, toy_members

from flower_graph.strategies.ppfl.algorithm import CommonMean, IntArray
from flower_graph.strategies.ppfl.strategy import SecureConsensus
from flower_graph.wire.keys import CONFIG, PUBLIC

COUNT = 7


def test_means_of_ones_own_for_each_are_in_the_masks_too() -> None:
    """Whoever is shown other hashes believes them, and is in no sum that can be read."""

    def told(*victims: int) -> Outcome:
        def tells(grid: Federation, sent: list[Message]) -> list[Message]:
            nodes = list(grid.contexts)
            for one in sent:
                entries: Any = one.content.get(CONFIG, {})
                if "claim-means" in entries and nodes.index(one.metadata.dst_node_id) in victims:
                    (record,) = one.content.array_records.values()
                    record[PUBLIC] = Array(record[PUBLIC].numpy()[::-1].copy())
                    hashes = np.frombuffer(entries["claim-means"], np.uint8).reshape(3, 32)
                    entries["claim-means"] = hashes[::-1].tobytes()
            return sent

        return start(*make_distrusting(toy_members(COUNT), COUNT, tells=tells), rounds=2)

    honest, outcome = told(), told(2)
    # The victim signs what it was told the sum is of, which is not what the others sign.
    rejected = outcome.reports[-1].rejected
    assert rejected and all("signature" in entry["reason"] for entry in rejected)
    found = outcome.weights["mean"].astype(np.float64)
    # Masks that do not go away: either words that are no sum, or numbers that say nothing.
    is_skipped = bool(outcome.reports[-1].skipped)
    assert is_skipped or np.abs(found - honest.weights["mean"]).min() > 1e-3


def test_who_cannot_be_in_the_sum_keeps_its_supernode_out_of_it() -> None:
    """A server may send means that push single clients out; others' rows would stand alone."""
    members = toy_members(2 * COUNT)
    members[5] = still_member(5, [[1e3, 0, 0]] * 3, [10, 11, 12])
    outcome = start(*make_distrusting(members, COUNT), rounds=1)
    assert outcome.strategy.contributors == [c for c in range(2 * COUNT) if c not in (4, 5)]
    (entry,) = outcome.reports[0].rejected
    assert "its SuperNode sends nothing" in entry["reason"]


class LaidApart(CommonMean):
    """Gives each client places of its own in the sum, and keeps what lies there."""

    def choose(self, nodes: IntArray, ids: Mapping[int, IntArray], dimension: int) -> None:
        ends = np.cumsum([own.size for own in ids.values()])
        of_clients = zip(ids.items(), ends, strict=True)
        self.slots = {client: np.arange(end - own.size, end) for (client, own), end in of_clients}
        self.nodes = np.arange(ends[-1])
        self.padded = np.zeros((ends[-1] + 1, dimension), np.float32)

    def take(self, total: Any, contributors: Iterable[int]) -> None:
        self.read = {c: total.reshape(self.rows.shape)[slots] for c, slots in self.slots.items()}


def test_who_lays_out_the_secure_consensus_reads_every_client_out_of_one_sum() -> None:
    """Rows come turned, and whatever compares them with each other is as it was."""
    chance = np.random.default_rng(0)
    vectors = [chance.normal(size=(5, 3)) for _ in range(4)]
    strategy = SecureConsensus()
    strategy.mean = lying = LaidApart()
    members = [still_member(i, rows.tolist(), range(5)) for i, rows in enumerate(vectors)]
    run_secure(members, rounds=1, strategy=strategy)
    assert lying.read.keys() == {0, 1, 2, 3}
    for client, rows in lying.read.items():
        assert np.allclose(rows @ rows.T, vectors[client] @ vectors[client].T, atol=1e-3)
