"""One SuperNode's clients by themselves: what they refuse, and what they do only once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ego_helpers import SETTINGS, toy_egos
from flwr.app import Context, RecordDict

from flower_graph.client.state import StateStore
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.messages.fields import Resume
from flower_graph.strategies.masked_embedding_averaging.cohort import initial_weights
from flower_graph.strategies.masked_embedding_averaging.cohort_client import EgoCohortClient
from flower_graph.strategies.masked_embedding_averaging.messages import (
    EgoEnrolment,
    EgoReply,
    EgoRequest,
    write_save,
)

RUN = b"0123456789abcdef"
RUN_TOKEN = "ab" * 16
HELLO = EgoEnrolment(SETTINGS, RUN, "plain")
EGOS = toy_egos()[:3]
NUMBERS = np.array([100, 101, 102])


@pytest.fixture
def context() -> Context:
    import secrets

    return Context(secrets.randbits(60), 2, {"state-dir": ":memory:"}, RecordDict(), {})


def host_of(
    context: Context, egos: list[EgoNetwork] | None = None, folder: Path | None = None
) -> EgoCohortClient:
    return EgoCohortClient(context, egos or EGOS, device=torch.device("cpu"), checkpoint_dir=folder)


def ask(context: Context, number: int, **more: Any) -> EgoReply:
    return host_of(context).round(EgoRequest(number, NUMBERS, SETTINGS, "full", **more))


def weights(context: Context) -> torch.Tensor:
    _, tensors = StateStore(context, "ego-client").load(lambda _: None)
    return tensors["weight.rest"].clone()


def test_a_message_that_comes_twice_is_worked_on_once(context: Context) -> None:
    host_of(context).hello(HELLO)
    one = ask(context, 1)
    after = weights(context)
    other = ask(context, 1)
    assert torch.equal(weights(context), after)
    # What it sends is the same but for the measurements, which are now those after the step.
    assert one.total.shape == other.total.shape
    ask(context, 2)
    fused = weights(context)
    assert not torch.equal(fused, after)
    ask(context, 2)
    assert torch.equal(weights(context), fused)


def test_a_shared_model_is_taken_over_once_a_round(context: Context) -> None:
    host_of(context).hello(HELLO)
    start = initial_weights(SETTINGS)
    model = start.first.numpy() + 1, start.rest.numpy() + 1
    ask(context, 1, model=model)
    ask(context, 2, model=model)
    after = weights(context)
    ask(context, 2, model=model)
    assert torch.equal(weights(context), after)
    ask(context, 3, model=model)
    torch.testing.assert_close(
        weights(context), torch.from_numpy(model[1]).expand(3, -1), atol=0.1, rtol=0
    )


def test_the_last_request_trains_nothing(context: Context) -> None:
    host_of(context).hello(HELLO)
    ask(context, 1)
    after = weights(context)
    reply = ask(context, 2, is_last=True, sums=None)
    # The means of the first round are still fused; here there are none, so L_nc is what remains.
    assert not torch.equal(weights(context), after)
    assert reply.total.shape == (10,)
    after = weights(context)
    ask(context, 2, is_last=True)
    assert torch.equal(weights(context), after)


def test_what_a_host_refuses(context: Context) -> None:
    with pytest.raises(ValueError, match="egos: none is given"):
        EgoCohortClient(context, [], device=torch.device("cpu"), checkpoint_dir=None)
    with pytest.raises(ValueError, match=r"client numbers \[100, 100\] are not all different"):
        host_of(context, [EGOS[0], EGOS[0]])
    with pytest.raises(ValueError, match="client 100 has 7 features, the run has 8"):
        host_of(context).hello(replace(HELLO, settings=SETTINGS._replace(num_features=8)))
    with pytest.raises(ValueError, match=r"client 10. has class 2, the run's classes are 0 to 1"):
        host_of(context).hello(replace(HELLO, settings=SETTINGS._replace(num_classes=2)))
    twice = replace(EGOS[1], nodes=EGOS[1].nodes.clamp(max=int(EGOS[1].nodes[1])))
    with pytest.raises(ValueError, match="client 101 has identities twice: numbers 1 and 2"):
        host_of(context, [EGOS[0], twice]).hello(HELLO)


def test_a_round_without_a_hello_is_refused(context: Context) -> None:
    with pytest.raises(StateLostError, match="its keys of this run are not here"):
        ask(context, 1)


def test_a_stranger_among_the_clients_is_refused(context: Context) -> None:
    host_of(context).hello(HELLO)
    with pytest.raises(ValueError, match=r"clients \[7\] are not among"):
        host_of(context).round(EgoRequest(1, np.array([100, 7]), SETTINGS, "full"))


def test_checkpoints(context: Context, tmp_path: Path) -> None:
    host = host_of(context, folder=tmp_path)
    host.hello(HELLO)
    host.save(write_save(SETTINGS, 1, RUN_TOKEN))  # before it took part in anything
    ask(context, 1)
    trained = weights(context)
    host_of(context, folder=tmp_path).save(write_save(SETTINGS, 2, RUN_TOKEN))
    host_of(context, folder=tmp_path).hello(replace(HELLO, resume=Resume(RUN_TOKEN, 1)))
    start = initial_weights(SETTINGS).rest
    assert torch.equal(weights(context), start.expand(3, -1))
    host_of(context, folder=tmp_path).hello(replace(HELLO, resume=Resume(RUN_TOKEN, 2)))
    assert torch.equal(weights(context), trained)
    with pytest.raises(CheckpointError, match="round-000003"):
        host_of(context, folder=tmp_path).hello(replace(HELLO, resume=Resume(RUN_TOKEN, 3)))
    with pytest.raises(CheckpointError, match="with as many SuperNodes as before"):
        again = replace(HELLO, resume=Resume(RUN_TOKEN, 2, "again"))
        host_of(context, EGOS[:2], tmp_path).hello(again)
    for call in (
        lambda: host_of(context).save(write_save(SETTINGS, 2, RUN_TOKEN)),
        lambda: host_of(context).hello(replace(HELLO, resume=Resume(RUN_TOKEN, 2, "again"))),
    ):
        with pytest.raises(CheckpointError, match="checkpoint_dir is not set"):
            call()


def test_what_fails_halfway_leaves_the_models_as_they_were(context: Context) -> None:
    host_of(context).hello(HELLO)
    ask(context, 1)
    before, steps = weights(context), _steps(context)
    with pytest.raises(KeyError), host_of(context).opened(SETTINGS) as clients:
        clients.train()
        raise KeyError
    assert torch.equal(weights(context), before)
    assert torch.equal(_steps(context), steps)
    with host_of(context).opened(SETTINGS) as clients:
        clients.train()
    assert not torch.equal(weights(context), before)


def _steps(context: Context) -> torch.Tensor:
    _, tensors = StateStore(context, "ego-client").load(lambda _: None)
    return tensors["step"].clone()
