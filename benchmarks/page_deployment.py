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


def waiting_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.waiting`` measured."""
    yield "## Deployment: what is lost by looking for replies"
    yield (
        "Seconds from the moment when the last reply of an exchange is there to its end, over a "
        "grid that answers after a given time. *Flower* is `Grid.send_and_receive`, which sleeps "
        "3 s between two looks; *relay* is `Exchange.relay`, by which FedGLS, FedAvg, FedProx and "
        "all methods on `ReportedFedAvg` exchange. The deployments above were measured while they "
        "still went through the first. `python -m benchmarks.waiting`."
    )
    rows = [
        (duration(one["after"]), duration(one["flower"]), duration(one["ours"]))
        for one in part["entries"]
    ]
    yield table(("reply after", "Flower", "relay"), rows)
    if "deployed" in part:
        one = part["deployed"]
        yield (
            f"Deployed, `{one['config']}` with {one['supernodes']} SuperNodes, before and after at "
            f"the same time on one machine at a load of {one['load']:.0f}, where it is starting "
            "processes that takes nearly all of the time: an exchange took "
            f"{duration(one['before'])} before and "
            f"{duration(one['after'])} after (medians of {one['rounds']} rounds; `measure` of "
            "`benchmarks.deployment` in both checkouts)."
        )


def _kilo(size: float) -> str:
    return f"{size / 1e3:,.0f} kB"
