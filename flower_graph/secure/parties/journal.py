"""The journal of a party: the steps that it has done once and never repeats for a server.

Two sums that differ in one contributor reveal what that contributor sent, and a second block of
points that a key-holder evaluates is a second dictionary. A server must not bring a party back to
before a step (by rolling Flower's state back, by a restarted SuperNode, by another epoch). So a
file beside the party's key records the steps; no request of a server rolls this file back.

A step that was done in the same run is *refused*, in whatever epoch: numbers of sums must go up.
A repetition that cannot be told from honest work is *bounded*: a new run over the same data, or a
SuperNode that has lost its state. Both count as beginning anew, which is allowed so many times in
24 hours. The file holds the runs that were used last; a run that no longer fits in counts as new.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flower_graph.errors import CHANGED_SUM, IdentityError, RefusedError, refuse_if
from flower_graph.secure.channel import framed
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.storage.files import locked, replaced
from flower_graph.storage.reading import MOST_RECORD, parse_json, read_bytes, reading

__all__ = ["Journal"]

HEAD = b"flower-graph journal 4 "  # then a hash of the JSON in the next line
OTHER = "is no journal of a SuperNode, or is damaged"
MOST_RECORDS = 5 * 1024  # of a run and a purpose each, of which a run has five at most
MOST_NAME = 256  # bytes of a run's name: the server may have chosen some of them
MOST_BEGUN = 24  # times a day that a party begins anew, unless trust-runs says otherwise
DAY = 24 * 3600.0  # seconds
# So many lists of commitments a party answers in a run. Whoever shows a list, sees the graph that
# it gives, and shows another, has so many draws.
MOST_LISTS = 8
# Alignments of a run, each under another key: so many blocks of a client a key-holder evaluates
MOST_ALIGNMENTS = 8
# Limits of the record of sums' parties: hexadecimal digits of a run's sets, and the newest runs.
# Nothing is known of an older run, so it is over
MOST_DIGITS, MOST_COMPARED = 1 << 19, 8
MOST_STATES = 1 << 13  # entries of all runs, two of a state; then the older half is forgotten
OVER = 1 << 62
ALIGNMENT, SUMS = b"alignment", b"list"  # purposes


@dataclass
class Kept:
    """The journal's record of one purpose in one run."""

    number: int = -1  # the last step
    times: int = 0  # how many there were, where that is bounded
    begun: bool = False  # whether the run is counted
    mark: str = ""  # what the state has that has seen the last sum
    served: list[int] = field(default_factory=list)  # clients whose blocks were in the last one
    # By purpose the sets of parties in its sums, as hexadecimal numbers
    sums: dict[str, list[str]] = field(default_factory=dict)
    limit: float = 0.0  # of the numbers in its sums; 0 before the first list
    shown: list[str] = field(default_factory=list)  # the commitments whose seeds were shown

    def go_up(self, number: int) -> None:
        why = f"round {number} is not after {self.number}, the last of this run"
        refuse_if(number <= self.number, why)
        self.number = int(number)

    def count(self, most: int, what: str) -> None:
        refuse_if(self.times >= most, f"{most} {what} in this run")
        self.times += 1


KEPT = {name: type(value) for name, value in vars(Kept()).items()}


