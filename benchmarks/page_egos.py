"""The performance page's sections on ego-networks: the engine alone, and the whole method."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.layout import check, duration, gib, spread, table, verdict


def ego_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.ego`` measured."""
    targets = part["targets"]
    yield "## Ego-networks: the batched engine against a plain loop"
    yield (
        "A round of FedSCem: train, embed, average, fuse, judge; without messages, masks and "
        "alignment. The loop has a PyG model with `GCNConv(cached=True)`, dense features and a "
        "`torch.optim.Adam` for each client. *Choosing* cuts a round's clients out of the batch. "
        "*Peak* is of the process with data and engine, before the loop."
    )
    rows, sizes = [], []
    for entry in part["entries"]:
        for run in entry.get("runs", []):
            plain, ratio = duration(run["plain"]["median"]), f"{run['ratio']:.2f}"
            engine = duration(run["engine"]["median"]), spread(run["engine"])
            aim = f"at most {targets['ratio']:g}", verdict(run["ratio"], targets["ratio"])
            rows.append((entry["data"], str(run["threads"]), *engine, plain, ratio, *aim))
        if "skipped" in entry:
            yield f"`{entry['config']}` was not measured: {entry['skipped']}."
            continue
        times = duration(entry["packing-seconds"]), duration(entry["choosing"]["median"])
        numbers = (f"{entry[what]:,}" for what in ("clients", "nodes", "shared"))
        peak = entry["peak-bytes"]
        aim = f"at most {gib(targets['bytes'])}", verdict(peak, targets["bytes"])
        sizes.append((entry["data"], *numbers, *times, gib(peak), *aim))
    yield table(("data", "threads", "engine", "range", "loop", "ratio", "target", ""), rows)
    head = ("data", "clients", "nodes", "shared", "packing", "choosing", "peak", "target", "")
    yield table(head, sizes)


def fedscem_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.fedscem`` measured."""
    targets, entries = part["targets"], part["entries"]
    yield "## FedSCem: the whole round"
    yield (
        "Everything from `MaskedEmbeddingAveraging` over the messages to `EgoNetworkClient` and "
        f"back, in process on {part['threads']} threads, SuperNodes one after the other. The loop "
        "is the one above, run after every round with 1 and with 2 threads; the ratio is to the "
        "faster of the two. *Train* and *mask* are of the slowest SuperNode, *mask* with pads and "
        "encoding; *unmask* is the server taking the masks away; *rest* is the other SuperNodes, "
        "the next round's keys and shares, and the messages. Masks are between SuperNodes: one "
        "alone has none, and with 100 every client has all of its own."
    )
    head = ("run", "SuperNodes", "round", "range", "target", "", "train", "mask", "unmask", "rest")
    yield table(head, (_round_row(entry, targets["round"]) for entry in entries))
    yield from _several(entries, targets)
    rows = [row for entry in entries if "loops" in entry for row in _loop_rows(entry, targets)]
    yield table(("run", "round", "loop's threads", "loop", "ratio", "target", ""), rows)
    yield (
        "**Set-up and memory.** Keys and alignment, once a run, all SuperNodes one after the "
        "other; peak memory is of the whole process, where it has no loop."
    )
    yield table(
        ("run", "SuperNodes", "clients", "nodes", "slots", "set-up", "target", "", "peak", ""),
        (_setup_row(entry, targets) for entry in entries),
    )
    for name in part["skipped"]:
        yield f"`{name}` was not measured: its data are not on this machine."
    if (ray := part["flwr"]) is not None:
        yield (
            f"**`flwr run` on Ray**, `{ray['config']}` with 2 SuperNodes: "
            f"{duration(ray['round']['median'])} a round ({spread(ray['round'])})."
        )
        above = check("above the same in process", ray["above"], targets["flwr"], duration)
        yield table(("figure", "measured", "target", ""), [above])


def _several(entries: list[dict[str, Any]], targets: dict[str, float]) -> Iterable[str]:
    """Set rounds with several SuperNodes beside those with one, and beside plain sums."""
    rounds = {(e["data"], e["what"], e["supernodes"]): e["round"]["median"] for e in entries}
    rows = []
    for (data, what, nodes), seconds in rounds.items():
        one, floor = rounds.get((data, what, 1)), rounds.get((data, f"{what}, plain sums", nodes))
        if nodes == 1 or one is None or what.endswith("plain sums"):
            continue
        is_two = nodes == 2
        aim, found = (targets["two"], seconds / one) if is_two else (targets["hundred"], seconds)
        rows.append(
            (
                f"{data}, {what}",
                str(nodes),
                duration(seconds),
                f"{seconds / one:.2f}",
                "" if floor is None else duration(floor),
                f"at most {aim:g} rounds" if is_two else f"at most {duration(aim)}",
                verdict(found, aim),
            )
        )
    if rows:
        yield (
            "**Several SuperNodes** in one process, in rounds with one; the *floor* is the same "
            "with plain sums. What stands between: each two partners, which are SuperNodes, agree "
            "on a key in each round (X25519), seal their shares for each other and add a stream. "
            "That is once for two SuperNodes, however many clients they host, and thousands of "
            "times for a hundred. Where the floor is above a target, it is the training of many "
            "small cohorts one after the other, which no faster sum removes."
        )
        head = ("run", "SuperNodes", "round", "in rounds with one", "floor", "target", "")
        yield table(head, rows)


def _name(entry: dict[str, Any]) -> str:
    return f"{entry['data']}, {entry['what']}"


def _round_row(entry: dict[str, Any], target: float) -> Sequence[str]:
    whole, parts = entry["round"]["median"], entry["parts"]
    named = [parts.get(name, 0.0) for name in ("train", "mask", "unmask")]
    # The target is for the runs that the loop goes beside: all clients at one SuperNode, masks on.
    aim = (f"at most {duration(target)}", verdict(whole, target)) if "loops" in entry else ("", "")
    times = [f"{duration(t)} ({t / whole:.0%})" for t in (*named, max(0.0, whole - sum(named)))]
    return (
        _name(entry),
        str(entry["supernodes"]),
        duration(whole),
        spread(entry["round"]),
        *aim,
        *times,
    )


def _loop_rows(entry: dict[str, Any], targets: dict[str, float]) -> Iterable[Sequence[str]]:
    whole = entry["round"]["median"]
    fastest = min(times["median"] for times in entry["loops"].values())
    for threads, times in entry["loops"].items():
        is_fastest = times["median"] == fastest
        aim = (f"at most {targets['ratio']:g}", verdict(entry["ratio"], targets["ratio"]))
        yield (
            _name(entry),
            duration(whole),
            str(threads),
            duration(times["median"]),
            f"{whole / times['median']:.2f}",
            *(aim if is_fastest else ("", "")),
        )


def _setup_row(entry: dict[str, Any], targets: dict[str, float]) -> Sequence[str]:
    seconds, peak = entry["setup-seconds"], entry["peak-bytes"]
    size = ("", "") if "loops" in entry else (gib(peak), verdict(peak, targets["bytes"]))
    return (
        _name(entry),
        *(f"{entry[what]:,}" for what in ("supernodes", "clients", "nodes", "slots")),
        duration(seconds),
        f"at most {duration(targets['setup'])}",
        verdict(seconds, targets["setup"]),
        *size,
    )
