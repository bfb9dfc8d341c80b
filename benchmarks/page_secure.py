"""Sections of the pages on performance: secure sums in both settings of trust, the alignment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.layout import check, duration, spread, table, verdict

Part = dict[str, Any]
SERVERS = {True: "trusted", False: "may lie"}


def sum_section(part: Part) -> Iterable[str]:
    """Lay out the rounds of two SuperNodes, all tables."""
    targets, first = part["targets"], part["rounds"][0]
    yield "## Secure sum"
    yield (
        f"**{first['clients']} clients at {first['supernodes']} SuperNodes**, vectors of "
        f"{first['length']:,} numbers: all of prepare, mask and unmask, and the server's part. "
        "*State* is saving a host and loading it again, which each message does."
    )
    rows = []
    for entry in part["rounds"]:
        whole, state = entry["round"]["median"], entry["state"]["median"]
        times = (duration(entry[side]["median"]) for side in ("host", "server"))
        aim = f"at most {duration(targets['round'])}", verdict(whole, targets["round"])
        limit = f"{duration(state)}, {verdict(state, targets['state'])}"
        word = f"{entry['word']} bits"
        rows.append((word, duration(whole), spread(entry["round"]), *aim, *times, limit))
    yield table(("word", "round", "range", "target", "", "host", "server", "state"), rows)


def trust_section(part: Part) -> Iterable[str]:
    """Lay out what one client's round costs, all tables."""
    targets, stages = part["targets"], ("prepare", "mask", "list", "unmask")
    yield "## Secure sum: one client of many, in both settings of trust"
    yield _how(part)
    rows = [
        (
            *_who(entry),
            *(
                duration(entry["stages"][stage]) if stage in entry["stages"] else ""
                for stage in stages
            ),
            duration(entry["seconds"]),
            ratio,
            aim,
        )
        for entry, ratio, aim in _compared(part)
    ]
    head = ("SuperNodes", "collude", "server", "partners", "threshold", *stages)
    yield table((*head, "a round", "times", "target"), rows)
    fits, growth = part["exponents"], targets["exponent"]
    yield "Growth without colluders under a trusted server, fitted:"
    checks = [
        check("exponent of a client's time", fits["seconds"], growth, "{:.2f}".format),
        check("exponent of a client's bytes", fits["bytes"], growth, "{:.2f}".format),
    ]
    yield table(("figure", "measured", "target", ""), checks)


def sums_section(part: Part) -> Iterable[str]:
    """Lay out whole sums, all tables."""
    yield "## Secure sum: whole sums, 30 % lost"
    yield (
        "Each client, or party, by its real code at a SuperNode of its own, nobody colludes; every "
        "sum is compared with the plain one and is exact. 30 % (of five parties none, as no sum of "
        "fewer is allowed) are lost at one stage after the other, or, where it says *each*, a part "
        "of them at each stage of one sum. Processor time. A hundred parties check the epoch, the "
        "others take it as these found it."
    )
    rows = [
        (
            f"{e['clients']:,}",
            SERVERS[e["trusted"]],
            ", ".join("each" if len(lost) > 1 else lost[0] for lost in e["lost"]),
            duration(e["client-seconds"]),
            duration(e["server-seconds"]),
        )
        for e in part["entries"]
    ]
    yield table(("clients", "server", "lost at", "a client", "the server"), rows)


def alignment_section(part: Part) -> Iterable[str]:
    """Lay out both forms of the alignment, all tables."""
    yield "## Alignment by blinded identities, verified"
    yield _both_forms()
    rows = [
        (*row, f"at most {part['target']:g}", verdict(entry["ratio"], part["target"]))
        for row, entry in zip(_alignments(part), part["entries"], strict=True)
    ]
    yield table((*HEAD, "target", ""), rows)
    yield (
        "What a verified point costs besides: a multiplication for each key-holder's proof, and "
        "four to check three of them, at the client and, so that a liar is replaced, at the "
        "server: 16 multiplications, where the blinded form has 5. A further exchange would make "
        "it 12: key-holders that prove under weights common to all, once all answers are there, "
        "are checked with two multiplications a point; and 10 if the server checked only what a "
        "client refuses. Products of many points at once would lift all of them, which libsodium's "
        "Python bindings do not have."
    )


