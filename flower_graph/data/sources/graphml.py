"""Graphs in GraphML, as NetworkX, igraph, Gephi, yEd and others write it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree
from xml.parsers import expat

from flower_graph.data.gaps import Gaps
from flower_graph.data.sources.tables import ENDS, MOST_FILLED, YED, of_entries, readable
from flower_graph.errors import DataError
from flower_graph.storage.reading import DEPTH, MOST_GRAPH, open_regular, reading


class _Key(NamedTuple):
    """GraphML's declaration of an attribute."""

    name: str
    domain: str  # node, edge, graph or all
    is_bool: bool
    default: str | None

    @classmethod
    def of(cls, element: ElementTree.Element) -> _Key:
        name = element.get("attr.name") or element.get("id") or ""
        default, kind = element.find("{*}default"), element.get("attr.type")
        text = None if default is None else (default.text or "").strip() or None
        return cls(name, element.get("for", "all"), kind == "boolean", text)

    def value(self, text: str) -> object:
        return {"true": True, "false": False}.get(text.lower(), text) if self.is_bool else text


def read_graphml(path: Path, needs_labels: bool, gaps: Gaps) -> dict[str, object]:
    """Read GraphML, as NetworkX, igraph, Gephi, yEd and others write it."""
    ids, nodes, links = [], [], []
    keys, program = dict[str, _Key | None](), ""
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
                is_drawing = element.get("yfiles.type") is not None
                program = YED if is_drawing else program
                keys[element.get("id", "")] = None if is_drawing else _Key.of(element)
            elif kind == "node":
                nodes.append(_data_of(element, keys, "node"))
                ids.append(element.get("id"))
                element.clear()
                filled += len(nodes[-1])
                if filled > most:
                    raise ValueError(f"with defaults its nodes have more than {most:,} entries")
            elif kind == "edge":
                ends = {key: element.get(key) for key in ENDS}
                links.append(_data_of(element, keys, "edge") | ends)
                element.clear()
            elif kind == "hyperedge":
                raise ValueError("it has a hyperedge, and edges have two ends here")
    return of_entries(path, ids, nodes, links, needs_labels, gaps, program)


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
    element: ElementTree.Element, keys: Mapping[str, _Key | None], domain: str
) -> dict[str, object]:
    said: dict[str, object] = {
        key.name: key.value(key.default)
        for key in keys.values()
        if key is not None and key.default is not None and key.domain in (domain, "all")
    }
    for data in element.findall("{*}data"):
        name = data.get("key", "")
        if (key := keys.get(name, _Key(name, domain, False, None))) is not None:
            said[key.name] = key.value((data.text or "").strip())
    return said
