"""Cohorts of ego-networks against plain PyG clients, one by one, and for any assignment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from ego_helpers import FEATURES, HIDDEN, SETTINGS, toy_egos, toy_shared
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.strategies.fedscem.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
    initial_weights,
)


def everyone(egos: Sequence[EgoNetwork], settings: EgoSettings = SETTINGS) -> ChosenEgos:
    return EgoCohort(egos, settings).choose([ego.client for ego in egos])


def full_round(chosen: ChosenEgos) -> None:
    """Take a step of each kind."""
    egos = {ego.client: ego for ego in toy_egos()}
    shared = toy_shared([egos[client] for client in chosen.batch.clients])
    chosen.train(1)
    chosen.fuse(shared, 1)
    chosen.fuse(shared, 1, classify=False)


def by_client(chosen: ChosenEgos) -> dict[int, Tensor]:
    """Return each client's embeddings, active rows and other weights, one behind the other."""
    batch, (first, rest) = chosen.batch, chosen.weights()
    sizes = torch.tensor(batch.ptr).diff().tolist(), torch.tensor(batch.row_ptr).diff().tolist()
    parts = zip(chosen.embed().split(sizes[0]), first.split(sizes[1]), rest, strict=True)
    flat = [torch.cat([part.reshape(-1) for part in own]) for own in parts]
    return dict(zip(batch.clients, flat, strict=True))


def test_all_clients_start_alike_as_pyg_and_pytorch_do():
    _, rest = everyone(toy_egos()).weights()
    start = initial_weights(SETTINGS)
    assert torch.equal(rest, start.rest.expand(12, -1))
    assert start.first.abs().max() <= (6 / (FEATURES + HIDDEN)) ** 0.5
    assert torch.equal(initial_weights(SETTINGS).rest, start.rest)
    assert not torch.equal(initial_weights(SETTINGS._replace(seed=4)).first, start.first)


def test_a_choice_is_these_clients_alone_and_leaves_the_others():
    egos = toy_egos()
    cohort, some = EgoCohort(egos, SETTINGS), [108, 101, 105]
    everybody = [ego.client for ego in egos]
    alone = everyone([egos[1], egos[5], egos[8]])
    full_round(cohort.choose(everybody))
    before = by_client(cohort.choose(everybody))
    for _ in range(3):
        full_round(cohort.choose(some))
    after = by_client(cohort.choose(everybody))
    # From here on the clients have taken different numbers of steps.
    full_round(cohort.choose(everybody))
    mixed = by_client(cohort.choose(everybody))
    for rounds, found in ((4, after), (1, mixed)):
        for _ in range(rounds):
            full_round(alone)
        own = {client: found[client] for client in sorted(some)}
        torch.testing.assert_close(own, by_client(alone), rtol=0, atol=1e-6)
    for client in set(before) - set(some):
        assert torch.equal(before[client], after[client])


def test_embeddings_are_kept_until_the_weights_change_whoever_changes_them():
    egos = toy_egos()
    cohort = EgoCohort(egos, SETTINGS)
    chosen, state = cohort.choose([ego.client for ego in egos]), cohort.tensors()
    seen = [chosen.embed()]
    assert chosen.embed().data_ptr() == seen[0].data_ptr()
    chosen.train(1)
    seen.append(chosen.embed())
    state["weight.rest"].mul_(2)
    seen.append(chosen.embed())
    # As another process does to a mapped state: PyTorch here hears nothing of it
    state["weight.rest"].numpy()[:] *= 2
    state["step"].numpy()[:] += 1
    seen.append(chosen.embed())
    assert all(not torch.equal(one, two) for one, two in pairwise(seen))
    anew = EgoCohort(egos, SETTINGS, {name: value.clone() for name, value in state.items()})
    assert torch.equal(seen[-1], anew.choose([ego.client for ego in egos]).embed())


def test_nobody_has_shared_nodes():
    nothing = Shared(torch.empty(0, dtype=torch.long), torch.empty(0, HIDDEN))
    fused, trained = everyone(toy_egos()), everyone(toy_egos())
    assert fused.fuse(nothing, 1).isnan().all()
    trained.train(1)
    torch.testing.assert_close(by_client(fused), by_client(trained), rtol=0, atol=0)
    fused.fuse(nothing, 1, classify=False)
    assert all(weights.isfinite().all() for weights in by_client(fused).values())
