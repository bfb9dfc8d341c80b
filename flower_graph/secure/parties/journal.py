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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flower_graph.errors import IdentityError, RefusedError, refuse_if
from flower_graph.secure.channel import framed
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.secure.ring import REFUSAL
from flower_graph.storage.files import locked, replaced
from flower_graph.storage.reading import MOST_RECORD, parse_json, read_bytes, reading

__all__ = ["Journal"]

HEAD = b"flower-graph journal 3 "  # then a hash of the JSON in the next line
OTHER = "is no journal of a SuperNode, or is damaged"
MOST_RUNS = 1024
MOST_NAME = 256  # bytes of a run's name: the server may have chosen some of them
DAY = 24 * 3600.0  # seconds
# Alignments of a run, each under another key: so many blocks of a client a key-holder evaluates
MOST_ALIGNMENTS = 8
# Limits of the record of sums' parties: hexadecimal digits of a run's sets, and the newest runs.
# Nothing is known of an older run, so it is over
MOST_DIGITS, MOST_COMPARED = 1 << 19, 8
MOST_STATES = 1 << 12  # of all runs; then the older half is forgotten
OVER = 1 << 62


@dataclass
class Kept:
    """The journal's record of one run."""

    number: int = -1  # the highest round
    begun: bool = False  # whether it is counted
    mark: str = ""  # what the state has that has seen the last sum
    alignment: int = -1  # the newest that blocks were evaluated in
    alignments: int = 0  # how many there were
    served: list[int] = field(default_factory=list)  # clients whose blocks were in the newest one
    lists: int = 0  # of commitments that were answered: each is another draw of the partners
    # By purpose the sets of parties in its sums, as hexadecimal numbers
    sums: dict[str, list[str]] = field(default_factory=dict)
    void: int = -1  # the last step whose relayed sum was refused


KEPT = {name: type(value) for name, value in vars(Kept()).items()}


@dataclass
class Content:
    """The content of a journal's file; in each table the entry that was used last is at the end."""

    begun: list[float] = field(default_factory=list)  # when the party began anew, in the last day
    runs: dict[str, Kept] = field(default_factory=dict)
    # By state the parties of the sum that it was in, as a hexadecimal number
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
            if data != sealed(text):
                raise IdentityError(f"journal {path}: {OTHER}")
            found = cls(**parse_json(text))
            raw: dict[str, Any] = vars(found)["runs"]
            found.runs = {name: Kept(**kept) for name, kept in raw.items()}
            values = [
                (KEPT[name], value)
                for kept in found.runs.values()
                for name, value in vars(kept).items()
            ]
            values += [(float, moment) for moment in found.begun]
            if any(type(value) is not kind for kind, value in values):
                raise IdentityError(f"journal {path}: {OTHER}")
            sets = [
                one for kept in found.runs.values() for sets in kept.sums.values() for one in sets
            ]
            _ = [int(one, 16) for one in [*found.states.values(), *sets]]
        return found

    def check_state(self, purpose: str, state: bytes, is_same: Callable[[int], object]) -> str:
        """Refuse a state whose sum's parties are other ones; return its name here."""
        key = hashlib.sha256(framed(purpose.encode(), state)).hexdigest()[:32]
        why = f"what is to be sent has not changed since a sum ({purpose}) with other SuperNodes, "
        why += "in this run or an earlier one (of the same seed)"
        refuse_if(key in self.states and not is_same(int(self.states[key], 16)), why)
        return key

    def begin(self, kept: Kept, most: int, *, anew: bool = False) -> None:
        """Count that the party begins a run, or begins it anew; refuse more times a day."""
        if kept.begun and not anew:
            return
        now = time.time()
        self.begun = [moment for moment in self.begun if moment > now - DAY]
        times = len(self.begun)
        why = f"began anew {times} times in 24 hours; trust-runs is {most}"
        refuse_if(times >= most, why)
        self.begun.append(now)
        kept.begun = True


