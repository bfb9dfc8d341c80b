"""How the pages of papers that are not tables as data yet end: with their pictures."""

from __future__ import annotations

from collections.abc import Sequence

from flower_graph.apps.reproduce import text


def show_pictures(names: Sequence[str]) -> list[str]:
    """Write the section with the pictures, with room between its lines; nothing without any."""
    shown = text.show_pictures(names)
    return [f"\n{line}\n" if at == 0 else f"{line}\n" for at, line in enumerate(shown)]
