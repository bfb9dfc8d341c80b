"""nFedGNN with one first layer: it is the training of one network in one place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Context, Message
from relay_helpers import CLASSES, FEATURES, assigned, small_graph
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv

from flower_graph import CommonLayerClient, SummedGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.client.trust import throwaway_parties, trust_of
from flower_graph.errors import RefusedError
from flower_graph.models import build_server_model
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.common_key import CommonKey, ShareKeyRequest
from flower_graph.secure.ring import Ring
from flower_graph.secure.sum.messages import RING, MaskRequest
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.nfedgnn.common_client import MaskedLayerClient
from flower_graph.strategies.nfedgnn.messages import (
    Advance,
    CopyRequest,
    GradientRequest,
    HiddenSum,
    LatentRequest,
)
from flower_graph.strategies.nfedgnn.summed import MaskedGradientRelay
from flower_graph.strategies.nfedgnn.users import Dropped, UserSettings, shared_linear_weight

RATE, DECAY, ROUNDS = 0.05, 5e-4, 20
LINEAR = "weight"
NO_PARTNERS = (
    np.zeros((2, 0), np.bool_),
    np.zeros((0, 32), np.uint8),
    np.zeros((0, 2, 32), np.uint8),
    np.zeros((0, 82), np.uint8),
)  # of a request for a masked sum of two clients at one SuperNode


class Summed:
    """A run in this process, and the layer that its clients have after each round."""

    def __init__(
        self,
        data: Data,
        model: str = "gcn",
        *,
        supernodes: int = 2,
        rounds: int = ROUNDS,
        grid: type[InProcessGrid] = InProcessGrid,
        gone: Container[int] = (),
        mute: Container[int] = (),
        timeout: float = 5.0,
        patience: int = 0,
        is_masked: bool = False,
        distrusts: bool = False,
        factor: float = 1.0,  # of what the first SuperNode adds up
        **how: Any,
    ) -> None:
        self.factor = factor
        self.data, self.reports, self.is_masked = data, list[RoundReport](), is_masked
        self.distrusts = distrusts
        self.layers = list[dict[str, Tensor]]()
        self.of_client = {"user_model": how.pop("user_model", None)}
        dropout = how.pop("dropout", 0.0)
        server = build_server_model(
            model, hidden=4, heads=2, classes=CLASSES, dropout=dropout, seed=3
        )
        self.first = {name: t.clone() for name, t in server.state_dict().items()}
        settings = {"learning_rate": RATE, "weight_decay": DECAY, "seed": 3, **how}
        kind: Any = MaskedGradientRelay if is_masked else SummedGradientRelay
        self.grid = grid(make_client_app(self.client), num_supernodes=supernodes)
        self.grid.__dict__ |= {"gone": gone, "mute": mute}
        if self.distrusts:
            hosted = [range(k, k + 1) for k in range(supernodes)]  # the first user of each
            settings["registry"] = throwaway_parties(self.grid.run.run_id, hosted)
        self.strategy = kind(data, server, latent_size=server.latent_size, **settings)
        self.seed = self.strategy.users.settings.seed
        try:
            self.strategy.start(
                self.grid, num_rounds=rounds, timeout=timeout, patience=patience, on_round=self.note
            )
        finally:
            forget_run(self.grid.run.run_id)

    def client(self, context: Context) -> CommonLayerClient:
        kind: Any = MaskedLayerClient if self.is_masked else CommonLayerClient
        trust = {"trust": trust_of(context, hides=True)} if self.distrusts else {}
        client = kind(context, *assigned(self.data, context), **self.of_client, **trust)
        if not context.node_config["partition-id"]:
            add = client._summed
            client._summed = lambda asked, total, how: add(asked, total * self.factor, how)
        return client  # type: ignore[no-any-return]

    def note(self, report: RoundReport) -> None:
        self.reports.append(report)
        config = CopyRequest(self.strategy.users.settings).to_config()
        for context in self.grid.contexts.values():
            copy: Any = self.client(context).copy_layer([], config)[2]["layer-copy"]
            if self.is_masked:
                self.seed = CommonKey(context).seed()
                copy = CommonKey(context).open(copy)
            self.layers.append(load(copy))

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]

    @property
    def server(self) -> dict[str, Tensor]:
        return self.strategy.server.model.state_dict()


class Gcn(nn.Module):
    """A GCN of PyG's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, 4), GCNConv(4, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.conv2(functional.relu(self.conv1(x, edges)), edges)


