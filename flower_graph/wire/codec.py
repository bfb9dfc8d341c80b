"""The codec: a message is a dataclass whose fields say what is on the wire.

    @dataclass
    class MaskRequest(Message, down="train.sum_mask"):
        clients: Annotated[Integers, Clients("mask-clients", "who may contribute", shape="p")]
        round_keys: Annotated[Bytes, Block("mask-round-keys", "public keys", shape="f 32")]

``to_record`` and ``from_numpy`` carry a request from the server to a ``NumPyClient``, ``to_numpy``
(or ``to_config``, for what ``get_properties`` returns) and ``read`` its answer back; ``to_config``
and ``from_config``, entries that travel with those of others. What only one message can check is
its ``check``. Letters in a shape are sizes: the first field that has one sets it, all others are
held to it. ``says`` is what ``docs/reference/messages.md`` says of a field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.wire.arrays import encode_array, read_array
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, CONFIG, MAX_NUMBER, METRICS
from flower_graph.wire.numpy_client import Answer, Parameters

Entries = Mapping[str, object]
Known = Mapping[str, Any]  # what a reader asked for, by names of fields: of as many types
ABSENT: object = object()  # what reading gives for an optional field that did not come


@lru_cache
def axes(shape: str) -> tuple[int | str, ...]:
    """Give the axes of a declared shape: numbers, and letters of sizes."""
    return tuple(int(axis) if axis.isdecimal() else axis for axis in shape.split())


@dataclass
class Reading:
    """What a message is read from, and what is known of it so far."""

    config: Entries
    metrics: Entries  # where a reply's numbers are; elsewhere the same as ``config``
    # All arrays in the order of the fields, as a NumPyClient gets them; or a reply, by name
    arrays: Parameters | RecordDict
    known: Known = field(default_factory=dict)  # what was asked for, by names of fields
    values: dict[str, Any] = field(default_factory=dict)  # what has been read
    sizes: dict[str, int] = field(default_factory=dict)  # by their letters

    def shape(self, shape: str) -> tuple[int, ...]:
        """Give a declared shape in numbers; -1 for what is not known yet."""
        sizes = self.sizes
        return tuple([a if isinstance(a, int) else sizes.get(a, -1) for a in axes(shape)])

    def words(self, shape: str) -> str:
        """Give a declared shape for an error: letters for what is not known yet."""
        return f"[{', '.join(str(self.sizes.get(axis, axis)) for axis in shape.split())}]"

    def bind(self, shape: str, sizes: tuple[int, ...]) -> None:
        """Learn sizes from what came."""
        for axis, size in zip(axes(shape), sizes, strict=True):
            if isinstance(axis, str) and axis not in self.sizes:
                self.sizes[axis] = size

    def fit(self, shape: str, count: int) -> tuple[int, ...] | None:
        """Return the shape of ``count`` items, of which at most one size is unknown; or None."""
        sizes = self.shape(shape)
        unit = math.prod(size for size in sizes if size != -1)
        is_open = -1 in sizes
        if count % unit if is_open and unit else count != (0 if is_open else unit):
            return None
        result = tuple(count // (unit or 1) if size == -1 else size for size in sizes)
        self.bind(shape, result)
        return result

    def part(self) -> Reading:
        """Read entries that belong together by themselves: their sizes are their own."""
        return Reading(self.config, self.metrics, self.arrays)


@dataclass
class Writing:
    """What a message becomes: entries, and arrays by ``record/key``."""

    config: dict[str, Any] = field(default_factory=dict)  # a Config, and lists
    arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    records: list[str] = field(default_factory=list)  # that are there without arrays, too
    message: Any = None  # all of it, for fields that depend on others


@dataclass(frozen=True)
class Field:  # whose values are left open: their types are those of the messages' dataclasses
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

    def write(self, value: object, to: Writing) -> None:
        """Write a field's value."""
        if not (self.optional and is_empty(value)):
            to.config[self.key] = self.encode(value)

    def read(self, name: str, reading: Reading) -> Any:
        """Read and check a field's value."""
        value = (reading.metrics if self.is_number else reading.config).get(self.key)
        if value is None and self.optional:
            return ABSENT
        return self.decode(value, name, reading)

    def encode(self, value: object) -> object:
        """Turn the value into an entry."""
        return value

    def decode(self, value: object, name: str, reading: Reading) -> object:
        """Turn an entry into the value."""
        raise NotImplementedError

    def refuse(self, wanted: str, value: object) -> MalformedReplyError:
        """Return the error for an entry that is not as declared."""
        return MalformedReplyError(f"{self.key}: expected {wanted}, got {brief(value)}")


