"""The counties of PySAL become a graph of one's own."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from pathlib import Path

from benchmarks.counties import FEATURES, FOLDER, NAME, TARGET, main


def dbf(columns: dict[str, int], rows: list[dict[str, str]]) -> bytes:
    """Write a dBase table: a header, a descriptor for each column, records of fixed width."""
    fields = [
        name.encode().ljust(11, b"\0") + b"C" + bytes(4) + bytes([size]) + bytes(15)
        for name, size in columns.items()
    ]
    start, width = 33 + 32 * len(fields), 1 + sum(columns.values())
    head = struct.pack("<4sIHH20x", b"\3\0\0\0", len(rows), start, width)
    records = [
        " " + "".join(row[name].rjust(size) for name, size in columns.items()) for row in rows
    ]
    return head + b"".join(fields) + b"\r" + "".join(records).encode()


def test_counties_that_touch_are_linked_once(tmp_path: Path) -> None:
    columns = {NAME: 5, TARGET: 8, **dict.fromkeys(FEATURES, 6)}
    rows = [
        {NAME: "1001", TARGET: "2.5", **dict.fromkeys(FEATURES, "0.5")},
        {NAME: "1003", TARGET: "0.0", **dict.fromkeys(FEATURES, "-1")},
        {NAME: "1005", TARGET: "7", **dict.fromkeys(FEATURES, "3")},
    ]
    gal = "0 3 NAT FIPSNO\n1001 2\n1003 1005\n1003 1\n1001\n1005 1\n1001\n"
    files = {"NAT.dbf": dbf(columns, rows), "nat_queen.gal": gal.encode()}
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"PySAL/{FOLDER}{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    main(tmp_path / "sdist.tar.gz", tmp_path / "counties.json")
    made = json.loads((tmp_path / "counties.json").read_text())
    assert [(one["id"], one["label"], one["Gini"]) for one in made["nodes"]] == [
        ("1001", 2.5, 0.5),
        ("1003", 0.0, -1.0),
        ("1005", 7.0, 3.0),
    ]
    assert {*made["nodes"][0]} == {"id", "label", *FEATURES.values()}
    assert made["links"] == [
        {"source": "1001", "target": "1003"},
        {"source": "1001", "target": "1005"},
    ]
