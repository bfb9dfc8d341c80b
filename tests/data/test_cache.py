"""The cache: complete folders only, also with several writers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from flower_graph.data.sources.cache import (
    cache_root,
    cached_folder,
    copy_tree,
    data_root,
    fingerprint,
)
from flower_graph.errors import DataError


def test_the_setting_counts_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(two))
    assert data_root(str(one)) == one
    assert data_root(None) == two
    monkeypatch.setenv("FLOWER_GRAPH_DATA", "")
    assert data_root(None) is None


def test_a_root_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"data\.root = '.*absent'"):
        data_root(str(tmp_path / "absent"))
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="FLOWER_GRAPH_DATA = "):
        data_root(None)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_root() == Path("/a")
    monkeypatch.delenv("FLOWER_GRAPH_CACHE")
    assert cache_root() == Path("/b/flower-graph")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path("/c/.cache/flower-graph")


def test_a_folder_is_filled_once(cache: Path) -> None:
    calls = []

    def fill(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("content")

    first, second = cached_folder("key", fill), cached_folder("key", fill)
    assert first == second == cache / "key"
    assert (first / "file").read_text() == "content"
    assert len(calls) == 1
    assert [path.name for path in cache.iterdir()] == ["key"]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_folder_that_could_not_be_filled(
    cache: Path, error: BaseException
) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").touch()
        raise error

    with pytest.raises(type(error)):
        cached_folder("key", fill)
    assert list(cache.iterdir()) == []


def test_writers_at_once_each_get_a_complete_folder(cache: Path) -> None:
    together = threading.Barrier(4)
    results = []

    def fill(folder: Path) -> None:
        (folder / "first").touch()
        together.wait(timeout=30)  # all four are past the look-up, and in the middle
        (folder / "second").touch()

    def work() -> None:
        folder = cached_folder("key", fill)
        results.append({path.name for path in folder.iterdir()})

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"first", "second"}] * 4
    assert [path.name for path in cache.iterdir()] == ["key"]


def test_a_cache_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # a file where the folder would be: refused to root too
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"cannot be written.*set FLOWER_GRAPH_CACHE"):
        cached_folder("key", lambda folder: None)


def test_copies_of_read_only_files_can_be_removed_again(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("content")
    (source / "deep" / "file").chmod(0o444)
    copy_tree(source, target)
    copy = target / "deep" / "file"
    assert copy.read_text() == "content"
    assert copy.stat().st_mode & 0o200


def test_the_fingerprint_changes_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one")
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    (tmp_path / "file").write_text("three")
    assert fingerprint(tmp_path) != before
