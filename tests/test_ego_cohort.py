"""Cohorts of ego-networks against plain PyG clients, one by one, and for any assignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from ego_helpers import (
    FEATURES,
    HIDDEN,
    ODD,
    SETTINGS,
    PlainClient,
    toy_egos,
    toy_shared,
)
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.metrics import evaluate
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.strategies.masked_embedding_averaging.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
    initial_weights,
)

NOTHING = Shared(torch.empty(0, dtype=torch.long), torch.empty(0, HIDDEN))


def everyone(egos: Sequence[EgoNetwork], settings: EgoSettings = SETTINGS) -> ChosenEgos:
    return EgoCohort(egos, settings).choose([ego.client for ego in egos])


def full_round(chosen: ChosenEgos) -> None:
    """Take a step of each kind."""
    egos = {ego.client: ego for ego in chosen.cohort.egos}
    shared = toy_shared([egos[client] for client in chosen.batch.clients])
    chosen.train()
    chosen.fuse(shared)
    chosen.fuse(shared, classify=False)


def by_client(chosen: ChosenEgos) -> dict[int, list[Tensor]]:
    """Return each client's embeddings, active rows and other weights."""
    batch, (first, rest) = chosen.batch, chosen.weights()
    sizes = torch.tensor(batch.ptr).diff().tolist(), torch.tensor(batch.row_ptr).diff().tolist()
    parts = zip(chosen.embed().split(sizes[0]), first.split(sizes[1]), rest, strict=True)
    return {c: list(part) for c, part in zip(batch.clients, parts, strict=True)}


def assert_same(one: dict[int, list[Tensor]], other: dict[int, list[Tensor]], to: float) -> None:
    assert one.keys() == other.keys()
    for client, parts in one.items():
        for a, b in zip(parts, other[client], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=to)


# --- against PyG

Step = tuple[Callable[[ChosenEgos, Shared], Tensor | None], Callable[[PlainClient, Shared], None]]


def train(chosen: ChosenEgos, _: Shared) -> None:
    """Take the local step; what it returns has a test of its own."""
    chosen.train()


TRAIN: Step = (train, lambda plain, _: plain.step())
FUSE: Step = (lambda chosen, s: chosen.fuse(s), lambda plain, s: plain.step(s))
CONTRAST: Step = (
    lambda chosen, s: chosen.fuse(s, classify=False),
    lambda plain, s: plain.step(s, classify=False),
)


