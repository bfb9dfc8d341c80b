"""Folders of runs that somebody spoiled: every command that reads one ends in a named error."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_files import in_json, in_lines

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.records.participation import MOST_CLIENTS, check_records

SMALL = {
    **dict.fromkeys(("strategy.local_epochs", "rounds"), 2),
    "data": {"name": "csbm", "nodes": 120, "classes": 3, "num_features": 40},
    "data.ratios": [0.4, 0.3, 0.3],
    "partition": {"clients": 2, "method": "random"},
    "model.hidden": 4,
    "metrics": ["accuracy", "macro-f1"],
    "checkpoint_every": 1,
    "graph.neighbours": 3,
}
LINES, RESULT = "metrics.jsonl", "result.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    fg.run("fedgls/cora-linqs", SMALL, out=folder, quiet=True)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Copy an honest run, to be spoiled."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def spoil(folder: Path, draw: random.Random) -> str:
    """Spoil one entry of one file; give its name."""
    name = draw.choice([LINES, LINES, LINES, RESULT, RESULT, "data.json"])
    change = in_lines if name == LINES else in_json
    (folder / name).write_bytes(change((folder / name).read_bytes(), draw))
    return name


LATER = [pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.release]) for seed in range(1, 30)]


@pytest.mark.parametrize("seed", [0, *LATER])
def test_commands_that_read_a_spoiled_run_end_in_a_page_or_a_named_error(
    seed: int, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    for number in range(8):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(made, folder)
        done = [spoil(folder, draw) for _ in range(draw.choice([1, 1, 2]))]
        run = str(folder)
        commands = [
            ["report", run, "--out", str(tmp_path / "page.html")],
            ["compare", run, run],
            ["predict", run, "--client", "0"],
        ]
        resume = ["run", "--resume", run, "--quiet"]
        command = commands[number % 3] if draw.random() < 0.9 else resume
        assert main(command) in (0, 1, 2), (command[0], done)
        capsys.readouterr()


def test_numbers_of_many_clients_take_no_memory(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    for line in lines:
        line["participation"]["answered"] = "0-200000000"
    (folder / LINES).write_text("\n".join(map(json.dumps, lines)) + "\n")
    command = [sys.executable, "-m", "flower_graph", "report", str(folder), "--out", "a.html"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, cwd=folder)
    assert done.returncode == 2 and LINES in done.stderr, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


HALF = MOST_CLIENTS // 2
GOOD = (["0-5,7", "6,8-9"], [f"0-{HALF - 1}", f"{HALF}-{2 * HALF - 1}"])
GOOD += ([str(2**62), f"{2**63 - 2}-{2**63 - 1}"],)  # claimed by a SuperNode
BAD = ("1-", "a", "3,2", "1-1", " 1", "1,,2", "0-" + "9" * 30, f"0-{2**63 - 1}", str(2**63))


@pytest.mark.parametrize(
    "texts", [*GOOD, *([one] for one in BAD), [f"0-{HALF}", f"{HALF}-{2 * HALF}"]]
)
def test_many_clients_in_many_rounds_are_counted_together(texts: list[str]) -> None:
    records = [{"asked": t, "answered": t, "failed": [], "left-out": []} for t in texts]
    if texts in GOOD:
        check_records([*records, {}])
    else:
        with pytest.raises(ValueError):
            check_records(records)


PLANTED = [
    ".probe", ".running", ".partial-result.json", ".partial-metrics.jsonl", ".config.yaml.1",
    "checkpoints", "clients", "rows", "rows/users-0.rows", "metrics.jsonl", "weights.safetensors",
    "checkpoints/round-000001", "checkpoints/round-000002/server.safetensors", "seed-0",
    "tensorboard",
]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_foreign_run_that_is_resumed_writes_nothing_elsewhere(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its author has made a link: the command names it, and its target stays."""
    home = tmp_path / "home"
    (home / "inner").mkdir(parents=True)
    (home / ".bashrc").write_text("mine")
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


def test_a_person_may_name_a_run_through_a_link_and_a_folder_of_no_seed_is_none(
    folder: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for name in ("seed-\u00b2", "seed-x", "seed-\u0663"):
        (folder / name).mkdir()
    (folder / RESULT).unlink()
    assert main(["run", "--resume", str(link / "run"), "--quiet", "rounds=3"]) == 0
    assert (folder / RESULT).exists()
    assert main(["report", str(link / "run"), "--out", str(link / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()
