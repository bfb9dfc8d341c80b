"""One SuperNode's clients by themselves: what they refuse, do only once, and keep secret."""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ego_helpers import SETTINGS, start_of, toy_egos
from flwr.app import Context, RecordDict

from flower_graph.data.graph import ClientGraph
from flower_graph.errors import StateLostError
from flower_graph.strategies.fedscem.client import (
    EgoEnrolment,
    EgoNetworkClient,
    EgoReply,
    EgoRequest,
)
from flower_graph.strategies.fedscem.modules import first_model

RUN, OTHER_RUN = b"0123456789abcdef", b"fedcba9876543210"
HELLO = EgoEnrolment(RUN, "plain")
EGOS = toy_egos()[:3]
NUMBERS = np.array([100, 101, 102])


def context_of(state_dir: str = "", node_id: int = 2) -> Context:
    return Context(secrets.randbits(60), node_id, {"state-dir": state_dir}, RecordDict(), {})


@pytest.fixture
def context() -> Context:
    return context_of(":memory:")


def begun(
    context: Context, egos: Sequence[ClientGraph] = EGOS, folder: Path | None = None, **changes: Any
) -> EgoNetworkClient:
    """Make clients and let them enrol."""
    client = EgoNetworkClient(context, egos, SETTINGS, checkpoint_dir=folder)
    client.get_properties(replace(HELLO, **changes).to_config())
    return client


def ask(context: Context, number: int, clients: np.ndarray = NUMBERS, **more: Any) -> EgoReply:
    request = EgoRequest(number, clients, "full", **more)
    return EgoNetworkClient(context, EGOS, SETTINGS).round(request)


def kept(context: Context, name: str = "gnn.second.weight") -> torch.Tensor:
    _, tensors = vars(context)["live"].held
    return tensors[name].clone()


def test_a_message_that_comes_twice_is_worked_on_once(context: Context) -> None:
    begun(context)
    before = torch.zeros(0)
    for number in (1, 2):
        one = ask(context, number)
        after = kept(context)
        assert not torch.equal(before, after)
        before = after
        other = ask(context, number)
        assert torch.equal(kept(context), after)
        # What it sends is the same but for the measurements, which are now those after the step.
        assert one.total.shape == other.total.shape


def test_a_shared_model_is_taken_over_once_a_round(context: Context) -> None:
    begun(context)
    model: dict[str, Any] = {"shares_model": True, "weights": start_of().numpy() + 1}
    ask(context, 1, **model)
    ask(context, 2, **model)
    after = kept(context)
    ask(context, 2, **model)
    assert torch.equal(kept(context), after)
    ask(context, 3, **model)
    expected = first_model(SETTINGS).gnn.second.weight.detach() + 1
    torch.testing.assert_close(kept(context), expected.expand(3, -1, -1), atol=0.1, rtol=0)


def test_the_last_request_trains_nothing(context: Context) -> None:
    begun(context)
    ask(context, 1)
    after = kept(context)
    # The means of the first round are still fused; here there are none, so L_nc is what remains.
    assert ask(context, 2, is_last=True).total.shape == (10,)
    fused = kept(context)
    assert not torch.equal(fused, after)
    ask(context, 2, is_last=True)
    assert torch.equal(kept(context), fused)


def test_what_a_host_refuses(context: Context) -> None:
    with pytest.raises(ValueError, match="graphs"):
        EgoNetworkClient(context, [], SETTINGS)
    with pytest.raises(ValueError, match=r"\[100, 100\]"):
        EgoNetworkClient(context, [EGOS[0], EGOS[0]], SETTINGS)
    with pytest.raises(ValueError, match=r"client 10.*2"):
        EgoNetworkClient(context, EGOS, replace(SETTINGS, num_classes=2))
    with pytest.raises(StateLostError):
        ask(context, 1)
    begun(context)
    with pytest.raises(ValueError, match=r"\[7\]"):
        ask(context, 1, np.array([100, 7]))


def aligner(context: Context) -> Any:
    client = EgoNetworkClient(context, EGOS, SETTINGS)
    return client._aligner(client.keys())


def test_a_process_reads_an_alignment_once(context: Context) -> None:
    begun(context, alignment="psi")
    first = aligner(context)
    assert aligner(context) is first
    del vars(context)["live"]
    assert aligner(context) is not first
    assert aligner(context).to_bytes() == first.to_bytes()
    with (
        pytest.raises(KeyError),
        EgoNetworkClient(context, EGOS, SETTINGS)._aligning(
            EgoNetworkClient(context, EGOS, SETTINGS).keys()
        ) as half,
    ):
        half._epoch = 7
        raise KeyError
    assert aligner(context).to_bytes() == first.to_bytes()


def test_a_new_run_has_new_keys_and_a_context_that_was_taken_back_the_older_ones() -> None:
    # A message that failed after its work: Flower goes on with the context of before.
    context = context_of()
    first = begun(context, alignment="psi").keys()
    aligned, before = aligner(context).to_bytes(), RecordDict(dict(context.state))
    other = begun(context, alignment="psi", run_id=OTHER_RUN).keys()
    assert (first.keys().channel_key != other.keys().channel_key).any()
    assert (first.run_id, other.run_id) == (RUN, OTHER_RUN)
    assert aligner(context).to_bytes() != aligned
    context.state = before
    assert begun(context, alignment="psi").keys().to_bytes() == first.to_bytes()
    assert aligner(context).to_bytes() == aligned


@pytest.mark.parametrize("form", ["psi", "plain"])
@pytest.mark.parametrize(
    "wrong", [[77077, "seventeen"], ["seventeen", "seventeen"], [2.5, 77077], [77077, 77077]]
)
def test_what_is_wrong_with_identities_is_said_without_them(wrong: list[Any], form: str) -> None:
    # The server reads what an error says.
    with pytest.raises(ValueError, match="client 8") as caught:
        begun(context_of(), [replace(EGOS[0], client=8, names=tuple(wrong))], alignment=form)
    assert not any(str(identity) in str(caught.value) for identity in wrong)
