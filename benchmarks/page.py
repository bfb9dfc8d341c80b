"""Writes the pages on performance from the figures in ``results.json``; no figure is made here.

    python -m benchmarks.page

``docs/reference/performance.md`` is the short one, ``docs/results/performance/README.md`` has all
tables, and ``docs/scale.md`` what follows from them for a hundred million users.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.layout import check, duration, gib, rate, spread, table, verdict
from benchmarks.page_cluster import cluster_section
from benchmarks.page_commands import engine_start_section, users_section
from benchmarks.page_deployment import deployment_section, resident_section, waiting_section
from benchmarks.page_egos import ego_section, fedscem_section
from benchmarks.page_fedgls import fedgls_section
from benchmarks.page_gpu import gpu_section
from benchmarks.page_ppfl import ppfl_section
from benchmarks.page_scale import scale_page
from benchmarks.page_secure import (
    alignment_section,
    sum_section,
    sums_section,
    trust_section,
)
from benchmarks.page_short import short_page
from benchmarks.page_soak import soak_section

RESULTS = Path(__file__).resolve().parent / "results.json"
HOW = ("clock", "cpu")  # how the start of a command is measured
BUSY = 2  # the load from which a clock says little
PAGE = RESULTS.parents[1] / "docs" / "reference" / "performance.md"

HEAD = """\
# Performance, all tables

Written by `make bench` from `benchmarks/results.json`. Do not edit it. The short page is
[performance.md](../../reference/performance.md).

{machine}

