"""Files spoiled at random, by their bytes or by what they say."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from flower_graph.secure.parties.journal import sealed

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 0.5, 1e308, float("nan")),
    *("", "x", "\ud800", "x" * 100_000, "../../etc", "0-99,200", [], {}, [[]], [None], [1, 1]),
    *({"a": 1}, [[1, 2], [3]], [10**15] * 4),
)


def spoiled(path: Path, honest: bytes, rng: random.Random) -> bytes:
    """Change a file: its bytes anyhow, or what it says by the rules of its kind."""
    change = BY_KIND.get(path.suffix)
    if change is not None and rng.random() < 0.7:
        return change(honest, rng)
    data = bytearray(honest)
    for _ in range(rng.choice((1, 1, 2, 8))):
        start, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 40))
        how = rng.randrange(5)
        if how == 0:
            data[start : start + size] = rng.randbytes(size)
        elif how == 1:
            del data[start : start + size]
        elif how == 2:
            data[start:start] = data[:size] or b"\0"
        elif how == 3:
            data[start : start + 4] = struct.pack("<i", rng.choice((-1, 0, 2**31 - 1, 65536)))
        else:
            del data[start:]
    return bytes(data)


def in_json(honest: bytes, rng: random.Random) -> bytes:
    tree = json.loads(honest)
    places = list(places_in([tree]))
    holder, key = rng.choice(places)
    if isinstance(holder, dict) and rng.random() < 0.2:
        del holder[key]
    elif holder is not None and holder[key] is tree:
        return json.dumps(rng.choice(ODD)).encode()
    else:
        holder[key] = rng.choice(ODD)
    return json.dumps(tree).encode()


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], (dict, list)):
            yield from places_in(tree[key])


def in_lines(honest: bytes, rng: random.Random) -> bytes:
    lines = honest.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = in_json(lines[place], rng) if lines[place].endswith(b"}") else b"["
    return b"\n".join(lines) + b"\n"


def in_journal(honest: bytes, rng: random.Random) -> bytes:
    """Spoil the JSON behind the hash, and hash it anew as the party would."""
    return sealed(in_json(honest.partition(b"\n")[2], rng))


def odd_array(rng: random.Random) -> Any:
    shape = rng.choice(((), (0,), (1,), (4,), (2, 2), (3, 4), (0, 2**40), (1000,)))
    kind = rng.choice(("<i8", "<f4", "<f8", "|b1", "<U3", "|S2", "<c8", "<M8[s]", "|i1", "<u8"))
    made = np.zeros(shape, kind)
    if made.dtype.kind in "if" and made.size:
        made.flat[0] = rng.choice((-1, -100, 127))
    return made


def swapped(parts: dict[str, Any], odd: Callable[[random.Random], Any], rng: random.Random) -> Any:
    """Put another part in the place of one, leave one out, or add one."""
    name = rng.choice([*parts, "more"])
    parts[name] = odd(rng)
    if rng.random() < 0.2:
        del parts[name]
    return parts


def in_arrays(honest: bytes, rng: random.Random) -> bytes:
    with np.load(io.BytesIO(honest)) as file:
        arrays = swapped(dict(file), odd_array, rng)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def odd_tensor(rng: random.Random) -> torch.Tensor:
    shape = rng.choice(((), (0,), (1,), (4,), (2, 2), (3, 4), (2, 6), (0, 2**20)))
    kinds = (torch.float32, torch.int64, torch.bool, torch.float16, torch.int8, torch.uint16,
             torch.float8_e4m3fn, torch.complex64)  # fmt: skip
    made = torch.zeros(shape, dtype=rng.choice(kinds))
    if made.dtype in (torch.int64, torch.float32) and rng.random() < 0.5:
        made += rng.choice((-1, 7, 2**40))
    return made


def in_tensors(honest: bytes, rng: random.Random) -> bytes:
    return save(swapped(load(honest), odd_tensor, rng))


def in_saved(honest: bytes, rng: random.Random) -> bytes:
    found = torch.load(io.BytesIO(honest), weights_only=True)
    tensor = odd_tensor(rng)
    others = (tensor.expand(2, *tensor.shape), torch.eye(4).to_sparse_csr(), tensor.to("meta"))
    key = rng.choice([*found, "client", "identity", "public", "classes", "num_classes"])
    found[key] = rng.choice((tensor, *others, *ODD))
    out = io.BytesIO()
    torch.save(found, out, _use_new_zipfile_serialization=rng.random() < 0.8)
    return out.getvalue()


BY_KIND: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": in_json,
    ".jsonl": in_lines,
    ".journal": in_journal,
    ".npz": in_arrays,
    ".safetensors": in_tensors,
    ".pt": in_saved,
}
