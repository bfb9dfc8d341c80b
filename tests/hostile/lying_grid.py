"""A grid whose server lies: before an honest message it tries lies on whom the message is for.

A client that refuses is where it was, so the honest message after it is answered, and the run goes
on: one run tries all lies. It works on any grid, a deployment's too.
"""

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import public_of
from flower_graph.secure.channel import new_key
from flower_graph.secure.sum.messages import (
    EpochRequest,
    ListRequest,
    MaskRequest,
    RevealRequest,
    UnmaskRequest,
)
from flower_graph.wire.codec import entries_of
from flower_graph.wire.keys import CONFIG, RING_WORD

LOG = logging.getLogger(__name__)
Entries = Mapping[str, Any]
Change = Callable[[Entries], dict[str, Any]]
Told = tuple[str, Message]  # the kind of a lie, and the lie
WAIT = 600.0  # seconds for the answers to lies
TOLD_OTHERWISE = "others saw something else"


@dataclass(frozen=True)
class Lie:
    """One way to lie: to messages with an entry, what becomes of their entries, what is said."""

    kind: str
    at: str
    change: Change
    says: str  # a regular expression
    message_type: str | None = None
    unless: str = "align-cells"  # an entry of messages that are for something else
    again: bool = False  # the first such message once more, while a sum is under way


def changed(kind: Any, change: Callable[[Any], Any], alone: bool = False) -> Change:
    """Change one of the messages that travel together, and perhaps leave out the others."""

    def other(entries: Entries) -> dict[str, Any]:
        told: dict[str, Any] = change(kind.from_config(dict(entries))).to_config()
        return told if alone else {**entries, **told}

    return other


def edited(name: str, edit: Callable[[np.ndarray], Any]) -> Callable[[Any], Any]:
    """Edit a copy of an array of a message."""

    def change(message: Any) -> Any:
        rows = np.array(getattr(message, name))
        edit(rows)
        return replace(message, **{name: rows})

    return change


def struck(*places: int) -> Callable[[Any], Any]:
    """Strike places off a list."""
    return edited("listed", lambda listed: np.put(listed, places, False))


def flipped(name: str) -> Callable[[Any], Any]:
    """Change one bit of the first row."""
    return edited(name, lambda rows: np.bitwise_xor.at(rows, (0, 0), 1))


def own_key(name: str) -> Callable[[Any], Any]:
    """Put the server's own key in place of the first partner's."""
    return edited(name, lambda rows: np.copyto(rows[0], np.frombuffer(new_key()[1], np.uint8)))


