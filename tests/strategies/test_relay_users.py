"""nFedGNN's users: their half of a round, rows in a file, and the attack on their vectors."""

import errno
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from graph_helpers import Outcome, small_graph
from numpy.typing import NDArray
from relay_helpers import run, same_run, same_weights
from torch import Tensor

from flower_graph.audit.suite import Layer, Step, course, equations, from_sequence
from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.ops.active_rows import pack
from flower_graph.storage import checkpoint, row_file
from flower_graph.storage.files import IN_PROCESS
from flower_graph.strategies.nfedgnn.algorithm import OwnMaps, UserSettings, shared_linear_weight
from flower_graph.strategies.nfedgnn.client import EnrolmentRequest, NodeClient, RelayRequest

RATE = 0.1
HERE = UserSettings(2, True, 0.01, 5, "holders")
X = torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 3, 1], [4, 0, 0]])
EVERYBODY = [7, 2, 9, 4]
USERS = torch.tensor(EVERYBODY)
RUNS = itertools.count(5000)
GRADIENT = np.arange(8, dtype=np.float32).reshape(4, 2) - 3


@pytest.fixture
def context() -> Context:
    node = {"state-dir": IN_PROCESS, "partition-id": 0}
    return Context(next(RUNS), 1, node, RecordDict(), {})  # type: ignore[arg-type]


def client_of(context: Context, x: Tensor = X, users: Tensor = USERS) -> NodeClient:
    client = NodeClient(context, x, users)
    client.get_properties(EnrolmentRequest(HERE).to_config())
    return client


def send(
    client: NodeClient,
    users: list[int] = EVERYBODY,
    gradient: Any = None,
    rounds: list[int] | None = None,
    **more: Any,
) -> list[np.ndarray]:
    """Send a message, without a gradient if none is given; return the arrays of the answer."""
    gradient = np.zeros((len(users), 2), np.float32) if gradient is None else gradient
    waiting = np.array(rounds or [0] * len(users))
    request = RelayRequest(1, np.array(users), gradient, waiting, RATE, **more)
    arrays, _, config = request.to_numpy()
    return client.fit(arrays, config)[0]


def expected(*steps: tuple[list[int], np.ndarray]) -> np.ndarray:
    """Compute the latent vectors after some steps of some places, by the maps alone."""
    maps = OwnMaps(pack(X, bias=True), HERE)
    for place, gradient in steps:
        maps.step(torch.tensor(place), torch.from_numpy(gradient), RATE)
    return maps.forward(None).numpy()


def test_latents_come_in_the_order_of_the_message(context: Context):
    want = expected()
    assert np.array_equal(send(client_of(context))[0], want)
    latent, _, count = send(client_of(context), [4, 7], send_weights=True)
    assert np.array_equal(latent, want[[3, 0]]) and count.tolist() == [2, 0, 1, 0]


def test_a_gradient_that_comes_twice_is_applied_once(context: Context):
    client = client_of(context)
    send(client)
    send(client, [9, 7], GRADIENT[:2], [1, 1])
    (latent,) = send(client, EVERYBODY, GRADIENT, [1, 0, 2, 1])  # new to users 9 and 4 alone
    assert np.array_equal(latent, expected(([2, 0], GRADIENT[:2]), ([2, 3], GRADIENT[[2, 3]])))


def test_an_average_is_taken_over_once(context: Context):
    client, average = client_of(context), np.full((4, 2), 0.5, np.float32)
    average[3] = np.nan
    send(client, [7, 4], average=average, average_round=3)
    assert send(client)[0][[0, 3]].tolist() == [[1.5, 1.5], [2.0, 2.0]]
    (stepped,) = send(client, [7], GRADIENT[:1], [3])
    (latent,) = send(client, average=average, average_round=3)
    assert np.array_equal(latent[:1], stepped), "it had this average already"
    assert latent[2].tolist() == [2.0, 2.0], "it had not"
    assert np.array_equal(send(client, average=average, average_round=3)[0], latent)