def test_training_returns_the_logits_from_before():
    chosen = everyone(toy_egos())
    before = chosen.evaluate(chosen.embed())
    found = evaluate(chosen.batch, chosen.train())
    torch.testing.assert_close(found.accuracy, before.accuracy, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.loss, before.loss, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(chosen.evaluate(chosen.embed()).loss, before.loss)


@pytest.mark.parametrize(
    ("steps", "projection"),
    [
        ([TRAIN, FUSE] * 2, SETTINGS.projection),
        ([FUSE] * 3, 3 * HIDDEN),
        ([TRAIN, CONTRAST] * 2, SETTINGS.projection),
    ],
    ids=["full", "minus", "iter"],
)
def test_equals_plain_pyg_clients(steps: list[Step], projection: int):
    settings = SETTINGS._replace(projection=projection)
    egos, start = toy_egos(), initial_weights(settings)
    chosen, shared = everyone(egos, settings), toy_shared(egos)
    plain = [PlainClient(ego, start, settings) for ego in egos]
    own = [toy_shared([ego]) for ego in egos]
    for ours, theirs in steps:
        contrast = ours(chosen, shared)
        for place, (client, means) in enumerate(zip(plain, own, strict=True)):
            if contrast is not None:
                wanted_loss = client.losses(means)[1].item() if means.place.numel() else torch.nan
                assert contrast[place].item() == pytest.approx(wanted_loss, abs=1e-5, nan_ok=True)
            theirs(client, means)
    judged = chosen.evaluate(chosen.embed())
    for place, client in enumerate(plain):
        model = client.model()
        wanted = [client.embed().detach(), _active(chosen, place, model.first), model.rest]
        assert_same({0: by_client(chosen)[client.ego.client]}, {0: wanted}, 1e-5)
        if client.ego.train_mask.any():
            assert judged.loss[place].item() == pytest.approx(
                client.losses(None)[0].item(), abs=1e-5
            )


def _active(chosen: ChosenEgos, place: int, first: Tensor) -> Tensor:
    batch = chosen.batch
    return first[batch.feature[batch.row_ptr[place] : batch.row_ptr[place + 1]]]


def test_accuracy_is_of_each_client_and_role():
    egos = toy_egos()
    chosen = everyone(egos)
    for _ in range(30):
        chosen.train()
    h = chosen.embed()
    accuracy, loss = chosen.evaluate(h)
    for place, (ego, own) in enumerate(
        zip(egos, h.split([e.y.numel() for e in egos]), strict=True)
    ):
        _, rest = chosen.weights()
        weight, bias = chosen._split(rest)[3][place], chosen._split(rest)[4][place]
        right = (own @ weight + bias).argmax(1) == ego.y
        for role, mask in enumerate((ego.train_mask, ego.val_mask, ego.test_mask)):
            if mask.any():
                assert accuracy[place, role].item() == pytest.approx(right[mask].float().mean())
            else:
                assert accuracy[place, role].isnan()
    assert loss.isnan().nonzero().flatten().tolist() == [ODD["no training"]]


def test_all_clients_start_alike_as_pyg_and_pytorch_do():
    _, rest = everyone(toy_egos()).weights()
    start = initial_weights(SETTINGS)
    assert torch.equal(rest, start.rest.expand(12, -1))
    assert start.first.abs().max() <= (6 / (FEATURES + HIDDEN)) ** 0.5
    assert torch.equal(initial_weights(SETTINGS).rest, start.rest)
    assert not torch.equal(initial_weights(SETTINGS._replace(seed=4)).first, start.first)


# --- any assignment, any choice


def test_a_choice_is_these_clients_alone_and_leaves_the_others():
    egos = toy_egos()
    cohort = EgoCohort(egos, SETTINGS)
    full_round(cohort.choose([ego.client for ego in egos]))
    before = by_client(cohort.choose([ego.client for ego in egos]))
    some = [108, 101, 105]
    for _ in range(3):
        full_round(cohort.choose(some))
    after = by_client(cohort.choose([ego.client for ego in egos]))
    alone = everyone([egos[1], egos[5], egos[8]])
    for _ in range(4):
        full_round(alone)
    assert_same({c: after[c] for c in (101, 105, 108)}, by_client(alone), 1e-6)
    for client in set(before) - set(some):
        for a, b in zip(before[client], after[client], strict=True):
            assert torch.equal(a, b)
    # Now the clients have taken different numbers of steps.
    full_round(cohort.choose([ego.client for ego in egos]))
    full_round(alone)
    mixed = by_client(cohort.choose([ego.client for ego in egos]))
    assert_same({c: mixed[c] for c in (101, 105, 108)}, by_client(alone), 1e-6)


def test_a_stranger_is_refused():
    with pytest.raises(ValueError, match=r"clients \[7, 112\] are not among \[100, "):
        EgoCohort(toy_egos(), SETTINGS).choose([100, 112, 7])


def test_state_goes_on_where_it_was_left():
    egos = toy_egos()
    first = EgoCohort(egos, SETTINGS)
    numbers = [ego.client for ego in egos]
    full_round(first.choose(numbers))
    state = {key: value.clone() for key, value in first.tensors().items()}
    full_round(first.choose(numbers))
    second = EgoCohort(egos, SETTINGS, state)
    full_round(second.choose(numbers))
    assert_same(by_client(first.choose(numbers)), by_client(second.choose(numbers)), 0)
    assert second.tensors()["step"] is state["step"]


# --- model sharing


def _mean(chosen: ChosenEgos) -> ModelWeights:
    """Average the clients' full models, as FedAvg does."""
    first, rest = chosen.weights()
    inactive, total = chosen.inactive_rows(), torch.zeros(FEATURES, HIDDEN)
    for place in range(chosen.batch.size):
        rows = slice(chosen.batch.row_ptr[place], chosen.batch.row_ptr[place + 1])
        own = inactive.clone()
        own[chosen.batch.feature[rows]] = first[rows]
        total += own
    return ModelWeights(total / chosen.batch.size, rest.mean(0))


@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("places", [list(range(12)), [0, 3, 7, 9, 11]], ids=["all", "some"])
def test_the_mean_is_that_of_dense_models(proximal: float, places: list[int]):
    settings = SETTINGS._replace(proximal=proximal, local_epochs=2)
    egos, model = toy_egos(), initial_weights(settings)
    cohort = EgoCohort(egos, settings)
    chosen = cohort.choose([100 + place for place in places])
    shared = toy_shared([egos[place] for place in places])
    plain = [PlainClient(egos[place], model, settings) for place in places]
    wanted = model
    for _ in range(4):
        chosen.start_from(model)
        chosen.train()
        chosen.fuse(shared)
        model = _mean(chosen)
        for client in plain:
            client.load(wanted)
            own = toy_shared([client.ego])
            for means in (None, None, own, own):
                client.step(means)
        models = [client.model() for client in plain]
        wanted = ModelWeights(
            torch.stack([m.first for m in models]).mean(0),
            torch.stack([m.rest for m in models]).mean(0),
        )
        torch.testing.assert_close(model.first, wanted.first, rtol=0, atol=1e-5)
        torch.testing.assert_close(model.rest, wanted.rest, rtol=0, atol=1e-5)
    assert (model.first - initial_weights(settings).first).abs().max() > 0.01


# --- clients with nothing to learn from


@pytest.mark.parametrize("what", ODD)
def test_an_odd_client_alone_keeps_sound_weights(what: str):
    ego = toy_egos()[ODD[what]]
    chosen = everyone([ego])
    for _ in range(3):
        full_round(chosen)
    for parts in by_client(chosen).values():
        assert all(part.isfinite().all() for part in parts)


def test_nobody_has_shared_nodes():
    egos = toy_egos()
    fused, trained = everyone(egos), everyone(egos)
    assert fused.fuse(NOTHING).isnan().all()
    trained.train()
    assert_same(by_client(fused), by_client(trained), 0)
    fused.fuse(NOTHING, classify=False)
    assert all(p.isfinite().all() for parts in by_client(fused).values() for p in parts)


def test_a_client_of_unlabelled_nodes_only():
    egos = toy_egos()
    nobody = torch.zeros_like(egos[2].train_mask)
    egos[2] = replace(
        egos[2],
        y=torch.full_like(egos[2].y, -1),
        train_mask=nobody,
        val_mask=nobody,
        test_mask=nobody,
    )
    chosen = everyone(egos)
    for _ in range(3):
        full_round(chosen)
    accuracy, loss = chosen.evaluate(chosen.embed())
    assert accuracy[2].isnan().all() and loss[2].isnan()
    assert all(p.isfinite().all() for parts in by_client(chosen).values() for p in parts)
    # The others do not notice.
    others = everyone([ego for ego in egos if ego.client != 102])
    for _ in range(3):
        full_round(others)
    ours = {c: parts for c, parts in by_client(chosen).items() if c != 102}
    assert_same(ours, by_client(others), 1e-6)


def test_learning_learns():
    egos = toy_egos()
    chosen, shared = everyone(egos), toy_shared(egos)
    loss, contrast = chosen.evaluate(chosen.embed()).loss.nanmean(), chosen.fuse(shared).nanmean()
    for _ in range(60):
        chosen.fuse(shared)
    assert chosen.evaluate(chosen.embed()).loss.nanmean() < 0.9 * loss
    assert chosen.fuse(shared).nanmean() < contrast
