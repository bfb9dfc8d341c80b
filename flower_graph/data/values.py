"""The values of table cells, attributes and list entries: one rule for words, one for numbers.

A word is a label, a name, an identity or a client. Whole numbers that are written as floats are
whole numbers, missing is missing, and all else stays as written: ``007`` is not ``7``.
"""

from __future__ import annotations

import math
import re
import string

from flower_graph.errors import DataError

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
