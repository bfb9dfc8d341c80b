"""A party's journal: a round that it has contributed to does not come a second time."""

import os
import stat

import pytest

from flower_graph.errors import IdentityError, RefusedError
from flower_graph.secure.parties import journal
from flower_graph.secure.parties.journal import Journal, sealed


def test_rounds_go_up_in_each_run_and_the_file_knows_them(tmp_path):
    path = tmp_path / "key.journal"
    mine = Journal(path)
    assert mine.last(b"run") is None
    for number in (0, 1, 2, 5):
        mine.contribute(number, b"run")
    mine.contribute(1, b"other")
    for number in (5, 3):
        with pytest.raises(RefusedError, match=f"round {number}.*5"):
            Journal(path).contribute(number, b"run")
    Journal(path).contribute(6, b"run")
    assert (mine.last(b"run"), mine.last(b"other")) == (6, 1)


def test_a_run_is_named_by_all_its_parts(tmp_path):
    mine = Journal(tmp_path / "journal")
    mine.contribute(3, b"ab", b"c")
    mine.contribute(1, b"a", b"bc")
    with pytest.raises(RefusedError):
        mine.contribute(3, b"ab", b"c")
    for name in ((), (b"a" * journal.MOST_NAME,)):
        with pytest.raises(RefusedError, match="name"):
            mine.contribute(1, *name)


def test_it_is_its_owners_alone_whole_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_RUNS", 3)
    path = tmp_path / "journal"
    path.write_bytes(sealed(b"{}"))
    path.chmod(0o666)
    mine = Journal(path)
    for number in range(5):
        mine.contribute(number, b"%d" % number)
        mine.contribute(number, b"kept")  # what is used again is not pushed out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = [mine.last(b"%d" % number) for number in range(5)]
    assert known == [None, None, None, 3, 4] and mine.last(b"kept") == 4
    assert os.listdir(tmp_path) == ["journal"]


def test_who_begins_anew_is_counted_by_the_day(tmp_path, monkeypatch):
    """With another run, or with a state that is new or has not seen the last sum."""
    path, now = tmp_path / "journal", [1e9]
    monkeypatch.setattr(journal.time, "time", lambda: now[0])
    first = Journal(path).continue_run(0, "", 3, b"run")
    second = Journal(path).continue_run(1, first, 3, b"run")
    third = Journal(path).continue_run(2, second, 3, b"run")
    assert len({first, second, third}) == 3
    with pytest.raises(RefusedError, match=r"round 2.*2"):
        Journal(path).continue_run(2, third, 3, b"run")
    put_back = Journal(path).continue_run(3, second, 3, b"run")  # the second time
    Journal(path).continue_run(0, "", 3, b"other")  # the third
    before = path.read_bytes()
    for mark, run in (("", b"new"), ("", b"run"), (third, b"run")):
        with pytest.raises(RefusedError, match=r"3.*24.*trust-runs"):
            Journal(path).continue_run(9, mark, 3, run)
    assert path.read_bytes() == before
    Journal(path).continue_run(4, put_back, 3, b"run")
    now[0] += journal.DAY + 1
    Journal(path).continue_run(0, "", 3, b"new")
    now[0] -= 2 * journal.DAY  # who sets a clock back gains nothing
    Journal(path).continue_run(0, "", 2, b"newer")
    with pytest.raises(RefusedError, match="2 times"):
        Journal(path).continue_run(0, "", 2, b"newest")


def test_lists_are_counted_by_run_and_runs_by_day(tmp_path):
    path = tmp_path / "journal"
    for run in (b"run", b"run", b"run", b"two"):  # each by another state, another process
        Journal(path).answer_list(3, 2, run)
    for run, why in ((b"run", "3 lists"), (b"three", "trust-runs")):
        with pytest.raises(RefusedError, match=why):
            Journal(path).answer_list(3, 2, run)


