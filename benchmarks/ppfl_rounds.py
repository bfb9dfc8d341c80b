"""Whole iterations of PPFL-GNN: in process with every client's own work, and on Ray."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.clientapp import ClientApp

from benchmarks import engines
from benchmarks.measure import say, summary
from benchmarks.ppfl_server import Size, embeddings
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.data.folders.party import share
from flower_graph.engine.machine import peak_memory
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.procrustes_alignment.cohort_client import (
    EmbeddingClient,
    EmbeddingModel,
    PublicNodeClient,
)
from flower_graph.strategies.procrustes_alignment.messages import FloatArray, IntArray
from flower_graph.strategies.procrustes_alignment.method import METHOD, make_member
from flower_graph.strategies.procrustes_alignment.strategy import ProcrustesAlignment

SUPERNODES = 4  # one for each client of the shipped settings
WARM_UP = 2  # iterations that are not counted; the last is not either: the MLP judges there too
ROUNDS = 12
# Next to nothing to do: what is left of an iteration is Flower's and ours
IDLE = ["deepwalk.walks=1", "deepwalk.length=2", "gat.epochs=1", "judge.every=1000"]
PARTS = ("learn", "judge")

Spent = dict[int, dict[str, float]]  # seconds of a client's parts, by its number


class TimedModel:
    """An embedding model whose own work is noted."""

    def __init__(self, model: Any, timed: Callable[..., Any]) -> None:
        self.learn, self.embed = timed("learn", model.learn), timed("learn", model.embed)
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


class Workbook:
    """What clients spend on their own work, apart from messages, state and alignment."""

    def __init__(self) -> None:
        self._spent: Spent = defaultdict(lambda: dict.fromkeys(PARTS, 0.0))

    def take(self) -> Spent:
        """Return what was spent since the last time."""
        spent = {client: dict(parts) for client, parts in self._spent.items()}
        self._spent.clear()
        return spent

    def watched(self, member: EmbeddingClient) -> EmbeddingClient:
        """Return a client whose model and judge are timed."""

        def timed(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                started = time.perf_counter()
                found = work(*arguments)
                self._spent[member.number][part] += time.perf_counter() - started
                return found

            return call

        def build() -> EmbeddingModel:
            return TimedModel(member.build(), timed)

        assert member.judge is not None
        return replace(member, build=build, judge=timed("judge", member.judge))


class Fixed:
    """An embedding model that learns nothing."""

    def __init__(self, rows: FloatArray) -> None:
        self._rows = rows

    def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
        """Learn nothing."""
        return 0.0

    def embed(self) -> FloatArray:
        """Return the same as ever."""
        return self._rows


def measure_rounds(name: str, settings: list[str], threads: int, rounds: int) -> dict[str, Any]:
    """Time a run in process, with a SuperNode for each client."""
    say(f"ppfl: {name} {' '.join(settings)}, {threads} threads")
    torch.set_num_threads(threads)
    config = load_config(name, [f"rounds={rounds}", "device=cpu", *settings])
    book, graphs = Workbook(), METHOD.graphs(config)
    classes = METHOD.num_classes(config)
    members = [book.watched(make_member(graph, config, classes)) for graph in graphs]

    def client_fn(context: Context) -> PublicNodeClient:
        return PublicNodeClient(context, members[share(context, len(members))])

    strategy = METHOD.build_strategy(config, None)
    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=SUPERNODES, seed=config.seed)
    reports, spent = _run(strategy, grid, rounds, book)
    counted = slice(WARM_UP, -1)
    return {
        "config": name,
        "settings": settings,
        "data": config.data.name,
        "clients": len(members),
        "nodes": members[0].nodes.size,
        "public": members[0].rows.size,
        "threads": threads,
        "round": summary([report.seconds for report in reports[counted]]),
        **_parts(reports[counted], spent[counted]),
        "last": {
            "seconds": reports[-1].seconds,
            "judge": sum(parts["judge"] for parts in spent[-1].values()),
        },
        "payload-bytes": _payload(reports[-1]) - _payload(reports[-2]),
        "wire-bytes": sum(reports[-1].wire_bytes.values()) - sum(reports[-2].wire_bytes.values()),
        "peak-bytes": peak_memory(),
    }


def _run(
    strategy: ProcrustesAlignment, grid: InProcessGrid, rounds: int, book: Workbook
) -> tuple[list[RoundReport], list[Spent]]:
    """Run, and return every iteration's report and own work."""
    reports: list[RoundReport] = []
    spent: list[Spent] = []

    def on_round(report: RoundReport) -> None:
        reports.append(report)
        spent.append(book.take())

    strategy.start(grid, num_rounds=rounds, on_round=on_round)
    forget_run(grid.run.run_id)
    return reports, spent


