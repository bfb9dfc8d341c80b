"""The codec: a message is a dataclass whose fields declare the wire format.

    class MaskRequest(Message, down="train.sum_mask", prefix="mask-"):
        clients: Annotated[Integers, Clients(shape="p")]  # who may contribute
        round_keys: Annotated[Bytes, Block(shape="f 32")]  # public keys

A field's key is the message's prefix, which ``*`` stands for, and the field's name, unless it names
another. A field with a default may be missing. Letters in a shape are sizes: the first field with a
letter sets its size, and all others must have the same. The comment describes the field in
``docs/reference/messages.md``.

``to_record`` and ``from_numpy`` carry a request from the server to a ``NumPyClient``, ``to_numpy``
(or ``to_config``, for the result of ``get_properties``) and ``read`` carry its answer back;
``to_config`` and ``from_config`` are for entries that travel with other messages'. A message checks
its own consistency in ``check``.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError, brief
from flower_graph.wire.arrays import Answer, Parameters, encode_array, read_array, record_of
from flower_graph.wire.keys import ARRAY_NAMES, ARRAYS, CONFIG, MAX_NUMBER, METRICS

Entries = Mapping[str, object]
Known = Mapping[str, Any]  # what the reader asked for, by names of fields: of any type
ABSENT: object = object()  # the value of an optional field that is missing
NAMED = "*"  # a key that is the message's prefix and the field's name
T = TypeVar("T")  # what a field is in the dataclass


@lru_cache
def axes(shape: str) -> tuple[int | str, ...]:
    """Return the axes of a declared shape: numbers, and letters of sizes."""
    return tuple(int(axis) if axis.isdecimal() else axis for axis in shape.split())


@dataclass
class Reading:
    """The entries and arrays of a message that is read, and the values and sizes read so far."""

    config: Entries
    # All arrays in the order of the fields, as a NumPyClient gets them; or a reply, by name
    arrays: Parameters | RecordDict
    known: Known = field(default_factory=dict)  # what was asked for, by names of fields
    values: dict[str, Any] = field(default_factory=dict)  # what has been read
    sizes: dict[str, int] = field(default_factory=dict)  # by their letters

    def shape(self, shape: str) -> tuple[int, ...]:
        """Return a declared shape in numbers; -1 for sizes that are not known yet."""
        sizes = self.sizes
        return tuple([a if isinstance(a, int) else sizes.get(a, -1) for a in axes(shape)])

    def words(self, shape: str) -> str:
        """Return a declared shape for an error: letters for sizes that are not known yet."""
        return f"[{', '.join(str(self.sizes.get(axis, axis)) for axis in shape.split())}]"

    def binds(self, shape: str, found: tuple[int, ...]) -> bool:
        """Whether sizes fit a declared shape; a letter's first size is its size."""
        return len(found) == len(axes(shape)) and all(
            size == (axis if isinstance(axis, int) else self.sizes.setdefault(axis, size))
            for axis, size in zip(axes(shape), found, strict=True)
        )


def entries_of(content: RecordDict) -> dict[str, object]:
    """Return a reply's entries: the adaptor puts numbers and other values into two records."""
    numbers = record_of(content, METRICS, MetricRecord) or MetricRecord()
    return {**numbers, **(record_of(content, CONFIG, ConfigRecord) or ConfigRecord())}


@dataclass
class Writing:
    """The entries of a message that is written, and its arrays by ``record/key``."""

    config: dict[str, Any] = field(default_factory=dict)  # a Config, and lists
    arrays: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    message: Any = None  # the whole message, for fields that depend on others


@dataclass(frozen=True)
class Field(Generic[T]):
    """An entry of a config or metric record; the base of all kinds."""

    key: str = NAMED
    says: str = ""  # for the page: of a field that several messages have
    _: KW_ONLY
    shape: str = ""
    optional: bool = False  # has a default: left out if it is empty, and may be missing
    group: str = ""  # the heading on the page under which it is described for all methods
    turn: ClassVar[int] = 0  # read in this order: entries, arrays, those that need both
    is_number: ClassVar[bool] = False  # Flower's adaptor puts it among the metrics
    # Stands for a missing entry: Flower cannot count the bytes of an empty one, so none is sent
    empty: ClassVar[object] = None
    type: ClassVar[str] = ""

    def write(self, value: T, to: Writing) -> None:
        """Write a field's value, unless its entry would be empty."""
        if not (self.optional and is_empty(value)) and not is_empty(entry := self.encode(value)):
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


AnyField = Field[Any]  # of a message, whatever type the field's value has


def is_empty(value: object) -> bool:
    """Whether a value is empty, so that its entry is left out."""
    return value is None or (hasattr(value, "__len__") and len(value) == 0)


