"""Each strategy with clients that know of this library only `docs/reference/messages.md`."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plain_clients
import pytest
import torch
from ego_helpers import SETTINGS as EGO_SETTINGS
from graph_helpers import Outcome
from public_helpers import run as run_members
from public_helpers import still_member
from structure_helpers import settings_of
from torch_geometric.data import Data

from flower_graph.models import build_server_model
from flower_graph.records.participation import numbers
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fed_sage.strategy import LocalSage
from flower_graph.strategies.fedgls.strategy import FIGURES as STRUCTURE_NAMES
from flower_graph.strategies.fedgls.strategy import StructureFedAvg
from flower_graph.strategies.fedscem import EgoFedAvg, EgoFedProx
from flower_graph.strategies.fedscem.strategy import MaskedEmbeddingAveraging
from flower_graph.strategies.nfedgnn.strategy import SplitGradientRelay
from flower_graph.strategies.ppfl.strategy import ProcrustesAlignment


def run(strategy: Any, app: Any, clients: int, rounds: int) -> list[RoundReport]:
    """Run it; nobody may be left out."""
    reports = Outcome(strategy, InProcessGrid(app, num_supernodes=clients)).run(rounds).reports
    assert len(reports) == rounds
    assert not any(report.rejected or report.skipped for report in reports), reports
    assert all(report.asked == report.answered > 0 for report in reports)
    return reports


def test_nfedgnn_learns_with_plain_clients() -> None:
    source = Path(plain_clients.__file__).read_text(encoding="utf-8")
    assert "flower_graph" not in source and "NumPyClient" not in source
    n, draw = 30, np.random.default_rng(1)
    y = np.arange(n) % 3
    x = (np.eye(3)[y] + 0.3 * draw.normal(size=(n, 3))).astype(np.float32)
    edges = [(i, (i + step) % n) for i in range(n) for step in (3, n - 3)]
    role = torch.arange(n) // 3 % 3
    masks = {f"{name}_mask": role == k for k, name in enumerate(("train", "val", "test"))}
    data = Data(edge_index=torch.tensor(edges).T, y=torch.from_numpy(y), num_nodes=n, **masks)
    server = build_server_model("gcn", hidden=8, heads=1, classes=3, dropout=0.0, seed=0)
    strategy = SplitGradientRelay(
        data, server, latent_size=server.latent_size, reg_weight=0.0, learning_rate=0.02
    )
    users = {part: list(range(part, n, 3)) for part in range(3)}
    reports = run(strategy, plain_clients.relay_app(x, users, rate=0.5), 3, 40)
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert reports[-1].test_accuracy > 0.8
    assert reports[-1].participation["answered"] == "0-29"


def test_fedscem_adds_up_what_plain_clients_send() -> None:
    nodes = {0: [1, 2, 3], 1: [3, 2], 2: [4, 3]}
    settings = replace(EGO_SETTINGS, hidden=4)
    embedding = np.arange(24.0).reshape(6, 4)
    strategy = MaskedEmbeddingAveraging(settings, alignment="plain", aggregation="plain")
    taken: list[Any] = []
    take = strategy._take

    def watch(server_round: int, found: Any) -> dict[str, float]:
        taken.append((strategy.layout, found.total))
        return take(server_round, found)

    strategy._take = watch  # type: ignore[method-assign]
    reports = run(strategy, plain_clients.ego_app(nodes, embedding), 3, 2)
    layout, total = taken[0]
    # Node 3 is held by all, node 2 by clients 0 and 1; nodes 1 and 4 by one each.
    assert sorted(total[layout.counts].tolist()) == [2, 3]
    sums = total[layout.embeddings].reshape(2, 4)
    wanted = {2: 2 * embedding[2] + 0 + 1, 3: 3 * embedding[3] + 0 + 1 + 2}
    for row, held in zip(sums, total[layout.counts], strict=True):
        assert np.allclose(row, wanted[int(held)])
    figures = (reports[0].train_accuracy, reports[0].val_accuracy, reports[0].test_accuracy)
    assert figures == (0.5, 0.25, 0.75)


NAMES = ["cross-entropy", "train", "val", "test", *STRUCTURE_NAMES]
METHODS = (("structure-fedavg", 0.0), ("fed-gnn-mlp", 1.0))  # with their first shares


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        (EgoFedAvg(EGO_SETTINGS), 0.0),
        (EgoFedProx(EGO_SETTINGS), 0.0),
        (LocalSage(EGO_SETTINGS), 0.0),
        *((StructureFedAvg(settings_of(method)), share) for method, share in METHODS),
    ],
    ids=["fedavg", "fedprox", "local-sage", *(method for method, _ in METHODS)],
)
def test_means_of_what_plain_clients_send(strategy: Any, share: float) -> None:
    """All numbers get the client's own added, shares too; their means are one higher."""
    is_ego, is_sage = isinstance(strategy, EgoFedAvg), isinstance(strategy, LocalSage)
    counts_once = is_ego and not is_sage  # an ego-network
    sizes = {0: 1, 1: 1, 2: 1} if counts_once else {0: 5, 1: 10, 2: 5}
    trained, names = ([], NAMES[:4]) if is_ego else (["contrast"], NAMES)
    before = {name: array.numpy() for name, array in strategy.first_arrays().items()}
    (report,) = run(strategy, plain_clients.averaging_app(sizes, trained, names), 3, 1)
    for name, values in strategy.weights().items():
        wanted = before[name] + 1.0
        assert np.allclose(values, wanted if "share" in name else wanted / (share + 1), atol=1e-6)
    assert report.test_accuracy == pytest.approx(0.25)  # of 0, 1/4 and 1/2
    assert numbers(report.participation["answered"]) == [0, 1, 2]


def test_ppfl_aligns_plain_clients_as_it_does_ours(caplog: pytest.LogCaptureFixture) -> None:
    draw = np.random.default_rng(2)
    ids = {0: [4, 5, 6], 1: [6, 4, 7], 2: [5, 6, 4]}
    vectors = {client: draw.normal(size=(3, 2)).astype(np.float32) for client in ids}
    strategy = ProcrustesAlignment()
    with caplog.at_level(logging.WARNING):
        reports = run(strategy, plain_clients.public_app(ids, vectors), 3, 2)
    assert not [one for one in caplog.records if one.name.startswith("flower_graph")]
    members = [still_member(client, vectors[client].tolist(), ids[client]) for client in ids]
    ours = run_members(members, rounds=2).weights
    for name, values in strategy.weights().items():
        assert np.array_equal(values, ours[name]), name
    assert (reports[0].val_accuracy, reports[0].test_accuracy, reports[0].loss) == (0.5, 0.25, 1.0)
    assert reports[1].regulariser > 0  # the means that came with the second round
