"""Credentials and connections that the scripts in deploy/ make, and what they refuse."""

import os
import stat
import subprocess
import sys
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from deploy import connection, credentials

ROOT = Path(credentials.__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    credentials.make_server_credentials(tmp_path / "made", ["superlink.example", "10.0.0.7"])
    return tmp_path / "made"


def test_the_authority_signs_a_certificate_for_the_names_and_for_the_machine_itself(
    folder: Path,
) -> None:
    read = x509.load_pem_x509_certificate
    ca, server = (read((folder / f"{name}.crt").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["superlink.example", "localhost"]
    addresses = [str(one) for one in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.0.0.7", "127.0.0.1", "::1"]
    assert server.not_valid_after_utc > datetime.now(UTC) + timedelta(days=360)


def test_private_keys_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        credentials.make_server_credentials(tmp_path / "made", ["a"])
        credentials.make_node_key(tmp_path / "node")
    finally:
        os.umask(before)
    for file in ("made/ca.key", "made/server.key", "node"):
        assert stat.S_IMODE((tmp_path / file).stat().st_mode) == 0o600, file
    private = load_ssh_private_key((tmp_path / "node").read_bytes(), None)
    public = load_ssh_public_key((tmp_path / "node.pub").read_bytes())
    assert private.public_key() == public


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert credentials.main(["server", str(folder), "--host", "b"]) == 1
    assert "is there already" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    with pytest.raises(ValueError, match="least"):
        credentials.make_server_credentials(folder / "other", [])


def test_what_cannot_be_used_is_named(folder: Path, tmp_path: Path) -> None:
    check, error = credentials.check, credentials.CredentialsError
    for name in ("ca.crt", "server.crt", "ca.key", "server.key"):
        check(folder / name)
    with pytest.raises(error, match=r"none\.crt"):
        check(folder / "none.crt")
    (folder / "server.key").chmod(0o640)
    with pytest.raises(error, match=r"server\.key.*040"):
        check(folder / "server.key")
    (folder / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\nno\n")
    with pytest.raises(error, match=r"ca\.crt"):
        check(folder / "ca.crt")


def _script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["sh", str(ROOT / "deploy" / name), *arguments],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_scripts_start_nothing_with_credentials_that_cannot_be_used(tmp_path: Path) -> None:
    past = datetime.now(UTC) - timedelta(days=1)
    credentials.make_server_credentials(tmp_path / "old", ["a"], expires=past)
    with pytest.raises(credentials.CredentialsError, match=r"server\.crt"):
        credentials.check(tmp_path / "old" / "server.crt")
    done = _script("superlink.sh", str(tmp_path / "old"), "127.0.0.1")
    assert done.returncode == 1 and "server.crt: expired at" in done.stderr
    assert "Starting" not in done.stdout + done.stderr
    credentials.make_node_key(tmp_path / "key")
    files = str(tmp_path / "ca.crt"), str(tmp_path / "key")
    done = _script("supernode.sh", "127.0.0.1:1", *files, ".")
    assert done.returncode == 1 and "ca.crt: no such file" in done.stderr
    assert "usage: deploy/supernode.sh" in _script("supernode.sh", "127.0.0.1:1").stderr


def test_a_connection_is_added_to_those_that_are_there(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[superlink]\ndefault = "x"\n\n[superlink.x]\na = 1\n')
    for address in ("old:1", "new:2"):
        connection.write_connection(tmp_path, "mine", address, folder / "ca.crt")
    found = tomllib.loads((tmp_path / "config.toml").read_text())["superlink"]
    mine = {"address": "new:2", "root-certificates": str(folder / "ca.crt")}
    assert found == {"default": "x", "x": {"a": 1}, "mine": mine}
    with pytest.raises(FileNotFoundError, match=r"none\.crt"):
        connection.write_connection(tmp_path, "mine", "new:2", tmp_path / "none.crt")
