"""The state of a relaying server: 5 users, latent vectors of 2 numbers, weights of 3 x 2."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from flower_graph.server.session import draw
from flower_graph.strategies.split_gradient_relay.messages import (
    EnrolmentReply,
    RelayReply,
    RelayRequest,
)
from flower_graph.strategies.split_gradient_relay.server_state import (
    RelayMembership,
    RelayServerState,
)
from flower_graph.strategies.split_gradient_relay.users import UserSettings

N, H, SHAPE = 5, 2, (3, 2)
SETTINGS = UserSettings(H, False, 0.1, 0.0, 7, "holders")
DEALING = {10: [0, 1, 4], 20: [2, 3]}


class Book(RelayServerState):
    """A server's state, and who hosts whom."""

    def __init__(self, n: int, settings: UserSettings, *, participation: float, **more: Any):
        super().__init__(n, settings, participation=participation, **more)
        self.participation, self.members = participation, RelayMembership(self)

    def enroll(self, node: int, reply: EnrolmentReply, connected: Any) -> str:
        return self.members._enrol(node, reply, set(connected))

    def ask(self, server_round: int, nodes: Any = None, *, last: bool = False, **more: Any) -> Any:
        """Write requests to some SuperNodes, or to all."""
        known = self.members.clients
        hosted = {n: known[n] for n in (known if nodes is None else nodes) if n in known}
        drawn = draw(self.num_users, self.participation, self.settings.seed, server_round)
        return self.requests(server_round, hosted, None if last else drawn, **more)


def book_of(assignment: dict[int, list[int]] = DEALING, *, n: int = N, **changes: Any) -> Book:
    options = {"participation": 1.0, "average_every": 0, **changes}
    book = Book(n, options.pop("settings", SETTINGS), **options)
    for node, users in assignment.items():
        assert book.enroll(node, hello(users), assignment) == ""
    return book


def hello(users: list[int], shape: tuple[int, int] = SHAPE) -> EnrolmentReply:
    return EnrolmentReply(np.array(users), shape)


def play(book: Book, server_round: int, silent: tuple[int, ...] = ()) -> Any:
    """Run a round in which the gradient of user ``u`` is ``10 * round + u`` twice."""
    requests = book.ask(server_round)
    answered = {node: r for node, r in requests.items() if node not in silent}
    book.delivered(answered)
    gradient = np.repeat(10 * server_round + np.arange(book.num_users), H)
    book.keep_gradients(server_round, answered, gradient.reshape(-1, H).astype(np.float32))
    return requests


def weights(total: list[list[float]], holders: list[int]) -> RelayReply:
    return RelayReply(1, np.zeros((1, H)), np.array(total), np.array(holders))


def test_requests_name_each_nodes_users_in_its_order():
    requests = book_of({10: [4, 0, 1], 20: [3, 2]}).ask(1, [20, 10, 30])
    assert {node: r.users.tolist() for node, r in requests.items()} == {10: [4, 0, 1], 20: [3, 2]}
    request = requests[10]
    assert request.server_round == 1
    assert request.gradient.tolist() == [[0, 0]] * 3
    assert request.gradient_round.tolist() == [0, 0, 0]
    assert request.settings == SETTINGS
    assert (request.average, request.average_round) == (None, 0)
    assert not request.send_weights and not request.checkpoint


def test_gradients_come_one_round_later_and_wait_for_the_absent():
    book = book_of()
    play(book, 1)
    second = play(book, 2, silent=(20,))
    assert second[10].gradient.tolist() == [[10, 10], [11, 11], [14, 14]]
    assert second[20].gradient.tolist() == [[12, 12], [13, 13]]
    third = play(book, 3)
    assert third[10].gradient[:, 0].tolist() == [20, 21, 24]
    assert third[10].gradient_round.tolist() == [2, 2, 2]
    assert third[20].gradient[:, 0].tolist() == [12, 13], "of the last round that they answered"
    assert third[20].gradient_round.tolist() == [1, 1]
    last = book.ask(3, [10, 20], last=True)
    assert last[20].gradient_round.tolist() == [3, 3]
    book.delivered(last)
    assert book.ask(4, [10])[10].gradient_round.tolist() == [0, 0, 0]


def test_users_that_are_back_under_another_node_id():
    book = book_of()
    play(book, 1)
    assert book.enroll(30, hello([2, 3]), [10, 30]) == ""
    assert set(book.members.clients) == {10, 30}
    assert book.ask(2, [10, 30])[30].gradient[:, 0].tolist() == [12, 13], "what waited is kept"


def test_weights_of_another_shape_are_refused():
    refused = book_of({10: [0]}).enroll(20, hello([1], (4, 2)), [10, 20])
    assert refused == "its weights are (4, 2), others have (3, 2)"


