"""The homicide rates of US counties as a graph of one's own, for ``flower-graph reproduce values``.

    pip download --no-deps --no-binary pysal pysal==1.14.4.post2
    python -m benchmarks.counties PySAL-1.14.4.post2.tar.gz counties.json

Source: Messner, Anselin, Baller, Hawkins, Deane and Tolnay, "The Spatial Patterning of County
Homicide Rates", Journal of Quantitative Criminology 15(4), 1999; the model is that of Baller,
Anselin, Messner, Deane and Hawkins, "Structural Covariates of U.S. County Homicide Rates",
Criminology 39(3), 2001. PySAL 1.14 ships both the figures and which counties touch ("nat").

A node is a county, its number the homicides per 100,000 people and year around 1990 (``HR90``), an
edge that two counties touch. Features are those of 1990 but for the homicides themselves, the
people that they are divided by, and what only names a county.
"""

from __future__ import annotations

import argparse
import json
import struct
import tarfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = "pysal/examples/nat/"
NAME, TARGET = "FIPSNO", "HR90"
FEATURES = {
    "SOUTH": "south",
    "RD90": "deprivation",
    "PS90": "population structure",
    "UE90": "unemployed",
    "DV90": "divorced",
    "MA90": "median age",
    "DNL90": "log density",
    "MFIL89": "log median income",
    "FP89": "poor families",
    "BLK90": "black",
    "GI89": "Gini",
    "FH90": "female-headed families",
}


def records(dbf: bytes) -> Iterator[dict[str, str]]:
    """Read a dBase table: a header, a descriptor for each column, records of fixed width."""
    count, start, width = struct.unpack_from("<IHH", dbf, 4)
    columns = [
        (dbf[at : at + 11].split(b"\0")[0].decode(), dbf[at + 16])
        for at in range(32, start - 1, 32)
    ]
    for number in range(count):
        at, record = start + number * width + 1, {}  # a byte says whether it was deleted
        for name, size in columns:
            record[name] = dbf[at : at + size].decode().strip()
            at += size
        yield record


def neighbours(gal: str) -> set[tuple[str, str]]:
    """Read which nodes touch, each pair once: a line for a node, then a line of neighbours."""
    words = gal.split("\n")[1:]
    pairs = set()
    for head, line in zip(words[::2], words[1::2], strict=False):
        one = head.split()[0]
        pairs |= {(min(one, other), max(one, other)) for other in line.split()}
    return pairs


def main(sdist: Path, out: Path) -> None:
    """Write the graph as node-link JSON."""
    files = {}
    with tarfile.open(sdist) as archive:
        for member in archive:
            if FOLDER in member.name and (file := archive.extractfile(member)) is not None:
                files[Path(member.name).name] = file.read()
    nodes = [
        {"id": county[NAME], "label": float(county[TARGET])}
        | {word: float(county[column]) for column, word in FEATURES.items()}
        for county in records(files["NAT.dbf"])
    ]
    pairs = sorted(neighbours(files["nat_queen.gal"].decode()))
    links = [{"source": one, "target": other} for one, other in pairs]
    out.write_text(json.dumps({"nodes": nodes, "links": links}) + "\n", encoding="utf-8")
    print(f"{len(nodes)} counties, {len(links)} pairs that touch, in {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdist", type=Path, help="the source archive of PySAL 1.14.4.post2")
    parser.add_argument("out", type=Path, help="the file to write, such as counties.json")
    given = parser.parse_args()
    main(given.sdist, given.out)
