"""The output folder: every file whole, every figure right, faults told before training."""

import errno
import json
import math
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.numpy import load_file

from flower_graph.config.common import CHECKPOINTS
from flower_graph.config.schema import flatten
from flower_graph.errors import OutputError
from flower_graph.method.load import load_config, to_dict
from flower_graph.method.registry import known_apps
from flower_graph.records.rounds import RoundReport, format_bytes, format_round, read_reports
from flower_graph.report.result import describe_baselines, describe_result, summarise
from flower_graph.report.writer import RunWriter
from flower_graph.storage.files import LOCK_FILE

CONFIG = to_dict(load_config("quickstart", ["rounds=4", "seed=3"]))
FINAL = {"clients": 10, "engine": "in-process"}
FILES = {"config.yaml", "metrics.jsonl", "result.json", "curves.png", "weights.safetensors"}


def report(number: int, **changes: Any) -> RoundReport:
    losses, shares = (2.0 / number, 1.5 / number, 0.25), (0.9, 0.1 * number, 0.1 * number - 0.05)
    sent = {"up": {"latent": 640 * number}, "down": {"gradient": 640 * (number - 1)}}
    wire = {"up": 1000 * number, "down": 900 * number}
    one = RoundReport(number, *losses, *shares, 10, 10, [], sent, wire, 0.5 * number)
    return replace(one, **changes)


def writing(out: Path, *reports: RoundReport, **how: Any) -> RunWriter:
    """Begin a run's folder, with some rounds."""
    writer = RunWriter(out, CONFIG, **how)
    for one in reports:
        writer.write_round(one)
    return writer


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.usefixtures("pictures")
def test_a_run_leaves_all_files_and_nothing_else(tmp_path: Path) -> None:
    one = writing(tmp_path / "one", report(1, confusion=((1, 0), (0, 1))))
    one.finish(FINAL)  # one round is no curve
    assert {path.name for path in one.out.glob("*.png")} == {"confusion.png"}
    writer = writing(tmp_path / "a" / "run", report(1, rejected=[{"node": 7, "reason": "NaN"}]))
    (line,) = lines(writer.out)  # there at once, not at the end
    assert (line["val-accuracy"], line["cross-entropy"]) == (0.1, 1.5)
    assert line["rejected"] == [{"node": 7, "reason": "NaN"}]
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
    assert read_reports(writer.metrics) == writer.reports


def test_result_figures(tmp_path: Path) -> None:
    writer = writing(
        tmp_path / "run",
        report(1, rejected=[{"node": 1, "reason": "late"}]),
        report(2, val_accuracy=0.8, test_accuracy=0.6),
        report(3, val_accuracy=0.8, test_accuracy=0.9),  # the first counts
        report(
            4,
            val_accuracy=0.7,
            test_accuracy=0.65,
            skipped="3 of 10 answered, 7 are needed",
            structure={"precision": 0.75, "true-degree": math.nan},
        ),
    )
    assert [line["skipped"] != "" for line in lines(writer.out)] == [False, False, False, True]
    result = writer.finish({**FINAL, "latent-rank": np.int64(5)})
    assert result["seconds"].pop("total") > 0
    expected = {
        **{"seed": 3, "rounds": 4, "clients": 10, "engine": "in-process", "latent-rank": 5},
        **{"test-accuracy": 0.65, "val-accuracy": 0.7, "loss": 0.5, "rejected": 1, "skipped": 1},
        **{"best-val-accuracy": 0.8, "test-accuracy-at-best-val": 0.6, "best-round": 2},
        "bytes": {"up": {"latent": 2560}, "down": {"gradient": 1920}},
        "wire-bytes": {"up": 4000, "down": 3600},
        "structure": {"precision": 0.75, "true-degree": None},
        "seconds": {"first-round": 0.5, "per-round-median": 1.25},
    }
    assert {key: result[key] for key in expected} == expected
    assert result["peak-memory-bytes"] > 2**24  # bytes, not kilobytes
    assert {*result["versions"]} == {"flower-graph", "flwr", "torch", "torch-geometric", "python"}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null(tmp_path: Path, loss: float) -> None:
    writer = writing(tmp_path / "run", report(1, loss=loss, val_accuracy=math.nan))
    assert lines(writer.out)[0]["loss"] is None
    result = writer.finish(FINAL)
    assert result["loss"] is None and result["test-accuracy-at-best-val"] is None
    assert "NaN" not in (writer.out / "result.json").read_text()
    assert math.isnan(read_reports(writer.metrics)[0].loss)


