"""A party's journal: a round that it has contributed to does not come a second time."""

import os
import stat
import subprocess
import sys

import pytest

from flower_graph.errors import IdentityError, RefusedError
from flower_graph.secure import journal
from flower_graph.secure.journal import Journal


def test_rounds_go_up_in_each_run_and_a_new_process_knows_them(tmp_path):
    path = tmp_path / "key.journal"
    mine = Journal(path)
    assert mine.last(b"run") is None
    for number in (0, 1, 2, 5):
        mine.contribute(number, b"run")
    mine.contribute(1, b"other")
    code = (
        "import sys; from pathlib import Path; from flower_graph.secure.journal import Journal\n"
        "Journal(Path(sys.argv[1])).contribute(int(sys.argv[2]), b'run')"
    )
    for number, said in ((5, "round 5 is not after 5"), (3, "round 3 is not after 5"), (6, "")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path), str(number)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert said in done.stderr and (done.returncode == 0) == (not said)
    assert (mine.last(b"run"), mine.last(b"other")) == (6, 1)


def test_a_run_is_named_by_all_its_parts(tmp_path):
    mine = Journal(tmp_path / "journal")
    mine.contribute(3, b"ab", b"c")
    mine.contribute(1, b"a", b"bc")
    with pytest.raises(RefusedError):
        mine.contribute(3, b"ab", b"c")
    for name in ((), (b"a" * journal.MOST_NAME,)):
        with pytest.raises(RefusedError, match="the run's name has"):
            mine.contribute(1, *name)


def test_it_is_its_owners_alone_whole_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_RUNS", 3)
    path = tmp_path / "journal"
    path.write_text("{}")
    path.chmod(0o666)
    mine = Journal(path)
    for number in range(5):
        mine.contribute(number, b"%d" % number)
        mine.contribute(number, b"kept")  # what is used again is not pushed out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = [mine.last(b"%d" % number) for number in range(5)]
    assert known == [None, None, None, 3, 4] and mine.last(b"kept") == 4
    assert os.listdir(tmp_path) == ["journal"]


@pytest.mark.parametrize(
    "content", [b"", b'{"6162', b"[]", b'{"61": "3"}', b'{"61": true}', b"\xff"]
)
def test_without_a_journal_that_can_be_read_nothing_is_sent(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"journal .*: (cannot be read|is not one of rounds)"):
        Journal(path).contribute(1, b"run")
    assert path.read_bytes() == content


def test_what_cannot_be_written_is_not_sent(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    mine = Journal(tmp_path / "journal")
    mine.contribute(1, b"run")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(IdentityError, match="cannot be written: No space left on device"):
        mine.contribute(2, b"run")
    monkeypatch.undo()
    assert mine.last(b"run") == 1
