"""Files made by hand to do harm: they unfold, claim what is not there, or never end."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from honest_files import MODULE, SIZES, Target


class Called:
    """Is pickled as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def of_no_kind(path: Path) -> None:
    """Lay a pipe that nobody writes to."""
    os.mkfifo(path)


def folder_there(path: Path) -> None:
    """Lay a folder."""
    path.mkdir()


def loop(path: Path) -> None:
    """Lay a link to itself."""
    path.symlink_to(path)


def endless(path: Path) -> None:
    """Lay a link to a device that never ends."""
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    """Lay a file of two million million bytes, which are nowhere."""
    path.touch()
    os.truncate(path, 1 << 41)


PLACED = (of_no_kind, folder_there, loop, endless, huge)


def unfolding_arrays() -> Iterator[bytes]:
    """Give archives that unfold, or claim more than they have."""
    yield zeros(1000)
    for shape in ("(10000000000000,)", "(-1, -8)", "(4611686018427387904, 4)", "(" * 99):
        yield packed({"client.npy": npy("<i8", shape)})
    for kind in ("|O", "<U0", "|V0", "<U1000000000"):
        yield packed({"client.npy": npy(kind, "(1000000000,)")})
    yield packed({f"{number}.npy": b"" for number in range(20_000)})


def zeros(megabytes: int) -> bytes:
    """Write an archive with an array of zeros, a thousandth of its size."""
    out, size = io.BytesIO(), megabytes << 20
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("client.npy", "w") as member,
    ):
        member.write(npy("|i1", f"({size},)")[:-64])
        for _ in range(megabytes):
            member.write(bytes(1 << 20))
    return out.getvalue()


def npy(kind: str, shape: str) -> bytes:
    """Write the head of an array without numbers."""
    head = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head + bytes(64)


def packed(members: dict[str, bytes]) -> bytes:
    """Write an archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def unfolding_saved() -> Iterator[bytes]:
    """Give what ``torch.save`` writes of tensors that repeat a number, and of calls."""
    nested: Any = ["a"]
    for _ in range(60):
        nested = [nested, nested]
    one = torch.ones(1)
    values = [one.expand(10**10), Called(torch.FloatTensor, 10**10), Called(bytearray, 10**11)]
    values += [nested, one.expand(10**9).to("meta"), Called(os.system, "true")]
    for value in values:
        for zipped in (True, False):
            out = io.BytesIO()
            torch.save({"x": value, "y": value}, out, _use_new_zipfile_serialization=zipped)
            yield out.getvalue()
    yield b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b"."
    yield from larger_storages()


def larger_storages() -> Iterator[bytes]:
    """Give archives whose pickle says that a tensor is larger than its member."""
    out = io.BytesIO()
    torch.save({"x": torch.ones(10, 10)}, out)
    with zipfile.ZipFile(out) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    name = next(one for one in members if one.endswith("data.pkl"))
    for count in (101, 10**9, -1):
        wider = members[name].replace(b"Kd", b"J" + struct.pack("<i", min(count, 2**31 - 1)))
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for one, data in members.items():
                archive.writestr(one, wider if one == name else data)
        yield made.getvalue()


def unfolding_tensors() -> Iterator[bytes]:
    """Give heads of tensors that are long, or claim much."""
    yield struct.pack("<Q", 2**62) + b"{}"
    for kind, shape in (("F32", [2**40]), ("F8_E4M3", [4]), ("F32", [-1]), ("F32", [2**62, 4])):
        entry = {"a": {"dtype": kind, "shape": shape, "data_offsets": [0, 4]}}
        yield head_of(entry) + bytes(4)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    yield head_of({str(number): empty for number in range(50_000)})


def head_of(entries: dict[str, Any]) -> bytes:
    """Write the head of a file of tensors."""
    data = json.dumps(entries).encode()
    return struct.pack("<Q", len(data)) + data


def unfolding_json() -> Iterator[bytes]:
    """Give JSON that is deep, or has numbers without end."""
    yield b"[" * 10**6
    yield b'{"round":' * 3000 + b"1" + b"}" * 3000
    for number in (b"9" * 5000, b"-" + b"9" * 4299, b"1e400", b"NaN"):
        yield b'{"round": ' + number + b', "nodes": ' + number + b"}"
        yield b'[{"clients": ' + number + b"}]"
    yield b'{"a": "\\ud800"}'


def of_models() -> Iterator[bytes]:
    """Give what says of models what they cannot be."""
    for change in ({"hidden": 10**12}, {"hidden": 2**24, "features": 2**24}, {"hidden": 10**30}):
        said = {"module": MODULE, "arguments": SIZES | change, "client": 0}
        yield json.dumps(said).encode()
    rows = {"name": "lin.weight", "transposed": True}
    for clients in ([], [0, 0], ["0"], [0], [0, 1, 2], "01", None, [0, 10**30]):
        entry = {"module": MODULE, "arguments": {}, "clients": clients, "rows": rows}
        yield json.dumps([entry]).encode()


def unfolding_yaml() -> Iterator[bytes]:
    """Give settings that unfold, or have themselves in them."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for name, before in zip("bcdefghij", "abcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join(['*' + before] * 10)}]")
    yield "\n".join(lines).encode()
    yield b"a: &a [*a]"
    yield b"a: &a {b: 1, <<: *a}"
    yield b"[" * 20_000
    yield b"a: [" + b"x," * 60_000 + b"]"
    yield b"".join(b" " * depth + b"a:\n" for depth in range(600))
    yield b"rounds: " + b"9" * 5000


