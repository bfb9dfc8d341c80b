"""The performance page's section on deployments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, spread, table


def deployment_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.deployment`` measured."""
    yield "## Deployment: an exchange with real SuperNodes"
    yield (
        "A SuperLink and SuperNodes on the loopback interface of one machine, whose cores all of "
        "them share; each SuperNode has its own data folder. Without TLS, and with TLS and "
        "registered keys. Each message starts a process that imports Flower and PyTorch, which is "
        "most of the time: on machines of their own, SuperNodes do that side by side. "
        "*Messages* are the bytes by Flower's own count, all SuperNodes, both ways; *network* is "
        "all that passes between SuperNodes and SuperLink, with HTTP, TLS, and the requests by "
        "which SuperNodes ask for work and say that they are there. The first round, with which "
        "the app travels, is left out."
    )
    rows = [
        (
            entry["config"],
            str(entry["supernodes"]),
            "yes" if entry["tls"] else "no",
            str(entry["exchanges"]),
            duration(entry["seconds"]["median"]),
            spread(entry["seconds"]),
            _kilo(entry["message-bytes"]["median"]),
            _kilo(entry["network-bytes"]["median"]),
        )
        for entry in part["entries"]
    ]
    head = (
        "config",
        "SuperNodes",
        "TLS",
        "exchanges a round",
        "an exchange",
        "range",
        "messages",
        "network",
    )
    yield table(head, rows)


def _kilo(size: float) -> str:
    return f"{size / 1e3:,.0f} kB"
