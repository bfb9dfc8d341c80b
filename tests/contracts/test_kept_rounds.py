"""Which round a run ends with, and which one it keeps: every method, whole and resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import ALL, EACH, METHODS, Done, Federation, good, tried
from flwr.app import Message
from safetensors.torch import load_file

from flower_graph.apps.run import client_app
from flower_graph.method.registry import method_of
from flower_graph.records.rounds import RoundReport

ROUNDS = 6
ONE_FAST = tried(METHODS, fast=["nfedgnn"])
BEST = ("keep=best", f"rounds={ROUNDS}")
# Variants of FedSCem whose clients hold what they have measured in ways of their own
KEPT = tried([*METHODS, "fedscem, shared", "fedscem, fedavg"])


def kept(done: Done) -> dict[str, Any]:
    """Read what a run's clients and its server keep, by file and entry."""
    entries: dict[str, Any] = {}
    state = done.out.with_name(f"{done.out.name}-state")
    folders = {path.parent for path in state.glob("outputs/*/*/outputs.json")}
    for folder in [done.out, *sorted(folders)]:
        name = "server" if folder == done.out else folder.name
        if (folder / "predictions.npz").is_file():
            with np.load(folder / "predictions.npz") as arrays:
                entries |= {f"{name}/{key}": arrays[key] for key in arrays}
        for path in folder.glob("model*.safetensors"):
            entries |= {f"{name}/{key}": value for key, value in load_file(path).items()}
    return entries


def assert_same(one: Done, other: Done) -> None:
    first, second = kept(one), kept(other)
    assert first and first.keys() == second.keys()
    for name, values in first.items():
        numbers = np.asarray(values).dtype.kind == "f"
        same = np.testing.assert_allclose if numbers else np.testing.assert_array_equal
        same(values, second[name], **({"rtol": 0, "atol": 1e-6} if numbers else {}))


def rounds_kept(done: Done) -> set[int]:
    """Say of which rounds files are that clients keep, by their own words."""
    state = done.out.with_name(f"{done.out.name}-state")
    found = [*state.glob("outputs/*/*/outputs.json"), *done.out.glob("outputs.json")]
    return {json.loads(path.read_text(encoding="utf-8"))["round"] for path in found}


@pytest.mark.parametrize("name", KEPT)
def test_the_best_round_is_kept_whole_and_resumed(name: str, tmp_path: Path) -> None:
    setup = ALL[name]
    whole = setup.whole(*BEST)
    best = whole.result["best-round"]
    assert rounds_kept(whole) == {best}
    # What is kept is what a run would leave that ended then.
    assert_same(whole, setup.run(tmp_path / "short", f"rounds={best}"))
    # After the checkpoint a better round may have come, which the resumed run has not seen.
    # The first checkpoint is complete once the third round is reported.
    every = (*BEST, "checkpoint_every=2")
    setup.run(tmp_path / "out", *every, stop_at=min(max(best + 1, 3), ROUNDS - 1))
    assert_same(whole, setup.run(tmp_path / "out", *every, resume=True))


def to_another_process(grid: Federation, sent: list[Message]) -> list[Message]:
    """Have another process of the SuperNode asked for what it keeps than the one that trained."""
    for message in sent:
        if message.metadata.message_type == "query.keep":
            vars(grid.contexts[message.metadata.dst_node_id]).pop("live", None)
    return sent


@pytest.mark.parametrize("name", KEPT)
def test_another_process_may_be_asked(name: str, tmp_path: Path) -> None:
    whole = ALL[name].whole(*BEST)
    assert_same(whole, ALL[name].run(tmp_path / "out", *BEST, tells=to_another_process))


@pytest.mark.parametrize("name", ONE_FAST)
def test_patience_ends_every_method_and_lasts_over_a_resumed_run(name: str, tmp_path: Path) -> None:
    setup = METHODS[name]
    if hasattr(setup.load(), "judge"):  # else some rounds are measured only if they may be the last
        setup = setup.with_("judge.every=1")
    long = setup.run(tmp_path / "long", "rounds=12", "save=none")
    values = [report.val_accuracy for report in long.reports]
    best = [int(np.argmax(values[: n + 1])) for n in range(len(values))]
    # A round that is measured in the next is one more.
    lasts = 1 + next(n for n in range(12) if n - best[n] == 2) + setup.late
    patient = ("rounds=12", "patience=2", "save=none")
    ended = setup.run(tmp_path / "ended", *patient)
    assert len(ended.reports) == lasts < 12
    assert ended.figures == pytest.approx(long.figures[: len(ended.figures)], nan_ok=True)
    saving = (*patient, "checkpoint_every=1")
    out = tmp_path / "out"
    setup.run(out, *saving, stop_at=lasts - 1)
    assert len(setup.run(out, *saving, resume=True).reports) == lasts
    # Nothing is left to do, unless the round that was measured last was better after all.
    again = setup.run(out, *saving, resume=True)
    assert (len(again.reports) == lasts) == (best[lasts - 1] < lasts - 1)


@pytest.mark.parametrize("name", EACH)
def test_whoever_starts_a_strategy_can_stop_it(name: str) -> None:
    setup = METHODS[name]
    config, seen, reports = setup.load(f"rounds={ROUNDS}"), list[int](), list[RoundReport]()
    app = client_app(config, None)
    grid = Federation(app, num_supernodes=setup.supernodes, state_dir=None, faults=good)

    def stop(server_round: int, result: Any) -> bool:
        assert list(result.evaluate_metrics_clientapp) == [*seen, server_round]
        seen.append(server_round)
        return server_round == 2

    strategy = method_of(config).build_strategy(config, None)
    strategy.start(grid, num_rounds=ROUNDS, should_stop=stop, on_round=reports.append)
    assert [report.round for report in reports] == list(range(1, 3 + setup.late)) == seen
    assert "query.keep" not in grid.kinds
