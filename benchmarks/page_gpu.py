"""The performance page's section on rounds on a GPU beside the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, gib, rate, table, verdict
from benchmarks.page_ppfl import gpu_alignment

SIDES = ("CPU, a round", "GPU, a round", "transfer", "times as fast")


def gpu_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.gpu`` measured."""
    yield "## GPU"
    yield (
        "`benchmarks/gpu.py` runs the same rounds on both devices, without Flower and without "
        "messages, and compares the last latent vectors and all losses (relative difference, at "
        f"most {part['tolerance']:g}). Dropout is off, because the devices draw different numbers."
    )
    if part["gpu"] is None:
        yield "**Not measured on a GPU: this machine has none.** The times below are the CPU's."
        rows = [(f"{e['users']:,}", duration(e["cpu-seconds"])) for e in part["entries"]]
        yield table(("users", "CPU, a round"), rows)
        yield from _steps(part["entries"])
        yield from _gpu_egos(part)
        yield from _engines(part)
        yield from gpu_alignment(part)
        return
    yield f"GPU: {part['gpu']}."
    yield (
        "*Transfer* is the way of a round's latent vectors to the host's memory and back, which a "
        "round with messages takes besides."
    )
    rows_both = [(f"{e['users']:,}", *_both(e, "latent")) for e in part["entries"]]
    yield table(("users", *SIDES, "latents", "losses", "equal"), rows_both)
    yield from _steps(part["entries"])
    yield from _gpu_egos(part)
    yield from _engines(part)
    yield from gpu_alignment(part)


def _steps(entries: list[dict[str, Any]]) -> Iterable[str]:
    """Hold the users' step of nFedGNN against the bandwidth of each device's memory."""
    found = [
        (f"{entry['users']:,}", device.upper(), entry[f"{device}-step"])
        for entry in entries
        for device in ("cpu", "gpu")
        if f"{device}-step" in entry
    ]
    if not found:
        return
    yield (
        "**nFedGNN's user step beside the memory bandwidth.** Adam and the forward have to read "
        "weights and both moments, write them, and read the weights again; the bandwidth is a "
        "triad's over as many numbers, in turns."
    )
    rows = [
        (
            users,
            device,
            gib(step["bytes"]),
            duration(step["seconds"]["median"]),
            rate(step["bytes-per-second"]),
            rate(step["bandwidth"]),
            f"{step['times-bound']:.1f}",
            f"at most {step['target']:g}",
            verdict(step["times-bound"], step["target"]),
        )
        for users, device, step in found
    ]
    head = ("users", "device", "bytes", "step", "rate", "bandwidth", "times the bound", "target")
    yield table((*head, ""), rows)


def _gpu_egos(part: dict[str, Any]) -> Iterable[str]:
    if not (entries := part.get("ego-entries")):
        return
    if part["gpu"] is None:
        cpu_rows = [(f"{e['clients']:,}", duration(e["cpu-seconds"])) for e in entries]
        yield table(("ego-networks", "CPU, a round"), cpu_rows)
        return
    yield "**FedSCem's ego-networks**, the same rounds; compared are embeddings and losses."
    rows = [(f"{e['clients']:,}", f"{e['nodes']:,}", *_both(e, "embedding")) for e in entries]
    yield table(("clients", "nodes", *SIDES, "embeddings", "losses", "equal"), rows)


def _engines(part: dict[str, Any]) -> Iterable[str]:
    """Write the rounds of FedGLS's engine and of PPFL-GNN's GAT, if they were measured."""
    if not (entries := part.get("engines")):
        return
    own = [(e["engine"], f"{e['clients']:,}", f"{e['nodes']:,}") for e in entries]
    head = ("engine", "clients", "nodes of each")
    if part["gpu"] is None:
        times = (duration(e["cpu-seconds"]) for e in entries)
        yield table((*head, SIDES[0]), [(*row, time) for row, time in zip(own, times, strict=True)])
        return
    yield (
        "**FedGLS and PPFL-GNN**, the same rounds; compared are what is sent (mean models, "
        "embeddings) and losses."
    )
    rows = [(*row, *_both(e, "sent")) for row, e in zip(own, entries, strict=True)]
    yield table((*head, *SIDES, "sent", "losses", "equal"), rows)


def _both(entry: dict[str, Any], compared: str) -> tuple[str, ...]:
    """Write the times of both devices, and how far what is compared and the losses differ."""
    return (
        duration(entry["cpu-seconds"]),
        duration(entry["gpu-seconds"]),
        duration(entry["transfer-seconds"]),
        f"{entry['times-as-fast']:.1f}",
        f"{entry[f'{compared}-difference']:.1e}",
        f"{entry['loss-difference']:.1e}",
        "yes" if entry["equal"] else "**no**",
    )
