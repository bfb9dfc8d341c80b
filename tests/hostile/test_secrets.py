"""No secret in logs, reports, results, checkpoints, errors or the text of an object.

Every key, seed, share and pad key that is made is collected while a run goes on, and then searched
for, in all the ways in which bytes can be written down, wherever the run left something.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ego_strategy_helpers import run as run_ego
from ego_strategy_helpers import seven_egos
from flwr.app import Context, Message
from public_helpers import toy_members

from flower_graph.client.adaptor import make_client_app
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.client import SUM_STATE
from flower_graph.secure.sum.client import SumClient
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.fedscem import cohort_client as ego_host
from flower_graph.strategies.ppfl.secure_consensus import (
    SecureConsensus,
)
from flower_graph.strategies.ppfl.secure_consensus_client import (
    SecureConsensusClient,
)

SHORTEST = 16  # bytes of a secret that are searched for
Next = Callable[..., Message]


class Collector:
    """A mod that notes the secrets of its client after each message, and spoils some requests."""

    def __init__(self, spoil: frozenset[str] = frozenset()) -> None:
        self.secrets: set[bytes] = set()
        self.texts: list[str] = []
        self.spoil = spoil

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        number = message.metadata.group_id
        if f"{message.metadata.message_type} {number}" in self.spoil:
            for record in message.content.config_records.values():
                for key, value in record.items():
                    if isinstance(value, bytes) and value:
                        record[key] = value[:-1] + bytes([value[-1] ^ 1])
        try:
            return call_next(message, context)
        except Exception as error:
            self.texts.append(repr(error))
            raise
        finally:
            self._note(context)

    def _note(self, context: Context) -> None:
        for key, (_, live) in ego_host._LIVE.items():
            if key[:2] == (context.run_id, context.node_id):
                self.texts += [repr(live), str(live)]
                for part in live if isinstance(live, tuple) else (live,):
                    self.secrets |= set(secrets_of(part))
                    inner = (getattr(part, name, None) for name in ("_rounds", "_table"))
                    self.texts += [repr(one) for one in inner]
        for record in context.state.config_records.values():
            data = record.get(SUM_STATE)
            if isinstance(data, bytes):
                host = SumClient.from_bytes(data)
                self.texts += [repr(host), repr(host._rounds)]
                self.secrets |= set(secrets_of(host))


def secrets_of(part: Any) -> Iterator[bytes]:
    """Give all secrets of a host."""
    if isinstance(part, SumClient):
        yield part._private
        yield from part._agreed._known.values()
        for kept in part._rounds.values():
            for secret in (kept.seed, kept.private, *kept.secrets):
                yield secret.tobytes()
            yield from (share.tobytes() for share in kept.held.reshape(-1, kept.held.shape[-1]))
    if isinstance(part, AlignmentClient):
        yield from (bytes(secret) for secret in part._secrets.values())
        for keys in part._keys.values():
            yield from (key.tobytes() for key in keys)
        yield part._group_key


def spellings(secret: bytes) -> Iterator[bytes]:
    """Give the ways to write bytes down: the whole of them, or a part that is long enough."""
    part = secret[:SHORTEST]
    yield part
    for text in (part.hex(), part.hex().upper(), repr(part)[2:-1]):
        yield text.encode()
    yield base64.b64encode(secret[:15])
    yield base64.urlsafe_b64encode(secret[:15])
    for between in (", ", " ", ",", ",\n"):
        yield between.join(str(number) for number in part[:8]).encode()


def found_in(secrets: set[bytes], places: dict[str, bytes]) -> list[str]:
    """Search for secrets; lists of numbers are compared without what NumPy fills lines with."""
    known = {s for s in secrets if len(s) >= SHORTEST and len(set(s)) > 4}
    words = {spelt for secret in known for spelt in spellings(secret)}
    shown = {place: data + b"\n" + b" ".join(data.split()) for place, data in places.items()}
    return [place for place, data in shown.items() if any(word in data for word in words)]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Everything that is logged, at the level DEBUG, with tracebacks."""
    for name in (None, "flower_graph"):
        caplog.set_level(logging.DEBUG, name)
    return caplog


