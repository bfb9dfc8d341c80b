"""The models of one SuperNode's clients between two rounds.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Cohort, Tensors, placed_on
from flower_graph.ops.adam import Adam
from flower_graph.strategies.fedscem.algorithm import EgoGroup
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import first_model

FIRST = "gnn.first.weight"  # of which clients keep the rows of their features
# For each client: ``2 t - 1`` once it has trained for round ``t``, ``2 t`` once it has used its
# means. A repeated message, or a resumed run, does neither a second time.
STEPS = "steps"


class EgoCohort(Cohort):
    """All ego-networks of one SuperNode; ``tensors``: what lasts between rounds, if any did."""

    def __init__(
        self,
        egos: Sequence[ClientGraph],
        settings: EgoSettings,
        tensors: Tensors | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings, device = settings, torch.device(device)
        rate, decay = settings.learning_rate, settings.weight_decay
        super().__init__(
            first_model(settings),
            [placed_on(ego, device, is_dense=False) for ego in egos],
            tensors,
            lambda made: Adam(made.parameters(), lr=rate, weight_decay=decay),
            by_rows=(FIRST,),
        )
        never = torch.zeros(len(egos), dtype=torch.int32, device=device)
        self.tensors = {STEPS: never} | self.tensors

    @contextmanager
    def part(self, clients: Sequence[int] | None = None) -> Iterator[EgoGroup]:
        """Yield some clients, or all, as a group; the tensors then have its changes."""
        clients = self.clients if clients is None else clients
        if strange := sorted(set(clients).difference(self.graphs)):
            raise ValueError(f"clients {strange} are not among {self.clients}")
        with self.learners(sorted(clients, key=self._places.__getitem__)) as (learner,):
            yield EgoGroup(learner, self.settings)

    @torch.no_grad()
    def start_from(self, group: EgoGroup, weights: Tensor, *, replace: bool) -> None:
        """Begin with the server's model, flat; keep it, as ``proximal`` and inactive rows do."""
        held, plain = dict(group.module.named_parameters()), dict(self.module.named_parameters())
        parts = weights.split([parameter.numel() for parameter in plain.values()])
        took = partial(self.take_over, group.learner, replace=replace)
        group.proximal = self.settings.proximal
        group.begun = {
            name: took(name, held[name], part.view_as(one).to(one.device))
            for (name, one), part in zip(plain.items(), parts, strict=True)
        }

    def is_behind(self, clients: Sequence[int], step: int) -> bool:
        """Whether one of the clients has not come to a step yet (``STEPS``)."""
        places = [self._places[client] for client in clients]
        return bool((self.tensors[STEPS][places] < step).any())

    def note(self, clients: Sequence[int], step: int) -> None:
        self.tensors[STEPS][[self._places[client] for client in clients]] = step


def trained_alone(
    graph: ClientGraph, settings: EgoSettings, rounds: int, device: torch.device | str = "cpu"
) -> Iterator[EgoGroup]:
    """Train a graph on its own nodes alone; yield it after each round's step."""
    with EgoCohort([graph], settings, device=device).part() as group:
        for number in range(rounds):
            group.train(number)
            yield group


def train_alone(graph: NewGraph, settings: EgoSettings, rounds: int) -> Tensor:
    """Train a newcomer on its own nodes; return probabilities ``[n, k]`` of all."""
    bare = ClientGraph.bare(0, graph.x, graph.y, graph.edge_index)
    *_, group = trained_alone(replace(bare, train_mask=graph.trains), settings, rounds)
    return group.logits().softmax(1)
