"""What embeddings say, on messages made by hand."""

from typing import Any

import numpy as np
import pytest
from audit_helpers import by_words, is_a_guess
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.audit.attacks import Exchange
from flower_graph.audit.scores import Finding
from flower_graph.strategies.ppfl import attack as embeddings
from flower_graph.strategies.ppfl.attack import Graph
from flower_graph.wire.arrays import encode_array

PUBLIC = 40


def graph() -> Graph:
    """Join public nodes in pairs; each of two clients has private nodes between others."""
    n = PUBLIC + 20
    edges = np.zeros((n, n), bool)
    for left in range(0, PUBLIC, 2):
        edges[left, left + 1] = edges[left + 1, left] = True
    owner = np.full(n, -1)
    for number in range(20):
        node, ends = PUBLIC + number, (2 * number, (2 * number + 6) % PUBLIC)
        owner[node] = number % 2
        for end in ends:
            edges[node, end] = edges[end, node] = True
    return Graph(edges, np.arange(PUBLIC), owner)


def message(config: dict[str, Any], rows: NDArray[Any] | None = None) -> RecordDict:
    content = RecordDict({"config": ConfigRecord(config)})
    if rows is not None:
        public = encode_array("public", rows.astype(np.float32))
        content["arrays"] = ArrayRecord({"public": public})
    return content


def hello(client: int) -> Exchange:
    return Exchange("query", client, message({}), message({"clients": [client], "rows": [PUBLIC]}))


def a_round(client: int, down: NDArray[Any], up: NDArray[Any] | None, has: bool) -> Exchange:
    request = message({"clients": [client], "with-targets": [int(has)]}, down)
    return Exchange("train", client, request, message({}, up))


def telling(truth: Graph, client: int) -> NDArray[np.float64]:
    """Embed public nodes so that edges and the client's private nodes make them alike."""
    rows = np.eye(PUBLIC)
    for left in range(0, PUBLIC, 2):
        rows[left, left + 1] = rows[left + 1, left] = 0.9
    base = rows.copy()
    for node in np.flatnonzero(truth.owner == client):
        first, second = np.flatnonzero(truth.edges[node, :PUBLIC])
        rows[first] += 0.5 * base[second]
        rows[second] += 0.5 * base[first]
    return rows


def attacked(rounds: list[Exchange]) -> dict[str, Finding]:
    exchanges = [*map(hello, sorted({one.node for one in rounds})), *rounds]
    found = embeddings.attack(exchanges, graph(), np.random.default_rng(0))
    return {one.attack: one for one in found}


NOTHING = np.zeros((PUBLIC, PUBLIC))


def test_embeddings_that_tell_everything_are_read() -> None:
    rows = {client: telling(graph(), client) for client in (0, 1)}
    found = attacked([a_round(client, NOTHING, own, False) for client, own in rows.items()])
    assert by_words(found, "have an edge").success == 1.0
    assert by_words(found, "whose a private node is").success == 1.0
    assert by_words(found, "has a private one").success > 0.95


def test_random_embeddings_are_a_guess() -> None:
    rows = np.random.default_rng(5).normal(size=(2, PUBLIC, PUBLIC))
    found = attacked([a_round(client, NOTHING, rows[client], False) for client in (0, 1)])
    assert all(is_a_guess(one) for one in found.values()), found


def test_means_stand_for_embeddings_that_nobody_sends() -> None:
    mean = telling(graph(), 0)
    found = attacked([a_round(client, mean, None, True) for client in (0, 1)])
    assert by_words(found, "have an edge").success == 1.0
    assert by_words(found, "whose a private node is").success == 0.5
    with pytest.raises(ValueError, match="embeddings"):
        attacked([a_round(0, NOTHING, None, False)])
