"""Labels of nodes, from any numbers or words to numbers of classes; and values of cells.

A value of a table cell, an attribute or a list entry is a word or a number, by one rule each. A
word is a label, a name, an identity or a client. Whole numbers that are written as floats are whole
numbers, missing is missing, and all else stays as written: ``007`` is not ``7``.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flower_graph.data.graph import check_dense_size
from flower_graph.errors import DataError, FractionalLabelsError
from flower_graph.wire.keys import MAX_CLASSES

DENSE = "They are sparse, and would be made dense: use fewer of them."
MOST_CLASSES = 1000  # with more different labels, they are taken for something else than classes
CAPTIONS = 10  # with more labels than these, all different, they are taken for captions
SHOWN = 8  # most labels that a note lists
UNLABELLED = "-1"  # a word that stands for no label


class Labels(NamedTuple):
    """The labels of one graph or of several together, as numbers of classes."""

    y: list[Tensor]  # Of each graph: int64 [n], -1 without a label
    num_classes: int
    classes: tuple[str, ...] | None  # Their names, if these are not the numbers
    notes: list[str]


def number_classes(
    labels: Sequence[Tensor | list[str | None]],
    declared: object = None,
    classes: Sequence[str] | None = None,
) -> Labels:
    """Turn labels into numbers of classes, for one graph or for all clients together."""
    # `declared`: how many classes there are, if known; labels are then numbers below it.
    if classes is not None:
        classes = tuple(str(name) for name in listed("classes", classes))
        declared = len(classes)
    declared = declared_classes(declared)
    if all(isinstance(one, Tensor) for one in labels):
        y = [one.clamp(min=-1) for one in labels if isinstance(one, Tensor)]
        if declared is None:
            return _compacted(y)
        _check_declared(y, declared)
        return Labels(y, declared, classes, _unlabelled(y))
    words = [_words_of(each) for each in labels]
    every = [word for each in words for word in each if word is not None]
    names = sorted({*every})
    if classes is not None:
        if other := [name for name in names if name not in classes]:
            raise DataError(f"y has {other[0]!r}: must be one of the classes {_shown(classes)}")
        names = list(classes)
    if declared is not None and len(names) > declared:
        raise DataError(f"y has {len(names)} different names, but num_classes is {declared}")
    _check_number(len(names), len(every), declared)
    number = {name: index for index, name in enumerate(names)} | {None: -1}
    y = [torch.tensor([number[word] for word in each]) for each in words]
    note = f"labels {_shown(names)} taken as {len(names)} classes"
    return Labels(y, len(names), tuple(names), [note, *_unlabelled(y)])


def _words_of(labels: Tensor | list[str | None]) -> list[str | None]:
    if isinstance(labels, Tensor):
        return [None if one < 0 else str(one) for one in labels.tolist()]
    return [None if one is None else str(one) for one in labels]


def _compacted(y: list[Tensor]) -> Labels:
    every = torch.cat(y)
    numbers = every[every >= 0].unique()
    count = numbers.numel()
    _check_number(count, int((every >= 0).sum()))
    if int(numbers[-1]) == count - 1:
        return Labels(y, count, None, _unlabelled(y))
    names = tuple(str(value) for value in numbers.tolist())
    note = f"labels {_shown(names)} taken as {count} classes"
    numbered = [torch.where(one < 0, -1, torch.searchsorted(numbers, one)) for one in y]
    return Labels(numbered, count, names, [note, *_unlabelled(y)])


def _unlabelled(y: Sequence[Tensor]) -> list[str]:
    every, without = sum(one.numel() for one in y), sum(int((one < 0).sum()) for one in y)
    return [f"{without} of {every} nodes without a label"] if without else []


def _check_number(count: int, labelled: int, declared: int | None = None) -> None:
    if count == 0:
        raise DataError("y: no node has a label")
    if count > MOST_CLASSES:
        raise DataError(f"y has {count} labels, above {MOST_CLASSES}: task=values learns numbers")
    if count == labelled > CAPTIONS and declared is None:
        raise DataError(f"y has {count} labels, all different: data.label names the classes")


def declared_classes(count: object) -> int | None:
    """Return the number of classes that a graph declares; None if it declares none."""
    if isinstance(count, Tensor) and count.numel() == 1:
        count = count.item()
    if count is None or (type(count) is int and 1 <= count <= MAX_CLASSES):
        return count
    shown = " ".join(repr(count).split())
    raise DataError(f"num_classes is {shown:.60}: must be a whole number, 1 to {MAX_CLASSES}")


def check_labels(y: Tensor) -> None:
    """Refuse numbers that cannot be classes, before weights are made for so many."""
    if y.numel() and (largest := int(y.max())) >= MAX_CLASSES:
        raise DataError(f"y[{int(y.argmax())}] is {largest}: must be below {MAX_CLASSES}, or -1")


def _check_declared(y: Sequence[Tensor], declared: int) -> None:
    for one in y:
        if (one >= declared).any():
            node = int((one >= declared).nonzero()[0])
            raise DataError(f"y[{node}] is {int(one[node])}: not below num_classes = {declared}")
    if all(bool((one < 0).all()) for one in y):
        raise DataError("y: no node has a label")


def read_labels(y: object, n: int | None, notes: list[str]) -> Tensor | list[str | None]:
    """Return labels as whole numbers (below 0: none) or as words (None: none)."""
    if not isinstance(y, Tensor):
        every = listed("y", y)
        words = _words(every)
        if any(isinstance(one, str) and words[node] for node, one in enumerate(every)):
            words = [None if one == UNLABELLED else one for one in words]
            _check_length(words, n)
            return _numbered(words)
        y = [-1 if word is None else one for word, one in zip(words, every, strict=True)]
    numbers = column_of("y", y)
    _check_length(numbers, n)
    return _whole(numbers, notes)


def _words(labels: Sequence[object]) -> list[str | None]:
    words = []
    for node, one in enumerate(labels):
        try:
            words.append(word_of(one))
        except DataError as error:
            raise DataError(f"y[{node}]: {error}; of one-hot rows y.argmax(1)") from error
    return words


def _whole(y: Tensor, notes: list[str]) -> Tensor:
    if y.is_complex():
        raise DataError(f"y is {y.dtype}: must be whole numbers or words")
    if not y.is_floating_point():
        return y.long()
    nan = y.isnan()
    wrong = ~nan & ((y != y.round()) | (y.abs() >= EXACT))
    if wrong.any():
        node = int(wrong.nonzero()[0])
        raise _fractional(node, y[node].item())
    notes.append(f"labels of {kind_of(y)} taken as whole numbers")
    return torch.where(nan, -1, y.double()).long()


def _numbered(words: list[str | None]) -> Tensor | list[str | None]:
    if all(word is None or WHOLE.fullmatch(word) for word in words):
        with suppress(RuntimeError):  # one has more digits than int64
            return torch.tensor([-1 if word is None else int(word) for word in words])
    numbers = [number_of(word) for word in words]
    for node, number in enumerate(numbers):
        if number is None:
            break
        if None not in numbers and math.isfinite(number) and not number.is_integer():
            raise _fractional(node, number)
    return words


def _fractional(node: int, value: object) -> FractionalLabelsError:
    return FractionalLabelsError(
        f"y[{node}] is {value}: labels must be whole numbers, one class a node; task=values learns "
        "such numbers, and y.long() rounds them towards 0"
    )


def read_targets(y: object, n: int | None) -> Tensor:
    """Return the numbers that nodes are to learn, float32 ``[n]``; NaN: not known."""
    if not isinstance(y, Tensor):
        y = [_number(node, one) for node, one in enumerate(listed("y", y))]
    given = column_of("y", y)
    if given.dim() != 1 or given.is_complex() or (n is not None and len(given) != n):
        raise DataError(f"y is {given.dtype} {list(given.shape)}: must be a real number a node")
    result = given.to(torch.float32)
    if (wrong := result.isinf()).any():
        node = int(wrong.nonzero()[0])
        raise DataError(f"y[{node}] is {given[node].item()}: must be below 3e38, NaN for none")
    return result


def _number(node: int, value: Any) -> float:
    number = number_of(value)
    if number is None:
        advice = advice_of(value) or "with task=values it is a number"
        raise DataError(f"y[{node}] is {value!r:.40}: {advice}")
    return number


def _check_length(y: Tensor | list[str | None], n: int | None) -> None:
    kind = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else f"{len(y)} words"
    if isinstance(y, Tensor) and y.dim() != 1:
        raise DataError(f"y is {kind}: must be one class a node; of one-hot rows y.argmax(1)")
    if n is not None and len(y) != n:
        raise DataError(f"y is {kind}: must be int64 [{n}], one class for each row of x")


def _shown(names: Sequence[str]) -> str:
    listed = ", ".join(names[:SHOWN])
    return listed if len(names) <= SHOWN else f"{listed}, … {names[-1]}"


def check_entries(data: object, keys: Sequence[str]) -> None:
    """Refuse a single value where there must be one for each node."""
    for key in keys:
        value = getattr(data, key, None)
        if isinstance(value, (str, dict, int, float)) or getattr(value, "ndim", 1) == 0:
            raise DataError(f"{key} is one {type(value).__name__}: must be a tensor or a list")


# Any: what a user gave, which is checked here
def listed(key: str, values: Any) -> list[object]:
    """Return the entries of a list, a tuple, an array or a tensor."""
    is_list = isinstance(values, list | tuple | np.ndarray)
    if not is_list and not (isinstance(values, Tensor) and values.layout == torch.strided):
        raise DataError(f"{key} is a {type(values).__name__}: must be a list, or a tensor")
    values = as_tensor(key, values) if isinstance(values, Tensor) else values
    result = values.tolist() if isinstance(values, np.ndarray | Tensor) else list(values)
    return result if isinstance(result, list) else [result]


# Any: all that `torch.as_tensor` accepts or refuses
def as_tensor(key: str, value: Any) -> Tensor:
    """Turn a tensor, an array or a list of numbers into a tensor."""
    if isinstance(value, Tensor) and value.is_quantized:
        raise DataError(f"{key} is quantized ({kind_of(value)}): {key}.dequantize() is not")
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "tocoo"):  # SciPy's
        check_dense_size(value.shape[0], value.shape[1], DENSE)
        return torch.from_numpy(value.toarray())
    if hasattr(value, "to_dense"):  # torch_sparse's matrices
        check_dense_size(value.size(0), value.size(1), DENSE)
        dense: Tensor = value.to_dense()
        return dense
    try:
        return torch.as_tensor(value if isinstance(value, np.ndarray) else np.asarray(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{key} is a {type(value).__name__}, not numbers ({error})") from error


def column_of(key: str, value: object) -> Tensor:
    """Turn numbers into a tensor as ``as_tensor`` does; one column becomes a vector."""
    result = as_tensor(key, value)
    return result.flatten() if result.dim() == 2 and result.size(1) == 1 else result


def is_whole(value: Tensor) -> bool:
    """Return whether a tensor has whole numbers."""
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


def kind_of(value: Tensor) -> str:
    """Name the type of a tensor's numbers."""
    return str(value.dtype).removeprefix("torch.")


