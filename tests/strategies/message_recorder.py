"""What travels in a short run of each method: every record, key and type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import relay_helpers
from ego_helpers import SETTINGS as EGO_SETTINGS
from ego_strategy_helpers import FINE, seven_egos
from ego_strategy_helpers import client_app as ego_app
from ego_strategy_helpers import run as run_egos
from flwr.app import ArrayRecord, Context, Message, RecordDict
from plain_structure import METHODS
from public_helpers import make_distrusting, start, toy_members
from public_helpers import make_grid as public_grid
from sage_helpers import SETTINGS as SAGE_SETTINGS
from sage_helpers import client_app as sage_app
from sage_helpers import networks
from structure_helpers import KINDS, dealt, settings_of, toy_clients

from flower_graph import (
    CommonLayerClient,
    FedSage,
    LocalSage,
    MaskedEmbeddingAveraging,
    SageClient,
    SummedGradientRelay,
)
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.sum.service import SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.baselines import EgoFedProx, EgoModelClient, SelfTraining
from flower_graph.strategies.nfedgnn.common_client import MaskedLayerClient
from flower_graph.strategies.nfedgnn.summed import MaskedGradientRelay
from flower_graph.strategies.ppfl.secure_consensus import SecureConsensus
from flower_graph.strategies.ppfl.strategy import LocalEmbedding, ProcrustesAlignment
from flower_graph.wire.exchange import Exchange


class Entry(NamedTuple):
    """One thing that a message holds."""

    message: str  # type of the message
    way: str  # down or up
    record: str
    key: str
    kind: str


class Recorder:
    """Makes grids that note what passes them."""

    def __init__(self) -> None:
        self.seen: set[Entry] = set()

    def grid(self, app: Any, *, num_supernodes: int) -> InProcessGrid:
        """Make a grid."""
        return self.watch(InProcessGrid(app, num_supernodes=num_supernodes))

    def watch(self, grid: InProcessGrid) -> InProcessGrid:
        """Note what a grid carries."""
        push, pull = grid.push_messages, grid.pull_messages

        def pushed(messages: Iterable[Message]) -> Iterable[str]:
            found = list(messages)
            for message in found:
                self._note(message, "down")
            return push(found)

        def pulled(message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(pull(message_ids))
            for message in found:
                if message.has_content():
                    self._note(message, "up")
            return found

        grid.push_messages, grid.pull_messages = pushed, pulled  # type: ignore[assignment]
        return grid

    def _note(self, message: Message, way: str) -> None:
        kind = message.metadata.message_type
        for name, config in message.content.config_records.items():
            empty = [key for key, value in config.items() if value in ("", b"", [])]
            assert not empty, f"{kind} {way}: Flower cannot count the bytes of {name}'s {empty}"
        for record, key, value in entries(message.content):
            self.seen.add(Entry(kind, way, record, key, value))


def entries(content: RecordDict) -> Iterable[tuple[str, str, str]]:
    """Give record, key and type of all that a message holds."""
    for name, record in content.items():
        for key, value in record.items():
            if isinstance(record, ArrayRecord):
                found = value.numpy()
                yield name, key, f"{found.dtype} {found.ndim}D"
            else:
                yield name, key, type_of(value)


def type_of(value: object) -> str:
    """Name the type of a metric or of a config entry; an empty list has any type."""
    if isinstance(value, list):
        return f"list of {type(value[0]).__name__}" if value else "list"
    return type(value).__name__


class Adder(SecureSumClient):
    """A client of the secure sum alone."""

    def vectors(self, config: dict[str, Any]) -> dict[int, np.ndarray]:
        return {client: np.ones(3) for client in self.clients}


def saving(folder: Path) -> dict[str, Any]:
    """Arguments of a strategy that saves every round."""
    return {"checkpoint_dir": folder, "checkpoint_every": 1}


def relay(see: Recorder, folder: Path) -> None:
    data = relay_helpers.small_graph(12)
    app = relay_helpers.client_app(data, checkpoint_dir=folder)
    grid = see.grid(app, num_supernodes=2)
    relay_helpers.run(data, rounds=3, grid=grid, average_every=2, **saving(folder))
    strategy = relay_helpers.strategy_for(data, average_every=2, **saving(folder))
    strategy.start(see.grid(app, num_supernodes=2), num_rounds=4, timeout=5, resume=True)
    grown = relay_helpers.small_graph(14)
    strategy.grow(grown)
    now = relay_helpers.client_app(grown, checkpoint_dir=folder)
    strategy.start(see.grid(now, num_supernodes=2), num_rounds=5, timeout=5, resume=True)


def summed(see: Recorder, folder: Path) -> None:
    data = relay_helpers.small_graph(12)

    def client_fn(context: Context) -> CommonLayerClient:
        return CommonLayerClient(
            context, *relay_helpers.assigned(data, context), checkpoint_dir=folder
        )

    model = {"kind": SummedGradientRelay, "feature_dropout": 0.5, **saving(folder)}
    for rounds, resume in ((3, False), (4, True)):
        grid, asked = see.grid(make_client_app(client_fn), num_supernodes=2), list[int]()
        nodes = list(grid.get_node_ids())

        def connected(nodes: list[int] = nodes, asked: list[int] = asked) -> list[int]:
            asked.append(1)
            return nodes if len(asked) > 2 else nodes[:1]  # one comes late

        if not resume:
            grid.get_node_ids = connected  # type: ignore[method-assign]
        strategy = relay_helpers.strategy_for(data, **model)
        strategy.start(grid, num_rounds=rounds, timeout=5, resume=resume)
    grown = relay_helpers.small_graph(14)
    strategy.grow(grown)
    data = grown

    def masked(context: Context) -> MaskedLayerClient:
        return MaskedLayerClient(context, *relay_helpers.assigned(grown, context))

    model = {"kind": MaskedGradientRelay, "feature_dropout": 0.5}
    grid = see.grid(make_client_app(masked), num_supernodes=2)
    relay_helpers.strategy_for(grown, **model).start(grid, num_rounds=2, timeout=5)

    def distrusting(context: Context) -> MaskedLayerClient:
        own = relay_helpers.assigned(grown, context)
        return MaskedLayerClient(context, *own, trust=trust_of(context, hides=True))

    grid = see.grid(make_client_app(distrusting), num_supernodes=5)
    model["registry"] = throwaway_parties(grid.run.run_id, [range(k, k + 1) for k in range(5)])
    relay_helpers.strategy_for(grown, **model).start(grid, num_rounds=2, timeout=5)
    forget_run(grid.run.run_id)
    grid = see.grid(make_client_app(client_fn), num_supernodes=2)
    strategy.start(grid, num_rounds=5, timeout=5, resume=True)


def egos(see: Recorder, folder: Path) -> None:
    shapes: list[dict[str, Any]] = [
        {"alignment": "psi"},
        {"alignment": "plain", "aggregation": "plain", "model_sharing": "fedavg"},
        {"alignment": "plain", "model_sharing": "fedavg"},
        {"strategy": SelfTraining(EGO_SETTINGS)},
    ]
    for options in shapes:
        run_egos(seven_egos(), rounds=2, make_grid=see.grid, **options)
    app = ego_app(seven_egos(), checkpoint_dir=folder)
    how: dict[str, Any] = {**FINE, "alignment": "plain", "aggregation": "plain"}
    for rounds, resume in ((2, False), (3, True)):
        settings = EGO_SETTINGS._replace(batch_size=4)
        server = MaskedEmbeddingAveraging(settings, participation=0.3, **how, **saving(folder))
        grid = see.grid(app, num_supernodes=7)
        server.start(grid, num_rounds=rounds, timeout=5, resume=resume)


def ego_models(see: Recorder, folder: Path) -> None:
    app = ego_app(seven_egos(), client=EgoModelClient, checkpoint_dir=folder)
    for rounds, resume in ((2, False), (3, True)):
        strategy = EgoFedProx(EGO_SETTINGS._replace(proximal=0.5, batch_size=4), **saving(folder))
        grid = see.grid(app, num_supernodes=2)
        strategy.start(grid, num_rounds=rounds, timeout=5, resume=resume)


def sages(see: Recorder, folder: Path) -> None:
    for strategy in (LocalSage, FedSage):
        where = folder / strategy.__name__
        own = partial(SageClient, checkpoint_dir=where)
        for rounds, resume in ((2, False), (3, True)):
            grid = see.grid(sage_app(networks(), strategy, own), num_supernodes=2)
            server = strategy(SAGE_SETTINGS._replace(batch_size=4), **saving(where))
            server.start(grid, num_rounds=rounds, timeout=5, resume=resume)


def structure(see: Recorder, folder: Path) -> None:
    for method in METHODS:
        how, kind = {"checkpoint_dir": folder / method}, KINDS[method]
        own = settings_of(method)
        app = dealt(partial(_hosting, kind.client, own, how), toy_clients())
        for rounds, resume in ((2, False), (3, True)):
            server = kind.server(own, **saving(folder / method))
            grid = see.grid(app, num_supernodes=2)
            server.start(grid, num_rounds=rounds, timeout=5, resume=resume)


def _hosting(kind: Any, settings: Any, how: dict[str, Any], context: Context, graphs: Any) -> Any:
    return kind(context, graphs, settings, **how)


def public(see: Recorder, folder: Path) -> None:
    for kind in (ProcrustesAlignment, LocalEmbedding):
        where = folder / kind.__name__
        for rounds, resume in ((3, False), (4, True)):
            grid = see.watch(public_grid(toy_members(), 4, checkpoint_dir=where))
            strategy = kind(participation=0.5, **saving(where))
            strategy.start(grid, num_rounds=rounds, timeout=5, resume=resume)
    grid = see.watch(public_grid(toy_members(), 4, secure=True))
    SecureConsensus().start(grid, num_rounds=4, timeout=5)
    grid, strategy = make_distrusting(toy_members(6), 5)
    start(see.watch(grid), strategy)


def sums(see: Recorder, folder: Path) -> None:
    for supernodes in (3, 1):  # one SuperNode that hosts all has no partners

        def client_fn(context: Context, step: int = supernodes) -> Adder:
            return Adder(context, [*range(int(context.node_config["partition-id"]), 3, step)])

        grid = see.grid(make_client_app(client_fn), num_supernodes=supernodes)
        SecureSum(Exchange(grid), limit=4.0).sum(1, 3)


RUNS: dict[str, Callable[[Recorder, Path], None]] = {
    "nFedGNN": relay,
    "nFedGNN, summed": summed,
    "FedSCem": egos,
    "FedAvg and FedProx": ego_models,
    "LocalSage+ and FedSage+": sages,
    "FedGLS and its baselines": structure,
    "PPFL-GNN": public,
    "Secure sum": sums,
}
