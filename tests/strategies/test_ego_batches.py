"""Training by batches: against plain PyG clients, by hand, and for any assignment and resumed."""

from __future__ import annotations

from itertools import zip_longest
from math import e, log
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient, toy_egos, toy_shared
from sage_helpers import SETTINGS as SAGE
from sage_helpers import few_epochs as few_epochs
from sage_helpers import run_sage
from torch import Tensor

from flower_graph.engine.mini_batches import BatchOrder, MiniBatch, epochs_of
from flower_graph.strategies.fed_sage.strategy import FedSage, LocalSage
from flower_graph.strategies.fedscem.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
    initial_weights,
)

BATCHES = SETTINGS._replace(batch_size=3)
PLAIN = {"alignment": "plain", "aggregation": "plain"}


def everyone(settings: EgoSettings) -> ChosenEgos:
    egos = toy_egos()
    return EgoCohort(egos, settings).choose([ego.client for ego in egos])


def test_iter_by_batches_of_all_nodes_is_one_step_of_each_loss_in_turn() -> None:
    shared = toy_shared(toy_egos())
    whole, batched = everyone(SETTINGS), everyone(SETTINGS._replace(batch_size=15))
    whole.train(1)
    whole.fuse(shared, 1, classify=False)
    batched.fuse(shared, 1, classify=False)
    assert torch.equal(whole.embed(), batched.embed())


def batches(client: PlainClient, among: Tensor, number: int, purpose: str) -> list[MiniBatch]:
    """Give one client's batches of its one epoch a round."""
    order = BatchOrder(BATCHES.batch_size, BATCHES.seed, number, purpose)
    ptr, clients = [0, among.numel()], [client.ego.client]
    return next(epochs_of(among, ptr, clients, order, epochs=1))


def test_equals_plain_pyg_clients_batch_by_batch() -> None:
    """A client that has no more batches stands still: its weights, moments and count of steps."""
    chosen, shared = everyone(BATCHES), toy_shared(toy_egos())
    plain = [PlainClient(ego, initial_weights(BATCHES), BATCHES) for ego in toy_egos()]
    for number in (1, 2):
        chosen.train(number)
        chosen.fuse(shared, number)
        chosen.fuse(shared, number + 9, classify=False)
        for client in plain:
            means, every = toy_shared([client.ego]), torch.ones_like(client.ego.train_mask)
            for part in batches(client, client.ego.train_mask, number, "local"):
                client.step(None, part.nodes)
            for part in batches(client, every, number, "fusion"):
                client.step(means, part.nodes)
            local = batches(client, client.ego.train_mask, number + 9, "local")
            fusion = batches(client, every, number + 9, "fusion")
            for part, before in zip_longest(fusion, local):
                if before is not None:
                    client.step(None, before.nodes)
                client.step(means, part.nodes, classify=False)
    expected = torch.cat([client.embed().detach() for client in plain])
    torch.testing.assert_close(chosen.embed(), expected, rtol=0, atol=1e-5)


def test_what_is_not_in_the_batch_is_no_negative_of_it() -> None:
    # Nodes 0, 1, 2 of client 110 have the embeddings a, b, a; those of 0 and 1 are shared, both
    # with the mean a. Cosines are 1 within a and 0 between a and b.
    chosen = EgoCohort(toy_egos()[10:11], SETTINGS._replace(tau=1.0)).choose([110])
    a, b = torch.eye(2)
    h = torch.stack([a, b, a, *[b] * (chosen.batch.ptr[1] - 3)])
    shared = Shared(torch.tensor([0, 1]), torch.stack([a, a]))
    head = torch.eye(2)[None], torch.zeros(1, 2)
    rest = [*[torch.empty(0)] * 5, *head]

    def sum_of(*nodes: int) -> tuple[float, int]:
        part = torch.zeros(h.shape[0], dtype=torch.bool)
        part[list(nodes)] = True
        losses, count = chosen._contrast_losses(h, rest, shared, MiniBatch(part))
        return losses.item(), int(count)

    # 0 alone with 2: its mean and node 2, both a.
    assert sum_of(0, 2) == (pytest.approx(log(2 * e / e)), 1)
    # Both: 0 has b and two means a; 1 has a and the two means, none of them like it.
    assert sum_of(0, 1) == (pytest.approx(log((1 + 2 * e) / e) + log(3 / 1)), 2)
    assert sum_of(2, 3) == (0, 0)


# Runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LocalSage, FedSage])
def test_classifiers_of_sage_train_by_batches(kind: Any) -> None:
    def figures(size: int | None, supernodes: int = 2) -> Tensor:
        settings = SAGE._replace(batch_size=size)
        return run_sage(kind, settings=settings, supernodes=supernodes, rounds=2).figures

    whole, batched = figures(None), figures(2)
    assert torch.equal(whole, figures(16))
    assert not torch.allclose(whole[:, 0], batched[:, 0], atol=1e-3)
    torch.testing.assert_close(batched, figures(2, supernodes=6), rtol=0, atol=1e-5)
