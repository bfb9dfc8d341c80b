"""The page on FedGLS: its example runs as it stands, with Flower's other strategies too."""

from functools import cache
from typing import Any

import pytest
from doc_helpers import DOCS, run_blocks
from federation import one_fast
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)

from flower_graph.client.adaptor import make_client_app
from flower_graph.flower_compat import Mod
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.strategy import StructureFedAvg, initial_arrays

PAGE = DOCS / "fedgls.md"


@cache
def defined() -> dict[str, Any]:
    """Run the page's first block of code: data, settings and both halves of the app."""
    return run_blocks(PAGE, 3, slice(1))


def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    space = run_blocks(PAGE, 3, slice(1, 2), defined())
    metrics = space["result"].evaluate_metrics_clientapp
    assert capsys.readouterr().out == f"test accuracy {metrics[20]['test-accuracy']:.3f}\n"
    first, last = (metrics[number]["test-accuracy"] for number in (1, 20))
    assert first < 0.7 < 0.85 < last


@pytest.mark.slow
def test_other_strategies_of_flower_take_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    space = {**defined(), "InProcessGrid": InProcessGrid}
    space = run_blocks(PAGE, 3, slice(2, 3), space)
    said = dict(reversed(line.split()) for line in capsys.readouterr().out.splitlines())
    assert list(said) == [type(strategy).__name__ for strategy in space["strategies"]]
    assert min(float(value) for value in said.values()) > 0.75  # the start is below 0.5


@pytest.mark.parametrize(
    "who", one_fast(["the client", "the server, clipped by clients", "the server"], "the client")
)
def test_differential_privacy_of_flower_goes_around_both_halves(who: str) -> None:
    """The three ways that the page on privacy has, around the strategy with its checks."""
    strategy: Strategy = StructureFedAvg(defined()["settings"])
    mods: list[Mod] = []
    if who == "the client":
        mods = [LocalDpMod(clipping_norm=2.0, sensitivity=0.01, epsilon=10.0, delta=1e-5)]
    elif who == "the server":
        strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 2.0, 8)
    else:
        strategy = DifferentialPrivacyClientSideFixedClipping(strategy, 0.1, 2.0, 8)
        mods = [fixedclipping_mod]
    app = make_client_app(defined()["client_fn"], train_mods=mods)
    grid, start = InProcessGrid(app, num_supernodes=8), initial_arrays(defined()["settings"])
    # The strategy itself knows what to start from; a wrapper has Flower's `start`.
    first = {} if isinstance(strategy, StructureFedAvg) else {"initial_arrays": start}
    found = strategy.start(grid, num_rounds=6, **first).evaluate_metrics_clientapp
    assert found[1]["test"] < 0.75 < 0.8 < found[6]["test"]
