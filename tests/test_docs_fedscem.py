"""The page on FedSCem: its example runs as it stands."""

import math
import re

import pytest
from doc_helpers import DOCS, run_blocks

from flower_graph import MaskedEmbeddingAveraging
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem.config import EgoSettings

PAGE = DOCS / "fedscem.md"
SETTINGS = EgoSettings(num_features=8, num_classes=3, learning_rate=0.01, mu=1.0, tau=1.0)


def test_the_example_runs_and_equals_a_run_in_the_clear(capsys: pytest.CaptureFixture[str]) -> None:
    space = run_blocks(PAGE, 2, slice(2))
    result = space["result"]
    losses, metrics = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    assert sorted(metrics) == list(range(1, 21))
    said = re.fullmatch(r"12 clients, test accuracy (0\.\d{3}|1\.000)\n", capsys.readouterr().out)
    assert said is not None and float(said[1]) == round(metrics[20]["test-accuracy"], 3)
    assert metrics[1]["test-accuracy"] < 0.9 < 0.95 < metrics[20]["test-accuracy"]

    plain = MaskedEmbeddingAveraging(SETTINGS, alignment="plain", aggregation="plain")
    clear = plain.start(InProcessGrid(space["client_app"], num_supernodes=12), num_rounds=1)
    # The first round's means, in steps of 2^-12, have been through one fusion.
    assert clear.train_metrics_clientapp[1]["loss"] == pytest.approx(losses[1]["loss"], abs=1e-3)
    assert math.isnan(metrics[1]["val-accuracy"])  # nobody has nodes for validation
