"""The demo leaves nothing behind when it is interrupted; `make deploy-demo` runs it whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from deploy.loopback import ROOT
from flower_graph.apps.cli.launch import end_processes, marked_processes

MARK = "FLOWER_GRAPH_TEST_MARK"


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.release)],
)
def test_an_interrupted_demo_ends_its_processes_and_removes_its_folder(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    mark = uuid.uuid4().hex
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {MARK: mark, "TMPDIR": str(tmp_path / "temporary")}
    log = tmp_path / "log"
    with log.open("wb") as out:
        demo = subprocess.Popen(
            [sys.executable, str(ROOT / "deploy" / "demo.py")],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 300
        while "PPFL-GNN: 4 SuperNodes" not in log.read_text():
            assert demo.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(marked_processes(MARK, mark)) >= 6  # the SuperLink, four SuperNodes, theirs
        demo.send_signal(number)
        assert demo.wait(timeout=90) == code
        assert [one for one in marked_processes(MARK, mark) if one.pid != demo.pid] == []
        assert list((tmp_path / "temporary").iterdir()) == []
    finally:
        end_processes(MARK, mark)
        demo.wait(timeout=30)
