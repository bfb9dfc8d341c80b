"""How long the server of PPFL-GNN aligns, and how that grows; needs PyTorch alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.measure import exponent, say, summary
from flower_graph.engine.machine import peak_memory
from flower_graph.ops import align_pairs, consensus
from flower_graph.rng import generator

PAIRS, CONSENSUS = "pairs", "consensus"
FORMS: dict[str, Callable[[Tensor], Any]] = {PAIRS: align_pairs, CONSENSUS: consensus}
# Seconds that the issue allows for 100 clients, and bytes for 10,000
TARGETS = {PAIRS: 1.0, CONSENSUS: 0.1, "bytes": 8 * 2**30}
THREADS = (1, 2)


class Size(NamedTuple):
    """Clients, public nodes that each of them holds, and numbers of an embedding."""

    clients: int
    nodes: int = 1_000
    dimension: int = 16


GOAL, QUICK_GOAL = Size(100), Size(5, 40, 4)
# What grows, by form and axis: the other axes are the goal's
SWEEPS: dict[str, dict[str, Sequence[int]]] = {
    form: {"clients": clients, "nodes": (100, 1_000, 10_000), "dimension": (8, 16, 32, 64)}
    for form, clients in ((PAIRS, (10, 30, 100, 300)), (CONSENSUS, (10, 100, 1_000, 10_000)))
}
QUICK_SWEEPS: dict[str, dict[str, Sequence[int]]] = {
    form: {"clients": (5, 10), "nodes": (40, 80), "dimension": (4, 8)} for form in FORMS
}


def embeddings(size: Size, *, related: bool = True) -> Tensor:
    """Draw embeddings of the same nodes at several clients."""
    clients, nodes, dimension = size
    draw = generator(0, "alignment", clients)
    own = torch.randn(clients, nodes, dimension, generator=draw)
    if not related:
        return own
    turns = torch.linalg.qr(torch.randn(clients, dimension, dimension, generator=draw)).Q
    common = torch.randn(nodes, dimension, generator=draw)
    return own.baddbmm_(common.expand(clients, -1, -1), turns)


def measure_alignment(
    form: str, size: Sequence[int], threads: int, related: bool, repeats: int
) -> dict[str, Any]:
    """Time one alignment."""
    wanted = Size(*size)
    say(f"ppfl: {form}, {wanted.clients} x {wanted.nodes} x {wanted.dimension}, {threads} threads")
    torch.set_num_threads(threads)
    x, align, seconds = embeddings(wanted, related=related), FORMS[form], []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        align(x)
        seconds.append(time.perf_counter() - started)
    return {
        "form": form,
        **wanted._asdict(),
        "threads": threads,
        "related": related,
        "seconds": summary(seconds[1:]),
        "peak-bytes": peak_memory(),
    }


def goal_cases(quick: bool) -> list[tuple[str, Size, int, bool, int]]:
    """List what is held against the goals, as arguments of ``measure_alignment``."""
    size, repeats = (QUICK_GOAL, 1) if quick else (GOAL, 5)
    data = {PAIRS: (True,), CONSENSUS: (True, False)}  # the time of pairs does not depend on it
    return [
        (form, size, threads, related, repeats)
        for form in FORMS
        for related in data[form]
        for threads in THREADS
    ]


def growth_cases(quick: bool) -> list[tuple[str, Size, int, bool, int]]:
    """List what shows the growth: along one axis after the other, each size once."""
    base, repeats = (QUICK_GOAL, 1) if quick else (GOAL, 3)
    sweeps = QUICK_SWEEPS if quick else SWEEPS
    sizes = [
        (form, base._replace(**{axis: value}))
        for form, axes in sweeps.items()
        for axis, values in axes.items()
        for value in values
    ]
    return [(form, size, THREADS[-1], True, repeats) for form, size in dict.fromkeys(sizes)]


def fitted(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit how the time grows along each axis, over all sizes and from the last but one on."""
    fits = []
    for form in FORMS:
        own = [entry for entry in entries if entry["form"] == form]
        for axis in Size._fields:
            base = {field: _base(own, field) for field in Size._fields if field != axis}
            line = [e for e in own if all(e[field] == value for field, value in base.items())]
            line.sort(key=lambda entry: int(entry[axis]))
            sizes = [entry[axis] for entry in line]
            seconds = [entry["seconds"]["median"] for entry in line]
            last = exponent(sizes[-2:], seconds[-2:])
            fits.append(
                {"form": form, "axis": axis, "all": exponent(sizes, seconds), "last-step": last}
            )
    return fits


def _base(entries: Sequence[dict[str, Any]], field: str) -> int:
    """Return the value that a field has along the other axes: its most frequent one."""
    values = [int(entry[field]) for entry in entries]
    return max(values, key=values.count)
