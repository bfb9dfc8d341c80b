"""PPFL-GNN's messages: what goes in comes out, and what does not fit is refused."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.ppfl.messages import (
    EmbeddingEnrolment,
    PublicReply,
    PublicRequest,
    fingerprint,
)
from flower_graph.wire import keys
from flower_graph.wire.arrays import decode_array, encode_array, pack_integers

HELLO = EmbeddingEnrolment([3, 1], [np.array([7, 5]), np.array([5])], [2, 2])
REQUEST = PublicRequest(
    4, [3, 1], HELLO.nodes, [np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), None], 2, is_last=True
)


def answer(reply: PublicReply) -> RecordDict:
    """Write a reply as the adaptor does."""
    arrays, _, metrics = reply.to_numpy()
    names, left_out = metrics.pop(keys.ARRAY_NAMES), metrics.pop(keys.LEFT_OUT, [])
    named = {n: encode_array(n, value) for n, value in zip(names, arrays, strict=True)}
    content = RecordDict({keys.METRICS: MetricRecord(metrics), keys.ARRAYS: ArrayRecord(named)})
    if left_out:
        content[keys.CONFIG] = ConfigRecord({keys.LEFT_OUT: left_out})
    return content


def good_reply() -> PublicReply:
    rows = [np.full((2, 2), 0.5, np.float32), np.array([[6.0, 7.0]], np.float32)]
    return PublicReply(REQUEST, rows, [1.0, 2.0], [0.1, float("nan")], {"val": [0.6, 0.7]})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({keys.CLIENTS: [], keys.ROWS: [], "nodes": b"", "dimensions": []}, "clients"),
        ({keys.CLIENTS: [3, 3]}, r"\[3, 3\]"),
        ({keys.CLIENTS: [3, -1]}, "numbers.*0"),
        ({keys.CLIENTS: [1]}, "rows.*1"),
        ({keys.ROWS: [3, 0], "nodes": pack_integers(np.array([7, 5, 4]))}, "client 1"),
        ({keys.ROWS: [2, 2]}, "nodes"),
        ({"dimensions": [2, 0]}, "client 1.*0"),
        ({"nodes": pack_integers(np.array([7, 7, 5]))}, "client 3"),
    ],
)
def test_a_hello_that_cannot_be_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(MalformedReplyError, match=why):
        EmbeddingEnrolment.read(
            RecordDict({keys.CONFIG: ConfigRecord(HELLO.to_config() | changes)})
        )


def read_at_client(request: PublicRequest, nodes: dict[int, Any]) -> PublicRequest:
    content = request.to_record()
    arrays = content.array_records.get(keys.ARRAYS, ArrayRecord())
    parameters = [decode_array(name, value) for name, value in arrays.items()]
    return PublicRequest.from_numpy(
        parameters, dict(content.config_records[keys.CONFIG]), public=nodes
    )


def test_a_request_and_its_missing_targets() -> None:
    found = read_at_client(REQUEST, {3: HELLO.nodes[0], 1: HELLO.nodes[1], 8: np.array([1])})
    assert (found.server_round, found.clients, found.is_last) == (4, [3, 1], True)
    first, second = found.targets
    assert first is not None and first.tolist() == [[1, 2], [3, 4]] and second is None
    request = PublicRequest(1, [1], [HELLO.nodes[1]], [None], 2, wants_embeddings=False)
    assert not request.to_record().array_records
    found = read_at_client(request, {1: HELLO.nodes[1]})
    assert (found.targets, found.wants_embeddings) == ([None], False)


def test_a_request_for_other_nodes_or_clients_is_refused() -> None:
    for other in ({}, {3: np.array([5, 7])}):
        with pytest.raises(ValueError, match="client 3"):
            read_at_client(REQUEST, {1: HELLO.nodes[1], **other})
    parameters = [np.zeros((4, 2), np.float32)]
    config = dict(REQUEST.to_record().config_records[keys.CONFIG])
    with pytest.raises(ValueError, match=r"\(4, 2\).*\[3, d\]"):
        PublicRequest.from_numpy(parameters, config, public={3: HELLO.nodes[0], 1: HELLO.nodes[1]})


def test_who_is_left_out_is_named_and_never_read_as_zeros() -> None:
    reply = good_reply()
    reply.embeddings[1], reply.left_out = None, {1: "its embeddings are not finite"}
    found = PublicReply.answering(REQUEST, answer(reply))
    assert [rows is None for rows in found.embeddings] == [False, True]
    assert found.left_out == {1: "its embeddings are not finite"}
    # The server itself leaves out who sends what is no number.
    reply = good_reply()
    assert reply.embeddings[0] is not None
    reply.embeddings[0][1, 0] = np.inf
    found = PublicReply.answering(REQUEST, answer(reply))
    assert [rows is None for rows in found.embeddings] == [True, False]
    assert found.left_out == {3: "its embeddings are not finite"}


def test_fingerprints_tell_order_and_ids() -> None:
    prints = {fingerprint(np.array(ids)) for ids in ([1, 2], [2, 1], [1], [1, 2, 0])}
    assert len(prints) == 4
    assert all(0 <= number < 2**63 for number in prints)