Every time is the median of several rounds; the range behind it is the fastest and the slowest.
Ratios are of two medians of one process, measured in turns, so that both sides meet the same state
of the machine. OpenMP threads wait without spinning (`OMP_WAIT_POLICY=passive`). *Load* is the
system's load average when a part began: above 0, others used the cores too.
"""


def write_pages(results: dict[str, Any], page: Path = PAGE) -> None:
    """Write the short page, the long one in ``results/performance``, and that on scale."""
    full = render(results)
    long = page.parents[1] / "results" / "performance" / "README.md"
    long.parent.mkdir(parents=True, exist_ok=True)
    long.write_text(full, encoding="utf-8")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(short_page(results, _machine(results["machine"]), full), encoding="utf-8")
    if on_paper := scale_page(results["parts"]):
        (page.parents[1] / "scale.md").write_text(on_paper, encoding="utf-8")


def render(results: dict[str, Any]) -> str:
    """Give the long page."""
    sections: dict[str, Callable[[dict[str, Any]], Iterable[str]]] = {
        "round": _round,
        "flwr": _flwr,
        "cluster": cluster_section,
        "engine-start": engine_start_section,
        "scale": _scale,
        "users": users_section,
        "state": _state,
        "secure": sum_section,
        "trust": trust_section,
        "sums": sums_section,
        "alignment": alignment_section,
        "ego": ego_section,
        "fedscem": fedscem_section,
        "fedgls": fedgls_section,
        "ppfl": ppfl_section,
        "deployment": deployment_section,
        "resident": resident_section,
        "waiting": waiting_section,
        "soak": soak_section,
        "startup": _startup,
        "gpu": gpu_section,
    }
    blocks = [HEAD.format(machine=_machine(results["machine"])).strip()]
    for name, write in sections.items():
        part = results["parts"].get(name)
        if part is not None:
            blocks += [*write(part), _footnote(part)]
    return "\n\n".join(blocks) + "\n"


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in machine["packages"].items() if v)
    return (
        f"Measured on {machine['cores']} cores of {machine['cpu']} with "
        f"{gib(machine['memory-bytes'])} of memory, {machine['system']}, "
        f"Python {machine['python']}, {versions}."
    )


def _footnote(part: dict[str, Any]) -> str:
    load = f", load {part['load']:.1f}" if "load" in part else ""
    quick = " **Tiny sizes, to try the scripts out; the figures mean nothing.**"
    took = f"Measured {part['measured']} in {part['took-seconds']:.0f} s{load}."
    return f"<sub>{took}{quick if part['quick'] else ''}</sub>"


def _startup(part: dict[str, Any]) -> Iterable[str]:
    yield "## Starting"
    yield (
        "Seconds of commands that compute little, and in brackets their ratio to an import that "
        "nobody can avoid, by the clock and of the CPU (user and system): medians of "
        f"{part['times']} runs in turns, by `python benchmarks/startup.py`. From two rounds on a "
        "run draws its pictures: matplotlib is imported for these alone. The target is by the "
        f"clock, of a machine whose load is below {BUSY}; on a busier one by the CPU."
    )
    head = ("command", "beside", "clock", "CPU", "target", "")
    how = HOW[part["load"] >= BUSY]
    yield table(head, (_startup_row(entry, how) for entry in part["entries"]))


def _startup_row(entry: dict[str, Any], judged: str) -> Sequence[str]:
    target, now = entry["target"], entry["after"]
    clock, cpu = (f"{now[how]['seconds']:.2f} s ({now[how]['ratio']:.2f})" for how in HOW)
    beside = f"`import {entry['beside']}`"
    words = f"`{entry['command']}`"
    met = verdict(now[judged]["ratio"], target)
    return words, beside, clock, cpu, f"at most {target:g}", met


def _round(part: dict[str, Any]) -> Iterable[str]:
    yield "## A round in process, against a centralised epoch"
    yield (
        "A round is everything from `SplitGradientRelay` over the messages to `NodeClient` and "
        "back: user forward, server step, relay, user step, and the evaluation of all nodes, which "
        "the epoch does not have. The epoch is PyG's two-layer `GCNConv(cached=True)` with dense "
        "features, 16 hidden, dropout 0.5 and Adam. After every round one epoch is run."
    )
    head = ("data", "users", "SuperNodes", "round", "range", "epoch", "ratio", "target", "")
    yield table(head, (row for entry in part["entries"] for row in _round_rows(entry)))
    for entry in part["entries"]:
        if "skipped" in entry:
            yield f"`{entry['config']}` was not measured: {entry['skipped']}."
        if "user-step" in entry:
            yield _user_step(entry)


def _round_rows(entry: dict[str, Any]) -> Iterable[Sequence[str]]:
    for run in entry.get("runs", []):
        yield (
            entry["data"],
            f"{entry['users']:,}",
            str(run["supernodes"]),
            duration(run["round"]["median"]),
            spread(run["round"]),
            duration(run["epoch"]["median"]),
            f"{run['ratio']:.2f}",
            f"at most {entry['target']:g}",
            verdict(run["ratio"], entry["target"]),
        )


def _user_step(entry: dict[str, Any]) -> str:
    step = entry["user-step"]
    return (
        f"**Memory bandwidth, {entry['data']}.** Adam and the forward have to read the weights and "
        f"both moments, write them, and read the weights again: {gib(step['bytes'])} for "
        f"{step['weights']:,} active weights. A triad over arrays of that length moves "
        f"{rate(step['bandwidth'])} here. The users' step and forward take "
        f"{duration(step['seconds']['median'])} ({rate(step['bytes-per-second'])}): "
        f"{step['times-bound']:.1f} times what the bandwidth needs (target: at most "
        f"{step['target']:g}, {verdict(step['times-bound'], step['target'])})."
    )


def _flwr(part: dict[str, Any]) -> Iterable[str]:
    yield "## `flwr run` on Ray"
    yield (
        f"`{part['config']}` with 2 SuperNodes; beside it one SuperNode per client, on generated "
        "graphs of as many nodes. Flower's engine looks for messages every 0.1 s, and the cost of "
        "looking grows with the number of SuperNodes: that is why few of them with large cohorts "
        "are the default. The last column has the start of the SuperLink and of Ray."
    )
    head = ("SuperNodes", "users", "s a round", "range", "target", "", "whole run")
    rows = (
        (
            str(entry["supernodes"]),
            f"{entry['users']:,}",
            f"{entry['round']['median']:.3f}",
            spread(entry["round"]),
            "" if entry["target"] is None else f"at most {entry['target']:g}",
            "" if entry["target"] is None else verdict(entry["round"]["median"], entry["target"]),
            duration(entry["total-seconds"]),
        )
        for entry in part["entries"]
    )
    yield table(head, rows)


def _scale(part: dict[str, Any]) -> Iterable[str]:
    targets, fits = part["targets"], part["exponents"]
    yield "## Scale"
    yield (
        "Generated graphs of degree 10; each user has 32 active features of 512 and 16 latent "
        "numbers. In process, one SuperNode, messages and state included, each size in a process "
        "of its own. *Set-up* is the graph, the server, packing and the first weights; *peak* is "
        "of the whole process, the generator included."
    )
    rows = [
        (
            f"{entry['users']:,}",
            f"{entry['weights'] / 1e6:,.1f} M",
            duration(entry["round"]["median"]),
            spread(entry["round"]),
            duration(entry["setup-seconds"]),
            gib(entry["peak-bytes"]),
        )
        for entry in part["entries"]
    ]
    yield table(("users", "weights", "round", "range", "set-up", "peak memory"), rows)
    before, largest = part["entries"][-2:]
    size, growth = f"{largest['users']:,} users", targets["exponent"]
    lines = [
        check("fitted exponent of the time", fits["seconds"], growth, "{:.2f}".format),
        check("fitted exponent of the memory", fits["memory"], growth, "{:.2f}".format),
        check(f"a round, {size}", largest["round"]["median"], targets["seconds"], duration),
        check(f"peak memory, {size}", largest["peak-bytes"], targets["bytes"], gib),
    ]
    yield table(("figure", "measured", "target", ""), lines)
    yield (
        "The fits are over all sizes. From the last size but one to the last alone the exponents "
        f"are {fits['seconds-last-step']:.2f} (time) and {fits['memory-last-step']:.2f} (memory). "
        "What can grow faster than the graph is the server's gathering of neighbours: "
        f"{_edge(before)} and {_edge(largest)}, which lie at random places of the memory."
    )
    yield from _few_asked(part)


def _few_asked(part: dict[str, Any]) -> Iterable[str]:
    """Say what rounds of one user in a hundred cost, with rows in a file and one layer for all."""
    targets = part["targets"]
    yield "### One user in a hundred"
    yield (
        "The same graphs; 1 % of the users are asked in a round, after one in which all were: then "
        "gradients wait for everybody, and the whole graph counts. Every tenth round is evaluated, "
        "and is apart. *file*: `strategy.state=file`, whose file has the rows of users who have "
        "stepped; *summed*: `strategy.share=summed`."
    )
    forms = part["few-asked"]
    rows = [
        (
            form,
            f"{entry['users']:,}",
            duration(entry["round"]["median"]),
            spread(entry["round"]),
            duration(entry["first-seconds"]),
            duration(entry["evaluated-seconds"]),
            duration(entry["setup-seconds"]),
            gib(entry["peak-bytes"]),
            gib(entry["disk-bytes"]) if entry["disk-bytes"] else "",
        )
        for form, found in forms.items()
        for entry in found["entries"]
    ]
    head = ("form", "users", "round", "range", "the first", "with evaluation", "set-up")
    yield table((*head, "peak memory", "on the disk"), rows)
    lines = []
    for form, found in forms.items():
        largest, fits = found["entries"][-1], found["exponents"]
        size = f"{form}, {largest['users']:,} users"
        seconds, growth = targets["seconds"], targets["exponent"]
        lines += [
            check(f"exponent of the time, {form}", fits["seconds"], growth, "{:.2f}".format),
            check(f"a round, {size}", largest["round"]["median"], seconds, duration),
            check(f"peak memory, {size}", largest["peak-bytes"], targets["bytes"], gib),
        ]
    yield table(("figure", "measured", "target", ""), lines)


def _edge(entry: dict[str, Any]) -> str:
    return (
        f"{entry['edge-seconds'] * 1e9:.1f} ns an edge with {gib(entry['latent-bytes'])} of "
        "latent vectors"
    )


def _state(part: dict[str, Any]) -> Iterable[str]:
    yield "## State that two processes share"
    where = "shared memory" if part["shared-memory"] else "a temporary folder"
    yield (
        f"{part['users']:,} users with {gib(part['state-bytes'])} of weights and moments get the "
        "same messages three times: with the state in the process, with the state in a mapped file "
        f"(in {where}), and with two processes that take turns with such a file, as Ray's actors "
        "do. A message is the whole of `NodeClient.fit`: opening the state, the step, the forward "
        f"and closing it. {part['context-bytes']:,} bytes of context travel with each."
    )
    base, target = part["seconds"]["process"]["median"], part["target"]
    names = {
        "process": "in the process",
        "file": "mapped file, one process",
        "file-in-turns": "mapped file, two processes in turns",
    }
    rows = []
    for way, name in names.items():
        times = part["seconds"][way]
        cost = times["median"] / base - 1
        known = way != "process"
        rows.append(
            (
                name,
                duration(times["median"]),
                spread(times),
                f"{cost:+.0%}" if known else "",
                f"at most {target:.0%}" if known else "",
                verdict(cost, target) if known else "",
            )
        )
    yield table(("state", "message", "range", "cost", "target", ""), rows)


if __name__ == "__main__":
    write_pages(json.loads(RESULTS.read_text(encoding="utf-8")))
