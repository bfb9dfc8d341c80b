"""The users of one SuperNode: every gradient and every average is applied once."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from torch import nn

from flower_graph.client.state import forget_run
from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.messages.fields import Resume
from flower_graph.ops.active_rows import pack
from flower_graph.storage.supernode_folder import IN_PROCESS
from flower_graph.strategies.split_gradient_relay.cohort_client import UserCohortClient
from flower_graph.strategies.split_gradient_relay.users import LinearCohort, UserSettings

SETTINGS = UserSettings(2, True, 0.1, 0.01, 5, "holders")
X = torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 3, 1], [4, 0, 0]])
USERS = torch.tensor([7, 2, 9, 4])
RUNS = itertools.count(5000)
RUN = "0123456789abcdef" * 2
GRADIENT = np.arange(8, dtype=np.float32).reshape(4, 2) - 3


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    run = next(RUNS)
    yield Context(run, 1, {"state-dir": IN_PROCESS, "partition-id": 0}, RecordDict(), {})
    forget_run(run, tmp_path / "state")


def host_of(context: Context, **changes: Any) -> UserCohortClient:
    options: dict[str, Any] = {
        "user_model": None,
        "device": torch.device("cpu"),
        "checkpoint_dir": None,
    }
    x, users = changes.pop("x", X), changes.pop("users", USERS)
    return UserCohortClient(context, x, users, **{**options, **changes})


def send(
    host: UserCohortClient, users: list[int], gradient: Any = None, rounds: list[int] | None = None
) -> np.ndarray:
    """Handle a message as ``NodeClient`` does; return the latent vectors."""
    with host.message(SETTINGS, np.array(users)) as chosen:
        if gradient is not None:
            chosen.step(gradient, np.array(rounds))
        return chosen.latent()


def expected(*steps: tuple[list[int], np.ndarray]) -> np.ndarray:
    """Compute the latent vectors after some steps of some places, by the cohort alone."""
    cohort = LinearCohort(pack(X, bias=True), SETTINGS)
    for place, gradient in steps:
        cohort.step(torch.tensor(place), torch.from_numpy(gradient))
    return cohort.forward(None).numpy()


def test_latents_come_in_the_order_of_the_message(context: Context):
    want = expected()
    assert np.array_equal(send(host_of(context), [7, 2, 9, 4]), want)
    assert np.array_equal(send(host_of(context), [4, 7]), want[[3, 0]])


def test_a_gradient_that_comes_twice_is_applied_once(context: Context):
    everybody = USERS.tolist()
    first = send(host_of(context), everybody, GRADIENT, [1] * 4)
    again = send(host_of(context), everybody, GRADIENT, [1] * 4)
    assert np.array_equal(first, again)
    assert np.array_equal(first, expected(([0, 1, 2, 3], GRADIENT)))


def test_gradients_of_different_rounds_in_one_message(context: Context):
    host = host_of(context)
    send(host, [9, 7], GRADIENT[:2], [1, 1])
    got = send(host, [7, 2, 9, 4], GRADIENT, [1, 0, 2, 1])  # new for users 9 and 4 alone
    want = expected(([2, 0], GRADIENT[:2]), ([2, 3], GRADIENT[[2, 3]]))
    assert np.array_equal(got, want)


def test_an_average_is_taken_over_once(context: Context):
    host, average = host_of(context), np.full((4, 2), 0.5, np.float32)
    average[3] = np.nan
    with host.message(SETTINGS, np.array([7, 4])) as chosen:
        chosen.take_average(average, 3)
    assert send(host, [7, 2, 9, 4])[[0, 3]].tolist() == [[1.5, 1.5], [2.0, 2.0]]
    stepped = send(host, [7], GRADIENT[:1], [3])
    with host.message(SETTINGS, USERS.numpy()) as chosen:
        chosen.take_average(average, 3)
        assert np.array_equal(chosen.latent()[:1], stepped), "it had this average already"
        assert chosen.latent()[2].tolist() == [2.0, 2.0], "it had not"


def test_sums_of_the_asked_users(context: Context):
    with host_of(context).message(SETTINGS, np.array([4, 7])) as chosen:
        total, count = chosen.weight_sum()
    assert count.tolist() == [2, 0, 1, 0]
    assert total.shape == (4, 2)


def test_sparse_features_give_equal_bits(context: Context):
    want = send(host_of(context), USERS.tolist(), GRADIENT, [1] * 4)
    host_of(context).drop()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls the layout beta
        sparse = X.to_sparse_csr()
    assert np.array_equal(send(host_of(context, x=sparse), USERS.tolist(), GRADIENT, [1] * 4), want)


def test_a_module_of_the_users_own(context: Context):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    host = host_of(context, user_model=model)
    assert host.weight_shape(SETTINGS) == (3 * 4 + 4 + 4 * 2 + 2, 1)
    np.testing.assert_allclose(send(host, USERS.tolist()), model(X).detach(), atol=1e-6)
    moved = send(host, USERS.tolist(), GRADIENT, [1] * 4)
    assert not np.allclose(moved, model(X).detach(), atol=1e-3)


def test_weight_shape_has_the_bias(context: Context):
    assert host_of(context).weight_shape(SETTINGS) == (4, 2)
    assert host_of(context).weight_shape(SETTINGS._replace(bias=False)) == (3, 2)


def test_users_of_others_are_refused_and_nothing_is_lost(context: Context):
    host = host_of(context)
    before = send(host, USERS.tolist(), GRADIENT, [1] * 4)
    for users in ([7, 3], [100], [-1]):
        with pytest.raises(ValueError, match="names users that this client does not host"):
            send(host, users)
    assert np.array_equal(send(host, USERS.tolist()), before)


def test_a_message_that_fails_halfway_loses_the_state_loudly(context: Context):
    host = host_of(context)
    send(host, USERS.tolist())
    with pytest.raises(KeyError), host.message(SETTINGS, USERS.numpy()):
        raise KeyError
    with pytest.raises(StateLostError):
        send(host, USERS.tolist())


@pytest.mark.parametrize("users", [torch.tensor([1]), torch.zeros(0, dtype=torch.int64)])
def test_rows_and_users_must_match(context: Context, users: torch.Tensor):
    with pytest.raises(ValueError, match=f"x has 4 rows for {users.numel()} users"):
        host_of(context, users=users)


def test_checkpoints_need_a_folder_and_the_same_users(context: Context, tmp_path: Path):
    host = host_of(context)
    with pytest.raises(CheckpointError, match="checkpoint_dir is not set"):
        send(host, USERS.tolist())
        host.save(SETTINGS, 1, RUN)
    with pytest.raises(CheckpointError, match="checkpoint_dir is not set"):
        host.restore(SETTINGS, Resume(RUN, 1))
    saved = host_of(context, checkpoint_dir=tmp_path)
    send(saved, USERS.tolist())
    saved.save(SETTINGS, 1, RUN)
    other = host_of(context, users=torch.tensor([7, 2, 9, 5]), checkpoint_dir=tmp_path)
    with pytest.raises(CheckpointError, match="other users; resume with as many SuperNodes"):
        other.restore(SETTINGS, Resume(RUN, 1))
    with pytest.raises(CheckpointError, match="of another run"):
        saved.restore(SETTINGS, Resume("f" * 32, 1))


def test_state_that_the_server_counts_on_must_be_there(context: Context):
    host = host_of(context)
    with (
        pytest.raises(StateLostError, match=r"client 1: its state of this run is gone.*state-dir"),
        host.message(SETTINGS, USERS.numpy(), follows=True),
    ):
        pytest.fail("began anew")
    send(host, USERS.tolist())
    with host.message(SETTINGS, USERS.numpy(), follows=True):
        pass
