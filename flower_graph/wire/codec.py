"""The codec: a message is a dataclass whose fields declare the wire format.

    class MaskRequest(Message, down="train.sum_mask", prefix="mask-"):
        clients: Annotated[Integers, Clients(shape="p")]  # who may contribute
        round_keys: Annotated[Bytes, Block(shape="f 32")]  # public keys

A field's key is the message's prefix, which ``*`` stands for, and the field's name, unless it names
another. A field with a default may be missing. Letters in a shape are sizes: the first field with a
letter sets its size, and all others must have the same. The comment describes the field in
``docs/reference/messages.md``. An entry that is missing, of another type, or does not fit raises
``MalformedReplyError``, which names its key.

``to_record`` and ``from_numpy`` carry a request from the server to a ``NumPyClient``, ``to_numpy``
and ``read`` carry its answer back; ``to_config`` and ``from_config`` are for entries that travel
with other messages', and for the result of ``get_properties``.
"""

import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar, dataclass_transform

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief, one_line
from flower_graph.wire import keys
from flower_graph.wire.arrays import (
    Answer,
    IntArray,
    Parameters,
    each_once,
    encode_array,
    pack_integers,
    read_array,
    record_of,
    unpack_integers,
)

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]
Entries = Mapping[str, object]
Known = Mapping[str, Any]  # what the reader asked for, by names of fields: of any type
ABSENT: object = object()  # the value of an optional field that is missing
MAX_LINES = 1 << 14  # of one reply: as many as there can be clients in one sum
RUN_BYTES = 16  # the nonce that tells one run from another
T = TypeVar("T")  # what a field is in the dataclass
N = TypeVar("N", bound=np.generic)


@dataclass
class Reading:
    """The entries and arrays of a message that is read, and the values and sizes read so far."""

    config: Entries
    # All arrays in the order of the fields, as a NumPyClient gets them; or a reply, by name
    arrays: Parameters | RecordDict = field(default_factory=list)
    known: Known = field(default_factory=dict)  # what was asked for, by names of fields
    values: dict[str, Any] = field(default_factory=dict)  # what has been read
    sizes: dict[str, int] = field(default_factory=dict)  # by their letters

    def shape(self, shape: str) -> tuple[int, ...]:
        """Return a declared shape in numbers; -1 for sizes that are not known yet."""
        return tuple(int(a) if a.isdecimal() else self.sizes.get(a, -1) for a in shape.split())

    def binds(self, shape: str, found: tuple[int, ...]) -> bool:
        """Whether sizes fit a declared shape; a letter's first size is its size."""
        axes = shape.split()
        return len(found) == len(axes) and all(
            size == (int(axis) if axis.isdecimal() else self.sizes.setdefault(axis, size))
            for axis, size in zip(axes, found, strict=True)
        )


def entries_of(content: RecordDict) -> dict[str, object]:
    """Return a reply's entries: the adaptor puts numbers and other values into two records."""
    numbers = record_of(content, keys.METRICS, MetricRecord) or MetricRecord()
    return {**numbers, **(record_of(content, keys.CONFIG, ConfigRecord) or ConfigRecord())}


@dataclass
class Writing:
    """The entries of a message that is written, and its arrays by ``record/key``."""

    config: dict[str, Any] = field(default_factory=dict)  # a Config, and lists
    arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    message: Any = None  # the whole message, for fields that depend on others


