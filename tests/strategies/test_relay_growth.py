"""Users of nFedGNN that come and go: who keeps what, who trains, and what is forgotten."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from relay_helpers import FEATURES, client_app, small_graph, strategy_for
from torch import Tensor, nn
from torch_geometric.data import Data

from flower_graph import NodeClient, SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.nfedgnn.users import shared_linear_weight

WHOLE, OLD, ROUNDS = small_graph(24), 18, 4
NEW = list(range(OLD, 24))


def first(data: Data, users: int) -> Data:
    """The graph of the first users alone."""
    return data.subgraph(torch.arange(users))


def grid(data: Data, folder: Path, *, left: Any = (), **options: Any) -> InProcessGrid:
    """Three SuperNodes; users in turn, so that nobody's moves as the graph grows."""
    app = client_app(data, left=left, checkpoint_dir=folder, **options)
    return InProcessGrid(app, num_supernodes=3)


class Run:
    """A strategy that goes on."""

    def __init__(self, folder: Path, data: Data = WHOLE, old: int = OLD, **options: Any) -> None:
        self.folder, self.data, self.reports = folder, data, list[RoundReport]()
        self.options = {"user_model": options.pop("user_model", None)}
        saving = {"checkpoint_dir": folder, "checkpoint_every": 2}
        self.strategy = strategy_for(first(data, old), **saving, **options)
        self.strategy.start(grid(first(data, old), folder, **self.options), num_rounds=ROUNDS)
        self.users = dict(saved_users(folder, ROUNDS))

    def go_on(self, rounds: int, *, left: Any = (), alone: int = 0) -> SplitGradientRelay:
        self.strategy.grow(self.data, left=left, alone=alone)
        self.strategy.start(
            grid(self.data, self.folder, left=left, **self.options),
            num_rounds=ROUNDS + rounds,
            resume=True,
            on_round=self.reports.append,
        )
        return self.strategy


def saved_users(folder: Path, server_round: int) -> dict[int, dict[str, Tensor]]:
    """What a checkpoint has of each user of the linear map."""
    found: dict[int, dict[str, Tensor]] = {}
    for path in sorted(checkpoint.round_folder(folder, server_round).glob("client-*")):
        tensors = checkpoint.load_client(path)
        if "beside/rows" not in tensors:
            continue
        start = tensors["beside/rows"].tolist()
        for place, user in enumerate(tensors["clients"].tolist()):
            rows = slice(start[place], start[place + 1])
            local = {name: tensors[name][rows] for name in ("weight", "exp-avg", "exp-avg-sq")}
            found[user] = local | {"step": tensors["step"][place]}
    return found


