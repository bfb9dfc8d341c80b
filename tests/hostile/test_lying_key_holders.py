"""A server that answers in the key-holders' place is refused; see tests/audit where it is not."""

import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from align_helpers import Alignment
from sum_helpers import settings

from benchmarks.alignment import RUN, SEED
from flower_graph.errors import AlignmentError, RefusedError
from flower_graph.secure.align import blinded as ids
from flower_graph.secure.align.blinded import (
    OF_BLOCK,
    OF_KEY,
    EvaluateRequest,
    block_parts,
    drawn,
    proof_context,
    prove,
    public_of,
)
from flower_graph.secure.channel import rows_of

DATA = {client: [client, client + 1, 100] for client in range(10)}


# The verifiable form ------------------------------------------------------------------------------


class Setting(Alignment):
    """Five parties of two clients each, on SuperNodes of the same numbers, all enrolled."""

    first = 0

    def __init__(self):
        self._folder = TemporaryDirectory()  # of journals
        nodes, trusts = (
            [range(2 * n, 2 * n + 2) for n in range(5)],
            settings(5, Path(self._folder.name)),
        )
        super().__init__(DATA, nodes, RUN, trusts=trusts)
        for party, local in self.nodes.items():
            self.server.enroll(party, local)


@pytest.mark.parametrize("gone", [1, 3])
def test_a_key_holder_that_is_gone_is_replaced_by_the_next_in_the_draw(gone):
    """When more are gone, nothing is aligned."""
    setting, draw = Setting(), drawn(SEED, range(5))
    setting.exchange()
    setting.exchange(lambda party, c: None if party in draw[:gone] else setting.reply(party, c))
    if gone == 3:
        with pytest.raises(AlignmentError, match="at least 3"):
            setting.exchange()
        return
    assert [*setting.exchange()] == draw[3 : 3 + gone]
    setting.align()
    shared = {i for i, slot in setting.slots().items() if slot >= 0}
    assert shared == {*range(1, 10), 100} and setting.server.aligned == sorted(DATA)


def evaluated():
    setting = Setting()
    setting.exchange()
    setting.exchange()
    return setting, setting.server.union_requests()


def forged(setting, request, holder_place, sign):
    """Answer in a key-holder's place with a key of the server's own."""
    key = ids.scalar(os.urandom(32), b"liar", 0)
    holder, public = int(request.holders[holder_place]), public_of(key)
    blocks = [setting.hosts[1]._blocks[client] for client in setting.nodes[1]]
    answers = [ids.multiply(block, key) for block in blocks]
    proofs = [
        prove(key, public, block, answer, proof_context(RUN, 1, holder, client))
        for client, block, answer in zip(setting.nodes[1], blocks, answers, strict=True)
    ]
    names = ("keys", "points", "proofs", "signatures")
    changed = {name: getattr(request, name).copy() for name in names}
    changed["keys"][holder_place] = np.frombuffer(public, np.uint8)
    changed["points"][holder_place] = np.concatenate(answers)
    changed["proofs"][holder_place] = rows_of(proofs, 2, -1)
    if sign is not None:
        signed = setting.trusts[sign].identity.sign(OF_KEY, RUN, b"1", public)
        changed["signatures"][holder_place] = np.frombuffer(signed, np.uint8)
    return replace(request, **changed)


@pytest.mark.parametrize("sign", [None, 4])
def test_a_server_with_a_key_of_its_own_is_refused(sign):
    setting, requests = evaluated()
    holder = int(requests[1].holders[0])
    lie = forged(setting, requests[1], 0, None if sign == holder else sign)
    with pytest.raises(RefusedError, match=f"key-holder {holder}"):
        setting.reply(1, lie.to_config())
    assert setting.hosts[1].finished == []


# What key-holders refuse --------------------------------------------------------------------------


def guess(setting, client, party, points, signer):
    """Have a block of guesses evaluated that no client sent."""
    signed = setting.trusts[signer].identity.sign(OF_BLOCK, *block_parts(RUN, 1, client, points))
    signature = rows_of([signed], 1, 64)
    one = np.array([client]), np.array([party]), np.array([len(points)])
    return EvaluateRequest(1, np.array([0]), points, *one, signature).to_config()


POINTS = rows_of([ids.hash_to_group(RUN, b"i:%d" % i) for i in range(16)], -1, 32)


def test_key_holders_evaluate_no_guesses():
    """Else the server would have H(id) evaluated for all that it wants to try out."""
    setting, holder = Setting(), drawn(SEED, range(5))[0]
    assert len(setting.exchange()) == 5
    setting.exchange()
    for client, party, rows, why in (
        (3, 1, POINTS, "not signed by party 1"),
        (3, 2, POINTS, "may not speak for client 3"),
        (4, 2, POINTS, "a second block"),
        (4, 2, np.concatenate([POINTS, POINTS]), "32 points, it may have 16"),
        (999, 9, POINTS, "may not speak for client 999"),
    ):
        with pytest.raises(RefusedError, match=why):
            setting.reply(holder, guess(setting, client, party, rows, 2))


@pytest.mark.parametrize("state", ["put back", "lost"])
def test_a_key_holder_that_was_started_anew_evaluates_no_second_block(state):
    """Else the server has a dictionary of another block's size for each time it does so."""
    setting, holder = Setting(), drawn(SEED, range(5))[0]
    setting.exchange()
    before = setting.hosts[holder].to_bytes()
    setting.exchange()
    setting.hosts[holder] = setting.host(holder, before if state == "put back" else None)
    with pytest.raises(RefusedError, match=r"client 4.*1"):
        setting.reply(holder, guess(setting, 4, 2, POINTS, 2))


def test_who_is_not_drawn_and_who_knows_no_seed_evaluates_nothing():
    setting = Setting()
    setting.hosts[1]._draw = []
    with pytest.raises(RefusedError, match="seed"):
        setting.hosts[1].answer(guess(setting, 3, 1, np.zeros((16, 32), np.uint8), 1))


def test_a_wrong_proof_is_refused_by_the_server_and_its_key_holder_replaced():
    setting, draw = Setting(), drawn(SEED, range(5))
    setting.exchange()
    request = setting.server.requests()[draw[0]]
    reply = setting.reply(draw[0], request.to_config())
    setting.server.take(draw[0], reply | {"align-proofs": reply["align-proofs"][::-1]})
    for party in draw[1:3]:
        setting.server.take(party, setting.reply(party, setting.server._asked[party].to_config()))
    ((client, why),) = setting.server.blamed
    assert client in setting.nodes[draw[0]] and "a wrong proof" in why
    assert list(setting.exchange()) == [draw[3]]