# Fields -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Field(Generic[T]):
    """An entry of a config or metric record; the base of all kinds."""

    key: str = "*"
    says: str = ""  # for the page: of a field that several messages have
    _: KW_ONLY
    shape: str = ""
    optional: bool = False  # has a default: may be missing
    group: str = ""  # the heading on the page under which it is described for all methods
    turn: ClassVar[int] = 0  # read in this order: entries, arrays, those that need both
    is_number: ClassVar[bool] = False  # Flower's adaptor puts it among the metrics
    # Stands for a missing entry: Flower cannot count the bytes of an empty one, so none is sent
    empty: ClassVar[object] = None
    type: ClassVar[str] = ""

    def write(self, value: T, to: Writing) -> None:
        """Write a field's value, unless its entry would be empty."""
        entry = None if value is None else self.encode(value)
        if entry is not None and not (hasattr(entry, "__len__") and len(entry) == 0):
            to.config[self.key] = entry

    # Any: a T, or ABSENT
    def read(self, name: str, reading: Reading) -> Any:
        """Read and check a field's value; ``ABSENT`` if it is optional and missing."""
        entry = reading.config.get(self.key)
        if entry is None and self.optional:
            return ABSENT
        return self.decode(self.empty if entry is None else entry, name, reading)

    def encode(self, value: T) -> object:
        return value

    def decode(self, value: object, name: str, reading: Reading) -> T:
        raise NotImplementedError

    def refuse(self, wanted: object, value: object) -> MalformedReplyError:
        """Return the error for an entry that does not fit its declaration."""
        return MalformedReplyError(f"{self.key}: expected {wanted}, got {brief(value)}")


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


class RunToken(Word):
    """A run's token, which names folders of its clients, and must not lead out of theirs."""

    def decode(self, value: object, name: str, reading: Reading) -> str:
        if not re.fullmatch(r"[0-9a-f]{32}", token := super().decode(value, name, reading)):
            raise self.refuse("32 hexadecimal digits", token)
        return token


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
    is_number = True
    empty: ClassVar[object] = []

    # Any: as above
    def decode(self, value: object, name: str, reading: Reading) -> list[Any]:
        kinds, wanted = ({int} if self.whole else {int, float}), reading.shape(self.shape)
        if (
            not isinstance(value, list)
            or not kinds.issuperset(map(type, value))
            or not reading.binds(self.shape, (len(value),))
        ):
            raise self.refuse(f"{'whole ' * self.whole}numbers {wanted}", value)
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
        numbers, wanted = self.unpack(value), reading.shape(self.shape)
        try:
            numbers = numbers.reshape(wanted)
        except ValueError as error:
            raise self.refuse(wanted, f"{numbers.size} numbers") from error
        if not reading.binds(self.shape, numbers.shape):
            raise self.refuse(wanted, numbers.shape)
        return numbers

    def unpack(self, value: object) -> NDArray[Any]:
        if not isinstance(value, bytes):
            raise self.refuse("bytes", value)
        return np.frombuffer(value, np.uint8)


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
    """Numbers of clients, from 0 on: at least one, unless there may be none, and none twice."""

    may_be_none: bool = False

    def unpack(self, value: object) -> NDArray[Any]:
        clients = super().unpack(value)
        is_some = clients.size or self.may_be_none
        if not is_some or (clients < 0).any() or not each_once(clients):
            raise self.refuse("clients from 0 on, none twice", value)
        return clients


def split_rows(values: NDArray[N], sizes: Sequence[int] | IntArray) -> list[NDArray[N]]:
    """Split concatenated rows into parts."""
    return list(np.split(values, np.cumsum(sizes)))[:-1]


@dataclass(frozen=True)
class Tensor(Field[NDArray[np.generic] | None]):
    """An array, under ``record/key``; not written if it is None."""

    shape: str = "n"
    dtype: str = "float32"  # the type that is sent, for the page; any numbers are accepted
    limit: float | None = keys.MAX_NUMBER  # largest absolute value that the server accepts
    per: str = ""  # the letter of a size that multiplies the limit
    when: str = ""  # the field, or the value asked for, that says whether the array is sent
    turn = 1

    def write(self, value: NDArray[np.generic] | None, to: Writing) -> None:
        if value is not None:
            to.arrays[self.key] = value

    def read(self, name: str, reading: Reading) -> object:
        if self.when and not reading.values.get(self.when, reading.known.get(self.when)):
            return ABSENT
        limit, shape = self.limit, reading.shape(self.shape)
        if isinstance(reading.arrays, RecordDict):
            record, _, key = self.key.partition("/")
            if limit is not None and self.per:
                limit *= max(1, reading.sizes[self.per])
            return read_array(reading.arrays, record, key, shape, limit=limit)
        if not reading.arrays:
            raise MalformedReplyError(f"the array {self.key} is missing")
        value = reading.arrays.pop(0)
        if not reading.binds(self.shape, value.shape):
            raise MalformedReplyError(f"{self.key} has shape {value.shape}, expected {shape}")
        return value


