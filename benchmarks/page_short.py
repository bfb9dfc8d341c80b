"""Writes ``docs/reference/performance.md``: what a user wants to know of ``results.json``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.layout import duration, gib, table
from benchmarks.page_cluster import short_cluster
from benchmarks.page_secure import short_alignment, short_sums, short_trust

Part = dict[str, Any]

HEAD = """\
# Performance

How long a round takes, how much memory it needs, and what makes it slow. `make bench` writes this
page from `benchmarks/results.json`, and [all tables](../results/performance/README.md), which have
ranges, targets and how each figure was measured; do not edit them. `python benchmarks/run.py --only
round,scale` measures some parts anew.
"""


def short_page(results: dict[str, Any], machine: str, full: str) -> str:
    """Write the page; ``full`` is the text of the long one."""
    parts = results["parts"]
    blocks = [HEAD.strip(), f"{machine} Times are medians.", "## A round"]
    head = ("method", "run", "clients", "SuperNodes", "a round", "peak memory")
    blocks += [table(head, (row for name, rows in ROUNDS.items() for row in rows(parts, name)))]
    for name, write in SECTIONS.items():
        if name in parts:
            blocks += write(parts[name])
    return "\n\n".join([*blocks, *_targets(full)]) + "\n"


def _relay(parts: dict[str, Part], name: str) -> Iterator[Sequence[str]]:
    for entry in parts.get("round", {}).get("entries", []):
        for run in entry.get("runs", [])[:1]:
            yield _row(name, entry["data"], entry["users"], run["supernodes"], run["round"])
    for entry in parts.get("scale", {}).get("entries", []):
        peak = entry["peak-bytes"]
        yield _row(name, "generated, degree 10", entry["users"], 1, entry["round"], peak)
    for form, found in parts.get("scale", {}).get("few-asked", {}).items():
        what, largest = f"generated, 1 % asked, {form}", found["entries"][-1]
        peak = largest["peak-bytes"]
        yield _row(name, what, largest["users"], 1, largest["round"], peak)
    for entry in parts.get("flwr", {}).get("entries", []):
        what = f"{'Cora' if entry['users'] == 2708 else 'generated'}, on Ray"
        yield _row(name, what, entry["users"], entry["supernodes"], entry["round"])


def _egos(parts: dict[str, Part], name: str) -> Iterator[Sequence[str]]:
    part = parts.get("fedscem", {"entries": [], "flwr": None})
    for entry in part["entries"]:
        if entry["what"] == "as shipped" or entry["supernodes"] == entry["clients"]:
            size = None if "loops" in entry else entry["peak-bytes"]  # the loop's memory is in it
            what = f"{entry['data']}, {entry['what']}"
            yield _row(name, what, entry["clients"], entry["supernodes"], entry["round"], size)
    if (ray := part["flwr"]) is not None:
        yield _row(name, "Cora, on Ray", 100, ray["supernodes"], ray["round"])


def _communities(parts: dict[str, Part], name: str) -> Iterator[Sequence[str]]:
    if (part := parts.get("fedgls")) is None:
        return
    for method, called in (("structure-fedavg", name), ("fed-gnn", "Fed-GNN (FedAvg)")):
        run = part["methods"]["runs"][0]
        yield _row(called, f"{part['methods']['data']}, as shipped", 8, 1, run[method])
        last = part["clients"][method][-1]
        what = "generated, 100 nodes each"
        yield _row(called, what, last["clients"], 1, last["round"], last["peak-bytes"])


def _overlapping(parts: dict[str, Part], name: str) -> Iterator[Sequence[str]]:
    part = parts.get("ppfl", {"iterations": [], "flwr": []})
    for entry in part["iterations"]:
        if not entry["settings"] and entry["threads"] == 1:
            size, what = entry["peak-bytes"], f"`{entry['config']}`"
            yield _row(name, what, entry["clients"], entry["clients"], entry["round"], size)
    for entry in part["flwr"]:
        if not entry["settings"]:
            yield _row(name, f"`{entry['config']}`, on Ray", 4, 4, entry["round"])


def _row(name: str, what: str, clients: int, nodes: int, time: Part, size: Any = None) -> list[str]:
    peak = "" if size is None else gib(size)
    return [name, what, f"{clients:,}", f"{nodes:,}", duration(time["median"]), peak]


def _scale(part: Part) -> Iterable[str]:
    fits = part["exponents"]
    yield (
        "In process unless it says *on Ray* (`flwr run`), messages, checks and evaluation "
        "included. Peak memory is of the whole process. nFedGNN's time grows with the number of "
        f"users to the power of {fits['seconds']:.2f}, its memory to {fits['memory']:.2f}."
    )


def _flwr(part: Part) -> Iterable[str]:
    most = part["entries"][-1]
    yield "## Few SuperNodes with many clients each"
    yield (
        "In a simulation Flower's engine looks for messages every 0.1 s, and the cost of looking "
        f"grows with the number of SuperNodes: with {most['supernodes']} of them a round of "
        f"{most['users']} users takes {duration(most['round']['median'])}. That is why few "
        "SuperNodes with large cohorts are the default. In FedSCem masks are between "
        "SuperNodes, so that few of them save most of the rest."
    )


def _state(part: Part) -> Iterable[str]:
    seconds = {name: duration(times["median"]) for name, times in part["seconds"].items()}
    yield (
        f"On Ray the clients' state lies in files that processes map. For {part['users']:,} users "
        f"with {gib(part['state-bytes'])} of it, a message takes {seconds['file-in-turns']} with "
        f"two processes in turns and {seconds['process']} with the state in one process; "
        f"{part['context-bytes']:,} bytes of context travel with it."
    )


def _secure(part: Part) -> Iterable[str]:
    word = part["rounds"][0]
    yield "## Parts"
    yield (
        f"**Secure sum.** {word['clients']} clients at {word['supernodes']} SuperNodes, vectors of "
        f"{word['length']:,} numbers: {duration(word['round']['median'])} a sum."
    )


def _setup(part: Part) -> Iterable[str]:
    times = [duration(entry["setup-seconds"]) for entry in part["entries"]]
    own = next((e for e in part["entries"] if e["supernodes"] == e["clients"]), None)
    apart = f" (a SuperNode for each: {duration(own['setup-seconds'])})" if own else ""
    yield (
        f"**FedSCem's keys and alignment**, once a run of {part['entries'][0]['clients']} clients: "
        f"{times[0]} on Cora{apart}, {times[-1]} on PubMed."
    )


def _learner(part: Part) -> Iterable[str]:
    rows = [
        (f"{e['nodes']:,}", *map(duration, (e["seconds"], e["contrast-seconds"])), gib(e["bytes"]))
        for e in part["learner"]
    ]
    yield (
        "**FedGLS's graph learner** compares every pair of a client's nodes in each round, so its "
        "time grows with their square, and its memory does not: a step with the new graph, the "
        "contrastive loss that the step needs, and the most memory above that of the features."
    )
    yield table(("nodes of a client", "learner", "loss", "memory"), rows)


def _alignment(part: Part) -> Iterable[str]:
    chosen = [e for e in part["server"]["growth"] if (e["nodes"], e["dimension"]) == (1000, 16)]
    rows = [
        (e["form"], f"{e['clients']:,}", duration(e["seconds"]["median"]), gib(e["peak-bytes"]))
        for e in chosen
    ]
    yield (
        "**PPFL-GNN's alignment** at the server, 1,000 public nodes with 16 numbers. *Pairs* grow "
        "with the square of the clients: beyond some hundred use `strategy.alignment=consensus`."
    )
    yield table(("form", "clients", "alignment", "peak memory"), rows)


def _deployment(part: Part) -> Iterable[str]:
    yield "## Deployments"
    yield (
        "Measured while each message still started a process that imports PyTorch, which was most "
        "of the time (how it is now: below); "
        "here all SuperNodes share the cores of one machine, elsewhere they do that side by side. "
        "TLS with registered keys costs little beside it. FedGLS was measured while it still "
        "waited for replies as Flower does (below)."
    )
    rows = [
        (
            f"`{e['config']}`",
            str(e["supernodes"]),
            "yes" if e["tls"] else "no",
            duration(e["seconds"]["median"]),
            f"{e['network-bytes']['median'] / 1e3:,.0f} kB",
        )
        for e in part["entries"]
    ]
    yield table(("config", "SuperNodes", "TLS", "an exchange", "on the network, all"), rows)


def _resident(part: Part) -> Iterable[str]:
    yield (
        "**A message at a SuperNode**, in processor seconds: with clients in a worker, the usual "
        "way, and loaded for each message (`resident=false`), above those of a ClientApp that does "
        "nothing; and an exchange of all SuperNodes, which share the cores of this machine, "
        f"with TLS. The load was {part['load']:.0f}, so compare them with each other."
    )
    rows = []
    for entry in part["entries"]:
        ways, empty = entry["ways"], entry["ways"]["empty"]["later"]["median"]
        for way, name in (("resident", "worker"), ("each-message", "each message")):
            first, later = ways[way]["first"], ways[way]["later"]["median"]
            rows.append(
                (
                    *(f"`{entry['config']}`", str(entry["supernodes"]), name, f"{empty:.2f} s"),
                    *(f"{first - empty:+.2f} s", f"{later - empty:+.2f} s"),
                    duration(ways[way]["exchange-seconds"]["median"]),
                )
            )
    head = ("config", "SuperNodes", "clients", "empty", "the first", "later ones", "an exchange")
    yield table(head, rows)


def _waiting(part: Part) -> Iterable[str]:
    rows = [tuple(duration(e[k]) for k in ("after", "flower", "ours")) for e in part["entries"]]
    yield (
        "**Waiting for replies.** FedGLS, FedAvg, FedProx and all methods on `ReportedFedAvg` "
        "exchange by `Exchange.relay`, not by Flower's `Grid.send_and_receive`, which sleeps 3 s "
        "between two looks. Seconds from the moment when the last reply is there to the end of the "
        "exchange, before (*Flower*) and after (*relay*); `python -m benchmarks.waiting`:"
    )
    yield table(("reply after", "Flower", "relay"), rows)
    if "deployed" in part:
        one = part["deployed"]
        yield (
            f"Deployed, `{one['config']}` with {one['supernodes']} SuperNodes on one machine at a "
            f"load of {one['load']:.0f}, where starting processes takes nearly all of the time: an "
            f"exchange took {duration(one['before'])} before and {duration(one['after'])} after."
        )


def _startup(part: Part) -> Iterable[str]:
    rows = [
        (f"`{e['command']}`", *(_seconds(e["after"][how]) for how in ("clock", "cpu")))
        for e in part["entries"]
    ]
    yield "## Starting"
    yield (
        "Seconds of commands that compute little, by the clock and of the CPU, and how many times "
        "those of `import torch, flwr` (a run) or `import numpy` (the others) that is. From two "
        "rounds on a run draws its pictures. `python benchmarks/startup.py`."
    )
    yield table(("command", "clock", "CPU"), rows)


def _seconds(one: Part) -> str:
    return f"{one['seconds']:.2f} s, {one['ratio']:.2f} times"


def _soak(part: Part) -> Iterable[str]:
    yield "## Long runs"
    rows = [
        (e["engine"], f"{e['rounds']:,}", gib(e["last-bytes"]), f"{e['growth']:+.1%}", _left(e))
        for e in part["entries"]
    ]
    yield "nFedGNN on the bundled Cora; growth of the memory from the first quarter to the last:"
    yield table(("engine", "rounds", "memory", "growth", "processes and files left"), rows)


def _left(entry: Part) -> str:
    return ", ".join(map(str, entry["left"])) or "none"


def _gpu(part: Part) -> Iterable[str]:
    yield "## GPU"
    if part["gpu"] is None:
        yield (
            "Not measured: the machine has none. `benchmarks/gpu.py` runs the same rounds on both "
            "devices, without Flower, and compares the results."
        )
        return
    times = ", ".join(f"{e['users']:,} users {e['times-as-fast']:.1f}" for e in part["entries"])
    yield f"{part['gpu']}, rounds without Flower, times as fast as the CPU: {times}."


def _targets(full: str) -> Iterable[str]:
    """Say which sections of the long page have a target that is missed."""
    missed = []
    for section in re.split(r"^## ", full, flags=re.MULTILINE)[1:]:
        if number := section.count("**missed**"):
            missed.append(f"{section.partition(chr(10))[0]} ({number})")
    yield "## Targets"
    count = len(re.findall(r"\| (?:met|\*\*missed\*\*) \||, met \|", full))
    yield (
        f"{count} figures have a target. Missed: {'; '.join(missed) or 'none'}. Each is marked in "
        "[all tables](../results/performance/README.md)."
    )


ROUNDS: dict[str, Callable[[dict[str, Part], str], Iterable[Sequence[str]]]] = {
    "nFedGNN": _relay,
    "FedSCem": _egos,
    "FedGLS": _communities,
    "PPFL-GNN": _overlapping,
}
SECTIONS: dict[str, Callable[[Part], Iterable[str]]] = {
    "scale": _scale,
    "flwr": _flwr,
    "cluster": short_cluster,
    "state": _state,
    "secure": _secure,
    "trust": short_trust,
    "sums": short_sums,
    "alignment": short_alignment,
    "fedscem": _setup,
    "fedgls": _learner,
    "ppfl": _alignment,
    "deployment": _deployment,
    "resident": _resident,
    "waiting": _waiting,
    "startup": _startup,
    "soak": _soak,
    "gpu": _gpu,
}