def _parts(reports: Sequence[RoundReport], spent: Sequence[Spent]) -> dict[str, Any]:
    """Return medians: of all clients' parts together, of the rest, and of each client's work."""
    pairs = list(zip(reports, spent, strict=True))
    whole = [sum(_total(parts) for parts in one.values()) for one in spent]
    found: dict[str, Any] = {
        part: statistics.median(sum(own[part] for own in one.values()) for one in spent)
        for part in PARTS
    }
    rest = [report.seconds - own for (report, _), own in zip(pairs, whole, strict=True)]
    clients = sorted(spent[0])
    own = [statistics.median(_total(one[client]) for one in spent) for client in clients]
    return found | {"rest": statistics.median(rest), "own": own}


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def _payload(report: RoundReport) -> int:
    """Return the payload in bytes up to this iteration, both ways."""
    return sum(sum(kinds.values()) for kinds in report.bytes.values())


def measure_exchange(form: str, size: Sequence[int], threads: int, rounds: int) -> dict[str, Any]:
    """Time whole iterations of clients at one SuperNode that have nothing to learn."""
    say(f"ppfl: {form}, iterations without learning, {threads} threads")
    torch.set_num_threads(threads)
    wanted = Size(*size)
    rows = np.arange(wanted.nodes)
    members = [
        EmbeddingClient(client, rows, rows, wanted.dimension, lambda own=own: Fixed(own))
        for client, own in enumerate(embeddings(wanted).numpy())
    ]
    grid = InProcessGrid(_app(members), num_supernodes=1)
    reports, _ = _run(ProcrustesAlignment(alignment=form), grid, rounds, Workbook())
    seconds = summary([report.seconds for report in reports[WARM_UP:]])
    payload = _payload(reports[-1]) - _payload(reports[-2])
    about = {"form": form, **wanted._asdict(), "threads": threads}
    return {**about, "round": seconds, "payload-bytes": payload, "peak-bytes": peak_memory()}


def _app(members: Sequence[EmbeddingClient]) -> ClientApp:
    return make_client_app(lambda context: PublicNodeClient(context, members))


def measure_ray(name: str, settings: list[str], rounds: int) -> dict[str, Any]:
    """Time ``flwr run`` with a SuperNode for each client."""
    reports, total, _ = engines.run_rounds(name, [f"rounds={rounds}", *settings], SUPERNODES)
    seconds = summary([report.seconds for report in reports[WARM_UP:-1]])
    return {"config": name, "settings": settings, "round": seconds, "total-seconds": total}


def above_own(ray: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Say what of an iteration on Ray is not the clients' own work."""
    own = makespan(alone["own"], min(SUPERNODES, os.cpu_count() or 1))
    return {**ray, "own": own, "above": ray["round"]["median"] - own}


def makespan(seconds: Sequence[float], actors: int) -> float:
    """Return when the last of some tasks ends, if each goes to the actor that is free first."""
    free = [0.0] * actors
    for task in seconds:
        free[free.index(min(free))] += task
    return max(free)