# What pandas, R, Excel, databases and Python write for nothing
MISSING = frozenset(
    ("", "nan", "NaN", "NA", "N/A", "n/a", "#N/A", "<NA>", "None", "NULL", "null")
)  # fmt: skip
# Around words: blanks, also those of no width, which nobody sees
BLANK = f"{string.whitespace}\u00a0\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
WHOLE = re.compile(r"-?(0|[1-9]\d*)")
_AS_FLOAT = re.compile(r"(-?(?:0|[1-9]\d*))\.0*")
_AS_POWER = re.compile(r"-?\d(\.\d+)?[eE]\+\d\d+")  # as R and C write large ones
WITH_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?")
EXACT = 2**53  # up to here floats have all whole numbers


def word_of(value: object, *, comma: bool = False) -> str | None:
    """Return a value as a word; None if it is missing; ``DataError`` for a list or a table."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return str(int(value)) if value.is_integer() and abs(value) < EXACT else str(value)
    if isinstance(value, list | tuple | dict | set):
        raise DataError(f"{value!r:.40} must be one word or number, not several")
    text = str(value).strip(BLANK)
    if text in MISSING:
        return None
    if comma and WITH_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    if found := _AS_FLOAT.fullmatch(text):
        return found[1]
    if _AS_POWER.fullmatch(text) and float(text).is_integer() and abs(float(text)) < EXACT:
        return str(int(float(text)))
    return text


def number_of(value: object, *, comma: bool = False) -> float | None:
    """Return a value as a number, NaN if it is missing; None if it is no number."""
    if isinstance(value, str):
        text = value.strip(BLANK)
        if text in MISSING:
            return math.nan
        if comma:
            text = "" if "." in text else text.replace(",", ".")
        value = text
    elif value is None:
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]  # which refuses what it cannot read
    except (TypeError, ValueError, OverflowError):
        return None


def advice_of(value: object, *, comma: bool = False) -> str:
    """Return a remedy if the decimal sign is the reason that a value is no number."""
    text = str(value).strip(BLANK)
    if comma and "." in text and number_of(text) is not None:
        return "it has a decimal point, but data.decimal=comma is set"
    if not comma and WITH_COMMA.fullmatch(text):
        return "it has a decimal comma: set data.decimal=comma"
    return ""
