"""What clients add up is what they read, whoever holds which slot and wherever they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from ego_helpers import HIDDEN, SETTINGS, toy_egos
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.secure.align.client import SlotTable, open_table
from flower_graph.secure.ring import Ring
from flower_graph.strategies.masked_embedding_averaging.cohort import (
    ChosenEgos,
    EgoCohort,
    initial_weights,
)
from flower_graph.strategies.masked_embedding_averaging.messages import (
    METRIC_NAMES,
    SUMMED_NAMES,
    Layout,
    Sums,
)
from flower_graph.strategies.masked_embedding_averaging.vector import (
    VectorEncoding,
    add_up,
    contrast_scale,
    mean_weights,
    measure,
    read_shared,
)

RUN, ROUND, MOST = b"r" * 16, 4, 6


def network(client: int, count: int) -> EgoNetwork:
    """A client of so many nodes without edges; its vectors are given, so nothing else matters."""
    mask = torch.zeros(count, dtype=torch.bool)
    x, y = torch.ones(count, SETTINGS.num_features), torch.zeros(count, dtype=torch.long)
    edges = torch.zeros(2, 0, dtype=torch.long)
    return EgoNetwork(client, 0, torch.arange(count), edges, x, y, ~mask, mask, mask)


def chosen_of(held: dict[int, list[int]]) -> ChosenEgos:
    egos = [network(client, len(slots)) for client, slots in held.items()]
    return EgoCohort(egos, SETTINGS).choose(list(held))


def table_of(held: dict[int, list[int]], num_slots: int, *, has_pads: bool) -> SlotTable:
    by_client = {client: np.array(slots, np.int64) for client, slots in held.items()}
    opened = open_table(num_slots, by_client)
    if not has_pads:
        return opened
    keys = np.repeat(opened.held[:, None].astype(np.uint8), 32, 1)
    return SlotTable(num_slots, by_client, opened.held, keys, b"g" * 32)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[dict[int, list[int]]]]:
    """Draw slots, the clients that hold them (-1: nobody else's node) and a assignment to hosts."""
    num_slots, m = draw(st.integers(1, 6)), draw(st.integers(2, MOST))
    hosts: list[dict[int, list[int]]] = [{} for _ in range(draw(st.integers(1, m)))]
    for client in range(m):
        own = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=num_slots))
        own += [-1] * draw(st.integers(0 if own else 1, 2))
        hosts[draw(st.integers(0, len(hosts) - 1))][client] = draw(st.permutations(own))
    return num_slots, [host for host in hosts if host]


@settings(max_examples=60, deadline=None)
@given(worlds(), st.sampled_from(["pads", "ring", "plain"]), st.integers(0, 2**32 - 1))
def test_reading_the_sum_gives_the_means(
    world: tuple[int, list[dict[int, list[int]]]], how: str, seed: int
) -> None:
    num_slots, hosts = world
    ring = None if how == "plain" else Ring.fit(MOST, 8.0, 2.0**-16, guard=True)
    layout, draw = Layout(num_slots, HIDDEN), torch.Generator().manual_seed(seed)
    parts = []
    for held in hosts:
        chosen = chosen_of(held)
        h = torch.rand(chosen.batch.ptr[-1], HIDDEN, generator=draw) * 16 - 8
        table = table_of(held, num_slots, has_pads=how == "pads")
        words, present, left_out = add_up(
            chosen,
            h,
            np.ones((len(held), len(SUMMED_NAMES))),
            VectorEncoding(layout, table, ring, RUN, ROUND),
        )
        assert (sorted(present), left_out) == (sorted(held), {})
        parts.append((chosen, table, h, words))
    total = np.sum([words for *_, words in parts], 0, dtype=parts[0][3].dtype)
    count = sum(map(len, hosts))
    sums = Sums(1, ROUND, count, total[layout.embeddings], total[layout.counts])
    metrics = total[layout.metrics] if ring is None else ring.decode(total[layout.metrics])
    assert metrics.tolist() == [count] * len(SUMMED_NAMES)
    rows: dict[int, list[torch.Tensor]] = {}
    for chosen, table, h, _ in parts:
        slots = np.concatenate([table.by_client[c] for c in chosen.batch.clients])
        for slot, row in zip(slots.tolist(), h, strict=True):
            rows.setdefault(slot, []).append(row)
    for chosen, table, _, _ in parts:
        shared = read_shared(sums, chosen, table, ring, RUN)
        slots = np.concatenate([table.by_client[c] for c in chosen.batch.clients]).tolist()
        wanted = [place for place, s in enumerate(slots) if s >= 0 and len(rows[s]) > 1]
        assert shared.place.tolist() == wanted
        for place, mean in zip(wanted, shared.mean, strict=True):
            expected = torch.stack(rows[slots[place]]).mean(0)
            torch.testing.assert_close(mean, expected, atol=2.0**-17 + 1e-5, rtol=0)


HELD = {0: [0, 1], 1: [1, -1], 2: [0]}


