"""Runs beside each other: what differs, what came out, and a test paired by seed."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from scipy.stats import ttest_rel

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.errors import ConfigError, OutputError
from flower_graph.report.result import holm

OURS, THEIRS = (0.80, 0.82, 0.81), (0.70, 0.75, 0.71)


def leave(folder: Path, seed: int, test: float | None, **more: Any) -> None:
    """Write what a run leaves, as far as it is compared; ``result``: further entries."""
    config = {"app": more.get("app", "fedgta"), "seed": seed, "rounds": 5}
    config |= {"model": {"hidden": more.get("hidden", 16)}, **more.get("config", {})}
    config["data"] = {"name": more.get("data", "cora-linqs"), "root": f"/home/{seed}"}
    result = {
        "config": config,
        "seed": seed,
        "rounds": 5,
        "test-accuracy-at-best-val": test,
        "best-val-accuracy": more.get("val", test),
        "bytes": {"up": {"weights": 2048, "counts": 1024}, "down": {"weights": 1024}},
        "seconds": {"total": more.get("seconds", 2.0)},
        "versions": {"flower-graph": "0.1.0"},
        "baselines": {"majority": {"test": 0.3}, "label-propagation": {"test": 0.75}},
    }
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result | more.get("result", {})))


def leave_seeds(folder: str, *tests: float, on: str | None = None, **more: Any) -> None:
    """Leave a run of several seeds; ``on``: the nodes that each is judged on."""
    for seed, test in enumerate(tests):
        judged = {} if on is None else {"judged-on": f"{on}-{seed}"}
        leave(Path(folder, f"seed-{seed}"), seed, test, result=judged, **more)


def compared_to_first(*runs: str) -> list[str]:
    return [row["run"] for row in fg.compare(*runs).rows if "difference" in row]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_less_of_an_error_the_better() -> None:
    for name, error in (("far", 9.0), ("near", 4.0)):
        for seed in (0, 1):
            result = {"best-val-mse": error + seed, "test-mse-at-best-val": error}
            result["baselines"] = {"mean": {"test": 8.0}, "linear-regression": {"test": 3.0}}
            config = {"metrics": ["mse", "mae"]}
            leave(Path("runs", name, f"seed-{seed}"), seed, None, result=result, config=config)
    compared = fg.compare("runs")
    near, far = compared.rows  # of one folder, the best by validation first
    assert (near["run"], far["run"]) == ("near", "far")
    assert (near["beaten"], far["beaten"]) == (["mean"], [])
    assert far["difference"]["mean"] == pytest.approx(5)
    for by in ("test", "val", "test-mse"):
        assert [row["run"] for row in compared.sorted(by).rows] == ["near", "far"]
    assert "the less of an error" in compared.to_text() and "accuracy" not in compared.to_text()


def test_runs_are_held_against_the_first_seed_by_seed() -> None:
    leave_seeds("a", *THEIRS)
    leave_seeds("b", *OURS, hidden=32)
    leave_seeds("c", *OURS[1:], app="ditto")
    compared = fg.compare("a", Path("b"), fg.load_run("c"))
    first, second, third = compared.rows
    assert [row["run"] for row in compared.rows] == ["a", "b", "c"]
    assert compared.differing == ["model.hidden"]
    assert "difference" not in first and first["beaten"] == ["majority"]
    assert second["beaten"] == ["majority", "label-propagation"]
    assert second["figures"]["test-accuracy"]["mean"] == pytest.approx(0.81)
    assert second["figures"]["test-accuracy"]["std"] == pytest.approx(0.01)
    assert (second["figures"]["up"]["mean"], second["figures"]["down"]["mean"]) == (3072, 1024)
    chances = [float(ttest_rel(ours, THEIRS[: len(ours)]).pvalue) for ours in (OURS, OURS[1:])]
    assert [row["difference"]["p"] for row in (second, third)] == pytest.approx(chances)
    assert [row["difference"]["holm"] for row in (second, third)] == pytest.approx(holm(chances))
    assert third["difference"]["seeds"] == [0, 1]


def test_what_has_no_seed_or_data_or_nodes_in_common_is_not_tested() -> None:
    leave(Path("a"), 0, 0.5)
    leave(Path("other-seed"), 1, 0.6)
    leave(Path("other-data"), 0, 0.6, data="PubMed")
    leave(Path("no-number"), 0, None)
    leave(Path("same"), 0, 0.6)
    assert compared_to_first("a", "other-seed", "other-data", "no-number", "same") == ["same"]
    assert fg.compare("a", "same").rows[1]["difference"]["p"] is None  # one seed tells no chance
    assert "difference" not in json.loads(fg.compare("same", "no-number").to_json())["runs"][1]
    # Where nobody knows all nodes, what says how they are drawn must be the same
    for name, on, clients in (
        *(("b", "these", 3), ("as-b", "these", 4), ("other", "those", 3)),
        *(("c", None, 3), ("as-c", None, 3), ("otherwise", None, 4)),
    ):
        leave_seeds(name, 0.5, 0.6, on=on, config={"partition": {"clients": clients}})
    assert compared_to_first("b", "as-b", "other") == ["as-b"]
    assert "no difference for 1" in fg.compare("b", "as-b", "other").to_text()
    assert compared_to_first("c", "as-c", "otherwise", "b") == ["as-c"]


def test_eight_settings_have_a_column_and_all_if_asked_for() -> None:
    for number in range(4):
        settings = {f"key{k}": number for k in range(12)}
        leave_seeds(f"runs/{number}", 0.5, 0.6, config={"partition": settings})
    compared = fg.compare("runs")
    assert sum("partition.key" in name for name in compared.table()) == 8
    assert sum("partition.key" in key for key in compared.table(all_settings=True)) == 12
    two = fg.compare("runs/0", "runs/1").to_text()
    assert "partition.key11" in two  # a line each
    assert "--all-settings" in compared.to_text() and "--all-settings" not in two


def test_a_folder_of_runs_is_a_table_that_can_be_sorted() -> None:
    for hidden in range(20):
        for seed in range(3):
            test = 0.5 + 0.01 * hidden + 0.001 * seed
            more = {"val": 0.9 - test, "seconds": (hidden - 7.0) ** 2}
            leave(Path(f"runs/deep/{hidden:02}-{seed}"), seed, test, hidden=hidden, **more)
    Path("runs/graphs").mkdir()
    compared = fg.compare("runs")
    assert [row["settings"]["model.hidden"] for row in compared.rows] == [*range(20)]
    assert compared.rows[0]["is-reference"] and compared.rows[0]["seeds"] == [0, 1, 2]
    assert compared.rows[1]["run"] == "deep/01-0 +2"
    for by, best in (("test", 19), ("val", 0), ("seconds", 7), ("model.hidden", 0), ("run", 0)):
        rows = compared.sorted(by).rows
        assert len(rows) == 20 and rows[0]["settings"]["model.hidden"] == best
        assert [row["run"] for row in rows if row["is-reference"]] == ["deep/00-0 +2"]
    with pytest.raises(ConfigError, match=r"model\.hiden"):
        fg.compare("runs", by="model.hiden")


def test_runs_that_cannot_be_read_are_named_and_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    leave_seeds("runs/good", 0.5, 0.6)
    Path("runs/good/seed-2").mkdir()
    leave(Path("runs/wrong"), 0, 0.5, result={"bytes": {"up": 3}})
    files = {"cut": '{"a": ', "other": "[1]", "no-seed": '{"config": {}}', "unfinished": ""}
    for name, text in files.items():
        Path("runs", name).mkdir()
        Path("runs", name, "result.json" if text else "metrics.jsonl").write_text(text)
    assert main(["compare", "runs"]) == 0
    shown = capsys.readouterr()
    named = ("good/seed-2", "wrong", *files)
    assert [name for name in named if f"runs/{name}" not in shown.err] == []
    assert len(shown.err.splitlines()) == len(named) and "0.550 ± 0.071" in shown.out
    for folder in ("runs/cut", "nowhere"):
        with pytest.raises(OutputError, match=folder):
            fg.compare(folder)


def test_the_command_prints_text_csv_and_json_and_draws(
    capsys: pytest.CaptureFixture[str],
) -> None:
    leave_seeds("a", *THEIRS)
    leave_seeds("b", *OURS, hidden=32)
    assert main(["compare", "a", "b", "--by", "test", "--picture", "both.png"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^model.hidden +32 +16$", text, re.MULTILINE)
    assert "2 of 2" in text and "1 of 2 (not label-propagation)" in text and "+0.090" in text
    assert imread("both.png").shape[1] > 300
    assert main(["compare", "a", "b", "--csv"]) == 0
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["test-accuracy"], second["model.hidden"]) == (str(sum(THEIRS) / 3), "32")
    assert float(second["difference"]) == pytest.approx(0.09) and first["p"] == ""
    assert main(["compare", "a", "b", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 2
    assert main(["compare", "a", "--picture", "both.svg"]) == 2
