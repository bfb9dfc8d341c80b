"""Keys and the registry by the commands, and what a run then accepts and refuses."""

import pytest

from flower_graph.apps.cli.main import main
from flower_graph.errors import IdentityError
from flower_graph.secure.parties.registry import TrustSettings

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


def settings(key):
    """Read what a SuperNode's node config says, as it does when a run begins."""
    return TrustSettings.of({"identity-key": key, "registry": "registry.json"}, 7)


def test_the_command_adds_rotates_revokes_and_shows(folder, capsys):
    for name in ("key-6", "key-3-new"):
        command("identity", "new", name)
    command("registry", "add", "registry.json", "key-6.pub", "--clients", "12-13")
    command("registry", "rotate", "registry.json", 3, "key-3-new.pub")
    command("registry", "revoke", "registry.json", 5)
    capsys.readouterr()
    command("registry", "show", "registry.json")
    shown = capsys.readouterr().out.splitlines()
    found = settings("key-3-new")
    assert found.identity.party == 3 and settings("key-6").identity.party == 6
    assert shown[0].startswith("7 SuperNodes, 6 ")
    assert shown[1] == f"SHA-256 {found.registry.digest.hex()}"
    assert shown[2] == f"    0  {found.registry.parties[0].key.hex()}  clients 0-1"
    assert shown[5].endswith("clients 6-7  former keys: 1")
    assert shown[7].endswith("clients 10-11  REVOKED")
    for key in ("key-3", "key-5"):
        with pytest.raises(IdentityError, match=key):
            settings(key)


@pytest.mark.parametrize(
    "words, said",
    [
        ("identity new key-0", "key-0.pub:"),
        ("identity new missing/key", "missing/key.pub:"),
        ("registry show missing.json", "registry missing.json:"),
        ("registry add missing.json key-0.pub --clients 0", "for a new one give --most-clients"),
        ("registry add registry.json key-0.pub --clients 12", "has a key that party 0 has or had"),
        ("registry add registry.json key-0 --clients 12", "key-0"),
        ("registry add registry.json new.pub --clients 12-14", "most-clients"),
        (
            "registry add registry.json new.pub --clients 12 --most-clients 9",
            "--most-clients 9: the registry has 2, which stays",
        ),
        ("registry rotate registry.json 0 key-1.pub", "party 1:"),
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
