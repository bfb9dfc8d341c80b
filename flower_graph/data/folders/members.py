"""The server's list of members: which client numbers each SuperNode may speak for.

``flower-graph partition`` writes ``members.csv`` into the server's folder, a row for each
SuperNode's folder. With authenticated SuperNodes, the user adds their ids.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flower_graph.errors import DataError
from flower_graph.records.participation import ranges
from flower_graph.storage.reading import MOST_RECORD, read_text, reading
from flower_graph.storage.writing import replaced, saying

MEMBERS = "members.csv"
COLUMNS = ("folder", "clients", "node-id")
MOST_CLIENTS = 2**20  # of one SuperNode, as at enrolment


@dataclass(frozen=True)
class Member:
    """One SuperNode of the list.

    Parameters
    ----------
    folder : str
        The data folder that it was given.
    clients : frozenset of int
        The client numbers that it may speak for.
    node : int, optional
        Its id in Flower, as ``flwr supernode register`` prints it; None: any SuperNode's.
    """

    folder: str
    clients: frozenset[int]
    node: int | None = None


def write_members(path: Path, members: Iterable[Member]) -> None:
    """Write the list, readable by its owner alone, like all of a data folder."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for one in members:
        rows.writerow([one.folder, ranges(one.clients), "" if one.node is None else one.node])
    with saying(path), replaced(path) as stream:
        stream.write(text.getvalue().encode())


def read_members(folder: Path) -> tuple[Member, ...] | None:
    """Read the list of a server's folder, in the file's order; None if it has none.

    ``DataError`` if the list cannot be read, or has a client number or a node id twice.
    """
    path = folder / MEMBERS
    if not path.exists():
        return None
    with reading(path, DataError):
        rows = list(csv.reader(io.StringIO(read_text(path, MOST_RECORD))))
    if not rows or tuple(rows[0]) != COLUMNS:
        raise DataError(f"{path}: its first line is not {','.join(COLUMNS)}")
    members = tuple(_member(path, number, row) for number, row in enumerate(rows[1:], 2) if row)
    _check_once(path, "client", [client for one in members for client in one.clients])
    _check_once(path, "node-id", [one.node for one in members if one.node is not None])
    return members


def _member(path: Path, line: int, row: list[str]) -> Member:
    if len(row) != len(COLUMNS):
        raise DataError(f"{path}: line {line} has {len(row)} entries, not {len(COLUMNS)}")
    folder, clients, node = (entry.strip() for entry in row)
    if node and not (node.isascii() and node.isdigit() and int(node[:21]) < 2**64):
        raise DataError(f"{path}: line {line}: node-id: {node!r:.40} is no id of a SuperNode")
    return Member(folder, _numbers(path, line, clients), int(node) if node else None)


def _numbers(path: Path, line: int, text: str) -> frozenset[int]:
    result = set[int]()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not all(one.isascii() and one.isdigit() and len(one) < 20 for one in (first, last)):
            raise DataError(
                f"{path}: line {line}: clients: {text!r:.40} are no numbers such as 0-4,6"
            )
        if not 0 <= int(last) - int(first) < MOST_CLIENTS - len(result):
            raise DataError(
                f"{path}: line {line}: clients: {part!r:.40} is no range of at most {MOST_CLIENTS}"
            )
        result |= set(range(int(first), int(last) + 1))
    return frozenset(result)


def _check_once(path: Path, what: str, numbers: Iterable[int]) -> None:
    number, times = next(iter(Counter(numbers).most_common(1)), (0, 0))
    if times > 1:
        raise DataError(f"{path}: {what} {number} is there {times} times")
