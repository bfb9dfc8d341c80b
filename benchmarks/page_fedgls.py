"""The performance page's section on communities as clients: FedAvg, FedGLS and how they grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import check, duration, gib, spread, table, verdict

NAMES = {"fed-gnn": "Fed-GNN", "structure-fedavg": "FedGLS"}


def fedgls_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.fedgls`` measured."""
    yield "## FedGLS: communities as clients"
    yield from _fedavg(part["fedavg"], part["targets"])
    yield from _start(part["start"], part["targets"])
    yield from _methods(part["methods"], part["targets"])
    yield from _learner(part["learner"])
    yield from _clients(part)


def _fedavg(found: dict[str, Any], targets: dict[str, float]) -> Iterable[str]:
    yield (
        f"**FedAvg of a GCN beside a plain loop**, {found['data']}, {found['clients']} Louvain "
        f"communities with {found['nodes']:,} nodes, 64 hidden, 3 local steps of Adam, all clients "
        "measured every round. *Round* is everything from Flower's `FedAvg` over the messages to "
        "`StructureClient` and back, in process; *engine* is what the clients compute of it. The "
        "loop has a PyG model with `GCNConv(cached=True)`, dense features and a `torch.optim.Adam` "
        "for each client, averages `state_dict`s, and measures. *Sparse loop* is the same with "
        "`x.to_sparse_csr()`. All four take turns, round by round."
    )
    rows = []
    for run in found["runs"]:
        loop, aim = run["dense"]["median"], targets["loop"]
        times = [duration(run[key]["median"]) for key in ("engine", "dense", "sparse")]
        ratios = [run["round"]["median"] / run[key]["median"] for key in ("dense", "sparse")]
        share = f"{run['engine']['median'] / loop:.2f}"
        shown = f"{ratios[0]:.2f}", f"at most {aim:.2f}", verdict(ratios[0], aim)
        round_ = duration(run["round"]["median"]), spread(run["round"])
        rows.append((str(run["threads"]), *round_, *times, *shown, share, f"{ratios[1]:.2f}"))
    head = ("threads", "round", "range", "engine", "loop", "sparse loop", "round / loop", "target")
    yield table((*head, "", "engine / loop", "round / sparse loop"), rows)
    apart = found["apart"]
    yield (
        f"After {found['compared']} rounds the weights differ from the loop's by at most "
        f"{apart['round']:.1e} (engine alone: {apart['engine']:.1e})."
    )


def _start(found: dict[str, Any], targets: dict[str, float]) -> Iterable[str]:
    yield (
        "**Start.** The same run in a new process on one thread, from the start of Python to the "
        "end of the first round: imports, data, Louvain, packing. The processed copy of the data "
        "is in the cache."
    )
    seconds = found["seconds"]
    lines = [
        check("first round", seconds["median"], targets["start"], duration),
        check("peak memory", found["peak-bytes"], targets["bytes"], gib),
    ]
    yield table(("figure", "measured", "target", ""), lines)
    yield f"The fastest and the slowest of {seconds['count']} processes: {spread(seconds)}."


def _methods(found: dict[str, Any], targets: dict[str, float]) -> Iterable[str]:
    yield (
        f"**FedGLS beside Fed-GNN**, {found['data']}, as shipped: whole rounds in process, a few "
        "of each in turn. FedGLS trains two networks a client where Fed-GNN trains one, and a "
        "graph learner at half of the clients. *Learner* is its step and the new graph. The last "
        "column is the ratio of what is left without it: two networks in the place of one. Most "
        "of the learner is products of all pairs of a client's nodes, in the search for neighbours "
        "and in NT-Xent, and their gradients: with fewer pairs, such as of few candidates, results "
        "would be others."
    )
    rows = []
    for run in found["runs"]:
        own, other = run["structure-fedavg"], run["fed-gnn"]
        ratio, aim = own["median"] / other["median"], targets["fedgls"]
        times = duration(own["median"]), spread(own), duration(other["median"]), spread(other)
        shown = f"{ratio:.2f}", f"at most {aim:g}", verdict(ratio, aim)
        rows.append((str(run["threads"]), *times, *shown, *_without_learner(run)))
    head = ("threads", "FedGLS", "range", "Fed-GNN", "range", "ratio", "target", "")
    yield table((*head, "learner", "without it"), rows)


def _without_learner(run: dict[str, Any]) -> tuple[str, str]:
    """Write the learner's time, and the ratio of the rest; nothing where it was not measured."""
    if "learner" not in run:
        return "", ""
    learner = run["learner"]["median"]
    rest = run["structure-fedavg"]["median"] - learner
    return duration(learner), f"{rest / run['fed-gnn']['median']:.2f}"


def _learner(entries: list[dict[str, Any]]) -> Iterable[str]:
    yield (
        "**Graph learner** of one client with sparse features, 32 of 500 for each node, k = 15: a "
        "step, then the new graph. *Contrast* is the loss that the step has in a round, with its "
        "gradient. *Memory* is the most above what the process held with the features; beside it "
        "one matrix of all pairs in float32, which is never made."
    )
    rows = [
        (
            f"{entry['nodes']:,}",
            duration(entry["seconds"]),
            duration(entry["contrast-seconds"]),
            gib(entry["bytes"]),
            gib(entry["square-bytes"]),
        )
        for entry in entries
    ]
    yield table(("nodes", "learner", "contrast", "memory", "all pairs"), rows)


def _clients(part: dict[str, Any]) -> Iterable[str]:
    yield (
        "**Clients.** Generated clients of 100 nodes at one SuperNode, half of them without edges, "
        "settings as in FedGLS's paper; whole rounds. The work is proportional to the clients, so "
        "an exponent of 1 grows as the work does."
    )
    rows = [
        (
            NAMES[method],
            f"{entry['clients']:,}",
            f"{entry['nodes']:,}",
            duration(entry["round"]["median"]),
            spread(entry["round"]),
            duration(entry["round"]["median"] / entry["clients"]),
            gib(entry["peak-bytes"]),
        )
        for method, entries in part["clients"].items()
        for entry in entries
    ]
    yield table(("method", "clients", "nodes", "round", "range", "a client", "peak memory"), rows)
    aim, fits = part["targets"]["exponent"], part["exponents"]
    lines = [
        check(f"fitted exponent, {NAMES[method]}", fit["all"], aim, "{:.2f}".format)
        for method, fit in fits.items()
    ]
    yield table(("figure", "measured", "target", ""), lines)
    steps = ", ".join(f"{NAMES[method]} {fit['last-step']:.2f}" for method, fit in fits.items())
    yield f"From the last number of clients but one to the last alone: {steps}."
