"""Runs of every method, in process, in which one of the SuperNodes is hostile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from ego_helpers import SETTINGS as EGO_SETTINGS
from ego_strategy_helpers import FINE, seven_egos
from ego_strategy_helpers import client_app as ego_app
from flwr.app import Context
from hostile_grid import Attack, HostileGrid, Key, listening
from plain_structure import FEDGLS as FEDGLS_NAME
from public_helpers import toy_members
from relay_helpers import client_app as relay_app
from relay_helpers import small_graph, strategy_for
from structure_helpers import client_app as structure_app
from structure_helpers import settings_of, toy_clients

from flower_graph.client.adaptor import make_client_app
from flower_graph.report.rounds import RoundReport
from flower_graph.strategies.masked_embedding_averaging.strategy import MaskedEmbeddingAveraging
from flower_graph.strategies.procrustes_alignment.secure_consensus import (
    ACTIONS as SECURE_ACTIONS,
)
from flower_graph.strategies.procrustes_alignment.secure_consensus import (
    SecureConsensus,
    SecureConsensusClient,
)
from flower_graph.strategies.procrustes_alignment.strategy import (
    ProcrustesAlignment,
    PublicNodeClient,
)
from flower_graph.strategies.structure_fedavg.strategy import StructureFedAvg

Plan = Mapping[Key, Attack | None]
FIGURES = (
    *("loss", "cross_entropy", "regulariser", "train_accuracy", "val_accuracy", "test_accuracy"),
    *("asked", "answered"),
)
TIMEOUT = 0.05


@dataclass
class Attacked:
    """What a run with a hostile SuperNode left.

    ``named`` has for each round what its report says of that SuperNode or its clients;
    ``excluded`` are clients whose fault in a secure sum is proven: they take part no more.
    """

    grid: HostileGrid
    reports: list[RoundReport]
    weights: dict[str, Any]
    log: list[str]
    clients: Sequence[int]
    error: BaseException | None = None
    excluded: frozenset[int] = frozenset()

    @property
    def figures(self) -> np.ndarray:
        return np.array([[getattr(r, name) for name in FIGURES] for r in self.reports], float)

    @property
    def named(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for report in self.reports:
            for entry in report.rejected:
                is_node = entry.get("node") == self.grid.hostile
                if is_node or entry.get("client") in self.clients:
                    found.setdefault(report.round, []).append(entry["reason"])
        return found

    @property
    def logged(self) -> list[str]:
        """Lines of the log that say why the SuperNode was left out."""
        own = [line for line in self.log if str(self.grid.hostile) in line]
        return [line for line in own if "left out" in line or "takes no part" in line]

    def same(self, other: Attacked, atol: float) -> bool:
        """Whether everything that a user sees is the same."""
        if self.figures.shape != other.figures.shape or self.weights.keys() != other.weights.keys():
            return False
        pairs = [(np.asarray(w), np.asarray(other.weights[k])) for k, w in self.weights.items()]
        pairs.append((self.figures, other.figures))
        return all(
            one.shape == two.shape and np.allclose(one, two, rtol=0, atol=atol, equal_nan=True)
            for one, two in pairs
        )


@dataclass(frozen=True, eq=False)
class Method:
    """A method under attack.

    Attributes
    ----------
    name : str
        As a reader knows it.
    build : callable
        Makes app and strategy.
    clients : sequence of int
        Those at the hostile SuperNode, in place 1 of ``supernodes``.
    setup, rounds : sequence of str
        Types of messages before the first round, and of those that come in every round.
    shift : mapping
        Number of the first message of a type that belongs to round 1.
    atol : float
        By how much numbers of two runs may differ: 0, but where masks are drawn by chance.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]
    clients: Sequence[int]
    setup: Sequence[str]
    rounds: Sequence[str]
    shift: Mapping[str, int]
    supernodes: int = 3
    atol: float = 0.0

    def run(self, plan: Plan, rounds: int) -> Attacked:
        """Run it; an exception that ends the run is in ``error``."""
        app, strategy = self.build()
        grid = HostileGrid(app, num_supernodes=self.supernodes, plan=plan)
        reports: list[RoundReport] = []

        def go() -> BaseException | None:
            try:
                strategy.start(grid, num_rounds=rounds, timeout=TIMEOUT, on_round=reports.append)
            except Exception as error:
                return error
            return None

        logging.getLogger("flwr").setLevel(logging.ERROR)
        error, log = listening(go)
        weights = {k: np.array(v) for k, v in strategy.weights().items()} if not error else {}
        is_masked = self.atol and not error
        sums = getattr(strategy, "sums", None) or getattr(strategy.session, "sums", None)
        excluded = frozenset(sums.server.excluded) if is_masked else frozenset[int]()
        return Attacked(grid, reports, weights, log, self.clients, error, excluded)

    def round_of(self, key: Key) -> int:
        """The round whose report tells of a message."""
        kind, number = key
        return max(1, number - self.shift.get(kind, 1) + 1) if kind in self.rounds else 1


