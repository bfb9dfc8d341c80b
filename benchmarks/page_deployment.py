"""The performance page's section on deployments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.layout import duration, spread, table

WAYS = {
    "resident": "in a worker",
    "empty": "none (empty ClientApp)",
    "each-message": "loaded for each message",
}


def deployment_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.deployment`` measured."""
    yield "## Deployment: an exchange with real SuperNodes"
    yield (
        "A SuperLink and SuperNodes on the loopback interface of one machine, whose cores all of "
        "them share; each SuperNode has its own data folder. Without TLS, and with TLS and "
        "registered keys. When this was measured each message started a process that imported "
        "Flower and PyTorch, which was most of the time: on machines of their own, SuperNodes do "
        "that side by side. "
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


def resident_section(part: dict[str, Any]) -> Iterable[str]:
    """Write what ``benchmarks.resident`` measured."""
    yield "## Deployment: processor time of a message"
    yield (
        "Processor seconds, user and system, of one message at one SuperNode: of the process that "
        "Flower starts for it, and of the worker that keeps the clients. *Empty* is a ClientApp "
        "that does nothing, run in turn with the others in one deployment with TLS; *above* is the "
        "difference of medians to it. *First* is the message that starts the worker and installs "
        "the app; *above* it is the difference to the empty ClientApp's first. "
        "`python -m benchmarks.resident`."
    )
    yield (
        "Most of what is left at the first message is the worker's import of PyTorch, once a run; "
        "a part of it at later ones is that Flower unpacks and checks this app's several hundred "
        "files for each. An exchange takes as long as it does because a SuperNode that has nothing "
        "to do asks for work every 3 s (the last of four, on average, after 3 · 4/5 s) and then "
        "starts a process that imports Flower: both are Flower's own."
    )
    rows = []
    for entry in part["entries"]:
        empty = _message(entry["ways"]["empty"])
        for way, one in entry["ways"].items():
            times, took = _message(one), one.get("exchange-seconds")
            above = [
                "" if way == "empty" else f"{time - least:+.2f} s"
                for time, least in zip(times, empty, strict=True)
            ]
            rows.append(
                (
                    *(entry["config"], str(entry["supernodes"]), WAYS[way]),
                    *(f"{times[0]:.2f} s", above[0], f"{times[1]:.2f} s", above[1]),
                    duration(took["median"]) if took else "",
                )
            )
    head = ("config", "SuperNodes", "clients", "first", "above", "later, median", "above")
    yield table((*head, "an exchange"), rows)
    same = all(entry["same-losses"] for entry in part["entries"])
    words = "the same to the last digit" if same else "**different**"
    yield f"Losses of both ways are {words}."


def _message(way: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of a run's first message, and of a later one."""
    return way["first"], way["later"]["median"]


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