class Gat(nn.Module):
    """A GAT of PyG's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GATConv(FEATURES, 4, heads=2), GATConv(8, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.conv2(functional.elu(self.conv1(x, edges)), edges)


LAST = {"linear.weight": "conv2.lin.weight"}
NAMES = {
    Gcn: {"bias": "conv1.bias", "linear.bias": "conv2.bias", **LAST},
    Gat: {
        **{"source_1": "conv1.att_src", "target_1": "conv1.att_dst", "bias_1": "conv1.bias"},
        **{"source_2": "conv2.att_src", "target_2": "conv2.att_dst", "bias_2": "conv2.bias"},
        **LAST,
    },
}


def plain_loop(network: Any, data: Data, server: dict[str, Tensor], weight: Tensor) -> list[float]:
    """Train as PyG's examples do."""
    state = network.state_dict()
    for ours, theirs in NAMES[type(network)].items():
        state[theirs] = server[ours].view_as(state[theirs]).clone()
    state["conv1.lin.weight"] = weight.T.clone()
    network.load_state_dict(state)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, weight_decay=DECAY)
    losses = []
    for _ in range(ROUNDS):
        logits = network(data.x, data.edge_index)
        loss = functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def rich_graph() -> Data:
    """A graph whose features are no round numbers."""
    data = small_graph(40)
    data.x = data.x * torch.rand(data.x.shape, generator=torch.Generator().manual_seed(5))
    return data


MODELS = {"gcn": Gcn, "gat": Gat}
CELLS = [
    (model, nodes, form)
    for model in MODELS
    for nodes, form in ((1, "plain"), (4, "plain"), (1, "masked"), (4, "masked"), (5, "untrusted"))
]
FAST = [("gcn", 1, "plain"), ("gat", 1, "plain"), ("gat", 4, "masked"), ("gcn", 5, "untrusted")]


@pytest.mark.parametrize(
    ("model", "supernodes", "form"),
    [
        pytest.param(
            *cell, marks=() if cell in FAST else pytest.mark.slow, id="{}-{}-{}".format(*cell)
        )
        for cell in CELLS
        if cell != ("gat", 5, "untrusted")
    ],
)
def test_it_is_one_network_in_one_place(model: str, supernodes: int, form: str) -> None:
    kind = MODELS[model]
    how: dict[str, Any] = {"is_masked": form != "plain", "distrusts": form == "untrusted"}
    data, network = rich_graph(), kind()
    run = Summed(data, model, supernodes=supernodes, **how)
    start = shared_linear_weight(FEATURES, run.strategy.users.settings._replace(seed=run.seed))
    assert run.losses == pytest.approx(plain_loop(network, data, run.first, start), abs=1e-4)
    trained = network.state_dict()
    for ours, theirs in NAMES[kind].items():
        apart = run.server[ours] - trained[theirs].view_as(run.server[ours])
        assert apart.abs().max() < 1e-4, ours
    for layer in run.layers[-supernodes:]:
        assert (layer[LINEAR] - trained["conv1.lin.weight"].T).abs().max() < 1e-4
    assert len(run.layers) == supernodes * ROUNDS


def test_a_request_is_read_as_it_was_written() -> None:
    total, copy = np.ones((3, 2), np.float32), np.arange(8, dtype=np.uint8).reshape(2, 4)
    settings = UserSettings(2, False, 0.1, 3, dropout=0.5)
    hidden = HiddenSum(2, b"r" * 16, 7, Ring(64, 40, 2, 64.0), np.arange(6, dtype="<u8"))
    for advance in (
        Advance(),
        Advance(4, 3, 0.1, True, total, copy=copy),
        Advance(4, 3, 0.1, hidden=hidden),
    ):
        sent = LatentRequest(
            5, np.array([4, 1]), np.array([4, 1, 7]), settings, advance, False, True, "a" * 32
        )
        content = sent.to_record()
        arrays = [a.numpy() for r in content.array_records.values() for a in r.values()]
        read = LatentRequest.from_numpy(arrays, dict(content.config_records["config"]))
        assert repr(read) == repr(sent)


# Dropout, modules, other models -------------------------------------------------------------------


