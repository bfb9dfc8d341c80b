"""What a server that lies gets of PPFL-GNN's clients that do not trust it: refusals, and no sum."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from federation import ALL, Federation
from flwr.app import Message
from graph_helpers import Outcome
from public_helpers import make_distrusting, run_secure, start, still_member, toy_members

from flower_graph.apps.run import client_app
from flower_graph.errors import NoClientsError
from flower_graph.method.registry import method_of
from flower_graph.server.sums import entries_of
from flower_graph.strategies.ppfl.messages import IntArray
from flower_graph.strategies.ppfl.strategy import CommonMean, SecureConsensus
from flower_graph.wire.keys import CONFIG, PUBLIC

COUNT = 7
Lie = Callable[..., None]  # changes the entries of a message, and its record of arrays, if any


def lying(lies: Mapping[int, Lie], to: Iterable[int] = (2,)) -> Outcome:
    """Change, by round, what some SuperNodes are sent with the request to train."""
    grid, strategy = make_distrusting(toy_members(COUNT), COUNT)
    victims = {node for node, c in grid.contexts.items() if c.node_config["partition-id"] in to}
    push = grid.push_messages

    def pushed(messages: Iterable[Message]) -> Any:
        found = list(messages)
        for one in found:
            about, lie = one.metadata, lies.get(int(one.metadata.group_id or 0))
            if lie and about.message_type == "train" and about.dst_node_id in victims:
                lie(one.content.config_records[CONFIG], *one.content.array_records.values())
        return push(found)

    grid.push_messages = pushed  # type: ignore[method-assign]
    return start(grid, strategy, rounds=max(3, *lies, 0))


def integers(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i8").copy()


def entry(name: str, change: Callable[[Any], Any]) -> Lie:
    """Say something else in the place of one entry."""
    return lambda entries, *_: entries.__setitem__(name, change(entries[name]))


def other_node(data: bytes) -> bytes:
    return np.where(integers(data) == 11, 14, integers(data)).tobytes()


def fewer(entries: dict[str, Any], *_: Any) -> None:
    rows = entries["claim-rows"]
    entries["claim-nodes"] = integers(entries["claim-nodes"])[: -rows[-1]].tobytes()
    for name, width in (("claim-rows", 1), ("claim-clients", 1), ("claim-signatures", 64)):
        entries[name] = entries[name][:-width]


def own_means(entries: dict[str, Any], record: Any) -> None:
    record[PUBLIC] = type(record[PUBLIC])(-record[PUBLIC].numpy())


def nobody(entries: dict[str, Any], *_: Any) -> None:
    for name in [name for name in entries if name.startswith("claim-")]:
        del entries[name]


OTHER_PLACES = entry("slots", lambda slots: integers(slots)[::-1].tobytes())
LIES = [
    (entry("server-round", lambda number: number - 1), "round 2 is not after 2"),
    (OTHER_PLACES, "orders public nodes otherwise"),
    (entry("claim-nodes", other_node), "is not signed with"),
    (fewer, "claims of 6 parties, sums of 7"),
    (own_means, "are not those that it shows to all"),
    (entry("with-targets", lambda _: [0]), "has means for some clients and not for others"),
    (entry("mask-length", lambda length: length + 3), "another length than the nodes"),
    (nobody, "claims of 0 parties"),
]


def test_a_lie_to_one_is_refused_and_the_others_go_on() -> None:
    outcome = lying({number: lie for number, (lie, _) in enumerate(LIES, 3)})
    for report, (_, why) in zip(outcome.reports[2:], LIES, strict=True):
        assert [entry["reason"] for entry in report.rejected if why in entry["reason"]] != [], why
        # Without the victim, and without another one: sums differ by two.
        assert (report.skipped, report.answered) == ("", COUNT - 2)
    assert 2 not in outcome.strategy.contributors


def test_a_lie_to_all_opens_nothing() -> None:
    lies = {3: OTHER_PLACES, 4: own_means, 5: nobody}
    outcome = lying(lies, to=range(COUNT))
    assert [bool(report.skipped) for report in outcome.reports] == [False] * 2 + [True] * 3
    assert outcome.strategy.mean.made == 2


def test_means_of_ones_own_for_each_are_in_the_masks_too() -> None:
    """Whoever is shown other hashes believes them, and is in no sum that can be read."""

    def other(entries: dict[str, Any], record: Any) -> None:
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
    """The attack below, on clients that do not trust the server."""
    members = [still_member(i, np.eye(5)[:, :3].tolist(), range(5)) for i in range(COUNT)]
    grid, strategy = make_distrusting(members, COUNT)
    strategy.mean = lying = LaidApart()
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


class LaidApart(CommonMean):
    """Gives each client places of its own in the sum, and keeps what lies there."""

    def choose(self, nodes: IntArray, ids: Mapping[int, IntArray], dimension: int) -> None:
        ends = np.cumsum([own.size for own in ids.values()])
        of_clients = zip(ids.items(), ends, strict=True)
        self.slots = {client: np.arange(end - own.size, end) for (client, own), end in of_clients}
        self.nodes = np.arange(ends[-1])
        self.rows = np.zeros((ends[-1], dimension), np.float32)

    def take(self, total: Any, contributors: Iterable[int]) -> None:
        self.read = {c: total.reshape(self.rows.shape)[slots] for c, slots in self.slots.items()}


def test_who_lays_out_the_secure_consensus_reads_every_client_out_of_one_sum() -> None:
    """Rows come turned, and whatever compares them with each other is as it was."""
    chance = np.random.default_rng(0)
    vectors = [chance.normal(size=(5, 3)) for _ in range(4)]
    strategy = SecureConsensus()
    strategy.mean = lying = LaidApart()
    members = [still_member(i, rows.tolist(), range(5)) for i, rows in enumerate(vectors)]
    run_secure(members, rounds=1, strategy=strategy)
    assert lying.read.keys() == {0, 1, 2, 3}
    for client, rows in lying.read.items():
        assert np.allclose(rows @ rows.T, vectors[client] @ vectors[client].T, atol=1e-3)


@pytest.mark.parametrize("lowered", ["strategy.alignment=plain", "strategy.aggregation=plain"])
def test_clients_of_fedscem_send_nothing_in_the_clear_that_the_runs_config_hides(
    lowered: str,
) -> None:
    """Settings travel in the server's messages too; the run's config says `psi` and `masked`."""
    setup = ALL["fedscem"].with_("strategy.dropout=0.1")
    hidden, asked = setup.load(), setup.load(lowered)
    grid = Federation(client_app(hidden, None), num_supernodes=setup.supernodes)
    strategy: Any = method_of(asked).build_strategy(asked, None)
    with suppress(NoClientsError):
        strategy.start(grid, num_rounds=1, timeout=5.0)
    refused = [reply for _, reply in grid.exchanged if reply.has_error()]
    assert any("config has" in reply.error.reason for reply in refused)
    for request, reply in grid.exchanged:
        if reply.has_content():
            assert request.metadata.message_type != "train"
            assert "align-identities" not in entries_of(reply.content)
