"""What Flower's trusted entities hold, and what not: privacy.md says so."""

import base64
import hashlib
import json

import pytest
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from flower_graph.flower_compat import create_message_to_sign

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
