"""Graphs in GraphML, as NetworkX, igraph, Gephi and others write it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree
from xml.parsers import expat

from flower_graph.data.gaps import Gaps
from flower_graph.data.sources.tables import ENDS, of_entries, readable
from flower_graph.errors import DataError
from flower_graph.storage.reading import DEPTH, MOST_GRAPH, open_regular, reading

MOST_FILLED = 1 << 22  # entries of all nodes, if the file has fewer bytes


def read_graphml(path: Path, needs_labels: bool, gaps: Gaps) -> dict[str, object]:
    """Read GraphML, as NetworkX, igraph, Gephi and others write it."""
    nodes, links, keys = [], [], {}
    problem = "is cut short, damaged or no GraphML; save it again"
    with (
        readable(path),
        reading(f"file {path}", DataError, problem),
        open_regular(path, MOST_GRAPH) as stream,
    ):
        filled, most = 0, max(MOST_FILLED, os.fstat(stream.fileno()).st_size)
        for element in _elements(stream):
            kind = element.tag.rpartition("}")[2]
            if kind == "key":
                default = next(iter(element.itertext()), "").strip() or None
                keys[element.get("id")] = (element.get("attr.name"), element.attrib, default)
            elif kind == "node":
                nodes.append({"id": element.get("id")} | _data_of(element, keys, "node"))
                element.clear()
                filled += len(nodes[-1])
                if filled > most:
                    raise ValueError(f"with defaults its nodes have more than {most:,} entries")
            elif kind == "edge":
                ends = {key: element.get(key) for key in ENDS}
                links.append(_data_of(element, keys, "edge") | ends)
                element.clear()
    return of_entries(path, nodes, links, needs_labels, gaps)


def _elements(stream: BinaryIO) -> Iterator[ElementTree.Element]:
    """Yield the elements of XML as each ends; refuse entities and deep nesting."""
    prolog = expat.ParserCreate()
    prolog.EntityDeclHandler = _refuse_entity
    prolog.StartElementHandler = _begin
    with suppress(_BegunError):
        prolog.ParseFile(stream)
    stream.seek(0)
    depth = 0
    for event, element in ElementTree.iterparse(stream, ("start", "end")):
        depth += 1 if event == "start" else -1
        if depth > DEPTH:
            raise ValueError(f"it is nested deeper than {DEPTH} levels")
        if event == "end":
            yield element


class _BegunError(Exception):
    """Stops the parser at the first element."""


def _begin(*_: object) -> None:
    raise _BegunError


def _refuse_entity(name: str, *_: object) -> None:
    raise ValueError(f"it declares an entity, {name:.40}, and GraphML needs none")


def _data_of(
    element: ElementTree.Element, keys: Mapping[str | None, tuple[Any, ...]], domain: str
) -> dict[str, object]:
    """Return the attributes of a node or an edge, with defaults for missing ones."""
    said = {
        name: default
        for name, how, default in keys.values()
        if default is not None and how.get("for") in (domain, "all")
    }
    for data in element.findall("{*}data"):
        name, how, _ = keys.get(data.get("key"), (data.get("key"), {}, None))
        text = (data.text or "").strip()
        is_bool = how.get("attr.type") == "boolean"
        said[name] = {"true": 1, "false": 0}.get(text.lower(), text) if is_bool else text
    return said
