"""The two alignments that hide nothing, from the first message to the slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from align_helpers import shared
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_graph.errors import AlignmentError, MalformedReplyError, RefusedError, StateLostError
from flower_graph.messages.arrays import pack_integers
from flower_graph.messages.keys import (
    ALIGN_CLIENTS,
    ALIGN_COEFFICIENTS,
    ALIGN_IDENTITIES,
)
from flower_graph.secure.align.plaintext import (
    PlaintextAlignmentClient,
    PlaintextAlignmentServer,
)
from flower_graph.secure.align.polynomial import (
    PolynomialAlignmentClient,
    PolynomialAlignmentServer,
)

DATA = {0: [1, 2, 3], 5: [3, 4], 2: [7, 2, 3, 9]}
FORMS = [
    (PolynomialAlignmentClient, PolynomialAlignmentServer),
    (PlaintextAlignmentClient, PlaintextAlignmentServer),
]
Form = tuple[Any, Any]


def exchange(server: Any, hosts: dict[int, Any], data: dict[int, Any], silent: int = -1) -> bool:
    """Run one stage, every host from its state as bytes; whether there was one."""
    requests = server.requests()
    for node, request in requests.items():
        own = {client: data[client] for client in hosts[node]._identities}
        hosts[node] = type(hosts[node]).from_bytes(hosts[node].to_bytes(), own)
        if node != silent:
            server.take(node, hosts[node].answer(request.to_config()))
    return bool(requests)


def slots(server: Any, hosts: dict[int, Any], data: dict[int, Any]) -> dict[object, int]:
    """Publish; return the slot of every identity, after checking that holders agree."""
    found: dict[object, int] = {}
    for node, message in server.publications().items():
        assert hosts[node].answer(message.to_config()) == {}
        table = hosts[node].slots
        for client, own in table.by_client.items():
            for identity, slot in zip(data[client], own.tolist(), strict=True):
                assert found.setdefault(identity, slot) == slot
    placed = sorted(slot for slot in found.values() if slot >= 0)
    assert placed == list(range(table.num_slots))
    return found


def assigned(form: Form, data: dict[int, Any], nodes: int) -> tuple[Any, dict[int, Any]]:
    clients = sorted(data)
    hosts = {
        node: form[0]({client: data[client] for client in clients[node::nodes]})
        for node in range(nodes)
        if clients[node::nodes]
    }
    server = form[1]()
    for node, host in hosts.items():
        server.enroll(node, host._identities)
    return server, hosts


@pytest.mark.parametrize("form", FORMS)
def test_shared_identities_get_slots_and_others_none(form: Form) -> None:
    server, hosts = assigned(form, DATA, 2)
    while exchange(server, hosts, DATA):
        pass
    assert server.settled
    # The polynomials' order: first what all three hold, then the pair's.
    expected = {PolynomialAlignmentClient: {3: 0, 2: 1}, PlaintextAlignmentClient: {2: 0, 3: 1}}[
        form[0]
    ]
    assert slots(server, hosts, DATA) == {1: -1, 4: -1, 7: -1, 9: -1} | expected


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15, deadline=None)
@given(
    data=st.dictionaries(
        st.integers(0, 9), st.lists(st.integers(0, 9), unique=True), min_size=1, max_size=10
    ),
    nodes=st.integers(1, 3),
)
def test_any_sets_dealt_in_any_way(form: Form, data: dict[int, Any], nodes: int) -> None:
    server, hosts = assigned(form, data, nodes)
    while exchange(server, hosts, data):
        pass
    found = slots(server, hosts, data)
    assert {identity for identity, slot in found.items() if slot >= 0} == shared(data)


@pytest.mark.parametrize("form", FORMS)
def test_who_is_silent_is_named_and_left_out(form: Form) -> None:
    server, hosts = assigned(form, DATA, 2)
    exchange(server, hosts, DATA, silent=1)
    while exchange(server, hosts, DATA):
        pass
    assert server.blamed == [(2, "did not answer the alignment")]
    rest = {client: DATA[client] for client in (0, 5)}
    found = slots(server, hosts, rest)
    assert [identity for identity, slot in found.items() if slot >= 0] == [3]


@pytest.mark.parametrize("form", FORMS)
def test_later_clients_make_all_begin_again(form: Form) -> None:
    data = {**DATA, 9: [9, 1]}
    server, hosts = assigned(form, DATA, 2)
    while exchange(server, hosts, data):
        pass
    hosts[7] = form[0]({9: data[9]})
    server.enroll(7, [9])
    while exchange(server, hosts, data):
        pass
    found = slots(server, hosts, data)
    assert {identity for identity, slot in found.items() if slot >= 0} == {1, 2, 3, 9}


def test_the_server_reads_the_identities_from_the_polynomials() -> None:
    from flower_graph.secure.align.polynomial import evaluate

    server, hosts = assigned((PolynomialAlignmentClient, PolynomialAlignmentServer), DATA, 2)
    while exchange(server, hosts, DATA):
        pass
    for client, coefficients in server.polynomials.items():
        values = evaluate(coefficients[None], np.arange(100, dtype=np.uint64), server._prime)
        assert np.flatnonzero(values[:, 0] == 0).tolist() == sorted(DATA[client])


@pytest.mark.parametrize("form", FORMS)
def test_malformed_and_second_answers_are_refused(form: Form) -> None:
    server, hosts = assigned(form, DATA, 1)
    request = server.requests()[0]
    reply = hosts[0].answer(request.to_config())
    changes: list[dict[str, Any]] = [{ALIGN_CLIENTS: pack_integers(np.array([0, 2, 4]))}]
    if form[0] is PolynomialAlignmentClient:
        changes += [{ALIGN_COEFFICIENTS: b"\xff" * len(reply[ALIGN_COEFFICIENTS])}]
        changes += [{ALIGN_COEFFICIENTS: reply[ALIGN_COEFFICIENTS][4:]}]
    else:
        texts = ["{", "[]", "[[1],[],[]]", '["i:1","i:1","i:1"]', '[["i:1","i:1"],[],[]]', None]
        changes += [{ALIGN_IDENTITIES: text} for text in texts]
    for change in changes:
        with pytest.raises(MalformedReplyError):
            server.take(0, reply | change)
    server.take(0, reply)
    with pytest.raises(MalformedReplyError, match="has answered already"):
        server.take(0, reply)


def test_clients_that_disagree_about_an_intersection_are_an_error() -> None:
    server, hosts = assigned((PolynomialAlignmentClient, PolynomialAlignmentServer), DATA, 3)
    exchange(server, hosts, DATA)
    for node, request in server.requests().items():
        reply = hosts[node].answer(request.to_config())
        if node == 2:
            reply["align-counts"] = pack_integers(np.array([1, 7]))
        server.take(node, reply)
    with pytest.raises(AlignmentError, match="in which others count"):
        server.publications()


@pytest.mark.parametrize("form", FORMS)
def test_hosts_refuse_what_they_cannot_answer(form: Form) -> None:
    server, hosts = assigned(form, DATA, 1)
    request = server.requests()[0].to_config()
    with pytest.raises(RefusedError, match="stage"):
        hosts[0].answer({"align-stage": "sing"})
    with pytest.raises(RefusedError, match=r"clients \[8\]"):
        hosts[0].answer(request | {ALIGN_CLIENTS: pack_integers(np.array([8]))})
    server.take(0, hosts[0].answer(request))
    while exchange(server, hosts, DATA):
        pass
    slots(server, hosts, DATA)
    with pytest.raises(StateLostError, match="not hosted here"):
        form[0].from_bytes(hosts[0].to_bytes(), {0: [1]})
    with pytest.raises(ValueError, match="client 1 has identities twice: numbers 0 and 1"):
        form[0]({1: [4, 4]})