def is_empty(value: object) -> bool:
    """Whether a value says nothing, so that its entry may be left out."""
    # Flower cannot count the bytes of a record that has an empty entry.
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


@dataclass(frozen=True)
class Shaped(Field):
    """What has a shape."""

    shape: str = "n"
    # Sizes that the reader could not know otherwise, by their letters: entries of their own
    sent: tuple[tuple[str, Field], ...] = ()

    def write(self, value: Any, to: Writing) -> None:
        """Write a field's value, and the sizes that are sent with it."""
        for letter, size in self.sent:
            size.write(value.shape[axes(self.shape).index(letter)], to)
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
class Tensor(Shaped):
    """An array, under ``record/key``; not written if it is None."""

    dtype: str = "float32"  # what is sent, for the page; what is taken is any numbers
    limit: float | None = MAX_NUMBER  # largest size of a number that the server takes
    per: str = ""  # the letter of a size that multiplies the limit
    when: str = ""  # the field, or what the server has asked for, that says whether it is there
    turn = 1

    @property
    def described(self) -> str:
        """The type and the shape."""
        return f"{self.dtype} `[{', '.join(self.shape.split())}]`"

    def write(self, value: Any, to: Writing) -> None:
        """Keep the array for its record."""
        if value is not None:
            to.arrays[self.key] = value

    def read(self, name: str, reading: Reading) -> object:
        """Read the array, if there is to be one."""
        if self.when and not reading.values.get(self.when, reading.known.get(self.when)):
            return ABSENT
        if not isinstance(reading.arrays, RecordDict):
            return take(self.key, self.shape, reading)
        record, _, key = self.key.partition("/")
        limit, shape = self.limit, reading.shape(self.shape)
        if limit is not None and self.per:
            limit *= max(1, reading.sizes[self.per])
        return read_array(reading.arrays, record, key, shape, limit=limit)


def take(key: str, shape: str, reading: Reading) -> NDArray[np.generic]:
    """Take the next array that a NumPyClient was given; only its shape can be wrong."""
    arrays = reading.arrays
    if isinstance(arrays, RecordDict) or not arrays:
        raise MalformedReplyError(f"the array {key} is missing")
    value, wanted = arrays.pop(0), reading.shape(shape)
    if value.ndim != len(wanted) or any(
        size not in (-1, result) for size, result in zip(wanted, value.shape, strict=True)
    ):
        words = reading.words(shape)
        raise MalformedReplyError(f"{key} has shape {value.shape}, expected {words}")
    reading.bind(shape, value.shape)
    return value


@dataclass(frozen=True)
class Named(Field):
    """Arrays by their names: all of them, or none."""

    names: tuple[str, ...] = ()
    first: str = ""  # the letter of a first axis that all have
    turn = 1

    @property
    def described(self) -> str:
        """The type and the shape."""
        head = [self.first] if self.first else []
        shapes = (", ".join([*head, *"ij"[:n]]) for n in (1, 2))
        return "float32 " + " or ".join(f"`[{shape}]`" for shape in shapes)

    def write(self, value: Any, to: Writing) -> None:
        """Keep the arrays for their record."""
        record = self.key.partition("/")[0]
        to.records.append(record)
        to.arrays |= {f"{record}/{name}": values for name, values in value.items()}

    def read(self, name: str, reading: Reading) -> dict[str, NDArray[np.generic]]:
        """Read the arrays; a reply must have all, in the shapes that the server knows."""
        if not isinstance(reading.arrays, RecordDict):
            result, reading.arrays = reading.arrays, []
            if result and len(result) != len(self.names):
                raise MalformedReplyError(f"{self.key}: {len(result)} came of {len(self.names)}")
            return dict(zip(self.names, result, strict=False))
        record, head = self.key.partition("/")[0], reading.shape(self.first)
        shapes = reading.known["shapes"]
        return {
            name: read_array(reading.arrays, record, name, (*head, *shapes[name]))
            for name in self.names
        }


