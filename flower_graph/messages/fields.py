"""What the fields of messages may be: how each is written, read, checked and described.

A message (``flower_graph.messages.codec``) is a dataclass whose fields are ``Annotated`` with one
of these; ``says`` is what ``docs/messages.md`` says of the field. Letters in a shape are sizes: the
first field that has one sets it, and all others are held to it. What is missing, of another type,
or does not fit raises ``MalformedReplyError``, naming the key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.text import one_line

Entries = Mapping[str, Any]
RUN_BYTES = 16  # the nonce that tells one run from another
ABSENT: Any = object()  # what reading gives for an optional field that did not come


@dataclass
class Reading:
    """What a message is read from, and what is known of it so far."""

    config: Entries
    metrics: Entries  # where a reply's numbers are; elsewhere the same as ``config``
    # All arrays in the order of the fields, as a NumPyClient gets them; or a reply, which has them
    # by name
    arrays: list[NDArray[Any]] | RecordDict
    known: Entries = field(default_factory=dict)  # what was asked for, by names of fields
    values: dict[str, Any] = field(default_factory=dict)  # what has been read
    sizes: dict[str, int] = field(default_factory=dict)  # by their letters
    owners: dict[str, str] = field(default_factory=dict)  # which field has set a size

    def shape(self, shape: str) -> tuple[int, ...]:
        """Give a declared shape in numbers; -1 for what is not known yet."""
        return tuple(int(s) if s.isdecimal() else self.sizes.get(s, -1) for s in shape.split())

    def bind(self, name: str, shape: str, found: tuple[int, ...]) -> None:
        """Learn sizes from what came."""
        for letter, size in zip(shape.split(), found, strict=True):
            if not letter.isdecimal() and letter not in self.sizes:
                self.sizes[letter], self.owners[letter] = size, name

    def fit(self, name: str, shape: str, count: int) -> tuple[int, ...] | None:
        """Give the shape that so many items have, at most one size of it unknown; or None."""
        known = self.shape(shape)
        unit = math.prod(size for size in known if size != -1)
        is_open = -1 in known
        if count % unit if is_open and unit else count != (0 if is_open else unit):
            return None
        result = tuple(count // (unit or 1) if size == -1 else size for size in known)
        self.bind(name, shape, result)
        return result

    def part(self) -> Reading:
        """Read entries that belong together by themselves: their sizes are their own."""
        return replace(self, values={}, sizes={}, owners={}, known={})

    def is_true(self, name: str) -> bool:
        """Whether a field that another depends on is true."""
        return bool(self.values.get(name, self.known.get(name)))


@dataclass
class Writing:
    """What a message becomes: entries, and arrays by ``record/key``."""

    config: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    records: dict[str, ArrayRecord] = field(default_factory=dict)  # that are there without arrays
    message: Any = None  # all of it, for fields that depend on others


@dataclass(frozen=True)
class Field:
    """An entry of a config or metric record; the base of all kinds."""

    key: str
    says: str = ""
    _: KW_ONLY
    optional: bool = False  # left out if empty; read as the dataclass's default if missing
    group: str = ""  # the heading on the page under which it is described for all methods
    turn: ClassVar[int] = 0  # fields are read by turns: entries, arrays, and what needs both
    is_number: ClassVar[bool] = False  # Flower's adaptor puts it among the metrics
    type: ClassVar[str] = ""

    @property
    def described(self) -> str:
        """The type, as the page says it."""
        return self.type

    def write(self, value: Any, to: Writing) -> None:
        """Write a field's value."""
        if not (self.optional and is_empty(value)):
            to.config[self.key] = self.encode(value)

    def read(self, name: str, reading: Reading) -> Any:
        """Read and check a field's value."""
        value = (reading.metrics if self.is_number else reading.config).get(self.key)
        if value is None and self.optional:
            return ABSENT
        return self.decode(value, name, reading)

    def encode(self, value: Any) -> Any:
        """Turn the value into an entry."""
        return value

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Turn an entry into the value."""
        raise NotImplementedError

    def refuse(self, wanted: str, value: object) -> MalformedReplyError:
        """Give the error that an entry is not what it should be."""
        return MalformedReplyError(f"{self.key}: expected {wanted}, got {value!r:.60}")


def is_empty(value: Any) -> bool:
    """Whether a value says nothing, so that its entry may be left out."""
    # Flower cannot count the bytes of a record that has an empty entry.
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


@dataclass(frozen=True)
class Whole(Field):
    """A whole number; what was asked for, where the reader knows it."""

    least: int | None = None
    most: int | None = None
    is_number = True
    type = "int"

    def decode(self, value: Any, name: str, reading: Reading) -> int:
        """Refuse all but whole numbers in the range."""
        if name in reading.known and value != reading.known[name]:
            raise MalformedReplyError(f"{self.key} {value!s:.60}, expected {reading.known[name]}")
        least = -math.inf if self.least is None else self.least
        most = math.inf if self.most is None else self.most
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            words = {None: "an integer", 0: "a count", 1: "a positive number"}
            raise self.refuse(words.get(self.least, f"an integer from {self.least}"), value)
        return value


@dataclass(frozen=True)
class Real(Field):
    """A number."""

    is_number = True
    type = "float"

    def decode(self, value: Any, name: str, reading: Reading) -> float:
        """Refuse all but numbers."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.refuse("a number", value)
        return float(value)


