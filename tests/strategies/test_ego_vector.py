"""What clients add up is what they read, whoever holds which slot and wherever they are."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from ego_helpers import HIDDEN, SETTINGS, start_of
from flwr.app import RecordDict
from graph_helpers import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.data.graph import ClientGraph
from flower_graph.errors import RefusedError
from flower_graph.privacy.noise import ClientNoise
from flower_graph.secure.align.client import SlotTable, open_table
from flower_graph.secure.ring import Ring
from flower_graph.strategies.fedscem.client import (
    METRIC_NAMES,
    SUMMED_NAMES,
    Layout,
    Sums,
    VectorEncoding,
    add_noise,
    contrast_scale,
    measure,
)
from flower_graph.strategies.fedscem.modules import EgoCohort, EgoGroup

RUN, ROUND, MOST, CPU = b"r" * 16, 4, 6, torch.device("cpu")


def network(client: int, count: int) -> ClientGraph:
    """A client of so many nodes without edges; its vectors are given, so nothing else matters."""
    return toy(client, [[1.0] * SETTINGS.num_features] * count, [0] * count)


def cohort_of(held: dict[int, list[int]]) -> tuple[EgoCohort, EgoGroup]:
    cohort = EgoCohort([network(client, len(slots)) for client, slots in held.items()], SETTINGS)
    return cohort, EgoGroup(cohort.group(cohort.clients), SETTINGS)


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
        h = torch.rand(sum(map(len, held.values())), HIDDEN, generator=draw) * 16 - 8
        table = table_of(held, num_slots, has_pads=how == "pads")
        writing = VectorEncoding(layout, table, ring, RUN, ROUND)
        metrics = np.ones((len(held), len(SUMMED_NAMES)))
        words, present, left_out = writing.add_up(*cohort_of(held), h, metrics)
        assert (sorted(present), left_out) == (sorted(held), {})
        parts.append((list(held), writing, h, words))
    total = np.sum([words for *_, words in parts], 0, dtype=parts[0][3].dtype)
    count = sum(map(len, hosts))
    sums = Sums(1, [ROUND, count], total[layout.embeddings], total[layout.counts])
    metrics = total[layout.metrics] if ring is None else ring.decode(total[layout.metrics])
    assert metrics.tolist() == [count] * len(SUMMED_NAMES)
    rows: dict[int, list[torch.Tensor]] = {}
    for clients, writing, h, _ in parts:
        slots = writing._slots(clients)
        for slot, row in zip(slots.tolist(), h, strict=True):
            rows.setdefault(slot, []).append(row)
    for clients, writing, _, _ in parts:
        shared, slots = writing.means(sums, clients, CPU), writing._slots(clients).tolist()
        wanted = [place for place, s in enumerate(slots) if s >= 0 and len(rows[s]) > 1]
        assert shared.place.tolist() == wanted
        for place, mean in zip(wanted, shared.mean, strict=True):
            expected = torch.stack(rows[slots[place]]).mean(0)
            torch.testing.assert_close(mean, expected, atol=2.0**-17 + 1e-5, rtol=0)


HELD = {0: [0, 1], 1: [1, -1], 2: [0]}


def written(h: torch.Tensor, metrics: np.ndarray | None = None, *, has_pads: bool = True) -> tuple:
    ring = Ring.fit(3, 8.0, 2.0**-10, guard=True)
    table = table_of(HELD, 2, has_pads=has_pads)
    writing = VectorEncoding(Layout(2, HIDDEN), table, ring, RUN, ROUND)
    metrics = np.zeros((3, len(SUMMED_NAMES))) if metrics is None else metrics
    return writing.add_up(*cohort_of(HELD), h, metrics)


def test_a_long_embedding_is_shortened_in_its_direction() -> None:
    h = torch.rand(5, HIDDEN, generator=torch.Generator().manual_seed(0)) * 8
    long, short = h.clone(), h.clone()
    long[1:3] *= torch.tensor([[1e30], [33.3]])
    short[1:3] *= 8 / h[1:3].amax(1, keepdim=True)
    words, present, left_out = written(long, has_pads=False)
    assert (present, left_out) == ([0, 1, 2], {})
    found, expected = (part.astype(np.int64) for part in (words, written(short, has_pads=False)[0]))
    assert (abs(found - expected) <= 1 << 2).all()  # a step of the ring, above its guard bits
    assert (written(h, has_pads=False)[0] != words).any()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_client_that_does_not_fit_is_left_out_alone(
    value: float, caplog: pytest.LogCaptureFixture
) -> None:
    h, metrics = torch.full((5, HIDDEN), 8.0), np.full((3, len(SUMMED_NAMES)), -8.0)
    assert written(h, metrics)[1:] == ([0, 1, 2], {})  # at the limit
    h[2, 3] = value
    words, present, left_out = written(h, metrics)
    assert present == [0, 2]
    assert left_out == {1: "an embedding is outside the range of -8 to 8"}
    assert "client 1: " in caplog.text  # and how large, there
    # ... and nothing of it is in the sum.
    h[2:4] = math.nan
    assert (written(h, metrics)[0] == words).all()
    metrics[2, 6] = 8.01
    _, present, left_out = written(h, metrics)
    assert present == [0]
    assert left_out[2] == "a measurement is outside the range of -8 to 8"


def test_a_client_whose_weights_diverged_is_left_out() -> None:
    cohort, group = cohort_of(HELD)
    dict(group.module.named_parameters())["classifier.bias"].data[1, 0] = math.nan
    layout, ring = Layout(0, HIDDEN, start_of().numel()), Ring.fit(3, 8.0, 2.0**-24)
    writing = VectorEncoding(layout, table_of(HELD, 0, has_pads=False), ring, RUN, ROUND)
    metrics = np.zeros((3, len(SUMMED_NAMES)))
    words, present, left_out = writing.add_up(cohort, group, group.embed(), metrics)
    assert present == [0, 2] and "a weight" in left_out[1]
    mean = ring.decode(words[layout.model]) / 2
    np.testing.assert_allclose(mean, start_of().numpy(), atol=2.0**-24)


def test_measurements_by_hand() -> None:
    accuracy, loss = torch.tensor([[0.5, 1.0, nan], [nan, 0.0, 1.0]]), torch.tensor([2.0, nan])
    measured = measure(accuracy, loss, torch.tensor([0.5, nan]), 0.125)
    found = dict(zip(METRIC_NAMES, measured.T, strict=True))
    assert found["has-train"].tolist() == [1, 0] and found["train"].tolist() == [0.5, 0]
    assert found["cross-entropy"].tolist() == [2, 0]  # none without nodes for training
    scaled = 0.5 / contrast_scale(0.125)
    assert found["contrast"].tolist() == pytest.approx([scaled, 0])
    assert found["has-contrast"].tolist() == [1, 0]
    assert measure(accuracy, loss, None, 0.125)[:, -2:].tolist() == [[0, 0], [0, 0]]


# Under a budget: clip and noise by client, before pads and masks ----------------------------------

nan = math.nan
SLOTS = {4: [0, -1, 2], 7: [1, 2], 9: [-1]}
H = torch.arange(12.0).reshape(6, 2) + 1
MEASURED = np.arange(27.0).reshape(3, 9)
NOISY = open_table(3, {client: np.array(slots) for client, slots in SLOTS.items()})
CLIENTS = list(SLOTS)


def slots_of(slots: int) -> VectorEncoding:
    return VectorEncoding(Layout(slots, 2), NOISY, None, b"", 1)


def shared(noise: ClientNoise, h: torch.Tensor = H) -> tuple[np.ndarray, np.ndarray]:
    found, measured = add_noise(noise, RecordDict(), h, MEASURED, slots_of(3), CLIENTS)
    return found.numpy(), measured


def test_a_clients_shared_rows_are_one_vector_and_nothing_else_is_sent() -> None:
    found, _ = shared(ClientNoise(1.0, 1e-9, 1))
    own = H.numpy()[[0, 2]]
    assert np.allclose(found[[0, 2]], own / np.linalg.norm(own), atol=1e-6)
    assert np.allclose(np.linalg.norm(found[[3, 4]]), 1.0, atol=1e-6)
    assert not found[[1, 5]].any()
    wide, measured = shared(ClientNoise(1.0, 3.0, 1), torch.ones(6, 5000))
    assert abs(wide[[0, 2, 3, 4]].std() / 3.0 - 1) < 0.05
    assert not wide[[1, 5]].any()
    assert not measured.any()
    assert np.array_equal(shared(ClientNoise(1.0, 1.0, 1, withholds=False))[1], MEASURED)
    assert np.allclose(shared(ClientNoise(1e6, 1e-9, 1))[0][[0, 2]], own, atol=1e-3)


def test_a_client_that_diverged_is_left_to_be_left_out_alone() -> None:
    h = H.clone()
    h[2, 1] = torch.inf
    found, _ = shared(ClientNoise(1.0, 1e-9, 1), h)
    assert np.isnan(found[[0, 2]]).all()
    assert np.isfinite(found[[1, 3, 4, 5]]).all()


def test_the_budget_is_counted_and_the_last_measurement_is_not() -> None:
    noise, state = ClientNoise(1.0, 1.0, 2), RecordDict()
    for _ in range(2):
        add_noise(noise, state, H, MEASURED, slots_of(3), CLIENTS)
    found, _ = add_noise(noise, state, H, MEASURED, slots_of(0), CLIENTS)
    assert not found.any()
    with pytest.raises(RefusedError, match="noise"):
        weights = replace(slots_of(3), layout=Layout(3, 2, 9))
        add_noise(noise, state, H, MEASURED, weights, CLIENTS)
    with pytest.raises(RefusedError, match=r"budget.*2.*2"):
        add_noise(noise, state, H, MEASURED, slots_of(3), CLIENTS)
