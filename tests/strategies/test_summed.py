"""One layer for all users of nFedGNN: in the clear, under masks, under a server that lies."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import Faults, Federation, Tells, at, good, honest
from flwr.app import Array, Context, Message, RecordDict
from graph_helpers import FEATURES, Outcome, small_graph
from relay_helpers import assigned, strategy_for
from safetensors.torch import load
from sum_helpers import settings
from torch import Tensor
from torch_geometric.data import Data

from flower_graph import CommonLayerClient
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.errors import NoClientsError, RefusedError
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.common_key import CommonKey, KeyPacket, ShareKeyRequest
from flower_graph.secure.node_config import MALICIOUS_SERVER
from flower_graph.secure.ring import CHECKS, Ring, SumPad, checks_of
from flower_graph.secure.sum.messages import MaskRequest
from flower_graph.storage.files import IN_PROCESS
from flower_graph.strategies.nfedgnn.algorithm import (
    UserSettings,
    dropped,
    shared_linear_weight,
)
from flower_graph.strategies.nfedgnn.client import (
    SETTINGS_KEY,
    Advance,
    EnrolmentRequest,
    GradientRequest,
    LatentRequest,
)

RATE, DECAY, ROUNDS = 0.05, 5e-4, 20
LINEAR, SUMS = "weight", "train.add_up"
NO_PARTNERS = (
    np.zeros((2, 0), np.bool_),
    np.zeros((0, 32), np.uint8),
    np.zeros((0, 2, 32), np.uint8),
    np.zeros((0, 82), np.uint8),
)  # of a request for a masked sum of two clients at one SuperNode


class Summed(Outcome):
    """A run in this process, and the layer that its clients have after each round."""

    def __init__(
        self,
        data: Data,
        model: str = "gcn",
        *,
        supernodes: int = 2,
        rounds: int = ROUNDS,
        faults: Faults = good,
        tells: Tells = honest,
        timeout: float = 5.0,
        is_masked: bool = False,
        distrusts: bool = False,
        factor: float = 1.0,  # of what the first SuperNode adds up
        **how: Any,
    ) -> None:
        self.factor, self.data = factor, data
        self.is_masked, self.distrusts = is_masked, distrusts
        self.layers = list[dict[str, Tensor]]()
        app = make_client_app(self.client)
        of_grid: dict[str, Any] = {"state_dir": IN_PROCESS, "faults": faults, "tells": tells}
        over = Federation(app, num_supernodes=supernodes, **of_grid)
        if distrusts:
            hosted = [range(k, k + 1) for k in range(supernodes)]  # the first user of each
            registry = str(throwaway_parties(over.run.run_id, hosted))
            how |= {"registry": registry, "trust": MALICIOUS_SERVER}
        how = {"dropout": 0.0, "reg_weight": None, **how}
        how |= {"aggregation": "masked"} if is_masked else {}
        super().__init__(strategy_for(data, model, share="summed", **how), over)
        self.first = {n: t.clone() for n, t in self.strategy.server.model.state_dict().items()}
        self.seed = self.strategy.layer.settings.seed
        self.run(rounds, timeout=timeout, on_round=self.note)

    def client(self, context: Context) -> CommonLayerClient:
        trust = trust_of(context, hides=True) if self.distrusts else None
        own = assigned(self.data, context)
        client = CommonLayerClient(context, *own, masked=self.is_masked, trust=trust)
        if not context.node_config["partition-id"] and self.factor != 1:
            add: Any = client.add_up
            client.add_up = lambda sent, how: add([sent[0] * np.float32(self.factor)], how)  # type: ignore[method-assign]
        return client

    def note(self, report: RoundReport) -> None:
        self.reports.append(report)
        for context in self.grid.contexts.values():
            client = self.client(context)
            if SETTINGS_KEY not in context.state:  # it has not enrolled yet
                continue
            copy: Any = client.copy_layer([], {})[2]["layer-copy"]
            if self.is_masked:
                self.seed = CommonKey(context).seed()
                copy = CommonKey(context).open(copy)
            self.layers.append(load(copy))


def rich_graph() -> Data:
    """A graph whose features are no round numbers."""
    data = small_graph(40)
    data.x = data.x * torch.rand(data.x.shape, generator=torch.Generator().manual_seed(5))
    return data


def test_what_is_dropped_is_a_draw_of_the_user_the_feature_and_the_round() -> None:
    user, feature = torch.arange(400)[:, None].expand(400, 50), torch.arange(50).expand(400, 50)
    settings = UserSettings(4, False, 0.0, 1, dropout=0.3)
    first, second = (dropped(settings, number, user, feature) for number in (1, 2))
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert float((first == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    assert torch.equal(dropped(settings, 1, user[7:8], feature[7:8]), first[7:8])


def numbers_sent(grid: Federation) -> Counter[str]:
    """Count the numbers of latent vectors that clients sent, by array."""
    sent = Counter[str]()
    for message, reply in grid.exchanged:
        if message.metadata.message_type == "train":
            for name, array in reply.content.array_records.get("arrays", {}).items():
                sent[name] += int(np.prod(array.shape))
    return sent


@pytest.mark.parametrize(("dropout", "latent"), [(0.5, (8, 8)), (0.0, (1, 6))])
def test_vectors_without_dropout_travel_for_rounds_that_are_evaluated(
    dropout: float, latent: tuple[int, int]
) -> None:
    how: dict[str, Any] = {"feature_dropout": dropout, "rounds": 8}
    every, third = (Summed(rich_graph(), evaluate_every=k, **how) for k in (1, 3))
    assert third.losses == every.losses
    accuracies = [report.val_accuracy for report in third.reports]
    evaluated = [report.round for report in third.reports if not math.isnan(report.val_accuracy)]
    assert evaluated == [3, 6, 8]
    assert [accuracies[k - 1] for k in evaluated] == [
        every.reports[k - 1].val_accuracy for k in evaluated
    ]
    assert torch.equal(every.strategy.server.latent, third.strategy.server.latent)
    # Without dropout one vector does for both
    for run, measured, own in ((every, 8, latent[0]), (third, 3, latent[1])):
        numbers = 40 * 4  # of the vectors of all users
        assert numbers_sent(run.grid) == {"relay": own * numbers, "measured": measured * numbers}
        up = run.reports[-1].bytes["up"]
        assert (up["latent"], up["measured"]) == (4 * own * numbers, 4 * measured * numbers)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_sum_that_is_missing_stops_the_step_of_all(is_masked: bool) -> None:
    how: dict[str, Any] = {"faults": at("lost", {2}, SUMS), "timeout": 0.2, "is_masked": is_masked}
    run = Summed(rich_graph(), supernodes=3, rounds=4, **how)
    assert [bool(report.skipped) for report in run.reports] == [False, True, False, False]
    assert run.reports[1].answered == 0 and run.reports[1].rejected
    why = "4 of 6 clients sent their vectors" if is_masked else "missing from 1 SuperNode"
    assert why in run.reports[1].skipped
    before, after = run.layers[:3], run.layers[3:6]
    assert all(torch.equal(a[LINEAR], b[LINEAR]) for a, b in zip(before, after, strict=True))
    assert run.reports[1].loss == run.reports[2].loss, "without dropout the same loss again"
    if not is_masked:
        whole = Summed(rich_graph(), supernodes=3, rounds=3)
        assert [run.losses[k] for k in (0, 2, 3)] == pytest.approx(whole.losses, abs=1e-6)


def test_whose_first_vectors_are_lost_is_named() -> None:
    run = Summed(rich_graph(), rounds=2, faults=at("lost", {1}, "train"), timeout=0.1)
    assert [len(report.rejected) for report in run.reports] == [1, 0]
    assert [report.answered for report in run.reports] == [20, 40]


@pytest.mark.parametrize("is_masked", [False, True])
def test_who_stops_two_steps_is_left_out_and_named(is_masked: bool) -> None:
    how: dict[str, Any] = {"rounds": 6, "faults": at("lost", range(2, 7), SUMS), "timeout": 0.5}
    run = Summed(rich_graph(), supernodes=3, is_masked=is_masked, **how)
    assert [bool(report.skipped) for report in run.reports] == [False, True, True, *[False] * 3]
    assert [report.answered for report in run.reports] == [40, 0, 0, 27, 27, 27]
    mute = list(run.grid.contexts)[1]
    for report in run.reports[3:]:
        (left_out,) = report.rejected
        assert left_out["node"] == mute and "2 steps" in str(left_out["reason"])


def test_nobody_is_left_out_where_most_stop_a_step() -> None:
    run = Summed(rich_graph(), faults=at("lost", range(2, 5), SUMS), rounds=5, timeout=0.1)
    assert [report.answered for report in run.reports] == [40, 0, 0, 0, 40]


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_sum_that_is_too_long_moves_nobody_further_than_the_limit(
    is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three sends fifty times its sum the other way: with a limit it is one of three."""
    monkeypatch.setattr(CommonKey, "seed", lambda key: 3)  # the same first weights in all runs

    def turned(limit: float, factor: float) -> Tensor:
        how: dict[str, Any] = {"supernodes": 3, "rounds": 1, "weight_decay": 0.0}
        run = Summed(rich_graph(), limit=limit, is_masked=is_masked, factor=factor, **how)
        assert not run.reports[0].skipped
        return run.layers[0]["exp-avg"] * 10  # Adam's first moment: the sum that came

    honest, lied = turned(64.0, 1.0), turned(64.0, -50.0)
    assert torch.dot(honest.ravel(), lied.ravel()) < 0
    short = honest.norm().item() / 20
    assert turned(short, -50.0).norm() <= 3 * short + 1e-6


