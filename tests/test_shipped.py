"""Every shipped config runs to its end on three seeds, with all clients, and without a flood."""

from pathlib import Path

import pytest

from flower_graph.apps.cli.main import main
from flower_graph.apps.run import check_run
from flower_graph.config.common import RunConfig
from flower_graph.data.sources.names import OWN, presence
from flower_graph.errors import DataError
from flower_graph.method.load import list_configs, load_config
from flower_graph.method.registry import method_of
from flower_graph.records import warned
from flower_graph.storage.reading import read_lines

SEEDS = (0, 1, 2)
MOST_CLIENTS = 100_000  # of more a run takes hours: benchmarks have those
AT_HAND = "data.name=cora-linqs"  # in place of a user's file, which does not ship


def _runnable(name: str) -> list[str]:
    """Return what a config needs besides its name; skip one whose data are not at hand."""
    config = load_config(name)
    more = [AT_HAND] if presence(config.data.name) == OWN else []
    config = load_config(name, more)
    _skip_large(config)
    try:
        check_run(config)
    except DataError as error:
        pytest.skip(str(error))
    return more


def _skip_large(config: RunConfig) -> None:
    if config.data.name == "csbm" and config.data.nodes > MOST_CLIENTS:
        pytest.skip(f"{config.data.nodes:,} {method_of(config).clients}")


@pytest.mark.release
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", list_configs())
def test_a_shipped_config_runs_to_its_end(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exit 0; nobody is left out, no round is skipped, and no warning comes more than ten times."""
    more, seeds = _runnable(name), ",".join(map(str, SEEDS))
    out = tmp_path / "run"
    assert main(["run", name, *more, "--seeds", seeds, "--out", str(out), "--quiet"]) == 0
    for seed in SEEDS:
        rounds = read_lines(out / f"seed-{seed}" / "metrics.jsonl")
        assert rounds
        for report in rounds:
            assert not report["skipped"], report
            assert not report["rejected"], report["rejected"]
            assert report["answered"] == report["asked"] > 0, report["round"]
    counted = [r.getMessage() for r in caplog.records if r.name == warned.__name__]
    assert not counted