def written(h: torch.Tensor, metrics: np.ndarray | None = None, limit: float = 8.0) -> tuple:
    ring = Ring.fit(3, limit, 2.0**-10, guard=True)
    writing = VectorEncoding(Layout(2, HIDDEN), table_of(HELD, 2, has_pads=True), ring, RUN, ROUND)
    metrics = np.zeros((3, len(SUMMED_NAMES))) if metrics is None else metrics
    return add_up(chosen_of(HELD), h, metrics, writing)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 8.01, -9.0])
def test_a_client_that_does_not_fit_is_left_out_alone(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    h = torch.ones(5, HIDDEN)
    h[2, 3] = value
    words, present, left_out = written(h)
    assert present == [0, 2]
    assert left_out == {1: "an embedding is outside the range of -8 to 8"}
    assert "client 1: an embedding is outside the range" in caplog.text  # and how large, there
    # ... and nothing of it is in the sum.
    other = torch.ones(5, HIDDEN)
    other[2:4] = math.nan
    assert (written(other)[0] == words).all()


def test_a_value_at_the_limit_fits() -> None:
    assert written(torch.full((5, HIDDEN), 8.0))[1] == [0, 1, 2]
    assert written(torch.full((5, HIDDEN), -8.0))[2] == {}


@pytest.mark.parametrize("value", [math.nan, 9.0])
def test_a_measurement_that_does_not_fit(value: float) -> None:
    metrics = np.zeros((3, len(SUMMED_NAMES)))
    metrics[2, 6] = value
    _, present, left_out = written(torch.ones(5, HIDDEN), metrics)
    assert present == [0, 1]
    assert left_out == {2: "a measurement is outside the range of -8 to 8"}


def test_nobody_fits() -> None:
    words, present, left_out = written(torch.full((5, HIDDEN), 99.0))
    assert (present, sorted(left_out)) == ([], [0, 1, 2])
    assert not words.any()


def test_pads_hide_the_sum_and_change_with_the_round() -> None:
    h = torch.ones(5, HIDDEN)
    first, (second, *_) = written(h)[0], written(h)
    assert (first == second).all()
    ring = Ring.fit(3, 8.0, 2.0**-10, guard=True)
    table = table_of(HELD, 2, has_pads=True)
    metrics = np.zeros((3, len(SUMMED_NAMES)))
    later = VectorEncoding(Layout(2, HIDDEN), table, ring, RUN, ROUND + 1)
    in_clear = VectorEncoding(
        Layout(2, HIDDEN), table_of(HELD, 2, has_pads=False), ring, RUN, ROUND
    )
    hidden = Layout(2, HIDDEN).counts.stop
    for writing in (later, in_clear):
        words, _, _ = add_up(chosen_of(HELD), h, metrics, writing)
        assert not (words[:hidden] == first[:hidden]).any()


def test_weights_are_added_up_densely() -> None:
    egos = [ego for ego in toy_egos() if ego.client != 111]
    chosen = EgoCohort(egos, SETTINGS).choose([ego.client for ego in egos])
    start = initial_weights(SETTINGS)
    chosen.start_from(ModelWeights(start.first, start.rest))
    chosen.train()
    first, rest = mean_weights(chosen)
    size = first.size + rest.size
    layout, ring = Layout(0, HIDDEN, size), Ring.fit(len(egos), 8.0, 2.0**-24)
    writing = VectorEncoding(layout, open_table(0, {}), ring, RUN, ROUND)
    slots = {ego.client: np.full(ego.nodes.numel(), -1, np.int64) for ego in egos}
    writing = replace(writing, table=open_table(0, slots))
    metrics = np.zeros((len(egos), len(SUMMED_NAMES)))
    words, present, _ = add_up(chosen, chosen.embed(), metrics, writing)
    mean = ring.decode(words[layout.model]) / len(present)
    np.testing.assert_allclose(mean[: first.size].reshape(first.shape), first, atol=2.0**-24)
    np.testing.assert_allclose(mean[first.size :], rest, atol=2.0**-24)
    # Only clients that have a feature move its row; the others count with what they began with.
    moved = torch.zeros(len(start.first))
    for ego in egos:
        moved += (ego.x != 0).any(0)
    is_moved = (mean[: first.size].reshape(first.shape) != start.first.numpy()).any(1)
    assert is_moved.tolist() == (moved > 0).tolist()


def test_measurements_by_hand() -> None:
    egos = [ego for ego in toy_egos() if ego.client in (100, 107)]
    chosen = EgoCohort(egos, SETTINGS).choose([100, 107])
    judged = chosen.evaluate(chosen.embed())
    measured = measure(judged, torch.tensor([0.5, math.nan]), 0.125)
    measured = measure(judged, torch.tensor([0.5, math.nan]), 0.125)
    found = dict(zip(METRIC_NAMES, measured.T, strict=True))
    assert found["has-train"].tolist() == [1, 0]  # client 107 has no labelled nodes for training
    assert found["train"].tolist() == [judged.accuracy[0, 0].item(), 0]
    assert found["cross-entropy"].tolist() == [judged.loss[0].item(), 0]
    scaled = 0.5 / contrast_scale(0.125)
    assert found["contrast"].tolist() == pytest.approx([scaled, 0])
    assert found["has-contrast"].tolist() == [1, 0]
    assert measure(judged, None, 0.125)[:, -2:].tolist() == [[0, 0], [0, 0]]