class Journal:
    """A party's record of its steps, by run.

    ``run`` is the run's name: nothing that a server may choose anew when it repeats a round. A
    record is on the disk when a method returns. If one raises ``RefusedError`` (the step was done)
    or ``IdentityError`` (the journal cannot be read or written), nothing may be sent.

    Parameters
    ----------
    path : Path
        Its file, as in `TrustSettings.journal`. It need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def last(self, *run: bytes) -> int | None:
        number = self._kept(run).number
        return number if number >= 0 else None

    def contribute(self, number: int, *run: bytes) -> None:
        """Record that something of a round is sent; the round must be above all of the run."""
        with self._changed(run) as (_, kept):
            _go_up(kept, number)

    def continue_run(self, number: int, mark: str, most: int, *run: bytes) -> str:
        """Record a round, as `contribute` does, and detect a party state that was rolled back.

        ``mark`` is the last result, as the party's state has it, empty for a new state; the state's
        new mark is returned. The party may begin anew, with another run or state, ``most`` times
        in 24 hours.
        """
        with self._changed(run) as (content, kept):
            _go_up(kept, number)
            content.begin(kept, most, anew=kept.mark != mark)
            kept.mark = secrets.token_hex(8)
        return kept.mark

    def answer_list(self, most_lists: int, most: int, *run: bytes) -> None:
        """Record, before a seed is shown, that a list of commitments is answered.

        A run may show ``most_lists``, whatever numbers the server gives its sums: a server that
        shows a list sees the draw of partners and key-holders that it gives. A run in which a list
        is answered has begun; ``most`` as in `continue_run`.
        """
        with self._changed(run) as (content, kept):
            why = f"{most_lists} lists of commitments were answered in this run"
            refuse_if(kept.lists >= most_lists, why)
            content.begin(kept, most)
            kept.lists += 1

    def check_state(self, purpose: str, state: bytes, ready: int) -> None:
        """Refuse, before it is sent, a state that was in a sum which cannot be had again.

        ``state`` is the state's `digest_of`, ``ready`` the `set_of` parties that may be in the sum.
        States of all runs are compared: a run that begins anew from the same data and seed has the
        states of the run before it.
        """
        content = Content.read(self._path)
        content.check_state(purpose, state, lambda before: not before & ~ready)

    def enter(
        self,
        number: int,
        purpose: str,
        state: bytes,
        parties: int,
        differ_by: int,
        *run: bytes,
    ) -> None:
        """Record, before the list is signed, the parties and the state of a sum.

        Refused if ``parties``, a `set_of`, are neither those of an earlier sum of the purpose nor
        differ from all by ``differ_by``; if the state was in a sum of others; or if more sets were
        in sums than are kept.
        """
        with self._changed(run) as (content, kept):
            _go_up(kept, number)
            earlier = kept.sums.setdefault(purpose, [])
            check_difference(parties, [int(one, 16) for one in earlier], differ_by)
            if f"{parties:x}" not in earlier:
                earlier.append(f"{parties:x}")
            digits = sum(len(one) for sets in kept.sums.values() for one in sets)
            why = f"the journal keeps no further set of SuperNodes ({DIFFER_BY})"
            refuse_if(digits > MOST_DIGITS, why)
            key = content.check_state(purpose, state, lambda before: before == parties)
            content.states.pop(key, None)
            content.states[key] = f"{parties:x}"

    @contextmanager
    def one_trial(self, step: int, *run: bytes) -> Iterator[None]:
        """Read the relayed sum of a step in the block; a refusal ends the step, which goes up."""
        refuse_if(step <= self._kept(run).void, REFUSAL)
        try:
            yield
        except RefusedError:
            with self._changed(run) as (_, kept):
                kept.void = max(kept.void, step)
            raise

    def serve(self, alignment: int, clients: Collection[int], most: int, *run: bytes) -> None:
        """Record, before answers leave, the clients whose blocks are evaluated, once an alignment.

        ``alignment`` goes up when an alignment begins again under another key; ``most`` as in
        `continue_run`.
        """
        with self._changed(run) as (content, kept):
            content.begin(kept, most)
            why = f"alignment {alignment} is over, this is {kept.alignment}"
            refuse_if(alignment < kept.alignment, why)
            if alignment > kept.alignment:
                why = f"{MOST_ALIGNMENTS} alignments were begun in this run"
                refuse_if(kept.alignments >= MOST_ALIGNMENTS, why)
                kept.alignment, kept.served = alignment, []
                kept.alignments += 1
            for client in set(clients).intersection(kept.served):
                raise RefusedError(f"client {client}: a second block in alignment {alignment}")
            kept.served += clients

    @contextmanager
    def _changed(self, run: tuple[bytes, ...]) -> Iterator[tuple[Content, Kept]]:
        """Change the record of a run; it is on the disk if the block ends well."""
        name = _name(run)
        # The folder has the lock, as the file itself is another one after each change.
        with locked(self._path.parent) as handle:
            if handle is None:
                raise IdentityError(f"journal {self._path}: its folder is gone")
            content = Content.read(self._path)
            kept = content.runs[name] = content.runs.pop(name, Kept())
            yield content, kept
            # Runs and states beyond the limits go; runs that are compared no more end.
            content.runs = dict(list(content.runs.items())[-MOST_RUNS:])
            for old in [one for one in content.runs.values() if one.sums][:-MOST_COMPARED]:
                old.sums, old.number = {}, OVER
            if len(content.states) > MOST_STATES:
                content.states = dict(list(content.states.items())[-MOST_STATES // 2 :])
            try:
                with replaced(self._path) as stream:
                    stream.write(sealed(json.dumps(asdict(content)).encode()))
            except OSError as error:
                raise IdentityError(
                    f"journal {self._path}: cannot be written: {error.strerror}"
                ) from error

    def _kept(self, run: tuple[bytes, ...]) -> Kept:
        return Content.read(self._path).runs.get(_name(run), Kept())


def sealed(text: bytes) -> bytes:
    """Write the JSON of a journal behind its hash: a file that was damaged is noticed."""
    return HEAD + hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _go_up(kept: Kept, number: int) -> None:
    why = f"round {number} is not after {kept.number}, the last of this run"
    refuse_if(number <= kept.number, why)
    kept.number = int(number)


def _name(run: tuple[bytes, ...]) -> str:
    name = framed(*run)
    why = f"the run's name has {len(name)} bytes, from 1 to {MOST_NAME} are kept"
    refuse_if(not run or len(name) > MOST_NAME, why)
    return name.hex()


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
    vectors = [np.asarray(one) for one in arrays]
    parts = [f"{one.dtype} {one.shape} ".encode() + one.tobytes() for one in vectors]
    return hashlib.sha256(framed(b"flower-graph state 1", *parts)).digest()[:STATE_BYTES]


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
