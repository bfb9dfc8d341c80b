"""LPGNN: the mechanism by hand, what is sent once, and what the server makes of it."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import METHODS, Federation, at
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flower_graph.apps.cli.main import main
from flower_graph.apps.run import client_app
from flower_graph.config.common import RunConfig
from flower_graph.data.folders.party import server_folder
from flower_graph.errors import ConfigError, RefusedError
from flower_graph.method.registry import method_of
from flower_graph.ops.graph import Adjacency
from flower_graph.privacy.noise import fresh_chances
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.lpgnn import (
    Encoder,
    FeatureRequest,
    LPGNNClient,
    drop_loss,
    drop_targets,
    respond,
    response_matrix,
    smooth,
    smoother,
)
from flower_graph.wire.arrays import decode_array, encode_array

SMALL = METHODS["lpgnn"]
NOISE = ("privacy.epsilon=2",)


# Formulas ----------------------------------------------------------------------------------------


def test_the_encoder_by_hand() -> None:
    x, encoder = torch.tensor([[0.0, 3.0], [1.0, 2.0]]), Encoder(4.36, 0.0, 2.0)
    m, k = encoder.of(2)
    assert (m, k) == (2, pytest.approx((math.exp(2.18) - 1) / (math.exp(2.18) + 1)))
    chances = 1 / (math.exp(2.18) + 1), 1 - 1 / (math.exp(2.18) + 1), 0.5  # of 0, 2 (and 3) and 1
    draw = np.array([[chances[0] - 1e-9, chances[1] + 1e-9], [0.51, chances[1] - 1e-9]])
    signs = encoder.encode(x, lambda *shape: draw)
    assert signs.tolist() == [[1, -1], [-1, 1]] and signs.dtype == torch.int8
    torch.testing.assert_close(encoder.rectify(signs), signs / k + 1)  # d (high - low) / 2m = 1
    assert torch.equal(Encoder(None, 0.0, 2.0).encode(x, fresh_chances), x.clamp(0, 2))
    assert [Encoder(one).of(99)[0] for one in (0.01, 2.17, 4.36, 8, 1e6)] == [1, 1, 2, 3, 99]
    assert Encoder(1.0, sampled=5).of(99)[0] == 5 and Encoder(1e6).of(2)[1] == 1


def test_the_estimate_has_no_bias() -> None:
    x = torch.tensor([[0.0, 0.2, 0.5, 1.0]]).repeat(100_000, 1)
    for encoder in (Encoder(1.0), Encoder(8.0), Encoder(3.0, sampled=4)):
        estimate = encoder.rectify(encoder.encode(x, fresh_chances)).double()
        error = estimate.std(0) / math.sqrt(len(x))
        assert ((estimate.mean(0) - x[0]).abs() < 5 * error).all()


@pytest.mark.parametrize("epsilon", [0.1, 2.0, 6.0])
def test_no_answer_is_more_likely_than_the_budget_allows(epsilon: float) -> None:
    """Of every answer to any two inputs; the budget is used up."""
    encoder, d = Encoder(epsilon), 4
    m, k = encoder.of(d)
    inputs = [np.array(one) for one in itertools.product([0.0, 0.4, 1.0], repeat=d)]
    worst = 0.0
    for places in itertools.combinations(range(d), m):  # as likely whatever the input is
        for signs in itertools.product([False, True], repeat=m):
            up = [encoder.chance(one[[*places]], k) for one in inputs]
            chances = [math.prod(np.where(signs, one, 1 - one)) for one in up]
            worst = max(worst, max(chances) / min(chances))
    assert worst == pytest.approx(math.exp(epsilon))


def test_randomised_response() -> None:
    matrix = response_matrix(4, 1.5)
    torch.testing.assert_close(matrix.sum(1), torch.ones(4))
    assert float(matrix[0, 0] / matrix[0, 1]) == pytest.approx(math.exp(1.5), rel=1e-5)
    y = torch.arange(4).repeat(50_000)
    said = respond(y, 4, 1.5, fresh_chances)
    counts = torch.bincount(4 * y + said, minlength=16).view(4, 4) / 50_000
    torch.testing.assert_close(counts, matrix, atol=0.015, rtol=0)


def path() -> Adjacency:
    """The path 0 - 1 - 2, and a node 3 without neighbours."""
    return smoother(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 4)


def test_smoothing_leaves_a_nodes_own_row_out() -> None:
    half = math.sqrt(0.5)
    once = torch.tensor([[0, half, 0, 0], [half, 0, half, 0], [0, half, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(smooth(path(), torch.eye(4), 1), once)
    torch.testing.assert_close(smooth(path(), torch.eye(4), 3), once @ once @ once)


def test_drop_by_hand() -> None:
    y, train = torch.tensor([1, 0, 1, 1]), torch.tensor([True, True, False, True])
    # After one step node 0 has the label of 1, node 1 that of 0 alone; none reaches node 3
    assert drop_targets(path(), y, train, 2, 1).tolist()[:2] == [0, 1]
    assert int(drop_targets(path(), y, train, 2, 1)[3]) == 1
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    plain = functional.cross_entropy(logits[train], y[train])
    sure = drop_loss(path(), logits, y, train, response_matrix(2, 1000.0), 0)
    torch.testing.assert_close(sure, plain)
    shares = logits.softmax(1)
    found = drop_loss(path(), logits, y, torch.tensor([True, False, False, False]), torch.eye(2), 1)
    torch.testing.assert_close(found, -shares[1, 1].log())


# What users send ---------------------------------------------------------------------------------


def client_of(config: RunConfig, context: Context | None = None) -> LPGNNClient:
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}
    context = Context(1, 2, node, RecordDict(), {}) if context is None else context
    client = method_of(config).build_client(config, context, None)
    assert isinstance(client, LPGNNClient)
    return client


def sent(client: LPGNNClient, users: list[int], labelled: list[int] | None = None) -> Any:
    request = FeatureRequest(1, np.array(users), np.array(labelled or [], np.int64))
    return client.fit([], request.to_config())


def test_who_is_asked_again_sends_the_same() -> None:
    config = SMALL.load("privacy.epsilon=4", "strategy.label_epsilon=1")
    client = client_of(config)
    first, more = [3, 1, 8], [8, 5, 1, 3]
    (rows,), _, said = sent(client, first, [3, 1])
    # In another process, which has the context alone
    context = client._state._context
    vars(context).pop("live")
    (again,), _, told = sent(client_of(config, context), more, [5, 1, 3])
    assert (again[[3, 2, 0]] == rows).all() and np.abs(rows).sum(1).tolist() == [1, 1, 1]
    labels = [np.frombuffer(one["labels"], np.int64) for one in (said, told)]
    assert (labels[1][[2, 1]] == labels[0]).all()
    others = sent(client_of(config), first)[0][0]
    assert (others != rows).any()  # the noise is not of the run's seed
    with pytest.raises(RefusedError):
        client.get_properties({"run-token": "0" * 32, "resume-round": 1})
    with pytest.raises(RefusedError):
        sent(client_of(SMALL.load(*NOISE)), first, [3])


def test_random_features_have_nothing_of_the_true_ones() -> None:
    config = SMALL.load("strategy.features=random")
    rows = []
    for change in (0.0, 1.0):
        client = client_of(config)
        client._x = client._x * change
        rows.append(sent(client, [*range(90)])[0][0])
    assert (rows[0] == rows[1]).all() and set(np.unique(rows[0])) == {0.0, 1.0}
    assert abs(rows[0].mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    "words",
    [
        "strategy.low=2 strategy.high",
        "privacy.epsilon=2 strategy.label_epsilon=2 strategy.label_epsilon",
        "strategy.label_epsilon=2 strategy.label_epsilon",
        "privacy.epsilon=1 privacy.form=central privacy.form",
        "privacy.epsilon=1 checkpoint_every=1 checkpoint_every",
    ],
)
def test_settings_that_do_not_fit_are_refused(words: str) -> None:
    *settings, key = words.split()
    with pytest.raises(ConfigError, match=key):
        SMALL.load(*settings)


# The server --------------------------------------------------------------------------------------


def test_a_round_is_that_of_dense_matrices() -> None:
    config: Any = SMALL.load("model.dropout=0", "rounds=1")
    method = method_of(config)
    strategy: Any = method.build_strategy(config, None)
    first, second = strategy.model.linear.weight.clone(), strategy.model.server
    w, b, c = (
        one.detach().clone() for one in (second.linear.weight, second.bias, second.linear.bias)
    )
    graph = method.data(config)
    a = torch.zeros(90, 90)
    a[graph.edge_index[0], graph.edge_index[1]] = 1

    def normal(matrix: Tensor) -> Tensor:
        root = matrix.sum(1).clamp(min=1e-9).rsqrt()
        return root[:, None] * matrix * root

    plain = normal(a) * (a.sum(1) > 0)[:, None]
    x = plain @ plain @ graph.x
    x /= x.square().mean().sqrt()
    whole = normal(a + torch.eye(90))
    logits = whole @ ((whole @ (x @ first.T) + b).relu() @ w.T) + c
    loss = functional.cross_entropy(logits[graph.train_mask], graph.y[graph.train_mask])
    reports: list[Any] = []
    strategy.start(
        Federation(client_app(config, None), num_supernodes=3),
        num_rounds=1,
        on_round=reports.append,
    )
    assert reports[0].loss == pytest.approx(float(loss.detach()), rel=1e-5)


def changed(content: RecordDict, change: Any) -> None:
    record = content.array_records["arrays"]
    values: NDArray[Any] = change(decode_array("features", record["features"], copy=True))
    record["features"] = encode_array("features", values)


WRONG = {
    "between": lambda rows: rows * 0.5,
    "far": lambda rows: rows + 7,
    "short": lambda rows: rows[:, 1:],
    "none": lambda rows: rows * np.nan,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_answer_is_named_left_out_and_asked_for_again(
    name: str, tmp_path: Path
) -> None:
    def wrong(content: RecordDict) -> None:
        changed(content, WRONG[name])

    faults = at(wrong, {1}, "train")  # type: ignore[arg-type]
    done = SMALL.run(tmp_path / "o", *NOISE, "rounds=3", faults=faults)
    assert done.who[0].failed and "features" in str(done.reports[0].rejected)
    assert not done.who[1].failed and len(done.who[1].answered) == 90
    kinds = [one.metadata.message_type for one, _ in done.grid.exchanged]
    assert kinds.count("train") == SMALL.supernodes + 1  # each is asked once, and one twice


class Leaving(Federation):
    """The second SuperNode is there in some rounds only."""

    there, now = range(99), 1

    def get_node_ids(self) -> list[int]:
        return [n for k, n in enumerate(super().get_node_ids()) if k != 1 or self.now in self.there]


def run_with(there: range) -> list[RoundReport]:
    config, reports = SMALL.load("rounds=4"), list[RoundReport]()
    grid = Leaving(client_app(config, None), num_supernodes=3)
    grid.there = there

    def on_round(report: RoundReport) -> None:
        grid.now = report.round + 1
        reports.append(report)

    method_of(config).build_strategy(config, None).start(grid, num_rounds=4, on_round=on_round)
    return reports


def test_who_has_sent_may_leave_and_who_comes_later_is_asked_then() -> None:
    whole, left, late = run_with(range(9)), run_with(range(2)), run_with(range(3, 9))
    assert [one.loss for one in left] == [one.loss for one in whole]
    assert "not connected" in str(left[-1].participation["left-out"])
    assert [one.answered for one in left] == [90, 60, 60, 60]
    assert [one.answered for one in late] == [60, 60, 90, 90]
    assert late[0].loss != whole[0].loss and not any(one.rejected for one in late)
    assert late[-1].bytes == whole[-1].bytes == {"up": {"features": 90 * 24 * 4}, "down": {}}


def test_the_budget_is_that_of_what_is_sent_once(tmp_path: Path) -> None:
    done = SMALL.run(tmp_path / "o", *NOISE)
    assert done.result["privacy"] == {"epsilon": 2.0, "delta": 0.0, "form": "local"}
    assert {*map(str, (one.privacy for one in done.reports))} == {"{'epsilon': 2.0, 'delta': 0.0}"}


def test_from_data_folders_it_is_the_same(tmp_path: Path) -> None:
    words = [SMALL.config, *SMALL.overrides, "--supernodes", "3", "--out", str(tmp_path / "parts")]
    assert main(["partition", *words]) == 0
    folders = sorted((tmp_path / "parts").glob("clients-*"))
    own = [{"data-folder": str(folder)} for folder in folders]
    drop = ("privacy.epsilon=2000", "strategy.label_epsilon=1000")  # labels as they are
    for more in ((), drop):
        config, reports = SMALL.load("rounds=2", *more), list[RoundReport]()
        grid = InProcessGrid(client_app(config, None), num_supernodes=3, node_config=own)
        folder = server_folder(config, str(tmp_path / "parts" / "server"))
        strategy = method_of(config).build_strategy(config, None, folder)
        strategy.start(grid, num_rounds=2, on_round=reports.append)
        whole = SMALL.run(tmp_path / f"whole{len(more)}", "rounds=2", *more).reports
        if not more:
            assert [one.loss for one in reports] == [one.loss for one in whole]
        assert reports[-1].answered == 90 and 0 <= reports[-1].val_accuracy <= 1