def test_what_is_dropped_is_a_draw_of_the_user_the_feature_and_the_round() -> None:
    user, feature = torch.arange(400)[:, None].expand(400, 50), torch.arange(50).expand(400, 50)
    first, second = (Dropped(0.3, 1, number).scale(user, feature) for number in (1, 2))
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert float((first == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    assert torch.equal(Dropped(0.3, 1, 1).scale(user[7:8], feature[7:8]), first[7:8])


def test_a_module_of_ones_own_is_the_linear_map_if_it_is_linear() -> None:
    data = rich_graph()
    linear = Summed(data, rounds=5, supernodes=2)
    module = nn.Linear(FEATURES, 4, bias=False)
    first = linear.client(next(iter(linear.grid.contexts.values())))
    config = CopyRequest(linear.strategy.users.settings).to_config()
    start = load(first.copy_layer([], config)[2]["layer-copy"])[LINEAR]  # type: ignore[arg-type]
    module.load_state_dict({"weight": start.T})
    own = Summed(data, rounds=5, supernodes=2, user_model=module)
    assert own.losses == pytest.approx(linear.losses, abs=1e-5)
    torch.manual_seed(0)  # else some first weights do not learn in so few rounds
    deep = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 4))
    losses = Summed(data, user_model=deep, supernodes=3).losses
    assert losses[-1] < losses[0]


class Counted(InProcessGrid):
    """Counts the numbers of latent vectors that clients send, by array."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Look at the replies."""
        replies = list(super().pull_messages(message_ids))
        for one in replies:
            if one.metadata.message_type == "train" and one.has_content():
                for name, array in one.content.array_records.get("arrays", {}).items():
                    sent = self.__dict__.setdefault("sent", Counter())
                    sent[name] += int(np.prod(array.shape))
        return replies


@pytest.mark.parametrize(("dropout", "latent"), [(0.5, (8, 8)), (0.0, (1, 6))])
def test_vectors_without_dropout_travel_for_rounds_that_are_evaluated(
    dropout: float, latent: tuple[int, int]
) -> None:
    how: dict[str, Any] = {"feature_dropout": dropout, "rounds": 8, "grid": Counted}
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
        assert run.grid.__dict__["sent"] == {"relay": own * numbers, "measured": measured * numbers}
        up = run.reports[-1].bytes["up"]
        assert (up["latent"], up["measured"]) == (4 * own * numbers, 4 * measured * numbers)


# Who is missing -----------------------------------------------------------------------------------


