"""Folders of runs that somebody spoiled: every command that reads one ends in a named error."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hostile_files import ODD, in_json, in_lines, places_in

import flower_graph as fg
from flower_graph import errors
from flower_graph.apps.cli.main import main
from flower_graph.records.participation import MOST_CLIENTS, check_records
from flower_graph.records.rounds import RoundReport, read_reports

SMALL = {
    **dict.fromkeys(("strategy.local_epochs", "rounds"), 2),
    "data": {"name": "csbm", "nodes": 120, "classes": 3, "num_features": 40},
    "data.ratios": [0.4, 0.3, 0.3],
    "partition": {"clients": 2, "method": "random"},
    "model.hidden": 4,
    "metrics": ["accuracy", "macro-f1"],
    "checkpoint_every": 1,
}
LINES, RESULT = "metrics.jsonl", "result.json"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    fg.run("fedgls/cora-linqs", {**SMALL, "graph.neighbours": 3}, out=folder, quiet=True)
    return folder


def spoil(folder: Path, draw: random.Random) -> str:
    """Spoil one entry of one file; give its name."""
    name = draw.choice([LINES, LINES, LINES, RESULT, RESULT, "data.json"])
    change = in_lines if name == LINES else in_json
    (folder / name).write_bytes(change((folder / name).read_bytes(), draw))
    return name


def commands(folder: Path, out: Path) -> list[list[str]]:
    run = str(folder)
    return [
        ["report", run, "--out", str(out / "page.html")],
        ["compare", run, run],
        ["predict", run, "--client", "0"],
        ["run", "--resume", run, "--quiet"],
    ]


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(one, marks=(pytest.mark.slow, pytest.mark.release)) for one in range(1, 30)),
    ],
)
def test_commands_that_read_a_spoiled_run_end_in_a_page_or_a_named_error(
    seed: int, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    for number in range(8):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(honest, folder)
        done = [spoil(folder, draw) for _ in range(draw.choice([1, 1, 2]))]
        command = commands(folder, tmp_path)[number % 3 if draw.random() < 0.9 else 3]
        assert main(command) in (0, 1, 2), (command[0], done)
        capsys.readouterr()


def test_every_entry_of_a_round_has_its_type(honest: Path, tmp_path: Path) -> None:
    """All places of an honest line, each with all that is odd: read, or refused by the file."""
    line = json.loads((honest / LINES).read_text().splitlines()[0])
    path = tmp_path / LINES
    refused = 0
    for holder, key in list(places_in(line)):
        before = holder[key]
        for holder[key] in ODD:
            path.write_text(json.dumps(line) + "\n")
            try:
                read_reports(path)
            except errors.OutputError as error:
                assert str(path) in str(error)
                refused += 1
        holder[key] = before
    assert refused > 500


def test_numbers_of_many_clients_take_no_memory(tmp_path: Path, honest: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    lines = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    for line in lines:
        line["participation"]["answered"] = "0-200000000"
    (folder / LINES).write_text("\n".join(map(json.dumps, lines)) + "\n")
    code = "import sys; from flower_graph.apps.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "report", str(folder), "--out", str(tmp_path / "a.html")]
    limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2 and "metrics.jsonl" in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


def test_many_clients_in_many_rounds_are_counted_together() -> None:
    def record(text: str) -> dict[str, Any]:
        return {"asked": text, "answered": text, "failed": [], "left-out": []}

    check_records([record("0-5,7"), record("6,8-9"), {}])
    half = MOST_CLIENTS // 2
    check_records([record(f"0-{half - 1}"), record(f"{half}-{2 * half - 1}")])
    check_records(
        [record(str(2**62)), record(f"{2**63 - 2}-{2**63 - 1}")]
    )  # claimed by a SuperNode
    for bad in (
        "1-",
        "a",
        "3,2",
        "1-1",
        " 1",
        "1,,2",
        "0-" + "9" * 30,
        f"0-{2**63 - 1}",
        str(2**63),
    ):
        with pytest.raises(ValueError):
            check_records([record(bad)])
    with pytest.raises(ValueError):
        check_records([record(f"0-{half}"), record(f"{half}-{2 * half}")])


PLANTED = [
    ".probe", ".running", ".partial-result.json", ".partial-metrics.jsonl", ".config.yaml.1",
    "checkpoints", "clients", "rows", "rows/users-0.rows", "metrics.jsonl", "weights.safetensors",
    "checkpoints/round-000001", "checkpoints/round-000002/server.safetensors", "seed-0",
    "tensorboard",
]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_foreign_run_that_is_resumed_writes_nothing_elsewhere(
    name: str, honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its author has made a link: the command names it, and its target stays."""
    home, folder = tmp_path / "home", tmp_path / "run"
    (home / "inner").mkdir(parents=True)
    (home / ".bashrc").write_text("mine")
    shutil.copytree(honest, folder)
    (folder / RESULT).unlink()
    link = folder / name
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    is_folder = name in ("checkpoints", "clients", "rows", "seed-0", "tensorboard")
    link.symlink_to(home / "inner" if is_folder or "round-000001" in name else home / ".bashrc")
    assert main(["run", "--resume", str(folder), "--quiet", "rounds=3"]) == 2
    assert name.partition("/")[0] in capsys.readouterr().err
    assert (home / ".bashrc").read_text() == "mine" and not [*(home / "inner").iterdir()]
    assert sorted(path.name for path in home.iterdir()) == [".bashrc", "inner"]


def test_a_person_may_name_a_run_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path / "link")
    out = tmp_path / "link" / "run"
    more = {"graph.neighbours": 3, "checkpoint_every": 1}
    fg.run("fedgls/cora-linqs", {**SMALL, **more}, out=Path("run"), quiet=True)
    (out / RESULT).unlink()
    assert main(["run", "--resume", str(out), "--quiet", "rounds=3"]) == 0
    assert (tmp_path / "disk" / "run" / RESULT).exists()
    assert main(["report", str(out), "--out", str(tmp_path / "link" / "page.html")]) == 0
    assert (tmp_path / "disk" / "page.html").exists()


def test_a_folder_of_no_seed_is_none(honest: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(honest, folder)
    for name in ("seed-\u00b2", "seed-x", "seed-\u0663"):
        (folder / name).mkdir()
    (folder / RESULT).unlink()
    assert main(["run", "--resume", str(folder), "--quiet"]) == 0


def test_honest_rounds_are_read_as_they_were(honest: Path) -> None:
    reports = read_reports(honest / LINES)
    lines = [json.loads(line) for line in (honest / LINES).read_text().splitlines()]
    again = [RoundReport.from_record(json.loads(json.dumps(one.to_record()))) for one in reports]
    assert [one.round for one in reports] == [line["round"] for line in lines]
    assert [json.dumps(one.to_record()) for one in again] == [
        json.dumps(one.to_record()) for one in reports
    ]
