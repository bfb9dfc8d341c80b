"""Clients that answer badly, late, twice or not at all; nobody there; clients that come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from relay_helpers import (
    FEATURES,
    ChangingGrid,
    FaultyGrid,
    Outcome,
    asked_users,
    assigned,
    client_app,
    run,
    same_weights,
    small_graph,
)

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import NoClientsError
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay.strategy import ACTIONS, NodeClient

N, BAD_ROUND = 15, 3
# How many rounds a run has, so that rounds follow the fault.
ROUNDS = 6


def faulty(word: str, **options: Any) -> Outcome:
    """Run with one of three SuperNodes doing what `word` says in one round."""
    data = small_graph(N)
    script = {(1, BAD_ROUND): word}
    grid = FaultyGrid(client_app(data), num_supernodes=3, script=script)
    return run(data, grid=grid, rounds=ROUNDS, timeout=0.1, **options)


REASONS = {
    "nan": "NaN or infinite",
    "group": "round 2, expected 3",
    "late": "no reply within 0.1 s",
    "unsent": "not sent",
}


@pytest.mark.parametrize("word", REASONS)
def test_a_bad_answer_is_as_good_as_a_lost_one(word: str) -> None:
    # Whatever arrived, was computed or was answered: the client applies each gradient once, and
    # the server goes on with its last latent vectors.
    outcome, lost = faulty(word), faulty("lost")
    assert outcome.figures == lost.figures
    assert same_weights(outcome, lost)
    (entry,) = outcome.reports[BAD_ROUND - 1].rejected
    assert REASONS[word] in entry["reason"]
    assert [r.answered for r in outcome.reports] == [15, 15, 10, 15, 15, 15]
    assert [len(r.rejected) for r in outcome.reports] == [0, 0, 1, 0, 0, 0]
    assert outcome.reports[-1].bytes == lost.reports[-1].bytes
    assert lost.losses != faulty("good").losses


def test_an_answer_that_comes_twice_counts_once() -> None:
    outcome, clean = faulty("twice"), faulty("good")
    assert outcome.figures == clean.figures
    assert same_weights(outcome, clean)
    assert outcome.reports[-1].bytes == clean.reports[-1].bytes


@pytest.mark.parametrize("word", ["silent", "nan"])
@pytest.mark.parametrize("options", [{"participation": 0.6}, {"average_every": 2}])
def test_faults_with_other_features_lose_nothing(word: str, options: dict[str, Any]) -> None:
    # Round 3 brings the mean of round 2. In whatever way that round fails, the client takes the
    # mean over once, before the gradient that came with it.
    outcome, lost = faulty(word, **options), faulty("lost", **options)
    assert outcome.losses == pytest.approx(lost.losses, rel=1e-6)
    assert torch.allclose(outcome.weights["latent"], lost.weights["latent"], atol=1e-6)


@pytest.mark.parametrize("what", ["weights", "holders"])
def test_bad_averages_are_refused(what: str) -> None:
    def spoil(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        reply = call_next(message, context)
        if "average" in reply.content and context.node_config["partition-id"] == 1:
            array = reply.content["average"][what]
            value = array.numpy().copy()
            value[0] = 99 if what == "holders" else float("nan")
            reply.content["average"][what] = type(array)(value)
        return reply

    data = small_graph(N)
    grid = InProcessGrid(client_app(data, mods=[spoil]), num_supernodes=3)
    outcome = run(data, grid=grid, rounds=4, average_every=2)
    assert [r.answered for r in outcome.reports] == [15, 10, 15, 10]
    assert what in outcome.reports[1].rejected[0]["reason"]


# A client that fails after its work is done ------------------------------------------------------


class FailingMod:
    """Raises once the users have been stepped, so that the engine takes the context back."""

    def __init__(self, rounds: set[str]) -> None:
        self.rounds = rounds

    def __call__(
        self, message: Message, context: Context, call_next: Callable[..., Message]
    ) -> Message:
        reply = call_next(message, context)
        now = message.metadata.message_type == "train" and message.metadata.group_id in self.rounds
        if now and context.node_config["partition-id"] == 1:
            raise OSError("no space left on device")
        return reply


@pytest.mark.parametrize("rounds", [{"1"}, {"2", "3"}])
def test_a_client_that_fails_after_its_work_comes_back(rounds: set[str]) -> None:
    data = small_graph(N)
    app = client_app(data, mods=[FailingMod(rounds)])
    failing = run(data, grid=InProcessGrid(app, num_supernodes=3), rounds=ROUNDS)
    script = {(1, int(number)): "lost" for number in rounds}
    grid = FaultyGrid(client_app(data), num_supernodes=3, script=script)
    lost = run(data, grid=grid, rounds=ROUNDS, timeout=0.1)
    assert failing.figures == lost.figures
    assert same_weights(failing, lost)
    assert [r.answered for r in failing.reports] == [
        10 if str(number) in rounds else 15 for number in range(1, ROUNDS + 1)
    ]


# Away for rounds, gone, new ----------------------------------------------------------------------


def test_a_client_that_was_away_comes_back() -> None:
    data = small_graph(N)
    script = {(1, number): "silent" for number in (1, 2, 4, 5)}
    grid = FaultyGrid(client_app(data), num_supernodes=3, script=script)
    outcome = run(data, grid=grid, rounds=7, timeout=0.05)
    assert [r.answered for r in outcome.reports] == [10, 10, 15, 10, 10, 15, 15]
    script = {key: "lost" for key in script}
    grid = FaultyGrid(client_app(data), num_supernodes=3, script=script)
    lost = run(data, grid=grid, rounds=7, timeout=0.05)
    assert outcome.figures == lost.figures


# Nobody there ------------------------------------------------------------------------------------


def test_silence_of_all_stops_the_run_after_the_deadline() -> None:
    data = small_graph(N)
    script = {(part, 3): "silent" for part in (0, 1)}
    grid = FaultyGrid(client_app(data), num_supernodes=2, script=script)
    started = time.monotonic()
    with pytest.raises(NoClientsError, match=r"round 3: none of 2 SuperNodes .* within 0\.3 s"):
        run(data, grid=grid, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 3


def test_nobody_who_takes_part_is_connected() -> None:
    data = small_graph(N)
    (drawn,) = asked_users(N, 1 / N, 3, 2).tolist()
    rounds = {part: {1} for part in range(N) if part != (drawn + 1) % N}
    data.train_mask[:] = True
    with pytest.raises(NoClientsError, match="round 2: no connected SuperNode hosts a user who"):
        grid = ChangingGrid(client_app(data), rounds, N)
        run(data, grid=grid, participation=1 / N)


def test_clients_that_cannot_say_whom_they_host_stop_the_run() -> None:
    def client_fn(context: Context) -> NodeClient:
        raise RuntimeError("my data are gone")

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=2)
    with pytest.raises(NoClientsError, match=r"no SuperNode hosts users .* my data are gone"):
        run(small_graph(N), grid=grid)


# Wrong users -------------------------------------------------------------------------------------


def hosting(users_of: Callable[[int], list[int]]) -> Any:
    data = small_graph(N)

    def client_fn(context: Context) -> NodeClient:
        users = torch.tensor(users_of(int(context.node_config["partition-id"])))
        return NodeClient(context, torch.ones(len(users), FEATURES), users)

    return data, make_client_app(client_fn, actions=ACTIONS)


def test_two_clients_with_the_same_user(caplog: pytest.LogCaptureFixture) -> None:
    data, app = hosting(lambda part: list(range(10)) if part == 0 else list(range(9, 15)))
    outcome = run(data, grid=InProcessGrid(app, num_supernodes=2), rounds=2)
    assert {r.answered for r in outcome.reports} <= {10, 6}
    assert "takes no part: client " in caplog.text and "already: give each" in caplog.text


@pytest.mark.parametrize("users", [[15], [3, 3]])
def test_impossible_users(users: list[int], caplog: pytest.LogCaptureFixture) -> None:
    data, app = hosting(lambda part: [0, 1, 2] if part == 0 else users)
    outcome = run(data, grid=InProcessGrid(app, num_supernodes=2), rounds=2)
    assert [r.answered for r in outcome.reports] == [3, 3]
    said = "hosts a user twice" if users == [3, 3] else f"user {users[0]}, but the graph has nodes"
    assert said in caplog.text


def test_clients_with_other_features_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = small_graph(N)

    def client_fn(context: Context) -> NodeClient:
        x, users = assigned(data, context)
        wide = int(context.node_config["partition-id"]) == 1
        return NodeClient(context, torch.cat([x, x], 1) if wide else x, users)

    app = make_client_app(client_fn, actions=ACTIONS)
    outcome = run(data, grid=InProcessGrid(app, num_supernodes=3), rounds=2)
    assert all(r.answered in (5, 10) for r in outcome.reports)
    assert "takes no part: its weights are" in caplog.text


def test_a_message_about_other_users_is_an_error(tmp_path: Path) -> None:
    from flower_graph.strategies.split_gradient_relay.messages import RelayRequest

    data = small_graph(N)
    outcome = run(data, rounds=1)
    grid = InProcessGrid(client_app(data), num_supernodes=3)
    node = grid.get_node_ids()[1]
    zeros = torch.zeros(2, 4).numpy()
    users = torch.tensor([1, 2]).numpy()  # the second is another client's
    request = RelayRequest(1, users, zeros, 0 * users, outcome.strategy.users.settings)
    (reply,) = grid.send_and_receive([Message(request.to_record(), node, "train")])
    assert "users that this client does not host" in reply.error.reason
