"""What one process of a run makes, and the others take over: its settings, its data.

Each thing has a name that says all that it depends on in one run. A process that has taken it over
reads no file for it, which need not be on its machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

__all__ = ["handed_over", "noted", "take_over"]

T = TypeVar("T")
_TAKEN: dict[str, object] = {}
_NOTES: list[dict[str, object]] = []  # of the blocks that note what is made


def handed_over(name: str, make: Callable[[], T]) -> T:
    """Return what was taken over under a name, or make it."""
    if name in _TAKEN:
        return cast(T, _TAKEN[name])
    made = make()
    for notes in _NOTES:
        notes[name] = made
    return made


@contextmanager
def noted() -> Iterator[dict[str, object]]:
    """Note by name what is made in the block."""
    notes: dict[str, object] = {}
    _NOTES.append(notes)
    try:
        yield notes
    finally:
        _NOTES.remove(notes)


def take_over(things: Mapping[str, object]) -> None:
    """Take over what another process has made, for as long as this one lives."""
    _TAKEN.update(things)
