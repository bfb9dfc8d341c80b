"""What a server that deviates gets from clients that trust it: the pages on privacy say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from federation import ALL, Federation
from public_helpers import run_secure, still_member

from flower_graph.apps.run import client_app
from flower_graph.errors import NoClientsError
from flower_graph.method.registry import method_of
from flower_graph.secure.sum.service import entries_of
from flower_graph.strategies.ppfl.messages import IntArray
from flower_graph.strategies.ppfl.secure_consensus import CommonMean, Floats, SecureConsensus


class LaidApart(CommonMean):
    """Gives each client places of its own in the sum, and keeps what lies there."""

    def choose(
        self,
        nodes: IntArray,
        ids: Mapping[int, IntArray],
        there: Mapping[int, Iterable[int]],
        dimension: int,
    ) -> None:
        clients = [client for here in there.values() for client in here]
        ends = np.cumsum([ids[client].size for client in clients])
        self.slots = {
            client: np.arange(end - ids[client].size, end)
            for client, end in zip(clients, ends, strict=True)
        }
        self.nodes = np.arange(ends[-1])
        self.rows = np.zeros((ends[-1], dimension), np.float32)

    def take(self, total: Floats, contributors: Iterable[int]) -> None:
        self.read = {c: total.reshape(self.rows.shape)[slots] for c, slots in self.slots.items()}


def test_who_lays_out_the_secure_consensus_reads_every_client_out_of_one_sum() -> None:
    """Rows come turned, and whatever compares them with each other is as it was."""
    chance = np.random.default_rng(0)
    vectors = [chance.normal(size=(5, 3)) for _ in range(4)]
    strategy = SecureConsensus()
    strategy.mean = lying = LaidApart(0.3)
    members = [still_member(i, rows.tolist(), range(5)) for i, rows in enumerate(vectors)]
    run_secure(members, rounds=1, strategy=strategy)
    assert lying.read.keys() == {0, 1, 2, 3}
    for client, rows in lying.read.items():
        assert np.allclose(rows @ rows.T, vectors[client] @ vectors[client].T, atol=1e-3)


@pytest.mark.parametrize("lowered", ["strategy.alignment=plain", "strategy.aggregation=plain"])
def test_clients_of_fedscem_send_nothing_in_the_clear_that_the_runs_config_hides(
    lowered: str,
) -> None:
    """Settings travel in the server's messages too; the run's config says `psi` and `masked`."""
    setup = ALL["fedscem"].with_("strategy.dropout=0.1")
    hidden, asked = setup.load(), setup.load(lowered)
    grid = Federation(client_app(hidden, None), num_supernodes=setup.supernodes)
    strategy: Any = method_of(asked).build_strategy(asked, None)
    with suppress(NoClientsError):
        strategy.start(grid, num_rounds=1, timeout=5.0)
    refused = [reply for _, reply in grid.exchanged if reply.has_error()]
    assert any("config has" in reply.error.reason for reply in refused)
    for request, reply in grid.exchanged:
        if reply.has_content():
            assert request.metadata.message_type != "train"
            assert "align-identities" not in entries_of(reply.content)
