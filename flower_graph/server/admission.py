"""Decides which SuperNode may speak for which clients, and how many SuperNodes may enrol.

The server's list, or else the first enrolment, ties a client number to a SuperNode. Node ids and
the order of answers play no part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from flower_graph.data.folders.members import MEMBERS, Member
from flower_graph.records.participation import ranges

REMEDY = (
    "if they have, one of them lies: write the node-id of each authenticated SuperNode "
    f"beside its clients in {MEMBERS} of the server-folder, or use a registry"
)


@dataclass(frozen=True)
class Admission:
    """The rules that the server applies to enrolments.

    Parameters
    ----------
    listed : sequence of Member, optional
        Which SuperNode may speak for which clients, from ``members.csv``; None: the first to enrol.
    most : int, optional
        The most SuperNodes that may be enrolled; None: any number.

    Raises
    ------
    ValueError
        If ``most`` is below 1.
    """

    listed: Collection[Member] | None = None
    most: int | None = None
    _by_node: dict[int, Member] = field(init=False, repr=False, compare=False)
    _by_client: dict[int, Member] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise ValueError(f"most: {self.most} is not at least 1")
        members = self.listed or ()
        by_node = {one.node: one for one in members if one.node is not None}
        object.__setattr__(self, "_by_node", by_node)
        by_client = {client: one for one in members for client in one.clients}
        object.__setattr__(self, "_by_client", by_client)

    def refusal(self, node: int, clients: Collection[int]) -> str:
        """Return why the list forbids a SuperNode to speak for clients; "" if it does not."""
        if self.listed is None:
            return ""
        if not clients:
            return f"it does not say which clients it hosts, and {MEMBERS} has others"
        owner = self._by_client.get(min(clients))
        if owner is None or not owner.clients.issuperset(clients):
            return f"no SuperNode hosts clients {ranges(clients)} together by {MEMBERS}"
        if self._by_node.get(node, owner) is not owner or owner.node not in (None, node):
            return f"clients {ranges(clients)} are another SuperNode's by {MEMBERS}"
        return ""


def too_many(
    most: int, enrolled: Collection[int], new: Iterable[int], strangers: Collection[int]
) -> dict[int, str]:
    """Return the new SuperNodes that exceed the limit ``most``, with the reason.

    SuperNodes that return with their clients go before new SuperNodes.
    """
    refused = dict[int, str]()
    new = set(new)
    for group in (new & set(strangers), new):
        if len(new) + len(enrolled) > most:
            words = f"{len(new) + len(enrolled)} SuperNodes, strategy.most_supernodes is {most}"
            refused |= dict.fromkeys(group, words)
            new -= group
    return refused
