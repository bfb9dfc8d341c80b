"""The journal of a party: to which rounds it has contributed, so that none comes a second time.

Two sums that differ in one contributor tell what that one sent. A server that brings clients back
to an earlier round (a checkpoint, a state of Flower's, a SuperNode started anew) and repeats it
with one fewer would have such two. So the highest round of each run lies in a file beside the
party's key, where nothing that a server can ask for puts it back.

It holds the runs that were used last. One that was pushed out counts as new, and new runs over the
same data are nothing that a journal can stop: who starts as many as that has the differences
anyway.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flower_graph.errors import IdentityError, RefusedError
from flower_graph.secure.channel import framed
from flower_graph.storage.files import replaced

__all__ = ["Journal"]

MOST_RUNS = 1024
MOST_NAME = 256  # bytes of a run's name: the server may have chosen some of them


class Journal:
    """The highest round that a party has contributed to, by run.

    Parameters
    ----------
    path : Path
        Its file, as in `TrustSettings.journal`. It need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def last(self, *run: bytes) -> int | None:
        """Return the highest round of a run; None if it is not known."""
        return self._read().get(_name(run))

    def contribute(self, number: int, *run: bytes) -> None:
        """Note, before a vector leaves, that a round of a run has it now.

        Parameters
        ----------
        number : int
            The round's number. What is noted is on the disk when this returns.
        run : bytes
            What names the run: nothing that a server may choose anew when it repeats a round.

        Raises
        ------
        RefusedError
            The round is not above the highest of this run: nothing may be sent.
        IdentityError
            The journal cannot be read or written: nothing may be sent either.
        """
        name = _name(run)
        with self._locked():
            known = self._read()
            highest = known.pop(name, None)
            if highest is not None and number <= highest:
                raise RefusedError(
                    f"round {number} is not after {highest}, the last that this party contributed "
                    "to in this run: it sends nothing for a round that it has been beyond"
                )
            kept = list(known.items())[1 - MOST_RUNS :]
            self._write(dict(kept) | {name: int(number)})

    def _read(self) -> dict[str, int]:
        try:
            raw = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise IdentityError(f"journal {self._path}: cannot be read: {error}") from error
        if not isinstance(raw, dict) or not all(type(last) is int for last in raw.values()):
            raise IdentityError(f"journal {self._path}: is not one of rounds by run")
        return raw

    def _write(self, known: dict[str, int]) -> None:
        try:
            with replaced(self._path) as part:
                part.write_text(json.dumps(known, indent=0), encoding="utf-8")
        except OSError as error:
            raise IdentityError(
                f"journal {self._path}: cannot be written: {error.strerror}"
            ) from error

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


def _name(run: tuple[bytes, ...]) -> str:
    name = framed(*run)
    if not run or len(name) > MOST_NAME:
        raise RefusedError(f"the run's name has {len(name)} bytes, from 1 to {MOST_NAME} are kept")
    return name.hex()
