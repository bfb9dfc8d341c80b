"""The codec: a message is a dataclass whose fields say what is on the wire.

    @dataclass
    class MaskRequest(Message, down="train.sum_mask"):
        clients: Annotated[Integers, Clients("mask-clients", "who may contribute", shape="p")]
        round_keys: Annotated[Bytes, Block("mask-round-keys", "public keys", shape="f 32")]

``to_record`` and ``from_numpy`` carry a request from the server to a ``NumPyClient``,
``to_numpy`` (or ``to_config``, for what ``get_properties`` returns) and ``read`` its answer
back. Messages whose entries travel with those of others are written by ``to_config`` and read by
``from_config`` on both sides. What only one message can check is its ``check``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.messages.arrays import encode_array
from flower_graph.messages.fields import ABSENT, Entries, Field, Reading, Shaped, Writing
from flower_graph.messages.keys import ARRAY_NAMES, ARRAYS, CONFIG, MAX_NUMBER, METRICS, read_array


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

    def read(self, name: str, reading: Reading) -> Any:
        """Read the array, if there is to be one."""
        if self.when and not reading.is_true(self.when):
            return ABSENT
        if isinstance(reading.arrays, RecordDict):
            return self.receive(reading.arrays, reading)
        return take(self.key, self.shape, name, reading)

    def receive(self, content: RecordDict, reading: Reading) -> NDArray[Any]:
        """Read and check the array of a reply."""
        record, _, key = self.key.partition("/")
        limit = self.limit
        if limit is not None and self.per:
            limit *= max(1, reading.sizes[self.per])
        return read_array(content, record, key, reading.shape(self.shape), limit=limit)


def take(key: str, shape: str, name: str, reading: Reading) -> NDArray[Any]:
    """Take the next array that a NumPyClient was given; only its shape can be wrong."""
    arrays = reading.arrays
    if isinstance(arrays, RecordDict) or not arrays:
        raise MalformedReplyError(f"the array {key} is missing")
    value, wanted = arrays.pop(0), reading.shape(shape)
    if value.ndim != len(wanted) or any(
        size not in (-1, result) for size, result in zip(wanted, value.shape, strict=True)
    ):
        words = ", ".join(
            s if n == -1 else str(n) for s, n in zip(shape.split(), wanted, strict=True)
        )
        raise MalformedReplyError(f"{key} has shape {value.shape}, expected [{words}]")
    reading.bind(name, shape, value.shape)
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
        to.records[record] = ArrayRecord()
        to.arrays |= {f"{record}/{name}": values for name, values in value.items()}

    def read(self, name: str, reading: Reading) -> dict[str, NDArray[Any]]:
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
    make: Callable[..., Any] = dict
    fields: Mapping[str, Field] | None = None
    when: str = ""  # the entry that says whether the part is there
    absent: Any = None  # what that entry is if it is not
    turn = 1

    @property
    def parts(self) -> Mapping[str, Field]:
        """Give the fields."""
        return fields_of(self.make) if self.fields is None else self.fields

    def write(self, value: Any, to: Writing) -> None:
        """Write the fields."""
        if value is not None:
            write_fields(self.parts, value, to)
        elif self.absent is not None:
            to.config[self.when] = self.absent

    def read(self, name: str, reading: Reading) -> Any:
        """Read the fields."""
        if self.when and not reading.config.get(self.when):
            return ABSENT
        return self.make(**read_fields(self.parts, reading.part()))

    def to_config(self, value: Any) -> dict[str, Any]:
        """Write a value's entries."""
        to = Writing()
        self.write(value, to)
        return to.config

    def from_config(self, config: Entries) -> Any:
        """Read the entries."""
        return self.make(**read_fields(self.parts, Reading(config, config, [])))


