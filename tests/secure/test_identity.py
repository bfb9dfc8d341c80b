"""Keys, registry, settings of trust and journal of a party, and what each refuses."""

import hashlib
import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sum_helpers import write_keys

from flower_graph.errors import ConfigError, IdentityError, RefusedError
from flower_graph.secure.channel import new_key
from flower_graph.secure.parties import journal
from flower_graph.secure.parties.journal import Journal, sealed
from flower_graph.secure.parties.registry import (
    Identity,
    Registry,
    TrustSettings,
    new_identity,
    read_numbers,
    write_numbers,
)
from flower_graph.secure.sum.messages import BINDING, KeyReply


@pytest.fixture(scope="module")
def parties(tmp_path_factory):
    """Six parties of four clients each, and their files."""
    folder = tmp_path_factory.mktemp("parties")
    write_keys(6, folder, each=4)
    return folder


@pytest.fixture
def made(parties, tmp_path):
    """Make a copy of the files, to be changed."""
    return Path(shutil.copytree(parties, tmp_path / "made"))


def read(folder, party=0):
    registry = Registry.read(folder / "registry.json")
    return registry, Identity.read(folder / f"party-{party}", registry)


def edit(folder, change):
    """Write the registry's file with something changed in it."""
    path = folder / "registry.json"
    raw = json.loads(path.read_text())
    result = change(raw)
    path.write_text(result if isinstance(result, str) else json.dumps(raw, indent=1) + "\n")
    return path


# Keys and signatures


def test_a_key_is_its_owners_alone_and_nobody_overwrites_it(made):
    assert stat.S_IMODE((made / "party-0").stat().st_mode) == 0o600
    assert b"PRIVATE" not in (made / "party-0.pub").read_bytes()
    with pytest.raises(IdentityError, match=r"party-0\.pub"):
        new_identity(made / "party-0")
    (made / "party-0.pub").unlink()
    with pytest.raises(IdentityError, match="party-0"):
        new_identity(made / "party-0")


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_may_use_is_refused(made, mode):
    os.chmod(made / "party-0", mode)
    with pytest.raises(IdentityError, match=f"{mode:o}.*600"):
        read(made)


def test_signatures_hold_for_one_party_purpose_and_split_of_parts(made):
    registry, identity = read(made, party=2)
    signature = identity.sign(b"list", b"ab", b"c")
    assert identity.party == 2 and len(signature) == 64
    assert registry.verify(2, signature, b"list", b"ab", b"c")
    for party, purpose, parts in [
        (1, b"list", (b"ab", b"c")),
        (99, b"list", (b"ab", b"c")),
        (2, b"lisa", (b"ab", b"c")),
        (2, b"list", (b"a", b"bc")),
        (2, b"list", (b"abc",)),
        (2, b"list", (b"ab", b"c", b"")),
        (2, b"", (b"list", b"ab", b"c")),
    ]:
        assert not registry.verify(party, signature, purpose, *parts)
    flipped = bytes([signature[0] ^ 1]) + signature[1:]
    for bad in (b"", signature[:63], signature + b"\0", flipped, bytes(64), b"\xff" * 64):
        assert not registry.verify(2, bad, b"list", b"ab", b"c")


def test_parties_with_other_versions_of_the_registry_and_revoked_ones_are_refused(made):
    registry, identity = read(made)
    newer = registry.with_party(new_identity(made / "party-6"), [range(24, 28)])
    assert not newer.verify(0, identity.sign(b"x"), b"x")
    assert newer.verify(0, Identity.read(made / "party-0", newer).sign(b"x"), b"x")
    identity.registry = registry.without(0)  # a party that ignores what its own software says
    assert not identity.registry.verify(0, identity.sign(b"x"), b"x")


# The registry


def test_what_is_written_is_what_is_read_and_its_digest_is_the_files(made):
    path = made / "registry.json"
    registry = Registry.read(path)
    assert registry.digest == hashlib.sha256(path.read_bytes()).digest()
    assert Registry(registry.parties, 4).digest == registry.digest
    assert registry.parties[5].may_host([20, 23]) and not registry.parties[5].may_host([20, 24])
    for text in ("0", "0-99,200", "5,7,9-10"):
        assert write_numbers(read_numbers(text)) == text


