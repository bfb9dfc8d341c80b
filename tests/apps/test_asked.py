"""What of a comparison is asked for, and what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_graph.apps.reproduce import asked
from flower_graph.apps.reproduce.asked import announce, available, choose
from flower_graph.apps.reproduce.experiments import Experiment, Run
from flower_graph.errors import ConfigError, DataError

KNOWN = {"data": ("Cora", "PubMed", "Flickr"), "table": ("table-1", "table-2")}


def test_what_is_asked_for_comes_in_the_known_order() -> None:
    chosen = choose({"data": ["Flickr", "Cora"]}, KNOWN)
    assert chosen == {"data": ["Cora", "Flickr"], "table": ["table-1", "table-2"]}


@pytest.mark.parametrize(
    ("only", "said"),
    [
        ({"tables": ["table-1"]}, "tables"),
        ({"data": ["Cora", "cora"]}, "--only data=cora: unknown; allowed are Cora, PubMed, Flickr"),
    ],
)
def test_what_is_unknown_is_refused(only: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(only, KNOWN)


def load(name: str) -> None:
    if name != "Cora":
        raise DataError(f"no {name} in /some/folder")


def test_data_that_are_not_there_are_named_without_folders(
    capsys: pytest.CaptureFixture[str],
) -> None:
    there, left_out = available(["Cora", "Flickr"], load)
    assert there == ["Cora"]
    assert left_out == ["Flickr: not in the data root, and it could not be downloaded"]
    assert "left out: Flickr: no Flickr in /some/folder" in capsys.readouterr().out
    with pytest.raises(DataError, match="none of the data sets is there: Flickr: not in the"):
        available(["Flickr"], load)


def test_the_estimate_is_of_the_missing_runs_shared_by_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [Run(Experiment("Cora", "GCN", "x", "fedgls/cora", ()), seed, 1) for seed in range(4)]
    monkeypatch.setattr(asked, "left_to_run", lambda runs, folder: runs[1:])
    monkeypatch.setattr(asked, "workers_for", lambda runs: 2)
    announce(runs, tmp_path, lambda missing: 600.0 * len(missing))
    assert capsys.readouterr().out == (
        "4 runs, 1 of them there already; the others take about 15 minutes, 2 at a time\n"
    )
