"""Sums over Flower messages, in process."""

import logging
import re

import numpy as np
import pytest
from sum_helpers import write_keys

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import IdentityError, MalformedReplyError
from flower_graph.secure.parties.registry import Registry
from flower_graph.secure.sum.client import SecureSumClient
from flower_graph.secure.sum.messages import SECURE_SUM
from flower_graph.secure.sum.server import Cause, Reason, Skipped
from flower_graph.server.sums import PartySums, SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange


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


@pytest.mark.parametrize("stage", ["sum", "prepare", "mask", "unmask"])
@pytest.mark.parametrize("entry", ["run", "round"])
def test_a_reply_about_another_run_or_round_is_refused(stage, entry):
    grid, secure = make(8, 1)
    liar, pull, key = list(grid.contexts)[2], grid.pull_messages, f"{stage}-{entry}"
    other = {"run": bytes(16), "round": 7}[entry]

    def pulled(numbers):
        for reply in (replies := list(pull(numbers))):
            said = reply.content.values() if reply.metadata.src_node_id == liar else ()
            for record in said:
                record.update({key: other} if key in record else {})
        return replies

    grid.pull_messages = pulled
    summed = secure.sum(1, 2)
    named = [one.reason for one in secure.rejected if one.node_id == liar]
    is_said = (stage, entry) != ("sum", "round")  # who enrols says no round
    assert bool(named) == is_said and all(key in reason for reason in named)
    assert summed.contributors.size == (8 if stage == "unmask" or not is_said else 7)


def test_who_is_told_to_add_up_something_else_is_in_no_readable_sum():
    """A server that has all but one send zeros would read that one from the sum."""
    grid, secure = make(8, 1)
    honest, push = list(grid.contexts)[2], grid.push_messages

    def pushed(messages):
        for message in messages:
            entries = message.content.get("config", {})
            if message.metadata.dst_node_id != honest and "scale" in entries:
                entries["scale"] = 0.0
        return push(messages)

    grid.push_messages = pushed
    for number in range(4):  # what cannot be read may look like numbers now and then
        found = secure.sum(number, 2, {"scale": 7.0})
        assert isinstance(found, Skipped) or found.values[1] not in (0.0, 7.0)
    grid.push_messages = push
    assert secure.sum(4, 2, {"scale": np.float64(7.0), "of": [1, 2], "raw": b"a\0"}).values[1] == 56


def doubled(nodes, claim):
    """Make a federation whose SuperNodes say by turns which clients they host."""

    def client_fn(context):
        return Numbered(context, claim[context.node_config["partition-id"]])

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=nodes)
    return grid, SecureSum(Exchange(grid), limit=1000.0)


def test_who_is_back_with_its_keys_goes_before_one_that_claims_its_clients():
    grid, secure = doubled(4, [[0], [1], [2], [2]])
    *_, gone, liar = list(grid.contexts)
    lying = grid.contexts.pop(liar)
    assert secure.sum(1, 2).contributors.tolist() == [0, 1, 2]
    grid.contexts |= {7: grid.contexts.pop(gone), liar: lying}
    assert secure.sum(2, 2).contributors.tolist() == [0, 1, 2]
    assert [entry.node_id for entry in secure.rejected] == [liar]


def test_doubles_that_come_later_are_both_left_out_and_named():
    grid, secure = doubled(6, [[0], [1], [2], [3], [3], [1]])
    later = {node: grid.contexts.pop(node) for node in list(grid.contexts)[3:]}
    assert secure.sum(1, 2).contributors.tolist() == [0, 1, 2]
    grid.contexts |= later
    for number in (2, 3):
        assert secure.sum(number, 2).contributors.tolist() == [0, 1, 2]
    assert {entry.node_id for entry in secure.rejected} == set(later)


# Sums over Flower messages under a server that parties need not trust ----------------------------


class Signed(SecureSumClient):
    def vectors(self, config):
        # Another one each time, by less than the resolution: a vector enters one sum
        moved = np.random.default_rng().uniform(0, 1e-9, 2)
        return {c: np.array([c, 1.0]) + moved for c in self.clients if c != 4}


def gridded(count, folder, kind=Signed):
    """Make SuperNodes with a key each and two clients; return their grid and the registry."""

    def client_fn(context):
        place = context.node_config["partition-id"]
        return kind(context, [2 * place, 2 * place + 1])

    how = {"num_supernodes": count, "node_config": write_keys(count, folder)}
    return InProcessGrid(make_client_app(client_fn), **how), folder / "registry.json"


@pytest.fixture
def parties(tmp_path):
    return gridded(6, tmp_path)


def summing(parties, **options):
    grid, registry = parties
    server = PartySums(registry, **options)
    return grid, SecureSum(Exchange(grid), limit=1000.0, server=server)


