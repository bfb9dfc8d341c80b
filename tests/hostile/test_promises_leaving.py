"""What stays at a client's machine: data that a method does not send, paths, a party's secrets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import ALL, Federation
from flwr.app import ArrayRecord, Context, RecordDict
from party_helpers import PartyWorld

from flower_graph.apps.run import client_app
from flower_graph.client.state import ClientCheckpoints
from flower_graph.method.registry import method_of
from flower_graph.storage import checkpoint


def sent(content: RecordDict) -> bytes:
    """Lay all that a reply holds in one line."""
    parts = list[bytes]()
    for record in content.values():
        for value in record.values():
            if isinstance(record, ArrayRecord):
                parts.append(value.numpy().tobytes())
            else:
                parts.append(value if isinstance(value, bytes) else repr(value).encode())
    return b"|".join(parts)


def written(values: torch.Tensor) -> list[bytes]:
    """Write numbers in the ways in which a message could have them."""
    flat = values.numpy()
    types = ("<f4", "<f8") if flat.dtype.kind == "f" else ("<i8", "<i4", "<u1")
    return [flat.astype(one).tobytes() for one in types] + [repr(flat.tolist()).encode()]


@pytest.mark.parametrize("name", ["nfedgnn", "fedgls"])
def test_no_features_labels_or_edges_leave_a_client(name: str) -> None:
    setup = ALL[name]
    config = setup.load()
    method = method_of(config)
    grid = Federation(client_app(config, None), num_supernodes=setup.supernodes)
    method.build_strategy(config, None).start(grid, num_rounds=2, timeout=5.0)
    came = b"|".join(sent(reply.content) for _, reply in grid.exchanged)
    private = [row for row in method.as_graph(config).x if row.any()]
    if name == "fedgls":
        for graph in method.graphs(config):
            edges = graph.hidden_edges if graph.edge_index is None else graph.edge_index
            private += [graph.y, *edges, *(row for row in graph.x if row.any())]
    private = [values for values in private if values.numel() > 8]
    assert len(private) > 10
    for values in private:
        assert not any(way in came for way in written(values))
    there = sent(RecordDict({"arrays": ArrayRecord([private[0].numpy()])}))  # what is sent is found
    assert any(way in there for way in written(private[0]))


@pytest.mark.parametrize(
    "error",
    [
        OSError(13, "Permission denied: /srv/hospital-a/x", "/srv/hospital-a/x"),
        OSError("/srv/hospital-a: gone"),
        FileNotFoundError(2, "No such file", "/srv/hospital-a"),
    ],
)
def test_why_a_checkpoint_was_not_saved_names_no_place(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "save_client", fail)
    node: Any = {"state-dir": str(tmp_path / "state"), "partition-id": 0}
    places = ClientCheckpoints(Context(1, 2, node, RecordDict(), {}), None)
    said = places.save(1, {"a": torch.ones(1)}, "0" * 32)
    assert said and "/" not in said


def test_a_partys_secrets_are_in_no_log_and_in_no_text_of_an_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = PartyWorld.make(6, tmp_path)
    with caplog.at_level(logging.DEBUG):
        world.begin()
        world.check(world.round(0), range(6))
        world.prepare(1)
    party = world.parties[1000]
    assert party.sums is not None
    kept = party.sums._rounds[1]
    secrets = [party._private, kept.seed.tobytes(), kept.private.tobytes()]
    secrets.append(party.trust.identity._key.private_bytes_raw())
    objects = (party, party.trust, party.trust.identity, party.epoch, party.sums, kept)
    texts = [caplog.text, *map(repr, objects), *map(str, objects)]
    texts.append((tmp_path / "0").read_text())  # the journal
    for secret in secrets:
        ways = (secret.hex(), repr(secret)[2:-1], str(list(secret))[1:-1], secret.hex(" "))
        assert not any(way in text for text in texts for way in ways)
        assert any(way in repr({"key": secret}) for way in ways)
