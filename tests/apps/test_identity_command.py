"""Keys and the registry by the commands, and what a run then accepts and refuses."""

import numpy as np
import pytest

from flower_graph.apps.cli.main import main
from flower_graph.errors import IdentityError
from flower_graph.secure.channel import new_key
from flower_graph.secure.parties.identity import TrustSettings
from flower_graph.secure.parties.messages import BindReply

PARTIES = 6


def command(*words, code=0):
    assert main([str(word) for word in words]) == code


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """Six parties with two clients each, in a registry made by the commands."""
    monkeypatch.chdir(tmp_path)
    for party in range(PARTIES):
        command("identity", "new", f"key-{party}")
        most = ("--most-clients", 2) if party == 0 else ()
        grant = f"{2 * party}-{2 * party + 1}"
        command("registry", "add", "registry.json", f"key-{party}.pub", "--clients", grant, *most)
    capsys.readouterr()
    return tmp_path


def settings(key="key-0", registry="registry.json"):
    """Read what a SuperNode's node config says, as it does when a run begins."""
    return TrustSettings.of({"identity-key": key, "registry": registry}, 7)


def bound(one, clients):
    """Give what a SuperNode sends when it enrols."""
    key, blank = np.frombuffer(new_key()[1], np.uint8), np.zeros(32, np.uint8)
    said = BindReply(b"run", one.identity.party, np.array(clients), key, blank, blank[:0])
    return said.signed(one.identity, one.block_cap)


def test_all_who_are_in_the_registry_verify_each_other(folder, capsys):
    for party in range(PARTIES):
        said = bound(settings(f"key-{party}"), (2 * party, 2 * party + 1))
        said.verify(settings().registry)
    command("registry", "show", "registry.json")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("6 SuperNodes, 6 ")
    assert shown[1] == f"SHA-256 {settings().registry.digest.hex()}"
    assert shown[2] == f"    0  {settings().registry.parties[0].key.hex()}  clients 0-1"


def test_a_newcomer_is_refused_until_all_have_the_new_version(folder):
    old = settings().registry
    command("identity", "new", "key-6")
    with pytest.raises(IdentityError, match=r"key-6.*registry"):
        settings("key-6")
    (folder / "old.json").write_bytes((folder / "registry.json").read_bytes())
    command("registry", "add", "registry.json", "key-6.pub", "--clients", "12-13")
    said = bound(settings("key-6"), (12, 13))
    said.verify(settings().registry)
    with pytest.raises(IdentityError, match=r"party 6.*registry"):
        said.verify(old)
    said = bound(settings("key-1", "old.json"), (2, 3))  # one that missed the update
    with pytest.raises(IdentityError, match="signed"):
        said.verify(settings().registry)


def test_after_a_rotation_the_new_key_signs_and_the_old_one_does_not(folder, capsys):
    command("identity", "new", "key-3-new")
    before = bound(settings("key-3"), (6, 7))
    command("registry", "rotate", "registry.json", 3, "key-3-new.pub")
    assert "clients 6-7  former keys: 1" in capsys.readouterr().out
    said = bound(settings("key-3-new"), (6, 7))
    said.verify(settings().registry)
    with pytest.raises(IdentityError, match=r"key-3.*party 3"):
        settings("key-3")
    with pytest.raises(IdentityError, match="signed"):
        before.verify(settings().registry)


def test_who_is_revoked_signs_nothing_more_and_the_others_go_on(folder, capsys):
    before = bound(settings("key-5"), (10, 11))
    command("registry", "revoke", "registry.json", 5)
    assert capsys.readouterr().out.splitlines()[-2].endswith("clients 10-11  REVOKED")
    with pytest.raises(IdentityError, match=r"key-5.*party 5"):
        settings("key-5")
    with pytest.raises(IdentityError, match="party 5"):
        before.verify(settings().registry)
    said = bound(settings("key-4"), (8, 9))
    said.verify(settings().registry)
    command("registry", "revoke", "registry.json", 4)
    assert "at least 5" in capsys.readouterr().out
    with pytest.raises(IdentityError, match="registry"):
        settings()


@pytest.mark.parametrize(
    "words, said",
    [
        ("identity new key-0", "key-0.pub:"),
        ("identity new missing/key", "missing/key.pub:"),
        ("registry show missing.json", "registry missing.json:"),
        ("registry add missing.json key-0.pub --clients 0", "for a new one give --most-clients"),
        ("registry add new.json key-0.pub --clients 0 --most-clients 0", "most-clients is 0,"),
        ("registry add registry.json key-0.pub --clients 12", "has a key that party 0 has or had"),
        ("registry add registry.json key-0 --clients 12", "key-0"),
        ("registry add registry.json new.pub --clients 11-12", "client 11"),
        ("registry add registry.json new.pub --clients 12-14", "most-clients"),
        ("registry add registry.json new.pub --clients 13-12", "clients '13-12': 13-12"),
        (
            "registry add registry.json new.pub --clients 12 --most-clients 9",
            "--most-clients 9: the registry has 2, which stays",
        ),
        ("registry rotate registry.json 0 key-1.pub", "party 1:"),
        ("registry rotate registry.json 9 new.pub", "party 9"),
        ("registry revoke registry.json -1", "party -1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(folder, capsys, words, said):
    command("identity", "new", "new")
    capsys.readouterr()
    before = (folder / "registry.json").read_bytes()
    command(*words.split(), code=2)
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and said in shown.err and shown.err.count("\n") == 1
    assert shown.out == "" and (folder / "registry.json").read_bytes() == before
    assert not (folder / "new.json").exists()
