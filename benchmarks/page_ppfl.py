"""The performance page's section on PPFL-GNN: alignment, DeepWalk, whole iterations, Ray."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.layout import check, duration, gib, spread, table, verdict

AXES = {"clients": "clients", "nodes": "public nodes", "dimension": "dimensions"}


def ppfl_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.ppfl`` measured."""
    targets, versions = part["targets"], part["versions"]
    yield "## PPFL-GNN: public nodes of overlapping graphs"
    yield "With " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    yield from _goals(part["server"], targets)
    yield from _growth(part["server"], targets)
    yield from _deepwalk(part["deepwalk"], targets["deepwalk"])
    yield from _iterations(part["iterations"])
    if "last" in part["targets"]:
        yield from _last(part)
    yield from _ray(part["flwr"], targets["flwr"])


def _goals(server: dict[str, Any], targets: dict[str, float]) -> Iterable[str]:
    yield (
        "**The server's alignment** of embeddings that all clients have of the same nodes. "
        "*Pairs* is `align_pairs`, *consensus* is `consensus`, both up to the means that go back. "
        "Clients have one common embedding, each turned in its own way, with noise as large as the "
        "embedding. *Unrelated* is noise alone, on which a consensus takes longest; the time of "
        "pairs is the same for all data."
    )
    rows = []
    for entry in server["goals"]:
        seconds, aim = entry["seconds"], targets[entry["form"]]
        data = "common" if entry["related"] else "unrelated"
        times = duration(seconds["median"]), spread(seconds)
        goal = f"at most {duration(aim)}", verdict(seconds["median"], aim)
        rows.append((entry["form"], *_size(entry), data, str(entry["threads"]), *times, *goal))
    head = ("form", *AXES.values(), "data", "threads", "alignment", "range", "target", "")
    yield table(head, rows)
    yield (
        "**Whole iterations of as many clients with nothing to learn**, all at one SuperNode, in "
        "process: messages, alignment, and how precise it is (P@k)."
    )
    rows = [
        (
            entry["form"],
            *_size(entry),
            str(entry["threads"]),
            duration(entry["round"]["median"]),
            spread(entry["round"]),
            gib(entry["payload-bytes"]),
            gib(entry["peak-bytes"]),
        )
        for entry in server["exchange"]
    ]
    head = ("form", *AXES.values(), "threads", "iteration", "range", "payload", "peak memory")
    yield table(head, rows)


def _size(entry: dict[str, Any]) -> Sequence[str]:
    return [f"{entry[axis]:,}" for axis in AXES]


def _growth(server: dict[str, Any], targets: dict[str, float]) -> Iterable[str]:
    yield (
        "**Growth** along one axis at a time, on the common embedding. Peak memory is of the whole "
        "process, PyTorch and the embeddings included."
    )
    forms = [entry for entry in server["growth"] if entry["form"] == "consensus"]
    largest = max(forms, key=lambda entry: int(entry["clients"]))
    rows = [
        (
            entry["form"],
            *_size(entry),
            duration(entry["seconds"]["median"]),
            spread(entry["seconds"]),
            gib(entry["peak-bytes"]),
        )
        for entry in server["growth"]
    ]
    yield table(("form", *AXES.values(), "alignment", "range", "peak memory"), rows)
    what = f"peak memory, consensus of {largest['clients']:,} clients"
    lines = [check(what, largest["peak-bytes"], targets["bytes"], gib)]
    yield table(("figure", "measured", "target", ""), lines)
    yield (
        "Exponents of the time. Pairs do `m²` times the work for `m` clients, a consensus `m` "
        "times; both grow with the nodes, and with the square of the dimension until the singular "
        "values take over, with its cube."
    )
    fits = [
        (fit["form"], AXES[fit["axis"]], f"{fit['all']:.2f}", f"{fit['last-step']:.2f}")
        for fit in server["fits"]
    ]
    yield table(("form", "grows", "all sizes", "from the last but one"), fits)


def _deepwalk(entries: list[dict[str, Any]], aim: float) -> Iterable[str]:
    first = entries[0]
    yield (
        f"**DeepWalk.** An iteration of a Cora client with {first['nodes']:,} nodes "
        f"({first['isolated']} of them without an edge) and {first['edges']:,} edges on one "
        "thread: taking the means, walking, training, the loss and embedding. After each, gensim "
        "alone is given the same walks as lists (`Word2Vec(sentences=walks, workers=1, ...)`). "
        "The first iteration of a run has no means to take."
    )
    rows = []
    for entry in entries:
        for kind in ("first", "later"):
            own, alone = entry[kind], entry[f"{kind}-gensim"]
            ratio = entry[f"{kind}-ratio"]
            times = duration(own["median"]), spread(own), duration(alone["median"]), spread(alone)
            goal = f"{ratio:.2f}", f"at most {aim:g}", verdict(ratio, aim)
            parts = duration(entry["walks"]["median"]), duration(entry["build"]["median"])
            rows.append((kind, str(entry["epochs"]), *times, *goal, *parts))
    head = ("iteration", "passes", "ours", "range", "gensim", "range", "ratio", "target", "")
    yield table((*head, "walking", "making the model"), rows)