@dataclass(frozen=True)
class Part(Field):
    """Entries that belong together: of a message, or of another class whose fields are given."""

    key: str = ""  # the title of the group on the page, if it has one
    make: Callable[..., object] = dict
    fields: Mapping[str, Field] | None = None
    when: str = ""  # the entry that says whether the part is there
    absent: object = None  # what that entry is if it is not
    turn = 1

    @cached_property
    def parts(self) -> Mapping[str, Field]:
        """Give the fields."""
        return fields_of(self.make) if self.fields is None else self.fields

    @cached_property
    def others(self) -> set[str]:
        """Return the attributes that do not travel, because the reader has them."""
        return getattr(self.make, "__dataclass_fields__", {}).keys() - self.parts.keys()

    @cached_property
    def _by_turns(self) -> list[tuple[str, Field]]:
        return sorted(self.parts.items(), key=lambda item: item[1].turn)

    def write(self, value: object, to: Writing) -> None:
        """Write the fields."""
        if value is not None:
            for name, part in self.parts.items():
                part.write(getattr(value, name), to)
        elif self.absent is not None:
            to.config[self.when] = self.absent

    def read(self, name: str, reading: Reading) -> object:
        """Read the fields."""
        if self.when and not reading.config.get(self.when):
            return ABSENT
        return self.make(**self.values(reading.part()))

    def values(self, reading: Reading) -> dict[str, Any]:
        """Read all fields by their turns; optional ones that did not come are not among them."""
        for name, part in self._by_turns:
            value = part.read(name, reading)
            if value is not ABSENT:
                reading.values[name] = value
        return reading.values

    def to_config(self, value: object) -> dict[str, Any]:
        """Write a value's entries."""
        to = Writing()
        self.write(value, to)
        return to.config

    def from_config(self, config: Entries) -> Any:
        """Read the entries."""
        return self.make(**self.values(Reading(config, config, [])))


@cache
def fields_of(cls: object) -> Mapping[str, Field]:
    """Give the declared fields of a class, in order."""
    hints = get_type_hints(cls, include_extras=True).items()
    declared = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}
    return {
        name: next(field for field in parts if isinstance(field, Field))
        for name, parts in declared.items()
    }


class Message:
    """What travels in one direction; subclasses are dataclasses."""

    down: ClassVar[tuple[str, ...]] = ()  # Flower's types of the messages that carry it
    up: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, object]] = {}  # entries that are always the same
    layout: ClassVar[Part]  # its fields

    def __init_subclass__(
        cls, *, down: str = "", up: str = "", fixed: Mapping[str, object] | None = None
    ) -> None:
        """Note which messages carry it, by their types with blanks between."""
        super().__init_subclass__()
        cls.down, cls.up, cls.fixed = tuple(down.split()), tuple(up.split()), fixed or {}
        cls.layout = Part(make=cls)

    def check(self, known: Entries) -> None:
        """Check what is particular to this message; ``known`` is what the reader had asked for."""

    def to_config(self) -> dict[str, Any]:
        """Write the entries."""
        return self._written().config

    def to_record(self) -> RecordDict:
        """Write the message."""
        written = self._written()
        arrays: dict[str, dict[str, Array]] = {record: {} for record in written.records}
        for name, values in written.arrays.items():
            record, _, key = name.partition("/")
            arrays.setdefault(record, {})[key] = encode_array(key, values)
        records = {record: ArrayRecord(named) for record, named in arrays.items()}
        return RecordDict({CONFIG: ConfigRecord(written.config), **records})

    @property
    def examples(self) -> int:
        """What a reply counts for."""
        return 1

    def to_numpy(self, examples: int | None = None) -> Answer:
        """Return what a ``NumPyClient``'s method returns."""
        written = self._written()
        names = [name.removeprefix(f"{ARRAYS}/") for name in written.arrays]
        metrics = written.config | ({ARRAY_NAMES: names} if names else {})
        count = self.examples if examples is None else examples
        return list(written.arrays.values()), count, metrics

    @classmethod
    def from_config(cls, config: Entries, **known: object) -> Self:
        """Read a message without arrays."""
        return cls._read(Reading(config, config, [], known))

    @classmethod
    def from_numpy(cls, parameters: Parameters, config: Entries, **known: object) -> Self:
        """Read the message at the client."""
        return cls._read(Reading(config, config, list(parameters), known))

    @classmethod
    def read(cls, content: RecordDict, **known: object) -> Self:
        """Read and check a reply; ``known`` are sizes by their letters and values by names."""
        config = content.config_records.get(CONFIG, ConfigRecord())
        is_query = "query" in cls.up  # whose answer has everything in one record
        metrics = config if is_query else content.metric_records.get(METRICS, MetricRecord())
        return cls._read(Reading(config, metrics, content, known))

    @classmethod
    def _read(cls, reading: Reading) -> Self:
        layout, known = cls.layout, reading.known
        reading.sizes.update({k: v for k, v in known.items() if len(k) == 1})
        others = {name: known[name] for name in layout.others & known.keys()}
        message = cls(**layout.values(reading), **others)
        message.check(known)
        return message

    def _written(self) -> Writing:
        to = Writing(dict(self.fixed), message=self)
        self.layout.write(self, to)
        return to
