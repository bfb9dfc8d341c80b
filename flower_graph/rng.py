"""Random numbers that depend only on what they are for: (seed, purpose, client, round)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *labels: str | int) -> int:
    """Derive an independent seed for one purpose."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *labels: str | int) -> torch.Generator:
    """Make a CPU generator for one purpose; arguments as in ``derive_seed``."""
    return torch.Generator().manual_seed(derive_seed(seed, *labels))


@contextmanager
def seeded(device: torch.device, seed: int, *labels: str | int) -> Iterator[None]:
    """Seed PyTorch's own generators inside a block and restore them afterwards.

    Layers such as ``torch.nn.Dropout`` draw from the global generator and take no other; this
    makes them a function of the labels without leaving a trace.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # ``torch.manual_seed`` takes a millisecond for the kinds of processor that are not there.
        number = derive_seed(seed, *labels)
        torch.default_generator.manual_seed(number)
        for one in devices:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(number)
        yield
