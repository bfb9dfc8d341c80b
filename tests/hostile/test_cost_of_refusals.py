"""What refusing a reply costs: errors count, no text is built whole, nobody fills a log."""

import ast
import logging
import os
import re
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from graph_helpers import toy
from hostile_grid import evil, objects, with_header

from flower_graph import ClientGraph
from flower_graph.data import as_graph
from flower_graph.data.description import check_clients, server_graph
from flower_graph.errors import DataError, MalformedReplyError, brief, one_line
from flower_graph.server.averaging import Wanted, check_replies
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedgls.config import StructureSettings
from flower_graph.strategies.fedgls.modules import first_model
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import first_model as first_of
from flower_graph.strategies.ppfl.client import EmbeddingEnrolment
from flower_graph.wire.arrays import decode_array, read_array
from flower_graph.wire.averaging import Trained
from flower_graph.wire.exchange import MAX_NAMED, Rejected, few, log_rejected, require_content
from flower_graph.wire.ledger import ENROLMENT, ROOM, reply_bytes

MB = 1 << 20


def cheap(work: Callable[[], Any], most: int = MB) -> Any:
    """Return what work returns, or the text of its ``ValueError``: it takes so little memory."""
    tracemalloc.start()
    try:
        found = work()
    except ValueError as error:
        found = str(error)
    finally:
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert used < most
    return found


def refused(answer: Any, most: int = ROOM, averaging: bool = False) -> str:
    """Give the reason why a reply is refused, which costs little, also by Flower's averaging.

    ``answer`` makes its content or error.
    """
    app: Any = lambda message, context: Message(answer, reply_to=message)  # noqa: E731
    grid = InProcessGrid(app, num_supernodes=1)
    message = Message(RecordDict(), *grid.get_node_ids(), "train", group_id="1")
    (reply,) = grid.send_and_receive([message])
    if not averaging:
        return one_line(cheap(lambda: require_content(reply, most, 1)))
    wanted = Wanted(ArrayRecord({"x": Array(np.zeros((2, 3), np.float32))}))
    usable, (rejected,), _ = cheap(lambda: check_replies([1], {1: reply}, wanted, 1.0))
    assert usable == []
    return str(rejected.reason)


def test_a_line_is_made_of_a_texts_end() -> None:
    text = "Traceback\n" * (5 * MB) + "ValueError: why"
    assert cheap(lambda: one_line(text)) == "ValueError: why"


def with_array(dtype: str = "float32", shape: tuple[int, ...] = (1,)) -> RecordDict:
    array = Array(dtype, shape, "numpy.ndarray", b"")
    return RecordDict({"arrays": ArrayRecord({"x": array})})


