"""nFedGNN, one user at a time, with PyG's layers and PyTorch's Adam: slow and plain.

"One Node Per User", Algorithm 1. ``Relay`` has a module for each user. ``OneNetwork`` is the form
with one first layer for all users: the whole network, trained in one place. First weights are
given, and whatever is drawn.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SimpleConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm


class GCN(nn.Module):
    """The server's half, ``A relu(A X' + b) W + c``."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.linear, self.spread = nn.Linear(hidden, classes), SimpleConv("sum")

    def forward(self, latent: Tensor, edges: Tensor) -> Tensor:
        """Return logits ``[n, c]``."""
        edges, weight = gcn_norm(edges, None, len(latent), add_self_loops=True)
        hidden = (self.spread(latent, edges, weight) + self.bias).relu()
        return self.linear(self.spread(hidden, edges, weight))  # type: ignore[no-any-return]


@dataclass
class Relay:
    """A model for each user: the gradient of a round is applied when the user is asked again."""

    data: Any  # PyG's Data
    model: nn.Module  # f_s(latent, edges)
    user_model: nn.Module  # f_u(x), of which each user gets a copy
    learning_rate: float = 0.05
    weight_decay: float = 5e-4
    reg_weight: float = 1.0  # lambda of equation 7
    gradient_norm: float = 0.0
    average_every: int = 0
    average_over: str = "holders"
    share: Callable[[int], float] = lambda number: 1.0  # of the learning rate, in a round
    # of the model's dropout, in a round
    draws: Callable[[int], AbstractContextManager[None]] = lambda number: nullcontext()

    def __post_init__(self) -> None:
        n = self.data.num_nodes
        self.users = [copy.deepcopy(self.user_model).eval() for _ in range(n)]
        self.optimisers = [self._adam(user.parameters()) for user in self.users]
        self.optimiser = self._adam(self.model.parameters())
        self.latent = torch.zeros_like(self.user_model(self.data.x)).detach()
        self.known = torch.zeros(n, dtype=torch.bool)
        self.waiting: dict[int, Tensor] = {}  # gradients of latent vectors
        self.mean: list[Tensor] = []  # by parameter
        self.lack_mean: set[int] = set()

    def _adam(self, parameters: Iterable[Tensor]) -> torch.optim.Adam:
        return torch.optim.Adam(parameters, self.learning_rate, weight_decay=self.weight_decay)

    def _step(self, optimiser: torch.optim.Adam, number: int) -> None:
        optimiser.param_groups[0]["lr"] = self.learning_rate * self.share(number)
        optimiser.step()

    def round(self, number: int, users: list[int]) -> float:
        """Run a round with some users; return its loss."""
        for i in users:
            self._take_mean(i)
            if i in self.waiting:  # lines 11 and 12, of the round before
                self.optimisers[i].zero_grad()
                self.users[i](self.data.x[i]).backward(self.waiting.pop(i))
                self._step(self.optimisers[i], number - 1)
            self.latent[i] = self.users[i](self.data.x[i]).detach()  # lines 5 and 6
            self.known[i] = True
        loss, gradient = self._server(number)
        self.waiting |= {i: gradient[i] for i in users}
        if self.average_every and number % self.average_every == 0:
            self._average(users)
        return loss

    def _server(self, number: int) -> tuple[float, Tensor]:
        """Equations 5 to 7 over the users that have answered, and lines 8 and 9."""
        edges, latent = self.data.edge_index, self.latent.clone().requires_grad_()
        edges = edges[:, self.known[edges[0]] & self.known[edges[1]]]
        self.model.train()
        with self.draws(number):
            logits = self.model(latent, edges)
        train = self.data.train_mask & self.known
        loss = functional.cross_entropy(logits[train], self.data.y[train])
        if edges.numel():
            apart = (latent[edges[0]] - latent[edges[1]]).square().sum()
            neighbourhoods = edges.shape[1] + len(latent)  # each user is in its own
            loss = loss + self.reg_weight * apart / neighbourhoods
        self.optimiser.zero_grad()
        loss.backward()
        if self.gradient_norm:
            nn.utils.clip_grad_norm_([*self.model.parameters(), latent], self.gradient_norm)
        self._step(self.optimiser, number)
        assert latent.grad is not None
        return loss.item(), latent.grad

    def _counts(self, i: int) -> list[Tensor]:
        """Which numbers of a user's parameters are averaged."""
        user, every = self.users[i], [*self.users[i].parameters()]
        if self.average_over == "all" or not isinstance(user, nn.Linear):
            return [torch.ones_like(one, dtype=torch.bool) for one in every]
        holds = (self.data.x[i] != 0).expand_as(user.weight)
        return [holds, *(torch.zeros_like(bias, dtype=torch.bool) for bias in every[1:])]

    @torch.no_grad()
    def _average(self, users: list[int]) -> None:
        everyone = [zip(self.users[i].parameters(), self._counts(i), strict=True) for i in users]
        self.mean, self.lack_mean = [], set(range(len(self.users)))
        for parameter in zip(*everyone, strict=True):
            total = sum(values.double() * counts for values, counts in parameter)
            self.mean.append((total / sum(counts.double() for _, counts in parameter)).float())

    @torch.no_grad()
    def _take_mean(self, i: int) -> None:
        if i in self.lack_mean:
            parts = zip(self.users[i].parameters(), self.mean, self._counts(i), strict=True)
            for values, mean, counts in parts:
                values.copy_(torch.where(counts & ~mean.isnan(), mean, values))
            self.lack_mean.discard(i)


class OneNetwork:
    """One user model for all users, ``A relu(A f_u(X) + b) W + c``, trained in one place."""

    def __init__(self, data: Any, user: nn.Module, model: nn.Module, rate: float, decay: float):
        self.data, self.user, self.model = data, user, model
        every = [*user.parameters(), *model.parameters()]
        self.optimiser = torch.optim.Adam(every, rate, weight_decay=decay)

    def epoch(self) -> float:
        """Take a step; return the loss before it."""
        data = self.data
        logits = self.model(self.user(data.x), data.edge_index)
        loss = functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.item()
