"""A server that tries every lie on the clients of a run, which goes on as if it had not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import ALL, Setup
from flwr.app import Context
from lying_grid import FEDSCEM, SIGNED, SUMS, Lie, LyingGrid, unrefused
from party_helpers import write_keys

from flower_graph.apps.run import client_app, with_registry
from flower_graph.client.adaptor import make_client_app
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.sum.service import SecureSum, Summed
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange


class Numbered(SecureSumClient):
    def vectors(self, config: dict[str, Any]) -> dict[int, Any]:
        return {client: np.array([client, 1.0]) for client in self.clients}


def test_every_lie_about_a_sum_is_refused_and_the_sum_is_right(tmp_path: Path) -> None:
    registry, keys = write_keys(6, tmp_path)

    def client_fn(context: Context) -> Numbered:
        place = int(context.node_config["partition-id"])
        context.node_config |= {"identity-key": str(keys[place]), "registry": str(registry)}
        return Numbered(context, [2 * place, 2 * place + 1])

    grid = LyingGrid(InProcessGrid(make_client_app(client_fn), num_supernodes=6))
    exchange: Any = Exchange(grid)  # type: ignore[arg-type]
    secure = SecureSum(exchange, limit=1000.0, server=PartySums(registry))
    for server_round in (1, 2):
        summed = secure.sum(server_round, 2)
        assert isinstance(summed, Summed)
        assert summed.values.tolist() == [66.0, 12.0]
    assert unrefused(grid.said) == {}
    assert grid.said[SIGNED] is None  # it could have been so: what it signed opens nothing


# A node that masks a vector for the server's lie has had its turn: PPFL-GNN's notes that at once.
PPFL = tuple(lie for lie in SUMS if lie.kind != "other partners ready")


@pytest.mark.parametrize(
    ("setup", "lies"),
    [
        (ALL["fedscem"].with_("strategy.trust=malicious-server", "strategy.dropout=0.3"), FEDSCEM),
        pytest.param(ALL["deepwalk, secure, untrusted"], PPFL, marks=pytest.mark.slow),
    ],
    ids=["fedscem", "deepwalk"],
)
def test_every_lie_to_a_method_is_refused_and_it_learns_as_if_nobody_had_lied(
    setup: Setup, lies: Sequence[Lie]
) -> None:
    config, losses = setup.load(), list[list[float]]()
    honest, other = (
        InProcessGrid(client_app(config, None), num_supernodes=setup.supernodes) for _ in range(2)
    )
    lying = LyingGrid(other, lies)
    for grid in (honest, lying):
        strategy: Any = method_of(config).build_strategy(with_registry(config, grid), None)
        reports: list[RoundReport] = []
        strategy.start(grid, num_rounds=2, timeout=5.0, on_round=reports.append)
        losses.append([report.loss for report in reports])
    assert losses[0] == losses[1]
    assert unrefused(lying.said, lies) == {}