class Message:
    """What travels in one direction; subclasses are dataclasses."""

    down: ClassVar[tuple[str, ...]] = ()  # Flower's types of the messages that carry it
    up: ClassVar[tuple[str, ...]] = ()
    fixed: ClassVar[Mapping[str, Any]] = {}  # entries that are always the same

    def __init_subclass__(
        cls, *, down: str = "", up: str = "", fixed: Mapping[str, Any] | None = None
    ) -> None:
        """Note which messages carry it, by their types with blanks between."""
        super().__init_subclass__()
        cls.down, cls.up, cls.fixed = tuple(down.split()), tuple(up.split()), fixed or {}

    def check(self, known: Entries) -> None:
        """Check what only this message can; ``known`` is what the reader had asked for."""

    def to_config(self) -> dict[str, Any]:
        """Write the entries."""
        return self._written().config

    def to_record(self) -> RecordDict:
        """Write the message."""
        written = self._written()
        content = RecordDict({CONFIG: ConfigRecord(written.config), **written.records})
        for name, values in written.arrays.items():
            record, _, key = name.partition("/")
            if record not in content:
                content[record] = ArrayRecord()
            content.array_records[record][key] = encode_array(key, values)
        return content

    @property
    def examples(self) -> int:
        """What a reply counts for."""
        return 1

    def to_numpy(
        self, examples: int | None = None
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Return what a ``NumPyClient``'s method returns."""
        written = self._written()
        names = [name.removeprefix(f"{ARRAYS}/") for name in written.arrays]
        metrics = written.config | ({ARRAY_NAMES: names} if names else {})
        count = self.examples if examples is None else examples
        return list(written.arrays.values()), count, metrics

    @classmethod
    def from_config(cls, config: Entries, **known: Any) -> Self:
        """Read a message without arrays."""
        return cls._read(Reading(config, config, [], known))

    @classmethod
    def from_numpy(cls, parameters: Sequence[NDArray[Any]], config: Entries, **known: Any) -> Self:
        """Read the message at the client."""
        return cls._read(Reading(config, config, list(parameters), known))

    @classmethod
    def read(cls, content: RecordDict, **known: Any) -> Self:
        """Read and check a reply; ``known`` are sizes by their letters and values by names."""
        config = content.config_records.get(CONFIG, ConfigRecord())
        is_query = "query" in cls.up  # whose answer has everything in one record
        metrics = config if is_query else content.metric_records.get(METRICS, MetricRecord())
        return cls._read(Reading(config, metrics, content, known))

    @classmethod
    def _read(cls, reading: Reading) -> Self:
        reading.sizes.update({k: v for k, v in reading.known.items() if len(k) == 1})
        # What does not travel with the rest: who reads the message has it.
        undeclared = getattr(cls, "__dataclass_fields__", {}).keys() - fields_of(cls).keys()
        others = {name: reading.known[name] for name in undeclared & reading.known.keys()}
        message = cls(**read_fields(fields_of(cls), reading), **others)
        message.check(reading.known)
        return message

    def _written(self) -> Writing:
        to = Writing(dict(self.fixed), message=self)
        write_fields(fields_of(type(self)), self, to)
        return to


def write_fields(fields: Mapping[str, Field], value: Any, to: Writing) -> None:
    """Write all fields of a value."""
    for name, field in fields.items():
        field.write(getattr(value, name), to)


def read_fields(fields: Mapping[str, Field], reading: Reading) -> dict[str, Any]:
    """Read all fields by their turns; optional ones that did not come are not among them."""
    for name, field in sorted(fields.items(), key=lambda item: item[1].turn):
        value = field.read(name, reading)
        if value is not ABSENT:
            reading.values[name] = value
    return reading.values


_FIELDS: dict[Any, Mapping[str, Field]] = {}  # of classes that were asked for


def fields_of(cls: Any) -> Mapping[str, Field]:
    """Give the declared fields of a class, in order."""
    if cls not in _FIELDS:
        hints = get_type_hints(cls, include_extras=True)
        _FIELDS[cls] = {
            name: next(field for field in get_args(hint) if isinstance(field, Field))
            for name, hint in hints.items()
            if get_origin(hint) is Annotated
        }
    return _FIELDS[cls]