def asked(book: Book, server_round: int) -> list[int]:
    requests = book.ask(server_round)
    return sorted(user for r in requests.values() for user in r.users.tolist())


def test_at_least_one_user_is_asked():
    assert len(asked(book_of(participation=0.01), 1)) == 1


def test_the_last_message_and_checkpoints_reach_every_host():
    book = book_of({node: [node] for node in range(N)}, participation=0.2)
    last = book.ask(9, list(range(N)), last=True)
    assert sorted(int(r.users[0]) for r in last.values()) == list(range(N))
    saving = book.ask(9, list(range(N)), checkpoint=True)
    assert all(request.checkpoint for request in saving.values())
    assert len(saving) == N
    assert sum(request.users.size for request in saving.values()) == 1


def test_payload_by_hand():
    # 5 users, 2 numbers of 4 bytes each: 40 bytes a round up; the gradients lag by one round.
    book = book_of()
    for server_round, down in ((1, 0), (2, 40), (3, 80)):
        play(book, server_round)
        assert book.ledger.payload["up"] == {"latent": 40 * server_round}
        assert book.ledger.payload["down"]["gradient"] == down
    book.delivered(book.ask(3, [10, 20], last=True))
    assert book.ledger.payload == {"up": {"latent": 120}, "down": {"gradient": 120}}


def test_payload_of_weights_is_each_users_full_matrix():
    book = book_of(average_every=2)
    assert not play(book, 1)[10].send_weights
    assert play(book, 2)[10].send_weights
    assert book.ledger.payload["up"] == {"latent": 80, "weights": 5 * 3 * 2 * 4}
    book.average(2, [weights([[1, 1]] * 3, [1, 1, 1])])
    play(book, 3, silent=(20,))
    assert book.ledger.payload["down"]["weights"] == 3 * 3 * 2 * 4
    play(book, 4)
    assert book.ledger.payload["down"]["weights"] == 5 * 3 * 2 * 4, "the late ones get it once"
    play(book, 5)
    assert book.ledger.payload["down"]["weights"] == 5 * 3 * 2 * 4


def test_average_by_hand():
    book = book_of(average_every=1)
    book.average(
        4,
        [
            weights([[1, 2], [0, 0], [6, 6]], [1, 0, 2]),
            RelayReply(4, np.zeros((1, H))),  # sent none
            weights([[3, 4], [0, 0], [0, 0]], [3, 0, 0]),
        ],
    )
    request = book.ask(5, [10])[10]
    assert request.average_round == 4
    assert request.average is not None
    assert request.average.dtype == np.float32
    assert request.average[[0, 2]].tolist() == [[1.0, 1.5], [3.0, 3.0]]
    assert all(math.isnan(value) for value in request.average[1])


def test_average_adds_up_in_double_precision():
    book = book_of(average_every=1)
    huge, one = 2.0**30, np.float32(1)
    book.average(1, [weights([[value, 0]] * 3, [1] * 3) for value in (huge, one, -huge)])
    assert book.ask(2, [10])[10].average[0, 0] == pytest.approx(1 / 3)


def test_average_of_unsigned_counts():
    book = book_of(average_every=1)
    reply = weights([[4, 4]] * 3, [2] * 3)
    reply.holders = reply.holders.astype(np.uint64)
    book.average(1, [reply])
    assert book.ask(2, [10])[10].average.tolist() == [[2, 2]] * 3


def test_an_average_goes_to_those_that_lack_it():
    book = book_of(average_every=2)
    book.average(2, [weights([[1, 1]] * 3, [1] * 3)])
    third = play(book, 3, silent=(20,))
    assert third[10].average is not None and third[20].average is not None
    fourth = play(book, 4)
    assert fourth[10].average is None
    assert fourth[20].average_round == 2


def test_goes_on_from_its_state():
    book = book_of(average_every=2)
    play(book, 1)
    play(book, 2, silent=(20,))
    book.average(2, [weights([[1, 2]] * 3, [1, 0, 2])])
    other = book_of(average_every=2)
    other.load_state_dict(copy.deepcopy(book.state_dict()))
    for server_round in (3, 4):
        for got, want in zip(
            play(other, server_round).values(), play(book, server_round).values(), strict=True
        ):
            assert_same(got, want)
    assert other.ledger.payload == book.ledger.payload


def assert_same(got: RelayRequest, want: RelayRequest) -> None:
    for name, value in vars(want).items():
        np.testing.assert_array_equal(getattr(got, name), value, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"average_every": -1}, "average_every: -1 is not at least 0"),
        ({"settings": SETTINGS._replace(average_over="some")}, "'some' is neither"),
        (
            {
                "settings": SETTINGS._replace(average_over="all"),
                "average_every": 1,
                "participation": 0.5,
            },
            "'all' needs participation 1",
        ),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        book_of(**changes)