@dataclass(frozen=True)
class Flag(Field):
    """Yes or no."""

    type = "bool"

    def decode(self, value: Any, name: str, reading: Reading) -> bool:
        """Refuse all but yes and no."""
        if not isinstance(value, bool):
            raise self.refuse("yes or no", value)
        return value


@dataclass(frozen=True)
class Word(Field):
    """Text; an empty word is left out."""

    type = "str"

    def write(self, value: Any, to: Writing) -> None:
        """Write the word, if there is any."""
        if value:
            to.config[self.key] = value

    def decode(self, value: Any, name: str, reading: Reading) -> str:
        """Refuse all but text; what is missing is empty."""
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.refuse("text", value)
        return value


@dataclass(frozen=True)
class Raw(Field):
    """So many bytes."""

    size: int = RUN_BYTES
    type = "bytes (uint8)"

    @property
    def described(self) -> str:
        """The type and the size."""
        return f"{self.type} `[{self.size}]`"

    def decode(self, value: Any, name: str, reading: Reading) -> bytes:
        """Refuse all but bytes of that size."""
        if not isinstance(value, bytes) or len(value) != self.size:
            raise self.refuse(f"{self.size} bytes", value)
        return value


@dataclass(frozen=True)
class Shaped(Field):
    """What has a shape."""

    shape: str = "n"
    # Sizes that the reader could not know otherwise, by their letters: entries of their own
    sent: tuple[tuple[str, Whole], ...] = ()

    def write(self, value: Any, to: Writing) -> None:
        """Write a field's value, and the sizes that are sent with it."""
        for letter, size in self.sent:
            size.write(value.shape[self.shape.split().index(letter)], to)
        super().write(value, to)

    def read(self, name: str, reading: Reading) -> Any:
        """Read the sizes that are sent first."""
        for letter, size in self.sent:
            reading.sizes[letter] = size.read(letter, reading)
        return super().read(name, reading)

    @property
    def described(self) -> str:
        """The type and the shape."""
        return f"{self.type} `[{', '.join(self.shape.split())}]`"


@dataclass(frozen=True)
class Numbers(Shaped):
    """A list of numbers, one for each client."""

    whole: bool = False
    is_number = True

    @property
    def described(self) -> str:
        """The type alone; the text says whose they are."""
        return f"list of {'int' if self.whole else 'float'}"

    def decode(self, value: Any, name: str, reading: Reading) -> list[Any]:
        """Refuse all but a list of so many numbers."""
        kinds = (int,) if self.whole else (int, float)
        good = isinstance(value, list) and all(type(number) in kinds for number in value)
        if not good or reading.fit(name, self.shape, len(value)) is None:
            (count,) = reading.shape(self.shape)
            words = f"{count} numbers" if count != -1 else "numbers"
            raise self.refuse(f"whole {words}" if self.whole else words, value)
        return list(value) if self.whole else [float(number) for number in value]


@dataclass(frozen=True)
class Lines(Field):
    """A list of words; left out if there is none."""

    type = "list of str"

    def write(self, value: Any, to: Writing) -> None:
        """Write the list, if there is any."""
        if value:
            to.config[self.key] = list(value)

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Read one word as a list of one; a peer's words are cut to a line."""
        lines = [] if value is None else value if isinstance(value, list) else [value]
        return [one_line(str(line)) for line in lines]


@dataclass(frozen=True)
class Reasons(Lines):
    """Why which client has no part in it, as ``number:reason``; left out if all have."""

    def write(self, value: Any, to: Writing) -> None:
        """Write a line for each client."""
        super().write([f"{client}:{why}" for client, why in value.items()], to)

    def decode(self, value: Any, name: str, reading: Reading) -> Any:
        """Refuse lines that name no client."""
        reasons: dict[int, str] = {}
        for line in [] if value is None else value if isinstance(value, list) else [value]:
            number, colon, why = str(line).partition(":")
            if not colon or not number.removeprefix("-").isdecimal():
                raise self.refuse("number:reason", line)
            reasons[int(number)] = why
        return reasons