fewer = edited("live", lambda live: np.put(live, np.flatnonzero(live)[-1], False))
# Two at opposite places of the circle have vanished, or all but one
halves = edited("listed", lambda listed: np.put(listed, [0, listed.size // 2], False))
alone = edited("listed", lambda listed: np.put(listed, np.flatnonzero(listed)[1:], False))
unsigned = edited("signatures", lambda rows: rows.fill(0))


def as_it_was(entries: Entries) -> dict[str, Any]:
    return dict(entries)


def with_party(request: RevealRequest, party: int) -> RevealRequest:
    """List a party more, with somebody's commitment."""
    commitments = np.concatenate([request.commitments, request.commitments[:1]])
    return replace(request, parties=np.append(request.parties, party), commitments=commitments)


def cut(request: RevealRequest, count: int) -> RevealRequest:
    """List the first parties alone."""
    first = request.parties[:count], request.commitments[:count]
    return replace(request, parties=first[0], commitments=first[1])


SUMS = (
    Lie("minimum lowered", "reveal-run", changed(RevealRequest, lambda m: replace(m, minimum=2)),
        "a minimum of 2 of"),
    Lie("four parties", "reveal-run", changed(RevealRequest, lambda m: cut(m, 4)),
        r"a minimum of \d+ of 4"),
    Lie("a party of its own", "reveal-run", changed(RevealRequest, lambda m: with_party(m, 99)),
        "party 99 is revoked or not in the registry"),
    Lie("a list of others", "reveal-run",
        changed(RevealRequest, lambda m: replace(m, parties=m.parties + 100)),
        "own commitment is not on the list"),
    Lie("nobody colludes", "reveal-run", changed(RevealRequest, lambda m: replace(m, corrupt=0.0)),
        "corrupt is 0.0"),
    Lie("sums that differ by one", "reveal-run",
        changed(RevealRequest, lambda m: replace(m, differ_by=1)), "differ-by is 2"),
    Lie("another's commitment", "reveal-run",
        changed(RevealRequest, lambda m: replace(m, commitments=m.commitments[::-1])),
        "own commitment is not on the list"),
    Lie("a seed of its own", "epoch-run", changed(EpochRequest, flipped("seeds")),
        "committed to another seed"),
    Lie("a channel key of its own", "epoch-run", changed(EpochRequest, own_key("channel_keys")),
        "binding is not signed"),
    Lie("other partners ready", "mask-signatures", changed(MaskRequest, fewer),
        "packets for|not among|must"),
    # It cannot open the packet beside it, and nobody signed it: no mask is made with it
    Lie("a round key of its own", "mask-signatures", changed(MaskRequest, own_key("round_keys")),
        "is not the one it signed"),
    Lie("partners vanished", "list-run", changed(ListRequest, alone), "parties sent their vectors"),
    Lie("circle cut", "list-run", changed(ListRequest, halves), "parties sent their vectors"),
    Lie("a round of another epoch", "list-run",
        changed(ListRequest, lambda m: replace(m, run_id=bytes(16))), "nothing was sent"),
    Lie("lists that differ", "unmask-run", changed(UnmaskRequest, unsigned), TOLD_OTHERWISE),
    Lie("keys of a round again", "prepare-run", as_it_was, "not newer than", again=True),
    Lie("a vector of a round again", "mask-signatures", as_it_was, "not after|masked already",
        again=True),
)  # fmt: skip


def in_the_clear(entries: Entries) -> dict[str, Any]:
    """Ask for the same vector without masks."""
    masks = (RING_WORD, "ring-", "mask-")
    return {key: value for key, value in entries.items() if not key.startswith(masks)}


def own_answers(request: ids.UnionRequest) -> ids.UnionRequest:
    share = ids.scalar(b"the server's own", b"key", 0)
    keys, points = np.array(request.keys), np.array(request.points)
    keys[0] = np.frombuffer(public_of(share), np.uint8)
    points[0] = ids.multiply(points[0], share)
    return replace(request, keys=keys, points=points)


def holders(*places: int) -> Change:
    """Give the answers of some key-holders alone, or of one as if there were several."""
    names = ("holders", "keys", "signatures", "points", "proofs")
    return changed(
        ids.UnionRequest,
        lambda m: replace(m, **{name: getattr(m, name)[list(places)] for name in names}),
    )


def guesses(request: ids.EvaluateRequest) -> ids.EvaluateRequest:
    return replace(request, points=request.points[::-1])


def telling(**changes: Any) -> Change:
    return lambda entries: {**entries, **changes}


def declared(change: Callable[[np.ndarray], Any]) -> Change:
    """Change what is said of the points that clients will bring: rows of client and points."""
    return changed(RevealRequest, lambda m: replace(m, declared=change(np.array(m.declared))))


def points(number: int) -> Change:
    return declared(lambda rows: np.stack([rows[:, 0], 0 * rows[:, 1] + number], 1))


# FedSCem's messages besides those of its sums
FEDSCEM = (
    Lie("a semi-honest alignment", "alignment", telling(alignment="psi"),
        "here it is verified"),
    Lie("a plain alignment", "alignment", telling(alignment="plain"),
        "here it is (psi|verified)"),
    Lie("plain sums", "mask-round", in_the_clear, "no masks are asked for"),
    Lie("other clients", "mask-signatures", telling(clients=(10**6).to_bytes(8, "little")),
        "clients .1000000. are asked"),
    Lie("to go back", "alignment", telling(**{"resume-round": 1, "resume-attempt": "another"}),
        "loads no checkpoint from before", again=True),
    Lie("guesses", "align-parties", changed(ids.EvaluateRequest, guesses), "is not signed by",
        unless="-"),
    Lie("answers of its own", "align-keys", changed(ids.UnionRequest, own_answers),
        "is not signed by it", unless="-"),
    Lie("answers without proof", "align-keys",
        changed(ids.UnionRequest, lambda m: replace(m, points=np.roll(m.points, 1, 0))),
        "are not proved", unless="-"),
    Lie("no proofs", "align-keys",
        changed(ids.UnionRequest, lambda m: replace(m, proofs=np.zeros_like(m.proofs))),
        "are not proved", unless="-"),
    Lie("one key-holder thrice", "align-keys", holders(0, 0, 0), "must differ", unless="-"),
    Lie("two key-holders", "align-keys", holders(0, 1), "must differ", unless="-"),
    Lie("a strange key-holder", "align-keys",
        changed(ids.UnionRequest, lambda m: replace(m, holders=m.holders + 77)),
        "of the draw", unless="-"),
    Lie("other points", "reveal-declared", declared(lambda rows: np.add(rows, [0, 1])),
        "not as we declared"),
    Lie("more points than the cap", "reveal-declared", points(1 << 15), r"client \d+.*32768"),
    Lie("no points", "reveal-declared", points(0), r"client \d+.*0"),
    Lie("points in no order", "reveal-declared", declared(np.flipud), "ascending"),
    Lie("points of others", "reveal-declared", declared(lambda rows: np.add(rows, [100, 0])),
        "not as we declared"),
    *SUMS,
)  # fmt: skip


def rewritten(name: str, change: Callable[[np.ndarray], Any]) -> Change:
    """Change one entry, of integers."""
    return lambda entries: {
        **entries,
        name: change(np.frombuffer(entries[name], "<i8").copy()).tobytes(),
    }


def fewer_claims(entries: Entries) -> dict[str, Any]:
    """Leave out what the last client's SuperNode has claimed."""
    last = {"rows": 1, "clients": 1, "signatures": 64, "nodes": 8 * entries["claim-rows"][-1]}
    return {
        **entries,
        **{f"claim-{name}": entries[f"claim-{name}"][:-n] for name, n in last.items()},
    }


def no_claims(entries: Entries) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if not name.startswith("claim-")}


NOT_ALIKE = "means for some clients and not for others"
# PPFL-GNN's messages; its clients have a turn a round, and a vector that is masked was theirs
PPFL = (
    *(lie for lie in SUMS if lie.at != "mask-signatures" or lie.again),
    Lie("other places", "slots", rewritten("slots", np.flip), "orders public nodes otherwise"),
    Lie("another's node", "slots",
        rewritten("claim-nodes", lambda nodes: np.roll(nodes, 1)), "is not signed with"),
    Lie("fewer claims", "slots", fewer_claims, r"claims of (\d+) parties, sums of (?!\1 )"),
    Lie("no claims", "slots", no_claims, "claims of 0 parties"),
    Lie("a longer sum", "slots",
        lambda entries: {**entries, "mask-length": entries["mask-length"] + 3},
        "another length than the nodes"),
    Lie("other means for one", "claim-means",
        lambda entries: {**entries, "claim-means": entries["claim-means"][::-1]},
        "are not those that it shows to all"),
    Lie("a round again", "claim-means",
        lambda entries: {**entries, "server-round": entries["server-round"] - 1},
        r"round (\d+) is not after \1"),
    Lie("no means for one", "claim-means", telling(**{"with-targets": [0]}), NOT_ALIKE),
    Lie("means for one", "slots", telling(**{"claim-means": bytes(64)}), NOT_ALIKE),
)  # fmt: skip


class Enough(BaseException):
    """Ends a run once so many lies were told."""


class LyingGrid:
    """Wraps a grid; ``said`` has by the kind of lie what the client answered, None for no error."""

    def __init__(self, grid: Any, lies: Sequence[Lie] = SUMS, most: float = math.inf) -> None:
        self.grid, self._left, self._most = grid, list(lies), most
        self.said: dict[str, str | None] = {}
        self._first: dict[tuple[int, str], Message] = {}  # by SuperNode and what is asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        if len(self.said) >= self._most:
            raise Enough
        honest = list(messages)
        for one in honest:
            entries = entries_of(one.content)
            for name in {lie.at for lie in self._left if lie.again}:
                if name in entries:
                    self._first.setdefault((one.metadata.dst_node_id, name), one)
        self._send([*self._due(honest), *self._repeated(honest)])
        return self.grid.push_messages(honest)

    def _due(self, honest: Sequence[Message]) -> list[Told]:
        """Lie to these messages, to one SuperNode after the other."""
        found: list[Told] = []
        for lie in [lie for lie in self._left if not lie.again]:
            given = [(one, entries_of(one.content)) for one in honest]
            if to := [pair for pair in given if lie.at in pair[1] and lie.unless not in pair[1]]:
                self._left.remove(lie)
                one, entries = to[len(found) % len(to)]
                told = ConfigRecord(lie.change(entries))
                found.append((lie.kind, like(one, {CONFIG: told}, lie.message_type)))
        return found

    def _repeated(self, honest: Sequence[Message]) -> list[Told]:
        """Ask once more for what was asked, such as the vector of a round that is under way."""
        lists = [one for one in honest if "list-run" in entries_of(one.content)]
        again = [lie for lie in self._left if lie.again and lists]
        found: list[Told] = []
        for lie, one in zip(again, lists, strict=False):
            first = self._first[one.metadata.dst_node_id, lie.at]
            told = ConfigRecord(lie.change(entries_of(first.content)))
            found.append((lie.kind, like(first, {CONFIG: told})))
        self._left = [lie for lie in self._left if lie not in again]
        return found

    def _send(self, lies: Sequence[Told]) -> None:
        """Send lies and wait for all answers."""
        ids = dict(zip(self.grid.push_messages([one for _, one in lies]), lies, strict=True))
        deadline = time.monotonic() + WAIT
        while ids and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(ids)):
                kind, _ = ids.pop(reply.metadata.reply_to_message_id)
                self.said[kind] = reply.error.reason if reply.has_error() else None
                LOG.warning("lie: %s: %s", kind, self.said[kind])
            time.sleep(0.05 if ids else 0)


def like(message: Message, records: Mapping[str, Any], message_type: str | None = None) -> Message:
    """Write a message with other records, or of another type."""
    about = message.metadata
    return Message(
        RecordDict({**message.content, **records}),
        about.dst_node_id,
        message_type or about.message_type,
        group_id=about.group_id,
    )


def unrefused(said: Mapping[str, str | None], lies: Iterable[Lie] = SUMS) -> dict[str, str | None]:
    """Return the lies that were not tried or not refused for what they are, with what was said."""
    return {
        lie.kind: said.get(lie.kind, "not tried")
        for lie in lies
        if not re.search(lie.says, said.get(lie.kind) or "")
    }
