"""What a server that lies gets of PPFL-GNN's clients that do not trust it: refusals, and no sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message
from public_helpers import Outcome, make_distrusting, start, still_member, toy_members
from test_deviating_server import LaidApart

from flower_graph.client.trust import trust_of
from flower_graph.strategies.ppfl.claims import sign_claim
from flower_graph.wire.keys import CONFIG, PUBLIC

COUNT = 7
Lie = Callable[[dict[str, Any], Any], None]  # changes entries and arrays of a message


def lying(lies: Mapping[int, Lie], to: Iterable[int] = (2,)) -> Outcome:
    """Change, by round, what some SuperNodes are sent with the request to train."""
    grid, strategy = make_distrusting(toy_members(COUNT), COUNT)
    victims = {node for node, c in grid.contexts.items() if c.node_config["partition-id"] in to}
    push = grid.push_messages

    def pushed(messages: Iterable[Message]) -> Any:
        found = list(messages)
        for one in found:
            about = one.metadata
            if about.message_type == "train" and about.dst_node_id in victims:
                lie = lies.get(int(about.group_id), honest)
                lie(one.content.config_records[CONFIG], one.content.array_records)
        return push(found)

    grid.push_messages = pushed  # type: ignore[method-assign]
    return start(grid, strategy, rounds=max(3, *lies, 0))


def honest(entries: dict[str, Any], arrays: Any) -> None:
    """Say what is so."""


def integers(entries: dict[str, Any], name: str) -> np.ndarray:
    """Read whole numbers that travel as bytes."""
    return np.frombuffer(entries[name], "<i8").copy()


def other_places(entries: dict[str, Any], arrays: Any) -> None:
    entries["slots"] = integers(entries, "slots")[::-1].tobytes()


def another_node(entries: dict[str, Any], arrays: Any) -> None:
    nodes = integers(entries, "claim-nodes")
    entries["claim-nodes"] = np.where(nodes == 11, 14, nodes).tobytes()


def fewer(entries: dict[str, Any], arrays: Any) -> None:
    """Leave the last party's claim out."""
    rows = entries["claim-rows"]
    entries["claim-nodes"] = integers(entries, "claim-nodes")[: -rows[-1]].tobytes()
    entries["claim-rows"] = rows[:-1]
    for name, size in (("parties", 8), ("counts", 8), ("clients", 8), ("signatures", 64)):
        entries[f"claim-{name}"] = entries[f"claim-{name}"][:-size]


def own_means(entries: dict[str, Any], arrays: Any) -> None:
    (record,) = arrays.values()
    record[PUBLIC] = type(record[PUBLIC])(-record[PUBLIC].numpy())


def no_means(entries: dict[str, Any], arrays: Any) -> None:
    entries["with-targets"] = [0]


def longer(entries: dict[str, Any], arrays: Any) -> None:
    entries["mask-length"] += 3


def old_round(entries: dict[str, Any], arrays: Any) -> None:
    entries["server-round"] -= 1


def nobody(entries: dict[str, Any], arrays: Any) -> None:
    """Ask as a server that is trusted does."""
    for name in [name for name in entries if name.startswith("claim-")]:
        del entries[name]


LIES = [
    (old_round, "round 2 is not after 2"),
    (other_places, "orders public nodes otherwise"),
    (another_node, "is not signed with its key"),
    (fewer, "claims are of 6 parties, sums of 7"),
    (own_means, "are not those that it shows to all"),
    (no_means, "has means for some clients and not for others"),
    (longer, "another length than the nodes that are in it"),
    (nobody, "claims are of 0 parties"),
]


def test_a_lie_to_one_is_refused_and_the_others_go_on() -> None:
    outcome = lying({number: lie for number, (lie, _) in enumerate(LIES, 3)})
    for report, (_, why) in zip(outcome.reports[2:], LIES, strict=True):
        assert [entry["reason"] for entry in report.rejected if why in entry["reason"]] != [], why
        # Without the victim, and without another one: sums differ by two.
        assert (report.skipped, report.answered) == ("", COUNT - 2)
    assert 2 not in outcome.strategy.contributors


def test_a_lie_to_all_opens_nothing() -> None:
    lies = {3: other_places, 4: own_means, 5: nobody}
    outcome = lying(lies, to=range(COUNT))
    assert [bool(report.skipped) for report in outcome.reports] == [False] * 2 + [True] * 3
    assert outcome.strategy.mean.made == 2


def test_means_of_ones_own_for_each_are_in_the_masks_too() -> None:
    """Whoever is shown other hashes believes them, and is in no sum that can be read."""

    def other(entries: dict[str, Any], arrays: Any) -> None:
        (record,) = arrays.values()
        rows = np.frombuffer(entries["claim-means"], np.uint8).reshape(3, 32).copy()
        record[PUBLIC] = type(record[PUBLIC])(record[PUBLIC].numpy()[::-1].copy())
        entries["claim-means"] = rows[::-1].tobytes()

    told, outcome = lying({}), lying({3: other})
    # The victim signs what it was told the sum is of, which is not what the others sign.
    assert all("signature" in entry["reason"] for entry in outcome.reports[-1].rejected)
    found = outcome.weights["mean"].astype(np.float64)
    # Masks that do not go away: either words that are no sum, or numbers that say nothing.
    is_skipped = bool(outcome.reports[-1].skipped)
    assert is_skipped or np.abs(found - told.weights["mean"]).min() > 1e-3


def test_who_lays_nodes_apart_reads_nothing() -> None:
    """The attack of `test_deviating_server.py`, on clients that do not trust the server."""
    members = [still_member(i, np.eye(5)[:, :3].tolist(), range(5)) for i in range(COUNT)]
    grid, strategy = make_distrusting(members, COUNT)
    strategy.mean = lying = LaidApart(0.3)
    outcome = start(grid, strategy, rounds=1, skipped=True)
    assert not hasattr(lying, "read")
    reasons = [entry["reason"] for entry in outcome.reports[0].rejected]
    # The first client's places are those of all; the length is not.
    assert len([why for why in reasons if "orders public nodes otherwise" in why]) == COUNT - 1
    assert len([why for why in reasons if "another length" in why]) == 1


def test_who_cannot_be_in_the_sum_keeps_its_supernode_out_of_it() -> None:
    """A server may send means that push single clients out; others' rows would stand alone."""
    members = toy_members(2 * COUNT)
    members[5] = still_member(5, [[1e3, 0, 0]] * 3, [10, 11, 12])
    outcome = start(*make_distrusting(members, COUNT), rounds=1)
    assert outcome.strategy.contributors == [c for c in range(2 * COUNT) if c not in (4, 5)]
    (entry,) = outcome.reports[0].rejected
    assert "its SuperNode sends nothing" in entry["reason"]


def test_a_claim_that_is_replayed_from_another_run_is_refused() -> None:
    grid, strategy = make_distrusting(toy_members(COUNT), COUNT)
    context = next(c for c in grid.contexts.values() if c.node_config["partition-id"] == 1)
    held = {1: toy_members(COUNT)[1].public}
    old = sign_claim(trust_of(context).identity, grid.run.run_id + 1, held)
    strategy.clients.claims.signatures = Replayed({1: old})
    outcome = start(grid, strategy, rounds=1, skipped=True)
    reasons = {entry["reason"] for entry in outcome.reports[0].rejected}
    assert any("party 1: its claim of public nodes is not signed" in why for why in reasons)
    assert outcome.strategy.contributors == []


class Replayed(dict[int, Any]):
    """Signatures that what comes later does not replace."""

    def __setitem__(self, party: int, signature: Any) -> None:
        self.setdefault(party, signature)
