"""What is kept comes back, from this process or from bytes, and nothing else does."""

from __future__ import annotations

import pytest
from flwr.app import Context, RecordDict

from flower_graph.errors import StateLostError
from flower_graph.secure import secret_store as vault
from flower_graph.secure.secret_store import SecretStore


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "_LIVE", {})


def context_of(state_dir: str = "", node_id: int = 5) -> Context:
    return Context(1, node_id, {"state-dir": state_dir}, RecordDict(), {})


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vault, "_LIVE", {})


@pytest.mark.parametrize("state_dir", ["", ":memory:"])
def test_the_object_itself_comes_back_in_the_same_process(state_dir: str) -> None:
    context, kept = context_of(state_dir), [1, 2]
    SecretStore[list[int]](context, "a").keep(kept, bytes)
    assert SecretStore[list[int]](context, "a").load(list) is kept


def test_another_process_reads_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of()
    SecretStore[list[int]](context, "a").keep([1, 2], bytes)
    forget_process(monkeypatch)
    assert SecretStore[list[int]](context, "a").load(list) == [1, 2]


def test_in_process_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    context = context_of(":memory:")

    def write(kept: object) -> bytes:
        raise AssertionError("nobody else could read it")

    SecretStore[list[int]](context, "a").keep([1], write)
    assert list(context.state["a"]) == ["token"]
    forget_process(monkeypatch)
    with pytest.raises(StateLostError, match="its keys went with another process"):
        SecretStore[list[int]](context, "a").load(list)


def test_a_context_that_was_taken_back_gives_the_older_object() -> None:
    # A message that failed after its work: Flower goes on with the context of before.
    context = context_of()
    SecretStore[list[int]](context, "a").keep([1], bytes)
    before = context.state["a"].copy()
    SecretStore[list[int]](context, "a").keep([2], bytes)
    context.state["a"] = before
    assert SecretStore[list[int]](context, "a").load(list) == [1]


def test_names_and_nodes_are_apart() -> None:
    one, other = context_of(), context_of(node_id=6)
    SecretStore[list[int]](one, "a").keep([1], bytes)
    for context, name in ((one, "b"), (other, "a")):
        with pytest.raises(StateLostError, match="its keys of this run are not here"):
            SecretStore[list[int]](context, name).load(list)


def test_what_is_dropped_is_gone() -> None:
    context = context_of()
    kept = SecretStore[list[int]](context, "a")
    kept.keep([1], bytes)
    kept.drop()
    kept.drop()
    assert not list(context.state.keys())
    assert vault._LIVE == {}
    with pytest.raises(StateLostError):
        kept.load(list)
