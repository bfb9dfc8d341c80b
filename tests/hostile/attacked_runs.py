"""Runs of every method, in process, in which one of the SuperNodes is hostile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from federation import ALL, METHODS
from hostile_grid import Attack, HostileGrid, Key, listening

from flower_graph.apps.run import client_app
from flower_graph.method.registry import method_of
from flower_graph.records.participation import Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.wire.exchange import Exchange

Plan = Mapping[Key, Attack | None]
FIGURES = (
    *("loss", "cross_entropy", "regulariser", "train_accuracy", "val_accuracy", "test_accuracy"),
    *("asked", "answered"),
)
SHORT = 3  # rounds of a run with one attack
CAMPAIGN = 5  # and of one in which a SuperNode attacks all the time
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
    members: frozenset[int] = frozenset()  # clients that the server knows at the end

    @property
    def answered(self) -> set[int]:
        """Clients whose answer was used in one of the last two rounds: one may be skipped."""
        last = [Participation.from_record(one.participation) for one in self.reports[-2:]]
        return set[int]().union(*(one.answered for one in last))

    @property
    def figures(self) -> np.ndarray:
        return np.array([[getattr(r, name) for name in FIGURES] for r in self.reports], float)

    @property
    def named(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for report in self.reports:
            for entry in report.rejected:
                is_node = entry.get("node") in self.grid.names
                if is_node or entry.get("client") in self.clients:
                    found.setdefault(report.round, []).append(entry["reason"])
        return found

    @property
    def logged(self) -> list[str]:
        """Lines of the log that say why the SuperNode was left out."""
        names = [str(name) for name in self.grid.names]
        own = [line for line in self.log if any(name in line for name in names)]
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


@contextmanager
def limits_noted(grid: HostileGrid) -> Iterator[None]:
    """Tell the grid how large replies may be."""
    send = Exchange.send

    def noting(self: Exchange, requests: Any, **how: Any) -> Any:
        kind = how.get("message_type", "train")
        grid.limits[kind] = max(grid.limits.get(kind, 0), how.get("max_reply_bytes") or 0)
        return send(self, requests, **how)

    Exchange.send = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Exchange.send = send  # type: ignore[method-assign]


@dataclass(frozen=True, eq=False)
class Method:
    """A method under attack; the clients at the SuperNode in place 1 are hostile.

    ``late`` rounds pass before a report tells of an exchange. ``atol`` is by how much numbers of
    two runs may differ: 0, but where masks are drawn by chance.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]  # makes app and strategy
    supernodes: int
    late: int = 0
    atol: float = 0.0

    def run(self, plan: Plan, rounds: int = SHORT, *, new_id: bool = False) -> Attacked:
        """Run it; an exception that ends the run is in ``error``."""
        return self._run(plan, rounds, self.clean.clients, new_id=new_id)

    @cached_property
    def clean(self) -> Attacked:
        """A run without attacks."""
        found = self._run({}, SHORT)
        assert found.error is None, found.error
        return found

    @cached_property
    def honest(self) -> frozenset[int]:
        """Clients of the other SuperNodes."""
        return self.clean.members - set(self.clean.clients)

    @cached_property
    def reference(self) -> Attacked:
        """A run without attacks whose costs count: what is done once per process is done."""
        return self.run({}, CAMPAIGN)

    def _run(
        self, plan: Plan, rounds: int, clients: Sequence[int] = (), *, new_id: bool = False
    ) -> Attacked:
        app, strategy = self.build()
        grid = HostileGrid(app, num_supernodes=self.supernodes, plan=plan, new_id=new_id)
        reports: list[RoundReport] = []

        def go() -> BaseException | None:
            try:
                with limits_noted(grid):
                    strategy.start(
                        grid, num_rounds=rounds, timeout=TIMEOUT, on_round=reports.append
                    )
            except Exception as error:
                return error
            finally:
                grid.weigh()
            return None

        logging.getLogger("flwr").setLevel(logging.ERROR)
        error, log = listening(go)
        weights = {k: np.asarray(v) for k, v in strategy.weights().items()} if not error else {}
        sums = getattr(strategy, "sums", None) or getattr(strategy.session, "sums", None)
        excluded = frozenset[int](sums.server.excluded) if sums and not error else frozenset[int]()
        hosted = strategy.session.members.clients
        clients = clients or hosted.get(grid.hostile, ())
        members = frozenset(client for local in hosted.values() for client in local)
        return Attacked(grid, reports, weights, log, clients, error, excluded, members)

    def in_round(self, kind: str, number: int) -> list[int]:
        """Which messages of a type a round without attacks has."""
        sent = self.clean.grid.rounds
        return [place for (k, place), at in sent.items() if (k, at) == (kind, number)]

    @cached_property
    def rounds(self) -> list[str]:
        """Types of the messages that come in every round."""
        kinds = dict.fromkeys(kind for kind, _ in self.clean.grid.rounds)
        return [k for k in kinds if all(self.in_round(k, n) for n in range(1, SHORT + 1))]

    @cached_property
    def setup(self) -> list[str]:
        """Types of those that come before the first."""
        kinds = [kind for (kind, number), at in self.clean.grid.rounds.items() if number == 1 >= at]
        before = [k for k in kinds if sum(len(self.in_round(k, n)) for n in (0, 1)) > 1]
        return [kind for kind in kinds if kind not in self.rounds or kind in before]

    def first(self, kind: str) -> int:
        """Number of the message whose attack the first round's report tells of."""
        return self.in_round(kind, 1 + self.late)[-1]

    def round_of(self, key: Key) -> int:
        """The round whose report tells of a message."""
        kind, number = key
        return max(1, number - self.first(kind) + 1) if kind in self.rounds else 1


def registered(name: str, *words: str, atol: float = 0.0) -> Method:
    """Give a method of the federation, under some settings."""
    setup = ALL[name].with_(*words)
    config = setup.load()

    def build() -> tuple[Any, Any]:
        return client_app(config, None), method_of(config).build_strategy(config, None)

    return Method(name, build, setup.supernodes, setup.late, atol)


FINE = "strategy.resolution=1e-6"
ONCE = "judge.every=99"  # nothing of what clients send is evaluated in between
NFEDGNN = registered("nfedgnn")
# One of six may vanish, and one of the five that an attacker leaves
BORNE = "strategy.dropout=0.3"
FEDSCEM = registered("fedscem", FINE, BORNE, "strategy.alignment=plain", atol=1e-4)
PSI = registered("fedscem", FINE, BORNE, atol=1e-4)
PLAIN = registered("fedscem, plain")
FEDGLS = registered("fedgls")
PPFL = registered("gat", ONCE)
SECURE = registered("deepwalk, secure", ONCE, atol=1e-3)
# All that are registered, and what of a method is a path of its own through the server
CORPUS = {name: registered(name) for name in METHODS if name not in ("fedscem", "deepwalk", "gat")}
CORPUS |= {"fedscem": PSI, "deepwalk": registered("deepwalk", ONCE), "gat": PPFL}
CORPUS |= {
    "nfedgnn, averaged": registered("nfedgnn, averaged"),
    "fedscem, plain alignment": FEDSCEM,
    "fedscem, plain": PLAIN,
    "deepwalk, secure": SECURE,
}
