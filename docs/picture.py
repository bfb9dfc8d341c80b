"""Draws the README's picture, `pictures/methods.svg`: who holds what, and what travels.

    python docs/picture.py

It stands on a sheet of its own colour, so that it can be read on a light page and on a dark one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "pictures" / "methods.svg"
WIDTH, HEIGHT, MARGIN = 980, 636, 20
PANEL = (460, 280)  # width and height
INK, MUTED, LINE, SHEET, BOX = "#1f2328", "#57606a", "#8c959f", "#ffffff", "#f6f8fa"
UP, DOWN, SHARED = "#0550ae", "#8a4600", "#bf3989"
Point = tuple[float, float]


class Client(NamedTuple):
    """What one client holds: nodes, edges between them, and words below."""

    words: str
    nodes: Sequence[Point]  # from the middle of its box
    edges: Sequence[tuple[int, int]] = ()
    shared: Sequence[int] = ()  # nodes that other clients have too


class Method(NamedTuple):
    """A method's panel."""

    name: str
    client: str  # what a client is
    clients: tuple[Client, Client]
    sends: tuple[str, str]
    gets: tuple[str, str]
    server: tuple[str, ...]  # what the server holds


PATH = ((-36, 8), (-12, -12), (12, 8), (36, -12))
STAR = ((0, 0), (-30, -14), (-30, 14), (30, -14), (30, 14))
RAYS = ((0, 1), (0, 2), (0, 3), (0, 4))
METHODS = (
    Method(
        "nFedGNN",
        "a client is one node",
        (Client("features, first layer", ((0, 0),)), Client("features, first layer", ((0, 0),))),
        ("latent vector", "of 16 numbers"),
        ("its gradient", ""),
        ("the graph,", "some labels,", "the GNN"),
    ),
    Method(
        "FedSCem",
        "a client is an ego-network",
        (
            Client("own graph, own GNN", STAR, RAYS, (3, 4)),
            Client("own graph, own GNN", STAR, RAYS, (1, 2)),
        ),
        ("embeddings of", "nodes, masked"),
        ("mean of all who", "hold the node"),
        ("masked sums,", "no single", "embedding"),
    ),
    Method(
        "FedGLS",
        "a client is a graph, or its nodes alone",
        (
            Client("own graph", PATH, ((0, 1), (1, 2), (2, 3))),
            Client("nodes; learns edges", PATH),
        ),
        ("weights of a GNN", "and an encoder"),
        ("their average", ""),
        ("averaged", "weights"),
    ),
    Method(
        "PPFL-GNN",
        "a client is a graph that overlaps with others’",
        (
            Client("own graph, own GNN", PATH, ((0, 1), (1, 2), (2, 3)), (2, 3)),
            Client("own graph, own GNN", PATH, ((0, 2), (1, 3), (1, 2)), (0, 1)),
        ),
        ("embeddings of", "public nodes"),
        ("their mean, rotated", "into its own space"),
        ("embeddings", "of public", "nodes"),
    ),
)


def text(x: float, y: float, words: str, size: int = 15, colour: str = INK, **how: str) -> str:
    """Write a line; its anchor is in the middle unless ``anchor`` says otherwise."""
    anchor, weight = how.get("anchor", "middle"), how.get("weight", "normal")
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str = BOX) -> str:
    """Draw a box with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
        f'stroke="{LINE}"/>'
    )


def arrow(start: float, end: float, y: float, colour: str) -> str:
    """Draw an arrow along a line of the page."""
    back = 8 if end > start else -8
    head = f"{end:g},{y:g} {end - back:g},{y - 5:g} {end - back:g},{y + 5:g}"
    return (
        f'<line x1="{start:g}" y1="{y:g}" x2="{end - back:g}" y2="{y:g}" stroke="{colour}" '
        f'stroke-width="2"/><polygon points="{head}" fill="{colour}"/>'
    )


def drawn_client(client: Client, x: float, y: float) -> Iterator[str]:
    """Draw a client's box, its graph and its words."""
    yield box(x, y, 170, 84)
    middle, level = x + 85, y + 34
    places = [(middle + dx, level + dy) for dx, dy in client.nodes]
    for one, other in client.edges:
        (x1, y1), (x2, y2) = places[one], places[other]
        yield f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"/>'
    for node, (cx, cy) in enumerate(places):
        fill = SHARED if node in client.shared else INK
        yield f'<circle cx="{cx:g}" cy="{cy:g}" r="6" fill="{fill}"/>'
    yield text(middle, y + 74, client.words, 14)


def panel(method: Method, x: float, y: float) -> Iterator[str]:
    """Draw a method: two of its clients, the server, and what travels between."""
    width, height = PANEL
    yield box(x, y, width, height, SHEET)
    yield text(x + 14, y + 28, method.name, 18, anchor="start", weight="bold")
    yield text(x + 14, y + 50, method.client, 14, MUTED, anchor="start")
    for row, client in enumerate(method.clients):
        yield from drawn_client(client, x + 14, y + 68 + 96 * row)
    yield text(x + 99, y + 266, "…", 18, MUTED)
    left, right = x + 192, x + 336
    yield box(right + 6, y + 68, 106, 180)
    yield text(right + 59, y + 94, "server", 15, weight="bold")
    for row, words in enumerate(method.server):
        yield text(right + 59, y + 134 + 22 * row, words, 14)
    for words, level, colour, ends in (
        (method.sends, y + 124, UP, (left, right)),
        (method.gets, y + 206, DOWN, (right, left)),
    ):
        lines = [line for line in words if line]
        for row, line in enumerate(lines):
            yield text(
                (left + right) / 2, level - 8 - 18 * (len(lines) - 1 - row), line, 14, colour
            )
        yield arrow(*ends, level, colour)


def picture() -> str:
    """Return the picture as SVG."""
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{SHEET}"/>']
    for number, method in enumerate(METHODS):
        row, column = divmod(number, 2)
        x = MARGIN + column * (PANEL[0] + MARGIN)
        parts += panel(method, x, MARGIN + row * (PANEL[1] + 14))
    y = HEIGHT - 14
    parts.append(f'<circle cx="{MARGIN + 8}" cy="{y - 5}" r="6" fill="{SHARED}"/>')
    parts.append(text(MARGIN + 22, y, "a node that several clients have", 14, anchor="start"))
    said = "; ".join(f"{one.name}: {one.client}" for one in METHODS)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" '
        f'role="img">\n<title>Who holds what, and what travels</title>\n'
        f"<desc>{escape(said)}</desc>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
