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

import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flower_graph.errors import IdentityError, RefusedError
from flower_graph.secure.channel import framed
from flower_graph.secure.node_config import DIFFER_BY
from flower_graph.secure.parties.differences import check_difference
from flower_graph.secure.parties.registry import read_numbers, write_numbers
from flower_graph.secure.relayed import REFUSAL
from flower_graph.storage.reading import MOST_RECORD, parse_json, read_bytes, reading
from flower_graph.storage.writing import open_own, replaced

__all__ = ["Journal"]

BEGUN = b"begun"  # the key of when the party began anew, in the last day
STATE = b"state-"  # keys of states begin so; all others are runs
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
    served: str = ""  # whose blocks in the newest one, as the registry writes clients
    lists: int = 0  # of commitments that were answered: each is another draw of the partners
    # By purpose the sets of parties in its sums, as hexadecimal numbers
    sums: dict[str, list[str]] = field(default_factory=dict)
    void: int = -1  # the last step whose relayed sum was refused


KEPT = {name: type(value) for name, value in vars(Kept()).items()}


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
        """Return the highest round of a run; None if it is not known."""
        kept = _kept(JournalFile.read(self._path), _name(run))
        return kept.number if kept.number >= 0 else None

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
        with self._changed(run) as (file, kept):
            _go_up(kept, number)
            if not kept.begun or kept.mark != mark:
                _begin(file, kept, most)
            kept.mark = secrets.token_hex(8)
        return kept.mark

    def answer_list(self, most_lists: int, most: int, *run: bytes) -> None:
        """Record, before a seed is shown, that a list of commitments is answered.

        A run may show ``most_lists``, whatever numbers the server gives its sums: a server that
        shows a list sees the draw of partners and key-holders that it gives. A run in which a list
        is answered has begun; ``most`` as in `continue_run`.
        """
        with self._changed(run) as (file, kept):
            if kept.lists >= most_lists:
                raise RefusedError(f"{most_lists} lists of commitments were answered in this run")
            if not kept.begun:
                _begin(file, kept, most)
            kept.lists += 1

    def check_state(self, purpose: str, state: bytes, ready: int) -> None:
        """Refuse, before it is sent, a state that was in a sum which cannot be had again.

        ``state`` is the state's `digest_of`, ``ready`` the `set_of` parties that may be in the sum.
        States of all runs are compared: a run that begins anew from the same data and seed has the
        states of the run before it.
        """
        before = _parties_with(JournalFile.read(self._path), _state(purpose, state))
        if before is not None and before & ~ready:
            raise _unchanged(purpose)

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
        with self._changed(run) as (file, kept):
            _go_up(kept, number)
            earlier = kept.sums.setdefault(purpose, [])
            check_difference(parties, [int(one, 16) for one in earlier], differ_by)
            if f"{parties:x}" not in earlier:
                earlier.append(f"{parties:x}")
            if sum(len(one) for sets in kept.sums.values() for one in sets) > MOST_DIGITS:
                raise RefusedError(f"the journal keeps no further set of SuperNodes ({DIFFER_BY})")
            key = _state(purpose, state)
            if _parties_with(file, key) not in (None, parties):
                raise _unchanged(purpose)
            file.put(key, f"{parties:x}")
            states = [one for one in file.lines if one.startswith(STATE)]
            if len(states) > MOST_STATES:
                for old in states[: -MOST_STATES // 2]:
                    file.drop(old)

    @contextmanager
    def one_trial(self, step: int, *run: bytes) -> Iterator[None]:
        """Read the relayed sum of a step in the block; a refusal ends the step, which goes up."""
        if step <= _kept(JournalFile.read(self._path), _name(run)).void:
            raise RefusedError(REFUSAL)
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
        with self._changed(run) as (file, kept):
            if not kept.begun:
                _begin(file, kept, most)
            if alignment < kept.alignment:
                raise RefusedError(f"alignment {alignment} is over, this is {kept.alignment}")
            if alignment > kept.alignment:
                if kept.alignments >= MOST_ALIGNMENTS:
                    raise RefusedError(f"{MOST_ALIGNMENTS} alignments were begun in this run")
                kept.alignment, kept.served = alignment, ""
                kept.alignments += 1
            served = read_numbers(kept.served) if kept.served else ()
            for client in clients:
                if any(client in part for part in served):
                    raise RefusedError(f"client {client}: a second block in alignment {alignment}")
            kept.served = write_numbers(_ranges({*clients}.union(*served)))

    @contextmanager
    def _changed(self, run: tuple[bytes, ...]) -> Iterator[tuple[JournalFile, Kept]]:
        """Change the record of a run; it is written if the block ends well."""
        name = _name(run)
        with self._locked():
            file = JournalFile.read(self._path)
            kept = _kept(file, name)
            is_new, was_compared = name not in file.lines, bool(kept.sums)
            yield file, kept
            file.put(name, vars(kept))
            if is_new:
                runs = _runs(file)
                for old in runs[:-MOST_RUNS]:
                    file.drop(old)
            if kept.sums and not was_compared:
                _end_oldest(file)
            file.write()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other processes of the party out: each message may have one of its own."""
        # The folder has the lock, as the file itself is another one after each change.
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


# The file: lines of a key, JSON and a hash; the last line of a key counts. A note is one more line,
# written at the end and then synced; other notes are neither read nor written again. A line that a
# crash cut short was not on disk when anything left, and does not count. Now and then the file is
# rewritten without superseded lines. A line with a wrong hash was changed: then the whole file is
# no journal, and nothing is sent.

HEAD = b"flower-graph journal 2\n"
HASH = 16  # hexadecimal digits
MOST_DEAD = 1 << 16  # bytes of lines that count no more
OTHER = "is no journal of a SuperNode, or is damaged"


@dataclass
class JournalFile:
    """The file's content, and the notes to be added."""

    path: Path
    lines: dict[bytes, bytes]  # by key the JSON that counts, the last noted at the end
    size: int = 0  # bytes of the file; 0 where it must be written anew
    fresh: bytes = b""  # lines to be added

    @classmethod
    def read(cls, path: Path) -> JournalFile:
        with reading(f"journal {path}", IdentityError):
            try:
                data = read_bytes(path, MOST_RECORD)
            except FileNotFoundError:
                return cls(path, {})
        *whole, rest = data.removeprefix(HEAD).split(b"\n")
        lines = [line[: -HASH - 1] for line in whole]
        # A whole line with something else than a line's end behind it was not cut short.
        is_other = any(map(_is_other, whole, lines)) or not _is_other(rest[:-1], rest[: -HASH - 2])
        if is_other or not data.startswith(HEAD):
            raise IdentityError(f"journal {path}: {OTHER}")
        found = cls(path, {}, 0 if rest else len(data))
        for line in lines:
            key, _, content = line.partition(b" ")
            found.lines.pop(key, None)
            found.lines[key] = content
        return found

    # The JSON is not checked here: the reader of a key checks it
    def get(self, key: bytes) -> Any:
        if key not in self.lines:
            return None
        with reading(f"journal {self.path}", IdentityError, OTHER):
            return parse_json(self.lines[key])

    def put(self, key: bytes, value: object) -> None:
        self.lines.pop(key, None)
        self.lines[key] = json.dumps(value).encode()
        self.fresh += sealed(key, self.lines[key])

    def drop(self, key: bytes) -> None:
        del self.lines[key]
        self.size = 0

    def write(self) -> None:
        """Write the notes; they are on the disk when this returns."""
        try:
            if self._may_grow():
                _append(self.path, self.size, self.fresh)
                return
            with replaced(self.path) as stream:
                stream.write(HEAD + b"".join(sealed(*line) for line in self.lines.items()))
        except OSError as error:
            raise IdentityError(
                f"journal {self.path}: cannot be written: {error.strerror}"
            ) from error

    def _may_grow(self) -> bool:
        """Tell whether the file is the owner's alone, and has few superseded lines."""
        if not self.size or self.path.stat().st_mode & 0o077:
            return False
        live = sum(len(key) + len(content) + HASH + 3 for key, content in self.lines.items())
        return self.size + len(self.fresh) - live < MOST_DEAD


def sealed(key: bytes, content: bytes) -> bytes:
    """Write a line with its hash."""
    line = key + b" " + content
    return line + b" " + _hash(line) + b"\n"


def _is_other(sealed: bytes, line: bytes) -> bool:
    return sealed != line + b" " + _hash(line)


def _hash(line: bytes) -> bytes:
    return hashlib.sha256(line).hexdigest()[:HASH].encode()


def _append(path: Path, size: int, data: bytes) -> None:
    handle = open_own(path, os.O_WRONLY)
    try:
        if os.pwrite(handle, data, size) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(handle)
    finally:
        os.close(handle)


def _kept(file: JournalFile, name: bytes) -> Kept:
    raw = file.get(name)
    with reading(f"journal {file.path}", IdentityError, OTHER):
        kept = Kept() if raw is None else Kept(**raw)
        if any(type(value) is not KEPT[name] for name, value in vars(kept).items()):
            raise IdentityError(f"journal {file.path}: {OTHER}")
        _ = [int(one, 16) for sets in kept.sums.values() for one in sets]
    return kept


def _parties_with(file: JournalFile, state: bytes) -> int | None:
    """Return the parties of the sum that a state was in; None if it was in none."""
    raw = file.get(state)
    with reading(f"journal {file.path}", IdentityError, OTHER):
        return None if raw is None else int(raw, 16)


def _runs(file: JournalFile) -> list[bytes]:
    return [key for key in file.lines if key != BEGUN and not key.startswith(STATE)]


def _begin(file: JournalFile, kept: Kept, most: int) -> None:
    """Count that a party begins anew; refuse more than so many times a day."""
    begun, now = file.get(BEGUN) or [], time.time()
    if not isinstance(begun, list) or not all(type(moment) is float for moment in begun):
        raise IdentityError(f"journal {file.path}: {OTHER}")
    begun = [moment for moment in begun if moment > now - DAY]
    if len(begun) >= most:
        raise RefusedError(
            f"this SuperNode began anew {len(begun)} times in 24 hours; at most {most} (trust-runs)"
        )
    file.put(BEGUN, [*begun, now])
    kept.begun = True


def _end_oldest(file: JournalFile) -> None:
    """End the runs that were used before the last few; their sets are no longer kept."""
    compared = []
    for name in _runs(file):
        if (kept := _kept(file, name)).sums:
            compared.append((name, kept))
    for name, old in compared[:-MOST_COMPARED]:
        old.sums, old.number = {}, OVER
        file.put(name, vars(old))


def _go_up(kept: Kept, number: int) -> None:
    if number <= kept.number:
        raise RefusedError(f"round {number} is not after {kept.number}, the last of this run")
    kept.number = int(number)


def _unchanged(purpose: str) -> RefusedError:
    return RefusedError(
        f"what is to be sent has not changed since a sum ({purpose}) with other SuperNodes, in "
        "this run or an earlier one (of the same seed)"
    )


def _ranges(numbers: Collection[int]) -> list[range]:
    result: list[range] = []
    for number in sorted(numbers):
        if result and result[-1].stop == number:
            result[-1] = range(result[-1].start, number + 1)
        else:
            result.append(range(number, number + 1))
    return result


def _state(purpose: str, state: bytes) -> bytes:
    """Name a state, a `digest_of`, of a kind of sums."""
    return STATE + hashlib.sha256(framed(purpose.encode(), state)).hexdigest()[:32].encode()


def _name(run: tuple[bytes, ...]) -> bytes:
    name = framed(*run)
    if not run or len(name) > MOST_NAME:
        raise RefusedError(f"the run's name has {len(name)} bytes, from 1 to {MOST_NAME} are kept")
    return name.hex().encode()