class Missing(InProcessGrid):
    """The second SuperNode is gone, or silent, in some rounds."""

    gone: Container[int] = ()
    mute: Container[int] = ()  # rounds in which it sends no sum
    at = 0  # the round

    def get_node_ids(self) -> list[int]:
        """Leave out who is gone in the round that begins."""
        nodes = super().get_node_ids()
        return nodes[:1] + nodes[2:] if self.at + 1 in self.gone else nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Lose the sums of who is mute."""
        sent = list(messages)
        second = super().get_node_ids()[1]
        ids = super().push_messages(sent)
        for one, number in zip(sent, ids, strict=True):
            is_sum = one.metadata.message_type == "train.add_up"
            if is_sum and one.metadata.dst_node_id == second:
                self.at = int(one.metadata.group_id)
                if self.at in self.mute:
                    self._replies.pop(number)
            elif is_sum:
                self.at = int(one.metadata.group_id)
        return ids


@pytest.mark.parametrize("gone", [[1, 2], [3, 4]], ids=["late", "absent"])
def test_who_has_missed_a_step_gets_a_copy(gone: list[int]) -> None:
    run = Summed(rich_graph(), supernodes=3, rounds=6, grid=Missing, gone=gone)
    assert [report.answered for report in run.reports] == [
        27 if number in gone else 40 for number in range(1, 7)
    ]
    for layer in run.layers[-3:]:
        torch.testing.assert_close(layer, run.layers[-1])
    assert run.strategy.users.ledger.payload["down"]["copy"] > 0
    assert not any(report.rejected for report in run.reports)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_sum_that_is_missing_stops_the_step_of_all(is_masked: bool) -> None:
    how: dict[str, Any] = {"grid": Missing, "mute": [2], "timeout": 0.2, "is_masked": is_masked}
    run = Summed(rich_graph(), supernodes=3, rounds=4, **how)
    assert [bool(report.skipped) for report in run.reports] == [False, True, False, False]
    assert run.reports[1].answered == 0 and run.reports[1].rejected
    before, after = run.layers[:3], run.layers[3:6]
    assert all(torch.equal(a[LINEAR], b[LINEAR]) for a, b in zip(before, after, strict=True))
    assert run.reports[1].loss == run.reports[2].loss, "without dropout the same loss again"
    if not is_masked:
        whole = Summed(rich_graph(), supernodes=3, rounds=3)
        assert [run.losses[k] for k in (0, 2, 3)] == pytest.approx(whole.losses, abs=1e-6)


@pytest.mark.parametrize("is_masked", [False, True])
def test_who_stops_two_steps_is_left_out_and_named(is_masked: bool) -> None:
    how: dict[str, Any] = {"rounds": 6, "mute": range(2, 7), "timeout": 0.5}
    run = Summed(rich_graph(), supernodes=3, grid=Missing, is_masked=is_masked, **how)
    assert [bool(report.skipped) for report in run.reports] == [False, True, True, *[False] * 3]
    assert [report.answered for report in run.reports] == [40, 0, 0, 27, 27, 27]
    second = list(run.grid.contexts)[1]
    for report in run.reports[3:]:
        (left_out,) = report.rejected
        assert left_out["node"] == second and "2 steps" in str(left_out["reason"])


def test_nobody_is_left_out_where_most_stop_a_step() -> None:
    run = Summed(rich_graph(), supernodes=2, grid=Missing, mute=range(2, 5), rounds=5, timeout=0.1)
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


# Masked -------------------------------------------------------------------------------------------


def test_masked_the_server_has_neither_sums_nor_layer_and_copies_are_sealed() -> None:
    seen = list[bytes]()

    class Watched(Missing):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            sent = list(messages)
            ids = super().push_messages(sent)
            for content in [one.content for one in sent] + [
                self._replies[number].content for number in ids if number in self._replies
            ]:
                for record in content.values():
                    values = [v.data if isinstance(v, Array) else v for v in record.values()]
                    seen.extend(v for v in values if isinstance(v, bytes) and len(v) > 100)
            return ids

    how: dict[str, Any] = {"supernodes": 3, "rounds": 6, "grid": Watched, "gone": [3, 4]}
    run = Summed(rich_graph(), is_masked=True, **how)
    assert [report.answered for report in run.reports] == [40, 40, 27, 27, 40, 40]
    assert not any(report.skipped for report in run.reports)
    for layer in run.layers[-3:]:
        torch.testing.assert_close(layer, run.layers[-1])
    assert run.strategy.users.ledger.payload["down"]["copy"] > 0
    secret = [layer[LINEAR].numpy().tobytes() for layer in run.layers]
    assert seen and not any(weights in one for weights in secret for one in seen)
    settings = run.strategy.users.settings
    first = shared_linear_weight(FEATURES, settings)
    assert not torch.allclose(first, run.layers[0][LINEAR], atol=2 * RATE), "not of the run's seed"


def test_a_void_round_tells_a_skipped_sum_from_one_that_is_missing() -> None:
    class Sealed(InProcessGrid):
        """No SuperNode answers in round 2 when it is asked for shares, and keys for round 3."""

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            sent = list(messages)
            ids = super().push_messages(sent)
            for one, number in zip(sent, ids, strict=True):
                about = one.metadata.message_type, one.metadata.group_id
                if about == ("train.sum_unmask", "2") and "unmask-run" in one.content["config"]:
                    self._replies.pop(number)
            return ids

    how: dict[str, Any] = {"supernodes": 3, "is_masked": True, "timeout": 0.2}
    skipped = Summed(rich_graph(), rounds=4, grid=Sealed, **how).reports
    missing = Summed(rich_graph(), rounds=2, grid=Missing, mute=[2], **how).reports
    assert [bool(report.skipped) for report in skipped] == [False, True, True, False]
    assert not any("missing" in report.skipped for report in skipped)
    assert "missing from 1 SuperNode" in missing[1].skipped


@pytest.mark.parametrize("what", ["plain request", "readable sum", "few bits"])
def test_masked_clients_refuse_what_would_show_their_sum(what: str) -> None:
    run = Summed(rich_graph(), supernodes=2, rounds=1, is_masked=True)
    client = run.client(next(iter(run.grid.contexts.values())))
    with pytest.raises(RefusedError):
        client.share_key([], ShareKeyRequest(np.zeros((0, 32), np.uint8), True).to_config())
        settings, users = run.strategy.users.settings, client.users.numpy()
        if what == "readable sum":
            advance = Advance(4, 0, 0.1, True, np.ones((FEATURES, 4), np.float32))
            sent = LatentRequest(5, users, users, settings, advance)
            client.fit([np.ones((FEATURES, 4), np.float32)], sent.layout.to_config(sent))
        request = GradientRequest(1, users, np.ones((users.size, 4), np.float32), 0, settings)
        config = request.layout.to_config(request)
        if what == "few bits":
            mask = MaskRequest(bytes(16), 0, 32, 64, users[:2], *NO_PARTNERS)
            config |= mask.to_config() | RING.to_config(Ring(64, 24, 1, 64.0))
        client.add_up([request.gradient], config)
