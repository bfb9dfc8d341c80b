"""Reading untrusted files: regular files of bounded size only; failures raise one named error.

Every reader opens its file here, within ``reading``, which turns any error that the bytes cause
into the reader's own. ``storage.formats`` checks archives and heads of tensors before memory is
allocated for their claims.
"""

import errno
import json
import lzma
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from flower_graph import errors
from flower_graph.errors import MAX_REASON, one_line, words_of

# Values of JSON and YAML. Any: the reader of a key checks its value.
Tree = dict[str, Any]
# What a class's ``state_dict`` or ``state`` returned. Any: the class alone knows its values.
StateDict = Mapping[str, Any]

MIB, GIB = 1 << 20, 1 << 30
# The most bytes of a file, by what it is. The first four are read as a whole and unfold in memory,
# some to twenty times their size.
MOST_KEY = 1 << 16  # a key, a version
MOST_SETTINGS = MIB // 8  # YAML
MOST_RECORD = 16 * MIB  # descriptions of a run, a folder or models; a registry, a journal
MOST_PACKED = 256 * MIB  # the same of many runs, once they are unpacked
MOST_LINES = GIB  # a line for each round
MOST_GRAPH = 8 * GIB  # tables, JSON and XML of nodes, which become arrays
MOST_TENSORS = 1024 * GIB  # which take as much memory as the file, and are checked against its size
DEPTH = 64  # lists and tables within each other
MOST_NUMBER = 2**64  # of a whole number in JSON, of either sign
MOST_NODES = 1 << 17  # of a YAML tree once its references are written out
SEALED = b"flower-graph sealed 1\n"  # begins files that are encrypted (``storage.sealed``)
_LONG = re.compile(rb"\d{20}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # half of a surrogate pair, perhaps alone
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


@contextmanager
def reading(path: Path | str, kind: type[Exception], why: str = "cannot be read") -> Iterator[None]:
    """Turn any error that a file's bytes cause into one that names the file and the reason.

    ``path`` is the file's name in the error, ``kind`` the error's type, ``why`` its words before
    the reason. Errors of ``flower_graph.errors`` pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if type(error) is getattr(errors, type(error).__name__, None):
            raise
        raise kind(f"{path}: {why}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return in one line why a file cannot be read."""
    if isinstance(error, OSError):
        return error.strerror or one_line(error)
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8 text"
    words = one_line(words_of(error), MAX_REASON)
    plain = type(error) in (ValueError, json.JSONDecodeError)
    return words if plain else f"{type(error).__name__}: {words}"


# Opening ------------------------------------------------------------------------------------------


@contextmanager
def open_regular(path: Path | str, most: int) -> Iterator[BinaryIO]:
    """Open a regular file of at most so many bytes.

    ``OSError`` if it is a pipe, a device or a folder, or larger.
    """
    # A pipe that nobody writes to is opened at once, and refused.
    with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if status.st_size > most:
            size = f"it has {status.st_size:,} bytes, at most {most:,} are read"
            raise OSError(errno.EFBIG, size, str(path))
        yield stream


def read_bytes(path: Path | str, most: int) -> bytes:
    """Read a regular file of at most so many bytes; ``OSError`` as of ``open_regular``."""
    with open_regular(path, most) as stream:
        return stream.read(os.fstat(stream.fileno()).st_size)


def read_secret(path: Path | str) -> bytes:
    """Read a key's file, which its owner alone may use; ``OSError`` if others may."""
    with open_regular(path, MOST_KEY) as stream:
        if (mode := os.fstat(stream.fileno()).st_mode & 0o777) & 0o077:
            why = f"it has mode {mode:o}, others may use it; `chmod 600` it"
            raise OSError(errno.EACCES, why, str(path))
        return stream.read()


def read_text(path: Path | str, most: int, encoding: str = "utf-8") -> str:
    """Read a text; raises as ``read_bytes``, and ``UnicodeDecodeError``."""
    return read_bytes(path, most).decode(encoding)


# JSON and YAML ------------------------------------------------------------------------------------


# Any, here and below: the file's reader checks the values
def read_json(path: Path | str, most: int = MOST_RECORD) -> Any:
    """Read a JSON file; raises as ``read_bytes`` and ``parse_json``."""
    return parse_json(read_bytes(path, most))


# Left open: the reader of the file checks the values
def read_packed(path: Path | str) -> Any:
    """Read a compressed JSON file (``storage.files.write_packed``); raises as ``read_json``."""
    unpacking = lzma.LZMADecompressor(lzma.FORMAT_XZ)
    data = unpacking.decompress(read_bytes(path, MOST_RECORD), MOST_PACKED + 1)
    if len(data) > MOST_PACKED:
        raise ValueError(f"it unpacks to more than {MOST_PACKED:,} bytes")
    if not unpacking.eof:
        raise ValueError("it is cut short")
    return parse_json(data)


def read_lines(path: Path | str) -> list[Tree]:
    """Read a file with a line of JSON for each round.

    A last line that is cut short, as when a run was killed, is left out. Raises ``ValueError`` if a
    line is not a mapping, and as ``read_bytes``.
    """
    *lines, last = read_bytes(path, MOST_LINES).rstrip(b"\n").split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse_json(line))
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from error
    with suppress(ValueError):
        records.append(parse_json(last))
    if any(not isinstance(record, dict) for record in records):
        raise ValueError("it has lines that are no mappings")
    return records


