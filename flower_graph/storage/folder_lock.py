"""One run at a time in an output folder."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import IO

from flower_graph.errors import OutputError

LOG = logging.getLogger(__name__)
LOCK_FILE = ".running"


class FolderLock:
    """Holds an output folder until ``release``, or until the process ends in whatever way."""

    # The lock is the operating system's, on the file ``.running``, so one whose process was killed
    # stands in nobody's way. What the file says, process and machine, is for the message.

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file: IO[str] | None = None
        # Whoever released it last has removed the file: one that is not in the folder any more
        # locks nothing.
        while self._file is None or not self._is_there():
            self._file = self._taken(folder)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Give the folder back; a second time does no harm."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None

    def _taken(self, folder: Path) -> IO[str]:
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "a run that has just begun"
            file.close()
            raise OutputError(
                f"output folder {folder}: another run writes there ({who}); wait for its end, or "
                "choose another folder"
            ) from None
        except OSError as error:  # some network file systems have no locks
            LOG.warning("%s cannot be locked (%s): see that no other run uses it", folder, error)
        return file

    def _is_there(self) -> bool:
        assert self._file is not None
        try:
            there = self._path.stat().st_ino == os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            there = False
        if not there:
            self._file.close()
        return there