def test_rotated_and_revoked_keys_sign_nothing_and_never_come_back(made):
    registry, old = read(made, party=3)
    fresh = new_identity(made / "party-3-new")
    newer = registry.rotated(3, fresh)
    assert not newer.verify(3, old.sign(b"x"), b"x")
    with pytest.raises(IdentityError, match="party 3"):
        Identity.read(made / "party-3", newer)
    with pytest.raises(IdentityError, match=r"party 6.*party 3"):
        newer.with_party(registry.parties[3].key, [range(24, 25)])
    gone = newer.without(3)
    assert gone.active == [0, 1, 2, 4, 5]
    with pytest.raises(IdentityError, match="party 3"):
        Identity.read(made / "party-3-new", gone)
    with pytest.raises(IdentityError, match=r"party 3.*0"):
        gone.rotated(3, new_identity(made / "other"))
    with pytest.raises(IdentityError, match=r"party 9.*registry"):
        gone.without(9)
    # Its clients are free for a newcomer, and were not before.
    key = new_identity(made / "newcomer")
    assert gone.with_party(key, [range(12, 16)]).parties[6].clients == (range(12, 16),)
    with pytest.raises(IdentityError, match=r"client 12.*party 3.*party 6"):
        newer.with_party(key, [range(12, 16)])


def party(number, **values):
    """Change entries of a party."""
    return lambda registry: registry["parties"][number].update(values)


