"""What a reply may cost the server: claims are checked first, and nothing is ever unpickled."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack_helpers import peak
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from mutations import Evil, objects, with_header

from flower_graph.secure.sum.messages import sum_bytes
from flower_graph.server.averaging_replies import check_replies
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.arrays import decode_array, read_array
from flower_graph.wire.exchange import Gathering
from flower_graph.wire.ledger import ROOM, count_bytes, reply_bytes, setup_bytes

ROOT = Path(__file__).resolve().parents[2]
CODE = [
    path for part in ("flower_graph", "strategies", "apps") for path in (ROOT / part).rglob("*.py")
]
MB = 1 << 20


def large(megabytes: int) -> RecordDict:
    values = Array(np.zeros((megabytes, MB // 4), np.float32))
    metrics = MetricRecord({"num-examples": 1})
    return RecordDict({"arrays": ArrayRecord({"x": values}), "metrics": metrics})


def reply_with(content: RecordDict) -> tuple[Message, Message]:
    """Make a message and a reply to it."""

    def app(message: Message, context: Any) -> Message:
        return Message(content, reply_to=message)

    grid = InProcessGrid(app, num_supernodes=1)  # type: ignore[arg-type]
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), node, "train", group_id="1")
    (reply,) = grid.send_and_receive([message])
    return message, reply


def test_a_reply_of_200_mb_is_refused_without_a_copy() -> None:
    message, reply = reply_with(large(200))
    gathering = Gathering[Any](
        1, lambda node, content: pytest.fail("it was read"), reply_bytes(1000)
    )
    gathering.open[message.metadata.message_id] = message.metadata.dst_node_id
    _, used = peak(lambda: gathering.take(reply, count_bytes(reply.content), {}))
    (entry,) = gathering.replies.rejected
    assert entry.reason.startswith("reply of 2097")
    assert entry.reason.endswith(f"at most {reply_bytes(1000)} allowed")
    assert used < MB


def test_flowers_averaging_refuses_it_too() -> None:
    message, reply = reply_with(large(200))
    model = ArrayRecord({"x": Array(np.zeros((2, 3), np.float32))})
    checked, used = peak(lambda: check_replies([message], [reply], model, 1.0))
    assert checked.usable == []
    assert "at most" in checked.rejected[0].reason
    assert used < MB


@pytest.mark.parametrize("dtype", ["<f4", "|V0", "|S1000000000", "<f8"])
@pytest.mark.parametrize("shape", [(1 << 28,), (1 << 14, 1 << 14), (1 << 62, 1 << 62), (-1, -4)])
def test_a_claim_of_a_gigabyte_costs_nothing(dtype: str, shape: tuple[int, ...]) -> None:
    array = with_header(Array(np.zeros(4, np.float32)), shape, dtype)
    content = RecordDict({"arrays": ArrayRecord({"x": array})})
    why, used = peak(lambda: refusal(lambda: read_array(content, "arrays", "x", (4,))))
    assert "x" in why
    assert used < MB


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        read()
    return str(caught.value)


def test_a_head_that_is_too_long_to_be_one() -> None:
    data = b"\x93NUMPY\x02\x00" + (1 << 30).to_bytes(4, "little") + b"{" * 1000
    array = Array("float32", (4,), "numpy.ndarray", data)
    why, used = peak(lambda: refusal(lambda: decode_array("x", array)))
    assert "not in NumPy's format" in why
    assert used < MB


def test_pickles_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    array = objects()
    np.load(BytesIO(array.data), allow_pickle=True)  # the trap works
    assert (tmp_path / "unpickled").exists()
    os.unlink(tmp_path / "unpickled")
    assert "needs pickle; refused" in refusal(lambda: decode_array("x", array))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        array.numpy()  # Flower's own way
    torch.save({"x": Evil("unpickled")}, tmp_path / "saved.pt")
    with pytest.raises(Exception, match="eights"):
        torch.load(tmp_path / "saved.pt", weights_only=True)
    assert not (tmp_path / "unpickled").exists()


def nodes_of(*kinds: type) -> Iterator[tuple[str, Any]]:
    """Give all parts of the code of some kinds, each with its place."""
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield f"{path.name}:{getattr(node, 'lineno', 0)}", node


def test_no_code_unpickles() -> None:
    picklers = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    found = [
        place
        for place, node in nodes_of(ast.Import, ast.ImportFrom)
        if picklers & {*(alias.name for alias in node.names), getattr(node, "module", "")}
        and not place.startswith("pickled.py:")  # its error alone
    ]
    found += [place for place, node in nodes_of(ast.Call) if not _is_safe(node)]
    assert found == []


def _is_safe(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if given.get("allow_pickle", "False") != "False":
        return False
    if name in ("np.load", "numpy.load"):
        return "allow_pickle" in given
    return name != "torch.load" or given.get("weights_only") == "True"


@pytest.mark.parametrize("load", ["np.load(f)", "torch.load(f)"])
@pytest.mark.parametrize("given", ["", ", allow_pickle=True", ", weights_only=False"])
def test_the_search_for_unsafe_calls_finds_them(load: str, given: str) -> None:
    call = ast.parse(load.replace("(f", f"(f{given}"), mode="eval").body
    assert isinstance(call, ast.Call)
    assert not _is_safe(call)


def test_every_exchange_bounds_its_replies() -> None:
    unbounded = []
    for place, node in nodes_of(ast.Call):
        words = {word.arg for word in node.keywords}
        sends = isinstance(node.func, ast.Attribute) and node.func.attr == "send"
        is_exchange = sends and {"server_round", "timeout"} <= words
        if is_exchange and "max_reply_bytes" not in words:
            unbounded.append(place)
    assert unbounded == []


def test_limits_leave_room_for_what_was_asked() -> None:
    assert reply_bytes(1000, 3) > ROOM + 8 * 1000
    assert setup_bytes(10) > setup_bytes() > 1000 * ROOM / 100
    assert sum_bytes([], []) == ROOM


def test_a_crowd_of_entries_is_counted() -> None:
    crowd = RecordDict({"config": ConfigRecord({f"{n:06d}": "x" * 94 for n in range(20_000)})})
    assert count_bytes(crowd) == 2_000_000 > reply_bytes()
