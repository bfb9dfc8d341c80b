"""Downloads that fail within seconds where there is no network."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.error import HTTPError
from urllib.parse import urlsplit

PROBE_SECONDS = 5.0  # for a first answer from a host
STALL_SECONDS = 30.0  # without a byte during a download


def check_reachable(urls: Iterable[str]) -> None:
    """Raise OSError when none of the hosts of these addresses answers within seconds."""
    # A firewall that drops packets would otherwise hold a download up for minutes.
    sites = sorted({f"{parts.scheme}://{parts.netloc}/" for parts in map(urlsplit, urls)})
    failures = []
    for site in sites:
        try:
            # Only http(s) addresses come here; urllib honours the proxy settings.
            with urllib.request.urlopen(site, timeout=PROBE_SECONDS):
                return
        except HTTPError:
            return  # an answer, if not a page
        except OSError as error:
            failures.append(f"{site}: {getattr(error, 'reason', error)}")
    if failures:
        raise OSError("; ".join(failures))


@contextmanager
def stall_limit() -> Iterator[None]:
    """Give sockets without a timeout of their own one, for as long as this lasts."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(STALL_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
