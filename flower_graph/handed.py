"""Settings and data that one process of a run makes and other processes take over.

Each thing has a name that contains everything it depends on in a run. A process that took a thing
over reads no file for it, so the file need not be on its machine.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar, cast

T = TypeVar("T")
_TAKEN: dict[str, object] = {}
_NOTES: list[dict[str, object]] = []  # of the blocks that note what is made


def handed_over(name: str, make: Callable[[], T]) -> T:
    """Return the thing that was taken over under a name, or make it."""
    if name in _TAKEN:
        return cast(T, _TAKEN[name])
    made = make()
    for notes in _NOTES:
        notes[name] = made
    return made


@contextmanager
def noted() -> Iterator[dict[str, object]]:
    """Record what is made in the block, by name."""
    notes: dict[str, object] = {}
    _NOTES.append(notes)
    try:
        yield notes
    finally:
        _NOTES.remove(notes)


def take_over(things: Mapping[str, object]) -> None:
    """Take over what another process has made, until this process ends."""
    _TAKEN.update(things)
