"""What travels in a short run of each method: every record, key and type."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from federation import ALL, METHODS, Setup, at, good
from flwr.app import ArrayRecord, Context, RecordDict

from flower_graph.audit.attacks import RecordingGrid
from flower_graph.client.adaptor import make_client_app
from flower_graph.secure.sum.client import SecureSumClient
from flower_graph.server.sums import SecureSum
from flower_graph.strategies.fedgls.config import METHODS as STRUCTURES
from flower_graph.wire.exchange import Exchange


class Entry(NamedTuple):
    """One thing that a message holds."""

    message: str  # type of the message
    way: str  # down or up
    record: str
    key: str
    kind: str


def seen(exchanged: Iterable[tuple[str, RecordDict, RecordDict]]) -> set[Entry]:
    """Give all that messages and their replies hold."""
    found = set[Entry]()
    for kind, *both in exchanged:
        for content, way in zip(both, ("down", "up"), strict=True):
            for name, config in content.config_records.items():
                empty = [key for key, value in config.items() if value in ("", b"", [])]
                assert not empty, f"{kind} {way}: Flower cannot count bytes of {name}'s {empty}"
            found |= {Entry(kind, way, *one) for one in entries(content)}
    return found


def entries(content: RecordDict) -> Iterable[tuple[str, str, str]]:
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


def play(setups: Iterable[Setup], folder: Path) -> set[Entry]:
    """Run each setup for three rounds, and go on for a fourth."""
    found = set[Entry]()
    for number, setup in enumerate(setups):
        for rounds in (3, 4):
            words = ("save=none", "checkpoint_every=1", f"rounds={rounds}")
            # One that comes late gets a copy of the layer.
            is_late = setup is SUMMED and rounds == 3
            faults = at("gone", range(1, 4), "connect") if is_late else good
            how = {"resume": rounds == 4, "faults": faults}
            done = setup.run(folder / str(number), *words, **how)
            found |= seen(
                (sent.metadata.message_type, sent.content, reply.content)
                for sent, reply in done.grid.exchanged
                if reply.has_content()
            )
    return found


def sums(folder: Path) -> set[Entry]:
    found = set[Entry]()
    for supernodes in (3, 1):  # one SuperNode that hosts all has no partners

        def client_fn(context: Context, step: int = supernodes) -> Adder:
            return Adder(context, [*range(int(context.node_config["partition-id"]), 3, step)])

        grid = RecordingGrid(make_client_app(client_fn), num_supernodes=supernodes)
        SecureSum(Exchange(grid), limit=4.0).sum(1, 3)
        found |= seen((one.kind, one.request, one.reply) for one in grid.exchanges)
    return found


SUMMED, FEDSCEM = ALL["nfedgnn, summed"], METHODS["fedscem"]
MASKED = SUMMED.with_("strategy.aggregation=masked")
SHARED = "strategy.model_sharing=fedavg"
BATCHES = "strategy.batch_size=4"
SETUPS: dict[str, list[Setup]] = {
    "nFedGNN": [ALL["nfedgnn, averaged"]],
    "nFedGNN, summed": [SUMMED, MASKED, MASKED.with_("strategy.trust=malicious-server")],
    "FedSCem": [
        FEDSCEM,
        ALL["fedscem, plain"].with_(SHARED),
        ALL["fedscem, aligned in the clear"].with_(SHARED),
        ALL["fedscem, batches"].with_("strategy.participation=0.5"),
    ],
    "FedAvg and FedProx": [
        FEDSCEM.with_("strategy.name=fedprox", BATCHES),
        ALL["fedscem, self-training"],
    ],
    "LocalSage+ and FedSage+": [
        ALL[f"fedscem, {name}"].with_(BATCHES) for name in ("local-sage", "fed-sage")
    ],
    "FedGLS and its baselines": [
        METHODS["fedgls"].with_(f"strategy.name={name}") for name in STRUCTURES
    ],
    "PPFL-GNN": [
        METHODS["deepwalk"].with_("strategy.participation=0.5"),
        ALL["deepwalk, alone"],
        ALL["deepwalk, secure"],
        ALL["deepwalk, secure, untrusted"],
    ],
}
RUNS: dict[str, Callable[[Path], set[Entry]]] = {
    **{name: partial(play, setups) for name, setups in SETUPS.items()},
    "Secure sum": sums,
}