def test_masked_the_server_has_neither_sums_nor_layer_and_copies_are_sealed() -> None:
    gone = at("gone", {4, 5}, "connect")  # before rounds 3 and 4: vectors are asked for ahead
    how: dict[str, Any] = {"supernodes": 3, "rounds": 6, "faults": gone}
    run = Summed(rich_graph(), is_masked=True, **how)
    assert [report.answered for report in run.reports] == [40, 40, 27, 27, 40, 40]
    assert not any(report.skipped for report in run.reports)
    for layer in run.layers[-3:]:
        torch.testing.assert_close(layer, run.layers[-1])
    assert run.strategy.payload["down"]["copy"] > 0
    seen = [
        value.data if isinstance(value, Array) else value
        for message, reply in run.grid.exchanged
        for record in (*message.content.values(), *reply.content.values())
        for value in record.values()
    ]
    seen = [value for value in seen if isinstance(value, bytes) and len(value) > 100]
    secret = [layer[LINEAR].numpy().tobytes() for layer in run.layers]
    assert seen and not any(weights in one for weights in secret for one in seen)
    settings = run.strategy.layer.settings
    first = shared_linear_weight(FEATURES, settings)
    assert not torch.allclose(first, run.layers[0][LINEAR], atol=2 * RATE), "not of the run's seed"


