"""A run reads no file, no variable and no setting of a SuperNode's machine, and hears of none."""

import base64
import hashlib
import json
import logging
import pickle
from collections.abc import Callable, Container, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ego_strategy_helpers import run as run_ego
from ego_strategy_helpers import seven_egos
from federation import ALL
from flwr.app import ArrayRecord, Context, Message, RecordDict
from hostile_grid import evil
from public_helpers import bytes_of, toy_members
from sum_helpers import PartyWorld

from flower_graph.apps.client_app import app
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import CohortState
from flower_graph.errors import ConfigError, DataError, RefusedError, StateLostError
from flower_graph.flower_compat import NumPyClient, create_message_to_sign
from flower_graph.method.base import as_graph
from flower_graph.method.permits import configured, configured_client
from flower_graph.method.registry import method_of
from flower_graph.secure.align.blinded import TOKEN
from flower_graph.secure.align.client import AlignmentClient
from flower_graph.secure.sum.client import SUM_STATE, SumClient
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.ppfl.client import TURNS, SecureConsensusClient
from flower_graph.strategies.ppfl.strategy import SecureConsensus
from flower_graph.wire.client_errors import AT_HOME

SECRET = "hunter2-of-this-machine"
SHORTEST = 16  # bytes of a secret that are searched for
Next = Callable[..., Message]
NODE: dict[str, Any] = {"partition-id": 0, "num-partitions": 1}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", SECRET)


def asked(
    client_app: Any,
    tmp_path: Path,
    kind: str = "query",
    node: dict[str, Any] | None = None,
    **run: str,
) -> str:
    """Send a SuperNode a message; return the reason of its error."""
    there = {**NODE, "state-dir": str(tmp_path / "state"), **(node or {})}
    grid = InProcessGrid(client_app, num_supernodes=1, run_config=run, node_config=there)
    (number,) = grid.get_node_ids()
    (reply,) = grid.send_and_receive([Message(RecordDict(), number, kind)])
    assert reply.has_error()
    return str(reply.error.reason)


LEAKS = [
    "device=${oc.env:A_SECRET}",
    "data.name=${oc.env:A_SECRET}",
    "device=${oc.decode:${oc.env:A_SECRET}}",
    "data={name: '${oc.env:A_SECRET}'}",
    "data.ratios=['${oc.env:A_SECRET}',0.1,0.1]",
]


@pytest.mark.parametrize("override", LEAKS)
def test_a_run_config_reads_no_environment(tmp_path: Path, override: str) -> None:
    given = {"config": "quickstart", "overrides": f'"{override}"'}
    said = asked(app, tmp_path, **given)
    assert SECRET not in said
    for at in (configured, configured_client):
        with pytest.raises(ConfigError) as caught:
            at(Context(1, 2, dict(NODE), RecordDict(), dict(given)))
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("data", ["data.root={folder} data.name=Cora", "data.name={folder}/g.pt",
                                  "data.name=Airports/../../{folder}", "data.name={folder}/",
                                  "data.name=../g.json", "data.add={folder}/g.pt"])  # fmt: skip
def test_a_run_chooses_no_files_of_a_supernode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    """A Cora is there whose files run code when they are read."""
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "planted"
    raw = folder / "Planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph"):
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(evil(str(folder / "ran"))))
    (raw / "ind.cora.test.index").write_text("0\n")
    given = data.format(folder=folder)
    said = asked(app, tmp_path, config="nfedgnn/cora", overrides=given)
    assert "ConfigError" in said and "no path" in said
    assert not (folder / "ran").exists()


def test_a_run_reads_no_local_yaml(tmp_path: Path) -> None:
    (tmp_path / "passwords.yaml").write_text(f"seed: {SECRET}\n")
    said = asked(app, tmp_path, config=str(tmp_path / "passwords.yaml"))
    assert SECRET not in said and "no path" in said


NAMES = ["mine.pt", "./mine.pt", "work/mine", "work/mine.bin", "work", "~/mine.pt",
         "~nobody-here/a.pt", "~root/a.pt", "work/"]  # fmt: skip


