"""Flower's ``Result`` has the same figures in the same place, whatever the method."""

import re

import numpy as np
import pytest
from federation import ALL, tried
from flwr.serverapp.strategy import Result

from flower_graph.apps.run import client_app, make_server
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid

TRAINED = ("loss", "cross-entropy", "regulariser", "answered")
# What `weights()` has, as the table in docs/reference/outputs.md says; the last begins as the name
WEIGHTS = {
    "nfedgnn": r"server\..+|latent",
    "lpgnn": r"(linear|server)\..+",
    "fedscem": "",
    **dict.fromkeys(
        ("fedscem, shared", "fedscem, fedavg", "fedscem, median"),
        r"(gnn|classifier|projection)\..+",
    ),
    "fedscem, fed-sage": r"conv[12]\..+|classifier\..+",
    "fedgls": "(gnn|encoder)-(first|rest)",
    "fedgls, proto": "sums|shares",
    "fedgls, alone": "",
    "fedgta": r"client-\d+\..+",
    "fedpub": r"client-\d+\..+",
    "fedavg": r"(first|second)\.(weight|bias)",
    "fedgcn": r"(first|second)\.(weight|bias)",
    "fedprox": r"(first|second)\.(weight|bias)",
    "local": "",
    "ditto": r"common\..+",
    "fedproto": "sums|shares",
    "scaffold": r"(net|common)\..+",
    "moon": r"net\..+",
    "fedopt": r"(first|second)\.(weight|bias)",
    "gat": r"(means|nodes)-\d+",
    "deepwalk": r"(means|nodes)-\d+",
    "deepwalk, alone": "",
    "deepwalk, secure": "mean|nodes",
}
MEASURED = ("train-accuracy", "val-accuracy", "test-accuracy")


@pytest.mark.parametrize("name", tried(ALL, fast=["nfedgnn", "fedscem", "fedgls", "fedpub"]))
def test_figures_of_a_round_are_those_of_its_report(name: str) -> None:
    setup, reports = ALL[name], list[RoundReport]()
    config = setup.load("rounds=2")
    grid = InProcessGrid(client_app(config, None), num_supernodes=setup.supernodes)
    strategy = make_server(config, grid)
    result: Result = strategy.start(grid, num_rounds=2, on_round=reports.append)
    assert list(result.train_metrics_clientapp) == [report.round for report in reports]
    assert list(result.evaluate_metrics_clientapp) == [report.round for report in reports]
    for report in reports:
        line = report.to_record()
        trained = result.train_metrics_clientapp[report.round]
        measured = result.evaluate_metrics_clientapp[report.round]
        for record, names in ((trained, TRAINED), (measured, MEASURED)):
            found = {name: record[name] for name in names}
            assert found == pytest.approx({name: line[name] for name in names}, nan_ok=True)
        assert not trained.keys() & {*MEASURED, "test", "val"}
    assert 0 <= measured["test-accuracy"] <= 1
    assert np.isfinite(trained["loss"])
    own = [pattern for start, pattern in WEIGHTS.items() if name.startswith(start)]
    assert [key for key in strategy.weights() if not re.fullmatch(own[-1], key)] == []
