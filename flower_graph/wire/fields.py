"""The kinds of fields that messages have, and fields common to several methods.

An entry that is missing, of another type, or does not fit raises ``MalformedReplyError``, which
names its key. Numbers that must arrive unchanged are sent as bytes, because mods may add noise to
arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief, one_line
from flower_graph.wire.arrays import IntArray, each_once, pack_integers, unpack_integers
from flower_graph.wire.codec import Entries, Field, Message, Reading, Writing, entries_of
from flower_graph.wire.keys import CHECKPOINT, HANDLED, NOT_SAVED, RUN_TOKEN

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
N = TypeVar("N", bound=np.generic)
T = TypeVar("T")
MAX_LINES = 1 << 14  # of one reply: as many as there can be clients in one sum
RUN_BYTES = 16  # the nonce that tells one run from another


@dataclass(frozen=True)
class Scalar(Field[T]):
    """A value of one type; the requested one, if the reader knows it."""

    kinds: ClassVar[tuple[type, ...]]  # that are read, as the last of them
    least: float = -math.inf
    most: float = math.inf

    def decode(self, value: Any, name: str, reading: Reading) -> T:
        if name in reading.known and value != reading.known[name]:
            raise self.refuse(reading.known[name], value)
        if type(value) not in self.kinds:
            raise self.refuse(self.type, value)
        if self.is_number and (value < self.least or value > self.most):
            raise self.refuse(f"a number from {self.least} to {self.most}", value)
        result: T = self.kinds[-1](value)
        return result


class Whole(Scalar[int]):
    """A whole number."""

    kinds, type, is_number = (int,), "int", True


class Real(Scalar[float]):
    """A number."""

    kinds, type, is_number = (int, float), "float", True


class Flag(Scalar[bool]):
    """Yes or no."""

    kinds, type = (bool,), "bool"


class Word(Scalar[str]):
    """Text."""

    empty, kinds, type = "", (str,), "str"


class Said(Word):
    """A peer's own words, cut to a line that a log can have."""

    def decode(self, value: object, name: str, reading: Reading) -> str:
        return one_line(value)


class Raw(Scalar[bytes]):
    """The nonce of a run."""

    kinds, type = (bytes,), f"bytes (uint8) `[{RUN_BYTES}]`"

    def decode(self, value: object, name: str, reading: Reading) -> bytes:
        if len(nonce := super().decode(value, name, reading)) != RUN_BYTES:
            raise self.refuse(self.type, value)
        return nonce


class Reasons(Field[dict[int, str]]):
    """Which clients are left out and why, as ``number:reason``; no entry if none is."""

    empty: ClassVar[object] = []
    type = "list of str"

    def encode(self, value: dict[int, str]) -> list[str]:
        return [f"{client}:{why}" for client, why in value.items()]

    def decode(self, value: object, name: str, reading: Reading) -> dict[int, str]:
        lines = value if isinstance(value, list) else [value]
        if len(lines) > MAX_LINES:
            raise self.refuse(f"at most {MAX_LINES}", f"{len(lines)} reasons")
        result = dict[int, str]()
        for line in map(one_line, lines):
            number, colon, why = line.partition(":")
            if not colon or not number.removeprefix("-").isdecimal():
                raise self.refuse("number:reason", line)
            result[int(number)] = why
        return result


@dataclass(frozen=True)
class Numbers(Field[Any]):  # left open: integers where they are whole, else floats
    """A list of numbers, one for each client."""

    shape: str = "c"
    whole: bool = False
    most: float = math.inf  # numbers
    is_number = True
    empty: ClassVar[object] = []

    # Any: as above
    def decode(self, value: object, name: str, reading: Reading) -> list[Any]:
        kinds, wanted = ({int} if self.whole else {int, float}), reading.words(self.shape)
        if (
            not isinstance(value, list)
            or len(value) > self.most
            or not kinds.issuperset(map(type, value))
            or not reading.binds(self.shape, (len(value),))
        ):
            most = f", at most {self.most}" if self.most < math.inf else ""
            raise self.refuse(f"{'whole ' * self.whole}numbers {wanted}{most}", value)
        return list(value) if self.whole else [float(number) for number in value]


@dataclass(frozen=True)
class Block(Field[NDArray[Any]]):
    """Numbers of a shape that must arrive unchanged: bytes, as mods may add noise to arrays."""

    shape: str = "n"
    empty = b""
    type = "bytes (uint8)"

    def encode(self, value: NDArray[Any]) -> bytes:
        return value.tobytes()

    def decode(self, value: object, name: str, reading: Reading) -> NDArray[Any]:
        numbers = self.unpack(value)
        wanted, found = reading.words(self.shape), f"{numbers.size} numbers"
        try:
            numbers = numbers.reshape(reading.shape(self.shape))
        except ValueError as error:
            raise self.refuse(wanted, found) from error
        if not reading.binds(self.shape, numbers.shape):
            raise self.refuse(wanted, found)
        return numbers

    def unpack(self, value: object) -> NDArray[Any]:
        if not isinstance(value, bytes):
            raise self.refuse("bytes", value)
        return np.frombuffer(value, np.uint8)


