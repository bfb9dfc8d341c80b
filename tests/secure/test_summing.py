"""Sums over Flower messages, in process."""

import re

import numpy as np
import pytest
from doc_helpers import DOCS, run_blocks

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import MembershipError
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.sum.round import Cause, Skipped
from flower_graph.secure.sum.service import SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange

DOC = DOCS / "secure-sum.md"


class Numbered(SecureSumClient):
    """Client c has (c, scale); what a test puts into ``odd`` replaces that."""

    odd: dict = {}  # noqa: RUF012 - filled anew by each test

    def vectors(self, config):
        found = {c: np.array([c, config.get("scale", 1.0)]) for c in self.clients}
        return found | {c: self.odd[c] for c in self.odd if c in found}


def make(nodes, hosted, odd=None, **options):
    own = type("Own", (Numbered,), {"odd": odd or {}})

    def client_fn(context):
        first = hosted * context.node_config["partition-id"]
        return own(context, range(first, first + hosted))

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=nodes)
    return grid, SecureSum(Exchange(grid), limit=1000.0, **options)


@pytest.mark.parametrize(("nodes", "hosted"), [(1, 12), (4, 3), (12, 1), (2, 1)])
def test_sums_over_rounds(nodes, hosted):
    grid, secure = make(nodes, hosted)
    m, sent, push = nodes * hosted, [], grid.push_messages
    grid.push_messages = lambda messages: sent.append(messages) or push(messages)
    for server_round in (4, 5, 6):
        sent.clear()
        summed = secure.sum(server_round, 2, {"scale": 0.5 * server_round})
        assert len(sent) == 2 or server_round == 4, "two exchanges a round, after enrolment"
        assert summed.contributors.tolist() == list(range(m))
        assert summed.values.tolist() == [m * (m - 1) / 2, m * 0.5 * server_round]


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        (np.array([np.nan, 1]), "a number is outside .*-1000 to 1000"),
        (np.array([1, 1000.5]), "a number is outside .*-1000 to 1000"),
        (np.zeros(3), r"shape \(3,\), expected \(2,\)"),
        (None, r"no vector, expected \(2,\)"),
    ],
)
def test_clients_without_a_usable_vector_are_left_out(vector, reason):
    _, secure = make(2, 5, {3: vector})
    summed = secure.sum(1, 2)
    assert summed.values.tolist() == [42, 9]
    [blamed] = secure.server.blamed
    assert (blamed.client, blamed.kind) == (3, Cause.LEFT_OUT)
    assert re.search(reason, blamed.text)


def test_a_node_that_fails_is_left_out_and_returns():
    grid, secure = make(8, 1)
    lost = list(grid.contexts)[2]
    kept = grid.contexts.pop(lost)
    assert secure.sum(1, 2).contributors.size == 7
    grid.contexts[lost] = kept
    assert secure.sum(2, 2).contributors.size == 7  # enrolled now, prepared with the next
    assert secure.sum(3, 2).contributors.size == 8


def test_a_node_that_lost_its_state_is_left_out_and_too_few_skip():
    grid, secure = make(8, 1)
    secure.sum(1, 2)
    contexts = list(grid.contexts.values())
    contexts[0].state.clear()
    summed = secure.sum(2, 2)
    assert summed.contributors.size == 7 and summed.values[1] == 7
    for context in contexts[:5]:
        context.state.clear()
    assert isinstance(secure.sum(3, 2), Skipped)
    assert isinstance(make(1, 1)[1].sum(1, 2), Skipped)


def doubled(nodes, claim):
    """Make a federation whose SuperNodes say by turns which clients they host."""

    def client_fn(context):
        return Numbered(context, claim[context.node_config["partition-id"]])

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=nodes)
    return grid, SecureSum(Exchange(grid), limit=1000.0)


@pytest.mark.parametrize("claimant", [0, 2])
def test_two_supernodes_that_claim_one_client_stop_the_first_enrolment(claimant):
    """Neither ids nor order decide whose it is; the error names both, and the registry."""
    claims = [[0, 1], [2, 3], [4, 5]]
    claims[claimant] = [2, 3]
    grid, secure = doubled(3, claims)
    with pytest.raises(MembershipError, match="registry") as error:
        secure.sum(1, 2)
    for place in (1, claimant):
        assert str(list(grid.contexts)[place]) in str(error.value)


def test_doubles_that_come_later_are_both_left_out_and_named():
    grid, secure = doubled(6, [[0], [1], [2], [3], [3], [1]])
    later = {node: grid.contexts.pop(node) for node in list(grid.contexts)[3:]}
    assert secure.sum(1, 2).contributors.tolist() == [0, 1, 2]
    grid.contexts |= later
    for number in (2, 3):
        assert secure.sum(number, 2).contributors.tolist() == [0, 1, 2]
    assert {entry.node_id for entry in secure.rejected} == set(later)


def test_that_sums_are_not_kept_apart_is_said_once_when_the_first_begins(caplog):
    _, secure = make(4, 1)
    secure.prepare(1)
    assert [one.getMessage() for one in caplog.records if "subtract the sums" in one.message]
    caplog.clear()
    secure.sum(1, 2)
    secure.sum(2, 2)
    assert not caplog.records


def test_the_documents_example(capsys):
    run_blocks(DOC, 1)
    draws = [np.random.default_rng(client) for client in range(32)]
    labels = np.concatenate([draw.integers(3, size=10) for draw in draws])
    measured = np.concatenate([draw.normal(20.0, 2.0, size=10) for draw in draws])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"32 clients, classes {np.bincount(labels)}"
    assert second == f"mean of 320 measurements: {measured.mean():.3f}"
