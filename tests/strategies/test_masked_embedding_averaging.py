"""The whole method against slow versions, by hand, masked and plain; clients that come later."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ego_helpers import SETTINGS, PlainClient, average, toy_egos
from ego_strategy_helpers import (
    FINE,
    RESOLUTION,
    assert_same,
    faulty,
    rounded,
    run,
    seven_egos,
    three_egos,
)
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.errors import AlignmentError
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.cohort import EgoCohort, Shared, initial_weights
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging

# Written densely ---------------------------------------------------------------------------------


def means(clients: list[PlainClient]) -> dict[int, Tensor]:
    """Average embeddings by node over at least two holders."""
    held: dict[int, list[Tensor]] = {}
    for client in clients:
        for node, row in zip(client.ego.nodes.tolist(), client.embed().detach(), strict=True):
            held.setdefault(node, []).append(row)
    return {node: torch.stack(rows).mean(0) for node, rows in held.items() if len(rows) > 1}


def shared_by(network: EgoNetwork, mean: dict[int, Tensor]) -> Shared:
    rows = [(place, mean[n]) for place, n in enumerate(network.nodes.tolist()) if n in mean]
    place = torch.tensor([place for place, _ in rows], dtype=torch.long)
    return Shared(place, torch.stack([row for _, row in rows]) if rows else torch.zeros(0, 1))


def slow_run(
    egos: list[EgoNetwork], rounds: int, variant: str, sharing: str, settings: Any
) -> list[PlainClient]:
    """Run the method with one dense PyG model a client; return them as after the last fusion."""
    model = initial_weights(settings)
    clients = [PlainClient(network, model, settings) for network in egos]
    mean: dict[int, Tensor] | None = None
    for number in range(1, rounds + 2):
        if sharing != "none":
            for client in clients:
                client.load(model)
        for client in clients:
            if mean is not None:
                for _ in range(settings.local_epochs):
                    client.step(shared_by(client.ego, mean), classify=variant != "iter")
        if number > rounds:
            break
        for client in clients:
            for _ in range(settings.local_epochs if variant != "minus" else 0):
                client.step()
        mean = means(clients)
        model = average(clients)
    return clients


@pytest.mark.parametrize(
    ("variant", "sharing", "changes"),
    [
        ("full", "none", {}),
        ("iter", "none", {}),
        ("minus", "none", {"local_epochs": 2}),
        ("full", "fedavg", {}),
        ("full", "fedprox", {"proximal": 0.5}),
        ("iter", "fedprox", {"proximal": 0.5, "local_epochs": 2}),
    ],
)
def test_equals_dense_clients(variant: str, sharing: str, changes: dict[str, Any]) -> None:
    settings, egos = replace(SETTINGS, **changes), seven_egos()
    how = {"aggregation": "plain", "variant": variant, "model_sharing": sharing}
    fast = run(egos, settings=settings, **how)
    slow = slow_run(egos, 3, variant, sharing, settings)
    for place, client in enumerate(slow):
        found = fast.last[egos[place].client]
        torch.testing.assert_close(found, client.active(), atol=2e-5, rtol=0)


# One round by hand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "alignment", "supernodes"),
    [
        ("masked", "psi", 3),
        ("masked", "plain", 1),
        ("plain", "psi", 1),
        ("plain", "plain", 3),
    ],
)
def test_clients_get_the_means_over_holders(
    aggregation: str, alignment: str, supernodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[int, Shared] = {}
    fuse = EgoCohort.fuse

    def spy(chosen: EgoCohort, shared: Shared, server_round: int, **how: Any) -> Tensor:
        for client, start, end in zip(
            chosen.batch.clients, chosen.batch.ptr, chosen.batch.ptr[1:], strict=False
        ):
            own = (shared.place >= start) & (shared.place < end)
            found[client] = Shared(shared.place[own] - start, shared.mean[own])
        return fuse(chosen, shared, server_round, **how)

    monkeypatch.setattr(EgoCohort, "fuse", spy)
    egos = three_egos()
    run(egos, rounds=1, supernodes=supernodes, aggregation=aggregation, alignment=alignment)
    h = {}
    for network in egos:
        client = PlainClient(network, initial_weights(SETTINGS), SETTINGS)
        client.step()
        h[network.client] = client.embed().detach()
    two, three = (h[7][1] + h[8][0]) / 2, (h[7][2] + h[8][1] + h[9][0]) / 3
    assert two.abs().max() > 0.01
    # Nodes 1 and 4 have one holder each: of them nothing comes back.
    expected = {7: ([1, 2], [two, three]), 8: ([0, 1], [two, three]), 9: ([0], [three])}
    for client, (place, mean) in expected.items():
        assert found[client].place.tolist() == place
        torch.testing.assert_close(
            found[client].mean, torch.stack(mean), atol=2 * RESOLUTION, rtol=1e-6
        )


# What does not fit together ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "half"}, "variant: 'half'"),
        ({"model_sharing": "all"}, "model_sharing: 'all'"),
        ({"alignment": "guess"}, "alignment: 'guess'"),
        ({"aggregation": "open"}, "aggregation: 'open'"),
        ({"dropout": 1.0}, "dropout.*1.0"),
        ({"limit": float("nan")}, "limit.*nan"),
        ({"resolution": -1.0}, "resolution.*-1.0"),
        ({"resolution": 2.0**-70}, "resolution"),
        ({"settings": replace(SETTINGS, tau=0.0)}, "tau: 0.0"),
        ({"registry": "none.json", "aggregation": "plain"}, "registry"),
    ],
)
def test_impossible_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedEmbeddingAveraging(**{"settings": SETTINGS, **FINE, **options})


def test_there_is_no_model_to_start_from() -> None:
    grid = InProcessGrid(lambda *_: None, num_supernodes=1)
    with pytest.raises(ValueError, match="initial_arrays"):
        MaskedEmbeddingAveraging(SETTINGS).start(grid, ArrayRecord(), num_rounds=1)


Change = Callable[[RecordDict], None]
M, ROUNDS = 10, 5


def ten_egos() -> list[EgoNetwork]:
    return [network for network in toy_egos() if network.client not in (105, 111)]


# Dropping out ------------------------------------------------------------------------------------


def dropouts(seed: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Let 3 of 10 clients vanish in every round, each at some stage.

    Returns the script of a masked run, and that of a plain run in which the same clients are
    absent from the same sums. Who does not answer the second exchange of a round is in its sum,
    but has not prepared the next one.
    """
    draw = random.Random(seed)
    masked: dict[Any, Any] = {}
    plain: dict[Any, Any] = {}
    unprepared: list[int] = []
    for number in range(2, ROUNDS + 1):
        rest = [p for p in range(M) if p not in unprepared]
        mute = draw.randint(0, 3 - len(unprepared))  # having prepared it
        late = 3 - len(unprepared) - mute
        vanished = draw.sample(rest, mute + late)
        for place in vanished[:mute]:
            masked[place, "train", number] = "silent"
        for place in vanished[mute:]:
            masked[place, "both", number] = draw.choice(["silent", "lost"])
        for place in vanished[:mute] + unprepared:
            plain[place, "train", number] = "silent"
        unprepared = vanished[mute:] if number < ROUNDS else []
        if number == ROUNDS:
            for place in vanished[mute:]:
                plain[place, "train", number + 1] = "silent"
    return masked, plain


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_three_of_ten_drop_out_at_random_stages(seed: int) -> None:
    masked, plain = dropouts(seed)
    egos = ten_egos()
    one = run(egos, rounds=ROUNDS, supernodes=M, make_grid=faulty(masked))
    other = run(
        egos,
        rounds=ROUNDS,
        supernodes=M,
        make_grid=faulty(plain),
        aggregation="plain",
        mods=[rounded],
    )
    assert not any(report.skipped for report in one.reports)
    assert min(one.answered) == 7
    assert_same(one, other, 0.0)