WRITES = "is not as .* writes it"
LOW_ORDER = ("00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "02" + "00" * 31, "ff" * 32)
WRONG = {
    "a party twice": (lambda r: r["parties"].append(r["parties"][0]), WRITES),
    "a gap": (lambda r: r["parties"].pop(2), "party 3 is at place 2"),
    "a key twice": (lambda r: r["parties"][1].update(key=r["parties"][0]["key"]), "party 1:"),
    "a former key of another": (
        lambda r: r["parties"][1].update(former=[r["parties"][5]["key"]]),
        "party 5:",
    ),
    "overlapping grants": (party(1, clients="3-6"), "client 3"),
    "a grant above the cap": (party(5, clients="20-24"), "party 5"),
    "numbers too large": (party(5, clients="20-2147483648"), "clients '20-2147483648'"),
    "grants in no order": (party(5, clients="21,20"), "clients '21,20'"),
    "no grant": (party(5, clients=""), "clients ''"),
    "another script's digits": (party(5, clients="٣"), "clients '٣'"),
    "no cap": (lambda r: r.update({"most-clients": 0}), "most-clients is 0"),
    "another format": (lambda r: r.update(format=2), WRITES),
    "an entry too many": (party(0, role="a"), WRITES),
    "an entry too few": (lambda r: r["parties"][0].pop("revoked"), "revoked"),
    "revoked as a number": (party(0, revoked=0), WRITES),
    "a key in capitals": (party(0, key="AB" * 32), "party 0|" + WRITES),
    "a name twice": (
        lambda r: json.dumps(r, indent=1).replace('"revoked"', '"revoked": true, "revoked"', 1),
        WRITES,
    ),
    "another layout": (json.dumps, WRITES),
    "a list": (lambda r: "[]", "list"),
    "no JSON": (lambda r: json.dumps(r)[:-1], "Expecting"),
} | {f"a key of low order, {key[:2]}": (party(0, key=key), "party 0") for key in LOW_ORDER}


@pytest.mark.parametrize("change, said", WRONG.values(), ids=WRONG)
def test_a_wrong_registry_is_refused_by_name(made, change, said):
    path = edit(made, change)
    with pytest.raises(IdentityError, match=said) as caught:
        Registry.read(path)
    assert str(caught.value).startswith(f"registry {path}: ") and len(str(caught.value)) < 400


# Binding


def binding(**others):
    values = {
        "run_id": b"run",
        "party": 1,
        "clients": [4, 5],
        "channel_key": [*new_key()[1]],
        "commitment": [0] * 32,
        "signature": [],
        "points": [16, 32],
    }
    types = {"clients": np.int64, "points": np.int64}
    given = {
        name: np.array(value, types.get(name, np.uint8)) if isinstance(value, list) else value
        for name, value in (values | others).items()
    }
    return KeyReply(**given)


def test_one_signature_covers_the_run_the_clients_the_keys_and_the_blocks(made):
    registry, identity = read(made, party=1)
    said = binding().signed(identity)
    said.verify(registry, block_cap=32)
    others = {
        "run_id": b"later",
        "clients": np.array([4, 6]),
        "channel_key": np.frombuffer(new_key()[1], np.uint8),
        "commitment": np.ones(32, np.uint8),
        "points": np.array([16, 31]),
        "party": 0,
    }
    for name, value in others.items():
        own = {"party": np.array([0, 1]), "clients": np.array([4, 6])}.get(name, said.clients)
        with pytest.raises(IdentityError, match="binding"):
            replace(said, **{name: value} | {"clients": own}).verify(registry)


@pytest.mark.parametrize(
    "others, said",
    [
        ({"clients": [3, 4]}, "party 1: client 3"),
        ({"party": 7}, r"party 7.*registry"),
        ({"party": 4}, "party 4 is revoked"),
        ({"clients": [5, 4]}, "ascending"),
        ({"clients": [], "points": []}, "clients"),
        ({"clients": [-1, 4]}, "-1.*granted"),
        ({"channel_key": [0] * 32}, "channel"),
        ({"channel_key": [97] * 31}, "32 bytes"),
        ({"commitment": []}, "commitment.*32"),
        ({"points": [16]}, "declares 1"),
        ({"points": [16, 0]}, "1"),
        ({"points": [16, 65]}, r"declares.*65.*1.*64"),
    ],
)
def test_a_binding_says_no_more_than_the_registry_grants(made, others, said):
    registry, identity = read(made, party=1)
    identity.registry = registry = registry.without(4)
    wrong = binding(**others)
    signature = identity.sign(BINDING, *wrong._parts())  # of a party that signs whatever it likes
    with pytest.raises(IdentityError, match=said):
        replace(wrong, signature=np.frombuffer(signature, np.uint8)).verify(registry, 64)


# Node config


def node_config(folder):
    return {"identity-key": str(folder / "party-0"), "registry": str(folder / "registry.json")}


def test_trust_is_read_from_the_node_config_alone(made):
    assert TrustSettings.of({"partition-id": 0, "num-partitions": 2}, 7) is None
    found = TrustSettings.of(node_config(made), 7)
    assert (found.minimum, found.corrupt, found.block_cap) == (5, 0.1, 1 << 14)
    assert (found.identity.party, found.journal.path) == (0, made / "party-0.journal")
    assert (found.journal.most_begun, found.journal.run) == (24, b"7")
    given = {"trust-minimum": 6, "trust-corrupt": 0, "trust-runs": 1, "block-cap": 64}
    found = TrustSettings.of(node_config(made) | given, 7)
    assert (found.minimum, found.corrupt, found.block_cap) == (6, 0.0, 64)
    assert found.journal.most_begun == 1


def test_fewer_than_five_supernodes_are_refused(made):
    registry, _ = read(made)
    for party in range(6, 11):
        key = new_identity(made / f"party-{party}")
        registry = registry.with_party(key, [range(4 * party, 4 * party + 4)])
    registry = registry.without(10)
    assert registry.minimum == 7  # of ten
    for party in range(4, 10):
        registry = registry.without(party)
    registry.write(made / "registry.json")
    with pytest.raises(IdentityError, match="4 active parties"):
        TrustSettings.of(node_config(made), 7)
    with pytest.raises(IdentityError, match=r"stranger.*registry"):
        new_identity(made / "stranger")
        Identity.read(made / "stranger", registry)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"trust-minimum": 4}, "trust-minimum: 4"),
        ({"trust-minimum": 7}, "trust-minimum: 7"),
        ({"trust-minimum": True}, "trust-minimum: True"),
        ({"trust-corrupt": 0.5}, "trust-corrupt: 0.5"),
        ({"trust-corrupt": float("nan")}, "trust-corrupt: nan"),
        ({"trust-corrupt": "0.1"}, "trust-corrupt: '0.1'"),
        ({"block-cap": 0}, "block-cap: 0"),
        ({"trust-runs": 0}, "trust-runs: 0"),
        ({"trust-minimun": 5}, "trust-minimun"),
        ({"registry": None}, "registry: None"),
        ({"identity-key": None}, "identity-key: None"),
        ({"identity-key": None, "registry": None, "block-cap": 9}, "identity-key: None"),
        ({"registry": ""}, "registry: ''"),
    ],
)
def test_wrong_trust_settings_are_refused(made, changes, said):
    given = {k: v for k, v in (node_config(made) | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=f"node-config {said}"):
        TrustSettings.of(given, 7)


def test_rounds_go_up_in_each_run_and_purpose_and_the_file_knows_them(tmp_path):
    path = tmp_path / "key.journal"
    mine, other = Journal(path, b"run"), Journal(path, b"other")
    assert mine.last(b"steps") == -1
    for number in (0, 1, 2, 5):
        mine.contribute(number, b"steps")
    other.contribute(1, b"steps")
    mine.contribute(1, b"rounds")
    for number in (5, 3):
        with pytest.raises(RefusedError, match=f"round {number}.*5"):
            Journal(path, b"run").contribute(number, b"steps")
    mine.contribute(6, b"steps")
    assert (mine.last(b"steps"), other.last(b"steps"), mine.last(b"rounds")) == (6, 1, 1)
    for run, purpose in ((b"nsteps", b"ru"), (b"r", b"unsteps")):  # a name is all of its parts
        Journal(path, run).contribute(1, purpose)
    with pytest.raises(RefusedError, match="name"):
        Journal(path, b"a" * journal.MOST_NAME).contribute(1, b"")


def test_it_is_its_owners_alone_whole_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_RECORDS", 3)
    path = tmp_path / "journal"
    path.write_bytes(sealed(b"{}"))
    path.chmod(0o666)
    mine = Journal(path, b"run")
    for number in range(5):
        mine.contribute(number, b"%d" % number)
        mine.contribute(number, b"kept")  # what is used again is not pushed out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    known = [mine.last(b"%d" % number) for number in range(5)]
    assert known == [-1, -1, -1, 3, 4] and mine.last(b"kept") == 4
    assert os.listdir(tmp_path) == ["journal"]


def test_who_begins_anew_is_counted_by_the_day(tmp_path, monkeypatch):
    """With another run, or with a state that is new or has not seen the last sum."""
    path, now = tmp_path / "journal", [1e9]
    monkeypatch.setattr(journal.time, "time", lambda: now[0])
    first = Journal(path, b"run", 3).continue_run(0, "")
    second = Journal(path, b"run", 3).continue_run(1, first)
    third = Journal(path, b"run", 3).continue_run(2, second)
    assert len({first, second, third}) == 3
    with pytest.raises(RefusedError, match=r"round 2.*2"):
        Journal(path, b"run", 3).continue_run(2, third)
    put_back = Journal(path, b"run", 3).continue_run(3, second)  # the second time
    Journal(path, b"other", 3).continue_run(0, "")  # the third
    before = path.read_bytes()
    for mark, run in (("", b"new"), ("", b"run"), (third, b"run")):
        with pytest.raises(RefusedError, match=r"3.*24.*trust-runs"):
            Journal(path, run, 3).continue_run(9, mark)
    assert path.read_bytes() == before
    Journal(path, b"run", 3).continue_run(4, put_back)
    now[0] += journal.DAY + 1
    Journal(path, b"new", 3).continue_run(0, "")
    now[0] -= 2 * journal.DAY  # who sets a clock back gains nothing
    Journal(path, b"newer", 2).continue_run(0, "")
    with pytest.raises(RefusedError, match="2 times"):
        Journal(path, b"newest", 2).continue_run(0, "")


def test_lists_are_counted_by_run_and_runs_by_day(tmp_path, monkeypatch):
    path = tmp_path / "journal"
    monkeypatch.setattr(journal, "MOST_LISTS", 3)
    # each by another state, another process
    for seed, run in enumerate((b"run", b"run", b"run", b"two")):
        Journal(path, run, 2).answer_list(bytes([seed]), 1.0)
    for run, why in ((b"run", "3 lists"), (b"three", "trust-runs")):
        with pytest.raises(RefusedError, match=why):
            Journal(path, run, 2).answer_list(b"5", 1.0)


def test_a_block_of_each_client_an_alignment_and_eight_alignments_a_run(tmp_path):
    path = tmp_path / "journal"
    Journal(path, b"run", 2).serve(1, [0, 1, 2, 7])
    Journal(path, b"run", 2).serve(1, [3, 4])
    for clients in ([4, 5], [7], [0]):
        with pytest.raises(RefusedError, match="alignment 1"):
            Journal(path, b"run", 2).serve(1, clients)
    Journal(path, b"run", 2).serve(1, [5])
    for alignment in range(2, 1 + journal.MOST_ALIGNMENTS):
        Journal(path, b"run", 2).serve(alignment, [5])
    with pytest.raises(RefusedError, match="not after"):
        Journal(path, b"run", 2).serve(1, [9])
    with pytest.raises(RefusedError, match="8 alignments"):
        Journal(path, b"run", 2).serve(99, [5])
    Journal(path, b"run", 1).continue_run(0, "")  # the run that is counted already
    Journal(path, b"other", 2).serve(1, [5])
    with pytest.raises(RefusedError, match="2 times"):
        Journal(path, b"a third", 2).serve(1, [5])


RUN = b'{"records": {"' + journal._key((b"run",)).encode() + b'": %s}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        RUN % b'{"number": 3}',  # without a hash
        sealed(b'{"other": {}}'),
        sealed(RUN % b'{"number": true}'),
        sealed(RUN % b'{"other": 3}'),
        sealed(RUN % b'{"sums": {"sum": ["not a set"]}}'),
        sealed(b'{"states": {"a": "not a set"}}'),
        sealed(b'{"begun": [3]}'),
    ],
)
def test_without_a_journal_that_can_be_read_nothing_is_sent(tmp_path, content):
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=r"journal .*: (cannot be read|is no journal)"):
        Journal(path, b"run", 3).continue_run(1, "")
    assert path.read_bytes() == content


