"""Makes certificates and keys for the parties of a deployment.

    python deploy/credentials.py server DIR --host superlink.example.org
    python deploy/credentials.py node FILE
    python deploy/credentials.py check FILE ...

``server`` makes an authority and the SuperLink's certificate: ``ca.crt``, which every party gets,
``server.crt``, and the keys ``ca.key`` and ``server.key``, which stay. ``node`` makes a SuperNode's
key on its own machine; only ``FILE.pub`` leaves it. ``check`` tells whether certificates and keys
can be used; the scripts that start processes ask it first.
"""

import argparse
import ipaddress
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS = 365
# The SuperLink's own ServerApp processes verify the certificate too, from its own machine.
SELF = ("localhost", "127.0.0.1", "::1")
ALLOWANCE = timedelta(minutes=5)  # clocks of two machines differ a little


class CredentialsError(Exception):
    """A certificate or key that cannot be used; says which and what to do."""


def make_server_credentials(
    folder: Path, hosts: Sequence[str], *, expires: datetime | None = None
) -> None:
    """Write an authority and the SuperLink's certificate, which it signs."""
    if not hosts:
        raise ValueError("hosts=[]: at least one name or address is needed")
    folder.mkdir(parents=True, exist_ok=True)
    lasting = datetime.now(UTC) + timedelta(days=DAYS)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only"
    unused = dict.fromkeys([*others.split(), "decipher_only"], False)
    usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **unused)
    authority = {
        x509.BasicConstraints(ca=True, path_length=0): True,
        usage: True,
        x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()): False,
    }
    ca = _certificate("flower-graph deployment", ca_key, lasting, authority)
    names = list(dict.fromkeys([*hosts, *SELF]))
    own = {
        x509.SubjectAlternativeName([_name(host) for host in names]): False,
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()): False,
    }
    server = _certificate(names[0][:64], server_key, expires or lasting, own, (ca, ca_key))
    for name, key, certificate in (("ca", ca_key, ca), ("server", server_key, server)):
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        _write(folder / f"{name}.key", private, 0o600)
        _write(folder / f"{name}.crt", certificate.public_bytes(Encoding.PEM), 0o644)


def make_node_key(file: Path) -> None:
    """Write a SuperNode's key and, beside it, its public half."""
    file.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())  # Flower takes NIST curves alone
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(file, private, 0o600)
    _write(Path(f"{file}.pub"), public, 0o644)


def check(file: Path) -> None:
    """Refuse a certificate or key that cannot be used; ``CredentialsError`` says why."""
    why = ""
    if not file.is_file():
        why = "no such file; make it with deploy/credentials.py, or copy ca.crt from whoever runs "
        why += "the SuperLink"
    elif file.suffix != ".crt":
        if mode := stat.S_IMODE(file.stat().st_mode) & 0o077:
            why = f"a private key that others may use (mode has {mode:03o}): chmod 600 it"
    else:
        try:
            certificate = x509.load_pem_x509_certificate(file.read_bytes())
        except ValueError as error:
            why = f"no certificate ({error}); make or copy it anew"
            raise CredentialsError(f"{file}: {why}") from error
        now = datetime.now(UTC)
        if (ends := certificate.not_valid_after_utc) <= now:
            why = f"expired at {ends:%Y-%m-%d %H:%M} UTC (it is {now:%Y-%m-%d %H:%M}); make new "
            why += "credentials with `python deploy/credentials.py server`, ca.crt for all parties"
        elif (begins := certificate.not_valid_before_utc) > now:
            why = f"not valid before {begins:%Y-%m-%d %H:%M} UTC: set this machine's clock"
    if why:
        raise CredentialsError(f"{file}: {why}")


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    expires: datetime,
    extensions: Mapping[x509.ExtensionType, bool],  # whether each is critical
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
) -> x509.Certificate:
    """Make a certificate, which its issuer signs, else its own key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A certificate that has expired already must have begun before.
        .not_valid_before(min(datetime.now(UTC), expires) - ALLOWANCE)
        .not_valid_after(expires)
    )
    for extension, is_critical in extensions.items():
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(key if issuer is None else issuer[1], hashes.SHA384())


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(file: Path, content: bytes, mode: int) -> None:
    """Write a new file whose mode is right from its first byte on."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    server = commands.add_parser("server", help="authority and certificate of the SuperLink")
    server.add_argument("folder", type=Path)
    server.add_argument("--host", action="append", required=True, help="may be given repeatedly")
    node = commands.add_parser("node", help="key of a SuperNode")
    node.add_argument("file", type=Path)
    checked = commands.add_parser("check", help="whether certificates and keys can be used")
    checked.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    try:
        if given.what == "check":
            for file in given.files:
                check(file)
        elif given.what == "server":
            make_server_credentials(given.folder, given.host)
            print(f"{given.folder}: give ca.crt to every party; the .key files stay here")
        else:
            make_node_key(given.file)
            print(f"{given.file}.pub: send it to whoever runs the SuperLink; {given.file} stays")
    except (FileExistsError, CredentialsError) as error:
        there = f"{getattr(error, 'filename', '')} is there already; nothing was overwritten"
        print(there if isinstance(error, FileExistsError) else error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
