"""docs/reference/messages.md has every key that is declared, and every key that travels."""

import re
from fnmatch import fnmatch
from functools import cache

import pytest
from doc_helpers import DOCS, script
from federation import ALL, tried

from flower_graph.secure.sum.messages import RoundMessage, SumMessage
from flower_graph.wire import keys
from flower_graph.wire.codec import Message, Part, fields_of

# Constants in keys.py that are no keys on the wire, or that stay at the client
NOT_SENT = {keys.ARRAY_NAMES, keys.SUM_STATE}


@cache
def documented() -> set[str]:
    """Give what is written as code in all tables: keys, before some their record, and values."""
    page = script(DOCS / "generate.py").generate("messages")
    return {
        name for row in re.findall(r"^\|.*", page, re.M) for name in re.findall("`([^`]+)`", row)
    }


def is_documented(key: str, record: str) -> bool:
    """Whether a table has it; an entry of any message may travel in other records than its own."""
    return any(
        fnmatch(key, one) or fnmatch(f"{record}/{key}", one) or key == one.rpartition("/")[2]
        for one in documented()
    )


def test_every_key_is_on_the_page() -> None:
    found = {part for one in documented() for part in one.split("/")} - {"*"}
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
    others = {"judged-", keys.CONFIG, *keys.SCORES}  # a beginning, a record, names of scores
    assert lacking <= others and not NOT_SENT - constants, sorted(lacking - others)


@pytest.mark.parametrize("name", tried(ALL, fast=["nfedgnn", "fedpub"]))
def test_what_travels_is_on_the_page_and_asked_for_and_not_empty(name: str) -> None:
    """Flower cannot count the bytes of an empty entry; nobody has asked for other metrics."""
    done = ALL[name].whole("rounds=3")
    assert "scores" not in (done.out / "metrics.jsonl").read_text(encoding="utf-8")
    for pair in done.grid.exchanged:
        for message in pair:
            for record_name, record in message.content.items():
                assert [key for key in record if not is_documented(key, record_name)] == []
                assert not {keys.COUNTING, keys.COUNTED} & {*record}
                assert [key for key, value in record.items() if value in ("", b"")] == []