def test_users_of_others_are_refused_and_nothing_is_lost(context: Context):
    client = client_of(context)
    (before,) = send(client)
    for users in ([7, 3], [100], [-1]):
        with pytest.raises(ValueError, match="client"):
            send(client, users)
    assert np.array_equal(send(client)[0], before)


def test_state_that_the_server_counts_on_must_be_there(
    context: Context, monkeypatch: pytest.MonkeyPatch
):
    client = client_of(context)
    with pytest.raises(StateLostError, match="state-dir"):
        send(client, EVERYBODY, GRADIENT, [1] * 4)
    send(client)
    send(client, EVERYBODY, GRADIENT, [1] * 4)
    with monkeypatch.context() as patch, pytest.raises(AttributeError, match="forward"):
        patch.delattr(OwnMaps, "forward")
        send(client)
    with pytest.raises(StateLostError):  # a message that failed half way
        send(client)


@pytest.mark.parametrize(("rows", "users"), [(4, 1), (4, 0), (0, 0)])
def test_rows_and_users_must_match(context: Context, rows: int, users: int):
    with pytest.raises(ValueError, match=f"{rows}.*{users}"):
        client_of(context, X[:rows], USERS[:users])


# Users' rows in files: the same bits as in memory, and a resumed run. Contracts have the rest. ---

MANY, NINE = small_graph(24), 9
SOME: dict[str, Any] = {"participation": 0.5, "learning_rate": 0.3}


def stored(folder: Path, *, every: int = 0, **how: Any) -> Outcome:
    """Run with rows in files, on two SuperNodes."""
    saved = {"folder": folder / "saved", "checkpoint_every": every} if every else {}
    of_client = {"rows_dir": folder / "rows"}
    return run(MANY, rounds=NINE, of_client=of_client, **(SOME | saved | how))


@pytest.mark.parametrize("options", [{}, {"user_bias": True}, {"participation": 1.0}])
def test_rows_in_a_file_give_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    # With half of the users a round, some wait several rounds for their gradient.
    in_memory = run(MANY, rounds=NINE, **(SOME | options))
    in_file = stored(tmp_path, **options)
    assert same_run(in_file, in_memory)
    assert same_weights(in_file, in_memory)
    assert not (tmp_path / "rows").exists()  # the run is over, and nothing goes on from it


def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run(MANY, rounds=NINE, **SOME)
    # Rows have changed since the checkpoint of round 6, some of them twice: they must go back.
    stored(tmp_path, every=3, stop_at=8)
    resumed = stored(tmp_path, every=3, resume=True)
    assert [report.round for report in resumed.reports] == [7, 8, 9]
    assert same_run(resumed, whole)
    assert same_weights(resumed, whole)


def test_a_run_does_not_go_on_without_its_rows(tmp_path: Path) -> None:
    stored(tmp_path, every=3, stop_at=8)
    for path in (tmp_path / "saved").glob("round-*/*.rows"):
        path.unlink()
    with pytest.raises(CheckpointError):
        stored(tmp_path, every=3, resume=True)


