"""Sums over Flower messages under a server that parties need not trust."""

import logging

import numpy as np
import pytest
from party_helpers import write_keys

from flower_graph.client.adaptor import make_client_app
from flower_graph.secure.sum.masking_client import SecureSumClient
from flower_graph.secure.sum.party_server import PartyServer
from flower_graph.secure.sum.server import Skipped
from flower_graph.secure.sum.service import SecureSum
from flower_graph.server.exchange import Exchange
from flower_graph.simulation import InProcessGrid


class Numbered(SecureSumClient):
    def vectors(self, config):
        return {c: np.array([c, 1.0]) for c in self.clients if c != 4}


@pytest.fixture
def parties(tmp_path):
    registry, keys = write_keys(6, tmp_path)

    def client_fn(context):
        place = context.node_config["partition-id"]
        context.node_config |= {"identity-key": str(keys[place]), "registry": str(registry)}
        return Numbered(context, [2 * place, 2 * place + 1])

    return InProcessGrid(make_client_app(client_fn), num_supernodes=6), registry


def make(parties, **options):
    grid, registry = parties
    options = {"trust": "malicious-server", "registry": registry} | options
    return grid, SecureSum(Exchange(grid), limit=1000.0, **options)


def test_sums_with_one_exchange_more(parties):
    grid, secure = make(parties)
    sent, push = [], grid.push_messages
    grid.push_messages = lambda messages: sent.append(messages) or push(messages)
    for server_round in range(1, 4):
        sent.clear()
        summed = secure.sum(server_round, 2)
        assert len(sent) == 3 or server_round == 1
        assert summed.contributors.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
        assert summed.values.tolist() == [62, 11]


def test_who_has_a_key_refuses_a_server_that_wants_to_be_trusted(parties):
    _, secure = make(parties, trust="semi-honest", registry=None)
    assert isinstance(secure.sum(1, 2), Skipped)
    assert len(secure.rejected) == 6
    assert "takes part in no sum whose server is trusted" in str(secure.rejected[0])


def test_a_lying_server_is_refused_and_the_log_says_why(parties, monkeypatch, caplog):
    _, secure = make(parties)
    honest = PartyServer.list_requests

    def lie(server, number):
        requests = honest(server, number)
        for request in requests.values():
            request.listed[3] = False
        return requests

    monkeypatch.setattr(PartyServer, "list_requests", lie)
    with caplog.at_level(logging.WARNING):
        assert isinstance(secure.sum(1, 2), Skipped)
    assert "we are not on the list" in caplog.text + str(secure.rejected)


def test_bad_input(parties):
    for options in ({"trust": "nobody"}, {"registry": None}, {"trust": "semi-honest"}):
        with pytest.raises(ValueError, match="trust is"):
            make(parties, **options)
