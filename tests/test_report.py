"""The output folder: every file whole, every figure right, faults told before training."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from omegaconf import OmegaConf
from safetensors.numpy import load_file

from flower_graph.config.load import load_config, to_dict
from flower_graph.config.registry import method_named
from flower_graph.errors import OutputError
from flower_graph.report.plots.base import CurveSet, plot_grid, save_curves
from flower_graph.report.result import _join, summarise
from flower_graph.report.rounds import RoundReport, read_reports
from flower_graph.report.text import describe_result, format_bytes, format_round
from flower_graph.report.writer import RunWriter, _title
from flower_graph.storage import files
from flower_graph.storage.files import LOCK_FILE, FolderLock

CONFIG = to_dict(load_config("quickstart", ["rounds=4", "seed=3"]))
FINAL = {"clients": 10, "engine": "in-process"}
FILES = {"config.yaml", "metrics.jsonl", "result.json", "curves.png", "weights.safetensors"}


def report(number: int, **changes: Any) -> RoundReport:
    values: dict[str, Any] = {
        "round": number,
        "loss": 2.0 / number,
        "cross_entropy": 1.5 / number,
        "regulariser": 0.25,
        "train_accuracy": 0.9,
        "val_accuracy": 0.1 * number,
        "test_accuracy": 0.1 * number - 0.05,
        "asked": 10,
        "answered": 10,
        "bytes": {"up": {"latent": 640 * number}, "down": {"gradient": 640 * (number - 1)}},
        "wire_bytes": {"up": 1000 * number, "down": 900 * number},
        "seconds": 0.5 * number,
    }
    return RoundReport(**{**values, **changes})


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_a_run_leaves_all_files_and_nothing_else(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a" / "run", CONFIG)
    writer.write_round(report(1))
    assert len(lines(writer.out)) == 1  # there at once, not at the end
    writer.write_round(report(2))
    weight = torch.arange(6.0).reshape(2, 3).T.requires_grad_()  # not contiguous
    returned = writer.finish(FINAL, {"users": weight, "scale": np.float32(2)})
    assert {path.name for path in writer.out.iterdir()} == FILES
    assert not {"structure", "alignment"} & {*returned}
    assert OmegaConf.to_container(OmegaConf.load(writer.out / "config.yaml")) == CONFIG
    assert json.loads((writer.out / "result.json").read_text()) == returned
    weights = load_file(writer.out / "weights.safetensors")
    np.testing.assert_array_equal(weights["users"], [[0, 3], [1, 4], [2, 5]])
    assert weights["scale"].shape == () and weights["scale"] == 2


def test_a_run_that_compares_graphs_leaves_their_picture_and_the_last_figures(
    tmp_path: Path,
) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG, draw=method_named("fedgls").draw)
    writer.write_round(report(1, structure={"precision": 0.5, "true-degree": 4.0}))
    writer.write_round(report(2, structure={"precision": 0.75, "true-degree": 4.0}))
    returned = writer.finish(FINAL)
    assert returned["structure"] == {"precision": 0.75, "true-degree": 4.0}
    assert [line["structure"]["precision"] for line in lines(writer.out)] == [0.5, 0.75]
    named = {path.name for path in writer.out.iterdir()}
    assert named == (FILES | {"structure.png"}) - {"weights.safetensors"}
    assert read_reports(writer.metrics) == writer.reports


def test_a_run_that_aligns_embeddings_leaves_their_picture_and_the_last_figures(
    tmp_path: Path,
) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG, draw=method_named("ppfl").draw)
    writer.write_round(report(1, alignment={"precision-1": 0.5}))
    writer.write_round(report(2, alignment={"precision-1": 0.75, "precision-5": math.nan}))
    returned = writer.finish(FINAL)
    assert returned["alignment"] == {"precision-1": 0.75, "precision-5": None}
    assert lines(writer.out)[0]["alignment"] == {"precision-1": 0.5}
    named = {path.name for path in writer.out.iterdir()}
    assert named == (FILES | {"alignment.png"}) - {"weights.safetensors"}


def test_metrics_line_has_the_report_under_hyphened_keys(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    writer.write_round(report(1, rejected=[{"node": 7, "reason": "NaN"}]))
    (line,) = lines(writer.out)
    assert line["val-accuracy"] == 0.1 and line["cross-entropy"] == 1.5
    assert line["wire-bytes"] == {"up": 1000, "down": 900}
    assert line["rejected"] == [{"node": 7, "reason": "NaN"}]
    assert read_reports(writer.metrics) == writer.reports


def test_result_figures(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    writer.write_round(report(1, rejected=[{"node": 1, "reason": "late"}]))
    writer.write_round(report(2, val_accuracy=0.8, test_accuracy=0.6))
    writer.write_round(report(3, val_accuracy=0.8, test_accuracy=0.9))  # a tie: the first counts
    writer.write_round(report(4, val_accuracy=0.7, test_accuracy=0.65))
    result = writer.finish({**FINAL, "latent-rank": np.int64(5)})
    assert (result["seed"], result["rounds"], result["clients"]) == (3, 4, 10)
    assert (result["test-accuracy"], result["val-accuracy"]) == (0.65, 0.7)
    assert (result["best-val-accuracy"], result["test-accuracy-at-best-val"]) == (0.8, 0.6)
    assert (result["best-round"], result["loss"], result["rejected"]) == (2, 0.5, 1)
    assert result["bytes"] == {"up": {"latent": 2560}, "down": {"gradient": 1920}}
    assert result["wire-bytes"] == {"up": 4000, "down": 3600}
    assert result["seconds"]["first-round"] == 0.5
    assert result["seconds"]["per-round-median"] == 1.25
    assert result["seconds"]["total"] > 0
    assert result["peak-memory-bytes"] > 2**24  # bytes, not kilobytes
    assert result["latent-rank"] == 5 and result["engine"] == "in-process"
    assert set(result["versions"]) == {
        "flower-graph",
        "flwr",
        "torch",
        "torch-geometric",
        "python",
    }


def test_seconds_by_part_of_the_round(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    # The first round also aligns; the others do not name that part.
    writer.write_round(report(1, parts={"train": 0.5, "align": 3.0}))
    writer.write_round(report(2, parts={"train": 0.25}))
    writer.write_round(report(3, parts={"train": 1.0}))
    assert lines(writer.out)[0]["parts"] == {"train": 0.5, "align": 3.0}
    assert writer.finish(FINAL)["seconds"]["parts"] == {
        "train": {"total": 1.75, "per-round-median": 0.5},
        "align": {"total": 3.0, "per-round-median": 0.0},
    }


def test_skipped_rounds_are_told_and_counted(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    writer.write_round(report(1))
    writer.write_round(report(2, skipped="3 of 10 clients answered, 7 are needed"))
    assert [line["skipped"] != "" for line in lines(writer.out)] == [False, True]
    result = writer.finish(FINAL)
    assert result["skipped"] == 1
    assert "parts" not in result["seconds"]
    assert "skipped: 3 of 10 clients answered" in format_round(writer.reports[1], 4)
    assert "skipped" not in format_round(writer.reports[0], 4)


def test_rounds_of_an_older_version_are_read() -> None:
    old = report(1).to_record()
    del old["parts"], old["skipped"]
    assert RoundReport.from_record(old) == report(1)
    del old["loss"]
    with pytest.raises(TypeError, match="loss"):
        RoundReport.from_record(old)


def test_a_picture_is_named_after_what_sets_the_run_apart() -> None:
    assert _title(CONFIG) == "nfedgnn · cora-linqs · gcn · seed 3"
    config = to_dict(load_config("fedscem/cora", ["strategy.name=fedavg"]))
    assert _title(config) == "fedscem · Cora · fedavg · seed 0"


def test_a_result_needs_a_round(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no round was run"):
        RunWriter(tmp_path / "run", CONFIG).finish(FINAL)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: float
) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3):
            writer.write_round(report(number, loss=loss, val_accuracy=math.nan))
    assert [record.getMessage() for record in caplog.records] == [
        f"round 1: the loss is {loss}; files have null for it"
    ]
    assert lines(writer.out)[0]["loss"] is None
    result = writer.finish(FINAL)
    assert result["loss"] is None and result["test-accuracy-at-best-val"] is None
    assert "NaN" not in (writer.out / "result.json").read_text()
    assert math.isnan(read_reports(writer.metrics)[0].loss)


def test_an_existing_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"exists and is not empty; choose another") as caught:
        RunWriter(tmp_path, CONFIG)
    assert str(tmp_path) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    RunWriter(tmp_path, CONFIG).close()
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_file_in_the_way_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="file: is a file, not a folder"):
        RunWriter(tmp_path / "file", CONFIG)
    with pytest.raises(OutputError, match="Not a directory"):
        RunWriter(tmp_path / "file" / "run", CONFIG)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(path: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "_probe", fail)
    with pytest.raises(OutputError) as caught:
        RunWriter(tmp_path / "run", CONFIG)
    assert str(caught.value) == f"cannot write {tmp_path / 'run'}: {os.strerror(code)}"
    assert not (tmp_path / "run").exists()


def test_a_full_disk_shows_in_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        RunWriter(tmp_path / "run", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    writer.write_round(report(1))
    size = writer.metrics.stat().st_size
    # A limit on the size of files cuts a write short, as a full disk does.
    script = (
        "import resource, signal, sys; from pathlib import Path;"
        "from flower_graph.storage.files import append_line;"
        "from flower_graph.errors import OutputError;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 20}, {size + 20}));\n"
        "try: append_line(Path(sys.argv[1]), {'round': 2, 'text': 'x' * 100})\n"
        "except OutputError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(writer.metrics)],
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot write" in done.stdout and "metrics.jsonl" in done.stdout
    assert writer.metrics.stat().st_size == size
    assert len(lines(writer.out)) == 1


def test_a_fault_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    with pytest.raises(KeyboardInterrupt), files.atomic(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert json.loads(path.read_text()) == {"a": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_resuming_keeps_earlier_rounds_and_drops_later_ones(tmp_path: Path) -> None:
    whole = RunWriter(tmp_path / "whole", CONFIG)
    first = RunWriter(tmp_path / "run", CONFIG)
    for number in (1, 2, 3):
        whole.write_round(report(number))
        first.write_round(
            report(number, test_accuracy=0.0 if number == 3 else report(number).test_accuracy)
        )
    with first.metrics.open("a") as file:
        file.write('{"round": 4, "loss": 0.')  # torn by a crash
    first.close()
    second = RunWriter(tmp_path / "run", CONFIG, resume_round=2)
    second.write_round(report(3))
    assert lines(second.out) == lines(whole.out)
    result, expected = second.finish(FINAL), whole.finish(FINAL)
    assert result["seconds"]["total"] >= 0.5 + 1.0  # the rounds before count too
    for changing in ("seconds", "peak-memory-bytes"):
        result.pop(changing), expected.pop(changing)
    assert result == expected


def test_resuming_changes_nothing_until_a_round_is_done(tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        found.pop(LOCK_FILE, None)
        return found

    first = RunWriter(tmp_path, CONFIG)
    for number in (1, 2):
        first.write_round(report(number))
    first.finish(FINAL)
    before = contents()
    second = RunWriter(tmp_path, {**CONFIG, "rounds": 5}, resume_round=1)
    assert contents() == before  # the checkpoint may yet be refused
    second.write_round(report(2, loss=9.0))
    assert [line["loss"] for line in lines(tmp_path)] == [2.0, 9.0]
    assert "rounds: 5" in (tmp_path / "config.yaml").read_text()
    assert not (tmp_path / "result.json").exists()  # it is the result of another run


def test_resuming_without_the_rounds_is_refused(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    writer.close()
    with pytest.raises(OutputError, match="No such file"):
        RunWriter(tmp_path / "run", CONFIG, resume_round=1)
    writer.write_round(report(1))
    writer.write_round(report(3))
    with pytest.raises(OutputError, match="rounds 1 to 3 are needed to resume"):
        RunWriter(tmp_path / "run", CONFIG, resume_round=3)
    writer.metrics.write_text('{"round": 1\n' + writer.metrics.read_text())
    with pytest.raises(OutputError, match="line 1 is not a round's report"):
        RunWriter(tmp_path / "run", CONFIG, resume_round=1)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1)


@given(loss=numbers, val=numbers, up=st.integers(0, 2**62), number=st.integers(1, 10**6))
def test_reports_come_back_from_json(loss: float, val: float, up: int, number: int) -> None:
    sent = report(number, loss=loss, val_accuracy=val, bytes={"up": {"latent": up}, "down": {}})
    text = json.dumps(files.plain(sent.to_record()), allow_nan=False)
    back = RoundReport.from_record(json.loads(text))
    for name in ("loss", "val_accuracy"):
        old, new = getattr(sent, name), getattr(back, name)
        assert new == old or (math.isnan(new) and not math.isfinite(old))
    assert (back.bytes, back.round) == (sent.bytes, sent.round)


def test_summary_of_three_seeds(tmp_path: Path) -> None:
    results = [
        {
            "config": {"seed": seed, "model": {"name": "gcn"}},
            "test-accuracy": accuracy,
            "bytes": {"up": {"latent": 100}, "down": {}},
            "best-round": best,
            "engine": "in-process",
            "ok": True,
        }
        for seed, accuracy, best in ((0, 0.7, 3), (1, 0.8, None), (2, 0.9, 5))
    ]
    summary = summarise(tmp_path, results)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["test-accuracy"]["mean"] == pytest.approx(0.8)
    assert summary["test-accuracy"]["std"] == pytest.approx(0.1)  # n - 1, not n
    assert summary["test-accuracy"]["values"] == [0.7, 0.8, 0.9]
    assert summary["bytes"] == {
        "up": {"latent": {"mean": 100, "std": 0, "values": [100, 100, 100]}},
        "down": {},
    }
    assert summary["best-round"] == {"mean": None, "std": None, "values": [3, None, 5]}
    assert summary["config"]["seed"]["values"] == [0, 1, 2]
    assert summary["config"]["model"] == {"name": "gcn"}
    assert summary["engine"] == "in-process" and summary["ok"] is True


def test_summary_of_one_seed_and_of_none(tmp_path: Path) -> None:
    assert summarise(tmp_path, [{"loss": 2.0}])["loss"] == {"mean": 2, "std": 0, "values": [2]}
    with pytest.raises(ValueError, match="at least one"):
        summarise(tmp_path, [])


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=6))
def test_summary_agrees_with_numpy(values: list[float]) -> None:
    joined = _join([{"x": value} for value in values])["x"]
    assert joined["mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert joined["std"] == pytest.approx(statistics.stdev(values), abs=1e-6)


def test_round_line() -> None:
    line = format_round(
        report(12, loss=1.2344, val_accuracy=0.7123, test_accuracy=0.703, seconds=0.021),
        200,
        "users",
    )
    assert line == (
        "round  12/200  loss 1.234  val 0.712  test 0.703  10/10 users"
        "  up 7.5 KiB  down 6.9 KiB  0.02 s"
    )


def test_round_line_says_what_is_wrong() -> None:
    bad = report(1, loss=math.nan, answered=8, rejected=[{"node": 3, "reason": "NaN in latent"}])
    line = format_round(bad, 10, "users")
    assert "LOSS nan" in line and "8/10 users" in line and "1 rejected: NaN in latent" in line


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (34_662_400, "33.1 MiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_bytes_are_written_with_binary_units(number: int, text: str) -> None:
    assert format_bytes(number) == text


def test_final_summary_of_one_and_of_several(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG)
    writer.write_round(report(1))
    result = writer.finish({"clients": 2, "engine": "in-process"})
    text = describe_result("quickstart", result, writer.out, ("user", "users"))
    assert text.startswith("quickstart: 2 users, 1 rounds, seed 3\n")
    assert "test 0.050 at the best validation (0.100)" in text
    assert "up 640 B, down 0 B in all; up 320 B, down 0 B per user" in text
    assert text.endswith(f"outputs   {writer.out}")
    other = {**result, "seed": 4, "test-accuracy": 0.15}
    text = describe_result("quickstart", summarise(tmp_path, [result, other]), tmp_path)
    assert "seeds 3, 4" in text and "test 0.100 ± 0.071 after the last round" in text


@pytest.mark.parametrize("count", [1, 4])
def test_curves_are_a_picture_even_of_bad_runs(tmp_path: Path, count: int) -> None:
    reports = [
        report(number, loss=math.nan, test_accuracy=math.inf) for number in range(1, count + 1)
    ]
    save_curves(tmp_path / "curves.png", reports, title="test")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[0] > 300 and picture.shape[1] > 3 * picture.shape[0]
    assert np.unique(picture).size > 10


def test_grid_draws_every_method_and_the_reference(tmp_path: Path) -> None:
    flat = CurveSet(accuracy=[[0.2, 0.4], [0.4, 0.6, 0.7]], loss=[[2.0, 1.0], [2.0, 1.5, 1.0]])
    columns = {"Cora": {"nFedGNN": flat}, "PubMed": {"nFedGNN": flat, "CNFGNN": flat}}
    plot_grid(tmp_path / "plain.png", columns)
    plot_grid(tmp_path / "grey.png", columns, {"Cora": 0.8})
    without, grey = imread(tmp_path / "plain.png"), imread(tmp_path / "grey.png")
    assert without.shape == grey.shape and not np.array_equal(without, grey)


def test_grid_refuses_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one data set"):
        plot_grid(tmp_path / "x.png", {})
    with pytest.raises(ValueError, match="Cora, nFedGNN: a curve without rounds"):
        plot_grid(tmp_path / "x.png", {"Cora": {"nFedGNN": CurveSet([[]], [[1.0]])}})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    first = RunWriter(tmp_path / "out", {})
    first.write_round(report(1))
    said = rf"out: another run writes there \(process {os.getpid()} on .*\); wait for its end"
    with pytest.raises(OutputError, match=said):
        RunWriter(tmp_path / "out", {}, resume_round=1)
    first.close()
    first.close()
    again = RunWriter(tmp_path / "out", {}, resume_round=1)
    with pytest.raises(OutputError, match="another run writes there"):
        RunWriter(tmp_path / "out", {}, resume_round=1)
    again.close()
    assert not list((tmp_path / "out").glob(".*"))


def test_a_run_that_was_killed_stands_in_nobodys_way(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path;"
        "from flower_graph.storage.files import FolderLock;"
        "lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    with pytest.raises(OutputError, match=rf"process {child.pid} on"):
        FolderLock(tmp_path)
    child.kill()
    child.wait()
    assert (tmp_path / LOCK_FILE).exists()
    FolderLock(tmp_path).release()
    assert not list(tmp_path.iterdir())


def test_a_run_that_falls_back_drops_the_rounds_after(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "out", {})
    for number in range(1, 7):
        writer.write_round(report(number))
    writer.close()
    again = RunWriter(tmp_path / "out", {}, resume_round=6)
    again.write_round(report(5))  # the checkpoint of round 6 was damaged, that of 4 was not
    again.close()
    assert [one.round for one in read_reports(tmp_path / "out" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
    ]
