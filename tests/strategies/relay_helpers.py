"""Small graphs, runs in process, and the method written densely."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from flwr.app import Context
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data

from flower_graph import NodeClient, SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.models import build_server_model
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator, seeded
from flower_graph.simulation import InProcessGrid

CLASSES, FEATURES = 3, 8
# Of six rounds: (1 + cos) / 2 of so many parts of half a turn; the first of ten parts is one round
WAVE = [[(1 + math.cos(math.pi * k / rounds)) / 2 for k in range(rounds)] for rounds in (6, 5)]
RATES = {"constant": [1.0] * 6, "cosine": WAVE[0], "warmup-cosine": [1.0, *WAVE[1]]}


def small_graph(n: int = 12, seed: int = 0) -> Data:
    """A ring with chords inside the classes; every third node trains, validates or tests."""
    draw = torch.Generator().manual_seed(seed)
    place = torch.arange(n)
    y = place % CLASSES
    x = (torch.rand(n, FEATURES, generator=draw) < 0.3).float()
    x[place, y] = 1.0  # no user without features, and something to learn
    one_way = torch.cat(
        [torch.stack([place, (place + 1) % n]), torch.stack([place, (place + 3) % n])], 1
    )
    edge_index = torch.cat([one_way, one_way.flip(0)], 1)
    masks = {
        f"{name}_mask": (place // CLASSES) % 3 == part
        for part, name in enumerate(("train", "val", "test"))
    }
    return Data(x=x, edge_index=edge_index, y=y, **masks)


def assigned(data: Data, context: Context) -> tuple[Tensor, Tensor]:
    """Deal users in turn, unlike ``apps.common.share``: the numbers of a client have gaps."""
    part, parts = (int(context.node_config[k]) for k in ("partition-id", "num-partitions"))
    users = torch.arange(part, data.num_nodes, parts)
    return data.x[users], users


def client_app(data: Data, *, mods: Any = None, train_mods: Any = None, **options: Any) -> Any:
    def client_fn(context: Context) -> NodeClient:
        return NodeClient(context, *assigned(data, context), **options)

    return make_client_app(client_fn, mods=mods, train_mods=train_mods)


def strategy_for(
    data: Data, model: str = "gcn", *, kind: Any = SplitGradientRelay, **options: Any
) -> Any:
    settings: dict[str, Any] = {"reg_weight": 1.0, "learning_rate": 0.05, "seed": 3, **options}
    dropout = settings.pop("dropout", 0.5)
    server = build_server_model(
        model, hidden=4, heads=2, classes=CLASSES, dropout=dropout, seed=settings["seed"]
    )
    return kind(data, server, latent_size=server.latent_size, **settings)


@dataclass
class Outcome:
    """What a run left."""

    strategy: SplitGradientRelay
    reports: list[RoundReport] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]

    @property
    def figures(self) -> list[tuple[float, ...]]:
        """Everything that a round's report says of the model."""
        names = ("loss", "cross_entropy", "regulariser", "train_accuracy", "val_accuracy")
        names += ("test_accuracy", "asked", "answered")
        return [tuple(getattr(report, name) for name in names) for report in self.reports]

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.strategy.weights()


def run(
    data: Data,
    *,
    rounds: int = 5,
    supernodes: int = 2,
    grid: InProcessGrid | None = None,
    model: str = "gcn",
    stop_at: int = 0,
    resume: bool = False,
    **options: Any,
) -> Outcome:
    """Run the strategy; `options` are its arguments. `stop_at` presses Ctrl-C after that round."""
    outcome = Outcome(strategy_for(data, model, **options))
    grid = grid or InProcessGrid(client_app(data), num_supernodes=supernodes)

    def on_round(report: RoundReport) -> None:
        outcome.reports.append(report)
        if report.round == stop_at:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"timeout": 5, "on_round": on_round, "resume": resume}
    with nullcontext() if not stop_at else pytest.raises(KeyboardInterrupt):
        outcome.strategy.start(grid, num_rounds=rounds, **how)
    return outcome


def same_weights(left: Outcome, right: Outcome) -> bool:
    return left.weights.keys() == right.weights.keys() and all(
        torch.equal(left.weights[name], right.weights[name]) for name in left.weights
    )


# The method, written densely ----------------------------------------------------------------


