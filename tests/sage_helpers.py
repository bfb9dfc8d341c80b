"""Tiny ego-networks, odd ones among them, and runs in process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from graph_helpers import dealt

from flower_graph.data.graph import EgoNetwork
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fed_sage import strategy as strategy_module
from flower_graph.strategies.fed_sage.strategy import LocalSage, SageClient
from flower_graph.strategies.fedscem.config import EgoSettings


@pytest.fixture(autouse=True)
def few_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let generators take three steps, alone and together, where this is imported."""
    monkeypatch.setattr(strategy_module, "GENERATOR_EPOCHS", 3)


CLASSES, FEATURES = 3, 8
SETTINGS = EgoSettings(FEATURES, CLASSES, hidden=6, learning_rate=0.02, seed=5)


def ring(client: int, n: int, *, edges: bool = True, labelled: bool = True) -> EgoNetwork:
    """A ring whose classes lie in stretches; every third node tests, the next one validates."""
    draw = torch.Generator().manual_seed(100 + client)
    place = torch.arange(n)
    y = place * CLASSES // n
    x = (torch.rand(n, FEATURES, generator=draw) < 0.2).float()
    x[place, y] = 1.0
    links = torch.stack([place, (place + 1) % n])[:, : n if n > 2 and edges else 0]
    split = place % 4
    nothing = torch.zeros(n, dtype=torch.bool)
    return EgoNetwork(
        client=client,
        nodes=place + 10 * client,
        edge_index=torch.cat([links, links.flip(0)], 1),
        hidden_edges=None,
        x=x,
        y=y,
        train_mask=(split < 2) if labelled else nothing,
        val_mask=(split == 2) if labelled else nothing,
        test_mask=(split == 3) if labelled else nothing,
    )


def networks() -> list[EgoNetwork]:
    """Usual clients, and one of one node, one without edges, one without labels."""
    return [
        ring(0, 12),
        ring(3, 1),
        ring(4, 9),
        ring(7, 6, edges=False),
        ring(8, 8, labelled=False),
        ring(9, 16),
    ]


def new_client(egos: list[EgoNetwork], settings: EgoSettings = SETTINGS, **how: Any) -> SageClient:
    context = Context(1, 1, {}, RecordDict(), {})
    return SageClient(context, egos, settings, **{"averages": True, **how})


def learners_of(client: SageClient) -> list[Any]:
    return client._state.look()


@dataclass
class SageOutcome:
    strategy: LocalSage
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def figures(self) -> torch.Tensor:
        names = ("loss", "train_accuracy", "val_accuracy", "test_accuracy", "asked", "answered")
        return torch.tensor([[getattr(r, name) for name in names] for r in self.reports])


def run_sage(
    strategy: type[LocalSage] = LocalSage,
    *,
    rounds: int = 4,
    supernodes: int = 2,
    egos: list[EgoNetwork] | None = None,
    client: Callable[..., Any] = SageClient,
    settings: EgoSettings = SETTINGS,
) -> SageOutcome:
    outcome = SageOutcome(strategy(settings))
    made = partial(client, settings=settings, averages=strategy.averages)
    app = dealt(made, egos or networks())
    grid = InProcessGrid(app, num_supernodes=supernodes)
    outcome.strategy.start(grid, num_rounds=rounds, timeout=5, on_round=outcome.reports.append)
    return outcome