@pytest.mark.parametrize("node", [{}, {"data": "Cora"}], ids=["any", "data"])
def test_a_run_does_not_learn_which_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: dict[str, Any]
) -> None:
    home = tmp_path / "home-of-somebody"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))

    def answers(name: str) -> set[str]:
        keys = ("data.name", "data.add") if name.endswith(".pt") else ("data.name",)
        runs = [{"config": "nfedgnn/cora", "overrides": f"{key}={name}"} for key in keys]
        runs[0]["output-dir"] = name
        return {asked(app, tmp_path, node=node, **run) for run in runs}

    before = {name: answers(name) for name in NAMES}
    assert len({said for each in before.values() for said in each}) == 2, "one answer for each key"
    (home / "work").mkdir()
    for name in ("mine.pt", "work/mine", "work/mine.bin", "work/a.pt", "work/nodes.csv"):
        (home / name).write_text("")
    after = {name: answers(name) for name in NAMES}
    assert before == after
    assert not any(
        str(tmp_path) in said or "mine" in said for each in after.values() for said in each
    )


def test_a_supernode_has_its_paths_from_its_own_config(tmp_path: Path) -> None:
    node = {**NODE, "data-root": "/own"}
    run: Any = {"config": "quickstart", "overrides": "data.root=/run data.name=Cora",
                "output-dir": "/run/out"}  # fmt: skip
    config, out = configured_client(Context(1, 2, node, RecordDict(), run))
    assert (config.data.root, out) == ("/own", None)
    node = {**NODE, "state-dir": ":memory:"}
    config, out = configured_client(Context(1, 2, node, RecordDict(), run))
    assert (config.data.root, str(out)) == ("/run", "/run/out")


ERRORS: list[tuple[Exception, str]] = [
    (KeyError(SECRET), f"ClientError: KeyError: {AT_HOME}"),
    (FileNotFoundError(2, "No such file", SECRET), f"ClientError: FileNotFoundError: {AT_HOME}"),
    (ValueError(SECRET), f"ClientError: ValueError: {AT_HOME}"),
    (DataError(SECRET), f"DataError: {AT_HOME}"),
    (StateLostError(f"{SECRET} is damaged"), f"StateLostError: {AT_HOME}"),
    (RefusedError("round 3 was masked before"), "RefusedError: round 3 was masked before"),
]


@pytest.mark.parametrize("error,said", ERRORS, ids=lambda one: type(one).__name__)
def test_errors_leave_by_their_kind(tmp_path: Path, error: Exception, said: str) -> None:
    class Failing(NumPyClient):
        def get_properties(self, config: Any) -> dict[str, Any]:
            raise error

    client_app = make_client_app(lambda context: Failing())
    assert asked(client_app, tmp_path).startswith(said)
    # On one's own machine all of it is told.
    at_home = asked(client_app, tmp_path, node={"state-dir": ":memory:"})
    assert str(error) in at_home


MINE = {"config": "fedgls/cora", "overrides": "app=strangers.mine"}


@pytest.mark.parametrize("node,run,wanted", [
    ({"data-folder": f"/nowhere/{SECRET}"}, {}, "DataError: data-folder"),
    ({"partition-id": SECRET}, {}, "ConfigError: node-config partition-id"),
    ({"methods": SECRET}, MINE, "app: 'strangers.mine'"),
])  # fmt: skip
def test_what_is_wrong_with_a_node_is_told_without_its_config(
    tmp_path: Path, node: dict[str, Any], run: dict[str, str], wanted: str
) -> None:
    said = asked(app, tmp_path, node=node, **{"config": "nfedgnn/cora-linqs", **run})
    assert wanted in said
    assert SECRET not in said
    assert "module" in said or "no such" not in said  # nor whether a file is there


def written(values: torch.Tensor) -> list[bytes]:
    flat = values.numpy()
    types = ("<f4", "<f8") if flat.dtype.kind == "f" else ("<i8", "<i4", "<u1")
    return [flat.astype(one).tobytes() for one in types] + [repr(flat.tolist()).encode()]


