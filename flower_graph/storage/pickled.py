"""Reads files of ``torch.save`` without running code and within their own size.

``torch.load`` with ``weights_only`` runs nothing, but believes the file: if a tensor claims more
numbers than the file has, it reads past the end, or fills the memory. So its pickle is checked
first, with stand-ins for everything that it names.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NoReturn

import torch

from flower_graph.storage.archives import open_archive
from flower_graph.storage.reading import MIB, MOST_TENSORS, open_regular

__all__ = ["UnpicklingError", "load_saved"]

MOST_REPEATED = 16 * MIB  # bytes of a tensor that repeats a few numbers
MOST_SHARED = 10_000  # how often lists may be referred to again
MOST_NESTED = 20  # of these, lists of lists: each reference can double the unfolded size
ZIPPED, MAGIC = b"PK\3\4", 0x1950A86A20F9469CFC6C
# of torch's own reader of weights
_OPS = (
    *(pickle.GLOBAL, pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD, pickle.APPEND, pickle.APPENDS),
    *(pickle.SETITEM, pickle.SETITEMS, pickle.MARK, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2),
    *(pickle.TUPLE3, pickle.NONE, pickle.NEWFALSE, pickle.NEWTRUE, pickle.EMPTY_TUPLE),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.BININT, pickle.BININT1),
    *(pickle.BININT2, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINSTRING),
    *(pickle.BINPERSID, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT, pickle.LONG_BINPUT),
    *(pickle.LONG1, pickle.PROTO, pickle.STOP),
)
# Functions that allocate no more than they are given; files need no others
_TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_TABLES = ("collections.OrderedDict", "collections.Counter")
_HARMLESS = {
    *(f"torch._utils.{name}" for name in (*_TENSORS, "_rebuild_parameter")),
    *("torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_parameter_with_state"),
    *("torch.serialization._get_layout", "torch.device", "torch.Size", *_TABLES),
    *("builtins.set", "builtins.complex", "__builtin__.set", "__builtin__.complex"),
}
# Bytes of a number, by what a storage of them is called
_WIDTHS = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "ComplexDouble": 16} | {
    **{"Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1},
    **{"ComplexFloat": 8, "Untyped": 1},
}
_BYTES, _OF_A_KIND = "_codecs.encode", "torch._tensor._rebuild_from_type_v2"
_PLAIN = (str, int, float, bool, bytes, type(None))
_SEVERAL = (list, tuple, dict, set)


# Any: the reader checks what was saved
def load_saved(source: Path | bytes) -> Any:
    """Load the content of a file or bytes of ``torch.save``, on the processor.

    Raises
    ------
    OSError, ValueError
        If it is no regular file, claims more than it holds, or names code to run. A damaged file
        can raise nearly anything.
    UnpicklingError
        If it has objects of classes that are not allowed.
    """
    if isinstance(source, bytes):
        _check(io.BytesIO(source), len(source))
        return torch.load(io.BytesIO(source), map_location="cpu", weights_only=True)
    with open_regular(source, MOST_TENSORS) as stream:
        _check(stream, stream.seek(0, io.SEEK_END))
    return torch.load(source, map_location="cpu", weights_only=True)


def _check(stream: BinaryIO, size: int) -> None:
    stream.seek(0)
    is_zipped = stream.read(len(ZIPPED)) == ZIPPED
    stream.seek(0)
    if not is_zipped:
        _check_old(stream, size)
        return
    with open_archive(stream, packed=False) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
        folder = next(iter(sizes), "").partition("/")[0]
        claims = _Claims(io.BytesIO(archive.read(f"{folder}/data.pkl"))).sizes()
        for key, claimed in claims.items():
            there = sizes.get(f"{folder}/data/{key}", 0)
            if claimed > there:
                raise ValueError(f"a tensor claims {claimed:,} bytes, {there:,} are there")


def _check_old(stream: BinaryIO, size: int) -> None:
    """Check a file of PyTorch before version 1.6: pickles, followed by numbers."""
    if _Claims(stream).load() != MAGIC:
        raise ValueError("it is not what torch.save writes")
    for _ in ("protocol", "system"):
        _Claims(stream).load()
    if (claimed := sum(_Claims(stream).sizes().values())) > size:
        raise ValueError(f"its tensors claim {claimed:,} bytes, the file has {size:,}")


class _Named:
    """Stand-in for whatever a pickle names, calls or makes."""

    def __init__(self, name: str = "", size: int = 0, width: int = 1) -> None:
        self.name, self.size, self.width = name, size, width  # bytes of a storage, and of a number


_Base: Any = pickle._Unpickler  # of Python: it allocates nothing by itself


class _Claims(_Base):  # type: ignore[misc]
    """Unpickler that makes only lists, tuples, dicts and stand-ins."""

    def __init__(self, file: object) -> None:
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, int] = {}
        self.shared = self.nested = 0

    def sizes(self) -> dict[str, int]:
        self.load()
        return self.storages

    def load(self) -> object:
        """Load a pickle; ``ValueError`` if it has operations that weights do not need."""
        try:
            return super().load()
        except KeyError as error:
            raise ValueError(f"its pickle has {error}, which is not read") from error

    def find_class(self, module: str, name: str) -> object:
        return _Named(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> object:
        kind, of, key, _, count = pid[:5]
        if kind != "storage" or type(count) is not int or count < 0:
            raise ValueError("it refers to something that is no storage")
        width = _WIDTHS[of.name.rpartition(".")[2].removesuffix("Storage")]
        self.storages[str(key)] = max(count * width, self.storages.get(str(key), 0))
        return _Named("storage", count * width, width)

    def reduce(self) -> None:
        args = self.stack.pop()
        _check_call(self.stack[-1], args)
        self.stack[-1] = {} if self.stack[-1].name in _TABLES else _Named("made")

    def new(self) -> None:
        """Replace a new object by a stand-in, if its class gets no arguments."""
        args, made = self.stack.pop(), self.stack.pop()
        if args != () or not isinstance(made, _Named):
            _refuse(made)
        self.append(_Named("made"))

    def build(self) -> None:
        self.stack.pop()

    def get(self) -> None:
        """Return an earlier value; limit how often lists of lists are repeated."""
        self._take(self.read(1)[0])

    def long_get(self) -> None:
        self._take(int.from_bytes(self.read(4), "little"))

    def _take(self, place: int) -> None:
        value = self.memo[place]
        if type(value) in _SEVERAL:
            self.shared += 1 + len(value) // MOST_SHARED
            self.nested += any(type(one) in _SEVERAL for one in value)
            if self.shared > MOST_SHARED or self.nested > MOST_NESTED:
                raise ValueError("its lists contain each other")
        self.append(value)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_key(key)] = value

    def set_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))

    dispatch = {op[0]: _Base.dispatch[op[0]] for op in _OPS} | {
        pickle.REDUCE[0]: reduce,
        pickle.NEWOBJ[0]: new,
        pickle.BUILD[0]: build,
        pickle.BINGET[0]: get,
        pickle.LONG_BINGET[0]: long_get,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }


def _key(key: object) -> object:
    """Refuse a dict's key that takes long to compare."""
    parts = key if type(key) is tuple else (key,)
    if any(type(one) not in _PLAIN for one in parts):
        raise ValueError("a table has keys that are no words or numbers")
    return key


def _check_call(function: object, args: Any) -> None:
    """Refuse functions that allocate more than they are given, and tensors beyond their storage."""
    name = getattr(function, "name", "")
    if name == _OF_A_KIND:
        return _check_call(args[0], args[2])
    if name not in _HARMLESS and not (name == _BYTES and args[1:] == ("latin1",)):
        _refuse(function)
    if name.rpartition(".")[2] not in _TENSORS:
        return None
    storage, size = args[0], args[2]
    most = max(storage.size, MOST_REPEATED)
    if min(size, default=0) < 0 or math.prod(size) * storage.width > most:
        raise ValueError(f"a tensor of size {size!s:.60} repeats {storage.size:,} bytes")
    return None


def _refuse(what: object) -> NoReturn:
    raise ValueError(f"GLOBAL {getattr(what, 'name', type(what).__name__)} is not read")
