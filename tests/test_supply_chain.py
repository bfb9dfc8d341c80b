"""The pinned versions, and the hashes of their files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return {re.sub(r"[._-]+", "-", m[1]).lower(): m[2] for m in PIN.finditer(text)}


def test_hashes_are_those_of_the_pinned_versions() -> None:
    plain, hashed = pins("constraints.txt"), pins("constraints-hashes.txt")
    assert len(plain) > 100
    assert {name: hashed.get(name) for name in plain} == plain
    # What else is there comes with the build of torch for NVIDIA's devices.
    more = [name for name in hashed.keys() - plain.keys()]
    assert [name for name in more if not re.match(r"nvidia-|cuda-|triton", name)] == []


def test_every_pin_has_a_hash() -> None:
    text = (ROOT / "constraints-hashes.txt").read_text(encoding="utf-8")
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text)[1:]
    assert len(blocks) == len(pins("constraints-hashes.txt"))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
