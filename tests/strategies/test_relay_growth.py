"""Users of nFedGNN that come and go: who keeps what, who trains, and what is forgotten."""

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from graph_helpers import FEATURES, Outcome, small_graph
from relay_helpers import run, same_weights, strategy_for
from torch import Tensor

from flower_graph import NodeClient
from flower_graph.client.adaptor import make_client_app
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.nfedgnn.users import shared_linear_weight

WHOLE, OLD, ROUNDS = small_graph(24), 18, 4
NEW = list(range(OLD, 24))


def begun(folder: Path, old: int = OLD, **options: Any) -> Outcome:
    """Run with the first users; users in turn, so that nobody's SuperNode moves as more come."""
    data = WHOLE.subgraph(torch.arange(old))
    return run(data, rounds=ROUNDS, supernodes=3, folder=folder, **options)


def go_on(strategy: Any, folder: Path, rounds: int, *, left: Any = (), alone: int = 0) -> Outcome:
    strategy.grow(WHOLE, left=left, alone=alone)
    how: dict[str, Any] = {"supernodes": 3, "folder": folder, "of_client": {"left": left}}
    return run(WHOLE, strategy=strategy, rounds=ROUNDS + rounds, resume=True, **how)


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
    old = begun(tmp_path)
    before = {name: tensor.clone() for name, tensor in old.weights.items()}
    users_before = saved_users(tmp_path, ROUNDS)
    new = go_on(old.strategy, tmp_path, 4, alone=4)
    after = new.weights
    assert torch.equal(after.pop("latent")[:OLD], before.pop("latent"))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {report.answered for report in new.reports} == {len(NEW)}
    for user, tensors in saved_users(tmp_path, ROUNDS + 4).items():
        if user < OLD:
            assert all(torch.equal(t, users_before[user][name]) for name, t in tensors.items())
        else:
            assert int(tensors["step"]) == 3, "the first of four rounds has no gradient yet"
    assert new.reports[-1].cross_entropy < new.reports[0].cross_entropy


@pytest.mark.parametrize("averages", [False, True])
def test_newcomers_begin_from_the_seed_or_the_last_mean_and_others_go_on(
    averages: bool, tmp_path: Path
) -> None:
    old = begun(tmp_path, **({"average_every": 2} if averages else {}))
    mean = old.strategy.layer.state_dict().get("average")
    new = go_on(old.strategy, tmp_path, 1, alone=int(averages))
    start = shared_linear_weight(FEATURES, new.strategy.layer.settings)
    start = start if mean is None else torch.where(mean.isnan(), start, mean)
    torch.testing.assert_close(new.weights["latent"][OLD:], WHOLE.x[OLD:] @ start)
    assert new.reports[0].answered == (len(NEW) if averages else 24)
    steps = {u: int(one["step"]) for u, one in saved_users(tmp_path, ROUNDS + 1).items()}
    assert {steps[user] for user in NEW} == {0}
    assert {steps[user] for user in range(OLD)} == {ROUNDS - averages}


def test_a_grown_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = go_on(begun(whole).strategy, whole, 6, alone=3)
    go_on(begun(cut).strategy, cut, 2, alone=3)
    fresh = strategy_for(WHOLE, checkpoint_dir=cut, checkpoint_every=2)
    again = go_on(fresh, cut, 6, alone=3)
    assert [report.answered for report in again.reports] == [6, 24, 24, 24]
    assert same_weights(again, expected)


def test_who_left_is_in_no_file_edge_figure_and_draw_any_more(tmp_path: Path) -> None:
    gone = [1, 2, *np.flatnonzero(WHOLE.test_mask)[:2].tolist()]
    old = begun(tmp_path, old=24)
    before = old.weights["latent"].clone()
    users_before = saved_users(tmp_path, ROUNDS)
    assert all(before[user].any() for user in gone)
    new = go_on(old.strategy, tmp_path, 1, left=gone)
    server = new.strategy.server
    assert not server.latent[gone].any()
    edges = getattr(server.graph, "edge_index", server.graph)
    assert not torch.isin(edges, torch.tensor(gone)).any()
    assert int(server.masks["test"].sum()) == int(WHOLE.test_mask.sum()) - 2
    assert new.reports[0].answered == 20
    for server_round in checkpoint.complete_rounds(tmp_path):
        assert not saved_users(tmp_path, server_round).keys() & set(gone)
        state = checkpoint.load_server(tmp_path, server_round)
        assert not state["server"]["latent"][gone].any()
        assert not state["layer"]["gradient"][gone].any()
    kept = saved_users(tmp_path, ROUNDS)
    assert kept.keys() == set(range(24)) - set(gone)
    for user, tensors in kept.items():
        assert all(torch.equal(t, users_before[user][name]) for name, t in tensors.items())


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
    old, apart, looks = begun(tmp_path), torch.tensor(NEW), count(1)

    def client_fn(context: Context) -> NodeClient:
        part = int(context.node_config["partition-id"])
        users = apart if part == 3 else torch.arange(part, OLD, 3)
        return NodeClient(context, WHOLE.x[users], users, checkpoint_dir=tmp_path)

    late = InProcessGrid(make_client_app(client_fn), num_supernodes=4)
    there = late.get_node_ids
    late.get_node_ids = lambda: there()[: -1 if next(looks) <= away else None]  # type: ignore[method-assign]
    old.strategy.grow(WHOLE, alone=alone)
    new = run(WHOLE, strategy=old.strategy, grid=late, rounds=ROUNDS + 3, resume=True)
    assert [report.answered for report in new.reports] == answered
