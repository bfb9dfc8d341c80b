"""FedSCem's client and server: messages, vectors, sums, and a server that may lie."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ego_helpers import HIDDEN, SETTINGS, start_of, toy_egos
from ego_strategy_helpers import assert_same, faulty, run
from federation import Federation, round_of
from flwr.app import Context, RecordDict
from graph_helpers import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from sum_helpers import write_keys

from flower_graph.data.graph import ClientGraph
from flower_graph.errors import RefusedError, StateLostError
from flower_graph.privacy.noise import ClientNoise
from flower_graph.secure.align.client import SlotTable
from flower_graph.secure.parties.registry import Registry, TrustSettings, new_identity
from flower_graph.secure.ring import CHECKS, Ring
from flower_graph.server.sums import Opened, PartySums
from flower_graph.strategies.fedscem.algorithm import (
    METRIC_NAMES,
    EgoCohort,
    EgoGroup,
    contrast_scale,
    mean_metrics,
    measure,
)
from flower_graph.strategies.fedscem.client import (
    EgoEnrolment,
    EgoNetworkClient,
    EgoReply,
    EgoRequest,
    check_request,
)
from flower_graph.strategies.fedscem.modules import first_model
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging
from flower_graph.strategies.fedscem.vector import (
    SUMMED_NAMES,
    Layout,
    Sums,
    VectorEncoding,
    add_noise,
)

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


RUN_VECTOR, ROUND, MOST, CPU = b"r" * 16, 4, 6, torch.device("cpu")


def network(client: int, count: int) -> ClientGraph:
    """A client of so many nodes without edges; its vectors are given, so nothing else matters."""
    return toy(client, [[1.0] * SETTINGS.num_features] * count, [0] * count)


def cohort_of(held: dict[int, list[int]]) -> tuple[EgoCohort, EgoGroup]:
    cohort = EgoCohort([network(client, len(slots)) for client, slots in held.items()], SETTINGS)
    return cohort, EgoGroup(cohort.group(cohort.clients), SETTINGS)


def table_of(held: dict[int, list[int]], num_slots: int, *, has_pads: bool) -> SlotTable:
    by_client = {client: np.array(slots, np.int64) for client, slots in held.items()}
    slots = np.unique([slot for own in held.values() for slot in own if slot >= 0]).astype(np.int64)
    keys = np.repeat(slots[:, None].astype(np.uint8), 32, 1)[: None if has_pads else 0]
    return SlotTable(num_slots, by_client, slots, keys, b"g" * 32 if has_pads else b"")


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
        writing = VectorEncoding(layout, table, ring, RUN_VECTOR, ROUND)
        metrics = np.ones((len(held), len(SUMMED_NAMES)))
        words, present, left_out = writing.add_up(*cohort_of(held), h, metrics)
        assert (sorted(present), left_out) == (sorted(held), {})
        parts.append((list(held), writing, h, words))
    total = np.sum([words for *_, words in parts], 0, dtype=parts[0][3].dtype)
    count = sum(map(len, hosts))
    sums = Sums(1, [ROUND, count], total[layout.relayed])
    metrics = total[layout.metrics] if ring is None else ring.decode(total[layout.metrics])
    assert metrics.tolist() == [count] * len(SUMMED_NAMES)
    rows: dict[int, list[torch.Tensor]] = {}
    for clients, writing, h, _ in parts:
        slots = writing._slots(clients)
        for slot, row in zip(slots.tolist(), h, strict=True):
            rows.setdefault(slot, []).append(row)
    for clients, writing, _, _ in parts:
        shared = writing.means(writing.opened(sums), count, clients, CPU)
        slots = writing._slots(clients).tolist()
        wanted = [place for place, s in enumerate(slots) if s >= 0 and len(rows[s]) > 1]
        assert shared.place.tolist() == wanted
        for place, mean in zip(wanted, shared.mean, strict=True):
            expected = torch.stack(rows[slots[place]]).mean(0)
            torch.testing.assert_close(mean, expected, atol=2.0**-17 + 1e-5, rtol=0)


def test_a_sum_does_not_show_how_many_holders_a_slot_has() -> None:
    """Of four clients the lowest two bits of a sum are known: they are zeros in every slot."""
    ring, layout = Ring.fit(4, 8.0, 2.0**-16, guard=True), Layout(4, HIDDEN, is_checked=True)
    draw, total = torch.Generator().manual_seed(0), np.zeros(layout.length, ring.dtype)
    for client in range(4):  # one to four holders
        held = {client: [*range(client, 4)]}
        table = table_of(held, 4, has_pads=True)
        writing = VectorEncoding(layout, table, ring, RUN_VECTOR, ROUND)
        h, metrics = torch.rand(4 - client, HIDDEN, generator=draw), np.ones((1, len(SUMMED_NAMES)))
        total += writing.add_up(*cohort_of(held), h, metrics)[0]
    relayed = total[layout.relayed]
    assert relayed.size == 4 * (HIDDEN + 1) + CHECKS
    assert not (relayed & 3).any() and (relayed >> 2 & 1).mean() == pytest.approx(0.5, abs=0.25)


HELD = {0: [0, 1], 1: [1, -1], 2: [0]}


def written(h: torch.Tensor, metrics: np.ndarray | None = None, *, has_pads: bool = True) -> tuple:
    ring = Ring.fit(3, 8.0, 2.0**-10, guard=True)
    table = table_of(HELD, 2, has_pads=has_pads)
    writing = VectorEncoding(Layout(2, HIDDEN), table, ring, RUN_VECTOR, ROUND)
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
    writing = VectorEncoding(layout, table_of(HELD, 0, has_pads=False), ring, RUN_VECTOR, ROUND)
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
NOISY = table_of(SLOTS, 3, has_pads=False)
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


METRICS = np.array([1.5, 2, 0.25, 1, 0, 0, 6.0, 0.5, 2, 0])


def server_of(ring: Ring | None = None) -> MaskedEmbeddingAveraging:
    """A server in a round with two slots, for which three clients were asked."""
    server = MaskedEmbeddingAveraging(SETTINGS)
    server.layout, server.ring = Layout(2, HIDDEN), ring
    server.session.asked = {1: [4, 5], 2: [6]}
    return server


def total_of(server: MaskedEmbeddingAveraging) -> np.ndarray:
    layout, total = server.layout, np.zeros(server.layout.length)
    total[layout.embeddings] = np.arange(layout.slots * layout.hidden)
    total[layout.counts] = [1, 2]
    total[layout.metrics] = METRICS
    return total


def test_a_sum_says_means_over_those_that_have_something() -> None:
    server = server_of()
    found = Opened(2, total_of(server), [4, 5])
    means = mean_metrics(server._take(2, found), SETTINGS.tau)
    assert (means["train"], means["val"]) == (0.75, 0.25)
    assert math.isnan(means["test"])
    assert means["cross-entropy"] == 3.0
    assert means["contrast"] == 0.25 * contrast_scale(SETTINGS.tau)
    # What one client alone holds is not handed on.
    sums = server.sums
    assert sums is not None
    embeddings = [0.0] * HIDDEN + list(range(HIDDEN, 2 * HIDDEN))
    assert sums.words.tolist() == [*embeddings, 0, 2]
    assert (sums.server_round, sums.origin) == (2, [2, 2])
    # A skipped round leaves nothing.
    assert math.isnan(server._take(3, Opened(3, skipped="too few"))["cross-entropy"])
    assert server.sums is None


DEAL = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9, 10], [11]]


@pytest.fixture
def parties(tmp_path):
    keys = write_keys(6, tmp_path, 3, [[100 + place for place in places] for places in DEAL])

    def client(context, egos, settings, **options):
        trust = TrustSettings.of(keys[context.node_config["partition-id"]], context.run_id)
        return EgoNetworkClient(context, egos, settings, trust=trust, **options)

    return {
        "registry": tmp_path / "registry.json",
        "client_options": {"client": client},
        "supernodes": len(DEAL),
        "deal": DEAL,
    }


def test_results_are_those_of_a_trusted_server_for_one_exchange_more(parties):
    trusted = run(supernodes=6, deal=DEAL, make_grid=Federation)
    done = run(**parties, make_grid=Federation)
    assert_same(done, trusted, atol=0)
    assert done.strategy.session.num_slots == trusted.strategy.session.num_slots > 10
    for number in (2, 3, 4):
        ours, theirs = (
            {one.metadata.message_type for one, _ in grid.exchanged if round_of(one) == number}
            for grid in (done.grid, trusted.grid)
        )
        assert ours - theirs == {"train.sum_list"} and theirs <= ours


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ring": None}, "without masks"),
        ({"weights": np.zeros(3, np.float32)}, "weights are asked for"),
        ({"clients": np.array([100])}, "clients .100. are asked"),
    ],
)
def test_requests_for_what_the_server_could_read_are_refused(change, says):
    mask, ring = SimpleNamespace(), Ring.fit(3, 4.0, 2.0**-8)
    honest = EgoRequest(1, np.array([100, 101]), "full", mask=mask, ring=ring)
    aligner = SimpleNamespace(finished=[100, 101])
    check_request(honest, aligner)
    with pytest.raises(RefusedError, match=says):
        check_request(replace(honest, **change), aligner)


def test_who_joins_later_is_aligned_with_all(parties):
    script = {(5, "connect", 1): "gone"}
    done = run(**parties, rounds=3, make_grid=faulty(script))
    sums = done.strategy.session.sums
    # All are aligned; of each sum one is left out, as six SuperNodes differ from five by one.
    assert done.answered == [11, 11, 11] and sums.server.epoch.number == 1
    assert sums.server.epoch.parties.size == 6


def test_another_registry_in_mid_run_begins_another_epoch(parties, tmp_path, monkeypatch):
    new = Registry.read(parties["registry"])
    new = new.with_party(new_identity(tmp_path / "joins"), [range(900, 901)])
    renew, rounds = PartySums.renew, []

    def renewed(server):
        rounds.append(server.lists)
        if len(rounds) == 2:
            new.write(parties["registry"])
        renew(server)

    monkeypatch.setattr(PartySums, "renew", renewed)
    done = run(**parties, rounds=3)
    server = done.strategy.session.sums.server
    assert (server.epoch.number, server.registry.digest) == (1, new.digest)
    assert done.answered == [12, 12, 12]
