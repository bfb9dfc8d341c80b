"""Tells the command ``flwr`` how to reach a deployment's SuperLink.

    python deploy/connection.py superlink.example.org:8000 ca.crt

Adds the connection ``my-deployment`` (or ``--name``) to ``config.toml`` in Flower's home folder,
``~/.flwr`` unless ``FLWR_HOME`` names another; an entry of the same name is replaced.
"""

import argparse
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import tomli_w

NAME = "my-deployment"


def write_connection(home: Path, name: str, address: str, certificate: Path | None) -> Path:
    """Add a connection to Flower's configuration."""
    if certificate is not None and not certificate.is_file():
        raise FileNotFoundError(f"{certificate}: no such certificate")
    file = home / "config.toml"
    settings = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    # Flower wants an absolute path here.
    trust = {"root-certificates": str(certificate.resolve())} if certificate else {"insecure": True}
    settings.setdefault("superlink", {})[name] = {"address": address, **trust}
    home.mkdir(parents=True, exist_ok=True)
    file.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return file


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", help="host:port of the SuperLink")
    parser.add_argument("certificate", type=Path, help="ca.crt")
    parser.add_argument("--name", default=NAME)
    given = parser.parse_args(arguments)
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    try:
        file = write_connection(home, given.name, given.address, given.certificate)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{file}: `flwr run . {given.name} --stream` now reaches {given.address}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
