"""How the performance page writes tables, times, sizes and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def check(
    what: str, value: float, target: float, show: Callable[[float], str]
) -> tuple[str, str, str, str]:
    """Return a row: what was measured, its value, its target and the verdict."""
    return what, show(value), f"at most {show(target)}", verdict(value, target)


def verdict(value: float, target: float) -> str:
    """Say whether a target is met."""
    return "met" if value <= target else "**missed**"


def duration(seconds: float) -> str:
    """Write seconds."""
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def spread(times: dict[str, float]) -> str:
    """Write the fastest and the slowest of some times."""
    return f"{duration(times['min'])} – {duration(times['max'])}"


def gib(size: float) -> str:
    """Write a number of bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def rate(bytes_per_second: float) -> str:
    """Write bytes a second."""
    return f"{bytes_per_second / 1e9:.1f} GB/s"