@pytest.mark.parametrize("name", ["nfedgnn", "fedgls"])
def test_no_features_labels_or_edges_leave_a_client(name: str) -> None:
    setup = ALL[name]
    config = setup.load()
    method, exchanged = method_of(config), setup.whole("rounds=2").grid.exchanged
    came = b"|".join(bytes_of(reply.content) for _, reply in exchanged)
    private = [row for row in as_graph(method.data(config)).x if row.any()]
    if name == "fedgls":
        for graph in method.graphs(config):
            edges = graph.hidden_edges if graph.edge_index is None else graph.edge_index
            private += [graph.y, *edges, *(row for row in graph.x if row.any())]
    private = [values for values in private if values.numel() > 8]
    assert len(private) > 10
    for values in private:
        assert not any(way in came for way in written(values))
    # What is sent is found
    there = bytes_of(RecordDict({"arrays": ArrayRecord([private[0].numpy()])}))
    assert any(way in there for way in written(private[0]))


def test_why_a_checkpoint_was_not_saved_names_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(13, "Permission denied: /srv/hospital-a/x", "/srv/hospital-a/x")
    monkeypatch.setattr(checkpoint, "save_client", Mock(side_effect=error))
    node: Any = {"state-dir": str(tmp_path / "state"), "partition-id": 0}
    context = Context(1, 2, node, RecordDict(), {})
    cohort = CohortState(context, [0], None, lambda found: (0, found or {}))
    said = cohort.save(1, "0" * 32)
    assert said and "/" not in said


def test_a_partys_secrets_are_in_no_log_and_in_no_text_of_an_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = PartyWorld.make(6, tmp_path)
    with caplog.at_level(logging.DEBUG):
        world.begin()
        world.check(world.round(0), range(6))
        world.prepare(1)
    party = world.hosts[1000]
    kept = party._rounds[1]
    secrets = [party._private, kept.seed.tobytes(), kept.private.tobytes()]
    secrets.append(party.trust.identity._key.private_bytes_raw())
    objects = (party, party.trust, party.trust.identity, party.epoch, kept)
    texts = [caplog.text, *map(repr, objects), *map(str, objects)]
    texts.append((tmp_path / "0").read_text())  # the journal
    assert found_in(set(secrets), {str(n): text.encode() for n, text in enumerate(texts)}) == []


class Collector:
    """A mod that notes the secrets of its client after each message, and spoils some requests."""

    def __init__(self, folder: Path, spoil: str, at: Container[Any] = range(99)) -> None:
        self.secrets, self.embeddings = set[bytes](), set[bytes]()
        self.texts: list[str] = []
        self.reports: list[Any] = []
        self.folder, self.spoil, self.at = folder, spoil.split(", "), at  # messages, who gets them

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        what = f"{message.metadata.message_type} {message.metadata.group_id}"
        if what in self.spoil and context.node_config["partition-id"] in self.at:
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
        if (live := vars(context).get("live")) is not None:
            _, aligner = live.beside
            self.texts += [*map(repr, (live, aligner, getattr(aligner, "_table", None)))]
            self.secrets |= set(secrets_of(aligner))
            _, kept = live.held or (None, {})
            turns = kept.get(TURNS, ())
            self.embeddings |= {one.numpy().tobytes() for one in turns if one.isfinite().all()}
        for record in context.state.config_records.values():
            data = record.get(SUM_STATE)
            if isinstance(data, bytes):
                host = SumClient.from_bytes(data)
                self.texts += [repr(host), repr(host._rounds)]
                self.secrets |= set(secrets_of(host))

    def left(self, log: str) -> dict[str, bytes]:
        """Give all that a run leaves, in which no secret may be."""
        assert bool(self.spoil[0]) == ("error reply" in log)
        assert len(self.secrets) > 50
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        places = {str(path.relative_to(self.folder)): path.read_bytes() for path in files}
        said = json.dumps([asdict(report) for report in self.reports], default=str)
        parts = {"log": log, "reports": said, "texts": "\n".join(self.texts)}
        places |= {name: text.encode() for name, text in parts.items()}
        assert found_in(self.secrets, places) == []
        return places


def secrets_of(part: Any) -> Iterator[bytes]:
    if isinstance(part, SumClient):
        yield part._private
        for kept in part._rounds.values():
            for secret in (kept.seed, kept.private, *kept.secrets):
                yield secret.tobytes()
            yield from (share.tobytes() for share in kept.held.reshape(-1, kept.held.shape[-1]))
    if isinstance(part, AlignmentClient):
        yield from (bytes(secret) for secret in part._secrets.values())
        yield from (name[TOKEN:].tobytes() for name in part._names[part._names.any(1)])


