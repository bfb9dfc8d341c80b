"""Records of many owners in one file: read, replaced, and put back as they were at a mark."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flower_graph.errors import CheckpointError, StateLostError
from flower_graph.storage import row_file
from flower_graph.storage.row_file import RowFile

COUNT, WIDTH = torch.tensor([2, 0, 1, 3]), 2  # rows of four owners


def new_file(tmp_path: Path) -> tuple[RowFile, dict[str, Tensor]]:
    path, index = tmp_path / "users.rows", row_file.new_index(4)
    row_file.create(path)
    return RowFile(path, index), index


def pointers(owners: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), COUNT[owners].cumsum(0)])


def write(file: RowFile, owners: list[int], value: float) -> None:
    who = torch.tensor(owners)
    ptr = pointers(who)
    parts = [torch.full((int(ptr[-1]), WIDTH), value + part / 10) for part in range(3)]
    file.write(who, ptr, parts)


def values(file: RowFile, parts: int = 3) -> list[list[float]]:
    """Give a number of each row, 0 where nothing was written, by part."""
    who = torch.arange(4)
    read = [torch.zeros(int(COUNT.sum()), WIDTH) for _ in range(parts)]
    file.read(who, pointers(who), read)
    assert all(torch.equal(part[:, 0], part[:, 1]) for part in read)
    return [[round(float(row[0]), 1) for row in part] for part in read]


def test_records_are_read_as_they_were_written_last(tmp_path: Path) -> None:
    file, _ = new_file(tmp_path)
    write(file, [3, 0], 1.0)  # in no order
    write(file, [2, 3], 5.0)
    assert values(file)[0] == [1.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    assert values(file)[2] == [1.2, 1.2, 5.2, 5.2, 5.2, 5.2]
    assert values(file, 1) == values(file)[:1]
    assert file.path.stat().st_size == 3 * 6 * WIDTH * 4


def test_an_index_or_a_journal_names_no_bytes_that_are_not_there(tmp_path: Path) -> None:
    file, index = new_file(tmp_path)
    write(file, [0, 3], 1.0)
    for name, value in (("rows-end", 1 << 40), ("rows-end", -1), ("rows-start", 1 << 40),
                        ("rows-start", -9)):  # fmt: skip
        bad = {key: part.clone() for key, part in index.items()}
        bad[name].fill_(value)
        with pytest.raises(StateLostError):
            RowFile(file.path, bad)
    file.mark(1)
    journal = next(tmp_path.glob("*.since-*"))
    for start, size in ((1 << 40, 8), (-8, 8)):
        body = [torch.tensor([one]).numpy().tobytes() for one in (start, size)] + [b"x" * 8]
        check = zlib.crc32(b"".join(body))
        header = row_file.HEADER.pack(len(b"".join(body)), check, 1)
        journal.write_bytes(header + b"".join(body))
        with pytest.raises(CheckpointError):
            row_file.go_back(file.path, 1)
    assert file.path.stat().st_size < 1000


def test_records_go_back_to_a_mark(tmp_path: Path) -> None:
    file, index = new_file(tmp_path)
    write(file, [0, 3], 1.0)
    states = {}
    for server_round in (1, 2, 3, 4):
        file.prepare()
        states[server_round] = {name: part.clone() for name, part in index.items()}
        file.mark(server_round)
        write(file, [3], 10.0 * server_round)
        write(file, [3, 2], 10.0 * server_round + 1)
    with pytest.raises(CheckpointError):
        row_file.go_back(file.path, 1)  # three are kept
    for server_round in (4, 2):
        row_file.go_back(file.path, server_round)
        back = RowFile(file.path, states[server_round])
        then = 10.0 * (server_round - 1) + 1
        assert values(back)[0] == [1.0, 1.0, then, then, then, then]
    with pytest.raises(CheckpointError):
        row_file.go_back(file.path, 3)  # the run took another course


def test_a_file_is_made_anew_and_removed_with_its_journals(tmp_path: Path) -> None:
    file, _ = new_file(tmp_path)
    file.mark(7)
    assert row_file.is_marked(file.path)
    row_file.create(file.path)
    assert not row_file.is_marked(file.path)
    row_file.remove(file.path)
    with pytest.raises(StateLostError):
        RowFile(file.path, row_file.new_index(4))