# Training goes well where the loss rises at first, overfits late, or wavers
@pytest.mark.parametrize(
    ("losses", "warnings"),
    [
        ((462.0, 6041, 734, 9000), 1),
        *(((2.0, one, one), 1) for one in (math.nan, math.inf)),
        *(((2.0, 7.6, 0.6), 0), ((2.0, 0.01, 0.9), 0), ((462.0, 12, 300), 0)),
    ],
)
def test_a_loss_that_rises_tenfold_or_is_no_number_warns_once_and_names_two_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, losses: tuple[float, ...], warnings: int
) -> None:
    rounds = [report(number, loss=loss) for number, loss in enumerate(losses, start=1)]
    keys = ("strategy.learning_rate", "strategy.reg_weight")
    writing(tmp_path / "run", *rounds, steadying=keys).close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings
    assert all(one.startswith("round 2") and " or ".join(keys) in one for one in said)


def test_every_method_names_settings_of_its_own_that_make_training_steadier() -> None:
    for config in (load_config(f"{app}/own-graph") for app in known_apps()):
        keys, settings = config.steadying, dict(flatten(to_dict(config)))
        assert 1 <= len(keys) <= 2 and all(settings[key] is not None for key in keys)


# Folders -----------------------------------------------------------------------------------------


def test_an_existing_run_is_refused_and_left_alone_but_an_empty_folder_is_taken(
    tmp_path: Path,
) -> None:
    (tmp_path / LOCK_FILE).write_text("of a run that was killed")
    writing(tmp_path).close()
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "config.yaml").write_text("mine")
    with pytest.raises(OutputError) as caught:
        writing(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_run_without_a_round_leaves_no_folder(tmp_path: Path) -> None:
    writer = writing(tmp_path / "runs" / "mine")
    with pytest.raises(OutputError):  # a result needs a round
        writer.finish(FINAL)
    (writer.out / CHECKPOINTS / "round-000001").mkdir(parents=True)  # the clients' half
    writer.close()
    assert [*tmp_path.iterdir()] == []
    writing(tmp_path / "runs" / "mine", report(1)).close()
    names = {path.name for path in (tmp_path / "runs" / "mine").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_a_folder_that_cannot_be_written_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError) as caught:
        writing(tmp_path / "run")
    assert str(caught.value) == f"cannot write {tmp_path / 'run'}: {os.strerror(code)}"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path) -> None:
    writer = writing(tmp_path / "run", report(1))
    size = writer.metrics.stat().st_size
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files cuts a write short, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        with pytest.raises(OutputError, match=r"metrics\.jsonl"):
            writer.write_round(report(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert writer.metrics.stat().st_size == size
    assert len(lines(writer.out)) == 1


# Going on ----------------------------------------------------------------------------------------


def test_resuming_keeps_earlier_rounds_and_drops_later_ones(tmp_path: Path) -> None:
    whole = writing(tmp_path / "whole", *map(report, (1, 2, 3)))
    first = writing(tmp_path / "run", report(1), report(2), report(3, test_accuracy=0.0))
    with first.metrics.open("a") as file:
        file.write('{"round": 4, "loss": 0.')  # torn by a crash
    first.close()
    second = writing(tmp_path / "run", report(3), resume_round=lambda: 2)
    assert lines(second.out) == lines(whole.out)
    result, expected = second.finish(FINAL), whole.finish(FINAL)
    assert result["seconds"]["total"] >= 0.5 + 1.0  # the rounds before count too
    assert {k for k in expected if result[k] != expected[k]} <= {"seconds", "peak-memory-bytes"}
    # The checkpoint of round 3 is damaged, that of round 1 is not.
    writing(tmp_path / "run", report(2), resume_round=lambda: 3).close()
    assert [one.round for one in read_reports(second.metrics)] == [1, 2]


def test_resuming_changes_nothing_until_a_round_is_done(tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        files = (path for path in tmp_path.iterdir() if path.name != LOCK_FILE)
        return {path.name: path.read_bytes() for path in files}

    writing(tmp_path, report(1), report(2)).finish(FINAL)
    before = contents()
    second = RunWriter(tmp_path, {**CONFIG, "rounds": 5}, resume_round=lambda: 1)
    assert contents() == before  # the checkpoint may yet be refused
    second.write_round(report(2, loss=9.0))
    assert [line["loss"] for line in lines(tmp_path)] == [2.0, 9.0]
    assert "rounds: 5" in (tmp_path / "config.yaml").read_text()
    assert not (tmp_path / "result.json").exists()  # it is the result of another run


@pytest.mark.usefixtures("pictures")
def test_a_result_is_there_before_its_pictures(tmp_path: Path) -> None:
    second = report(2, confusion=[[1, 0], [0, 1]])
    writer = writing(tmp_path, report(1), second)
    (tmp_path / "curves.png").mkdir()  # no picture can be there
    with pytest.raises(OutputError):
        writer.finish({}, {"w": np.ones(3)})
    writer.close()
    (tmp_path / "curves.png").rmdir()
    assert {"result.json", "weights.safetensors"} <= {path.name for path in tmp_path.iterdir()}


def test_resuming_without_the_rounds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(OutputError, match="No such file"):
        writing(tmp_path / "run", resume_round=lambda: 1)
    writer = writing(tmp_path / "run", report(1))
    writer.close()
    writer.write_round(report(3))
    with pytest.raises(OutputError, match=r"rounds 1.*3"):
        writing(tmp_path / "run", resume_round=lambda: 3)
    writer.metrics.write_text('{"round": 1\n' + writer.metrics.read_text())
    with pytest.raises(OutputError, match="line 1"):
        writing(tmp_path / "run", resume_round=lambda: 1)


# Several seeds, and figures as text --------------------------------------------------------------


def test_summary_of_three_seeds(tmp_path: Path) -> None:
    same = {"bytes": {"up": {"latent": 100}, "down": {}}, "engine": "in-process", "ok": True}
    results = [
        same | {"config": {"seed": k, "model": {"name": "gcn"}}, "best-round": best, "loss": loss}
        for k, loss, best in ((0, 0.7, 3), (1, 0.8, None), (2, 0.9, 5))
    ]
    summary = summarise(tmp_path, results)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    near = {"mean": pytest.approx(0.8), "std": pytest.approx(0.1)}  # n - 1, not n
    assert summary == {
        "bytes": {"up": {"latent": {"mean": 100, "std": 0, "values": [100] * 3}}, "down": {}},
        "engine": "in-process",
        "ok": True,
        "config": {"seed": {"mean": 1, "std": 1, "values": [0, 1, 2]}, "model": {"name": "gcn"}},
        "best-round": {"mean": None, "std": None, "values": [3, None, 5]},
        "loss": {**near, "values": [0.7, 0.8, 0.9]},
    }
    assert summarise(tmp_path, [{"loss": 2.0}])["loss"] == {"mean": 2, "std": 0, "values": [2]}


GIVEN = {"majority": {"test": 0.3}, "majority-per-client": {"test": 0.4}}
GIVEN["logistic-regression"] = {"test": 0.5}


@pytest.mark.parametrize(
    ("accuracy", "not_better"), [(0.51, 0), (0.5, 1), (0.41, 1), (0.4, 2), (0.1, 3), (math.nan, 0)]
)
def test_last_lines_say_what_a_run_is_not_better_than(
    accuracy: float, not_better: int, tmp_path: Path
) -> None:
    """NaN: withheld."""
    writer = writing(tmp_path / "run", report(1, test_accuracy=accuracy))
    result = writer.finish({**FINAL, "baselines": GIVEN})
    for figures in (result, summarise(tmp_path, [result, {**result, "seed": 4}])):
        text = describe_result("quickstart", figures, tmp_path)
        (line,) = [one for one in text.splitlines() if "not better" in one] or [""]
        assert line.partition("; ")[0].count(", ") == max(0, not_better - 1)
        assert ("strategy.learning_rate=" in line) == (not_better > 0)
    assert describe_baselines({"baselines": {"majority": {"test": math.nan}}}) == []


@pytest.mark.parametrize(
    ("settings", "saved"),
    [({}, "the last round"), ({"keep": "best"}, "the best round"), ({"save": "none"}, "")],
)
def test_last_lines_have_figures_and_the_round_that_was_saved(
    settings: dict[str, str], saved: str, tmp_path: Path
) -> None:
    writer = RunWriter(tmp_path / "run", CONFIG | settings)
    for one in (report(1), report(2), report(3, val_accuracy=0.1, test_accuracy=0.05)):
        writer.write_round(one)
    result = writer.finish({**FINAL, "clients": 2})
    text = describe_result("quickstart", result, tmp_path, ("user", "users"))
    for words in ("2 users, 3 rounds, seed 3", "test 0.150 at the best validation (0.200)"):
        assert words in text
    assert "up 1.9 KiB, down 1.2 KiB in all" in text and "up 960 B, down 640 B per user" in text
    line = next((line for line in text.splitlines() if "  saved " in line), "")
    assert saved in line and bool(line) == bool(saved)
    other = {**result, "seed": 4, "test-accuracy": 0.15}
    several = describe_result("quickstart", summarise(tmp_path, [result, other]), tmp_path)
    assert "seed 3, 4" in several and "test 0.100 ± 0.071 after the last round" in several


def test_round_line() -> None:
    numbers = (0, 1023, 1024, 2**20 - 1, 34_662_400, 2**50)
    texts = ["0 B", "1023 B", "1.0 KiB", "1.0 MiB", "33.1 MiB", "1024.0 TiB"]
    assert [*map(format_bytes, numbers)] == texts
    bad = report(12, loss=math.nan, answered=8, rejected=[{"node": 3, "reason": "NaN in latent"}])
    line = format_round(replace(bad, skipped="too few"), 200, "users")
    for words in ("12/200", "LOSS nan", "8/10 users", "1 rejected: NaN in latent", "too few"):
        assert words in line