def _relay(**options: Any) -> tuple[Any, Any]:
    data = small_graph(15)
    return relay_app(data), strategy_for(data, **options)


def _ego(**options: Any) -> tuple[Any, Any]:
    app = ego_app(seven_egos(), [[1, 2, 3], [0], [4, 5, 6]])
    return app, MaskedEmbeddingAveraging(EGO_SETTINGS, **{**FINE, **options})


def _structure() -> tuple[Any, Any]:
    graphs = toy_clients()[:3]
    return structure_app(FEDGLS_NAME, graphs), StructureFedAvg(settings_of(FEDGLS_NAME))


def _public() -> tuple[Any, Any]:
    members = toy_members()

    def client_fn(context: Context) -> PublicNodeClient:
        return PublicNodeClient(context, [members[int(context.node_config["partition-id"])]])

    return make_client_app(client_fn), ProcrustesAlignment()


def _secure() -> tuple[Any, Any]:
    members = toy_members()

    def client_fn(context: Context) -> SecureConsensusClient:
        return SecureConsensusClient(context, [members[int(context.node_config["partition-id"])]])

    return make_client_app(client_fn, actions=SECURE_ACTIONS), SecureConsensus()


NFEDGNN = Method("nFedGNN", _relay, range(1, 15, 3), ("query",), ("train",), {})
AVERAGED = Method(
    "nFedGNN with averages",
    partial(_relay, average_every=1),
    range(1, 15, 3),
    (),
    ("train",),
    {},
)
FEDSCEM = Method(
    "FedSCem",
    partial(_ego, alignment="plain"),
    (100,),
    ("query", "train.align"),
    ("train", "train.unmask"),
    {"train": 2, "train.unmask": 3},  # round 1 is measured by what comes with round 2
    atol=1e-4,
)
PSI = Method(
    "FedSCem, alignment by blinded identities",
    _ego,
    (100,),
    ("train.align", "train.union", "train.unmask"),
    (),
    {},
    atol=1e-4,
)
PLAIN = Method(
    "FedSCem, plain sums",
    partial(_ego, alignment="plain", aggregation="plain"),
    (100,),
    (),
    ("train",),
    {"train": 2},
)
FEDGLS = Method("FedGLS", _structure, (21,), ("query",), ("train", "evaluate"), {})
PPFL = Method("PPFL-GNN", _public, (1,), ("query",), ("train",), {}, supernodes=4)
SECURE = Method(
    "PPFL-GNN, secure consensus",
    _secure,
    (1,),
    ("query", "train.sum_enroll"),
    ("train", "train.sum_unmask"),
    {"train.sum_unmask": 2},
    supernodes=4,
    atol=1e-3,
)
METHODS = (NFEDGNN, AVERAGED, FEDSCEM, PSI, PLAIN, FEDGLS, PPFL, SECURE)