def test_a_void_round_tells_of_a_skipped_sum() -> None:
    def sealed(_: int, server_round: int, kind: str) -> str:
        """Nobody answers in round 2 when it is asked for shares, and keys for round 3."""
        return "lost" if (kind, server_round) == ("train.sum_unmask", 2) else "good"

    how: dict[str, Any] = {"supernodes": 3, "is_masked": True, "timeout": 0.2}
    skipped = Summed(rich_graph(), rounds=4, faults=sealed, **how).reports
    assert [bool(report.skipped) for report in skipped] == [False, True, True, False]


@pytest.mark.parametrize("what", ["plain request", "readable sum", "few bits"])
def test_masked_clients_refuse_what_would_show_their_sum(what: str) -> None:
    run = Summed(rich_graph(), supernodes=2, rounds=1, is_masked=True)
    client = run.client(next(iter(run.grid.contexts.values())))
    with pytest.raises(RefusedError):
        client.share_key([], ShareKeyRequest(np.zeros((0, 32), np.uint8), True).to_config())
        client.get_properties(EnrolmentRequest(run.strategy.layer.settings).to_config())
        users = client.users.numpy()
        if what == "readable sum":
            advance = Advance(4, 0, 0.1, True, np.ones((FEATURES, 4), np.float32))
            sent = LatentRequest(5, users, users, advance)
            client.fit([np.ones((FEATURES, 4), np.float32)], sent.to_config())
        request = GradientRequest(1, users, np.ones((users.size, 4), np.float32), 0)
        config = request.to_config()
        if what == "few bits":
            mask = MaskRequest(bytes(16), 0, 32, 64, users[:2], *NO_PARTNERS)
            config |= mask.to_config() | Ring(64, 24, 1, 64.0).to_config()
        client.add_up([request.gradient], config)