@dataclass(frozen=True)
class Part(Field[object]):
    """The entries of another class with declared fields."""

    key: str = ""  # the title of the group on the page, if it has one
    make: Any = dict  # the class
    fields: Mapping[str, Field[Any]] | None = None  # of a class that declares none
    when: str = ""  # the entry that says whether the group is sent
    turn = 1

    @property
    def parts(self) -> Mapping[str, Field[Any]]:
        return fields_of(self.make) if self.fields is None else self.fields

    def write(self, value: object, to: Writing) -> None:
        if value is not None:
            write_fields(self.parts, value, to)

    def read(self, name: str, reading: Reading) -> object:
        if self.when and not reading.config.get(self.when):
            return ABSENT
        return self.make(**read_fields(self.parts, Reading(reading.config, reading.arrays)))


# Messages -----------------------------------------------------------------------------------------


# Any, here and below: a class, and fields of any type
@cache
def fields_of(cls: Any) -> Mapping[str, Field[Any]]:
    """Return the declared fields of a class, in the order in which they are read."""
    found, prefix = {}, getattr(cls, "prefix", "")
    required = set(getattr(cls, "_fields", ())) - getattr(cls, "_field_defaults", {}).keys()
    if is_dataclass(cls):  # otherwise a NamedTuple
        required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        declared = getattr(hint, "__metadata__", ())  # of what is Annotated
        for one in (one for one in declared if isinstance(one, Field)):
            key = f"*{name.replace('_', '-')}" if one.key == "*" else one.key
            key = prefix + key[1:] if key.startswith("*") else key
            if not isinstance(one, Part):
                one = replace(one, key=key, optional=one.optional or name not in required)
            found[name] = one
    return dict(sorted(found.items(), key=lambda item: item[1].turn))


def write_fields(parts: Mapping[str, Field[Any]], value: object, to: Writing) -> Writing:
    """Write all declared fields of a value."""
    for name, one in parts.items():
        one.write(getattr(value, name), to)
    return to


def read_fields(parts: Mapping[str, Field[Any]], reading: Reading) -> dict[str, Any]:
    """Read all declared fields; optional ones that are missing are left out."""
    for name, one in parts.items():
        if (value := one.read(name, reading)) is not ABSENT:
            reading.values[name] = value
    return reading.values


