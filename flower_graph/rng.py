"""Random numbers that depend only on their purpose: (seed, purpose, client, round)."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
MIXING = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


def derive_seed(seed: int, *labels: str | int) -> int:
    """Derive an independent seed for one purpose."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *labels: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator for one purpose; ``seed`` and labels as in ``derive_seed``."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *labels))


@contextmanager
def seeded(device: torch.device, seed: int, *labels: str | int) -> Iterator[None]:
    """Seed PyTorch's global generators inside a block and restore them afterwards.

    Layers such as ``torch.nn.Dropout`` draw from the global generator only.
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


def chances(numbers: torch.Tensor, seed: int, *labels: str | int) -> torch.Tensor:
    """Map whole numbers to random numbers in [0, 1); equal numbers get equal results.

    Parameters
    ----------
    numbers : Tensor
        Whole numbers of any shape, each less than 2^63.
    seed, *labels
        As in ``derive_seed``.

    Returns
    -------
    Tensor
        Float32 of the same shape: multiples of 2^-24.
    """
    # The mixing of SplitMix64 (Steele, Lea and Flood, 2014): a generator for each of a million
    # would take seconds.
    z = numbers.cpu().numpy().astype(np.uint64)
    z *= GOLDEN
    z += np.uint64(derive_seed(seed, *labels))
    for shift, factor in MIXING:
        z ^= z >> shift
        z *= factor
    z ^= z >> np.uint64(31)
    drawn = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return torch.from_numpy(drawn).to(numbers.device)