def test_a_bit_that_was_changed_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "journal"
    mine = Journal(path, b"run")
    mine.continue_run(0, "")
    mine.enter(1, "sum", bytes(16), 0b11111, 2)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(IdentityError):
            mine.contribute(2, b"steps")
    path.write_bytes(whole)
    mine.contribute(2, b"steps")


def test_a_state_enters_no_sum_of_others_in_a_later_run(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MOST_STATES", 4)
    names = "run", "later", "later yet", "last"
    run, later, yet, last = (Journal(tmp_path / "journal", name.encode()) for name in names)
    state, seven = bytes(16), 0b1111111
    run.enter(0, "sum", state, seven, 2)
    for others in (seven ^ 1, seven ^ 3, seven | 128):
        with pytest.raises(RefusedError, match="changed"):
            later.enter(0, "sum", state, others, 2)
    with pytest.raises(RefusedError, match="changed"):
        run.check_state("sum", state, seven ^ 1)
    run.check_state("sum", state, seven)
    later.enter(0, "sum", state, seven, 2)
    yet.enter(0, "another", state, seven ^ 3, 2)
    for number in range(1, 4):  # the oldest are forgotten
        later.enter(number, "sum", bytes([number]) * 16, seven, 2)
    last.enter(9, "sum", state, seven ^ 3, 2)


def test_after_one_refused_sum_its_step_is_over(tmp_path):
    mine = Journal(tmp_path / "journal", b"run")
    with mine.one_trial(3, b"steps"):
        pass
    for _ in range(2):
        with pytest.raises(RefusedError, match="relayed"), mine.one_trial(3, b"steps"):
            raise RefusedError("relayed")
    for step in (2, 3):
        with pytest.raises(RefusedError), mine.one_trial(step, b"steps"):
            raise AssertionError("the step is over")
    with mine.one_trial(4, b"steps"), mine.one_trial(3, b"another"):
        pass


def _full(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_is_not_on_the_disk_is_not_sent(tmp_path, monkeypatch, call):
    mine = Journal(tmp_path / "journal", b"run")
    mine.contribute(1, b"steps")
    monkeypatch.setattr(os, call, _full)
    with pytest.raises(IdentityError, match="cannot be written: No space left on device"):
        mine.contribute(2, b"steps")
    monkeypatch.undo()
    assert mine.last(b"steps") == 1