class Flags(Block):
    """Yes or no for each of a shape."""

    type = "bytes (bool)"

    def unpack(self, value: object) -> NDArray[Any]:
        flags = super().unpack(value)
        if (flags > 1).any():
            raise self.refuse("bytes 0 and 1", flags.max())
        return flags > 0


class Exact(Block):
    """Whole numbers; the requested ones, if the reader knows them."""

    type = "bytes (int64)"

    def encode(self, value: IntArray) -> bytes:
        return pack_integers(value)

    def decode(self, value: object, name: str, reading: Reading) -> NDArray[Any]:
        numbers, wanted = super().decode(value, name, reading), reading.known.get(name)
        if wanted is not None and not np.array_equal(numbers, wanted):
            raise self.refuse(f"{wanted[:5]}...", numbers[:5].tolist())
        return numbers

    def unpack(self, value: object) -> NDArray[Any]:
        return unpack_integers(value, self.key)


@dataclass(frozen=True)
class Clients(Exact):
    """Numbers of clients: at least one, unless there may be none, and none twice."""

    may_be_none: bool = False

    def unpack(self, value: object) -> NDArray[Any]:
        clients = super().unpack(value)
        if clients.size == 0 and not self.may_be_none:
            raise MalformedReplyError(f"{self.key}: there is no client")
        if not each_once(clients):
            raise MalformedReplyError(f"{self.key}: a client is there twice: {brief(value)}")
        return clients


@dataclass(frozen=True)
class Ragged(Field[Sequence[IntArray]]):
    """Whole numbers of several clients, concatenated; split by how many each client has."""

    empty = b""
    type = "bytes (int64)"
    # The entry that has these counts; without one the reader knows them as ``sizes``
    pointer: Numbers | None = None

    def write(self, value: Sequence[IntArray], to: Writing) -> None:
        if self.pointer is not None:
            self.pointer.write([int(part.size) for part in value], to)
        super().write(value, to)

    def encode(self, value: Sequence[IntArray]) -> bytes:
        return pack_integers(np.concatenate(value))

    def decode(self, value: object, name: str, reading: Reading) -> Sequence[IntArray]:
        at = self.pointer
        sizes = reading.known["sizes"] if at is None else at.read(name, reading)
        numbers = unpack_integers(value, self.key)
        if numbers.size != sum(sizes) or min(sizes, default=0) < 0:
            raise self.refuse(f"parts of {brief(sizes)}", f"{numbers.size} numbers")
        return split_rows(numbers, sizes)


def split_rows(values: NDArray[N], sizes: Sequence[int] | IntArray) -> list[NDArray[N]]:
    """Split concatenated rows into parts."""
    return list(np.split(values, np.cumsum(sizes)))[:-1]


class Sizes(Exact):
    """How many of the ``n`` rows of another field each client has."""

    turn = 2

    def decode(self, value: object, name: str, reading: Reading) -> IntArray:
        sizes, clients = self.unpack(value), reading.shape(self.shape)[0]
        rows = reading.sizes["n"]
        is_split = (sizes >= 0).all() and (sizes <= rows).all() and sizes.sum() == rows
        if sizes.size != clients or not is_split:
            raise self.refuse(f"sizes of {clients} clients, {rows} in all", sizes[:60].tolist())
        return sizes


# Resuming: the run and the checkpoint that a client is told, and its reply about its own state
GROUP = "checkpoints"  # of the page
# Fields of requests and replies. A client that does not say how many messages it has behind it
# cannot be told from one that has lost its state
Saves = Annotated[bool, Flag(CHECKPOINT, "whether to save after this message", group=GROUP)]
Token = Annotated[str, Word(RUN_TOKEN, "of the run that the checkpoint is of", group=GROUP)]
HANDLED_FIELD = Whole(HANDLED, "messages of the run so far", least=0, group=GROUP)
Handled = Annotated[int | None, HANDLED_FIELD]
NOT_SAVED_FIELD = Said(NOT_SAVED, "why the checkpoint was not written", group=GROUP)
NotSaved = Annotated[str, NOT_SAVED_FIELD]


class Resume(Message, down="query", frozen=True):
    """The run and the checkpoint that a client goes on from."""

    run: Annotated[str, Word(RUN_TOKEN)] = ""  # of the run: 32 hexadecimal digits
    # whose checkpoint to load; 0 in a new run
    server_round: Annotated[int, Whole("resume-round")] = 0
    # If a SuperNode is asked again later, under another id, it has gone on since
    attempt: Annotated[str, Word("resume-attempt")] = ""  # loads once an attempt and round


def read_handled(config: Entries) -> int | None:
    """Read how many messages of this run a client has handled; None if it does not say."""
    return HANDLED_FIELD.read("handled", Reading(config, [])) if HANDLED in config else None


def read_entry(kind: Field[T], content: RecordDict) -> T:
    """Read one entry of a reply, whatever else it says."""
    result: T = kind.read("", Reading(entries_of(content), []))
    return result


def read_not_saved(content: RecordDict) -> str:
    """Read why a client could not write the requested checkpoint; empty if it could."""
    return read_entry(NOT_SAVED_FIELD, content)