def left(folder: Path, log: str, reports: list[Any], texts: list[str]) -> dict[str, bytes]:
    """Gather all that a run left for people."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    said = json.dumps([asdict(report) for report in reports], default=str)
    parts = {"log": log, "reports": said, "texts": "\n".join(texts)}
    return files | {name: text.encode() for name, text in parts.items()}


SPOILT = frozenset({"train.unmask 2", "train 3", "train.unmask 4"})


@pytest.mark.parametrize("alignment", ["psi", "plain"])
@pytest.mark.parametrize("spoil", [frozenset(), SPOILT], ids=["well", "errors"])
def test_fedscem(alignment: str, spoil: frozenset[str], tmp_path: Path, log: Any) -> None:
    seen = Collector()
    bad = Collector(spoil)

    def some(message: Message, context: Context, call_next: Next) -> Message:
        own = bad if context.node_config["partition-id"] == 1 else seen
        return own(message, context, call_next)

    outcome = run_ego(
        seven_egos(),
        rounds=5,
        supernodes=3,
        deal=[[1, 2, 3], [0], [4, 5, 6]],
        mods=[some],
        alignment=alignment,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=1,
        client_options={"checkpoint_dir": tmp_path / "checkpoints"},
    )
    secrets = seen.secrets | bad.secrets
    places = left(tmp_path, log.text, outcome.reports, seen.texts + bad.texts)
    assert len(secrets) > 50
    assert any(place.startswith("checkpoints") for place in places) or spoil
    assert bool(spoil) == ("error reply" in log.text)
    assert found_in(secrets, places) == []


@pytest.mark.parametrize("spoil", [frozenset(), frozenset({"train.sum_unmask 2", "train 3"})])
def test_secure_consensus(spoil: frozenset[str], tmp_path: Path, log: Any) -> None:
    seen, members = Collector(spoil), toy_members()
    embeddings: set[bytes] = set()

    def client_fn(context: Context) -> SecureConsensusClient:
        own = members[int(context.node_config["partition-id"])]
        return SecureConsensusClient(context, [own], checkpoint_dir=tmp_path / "checkpoints")

    def note(message: Message, context: Context, call_next: Next) -> Message:
        reply = call_next(message, context)
        record = context.state.array_records.get("public-rotations", {})
        embeddings.update(array.numpy().tobytes() for array in record.values())
        return reply

    app = make_client_app(client_fn, mods=[seen, note])
    grid, reports = InProcessGrid(app, num_supernodes=4), list[Any]()
    SecureConsensus(checkpoint_dir=tmp_path / "checkpoints", checkpoint_every=1).start(
        grid, num_rounds=4, timeout=0.05, on_round=reports.append
    )
    assert bool(spoil) == ("error reply" in log.text)
    assert len(seen.secrets) > 50
    assert embeddings
    places = left(tmp_path, log.text, reports, seen.texts)
    assert any(place.startswith("checkpoints") for place in places)
    assert found_in(seen.secrets, places) == []
    # A client's own checkpoint has its model, which makes the embeddings
    places = {place: data for place, data in places.items() if "client-" not in place}
    assert any(place.startswith("checkpoints") for place in places)
    assert found_in(embeddings, places) == []


@pytest.mark.parametrize("write", [bytes.hex, repr, lambda b: str(list(b)), str], ids=range(4))
def test_the_search_finds_what_is_there(write: Callable[[bytes], str]) -> None:
    secret = bytes(range(7, 39))
    assert found_in({secret}, {"log": f"key {write(secret)}!".encode()}) == ["log"]
    row = np.frombuffer(secret, np.uint8)
    assert found_in({secret}, {"log": str(row[None]).encode()}) == ["log"]
    assert found_in({secret}, {"file": b"x" + secret}) == ["file"]
    assert found_in({secret}, {"log": b"nothing"}) == []
