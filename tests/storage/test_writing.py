"""What is written goes through one gate, which follows no link and writes no other's file."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import METHODS

from flower_graph.errors import OutputError, StateLostError
from flower_graph.storage import files, row_file
from flower_graph.storage.files import append_line, folder_lock, new_folder, own_folder


def put(path: Path, way: Callable[[Path], Any] = files.replaced) -> None:
    with way(path) as stream:
        stream.write(b"ours")


def fill(handle: int) -> None:
    os.write(handle, b"ours")
    os.close(handle)


BELOW: dict[str, Callable[[Path], object]] = {
    "replaced": put,
    "written": lambda path: put(path, files.written),
    "append": lambda path: put(path, files.append),
    "line": lambda path: append_line(path, {"a": 1}),
    "own": lambda path: fill(files.open_own(path, os.O_RDWR | os.O_CREAT)),
    "folder": lambda path: files.make_folder(path / "inner"),
    "remove": files.remove,
    "remove-folder": files.remove_folder,
    "move": lambda path: files.move(path, path.with_name("other")),
    "copy": lambda path: files.copy_file(path, path.with_name("other")),
    "lock": lambda path: folder_lock(path.parent).__enter__(),
    "rows": lambda path: row_file.create(path, 2),
}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Make a folder that a run has no business in."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("precious")
    (theirs / "file").chmod(0o644)
    theirs.chmod(0o755)
    return theirs


def untouched(theirs: Path) -> bool:
    content = [path.name for path in theirs.iterdir()] == ["file"]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (theirs, theirs / "file")]
    return content and (theirs / "file").read_text() == "precious" and modes == [0o755, 0o644]


@pytest.mark.parametrize("way", BELOW)
def test_nothing_is_done_below_a_link_or_through_one(
    way: str, theirs: Path, tmp_path: Path
) -> None:
    (tmp_path / "inner").symlink_to(theirs)
    with pytest.raises(OutputError):
        BELOW[way](tmp_path / "inner" / "file")
    if way in ("append", "line", "own", "folder", "lock"):
        name = ".running" if way == "lock" else "file"
        (tmp_path / name).symlink_to(theirs if way == "folder" else theirs / "file")
        with pytest.raises(OutputError):
            BELOW[way](tmp_path / name)
    assert untouched(theirs)


@pytest.mark.parametrize("way", ["replaced", "written", "rows", "remove"])
def test_what_takes_the_place_of_a_link_leaves_its_target(
    way: str, theirs: Path, tmp_path: Path
) -> None:
    for name in ("file", f".file.{os.getpid()}", ".partial-file"):
        (tmp_path / name).symlink_to(theirs / "file")
    BELOW[way](tmp_path / "file")
    assert untouched(theirs) and not (tmp_path / "file").is_symlink()


def test_a_folder_is_removed_without_what_its_links_lead_to(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "out").symlink_to(theirs)
    for _ in range(2):
        files.remove_folder(tmp_path / "run")
    assert not (tmp_path / "run").exists() and untouched(theirs)


@pytest.mark.parametrize("kind", ["pipe", "second name", "other user", "folder"])
def test_only_a_regular_file_of_ones_own_is_changed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    make = {"pipe": os.mkfifo, "folder": os.mkdir}.get(kind, lambda path: path.write_text("old"))
    make(path)
    if kind == "second name":
        os.link(path, tmp_path / "other")
    if kind == "other user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for way in (files.open_own, BELOW["append"]):
        with pytest.raises((OutputError, OSError)):
            way(path)
    assert kind in ("pipe", "folder") or path.read_text() == "old"


def test_a_name_from_elsewhere_stays_in_its_folder(tmp_path: Path) -> None:
    assert files.inside(tmp_path, "a/b.txt") == tmp_path / "a" / "b.txt"
    for name in ("../a", "a/../../b", "/etc/passwd", "", ".", "a\0b"):
        with pytest.raises(OutputError):
            files.inside(tmp_path, name)


def test_a_person_may_name_a_folder_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path)
    with new_folder(tmp_path / "runs" / "mine") as folder:
        assert folder == tmp_path / "mine"


@pytest.mark.parametrize("name", [".probe", ".running", "clients", "rows/users-0.rows", "x/y/z"])
def test_a_folder_with_links_out_of_it_is_not_gone_on_with(
    name: str, theirs: Path, tmp_path: Path
) -> None:
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs if name == "clients" else theirs / "file")
    with pytest.raises(OutputError):
        new_folder(tmp_path / "run", may_exist=True).__enter__()
    assert untouched(theirs)
    link.unlink()
    if name == ".running":
        return  # the lock
    link.symlink_to(tmp_path / "run" / "inner")  # as those that Weights & Biases makes
    with new_folder(tmp_path / "run", may_exist=True):
        pass


def test_a_link_to_the_place_of_state_is_not_followed_and_a_place_for_all_is_refused(
    theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted").symlink_to(theirs)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    for name, error in (("planted", OutputError), ("tmp", StateLostError)):
        monkeypatch.setenv(files.STATE_VARIABLE, str(tmp_path / name))
        with pytest.raises(error):
            own_folder(files.default_folder() / "run-1")
    assert untouched(theirs)


@pytest.mark.parametrize("how", ["link", "other user"])
def test_who_takes_the_name_in_shared_memory_stops_nobody(
    how: str, theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(files.STATE_VARIABLE, raising=False)
    monkeypatch.setattr(files, "SHARED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    usual = tmp_path / f"flower-graph-{os.getuid()}"
    assert files.default_folder() == usual
    if how == "link":
        usual.symlink_to(theirs)
    else:
        usual.mkdir()
    with monkeypatch.context() as patched:
        if how == "other user":
            patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        folder = files.default_folder()
    assert folder.is_relative_to(tmp_path / "cache")
    own_folder(folder / "run-1")
    assert untouched(theirs)


# What is a SuperNode's is its owner's alone -----------------------------------------------------


def open_to_others(folder: Path) -> list[Path]:
    """List what other users could read."""
    return [path for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


@pytest.mark.parametrize("name", ["nfedgnn", pytest.param("fedscem", marks=pytest.mark.slow)])
def test_whatever_a_run_leaves_at_its_clients_is_theirs_alone(name: str, tmp_path: Path) -> None:
    """Keys, state, checkpoints and outputs; with a state-dir that was open to all."""
    place = tmp_path / "state"
    place.mkdir()
    place.chmod(0o777)
    before = os.umask(0)
    try:
        overrides = ("rounds=2", "checkpoint_every=1", "save=all")
        METHODS[name].run(tmp_path / "out", *overrides, supernodes=3, state_dir=place)
    finally:
        os.umask(before)
    assert {"checkpoints", "outputs"} <= {path.name for path in place.iterdir()}
    assert not open_to_others(place)


def test_a_file_that_others_hold_open_is_not_written_into(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    path.chmod(0o666)
    with path.open() as spy:
        row_file.create(path, 2)
        path.write_text("secret")
        assert spy.read() == "old"


def test_folders_that_are_made_on_the_way_are_closed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.private_folder(tmp_path / "a" / "b")
        with files.replaced(tmp_path / "c" / "d" / "file") as stream:
            stream.write(b"1")
        own_folder(tmp_path / "place" / "checkpoints" / "round-1", tmp_path / "place")
    finally:
        os.umask(before)
    assert not {*open_to_others(tmp_path)} - {tmp_path}
