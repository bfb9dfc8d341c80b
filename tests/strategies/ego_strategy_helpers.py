"""Runs of the embedding-averaging server in process: dealings, a grid with faults, an onlooker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from ego_helpers import SETTINGS, toy_egos
from federation import Federation
from flwr.app import Array, Context, Message
from graph_helpers import Outcome, dealt
from torch import Tensor

from flower_graph import EgoNetworkClient, MaskedEmbeddingAveraging
from flower_graph.data.graph import ClientGraph
from flower_graph.simulation import InProcessGrid
from flower_graph.storage.files import IN_PROCESS
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire.keys import SUMS, TOTAL

RESOLUTION = 2.0**-20  # so fine that 12 clients still fit into 64-bit words
FINE = {"limit": 32.0, "resolution": RESOLUTION}
Weights = dict[int, Tensor]  # client to all of its weights
Mod = Callable[[Message, Context, Callable[..., Message]], Message]


def seven_egos() -> list[ClientGraph]:
    """Seven of the twelve toy clients: three ordinary ones and four odd ones."""
    return [toy_egos()[place] for place in (0, 1, 3, 5, 7, 9, 10)]


class Onlooker:
    """A mod that notes every client's weights after each round."""

    def __init__(self) -> None:
        self.weights: dict[int, Weights] = {}  # by round

    def __call__(
        self, message: Message, context: Context, call_next: Callable[..., Message]
    ) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "train":
            cohort = vars(context)["live"].held[0]
            seen = self.weights.setdefault(int(message.metadata.group_id), {})
            for client in cohort.clients:
                parts = cohort.alone(client).module.parameters()
                seen[client] = torch.cat([part.detach().flatten() for part in parts])
        return reply


@dataclass
class Watched(Outcome):
    """A run whose clients' weights were seen."""

    seen: Onlooker = field(default_factory=Onlooker)

    @property
    def last(self) -> Weights:
        """Every client's weights as they were last seen."""
        return {c: w for _, seen in sorted(self.seen.weights.items()) for c, w in seen.items()}


def client_app(
    egos: Sequence[ClientGraph],
    deal: Sequence[Sequence[int]] | None = None,
    mods: Sequence[Mod] = (),
    client: type = EgoNetworkClient,
    settings: EgoSettings = SETTINGS,
    **options: Any,
) -> Any:
    """Deal clients out as `dealt` does; ``options`` are those of the clients."""
    make = partial(client, settings=settings, **options)
    return dealt(make, egos, deal, mods=list(mods))


def run(
    egos: Sequence[ClientGraph] | None = None,
    *,
    rounds: int = 3,
    supernodes: int = 2,
    settings: EgoSettings = SETTINGS,
    deal: Sequence[Sequence[int]] | None = None,
    mods: Sequence[Mod] = (),
    make_grid: Callable[..., InProcessGrid] = InProcessGrid,
    client_options: dict[str, Any] | None = None,
    **options: Any,
) -> Watched:
    """Run the strategy on clients assigned to SuperNodes; ``options`` are its arguments."""
    seen = Onlooker()
    server = MaskedEmbeddingAveraging(settings, **{**FINE, **options})
    how = {"settings": server.settings, **(client_options or {})}
    grid = make_grid(
        client_app(egos or toy_egos(), deal, [*mods, seen], **how), num_supernodes=supernodes
    )
    return Watched(server, grid, seen=seen).run(rounds, timeout=0.05)


def assert_same(one: Watched, other: Watched, atol: float = 1e-5) -> None:
    """Compare reports and last weights."""
    torch.testing.assert_close(one.figures, other.figures, atol=atol, rtol=0, equal_nan=True)
    assert one.answered == other.answered
    both = one.last.keys() & other.last.keys()  # those never drawn may not have been seen
    assert len(both) >= max(one.answered)
    for client in both:
        torch.testing.assert_close(one.last[client], other.last[client], atol=atol, rtol=0)


def faulty(script: dict[Any, Any]) -> Callable[..., Federation]:
    """Make grids on which a script says what goes wrong: (partition, message type, round)."""

    def word(partition: int, server_round: int, kind: str) -> Any:
        return script.get((partition, kind, server_round), "good")

    return partial(Federation, faults=word, state_dir=IN_PROCESS)


def rounded(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
    """Round a plain vector to multiples of the resolution, as the ring does."""
    reply = call_next(message, context)
    if message.metadata.message_type == "train" and reply.has_content():
        total = reply.content[SUMS][TOTAL].numpy()
        reply.content[SUMS][TOTAL] = Array(np.rint(total / RESOLUTION) * RESOLUTION)
    return reply