def test_alone_newcomers_train_and_all_others_stay_as_they_were(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = {name: tensor.clone() for name, tensor in run.strategy.weights().items()}
    after = run.go_on(4, alone=4).weights()
    assert torch.equal(after.pop("latent")[:OLD], before.pop("latent"))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {report.answered for report in run.reports} == {len(NEW)}
    users = saved_users(tmp_path, ROUNDS + 4)
    for user, tensors in users.items():
        if user < OLD:
            assert all(torch.equal(t, run.users[user][name]) for name, t in tensors.items())
        else:
            assert int(tensors["step"]) == 3, "the first of four rounds has no gradient yet"
    assert run.reports[-1].cross_entropy < run.reports[0].cross_entropy


@pytest.mark.parametrize("averages", [False, True])
def test_newcomers_begin_from_the_seed_or_the_last_mean_and_others_go_on(
    averages: bool, tmp_path: Path
) -> None:
    run = Run(tmp_path, **({"average_every": 2} if averages else {}))
    mean = run.strategy.layer.state_dict().get("average")
    strategy = run.go_on(1, alone=int(averages))
    start = shared_linear_weight(FEATURES, strategy.layer.settings)
    start = start if mean is None else torch.where(mean.isnan(), start, mean)
    torch.testing.assert_close(strategy.server.latent[OLD:], WHOLE.x[OLD:] @ start)
    assert run.reports[0].answered == (len(NEW) if averages else 24)
    steps = {u: int(one["step"]) for u, one in saved_users(tmp_path, ROUNDS + 1).items()}
    assert {steps[user] for user in NEW} == {0}
    assert {steps[user] for user in range(OLD)} == {ROUNDS - averages}


def test_a_grown_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    expected = whole.go_on(6, alone=3).weights()
    cut.go_on(2, alone=3)
    again = strategy_for(WHOLE, checkpoint_dir=tmp_path / "cut", checkpoint_every=2)
    again.grow(WHOLE, alone=3)
    reports = list[RoundReport]()
    again.start(
        grid(WHOLE, tmp_path / "cut"), num_rounds=ROUNDS + 6, resume=True, on_round=reports.append
    )
    assert [report.answered for report in reports] == [6, 24, 24, 24]
    assert all(torch.equal(again.weights()[name], expected[name]) for name in expected)


def test_who_left_is_in_no_file_and_no_edge_any_more(tmp_path: Path) -> None:
    gone = [1, 2, 7]
    run = Run(tmp_path, old=24)
    before = run.strategy.weights()["latent"].clone()
    assert all(before[user].any() for user in gone)
    left = run.go_on(1, left=gone)
    assert not left.server.latent[gone].any()
    edges = getattr(left.server.graph, "edge_index", left.server.graph)
    assert not torch.isin(edges, torch.tensor(gone)).any()
    assert run.reports[0].answered == 21
    for server_round in checkpoint.complete_rounds(tmp_path):
        assert not saved_users(tmp_path, server_round).keys() & set(gone)
        state = checkpoint.load_server(tmp_path, server_round)
        assert not state["server"]["latent"][gone].any()
        assert not state["layer"]["gradient"][gone].any()
    kept = saved_users(tmp_path, ROUNDS)
    assert kept.keys() == set(range(24)) - set(gone)
    for user, tensors in kept.items():
        assert all(torch.equal(t, run.users[user][name]) for name, t in tensors.items())


def test_who_left_takes_no_part_in_figures_and_draws(tmp_path: Path) -> None:
    gone = np.flatnonzero(WHOLE.test_mask)[:2].tolist()
    run = Run(tmp_path, old=24, participation=0.5)
    strategy = run.go_on(3, left=gone)
    assert [report.asked for report in run.reports] == [11] * 3, "half of 22"
    assert int(strategy.server.masks["test"].sum()) == int(WHOLE.test_mask.sum()) - 2


def test_own_user_models_grow(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 4))
    run = Run(tmp_path, user_model=model)
    before = run.strategy.server.latent.clone()
    strategy = run.go_on(2, alone=2, left=[3])
    kept = [user for user in range(OLD) if user != 3]
    assert torch.equal(strategy.server.latent[kept], before[kept])
    assert strategy.server.known[NEW].all()


@pytest.mark.parametrize(
    ("options", "how", "said"),
    [
        ({}, {"left": [24]}, r"left.*\[24\]"),
        ({}, {"alone": -1}, "alone: -1"),
        ({"average_every": 1, "average_over": "all"}, {}, "average_over"),
    ],
)
def test_impossible_changes_are_refused(
    options: dict[str, Any], how: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        strategy_for(WHOLE, **options).grow(WHOLE, **how)


@pytest.mark.parametrize(("alone", "away", "answered"), [(2, 0, [6, 6, 24]), (0, 2, [18, 24, 24])])
def test_a_newcomers_supernode_needs_no_checkpoint(
    alone: int, away: int, answered: list[int], tmp_path: Path
) -> None:
    """Whether it is there when the run goes on, or comes later."""
    run, apart, looks = Run(tmp_path), torch.tensor(NEW), count(1)

    def client_fn(context: Context) -> NodeClient:
        part = int(context.node_config["partition-id"])
        users = apart if part == 3 else torch.arange(part, OLD, 3)
        return NodeClient(context, WHOLE.x[users], users, checkpoint_dir=tmp_path)

    late = InProcessGrid(make_client_app(client_fn), num_supernodes=4)
    there = late.get_node_ids
    late.get_node_ids = lambda: there()[: -1 if next(looks) <= away else None]  # type: ignore[method-assign]
    run.strategy.grow(WHOLE, alone=alone)
    run.strategy.start(late, num_rounds=ROUNDS + 3, resume=True, on_round=run.reports.append)
    assert [report.answered for report in run.reports] == answered