def test_too_many_drop_out_and_the_round_is_skipped() -> None:
    script = {(p, "train", 3): "lost" for p in range(3)}
    outcome = run(seven_egos(), rounds=5, supernodes=7, make_grid=faulty(script))
    reasons = [report.skipped for report in outcome.reports]
    assert reasons[1].startswith("round 3 is skipped: 4 of 7 clients sent their vectors")
    assert reasons[1].endswith("at least 5 must; nothing is revealed")
    assert not any(reasons[:1] + reasons[2:])
    assert outcome.figures[1].isnan()[1:].all()  # what round 3's vectors say of round 2
    assert outcome.figures[2, 2].isnan()  # nothing to fuse from round 3
    assert outcome.figures[3:, :3].isfinite().all()


def test_too_few_prepare_and_the_round_is_skipped() -> None:
    script = {(p, "both", 2): "lost" for p in range(5)}
    outcome = run(seven_egos(), rounds=5, supernodes=7, make_grid=faulty(script))
    assert [bool(report.skipped) for report in outcome.reports] == [True, True] + [False] * 3
    assert outcome.answered[2:] == [7] * 3


# During the set-up -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "word", "gone"), [("hello", "silent", 1), ("align", "lost", 1), ("union", "lost", 4)]
)
def test_lost_during_the_set_up(stage: str, word: str, gone: int) -> None:
    script = {(place, stage, 1): word for place in range(gone)}
    outcome = run(seven_egos(), supernodes=7, make_grid=faulty(script))
    assert 7 - gone <= outcome.answered[-1] <= 7 - (stage == "union") * gone
    assert outcome.figures[1:, :3].isfinite().all()