def spellings(secret: bytes) -> Iterator[bytes]:
    """Give the ways to write bytes down: the whole of them, or a part that is long enough."""
    part = secret[:SHORTEST]
    yield part
    for text in (part.hex(), part.hex(" "), part.hex().upper(), repr(part)[2:-1]):
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


@pytest.mark.parametrize("spoil", ["", "train.sum_unmask 2, train 3, train.sum_unmask 4"])
def test_fedscem(spoil: str, tmp_path: Path, log: Any) -> None:
    seen, where = Collector(tmp_path, spoil, [1]), {"checkpoint_dir": tmp_path / "checkpoints"}
    deal = [[1, 2, 3], [0], [4, 5, 6]]
    how: dict[str, Any] = {"rounds": 5, "alignment": "psi", "checkpoint_every": 1, **where}
    outcome = run_ego(
        seven_egos(), supernodes=3, deal=deal, mods=[seen], client_options=where, **how
    )
    seen.reports = outcome.reports
    assert any(place.startswith("checkpoints") for place in seen.left(log.text)) or spoil


def test_secure_consensus(tmp_path: Path, log: Any) -> None:
    seen, members = Collector(tmp_path, "train.sum_unmask 2, train 3"), toy_members()
    where = {"checkpoint_dir": tmp_path / "checkpoints"}

    def client_fn(context: Context) -> SecureConsensusClient:
        own = members[int(context.node_config["partition-id"])]
        return SecureConsensusClient(context, [own], **where)

    grid = InProcessGrid(make_client_app(client_fn, mods=[seen]), num_supernodes=4)
    SecureConsensus(checkpoint_every=1, **where).start(
        grid, num_rounds=4, timeout=0.05, on_round=seen.reports.append
    )
    assert seen.embeddings
    # A client's own checkpoint has its model, which makes the embeddings
    places = {p: data for p, data in seen.left(log.text).items() if "client-" not in p}
    assert any(place.startswith("checkpoints") for place in places)
    assert found_in(seen.embeddings, places) == []


@pytest.mark.parametrize("write", [bytes.hex, repr, lambda b: str(list(b)), str], ids=range(4))
def test_the_search_finds_what_is_there(write: Callable[[bytes], str]) -> None:
    secret = bytes(range(7, 39))
    assert found_in({secret}, {"log": f"key {write(secret)}!".encode()}) == ["log"]
    row = np.frombuffer(secret, np.uint8)
    assert found_in({secret}, {"log": str(row[None]).encode()}) == ["log"]
    assert found_in({secret}, {"file": b"x" + secret}) == ["file"]
    assert found_in({secret}, {"log": b"nothing"}) == []


# Flower's own, and not public; without it the page has to be read anew
supernode = pytest.importorskip("flwr.supernode.start_client_internal")
Fab = pytest.importorskip("flwr.supercore.fab").Fab

NAME = "fpk_reviewer"


def signed(content, key, at=0):
    """Give an app as a SuperLink delivers it, with one signature from the Hub."""
    signature = key.sign(create_message_to_sign(hashlib.sha256(content).digest(), at))
    text = base64.urlsafe_b64encode(signature).rstrip(b"=").decode()
    record = json.dumps({"signature": text, "signed_at": at})
    return Fab("hash", content, {NAME: record, "valid_license": "Valid"})


def test_one_trusted_signature_admits_an_app_however_old_and_no_other_does():
    key = Ed25519PrivateKey.generate()
    form = (keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH)
    trusted = {NAME: key.public_key().public_bytes(*form).decode()}
    verify = supernode._verify_fab
    assert verify(signed(b"app", key), trusted)
    assert verify(signed(b"an app of 1970, since withdrawn", key, at=1), trusted)
    assert not verify(signed(b"app", Ed25519PrivateKey.generate()), trusted)
    changed = signed(b"app", key)
    assert not verify(Fab("hash", b"another app", changed.verifications), trusted)
    assert not verify(Fab("hash", b"app", {"valid_license": "Valid"}), trusted)
    assert not verify(signed(b"app", key), {"fpk_other": trusted[NAME]})