# Any: arguments and results of ``json.loads``
def parse_json(data: bytes, **how: Any) -> Any:
    """Read JSON of bounded depth and numbers; ``how`` goes to ``json.loads``.

    ``ValueError`` if it is no JSON in UTF-8, is nested deeper than 64 levels, or has a whole number
    beyond 2^64, or an invalid character.
    """
    if not _is_flat(data) and not _is_flat(_TEXT.sub(b"", data)):
        raise ValueError(f"it is nested deeper than {DEPTH} levels")
    if _LONG.search(data):
        how["parse_int"] = _number
    content = json.loads(data.decode("utf-8-sig"), **how)
    if _HALF.search(data):
        json.dumps(content, ensure_ascii=False).encode()  # UnicodeEncodeError
    return content


def _is_flat(data: bytes) -> bool:
    """Return whether brackets, also those in strings, are nested at most so deep."""
    if data.count(b"[") + data.count(b"{") <= DEPTH:
        return True
    import numpy as np  # `flower-graph list` reads files and does without it

    depth = 0
    for start in range(0, len(data), MIB):
        signs = np.frombuffer(data, np.uint8, min(MIB, len(data) - start), start)
        step = np.isin(signs, (91, 123)).astype(np.int64) - np.isin(signs, (93, 125))
        height = depth + step.cumsum()
        if height.max() > DEPTH:
            return False
        depth = int(height[-1])
    return True


def _number(text: str) -> int:
    if len(text) > 21 or abs(int(text)) > MOST_NUMBER:
        raise ValueError(f"a whole number of {len(text)} digits is beyond 2^64")
    return int(text)


def check_yaml(text: str) -> None:
    """Refuse YAML that is small and takes long: lists in lists, references to references."""
    if not _is_flat(text.encode()):  # its reader looks through all open ones at each word
        raise ValueError(f"it is nested deeper than {DEPTH} levels")
    if "*" in text and unfolded(yaml.compose(text), {}, MOST_NODES) > MOST_NODES:
        raise ValueError(f"its aliases (*) stand for more than {MOST_NODES:,} entries")


def unfolded(value: object, sizes: dict[int, int], most: int) -> int:
    """Count the values in nested lists, each list as often as it is referred to."""
    value = value.value if isinstance(value, yaml.Node) else value
    if not isinstance(value, list | tuple | set | dict):
        return 1
    if id(value) not in sizes:
        sizes[id(value)] = most + 1  # of a list that contains itself
        parts = value.values() if isinstance(value, dict) else value
        sizes[id(value)] = 1 + sum(unfolded(part, sizes, most) for part in parts)
    return sizes[id(value)]