def test_sums_with_one_exchange_more(parties):
    grid, secure = summing(parties)
    sent, push = [], grid.push_messages
    grid.push_messages = lambda messages: sent.append(messages) or push(messages)
    for server_round in range(1, 4):
        sent.clear()
        summed = secure.sum(server_round, 2)
        assert len(sent) == 3 or server_round == 1
        assert summed.contributors.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
        assert summed.values.tolist() == [62, 11]
        left_out = Reason(Cause.LEFT_OUT, "no vector, expected (2,)", 4, server_round - 1)
        assert secure.server.blamed[-1] == left_out
    assert str(left_out) == "left out: no vector, expected (2,)"


def test_who_has_a_key_refuses_a_server_that_wants_to_be_trusted(parties):
    secure = SecureSum(Exchange(parties[0]), limit=1000.0)
    assert isinstance(secure.sum(1, 2), Skipped)
    assert all("signs for a party" in one.reason for one in secure.rejected)


def test_who_joins_begins_an_epoch_and_who_is_back_with_its_keys_does_not(parties):
    grid, secure = summing(parties)
    nodes = grid.get_node_ids()
    seen = []
    for number, there in enumerate((nodes[:5], nodes, nodes[1:], nodes)):
        clients = secure.prepare(number, there)
        seen.append((secure.server.epoch.number, len(clients)))
        assert (nodes[0] in secure.server.clients) == (nodes[0] in there)
        found = secure.add(number, {}, "train.sum_mask", 2, SECURE_SUM)
        assert found.skipped and not found.asked  # nobody was asked for a vector
    assert seen[:2] == [(0, 10), (1, 12)] and {epoch for epoch, _ in seen} == {0, 1}


def test_nobody_takes_the_place_of_a_party_that_is_there(parties):
    grid, secure = summing(parties)
    secure.prepare(1, grid.get_node_ids())
    with pytest.raises(MalformedReplyError, match="party 2"):
        secure.server.enrolled(99, secure.server.bindings[2])


def test_bad_input(parties):
    with pytest.raises(ValueError, match="dropout"):
        summing(parties, dropout=0.5)
    with pytest.raises(IdentityError):
        summing((parties[0], parties[1].with_name("none.json")))


@pytest.mark.parametrize(("count", "dropout"), [(9, 0.2), (5, 0.0), (12, 0.1)])
def test_a_sum_begins_where_fewer_may_vanish_than_the_registry_allows(tmp_path, count, dropout):
    _, secure = summing(gridded(count, tmp_path), dropout=dropout)
    assert secure.sum(1, 2).contributors.tolist() == of(*range(count))


# Registries that change in mid-run ----------------------------------------------------------------


@pytest.fixture
def seven(tmp_path):
    """Seven parties with a copy of the registry each, and the server's."""
    grid, registry = gridded(7, tmp_path)
    copies = [tmp_path / f"registry-{place}.json" for place in range(7)]
    for context, copy in zip(grid.contexts.values(), copies, strict=True):
        context.node_config["registry"] = str(copy)

    def give(new, places):
        for place in places:
            copies[place].write_text(new.text())

    give(Registry.read(registry), range(7))
    return summing((grid, registry))[1], registry, give


def of(*places):
    return [client for place in places for client in (2 * place, 2 * place + 1) if client != 4]


def test_who_is_revoked_is_out_of_the_next_sum_and_who_has_the_old_version_until_it_has_the_new(
    seven, caplog
):
    secure, path, give = seven
    assert secure.sum(1, 2).contributors.tolist() == of(*range(7))
    new = Registry.read(path).without(3)
    new.write(path)
    give(new, [0, 1, 2, 3, 4, 6])
    secure.rejected.clear()
    with caplog.at_level(logging.WARNING):
        assert secure.sum(2, 2).contributors.tolist() == of(0, 1, 2, 4, 6)
    assert "revoked: [3]" in caplog.text
    reasons = " ".join(entry.reason for entry in secure.rejected)
    assert "party 5: its binding is not signed for this run and version" in reasons
    assert "the key of party 3 is revoked" in reasons
    lists = secure.server.lists
    assert secure.sum(3, 2).contributors.tolist() == of(0, 1, 2, 4, 6)
    assert secure.server.lists == lists  # who is refused uses up no list of commitments
    give(new, [5])
    assert_one_is_left_out(secure.sum(4, 2), 0, 1, 2, 4, 5, 6)


def assert_one_is_left_out(summed, *places):
    """Without it the sum would differ by one SuperNode from that of all seven."""
    found = {client // 2 for client in summed.contributors.tolist()}
    assert found < set(places) and len(found) == len(places) - 1


def test_sums_are_skipped_while_too_few_have_the_new_version(seven):
    secure, path, give = seven
    secure.sum(1, 2)
    new = Registry.read(path).without(3)
    new.write(path)
    give(new, [0, 1, 2])
    assert "parties, a sum needs 5" in str(secure.sum(2, 2).reason)
    give(new, range(7))
    assert_one_is_left_out(secure.sum(3, 2), 0, 1, 2, 4, 5, 6)


def test_a_registry_that_cannot_be_read_is_not_taken(seven, caplog):
    secure, path, _ = seven
    secure.sum(1, 2)
    path.write_text("{")
    with caplog.at_level(logging.ERROR):
        assert secure.sum(2, 2).contributors.tolist() == of(*range(7))
    assert str(path) in caplog.text