def test_a_union_that_nobody_takes_part_in_is_an_error() -> None:
    script = {(p, "union", 1): "lost" for p in range(7)}
    with pytest.raises(AlignmentError, match=r"round 1.*0"):
        run(seven_egos(), supernodes=7, make_grid=faulty(script))


# Numbers that do not fit -------------------------------------------------------------------------


@pytest.mark.parametrize(("aggregation", "supernodes"), [("masked", 7), ("plain", 2)])
def test_a_client_beyond_the_range_is_left_out(aggregation: str, supernodes: int) -> None:
    egos = seven_egos()
    egos[1] = replace(egos[1], x=egos[1].x * 3.4e38)
    outcome = run(egos, supernodes=supernodes, rounds=4, aggregation=aggregation)
    assert outcome.answered == [6] * 4
    assert outcome.figures[:, :3].isfinite().all()
    for report in outcome.reports:
        (entry,) = report.rejected
        assert re.search(r"an? (embedding|measurement) is outside the range", entry["reason"])
        assert "101" in entry["reason"] or entry["client"] == 101
    # The others are as if it had never been asked.
    without = run(
        seven_egos(),
        supernodes=7,
        rounds=4,
        make_grid=faulty({(1, "train", n): "lost" for n in range(1, 6)}),
        aggregation=aggregation,
    )
    good = {c: w for c, w in outcome.last.items() if c != 101}
    for client, weights in good.items():
        torch.testing.assert_close(weights, without.last[client], atol=1e-5, rtol=0)


# Replies that are wrong --------------------------------------------------------------------------


def wrong_bytes(key: str) -> Change:
    def apply(content: RecordDict) -> None:
        record = next(r for r in content.config_records.values() if key in r)
        record[key] = bytes(255 - byte for byte in record[key])

    return apply


@pytest.mark.parametrize(
    ("script", "why", "answered"),
    [
        # Proof: it is out for good
        (
            {(2, "both", 3): wrong_bytes("unmask-shares")},
            "round 3: it sent a wrong share",
            [7, 7, 6, 6, 6, 6],
        ),
        # One word against another, and most are against it: it is out from the first union on
        (
            {(2, "hello", 1): wrong_bytes("sum-channel-key")},
            "most others and its SuperNode cannot open what they seal for each other",
            [6, 6, 6, 6, 6, 6],
        ),
    ],
)
def test_who_spoils_the_sum_is_named_and_left_out(
    script: dict[Any, Any], why: str, answered: list[int]
) -> None:
    outcome = run(seven_egos(), rounds=6, supernodes=7, make_grid=faulty(script), alignment="plain")
    assert outcome.answered == answered
    assert [not report.skipped for report in outcome.reports] == [n > 0 for n in answered]
    named = [e for r in outcome.reports for e in r.rejected if e.get("client") == 103]
    assert any(re.search(why, entry["reason"]) for entry in named)
    assert {e["client"] for r in outcome.reports for e in r.rejected if "client" in e} == {103}
    assert outcome.figures[[n > 0 for n in answered], :2].isfinite().all()
