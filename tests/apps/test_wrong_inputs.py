"""A wrong input is one line and exit code 2, writes nothing, and has its words in Python too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from wrong_inputs import Case, all_cases

from flower_graph.apps.cli.main import OUR_ERRORS, main
from flower_graph.apps.run import check_run
from flower_graph.method.load import load_config

CASES = all_cases()
Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_wrong_input_is_one_line_exit_2_and_nothing_written(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    case.make(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.rglob("*")}
    try:
        status = main(list(case.words))
    except SystemExit as end:  # as argparse ends
        status = int(end.code or 0)
    shown = capsys.readouterr()
    assert status == 2, shown
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1, shown.err
    assert re.search(case.said, shown.err) and shown.out == ""
    assert {*tmp_path.rglob("*")} == before
    if case.words and case.words[0] == "run" and not any("--" in word for word in case.words):
        config, *overrides = case.words[1:] or [""]
        with pytest.raises(OUR_ERRORS) as caught:
            check_run(load_config(config, overrides))
        if "=" not in config and config:  # without a config the command line has words of its own
            assert f"error: {caught.value}\n" == shown.err
