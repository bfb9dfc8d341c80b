"""Hosts that do not answer are noticed within seconds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from flower_graph.data.sources import cache as network
from flower_graph.data.sources.cache import check_reachable, stall_limit


@pytest.fixture
def silent() -> Iterator[str]:
    """Give the address of a host that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/file"


@pytest.fixture
def closed() -> str:
    """Give the address of a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/file"


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a proxy of the machine out of the way."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_silent_host_does_not_hold_anything_up(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "PROBE_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        check_reachable([silent])
    assert time.monotonic() - start < 5


def test_the_message_names_every_host_that_failed() -> None:
    with pytest.raises(OSError, match=r"example\.invalid.*switched off"):
        check_reachable(["https://example.invalid/a", "https://example.invalid/b"])


def test_one_host_that_answers_is_enough(closed: str) -> None:
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


def test_nothing_to_reach_is_no_failure() -> None:
    check_reachable([])


def test_the_stall_limit_ends_with_its_block() -> None:
    before = socket.getdefaulttimeout()
    with pytest.raises(KeyError), stall_limit():
        assert socket.getdefaulttimeout() == network.STALL_SECONDS
        raise KeyError
    assert socket.getdefaulttimeout() == before