def unfolding_xml() -> Iterator[bytes]:
    """Give XML that unfolds, or is deep."""
    pairs = zip("bcdefgh", "abcdefg", strict=True)
    entities = "".join(f'<!ENTITY {name} "' + f"&{before};" * 20 + '">' for name, before in pairs)
    dtd = f'<!DOCTYPE g [<!ENTITY a "xxxxxxxxxx">{entities}]>'
    yield f'<?xml version="1.0"?>{dtd}<graphml><node id="&h;"/></graphml>'.encode()
    yield b"<a>" * 100_000
    keys = "".join(f'<key id="{k}" for="node" attr.name="{k}"><default>1</default></key>'
                   for k in range(4000))  # fmt: skip
    nodes = '<node id="a"/>' * 20_000
    yield f"<graphml>{keys}{nodes}</graphml>".encode()


def unfolding_tables() -> Iterator[bytes]:
    """Give tables with rows or cells without end."""
    yield b"name,label" + b"," * 20_000_000
    yield b'name,label\n"' + b"x" * 10**6
    yield b"name,label\n" + b'"\n",' * 6_000_000
    yield b"name,label\n" + "é".encode("latin-1")


BOMBS: dict[str, Callable[[], Iterator[bytes]]] = {
    ".npz": unfolding_arrays,
    ".pt": unfolding_saved,
    ".safetensors": unfolding_tensors,
    ".json": unfolding_json,
    ".jsonl": unfolding_json,
    ".yaml": unfolding_yaml,
    ".graphml": unfolding_xml,
    ".csv": unfolding_tables,
}
PLAIN = (b"", b"\0", b"\xff\xfe\0", b"\x80\x04\x95", b"PK\3\4" + bytes(100), b"[]", b"{}", b"0")


def made_by_hand(targets: list[Target]) -> Iterator[tuple[str, Target, Callable[[Path], Any]]]:
    """Give all that is made by hand for each file: a name, the file, and what lays it."""
    cache: dict[str, list[bytes]] = {}
    for target in targets:
        suffix = target.path.suffix
        if suffix not in cache:
            cache[suffix] = [*PLAIN, *(BOMBS[suffix]() if suffix in BOMBS else ())]
        more = [*of_models()] if target.path.name in ("model.json", "models.json") else []
        for lay in PLACED:
            yield lay.__name__, target, lay
        for number, data in enumerate([*cache[suffix], *more]):
            yield f"{number}", target, lambda path, data=data: path.write_bytes(data)