RING, SUM = Ring(64, 40, 3, 64.0), (bytes(16), 3, b"detail")
LENGTH, COUNT = 12, 5
HOW: dict[str, Any] = {"supernodes": 5, "is_masked": True, "rounds": 3, "timeout": 0.5}
DELTA = 1 << 50  # of a word of the sum: a thousand, of one weight's gradient


def adds(grid: Federation, sent: list[Message]) -> list[Message]:
    """Add to the sum that clients are to step with, under pads that the server cannot take off."""
    for one in sent:
        if (total := one.content.array_records.get("total")) is not None:
            words = total["words"].numpy().copy()
            words[0] += np.uint64(DELTA)
            total["words"] = Array(words)
    return sent


def test_what_is_added_to_a_sum_moves_the_layer_where_the_server_is_trusted() -> None:
    """And so the next latent vectors tell who has the first feature."""
    run = Summed(rich_graph(), tells=adds, **HOW)
    first, *_, last = run.layers
    moved = last[LINEAR][0, 0] - first[LINEAR][0, 0]
    assert moved < -0.05, "by a step in each round, as the server knows"


def test_nobody_steps_with_a_sum_to_which_something_was_added() -> None:
    with pytest.raises(NoClientsError, match="relayed sum"):
        Summed(rich_graph(), tells=adds, distrusts=True, **HOW)


def test_one_that_misses_a_step_is_back_and_the_others_go_on_meanwhile() -> None:
    """Sums under pads may differ by one SuperNode: nobody else is left out for one that is gone."""
    how = HOW | {"supernodes": 7, "rounds": 5, "timeout": 5.0}
    run = Summed(rich_graph(), faults=at("gone", {3, 4}, "connect"), distrusts=True, **how)
    assert not any(report.skipped or report.rejected for report in run.reports)
    answered = [report.answered for report in run.reports]
    assert answered[0] == answered[-1] == 40 and 0 < answered[1] == answered[2] < 40
    for layer in run.layers[-7:]:
        torch.testing.assert_close(layer, run.layers[-1])


@pytest.fixture
def keys(tmp_path: Path) -> list[CommonKey]:
    """Two SuperNodes with registered keys, of which the first has drawn the common key."""
    found = [
        CommonKey(Context(1, number, {}, RecordDict(), {}), trust)
        for number, trust in enumerate(settings(5, tmp_path)[:2])
    ]
    first, second = found
    assert first.public.size == second.public.size  # made when they are asked for
    reply = first.share(ShareKeyRequest(*rows(second), True, rows_signed(second)))
    second.take(KeyPacket(reply.packets[0], first.public, first.signed_by))
    return found


def rows(*of: CommonKey) -> tuple[Any]:
    return (np.array([one.public for one in of], np.uint8),)


def rows_signed(*of: CommonKey) -> Any:
    return np.array([one.signed_by for one in of], np.uint8)


def pad_of(
    key: CommonKey, number: int = SUM[1], detail: bytes = SUM[2], ring: Ring = RING
) -> SumPad:
    return key.pad(SUM[0], number, detail, ring, LENGTH)


def summed(key: CommonKey) -> tuple[np.ndarray, np.ndarray]:
    """Add up numbers of some contributors as masked sums do; give the words and the numbers."""
    values = np.random.default_rng(2).uniform(-60, 60, (COUNT, LENGTH))
    pad, total = pad_of(key), np.zeros(0, np.uint64)
    for one in values:
        words = np.zeros(pad.words.size, np.uint64)
        words[:LENGTH] = RING.encode(one)
        total = words + pad.added(RING, one) + (total if total.size else np.uint64(0))
    return total, values.sum(0)


