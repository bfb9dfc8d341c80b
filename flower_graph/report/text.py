"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_graph.report.rounds import RoundReport

WAYS = ("up", "down")
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def byte_unit(number: float) -> int:
    """Choose the power of 1024, as an index of `UNITS`, to write a number of bytes with."""
    power = 0
    # From 1023.95 on it would be printed as 1024.0.
    while number >= 1023.95 and power + 1 < len(UNITS):
        number, power = number / 1024, power + 1
    return power


def format_bytes(number: float) -> str:
    """Write a number of bytes with a binary unit, such as ``2.1 MiB``."""
    power = byte_unit(number)
    return f"{number:.0f} B" if power == 0 else f"{number / 1024**power:.1f} {UNITS[power]}"


def format_round(report: RoundReport, total: int, clients: str = "clients") -> str:
    """Write a round as one compact line; `clients` is what the method calls them."""
    up, down = (format_bytes(sum(report.bytes.get(way, {}).values())) for way in WAYS)
    parts = [
        f"round {report.round:>{len(str(total))}}/{total}",
        f"loss {report.loss:.4g}" if math.isfinite(report.loss) else f"LOSS {report.loss}",
        f"val {report.val_accuracy:.3f}",
        f"test {report.test_accuracy:.3f}",
        f"{report.answered}/{report.asked} {clients}",
        f"up {up}",
        f"down {down}",
        f"{report.seconds:.2f} s",
    ]
    if report.skipped:
        parts.append(f"skipped: {report.skipped}")
    if report.rejected:
        parts.append(f"{len(report.rejected)} rejected: {report.rejected[0].get('reason', '?')}")
    return "  ".join(parts)


def describe_result(
    name: str,
    result: Mapping[str, Any],
    out: Path,
    called: tuple[str, str] = ("client", "clients"),
) -> str:
    """Say in a few lines how good a run was, what it cost and where its outputs lie."""
    # called: one client and several, as the method calls them
    clients, (one, several) = _mean(result.get("clients")), called
    seeds = result["seed"]["values"] if isinstance(result["seed"], Mapping) else [result["seed"]]
    seconds = result["seconds"]
    return "\n".join(
        [
            f"{name}: {clients:.0f} {several}, {_mean(result['rounds']):.0f} rounds, "
            f"{'seeds' if len(seeds) > 1 else 'seed'} {', '.join(map(str, seeds))}",
            f"  accuracy  test {_share(result['test-accuracy-at-best-val'])} at the best "
            f"validation ({_share(result['best-val-accuracy'])}); "
            f"test {_share(result['test-accuracy'])} after the last round",
            f"  traffic   {_traffic(result['bytes'], 1)} in all; "
            f"{_traffic(result['bytes'], clients)} per {one}",
            f"  time      {_mean(seconds['total']):.1f} s, "
            f"{_mean(seconds['per-round-median']):.3f} s a round (median); "
            f"{format_bytes(_mean(result['peak-memory-bytes']))} of memory at most",
            f"  outputs   {out}",
        ]
    )


def _mean(value: Any) -> float:
    """Give the number, or the mean over several seeds; NaN where there is none."""
    number = value.get("mean") if isinstance(value, Mapping) else value
    return math.nan if number is None else float(number)


def _share(value: Any) -> str:
    spread = value.get("std") if isinstance(value, Mapping) else None
    return f"{_mean(value):.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def _traffic(kinds: Mapping[str, Mapping[str, Any]], users: float) -> str:
    """Give the payload up and down, per so many users."""
    sums = {way: sum(_mean(number) for number in kinds.get(way, {}).values()) for way in WAYS}
    return ", ".join(f"{way} {format_bytes(number / users)}" for way, number in sums.items())