def test_a_block_of_each_client_an_alignment_and_eight_alignments_a_run(tmp_path):
    path = tmp_path / "journal"
    Journal(path).serve(1, [0, 1, 2, 7], 2, b"run")
    Journal(path).serve(1, [3, 4], 2, b"run")
    for clients in ([4, 5], [7], [0]):
        with pytest.raises(RefusedError, match="alignment 1"):
            Journal(path).serve(1, clients, 2, b"run")
    Journal(path).serve(1, [5], 2, b"run")
    for alignment in range(2, 1 + journal.MOST_ALIGNMENTS):
        Journal(path).serve(alignment, [5], 2, b"run")
    with pytest.raises(RefusedError, match="alignment 1"):
        Journal(path).serve(1, [9], 2, b"run")
    with pytest.raises(RefusedError, match="8 alignments"):
        Journal(path).serve(99, [5], 2, b"run")
    Journal(path).continue_run(0, "", 1, b"run")  # the run that is counted already
    Journal(path).serve(1, [5], 2, b"other")
    with pytest.raises(RefusedError, match="2 times"):
        Journal(path).serve(1, [5], 2, b"a third")


RUN = b'{"runs": {"' + journal._name((b"run",)).encode() + b'": %s}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        RUN % b'{"number": 3}',  # without a hash
        sealed(b'{"other": {}}'),
        sealed(RUN % b'{"number": true}'),
        sealed(RUN % b'{"other": 3}'),
        sealed(RUN % b'{"sums": {"sum": ["not a set"]}}'),
        sealed(b'{"states": {"a": "not a set"}}'),
        sealed(b'{"begun": [3]}'),
    ],
)
def test_without_a_journal_that_can_be_read_nothing_is_sent(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"journal .*: (cannot be read|is no journal)"):
        Journal(path).continue_run(1, "", 3, b"run")
    assert path.read_bytes() == content


def test_a_bit_that_was_changed_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "journal"
    mine = Journal(path)
    mine.continue_run(0, "", 3, b"run")
    mine.enter(1, "sum", bytes(16), 0b11111, 2, b"run")
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(IdentityError):
            mine.contribute(2, b"run")
    path.write_bytes(whole)
    mine.contribute(2, b"run")


def test_a_state_enters_no_sum_of_others_in_a_later_run(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_STATES", 4)
    mine, state, seven = Journal(tmp_path / "journal"), bytes(16), 0b1111111
    mine.enter(0, "sum", state, seven, 2, b"run")
    for others in (seven ^ 1, seven ^ 3, seven | 128):
        with pytest.raises(RefusedError, match="changed"):
            mine.enter(0, "sum", state, others, 2, b"later")
    with pytest.raises(RefusedError, match="changed"):
        mine.check_state("sum", state, seven ^ 1)
    mine.check_state("sum", state, seven)
    mine.enter(0, "sum", state, seven, 2, b"later")
    mine.enter(0, "another", state, seven ^ 3, 2, b"later yet")
    for number in range(1, 4):  # the oldest are forgotten
        mine.enter(number, "sum", bytes([number]) * 16, seven, 2, b"later")
    mine.enter(9, "sum", state, seven ^ 3, 2, b"last")


def test_after_one_refused_sum_its_step_is_over(tmp_path):
    mine = Journal(tmp_path / "journal")
    with mine.one_trial(3, b"run"):
        pass
    for _ in range(2):
        with pytest.raises(RefusedError, match="relayed"), mine.one_trial(3, b"run"):
            raise RefusedError("relayed")
    for step in (2, 3):
        with pytest.raises(RefusedError), Journal(tmp_path / "journal").one_trial(step, b"run"):
            raise AssertionError("the step is over")
    with mine.one_trial(4, b"run"), mine.one_trial(3, b"another"):
        pass


def _full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_is_not_on_the_disk_is_not_sent(tmp_path, monkeypatch, call):
    mine = Journal(tmp_path / "journal")
    mine.contribute(1, b"run")
    monkeypatch.setattr(os, call, _full)
    with pytest.raises(IdentityError, match="cannot be written: No space left on device"):
        mine.contribute(2, b"run")
    monkeypatch.undo()
    assert mine.last(b"run") == 1