@dataclass(frozen=True)
class Tensor(Field[NDArray[np.generic] | None]):
    """An array, under ``record/key``; not written if it is None."""

    shape: str = "n"
    dtype: str = "float32"  # the type that is sent, for the page; any numbers are accepted
    limit: float | None = MAX_NUMBER  # largest absolute value that the server accepts
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
        value, words = reading.arrays.pop(0), reading.words(self.shape)
        if not reading.binds(self.shape, value.shape):
            raise MalformedReplyError(f"{self.key} has shape {value.shape}, expected {words}")
        return value


@dataclass(frozen=True)
class Part(Field[object]):
    """A group of entries: of a message, or of another class whose fields are given."""

    key: str = ""  # the title of the group on the page, if it has one
    make: Callable[..., object] = dict
    fields: Mapping[str, AnyField] | None = None
    when: str = ""  # the entry that says whether the group is sent
    absent: object = None  # the value of that entry if it is not
    turn = 1

    @cached_property
    def parts(self) -> Mapping[str, AnyField]:
        """The fields, in the order in which they are read."""
        fields = fields_of(self.make) if self.fields is None else self.fields
        return dict(sorted(fields.items(), key=lambda item: item[1].turn))

    @cached_property
    def others(self) -> set[str]:
        return getattr(self.make, "__dataclass_fields__", {}).keys() - self.parts.keys()

    def write(self, value: object, to: Writing) -> None:
        if value is not None:
            for name, part in self.parts.items():
                part.write(getattr(value, name), to)
        elif self.absent is not None:
            to.config[self.when] = self.absent

    def read(self, name: str, reading: Reading) -> object:
        if self.when and not reading.config.get(self.when):
            return ABSENT
        own = Reading(reading.config, reading.arrays)
        return self.make(**self.values(own))

    # Any, here and below: fields have values of any type, and so have entries
    def values(self, reading: Reading) -> dict[str, Any]:
        """Read all fields in order, and leave out optional ones that are missing."""
        for name, part in self.parts.items():
            value = part.read(name, reading)
            if value is not ABSENT:
                reading.values[name] = value
        return reading.values

    # Any: a Config, and lists
    def to_config(self, value: object) -> dict[str, Any]:
        to = Writing()
        self.write(value, to)
        return to.config

    # Any: what ``make`` makes
    def from_config(self, config: Entries) -> Any:
        return self.make(**self.values(Reading(config, [])))


@cache
def fields_of(cls: Any) -> Mapping[str, AnyField]:
    """Return the declared fields of a class, in order."""
    found, prefix = {}, getattr(cls, "prefix", "")
    required = set(getattr(cls, "_fields", ())) - getattr(cls, "_field_defaults", {}).keys()
    if is_dataclass(cls):  # otherwise a NamedTuple
        required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        if get_origin(hint) is Annotated:
            one = next(field for field in get_args(hint) if isinstance(field, Field))
            key = f"*{name.replace('_', '-')}" if one.key == NAMED else one.key
            key = prefix + key[1:] if key.startswith("*") else key
            if not isinstance(one, Part):
                one = replace(one, key=key, optional=one.optional or name not in required)
            found[name] = one
    return found


@dataclass_transform(field_specifiers=(field,))
class Message:
    """A message in one direction; its subclasses become dataclasses."""

    down: ClassVar[tuple[str, ...]] = ()  # the types of the Flower messages that carry it
    up: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, object]] = {}  # entries that are always the same
    prefix: ClassVar[str] = ""
    layout: ClassVar[Part]  # its fields

    def __init_subclass__(
        cls,
        *,
        down: str = "",
        up: str = "",
        fixed: Mapping[str, object] | None = None,
        prefix: str = "",
        **options: bool,
    ) -> None:
        """Register which Flower messages carry it: their types, with blanks between.

        ``prefix`` begins the keys that fields do not name; ``options`` are those of a dataclass.
        """
        super().__init_subclass__()
        dataclass(**options)(cls)
        cls.prefix = prefix or cls.prefix
        cls.down, cls.up, cls.fixed = tuple(down.split()), tuple(up.split()), fixed or {}
        cls.layout = Part(make=cls)

    def check(self, known: Entries) -> None:
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
        return RecordDict({CONFIG: ConfigRecord(written.config), **records})

    def to_numpy(self, examples: int = 1) -> Answer:
        """Return the message as the result of a ``NumPyClient``'s method."""
        written = self._written()
        names = [name.removeprefix(f"{ARRAYS}/") for name in written.arrays]
        metrics = written.config | ({ARRAY_NAMES: names} if names else {})
        return list(written.arrays.values()), examples, metrics

    @classmethod
    def from_config(cls, config: Entries, **known: object) -> Self:
        return cls.from_numpy([], config, **known)

    @classmethod
    def from_numpy(cls, parameters: Parameters, config: Entries, **known: object) -> Self:
        return cls._read(Reading(config, list(parameters), known))

    @classmethod
    def read(cls, content: RecordDict, **known: object) -> Self:
        """Read and check a reply; ``known`` are sizes by their letters and values by names."""
        return cls._read(Reading(entries_of(content), content, known))

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
