"""Who took part in a round of the embedding-averaging server, and why others did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from flower_graph.exchange import Rejected
from flower_graph.participation import NOT_READY, Participation, roll_call

if TYPE_CHECKING:
    from flower_graph.ego_book import RoundSum
    from flower_graph.ego_session import EgoSession
    from flower_graph.records.ego import EgoRequest


def ego_roll(
    session: EgoSession,
    requests: Mapping[int, EgoRequest],
    found: RoundSum,
    silent: Sequence[Rejected],
) -> Participation:
    """Say what became of every client in the exchanges of a round's sum.

    Parameters
    ----------
    session : EgoSession
        Knows the clients, who was drawn, and why some cannot take part.
    requests : mapping
        What was asked, by SuperNode.
    found : RoundSum
        What came of it.
    silent : sequence of Rejected
        SuperNodes whose vectors did not come.
    """
    at = {client: node for node, clients in session.clients.items() for client in clients}
    there = set(session.exchange.grid.get_node_ids())
    undone = {client: NOT_READY for client in session.drawn if at.get(client) in there}
    blamed = session.sums.blamed
    excluded = {client: why for client, why in blamed if client in session.sums.excluded}
    return roll_call(
        session.clients,
        there,
        {node: request.clients.tolist() for node, request in requests.items()},
        found.answered,
        silent={entry.node_id: entry.reason for entry in silent},
        failed=found.failed,
        left_out=session.unaligned | undone | excluded,
        no_use=found.skipped,
    )