def test_a_file_and_its_copy_have_no_room_for_zeros(tmp_path: Path) -> None:
    """A user that was never asked takes no room."""
    path, count = tmp_path / "numbers", 1 << 20
    row_file.create(path, count)
    row_file.mapped(path, count)[count // 2] = 3
    row_file.copy(path, tmp_path / "copy")
    for file in tmp_path.iterdir():
        assert file.stat().st_size == 4 * count and file.stat().st_blocks * 512 <= row_file.PIECE
        again = row_file.mapped(file, count)
        assert again[count // 2] == again.sum() == 3
    with pytest.raises(StateLostError):
        row_file.mapped(path, count + 1)
    row_file.create(path, 0)
    assert not row_file.mapped(path, 0).numel()


def test_copies_that_cannot_be_made_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_file, "copy", Mock(side_effect=OSError(28, "full")))
    outcome = stored(tmp_path, every=3, stop_at=8)
    assert not checkpoint.complete_rounds(tmp_path / "saved") and len(outcome.reports) == 8


def test_rows_in_a_file_are_not_encrypted(tmp_path: Path) -> None:
    node = {"state-dir": str(tmp_path), "state-key": "x"}
    context = Context(1, 2, node, RecordDict(), {})
    with pytest.raises(ValueError, match="state-key"):
        NodeClient(context, MANY.x, MANY.y, rows_dir=tmp_path)


def test_a_full_disk_is_an_error_before_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "numbers"
    row_file.create(path, 1 << 20)
    row_file.check_room(path, 1 << 20)
    full = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(row_file.os, "statvfs", lambda path: full)
    row_file.check_room(path, 1 << 10)
    with pytest.raises(OSError, match="numbers") as caught:
        row_file.check_room(path, 1 << 20)
    assert caught.value.errno == errno.ENOSPC


FEATURES, SIZE, ROUNDS = 60, 8, 12
HOW = UserSettings(SIZE, True, 5e-4, 3, "holders")


def layer_of(how: UserSettings) -> Layer:
    start = shared_linear_weight(FEATURES, how).numpy().astype(float)
    return Layer(start, how.bias, how.weight_decay)


def user(count: int) -> NDArray[np.float32]:
    x = np.zeros(FEATURES, np.float32)
    x[np.random.default_rng(count).choice(FEATURES, count, replace=False)] = 1 / count
    return x


def followed(x: NDArray[np.float32], how: UserSettings) -> list[Step]:
    """Let the real client train by gradients that look like those of a run."""
    maps = OwnMaps(pack(torch.from_numpy(x[None]), bias=how.bias), how)
    rng, steps = np.random.default_rng(7), []
    for number in range(ROUNDS):
        rate = 0.1 * (1 - number / ROUNDS)  # as a schedule may have it
        gradient = None if number == 0 else (1e-2 * rng.normal(size=SIZE)).astype(np.float32)
        if gradient is not None:
            maps.step(None, torch.from_numpy(gradient[None]), rate)
        steps.append(Step(gradient, None, maps.forward(None).numpy()[0], rate))
    return steps


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_few_words_are_found_exactly_and_so_is_their_value(count: int, bias: bool) -> None:
    how, x = HOW._replace(bias=bias), user(count)
    layer = layer_of(how)
    steps, candidates = followed(x, how), [1 / number for number in range(1, 11)]
    rows = course(layer, 1 / count, steps)
    matrix, target = equations(layer, rows, np.stack([s.latent for s in steps]))
    np.testing.assert_allclose(matrix @ x, target, atol=1e-6)
    scores, value = from_sequence(layer, steps, candidates)
    assert value == pytest.approx(1 / count)
    assert set(np.argsort(-scores)[:count]) == set(np.flatnonzero(x))


def test_averaged_weights_are_taken_over() -> None:
    average = np.full((FEATURES + 1, SIZE), np.nan)
    average[2] = 0.5
    steps = [Step(None, None, np.zeros(SIZE)), Step(None, average, np.zeros(SIZE))]
    rows = course(layer_of(HOW), 1.0, steps)
    assert (rows[1, 2] == 0.5).all() and (rows[1, [3, -1]] == rows[0, [3, -1]]).all()
    # The mean of one round is taken over once, however often it comes
    gradient, again = np.ones(SIZE, np.float32), Step(None, average, np.zeros(SIZE))
    moved = Step(gradient, None, np.zeros(SIZE), 0.1)
    rows = course(layer_of(HOW), 1.0, [*steps, moved, again, again._replace(average_round=2)])
    assert (rows[3] == rows[2]).all() and (rows[2, 2] != 0.5).all() and (rows[4, 2] == 0.5).all()
