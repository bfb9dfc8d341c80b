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
from flower_graph.records.participation import numbers, ranges
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
    with reading(path, DataError, "is no list of members"):
        head, *rows = csv.reader(io.StringIO(read_text(path, MOST_RECORD)))
        if tuple(head) != COLUMNS:
            raise ValueError(f"its first line is not {','.join(COLUMNS)}")
        members = tuple(_member(row) for row in rows if row)
        clients = [("client", client) for one in members for client in one.clients]
        nodes = [("node-id", one.node) for one in members if one.node is not None]
        for (what, number), times in Counter([*clients, *nodes]).items():
            if times > 1:
                raise ValueError(f"{what} {number} is there {times} times")
    return members


def _member(row: list[str]) -> Member:
    folder, clients, node = (entry.strip() for entry in row)
    if node and not (node.isascii() and node.isdigit() and int(node[:21]) < 2**64):
        raise ValueError(f"node-id: {node!r:.40} is no id of a SuperNode")
    numbered = frozenset(numbers(clients.replace(" ", ""), MOST_CLIENTS))
    return Member(folder, numbered, int(node) if node else None)
