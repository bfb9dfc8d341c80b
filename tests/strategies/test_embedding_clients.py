"""PPFL-GNN's clients: what cannot be one, and what those of a SuperNode answer, keep and save."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from public_helpers import ToyModel, still, still_member, toy_members
from torch import Tensor

from flower_graph.strategies.ppfl.client import (
    EmbeddingClient,
    FloatArray,
    PublicNodeClient,
    PublicReply,
    PublicRequest,
    disagreement,
    public_rows,
)


def context(**config: Any) -> Context:
    return Context(1, 2, config, RecordDict(), {})


def ask(host: PublicNodeClient, number: int, targets: Any = None, **more: Any) -> PublicReply:
    clients = list(host.members)
    nodes = [member.public for member in host.members.values()]
    request = PublicRequest(number, clients, nodes, targets or [None] * len(clients), 3, **more)
    with host._state.opened() as held:
        return host.trained(held, request, request.targets)


def rows_of(reply: PublicReply, place: int = 0) -> FloatArray:
    found = reply.embeddings[place]
    assert found is not None
    return found


VECTORS = np.zeros((3, 2), np.float32)
GOOD: dict[str, Any] = {
    "number": 7,
    "nodes": np.array([4, 2, 9]),
    "rows": np.array([2, 0]),
    "dimension": 2,
    "build": partial(still, VECTORS),
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": np.zeros(0, np.int64)}, "client 7: 0 nodes"),
        ({"nodes": np.array([4, 4, 9])}, "client 7"),
        ({"rows": np.zeros(0, np.int64)}, "client 7"),
        ({"rows": np.array([1, 1])}, "client 7"),
        ({"rows": np.array([3])}, r"client 7: 3 nodes, rows \[3\]"),
        ({"rows": np.array([-1])}, "client 7.*-1"),
        ({"dimension": 0}, "client 7.*0"),
    ],
)
def test_what_cannot_be_a_client_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EmbeddingClient(**GOOD | changes)


def test_public_ids_and_rows_by_id() -> None:
    client = EmbeddingClient(**GOOD)
    assert client.public.tolist() == [9, 4]
    assert public_rows(client.nodes, np.array([9, 4])).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"\[3, 11\].*3"):
        public_rows(client.nodes, np.array([3, 9, 11]))
    for members in ([], [client, client]):
        with pytest.raises(ValueError, match="members"):
            PublicNodeClient(context(), members)


def test_a_model_that_embeds_in_another_shape_is_refused() -> None:
    member = still_member(5, [[1, 0, 0], [0, 1, 0]], [8, 9])
    wrong = EmbeddingClient(5, np.array([8, 9, 10]), np.array([0]), 3, member.build)
    with pytest.raises(ValueError, match=r"client 5.*\(2, 3\)"):
        ask(PublicNodeClient(context(), [wrong]), 1)


@pytest.mark.parametrize(
    "means", [np.zeros((2, 3)), np.zeros((3, 2)), np.full((3, 3), np.nan)], ids=str
)
def test_means_that_do_not_fit_change_nothing(means: Any) -> None:
    host = PublicNodeClient(context(), toy_members(2)[1:])
    before = rows_of(ask(host, 1))
    with pytest.raises(ValueError, match="client 1: means"):
        ask(host, 2, [means.astype(np.float32)])
    again = PublicNodeClient(context(), toy_members(2)[1:])
    assert np.array_equal(rows_of(ask(again, 1)), before)
    assert np.array_equal(rows_of(ask(again, 2)), rows_of(ask(host, 2)))


def test_a_state_that_changes_its_shape_is_refused() -> None:
    class Growing(ToyModel):
        def state_dict(self) -> dict[str, Tensor]:
            more = {"more": torch.zeros(1)} if int(self.rounds) else {}
            return super().state_dict() | more

    grows = partial(Growing, np.zeros((6, 3), np.float32))
    member = replace(toy_members(1)[0], build=grows, judge=None)
    with pytest.raises(ValueError, match=r"0.*\(1,\), torch\.float32"):
        ask(PublicNodeClient(context(), [member]), 1)


def test_disagreement_by_hand() -> None:
    embeddings = np.array([[2, 0], [0, 3], [0, 0]], np.float32)
    targets = np.array([[1, 0], [1, 0], [1, 0]], np.float32)
    # Alike: 0; at a right angle: 1; no direction at all: counts as a right angle.
    assert disagreement(embeddings, targets) == pytest.approx(2 / 3)
    assert disagreement(-targets, targets) == pytest.approx(2)
