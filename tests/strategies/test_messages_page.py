"""docs/reference/messages.md says what travels: its tables against runs, and against keys."""

import importlib
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from doc_helpers import DOCS
from federation import one_fast
from message_recorder import RUNS, Entry
from test_docs import anchors

from flower_graph.secure.sum.messages import RoundMessage, SumMessage
from flower_graph.wire import keys
from flower_graph.wire.codec import Message, Part, fields_of

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(DOCS)
    PAGE: str = importlib.import_module("generate").generate("messages")
# Constants in keys.py that are no keys on the wire, or that stay at the client
NOT_SENT = {keys.ARRAY_NAMES, keys.SUM_STATE}


def sections() -> dict[str, list[list[str]]]:
    """Give the rows of the tables under each heading."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        rows = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
        found[title] = list(_entries([cell.strip() for cell in row] for row in rows))
    return found


def _entries(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    """Give message, way, record, key, type and words of each entry of a section's tables."""
    told: list[tuple[str, str]] = []
    for first, kind, *says in rows:
        heads = re.findall(r"\*\*(\w+)\*\*([^*]*)", first)
        if heads or first == "key":
            told = [(message.strip(" ;"), way) for way, message in heads]
        for message, way in () if heads else told:
            if "](#" in first:
                yield [message, way, "", "", first, ""]
            elif first.startswith("`"):
                record, slash, key = first.strip("`").partition("/")
                yield [message, way, record if slash else "config", key or record, kind, *says]


SECTIONS = sections()


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def documented(method: str) -> Iterator[Entry]:
    """Give all entries of a method's tables, those of the groups that they name with them."""
    rows = SECTIONS[method]
    if any("query" in names(row[0]) for row in rows):
        rows = SECTIONS["Common to all"] + rows
    for message, way, record, key, kind, _ in rows:
        assert way in ("up", "down", "both") and names(message), (method, message, key)
        link = re.search(r"\(#([\w-]+)\)", kind)
        for name in names(message):
            if link:
                yield from _group(link[1], name, way)
            else:
                yield from _both(name, way, record.strip("`"), key.strip("`"), kind)


def _group(anchor: str, message: str, way: str) -> Iterator[Entry]:
    (title,) = [title for title in SECTIONS if anchors(f"# {title}") == {anchor}]
    for own, direction, record, key, kind, _ in SECTIONS[title]:
        if own and message not in names(own):
            continue
        for entry in _both(message, direction, record.strip("`"), key.strip("`"), kind):
            if way in ("both", entry.way):
                yield entry


def _both(message: str, way: str, record: str, key: str, kind: str) -> Iterator[Entry]:
    for one in ("up", "down") if way == "both" else (way,):
        yield Entry(message, one, record, key, kind)


def fits(sent: str, said: str) -> bool:
    """Whether what was sent is of the type that the page says."""
    if not re.search(r"\dD$", sent):
        plain = re.match(r"list of \w+|\w+", said)
        return plain is not None and (sent == plain[0] or (sent == "list" and "list" in plain[0]))
    dtype, dimensions = sent.split()
    shapes = re.findall(r"`\[([^\]]*)\]`", said)
    return dtype in re.findall(r"u?int\d+|float\d+", said) and any(
        shape.count(",") + 1 == int(dimensions[0]) for shape in shapes
    )


@pytest.mark.parametrize("method", one_fast(RUNS, "nFedGNN, summed"))
def test_what_a_method_sends_is_what_the_page_says(method: str, tmp_path: Path) -> None:
    seen, said = RUNS[method](tmp_path), list(documented(method))
    missing = sorted(
        s
        for s in seen
        if not any(s[:3] == e[:3] and fnmatch(s.key, e.key) and fits(s.kind, e.kind) for e in said)
    )
    assert not missing, "\n".join(" ".join(entry) for entry in missing)
    # ... and the page does not tell of messages that nobody sends.
    kinds = {entry.message for entry in seen}
    assert {entry.message for entry in said} - {"train.save"} <= kinds
    # Nor of entries, but for what only faults bring about, or checkpoints and metrics do.
    # Parties declare points where there is an alignment.
    rare = {"sum-declared", "reveal-declared", "left-out", "mask-left-out", "mask-refused"}
    # Where users come and go, which test_relay_server.py has; and where the server may lie, which
    # tests/hostile/test_lying_methods.py has, with what is signed there, which PPFL-GNN's run has
    rare |= {
        "not-saved",
        "users-before",
        "sums-members",
        "sums-checks",
        "align-blocks",
        "align-parties",
    }
    rare |= {"align-signatures", "align-proofs", "align-keys", "align-key-signatures"}
    rare |= {"align-sizes", "align-holders", "not-saved"}
    if method != "PPFL-GNN":
        rare |= {"prepare-signature", "mask-signatures", "unmask-signatures"}
        rare |= {"unmask-columns", "sum-signed", "sum-party", "sum-commitment", "sum-signature"}
    if method == "nFedGNN":  # of its enrolment, with one layer for all
        rare |= {"layer-round", "key-public", "key-check", "key-signed-by"}
    rare |= {row[3].strip("`") for row in SECTIONS["Checkpoints"] + SECTIONS["Metrics"]}
    unseen = [
        entry
        for entry in said
        if entry.key not in rare
        and not any(s[:3] == entry[:3] and fnmatch(s.key, entry.key) for s in seen)
    ]
    assert not unseen, "\n".join(" ".join(entry) for entry in sorted(unseen))


def test_every_key_is_on_the_page() -> None:
    found = {row[3].strip("`") for rows in SECTIONS.values() for row in rows}
    found |= {row[2].strip("`") for rows in SECTIONS.values() for row in rows}
    constants = {v for name, v in vars(keys).items() if name.isupper() and isinstance(v, str)}
    kinds = [
        *Message.__subclasses__(),
        *RoundMessage.__subclasses__(),
        *SumMessage.__subclasses__(),
    ]
    kinds = [kind for kind in kinds if not kind.__subclasses__()]
    declared = [field for kind in kinds for field in fields_of(kind).values()]
    assert len(declared) > 150
    said = {field.key for field in declared if not isinstance(field, Part)} - {""}
    constants |= {key.rpartition("/")[2] for key in said}
    lacking = {key for key in constants - NOT_SENT if not any(fnmatch(key, f) for f in found)}
    assert lacking <= {"judged-"} and not NOT_SENT - constants, sorted(lacking)
