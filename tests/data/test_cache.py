"""The cache: complete folders only, also with several writers; hosts that do not answer."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_graph.data.sources import cache as cache_module
from flower_graph.data.sources.cache import (
    cache_root,
    cached_folder,
    check_reachable,
    copy_tree,
    stall_limit,
)
from flower_graph.errors import DataError
from flower_graph.storage.places import data_root


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
    with pytest.raises(DataError, match=r"data\.root = '.*absent'"):
        data_root(str(tmp_path / "absent"))
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="FLOWER_GRAPH_DATA"):
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
    with pytest.raises(DataError, match="FLOWER_GRAPH_CACHE"):
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


# Hosts ------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[str]:
    """Give the address of a host that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a proxy of the machine out of the way."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_silent_host_does_not_hold_anything_up(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "PROBE_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        check_reachable([silent])
    assert time.monotonic() - start < 5


def test_the_message_names_every_host_that_failed() -> None:
    with pytest.raises(OSError, match=r"example\.invalid"):
        check_reachable(["https://example.invalid/a", "https://example.invalid/b"])


def test_one_host_that_answers_is_enough_and_none_to_reach_no_failure() -> None:
    check_reachable([])
    with socket.create_server(("127.0.0.1", 0)) as server:  # nobody listens there afterwards
        closed = f"http://127.0.0.1:{server.getsockname()[1]}/file"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        check_reachable([closed, f"http://127.0.0.1:{server.getsockname()[1]}/file"])
        thread.join()


def test_the_stall_limit_ends_with_its_block() -> None:
    before = socket.getdefaulttimeout()
    with pytest.raises(KeyError), stall_limit():
        assert socket.getdefaulttimeout() == cache_module.STALL_SECONDS
        raise KeyError
    assert socket.getdefaulttimeout() == before