def test_a_sum_is_read_by_who_has_the_key(keys: list[CommonKey]) -> None:
    total, values = summed(keys[0])
    assert np.allclose(pad_of(keys[1]).taken(RING, total, COUNT), values, atol=1e-10)


@pytest.mark.parametrize(
    ("added", "count", "of"),
    [
        pytest.param({3: 1 << 3}, COUNT, {}, id="word"),
        pytest.param({3: 1 << 55}, COUNT, {}, id="high bit"),
        pytest.param({-1: 1}, COUNT, {}, id="check"),
        pytest.param({}, COUNT + 1, {}, id="contributors"),
        pytest.param({}, COUNT, {"detail": b"another"}, id="step"),
        pytest.param({}, COUNT, {"ring": Ring(64, 41, 3, 64.0)}, id="form"),
        pytest.param({}, COUNT, {"number": SUM[1] + 1}, id="other sum"),
    ],
)
def test_a_sum_is_refused_that_is_not_what_contributors_sent(
    keys: list[CommonKey], added: dict[int, int], count: int, of: dict[str, Any]
) -> None:
    total, _ = summed(keys[0])
    for place, change in added.items():
        total[place] += np.uint64(change)
    with pytest.raises(RefusedError):
        pad_of(keys[1], **of).taken(RING, total, count)


def test_a_refusal_does_not_tell_where_the_sum_lies_that_something_is_added_to(
    keys: list[CommonKey],
) -> None:
    """What is added brings the one sum over the limit and not the other: the words are the same."""
    said = set[str]()
    step = 1 << RING.guard_bits
    for value in (-50.0, 50.0):
        pad = pad_of(keys[0])
        total = pad.added(RING, np.full(LENGTH, value))
        total[:LENGTH] += RING.encode(np.full(LENGTH, value))
        for delta in (64 << RING.fraction_bits, 1, 0):
            changed = total.copy()
            changed[0] += np.uint64(delta * step)
            changed[-1] += np.uint64(1)
            with pytest.raises(RefusedError) as refused:
                pad.taken(RING, changed, 1)
            said.add(str(refused.value))
    assert len(said) == 1


@pytest.mark.parametrize("word", [32, 64])
def test_a_change_of_one_bit_anywhere_is_found_by_about_half_of_the_checks(word: int) -> None:
    chance = np.random.default_rng(4)
    subsets = chance.integers(0, 1 << 63, 40, np.uint64) * np.uint64(2) + np.uint64(1)
    words = chance.integers(0, 1 << 31, 40).astype(f"<u{word // 8}")
    right, found = checks_of(words, subsets), list[int]()
    for place in range(40):
        for bit in (0, word // 2, word - 1):
            changed = words.copy()
            changed[place] += words.dtype.type(1 << bit)
            found.append(int((checks_of(changed, subsets) != right).sum()))
    assert min(found) > 12 and max(found) < 52 and abs(np.mean(found) - CHECKS / 2) < 3
    twice = checks_of(words + words[::-1], subsets)
    assert np.array_equal(twice, right + checks_of(words[::-1].copy(), subsets))


@pytest.mark.parametrize("lie", ["unsigned", "another's", "own"])
def test_the_common_key_is_sealed_for_registered_parties_alone(
    keys: list[CommonKey], lie: str, tmp_path: Path
) -> None:
    first, second = keys
    server = CommonKey(Context(1, 9, {}, RecordDict(), {}))
    assert server.public.size
    signed = {
        "unsigned": None,
        "another's": rows_signed(second),
        "own": rows_signed(
            CommonKey(Context(1, 8, {}, RecordDict(), {}), settings(5, tmp_path / "own")[0])
        ),
    }[lie]
    with pytest.raises(RefusedError):
        first.share(ShareKeyRequest(*rows(server), False, signed))
    reply = server.share(ShareKeyRequest(*rows(second), True))
    with pytest.raises(RefusedError):
        second.take(
            KeyPacket(reply.packets[0], server.public, None if signed is None else signed[0])
        )
    assert second.check.tobytes() == first.check.tobytes()