def short_trust(part: Part) -> Iterable[str]:
    """Say what a client's round costs, on the short page."""
    yield _how(part)
    rows = []
    for entry, ratio, _ in _compared(part):
        start = entry["start"]
        spent = sum(seconds for what, seconds in start["seconds"].items() if what != "registry")
        rows.append(
            (
                *_who(entry),
                duration(entry["seconds"]),
                ratio,
                _kilo(entry["bytes-up"] - entry["vector-bytes"]),
                _kilo(entry["bytes-down"]),
                f"{duration(spent)}, {_kilo(start['bytes-down'])}",
            )
        )
    head = ("clients", "collude", "server", "partners", "threshold", "a round", "times")
    yield table((*head, "up, kB", "down, kB", "start: time, kB down"), rows)
    largest = max(
        (entry for entry in part["entries"] if not entry["trusted"]),
        key=lambda entry: (entry["clients"], entry["corrupt"]),
    )
    up, many = largest["bytes-up"] - largest["vector-bytes"], largest["clients"]
    registry = largest["start"]["seconds"]["registry"]
    took, kept = largest["seconds"], up * many / 1e9
    through = kept + largest["bytes-down"] * many / 1e9
    yield (
        f"A tenth colluding among {many:,} costs a client {duration(took)}; it is the "
        f"server that pays: {through:.1f} GB go through it in a round, and it keeps {kept:.1f} GB "
        "until the masks are off. To pay less, host several clients on a SuperNode, since partners "
        "are SuperNodes, or lower `corrupt`. Not in these times: the "
        f"registry, read once in a process, {many:,} parties in {duration(registry)}; a deployed "
        "SuperNode has a process for each message."
    )


def short_sums(part: Part) -> Iterable[str]:
    """Say how many were summed, on the short page."""
    said = []
    for trusted, server in SERVERS.items():
        most = [e for e in part["entries"] if e["trusted"] == trusted][-1]
        said.append(
            f"{most['clients']:,} under a server that {'is ' if trusted else ''}{server} "
            f"({duration(most['server-seconds'])} of processor time at the server)"
        )
    yield f"Sums were exact with 30 % lost, at any stage: up to {' and '.join(said)}."


def short_alignment(part: Part) -> Iterable[str]:
    """Say what verifying costs, on the short page."""
    yield f"**Alignment by blinded identities.** {_both_forms()}"
    yield table(HEAD, _alignments(part))


HEAD = ("SuperNodes", "clients", "identities of each", "points", "blinded", "verified", "times")


def _how(part: Part) -> str:
    return (
        "**One client of many**, by itself at its SuperNode, vectors of "
        f"{part['length']:,} 64-bit words; where the server may lie, clients are parties "
        "(SuperNodes). Processor time of everything that its code does in a round, state read and "
        "written at each message included, the least of several rounds; the bytes are besides the "
        "vector. *Times* is to the same under a trusted server; *start* is before the first round."
    )


def _who(entry: Part) -> Sequence[str]:
    return (
        f"{entry['clients']:,}",
        f"{entry['corrupt']:.0%}",
        SERVERS[entry["trusted"]],
        f"{entry['partners']:,}",
        str(entry["threshold"]),
    )


def _compared(part: Part) -> Iterable[tuple[Part, str, str]]:
    """Give each entry with its ratio to the trusted one; only without colluders has it a target."""
    known = {(e["clients"], e["corrupt"]): e["seconds"] for e in part["entries"] if e["trusted"]}
    limit = part["targets"]["ratio"]
    for entry in part["entries"]:
        if entry["trusted"]:
            yield entry, "", ""
            continue
        ratio = entry["seconds"] / known[entry["clients"], entry["corrupt"]]
        aim = "" if entry["corrupt"] else f"at most {limit:g}, {verdict(ratio, limit)}"
        yield entry, f"{ratio:.2f}", aim


def _both_forms() -> str:
    return (
        "Processor time of all SuperNodes and the server together, blinded as a trusted server has "
        "it, and verified, where each is a party and proves and checks everything; without the "
        "secure sum of the tables. *Points* are the identities and what fills blocks up."
    )


def _alignments(part: Part) -> list[Sequence[str]]:
    return [
        (
            str(e["supernodes"]),
            str(e["clients"]),
            str(e["identities"]),
            f"{e['points']:,}",
            duration(e["blinded"]),
            duration(e["verified"]),
            f"{e['ratio']:.2f}",
        )
        for e in part["entries"]
    ]


def _kilo(size: float) -> str:
    return f"{size / 1e3:,.0f}"