def _iterations(entries: list[dict[str, Any]]) -> Iterable[str]:
    yield (
        "**Iterations in process**, a SuperNode for each client, one after the other. *Learning* "
        "and *judging* are of all clients together; the rest is the server, the messages and the "
        "clients' state. The last iteration, where the MLP judges too, is not counted. *Idle* has "
        "next to nothing to learn and judges nothing. Bytes are of one iteration, both ways."
    )
    rows = [
        (
            _run(entry),
            str(entry["clients"]),
            f"{entry['nodes']:,} / {entry['public']:,}",
            str(entry["threads"]),
            duration(entry["round"]["median"]),
            spread(entry["round"]),
            *(duration(entry[what]) for what in ("learn", "judge", "rest")),
            f"{entry['payload-bytes']:,}",
            f"{entry['wire-bytes']:,}",
            gib(entry["peak-bytes"]),
        )
        for entry in entries
    ]
    head = ("run", "clients", "nodes / public", "threads", "iteration", "range")
    parts = ("learning", "judging", "rest", "payload", "messages", "peak memory")
    yield table((*head, *parts), rows)


def _last(part: dict[str, Any]) -> Iterable[str]:
    yield (
        "**The last iteration** as shipped. What it does besides is judging by an MLP too, 5 folds "
        "of validation and of test nodes at each client, by scikit-learn's `MLPClassifier`. Its "
        "200 passes take scikit-learn longer to look after than to compute: a loop of our own gave "
        "the same numbers faster, and was not kept, since a classifier of our own is "
        "more to maintain than the seconds are worth."
    )
    aim = part["targets"]["last"]
    rows = [
        (
            _run(entry),
            str(entry["threads"]),
            duration(entry["round"]["median"]),
            duration(entry["last"]["seconds"]),
            duration(entry["last"]["judge"]),
            f"at most {duration(aim)}",
            verdict(entry["last"]["seconds"], aim),
        )
        for entry in part["iterations"]
        if not entry["settings"]
    ]
    yield table(("run", "threads", "iteration", "last", "judging", "target", ""), rows)


def _run(entry: dict[str, Any]) -> str:
    return f"`{entry['config']}`{', idle' if entry['settings'] else ''}"


def _ray(entries: list[dict[str, Any]], aim: float) -> Iterable[str]:
    if not entries:
        return
    yield (
        "**`flwr run` on Ray** with a SuperNode for each client. *Own work* is what the clients "
        "learn and judge, from the table above on one thread, shared out over as many actors as "
        "there are cores; *above* is the rest of the iteration: Flower's engine, the messages, the "
        "server, the clients' state, and what work loses when all cores are busy. Idle runs show "
        "it almost alone."
    )
    rows = [
        (
            _run(entry),
            duration(entry["round"]["median"]),
            spread(entry["round"]),
            duration(entry["own"]),
            duration(entry["above"]),
            f"at most {duration(aim)}",
            verdict(entry["above"], aim),
            duration(entry["total-seconds"]),
        )
        for entry in entries
    ]
    head = ("run", "iteration", "range", "own work", "above", "target", "", "whole run")
    yield table(head, rows)


def gpu_alignment(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.gpu`` measured of the alignment, if it did."""
    if not (entries := part.get("aligned")):
        return
    own = [(entry["form"], *_size(entry), duration(entry["cpu-seconds"])) for entry in entries]
    head = ("alignment", *AXES.values(), "CPU")
    if part["gpu"] is None:
        yield table(head, own)
        return
    yield "**PPFL-GNN's alignment**; compared are the means that go back to the clients."
    both = [
        (
            *row,
            duration(entry["gpu-seconds"]),
            duration(entry["transfer-seconds"]),
            f"{entry['times-as-fast']:.1f}",
            f"{entry['means-difference']:.1e}",
            "yes" if entry["equal"] else "**no**",
        )
        for row, entry in zip(own, entries, strict=True)
    ]
    yield table((*head, "GPU", "transfer", "times as fast", "means", "equal"), both)