@dataclass
class Content:
    """The content of a journal's file; in each table the entry that was used last is at the end."""

    begun: list[float] = field(default_factory=list)  # when the party began anew, in the last day
    records: dict[str, Kept] = field(default_factory=dict)
    # By state the parties of the sum that it was in, as a hexadecimal number; and an entry of the
    # state with how its sum was made
    states: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Content:
        with reading(f"journal {path}", IdentityError):
            try:
                data = read_bytes(path, MOST_RECORD)
            except FileNotFoundError:
                return cls()
        text = data.partition(b"\n")[2]
        with reading(f"journal {path}", IdentityError, OTHER):
            found = cls(**parse_json(text))
            raw: dict[str, Any] = vars(found)["records"]
            found.records = {name: Kept(**kept) for name, kept in raw.items()}
            every = found.records.values()
            values = [(KEPT[name], one) for kept in every for name, one in vars(kept).items()]
            values += [(float, moment) for moment in found.begun]
            if data != sealed(text) or any(type(value) is not kind for kind, value in values):
                raise ValueError("another hash, or entries of other types")
            sets = [one for kept in every for sets in kept.sums.values() for one in sets]
            _ = [int(one, 16) for one in [*found.states.values(), *sets]]
        return found

    def of(self, *name: bytes) -> Kept:
        """Return the record of a run, or of a purpose in it, as the one that was used last."""
        key = _key(name)
        kept = self.records[key] = self.records.pop(key, Kept())
        return kept

    def check_state(
        self, purpose: str, state: bytes, is_same: Callable[[int], object]
    ) -> tuple[str, str]:
        """Refuse a state whose sum's parties, clients or limit are other ones; return its names."""
        key, whole = (
            hashlib.sha256(framed(purpose.encode(), part)).hexdigest()[:32]
            for part in (state[:STATE_BYTES], state)
        )
        if (before := self.states.get(key)) is not None:
            about = f"what is to be sent has not changed since a sum ({purpose}) with other"
            ended = "in this run or an earlier one (of the same seed)"
            refuse_if(not is_same(int(before, 16)), f"{about} SuperNodes, {ended}")
            is_other = whole != key and whole not in self.states
            refuse_if(is_other, f"{about} clients of ours or another limit, {ended}")
        return key, whole

    def trim(self) -> None:
        """Remove records and states beyond the limits; runs that are compared no more end."""
        self.records = dict(list(self.records.items())[-MOST_RECORDS:])
        for old in [one for one in self.records.values() if one.sums][:-MOST_COMPARED]:
            old.sums, old.number = {}, OVER
        if len(self.states) > MOST_STATES:
            self.states = dict(list(self.states.items())[-MOST_STATES // 2 :])


def _key(name: tuple[bytes, ...]) -> str:
    joined = framed(*name)
    why = f"the run's name has {len(joined)} bytes, from 1 to {MOST_NAME} are kept"
    refuse_if(len(joined) > MOST_NAME, why)
    return joined.hex()


@dataclass(frozen=True)
class Journal:
    """A party's record of its steps in one run.

    A record is on the disk when a method returns. If one raises ``RefusedError`` (the step was
    done) or ``IdentityError`` (the journal cannot be read or written), nothing may be sent.
    """

    path: Path  # of the file; it need not exist
    run: bytes  # the run's name: nothing that a server may choose anew when it repeats a round
    most_begun: int = MOST_BEGUN  # times in 24 hours that the party begins anew

    def last(self, purpose: bytes) -> int:
        """Return the last round that `contribute` has recorded; -1 before the first."""
        return Content.read(self.path).of(purpose, self.run).number

    def contribute(self, number: int, purpose: bytes) -> None:
        """Record that something of a round is sent; the round must be above all of the run."""
        with self._changed() as content:
            content.of(purpose, self.run).go_up(number)

    def continue_run(self, number: int, mark: str) -> str:
        """Record a round, as `contribute` does, and detect a party state that was rolled back.

        ``mark`` is the last result, as the party's state has it, empty for a new state; the state's
        new mark is returned. A party with another state, as with another run, begins anew.
        """
        with self._changed() as content:
            kept = content.of(self.run)
            kept.go_up(number)
            self._begin(content, anew=kept.mark != mark)
            kept.mark = secrets.token_hex(8)
        return kept.mark

    def answer_list(self, commitment: bytes, limit: float) -> None:
        """Record, before a seed is shown, that a list of commitments is answered.

        A run may show ``MOST_LISTS``, whatever numbers the server gives its sums: a server that
        shows a list sees the draw of partners and key-holders that it gives. A run in which a list
        is answered has begun. Refused too if the seed of this commitment was shown before: who
        knows a seed may choose others to suit it. And if the limit is not the run's: two sums of
        the same parties under two limits tell who has large numbers.
        """
        with self._changed() as content:
            kept = content.of(self.run)
            kept.count(MOST_LISTS, "lists of commitments were answered")
            is_known = commitment.hex() in kept.shown
            refuse_if(is_known, "the seed of the graph was shown for another list: bind anew")
            why = f"limit is {limit:g}, of this run's sums {kept.limit:g}"
            refuse_if(kept.limit not in (0.0, limit), why)
            kept.shown.append(commitment.hex())
            kept.limit = float(limit)
            self._begin(content)

    def has_shown(self, commitment: bytes) -> bool:
        """Tell whether the seed of a commitment was shown in this run."""
        return commitment.hex() in Content.read(self.path).of(self.run).shown

    def check_state(self, purpose: str, state: bytes, ready: int) -> None:
        """Refuse, before it is sent, a state that was in a sum which cannot be had again.

        ``state`` is the state's `digest_of`, and behind it, if there is any, how the sum is made:
        unchanged vectors of fewer clients, or under another limit, would differ by what is left
        out. ``ready`` is the `set_of` parties that may be in the sum.
        States of all runs are compared: a run that begins anew from the same data and seed has the
        states of the run before it.
        """
        content = Content.read(self.path)
        content.check_state(purpose, state, lambda before: not before & ~ready)

    def enter(self, number: int, purpose: str, state: bytes, parties: int, differ_by: int) -> None:
        """Record, before the list is signed, the parties and the state of a sum.

        Refused if ``parties``, a `set_of`, are neither those of an earlier sum of the purpose nor
        differ from all by ``differ_by``; if the state was in a sum of others; or if more sets were
        in sums than are kept.
        """
        with self._changed() as content:
            kept = content.of(SUMS, self.run)
            kept.go_up(number)
            earlier, this = kept.sums.setdefault(purpose, []), f"{parties:x}"
            check_difference(parties, [int(one, 16) for one in earlier], differ_by)
            earlier += [] if this in earlier else [this]
            digits = sum(len(one) for sets in kept.sums.values() for one in sets)
            why = f"the journal keeps no further set of SuperNodes ({DIFFER_BY})"
            refuse_if(digits > MOST_DIGITS, why)
            key, whole = content.check_state(purpose, state, lambda before: before == parties)
            for name, value in ((whole, "0"), (key, this)):  # the two may be one
                content.states.pop(name, None)
                content.states[name] = value

    @contextmanager
    def one_trial(self, step: int, purpose: bytes) -> Iterator[None]:
        """Read the relayed sum of a step in the block; a refusal ends the step, which goes up."""
        refuse_if(step <= self.last(purpose), CHANGED_SUM)
        try:
            yield
        except RefusedError:
            self.contribute(step, purpose)
            raise

    def serve(self, alignment: int, clients: Collection[int]) -> None:
        """Record, before answers leave, the clients whose blocks are evaluated, once an alignment.

        ``alignment`` goes up when an alignment begins again under another key.
        """
        with self._changed() as content:
            self._begin(content)
            kept = content.of(ALIGNMENT, self.run)
            if alignment != kept.number:
                kept.go_up(alignment)
                kept.count(MOST_ALIGNMENTS, "alignments were begun")
                kept.served = []
            for client in set(clients).intersection(kept.served):
                raise RefusedError(f"client {client}: a second block in alignment {alignment}")
            kept.served += clients

    def _begin(self, content: Content, *, anew: bool = False) -> None:
        """Count that the party begins a run, or begins it anew; refuse more times a day."""
        kept, now = content.of(self.run), time.time()
        if kept.begun and not anew:
            return
        content.begun = [moment for moment in content.begun if moment > now - DAY]
        times, most = len(content.begun), self.most_begun
        refuse_if(times >= most, f"began anew {times} times in 24 hours; trust-runs is {most}")
        content.begun.append(now)
        kept.begun = True

    @contextmanager
    def _changed(self) -> Iterator[Content]:
        """Change the records; they are on the disk if the block ends well."""
        # The folder has the lock, as the file itself is another one after each change.
        with locked(self.path.parent) as handle:
            if handle is None:
                raise IdentityError(f"journal {self.path}: its folder is gone")
            content = Content.read(self.path)
            yield content
            content.trim()
            records = {name: vars(kept) for name, kept in content.records.items()}
            text = json.dumps(vars(content) | {"records": records}).encode()
            try:
                with replaced(self.path) as stream:
                    stream.write(sealed(text))
            except OSError as error:
                why = f"cannot be written: {error.strerror}"
                raise IdentityError(f"journal {self.path}: {why}") from error


def sealed(text: bytes) -> bytes:
    """Write the JSON of a journal behind its hash: a file that was damaged is noticed."""
    return HEAD + hashlib.sha256(text).hexdigest().encode() + b"\n" + text


# Which sums may follow each other -----------------------------------------------------------------

# Two sums reveal their difference. If two sums are of vectors that have changed little, and a
# SuperNode is in only one of them, they reveal what that SuperNode sent. So a party signs a list
# only if the parties on it are the very same as those of an earlier sum of the run, or differ from
# those of every earlier sum by at least ``differ-by``; and an unchanged state enters no sum of
# other parties. Only sums of one purpose are compared: others have nothing in common. Sets of
# parties are whole numbers here, party n being bit n.

STATE_BYTES = 16


def digest_of(arrays: Iterable[ArrayLike]) -> bytes:
    """Name a state, such as a vector before masks and pads, by a hash of its numbers; 16 bytes."""
    # As ``framed`` writes parts, but hashed where they lie: a copy takes longer than the hash
    found = hashlib.sha256(framed(b"flower-graph state 1"))
    for one in map(np.asarray, arrays):
        head = f"{one.dtype} {one.shape} ".encode()
        found.update((len(head) + one.nbytes).to_bytes(4, "big") + head)
        found.update(np.ascontiguousarray(one).reshape(-1).view(np.uint8).data)
    return found.digest()[:STATE_BYTES]


def set_of(parties: Iterable[int]) -> int:
    """Write parties as a set."""
    return sum(1 << party for party in set(parties))


def members_of(parties: int) -> list[int]:
    """Return the parties in a set, ascending."""
    return [party for party in range(parties.bit_length()) if parties >> party & 1]


def check_difference(parties: int, earlier: Collection[int], differ_by: int) -> None:
    """Refuse parties of a sum that are neither those of an earlier sum nor far from all."""
    if parties not in earlier and (near := _near(parties, earlier, differ_by)):
        differ = (parties ^ near[0]).bit_count()
        raise RefusedError(f"{differ} differ from an earlier sum; {DIFFER_BY} is {differ_by}")


def choose(
    present: int,
    earlier: Collection[int],
    differ_by: int,
    *,
    spare: Sequence[int],
    fewest: int,
    number: int,
) -> int | None:
    """Choose the parties of a sum among those present: as many as possible; None if there is none.

    ``earlier`` has the parties of each earlier sum, ``spare`` those that may be left out, the first
    ones first. A set of an earlier sum reveals nothing new and is preferred, unless a party that is
    present is in none of those; if several serve as well, they take turns by the sum's ``number``.
    """
    if present in earlier or not _near(present, earlier, differ_by):
        return present
    fixed = present & ~set_of(spare)
    again = [one for one in earlier if one & ~present == 0 and fixed & ~one == 0]
    again = [one for one in again if one.bit_count() >= fewest]
    most = max((one.bit_count() for one in again), default=0)
    again = sorted(one for one in again if one.bit_count() == most)
    served = 0
    for one in again:
        served |= one
    unserved = present & ~served
    order = sorted(spare, key=lambda party: unserved >> party & 1)
    fresh = _thinned(present, earlier, differ_by, order, max(fewest, most))
    if fresh is not None and (fresh.bit_count() > most or fresh & unserved):
        return fresh
    return again[number % len(again)] if again else None


def _near(parties: int, earlier: Collection[int], differ_by: int) -> list[int]:
    return [one for one in earlier if 0 < (parties ^ one).bit_count() < differ_by]


def _thinned(
    parties: int, earlier: Collection[int], differ_by: int, order: Sequence[int], fewest: int
) -> int | None:
    while parties not in earlier and (near := _near(parties, earlier, differ_by)):
        left = [party for party in order if parties >> party & 1]
        if not left or parties.bit_count() <= fewest:
            return None
        # Leaving out a party of an earlier set makes the two sets differ by one more.
        parties ^= 1 << max(left, key=lambda party: sum(one >> party & 1 for one in near))
    return parties