def asked_users(n: int, participation: float, seed: int, server_round: int) -> Tensor:
    if participation == 1:
        return torch.arange(n)
    draw = generator(seed, "participants", server_round)
    return torch.randperm(n, generator=draw)[: max(1, round(participation * n))].sort().values


@dataclass
class Dense:
    """Algorithm 1 with a full matrix per user and loops."""

    data: Data
    model: torch.nn.Module
    first_weight: Tensor  # [f, h], or [f + 1, h] with a bias
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    schedule: str = "constant"
    gradient_norm: float = 0.0
    reg_weight: float = 1.0
    average_every: int = 0
    average_over: str = "holders"
    participation: float = 1.0
    seed: int = 3

    def __post_init__(self) -> None:
        n, (f, h) = self.data.num_nodes, self.first_weight.shape
        self.bias = f > self.data.x.shape[1]
        ones = torch.ones(n, int(self.bias))
        self.x = torch.cat([self.data.x, ones], 1)
        self.weight = [self.first_weight.clone() for _ in range(n)]
        self.adam = [torch.optim.Adam([w], **self._options()) for w in self.weight]
        self.latent = torch.zeros(n, h)
        self.known = torch.zeros(n, dtype=torch.bool)
        self.waiting: dict[int, Tensor] = {}
        self.mean: Tensor | None = None
        self.lacks_mean: set[int] = set()
        self.optimizer = torch.optim.Adam(self.model.parameters(), **self._options())

    def _options(self) -> dict[str, float]:
        return {"lr": self.learning_rate, "weight_decay": self.weight_decay}

    def round(self, number: int) -> float:
        users = asked_users(len(self.weight), self.participation, self.seed, number).tolist()
        for i in users:
            self._take_mean(i)
            if i in self.waiting:
                self.weight[i].grad = torch.outer(self.x[i], self.waiting.pop(i))
                self._step(self.adam[i], number - 1)
            self.latent[i] = self.x[i] @ self.weight[i]
            self.known[i] = True
        loss, gradient = self._server(number)
        self.waiting |= {i: gradient[i] for i in users}
        if self.average_every and number % self.average_every == 0:
            self._average(users)
        return loss

    def _step(self, optimizer: torch.optim.Adam, number: int) -> None:
        optimizer.param_groups[0]["lr"] = self.learning_rate * RATES[self.schedule][number - 1]
        optimizer.step()

    def _rows(self, i: int) -> Tensor:
        if self.average_over == "all":
            return torch.ones(self.x.shape[1], dtype=torch.bool)
        rows = self.x[i] != 0
        if self.bias:
            rows[-1] = False
        return rows

    def _take_mean(self, i: int) -> None:
        if self.mean is None or i not in self.lacks_mean:
            return
        rows = self._rows(i) & ~self.mean.isnan().any(1)
        self.weight[i][rows] = self.mean[rows]
        self.lacks_mean.discard(i)

    def _average(self, users: list[int]) -> None:
        total = torch.zeros_like(self.first_weight, dtype=torch.float64)
        count = torch.zeros(total.shape[0], 1)
        for i in users:
            rows = self._rows(i)
            total[rows] += self.weight[i][rows].double()
            count[rows] += 1
        self.mean = (total / count).float()
        self.lacks_mean = set(range(len(self.weight)))

    def _server(self, number: int) -> tuple[float, Tensor]:
        edges = self.data.edge_index
        edges = edges[:, self.known[edges[0]] & self.known[edges[1]]]
        latent = self.latent.clone().requires_grad_()
        self.model.train()
        with seeded(torch.device("cpu"), self.seed, "server-dropout", number):
            logits = self.model(latent, edges)
        train = self.data.train_mask & self.known
        loss = functional.cross_entropy(logits[train], self.data.y[train])
        if edges.numel():
            apart = (latent[edges[0]] - latent[edges[1]]).square().sum()
            neighbourhoods = edges.shape[1] + len(latent)  # each user is in its own
            loss = loss + self.reg_weight * apart / neighbourhoods
        self.optimizer.zero_grad()
        loss.backward()
        assert latent.grad is not None
        gradients = [*[p.grad for p in self.model.parameters() if p.grad is not None], latent.grad]
        length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        if 0 < self.gradient_norm < length:
            for gradient in gradients:
                gradient *= self.gradient_norm / length
        self._step(self.optimizer, number)
        return loss.item(), latent.grad