@dataclass_transform(field_specifiers=(field,))
class Message:
    """A message in one direction; its subclasses become dataclasses."""

    down: ClassVar[tuple[str, ...]] = ()  # the types of the Flower messages that carry it
    up: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, object]] = {}  # entries that are always the same
    prefix: ClassVar[str] = ""

    def __init_subclass__(
        cls,
        *,
        down: str = "",
        up: str = "",
        fixed: Mapping[str, object] | None = None,
        prefix: str = "",
        **options: bool,
    ) -> None:
        """Register the types, with blanks between, of the Flower messages that carry it."""
        super().__init_subclass__()
        dataclass(**options)(cls)
        cls.prefix = prefix or cls.prefix
        cls.down, cls.up, cls.fixed = tuple(down.split()), tuple(up.split()), fixed or {}

    def check(self, known: Known) -> None:
        """Check what concerns this message alone; ``known`` has the values asked for."""

    # Any: a Config, and lists
    def to_config(self) -> dict[str, Any]:
        return self._written().config

    def to_record(self) -> RecordDict:
        written = self._written()
        arrays: dict[str, dict[str, Array]] = {}
        for name, values in written.arrays.items():
            record, _, key = name.partition("/")
            arrays.setdefault(record, {})[key] = encode_array(key, values)
        records = {record: ArrayRecord(named) for record, named in arrays.items()}
        return RecordDict({keys.CONFIG: ConfigRecord(written.config), **records})

    def to_numpy(self, examples: int = 1) -> Answer:
        """Return the message as the result of a ``NumPyClient``'s method."""
        written = self._written()
        names = [name.removeprefix(f"{keys.ARRAYS}/") for name in written.arrays]
        metrics = written.config | ({keys.ARRAY_NAMES: names} if names else {})
        return list(written.arrays.values()), examples, metrics

    @classmethod
    def from_config(cls, config: Entries, **known: object) -> Self:
        return cls._read(Reading(config, [], known))

    @classmethod
    def from_numpy(cls, parameters: Parameters, config: Entries, **known: object) -> Self:
        return cls._read(Reading(config, list(parameters), known))

    @classmethod
    def read(cls, content: RecordDict, **known: object) -> Self:
        """Read and check a reply; ``known`` are sizes by their letters and values by names."""
        return cls._read(Reading(entries_of(content), content, known))

    @classmethod
    def _read(cls, reading: Reading) -> Self:
        known, every = reading.known, {f.name for f in fields(cls)}  # type: ignore[arg-type]
        parts = fields_of(cls)  # type: ignore[arg-type]
        reading.sizes.update({k: v for k, v in known.items() if len(k) == 1})
        others = {k: v for k, v in known.items() if k in every - parts.keys()}
        message = cls(**read_fields(parts, reading), **others)
        message.check(known)
        return message

    def _written(self) -> Writing:
        parts = fields_of(type(self))  # type: ignore[arg-type]
        return write_fields(parts, self, Writing(dict(self.fixed), message=self))


# Resuming: the run and the checkpoint that a client is told, and its reply about its own state ----

GROUP = "checkpoints"  # of the page
Saves = Annotated[bool, Flag(keys.CHECKPOINT, "whether to save after this message", group=GROUP)]
Token = Annotated[
    str, RunToken(keys.RUN_TOKEN, "of the run that the checkpoint is of", group=GROUP)
]
HANDLED = Whole(keys.HANDLED, "messages of the run so far", least=0, group=GROUP)
Handled = Annotated[int | None, HANDLED]
NOT_WRITTEN = Said(keys.NOT_SAVED, "why the checkpoint was not written", group=GROUP)
NotSaved = Annotated[str, NOT_WRITTEN]


class SaveRequest(Message):
    """The round and the run of a checkpoint that a client is to save."""

    server_round: Annotated[int, Whole(keys.SERVER_ROUND)]
    run: Token


class Resume(Message, down="query", frozen=True):
    """The run and the checkpoint that a client goes on from."""

    run: Annotated[str, RunToken(keys.RUN_TOKEN)] = ""  # of the run: 32 hexadecimal digits
    # whose checkpoint to load; 0 in a new run
    server_round: Annotated[int, Whole("resume-round")] = 0
    # If a SuperNode is asked again later, under another id, it has gone on since
    attempt: Annotated[str, Word("resume-attempt")] = ""  # loads once an attempt and round


# Any: entries of records may be lists, too
def as_record(*parts: Message | RecordDict | Mapping[str, Any]) -> RecordDict:
    """Write messages, whether written already or not, and further entries as one message."""
    content, entries = RecordDict(), dict[str, Any]()
    for part in parts:
        one = part.to_record() if isinstance(part, Message) else part
        content.update(one if isinstance(one, RecordDict) else {})
        entries.update(content.pop(keys.CONFIG) if isinstance(one, RecordDict) else one)
    content[keys.CONFIG] = ConfigRecord(entries)
    return content


def read_entry(kind: Field[T], content: RecordDict) -> T:
    """Read one entry of a reply, whatever else it says."""
    result: T = kind.read("", Reading(entries_of(content)))
    return result