def of_200_mb() -> RecordDict:
    values = Array(np.zeros((200, MB // 4), np.float32))
    metrics = MetricRecord({"num-examples": 1})
    return RecordDict({"arrays": ArrayRecord({"x": values}), "metrics": metrics})


TOO_LARGE: dict[str, tuple[Callable[[], Any], str]] = {
    "a name": (lambda: RecordDict({"x" * (20 * MB): ConfigRecord({"a": 1})}), "reply of 209"),
    "a shape": (lambda: with_array(shape=(1,) * (20 * MB // 8)), "reply of "),
    "a type": (lambda: with_array("f" * (20 * MB)), "reply of 209"),
    "an array": (of_200_mb, "reply of 2097"),
    "an error": (lambda: Error(0, "x" * (50 * MB)), "reply of 52428"),
    "a wide error": (lambda: Error(0, "\U0001d54f" * (50 * MB)), "reply of 52428"),
    "a blank error": (lambda: Error(0, " " * (50 * MB)), "reply of 52428"),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_names_descriptions_arrays_and_errors_count_and_are_refused_without_a_copy(
    what: str,
) -> None:
    make, begins = TOO_LARGE[what]
    said = refused(make())
    assert said.startswith(begins) and f", at most {ROOM} " in said
    assert "at most" in refused(make(), averaging=True)


LARGE: dict[str, Any] = {
    "text": "x" * (60 * MB),
    "bytes": bytes(60 * MB),
    "list": [0] * (8 * MB),
    "mapping": {n: "x" for n in range(100_000)},
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_value_is_quoted_without_writing_all_of_it(kind: str) -> None:
    said = cheap(lambda: brief(LARGE[kind]), MB // 10)
    assert 0 < len(said) <= 60
    if kind in ("text", "list"):
        assert said == repr(LARGE[kind][:100])[:60]


def test_who_is_there_has_a_limit() -> None:
    """61 MiB of ids are refused unread; what is allowed costs a few times its size."""

    def claim(size: int) -> RecordDict:
        ids = np.arange(size // 8, dtype="<i8").tobytes()
        entries: Any = {"clients": [0], "rows": [size // 8], "dimension": 4, "nodes": ids}
        return RecordDict({"config": ConfigRecord(entries)})

    assert "at most" in refused(claim(61 * MB), ENROLMENT)
    allowed = claim(8 * MB)
    answer = cheap(lambda: EmbeddingEnrolment.read(allowed), 6 * 8 * MB)
    assert answer.nodes.size == MB


def test_one_supernode_fills_neither_log_nor_report(caplog: pytest.LogCaptureFixture) -> None:
    entries = [Rejected(1, f"client {n}: no") for n in range(60_000)] + [Rejected(2, "silent")]
    with caplog.at_level(logging.WARNING):
        log_rejected(logging.getLogger("flower_graph"), 1, "left out", entries)
    assert MAX_NAMED == 50  # as docs/security.md says
    assert len(caplog.records) == MAX_NAMED + 2
    kept = few(entries)
    assert len(kept) == MAX_NAMED + 2
    assert kept[-2:] == [Rejected(2, "silent"), Rejected(1, f"and {60_000 - MAX_NAMED} more")]
    assert few(kept[:MAX_NAMED]) == kept[:MAX_NAMED]


def test_lines_of_a_reply_are_bounded() -> None:
    lines = [f"{n}:" + "x" * 50 for n in range(60_000)]
    metrics = MetricRecord({"num-examples": 1, "clients": 1})
    content = RecordDict({"metrics": metrics, "config": ConfigRecord({"left-out": lines})})
    with pytest.raises(MalformedReplyError, match="left-out"):
        Trained.read(content)
    assert reply_bytes() == ROOM


ROOT = Path(__file__).resolve().parents[2]
CODE = [
    path for part in ("flower_graph", "strategies", "apps") for path in (ROOT / part).rglob("*.py")
]


@pytest.mark.parametrize("dtype", ["<f4", "|V0", "|S1000000000"])
@pytest.mark.parametrize("shape", [(1 << 28,), (1 << 62, 1 << 62), (-1, -4)])
def test_a_claim_of_a_gigabyte_costs_nothing(dtype: str, shape: tuple[int, ...]) -> None:
    array = with_header(Array(np.zeros(4, np.float32)), shape, dtype)
    content = RecordDict({"arrays": ArrayRecord({"x": array})})
    assert "x" in cheap(lambda: read_array(content, "arrays", "x", (4,)))


def test_pickles_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    array = objects()
    np.load(BytesIO(array.data), allow_pickle=True)  # the trap works
    assert (tmp_path / "unpickled").exists()
    os.unlink(tmp_path / "unpickled")
    assert "not in NumPy's format" in cheap(lambda: decode_array("x", array))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        array.numpy()  # Flower's own way
    torch.save({"x": evil("unpickled")}, tmp_path / "saved.pt")
    with pytest.raises(Exception, match="eights"):
        torch.load(tmp_path / "saved.pt", weights_only=True)
    assert not (tmp_path / "unpickled").exists()


PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}


def test_no_code_unpickles_and_every_exchange_bounds_its_replies() -> None:
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            bad = False
            if isinstance(node, ast.Import | ast.ImportFrom) and path.name != "formats.py":
                names = {*(alias.name for alias in node.names), getattr(node, "module", "")}
                bad = bool(PICKLERS & names)  # formats.py has its error alone
            elif isinstance(node, ast.Call):
                bad = not _is_safe(node)
            if bad:
                found.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
    assert found == []


def _is_safe(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if given.get("allow_pickle", "False") != "False":
        return False
    if name in ("np.load", "numpy.load"):
        return "allow_pickle" in given
    if name == "torch.load":
        return given.get("weights_only") == "True"
    is_exchange = name.endswith(".send") and {"server_round", "timeout"} <= given.keys()
    return not is_exchange or "max_reply_bytes" in given


def test_a_label_that_is_no_class_is_named() -> None:
    def graph_with(label: int) -> ClientGraph:
        return toy(0, [[1.0, 1.0]] * 3, [0, 1, label], [(0, 1)])

    with pytest.raises(DataError, match=r"client 0.*\[2\]"):
        check_clients([graph_with(10**12)])
    with pytest.raises(DataError, match=r"y\[2\]"):
        server_graph(graph_with(10**12))
    check_clients([graph_with(99_999)])


MANY = 10**9
MAKES: dict[str, Callable[[], Any]] = {
    "as_graph": lambda: as_graph(toy(0, [[1.0]] * 2, [0, 1], [(0, 1)]), num_classes=MANY),
    "structure": lambda: first_model(StructureSettings(2, MANY)),
    "ego": lambda: first_of(EgoSettings(2, MANY)),
}


@pytest.mark.parametrize("make", MAKES)
def test_a_billion_classes_are_refused_before_anything_is_made(make: str) -> None:
    assert re.search("num_classes.*1000000000.*100000", cheap(MAKES[make]))
