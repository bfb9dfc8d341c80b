"""One SuperNode's PPFL-GNN clients: what they answer, keep and save."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from public_helpers import ToyModel, still_member, toy_members
from torch import Tensor

from flower_graph.client import state
from flower_graph.strategies.procrustes_alignment.cohort_client import (
    EmbeddingClient,
    EmbeddingCohortClient,
    FloatArray,
    IntArray,
    disagreement,
)
from flower_graph.strategies.procrustes_alignment.messages import PublicReply, PublicRequest


def context(**config: Any) -> Context:
    return Context(1, 2, config, RecordDict(), {})


def ask(host: EmbeddingCohortClient, number: int, targets: Any = None, **more: Any) -> PublicReply:
    clients = list(host.members)
    nodes = [member.public for member in host.members.values()]
    request = PublicRequest(number, clients, nodes, targets or [None] * len(clients), 3, **more)
    return host.round(request)


def rows_of(reply: PublicReply, place: int = 0) -> FloatArray:
    found = reply.embeddings[place]
    assert found is not None
    return found


def test_hosts_need_clients_with_different_numbers() -> None:
    with pytest.raises(ValueError, match="members: none is given"):
        EmbeddingCohortClient(context(), [])
    one = toy_members(1)[0]
    with pytest.raises(ValueError, match=r"client numbers \[0, 0\] are not all different"):
        EmbeddingCohortClient(context(), [one, one])


def test_targets_reach_the_model_at_the_public_rows() -> None:
    member = still_member(5, [[1, 0, 0], [0, 1, 0]], [8, 9])
    seen: list[tuple[list[int], Any]] = []

    class Watching:
        def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
            seen.append((rows.tolist(), None if targets is None else targets.tolist()))
            return 1.0

        def embed(self) -> FloatArray:
            return np.eye(2, 3, dtype=np.float32)

    member = EmbeddingClient(5, member.nodes, np.array([1]), 3, Watching)
    host = EmbeddingCohortClient(context(), [member])
    ask(host, 1)
    reply = ask(host, 2, [np.array([[0, 2, 0]], np.float32)])
    assert seen == [([1], None), ([1], [[0, 2, 0]])]
    assert rows_of(reply).tolist() == [[0, 1, 0]]
    assert reply.disagreement == [0.0]


@pytest.mark.parametrize("how", ["live", "context", "file"])
def test_models_go_on_in_another_process(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, members = toy_members(2), toy_members(2)
    if how == "file":
        monkeypatch.setattr(state, "SMALL_BYTES", 0)
    where = context(**{"state-dir": str(tmp_path)})
    for number in (1, 2, 3):
        if how != "live":
            state._LIVE.clear()
        reply = ask(EmbeddingCohortClient(where, members), number)
    for place, member in enumerate(plain):
        model = member.build()
        for number in (1, 2, 3):
            model.learn(member.rows, None, number)
        assert np.array_equal(rows_of(reply, place), model.embed()[member.rows])


def test_a_model_that_fails_is_where_it_was() -> None:
    class Failing(ToyModel):
        def learn(self, rows: IntArray, targets: FloatArray | None, server_round: int) -> float:
            loss = super().learn(rows, targets, server_round)
            if server_round == 2:
                raise RuntimeError("no")
            return loss

    start = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    first = toy_members(1)[0]
    member = EmbeddingClient(0, first.nodes, first.rows, 3, partial(Failing, start))
    host = EmbeddingCohortClient(context(**{"state-dir": ":memory:"}), [member])
    ask(host, 1)
    with pytest.raises(RuntimeError, match="no"):
        ask(host, 2)
    found = rows_of(ask(host, 3))
    model = ToyModel(start)
    model.learn(member.rows, None, 1)
    model.learn(member.rows, None, 3)
    assert np.array_equal(found, model.embed()[member.rows])


def test_a_client_whose_embeddings_are_not_finite_is_left_out_and_not_judged() -> None:
    good, bad = toy_members(2)
    nothing = np.full((6, 3), np.nan, np.float32)
    bad = EmbeddingClient(1, bad.nodes, bad.rows, 3, partial(ToyModel, nothing), bad.judge)
    reply = ask(EmbeddingCohortClient(context(), [good, bad]), 1)
    assert reply.embeddings[0] is not None
    assert reply.embeddings[1] is None
    assert reply.left_out == ["client 1: its embeddings are not finite"]
    assert reply.judged["val"][0] == 1 / 8
    assert math.isnan(reply.judged["val"][1])


def test_a_model_that_embeds_in_another_shape_is_refused() -> None:
    member = still_member(5, [[1, 0, 0], [0, 1, 0]], [8, 9])
    wrong = EmbeddingClient(5, np.array([8, 9, 10]), np.array([0]), 3, member.build)
    with pytest.raises(ValueError, match=r"client 5: its model embeds as \(2, 3\), expected"):
        ask(EmbeddingCohortClient(context(), [wrong]), 1)


def test_a_state_that_changes_its_shape_is_refused() -> None:
    class Growing(ToyModel):
        def state_dict(self) -> dict[str, Tensor]:
            more = {"more": torch.zeros(1)} if int(self.rounds) else {}
            return super().state_dict() | more

    start = np.zeros((6, 3), np.float32)
    first = toy_members(1)[0]
    member = EmbeddingClient(0, first.nodes, first.rows, 3, partial(Growing, start))
    with pytest.raises(ValueError, match=r"state 0\.more: was None, is \(\(1,\), torch\.float32\)"):
        ask(EmbeddingCohortClient(context(), [member]), 1)


def test_embeddings_are_saved_after_the_last_round(tmp_path: Path) -> None:
    members = toy_members(2)
    host = EmbeddingCohortClient(context(), members, tmp_path / "embeddings")
    ask(host, 1)
    assert not (tmp_path / "embeddings").exists()
    reply = ask(host, 2, is_last=True)
    for place, member in enumerate(members):
        with np.load(tmp_path / "embeddings" / f"client-{member.number}.npz") as saved:
            assert np.array_equal(saved["nodes"], member.nodes)
            assert saved["public"].nonzero()[0].tolist() == sorted(member.rows.tolist())
            assert np.array_equal(saved["embeddings"][member.rows], rows_of(reply, place))


def test_disagreement_by_hand() -> None:
    embeddings = np.array([[2, 0], [0, 3], [0, 0]], np.float32)
    targets = np.array([[1, 0], [1, 0], [1, 0]], np.float32)
    # Alike: 0; at a right angle: 1; no direction at all: counts as a right angle.
    assert disagreement(embeddings, targets) == pytest.approx(2 / 3)
    assert disagreement(-targets, targets) == pytest.approx(2)
