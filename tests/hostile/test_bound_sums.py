"""A server tells one SuperNode of another sum than the rest: it gets no sum that can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from party_helpers import write_keys

from flower_graph.client.adaptor import make_client_app
from flower_graph.secure.client import SecureSumClient
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.ring import SIGNED, Ring
from flower_graph.secure.sum.messages import SumTerms
from flower_graph.secure.sum.round import Skipped, SumResult
from flower_graph.secure.sum.service import SecureSum
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.exchange import Exchange
from flower_graph.wire.keys import CONFIG

COUNT, LENGTH = 6, 4096
# Entries of the request for masked vectors, and what the victim is told in their place
LIES = {
    "fraction-bits": lambda bits: bits + 10,
    "guard-bits": lambda bits: bits + 3,
    "limit": lambda limit: 2 * limit,
    "mask-word": lambda word: 96 - word,
    "word": lambda word: 96 - word,
}


def vector(client: int) -> Any:
    """Draw a client's numbers."""
    return np.random.default_rng(client).normal(size=LENGTH)


class Vectors(SecureSumClient):
    def vectors(self, config: Any) -> Any:
        return {client: vector(client) for client in self.clients}


class TellsOneOtherwise(InProcessGrid):
    """Changes an entry in what the victim alone is sent."""

    changed: str = ""
    told = 0

    def push_messages(self, messages: Any) -> Any:
        victim = sorted(self.get_node_ids())[0]
        for message in messages:
            if message.metadata.dst_node_id == victim:
                self._tell(message)
        return super().push_messages(messages)

    def _tell(self, message: Message) -> None:
        config = message.content.config_records.get(CONFIG, {})
        if self.changed in config and "mask-length" in config:
            config[self.changed] = LIES[self.changed](config[self.changed])
            if self.changed == "mask-word":  # the ring's word must be the masks' to be believed
                config["word"] = config["mask-word"]
            self.told += 1


@pytest.mark.parametrize("trusted", [True, False], ids=["semi-honest", "malicious-server"])
@pytest.mark.parametrize("lie", ["", *LIES])
def test_a_form_that_one_supernode_is_told_leaves_no_readable_sum(
    lie: str, trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, keys = write_keys(COUNT, tmp_path)

    def client_fn(context: Any) -> Vectors:
        place = context.node_config["partition-id"]
        if not trusted:
            context.node_config |= {"identity-key": str(keys[place]), "registry": str(registry)}
        return Vectors(context, [2 * place, 2 * place + 1])

    grid = TellsOneOtherwise(make_client_app(client_fn), num_supernodes=COUNT)
    grid.changed = lie
    server = None if trusted else PartySums(registry)
    secure = SecureSum(Exchange(grid), limit=100.0, server=server, guard=True)
    totals: list[SumResult] = []
    end = secure.result

    def noted() -> SumResult | Skipped:
        found = end()
        totals.extend([found] if isinstance(found, SumResult) else [])
        return found

    monkeypatch.setattr(secure, "result", noted)
    summed = secure.sum(1, LENGTH)
    if not lie:
        assert not isinstance(summed, Skipped)
        assert np.allclose(summed.values, sum(map(vector, range(2 * COUNT))), atol=1e-3)
        return
    assert grid.told
    if not isinstance(summed, Skipped):  # it has refused, and the sum is the others'
        assert summed.contributors.size == 2 * COUNT - 2
        assert np.allclose(summed.values, sum(map(vector, summed.contributors)), atol=1e-3)
        return
    (total,) = totals
    words = total.total.view(SIGNED[8 * total.total.itemsize]).astype(np.float64)
    for read in (words, words % 2.0**16, words / 2.0**16 % 2.0**16):
        for place in range(COUNT):
            shown = vector(2 * place) + vector(2 * place + 1)
            assert abs(np.corrcoef(read, shown)[0, 1]) < 5 / np.sqrt(LENGTH)


def test_pads_are_those_of_one_sum_as_masks_are() -> None:
    ring = Ring(64, 20, 3, 32.0)
    terms = SumTerms("a sum", ring, b"layout", padded=True)
    rings = [replace(ring, **one) for one in ({"fraction_bits": 21}, {"guard_bits": 4},
             {"limit": 33.0}, {"word": 32, "fraction_bits": 8})]  # fmt: skip
    others = [replace(terms, ring=one) for one in (*rings, None)]
    others += [replace(terms, purpose="another"), replace(terms, detail=b"another")]
    contexts = [one.pad_context(b"a run") for one in (terms, *others)]
    contexts.append(terms.pad_context(b"another run"))
    assert len(set(contexts)) == len(contexts) == 9


class TellsOneALimit(TellsOneOtherwise):
    """Tells the victim a tenth of the limit in some entries, and notes all that it answers."""

    lies: tuple[str, ...] = ()

    def push_messages(self, messages: Any) -> Any:
        self.answers: list[Any] = getattr(self, "answers", [])
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        victim = sorted(self.get_node_ids())[0]
        for reply in (one for one in replies if one.metadata.src_node_id == victim):
            said: Any = reply.error.reason.split(":")[0] if reply.has_error() else None
            if said is None:
                config = reply.content.config_records.get(CONFIG, {})
                said = {
                    key: len(v) if isinstance(v, bytes) else type(v) for key, v in config.items()
                }
            self.answers.append((reply.metadata.message_type, said))
        return replies

    def _tell(self, message: Message) -> None:
        config = message.content.config_records.get(CONFIG, {})
        for key in config.keys() & {*self.lies}:
            config[key] = float(config[key]) / 10  # type: ignore[arg-type]
            self.told += 1


@pytest.mark.parametrize("lies", [("limit",), ("reveal-limit",), ("limit", "reveal-limit")])
def test_another_limit_for_one_supernode_tells_no_bit(
    lies: tuple[str, ...], tmp_path: Path
) -> None:
    """Whether its numbers are below the limit that it is told or above, it answers the same."""
    seen, sums = [], []
    registry, keys = write_keys(COUNT, tmp_path)
    for size in (1.0, 20.0):

        class Sized(SecureSumClient):
            def vectors(self, config: Any) -> Any:
                scale = size if self.context.node_id == victim else 1.0  # noqa: B023
                return {client: scale * vector(client) for client in self.clients}

        def client_fn(context: Any) -> Sized:
            place = context.node_config["partition-id"]
            files = {"identity-key": str(keys[place]), "registry": str(registry)}
            context.node_config |= files
            return Sized(context, [2 * place, 2 * place + 1])

        grid = TellsOneALimit(make_client_app(client_fn), num_supernodes=COUNT)
        victim, grid.lies = sorted(grid.get_node_ids())[0], lies
        server = PartySums(registry)
        server._verify = lambda *_: None  # type: ignore[method-assign]
        secure = SecureSum(Exchange(grid), limit=100.0, server=server, timeout=20)
        sums.append(secure.sum(1, LENGTH))
        assert grid.told
        seen.append(grid.answers)
        for file in tmp_path.glob("*.journal"):  # the other run is another world
            file.unlink()
    for answers in seen:  # by which graph of partners it is told, it refuses before that, too
        assert any(said == "RefusedError" for _, said in answers)
        assert {said for kind, said in answers if kind == "train.sum_mask"} <= {"RefusedError"}
    for one in sums:
        assert isinstance(one, Skipped) or one.contributors.size == 2 * COUNT - 2
