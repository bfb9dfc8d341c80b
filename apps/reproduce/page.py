"""``table.md``: the rows of a table for reading, laid out as the YAML's ``page`` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import isfinite
from string import Formatter
from typing import Any

from flower_graph.apps.reproduce.asked import Asked
from flower_graph.apps.reproduce.experiments import Runs
from flower_graph.apps.reproduce.marks import cut_off, marks, measure_of
from flower_graph.apps.reproduce.rows import Row, by_seed, find, shown_runs
from flower_graph.apps.reproduce.templates import Values, fill, function, one_of
from flower_graph.records.rounds import merit
from flower_graph.report.significance import MOST_CHANCE, differences, holm, paired

Cell = tuple[str, bool]  # What a table's field says, and whether there was a figure for it
NONE = "–"  # stands for a figure that is not there


def make_page(
    asked: Asked,
    runs: Runs,
    rows: Sequence[Row],
    missing: Sequence[str] = (),
    pictures: Sequence[str] = (),
) -> str:
    """Write the whole page; a table without rows is not on it."""
    parts = [f"# {asked.table.title}"]
    for block in asked.table.page:
        parts += _block(block, asked, runs, rows)
    parts += show_pictures(pictures)
    if missing:
        parts += ["## Not run", "\n".join(f"- {reason}" for reason in missing)]
    return "\n\n".join(parts) + "\n"


def _block(block: Values, asked: Asked, runs: Runs, rows: Sequence[Row]) -> list[str]:
    """Write one block: text, the settings of the configs, or tables."""
    if "blocks" in block:
        return [
            part
            for keys in _each(block["for"], rows, asked)
            for inner in block["blocks"]
            for part in _block({**inner, "rows": {**inner["rows"], **keys}}, asked, runs, rows)
        ]
    if "values" in block:  # of the text, from a function of some runs
        values = function(block["values"])(shown_runs(block["tables"], asked.data, asked, runs))
        return [] if values is None else _prose(block, asked, values, [])
    if "settings" in block:
        return _settings(block, asked)
    if "own" in block:
        return _own(block, asked)
    parts: list[str] = []
    for keys in _each(block.get("for", ()), matching(rows, block.get("rows", {})), asked):
        here = matching(rows, {**block.get("rows", {}), **keys})
        if here or "rows" not in block:
            parts += _prose(block, asked, keys, here) + _table(block, asked, keys, here)
    return parts


def _prose(block: Values, asked: Asked, keys: Values, here: Sequence[Row]) -> list[str]:
    is_whole = "rows" not in block or not here
    seeds = (asked.seeds or asked.table.seeds) if is_whole else here[0]["seeds"]
    values = {"seeds": ", ".join(map(str, seeds)), "seeds_comma": ",".join(map(str, seeds)), **keys}
    values["rounds"] = asked.rounds or asked.table.rounds
    if not is_whole:
        values["rounds"] = here[0]["settings"]["rounds"]
    heading = [f"## {fill(block['heading'], values)}"] if "heading" in block else []
    text = block.get("text", [])
    return heading + [
        fill(one, values).strip() for one in ([text] if isinstance(text, str) else text)
    ]


# Settings ----------------------------------------------------------------------------------------


def _settings(block: Values, asked: Asked) -> list[str]:
    """Write a table of settings, as the configs have them now."""
    models = [model for model in block.get("models", asked.models) if model in asked.models]
    if not models:
        return []
    lines = []
    for data, model in product(asked.data, models):
        config = asked.common(data, model)
        values = {"data": data, "model": model, "rounds": asked.rounds_of(data, model)}
        lines.append([_setting(config, values, *column[1:]) for column in block["settings"]])
    return ["\n".join(markdown([column[0] for column in block["settings"]], lines))]


def _setting(config: Any, values: Values, name: Any, words: Values | None = None) -> str:
    if isinstance(name, str) and "{" in name:
        return fill(name, values)
    result = ", ".join(_value(config, one) for one in ([name] if isinstance(name, str) else name))
    return result if words is None else words.get(result, words.get("else", result))


def _value(config: object, name: str) -> str:
    """Format the value of a setting, given its dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    each = config if isinstance(config, list) else [config]
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in each)


def _own(block: Values, asked: Asked) -> list[str]:
    """List the settings that only single methods have."""
    asked_for = {"data": asked.data, "model": asked.models, "method": asked.methods}
    result = [
        one
        for one in asked.table.own
        if all(one.get(k, v[0]) in v for k, v in asked_for.items() if v)
    ]
    if not result:
        return []
    lines = [fill(block["own"], {**one, "settings": " ".join(one["settings"])}) for one in result]
    return [block["text"], "\n".join(lines)]


# Tables ------------------------------------------------------------------------------------------


def _table(block: Values, asked: Asked, keys: Values, here: Sequence[Row]) -> list[str]:
    if "columns" not in block and "lines" not in block:
        return []
    heads = block.get("heads", [_part(one, 0) for one in block.get("columns", [])])
    first = {"cells": [_part(one, 1) for one in block.get("columns", [])]}
    local = [line for line in block.get("lines", []) if "each" in line]
    shared = [first] if "columns" in block else []
    shared += [line for line in block.get("lines", []) if "each" not in line]
    lines = [
        _line(_in_order(line["cells"], heads), asked, _with_values({**keys, **one}, asked), here)
        for each, group in [(block.get("each", ()), shared), *((o["each"], [o]) for o in local)]
        for one in _each(each, here, asked)
        for line in group
    ]
    lines = [cells for cells in lines if any(has_figure for _, has_figure in cells)]
    if not lines:
        return []
    names = [
        (fill(name, _with_values(values, asked)), grouped)
        for name, values, grouped in _flat(heads, asked, keys, here)
    ]
    # Of columns that are one for each of some methods, empty ones are left out.
    shown = [
        number
        for number, (_, grouped) in enumerate(names)
        if not grouped or any(cells[number][0] != NONE for cells in lines)
    ]
    texts = [[cells[number][0] for number in shown] for cells in lines]
    return ["\n".join(markdown([names[number][0] for number in shown], texts))]


def _in_order(cells: Any, heads: Sequence[object]) -> Sequence[object]:
    """Return a line's cells in the order of the columns; a mapping may leave some out."""
    return [cells.get(head, NONE) for head in heads] if isinstance(cells, Mapping) else cells


def _with_values(keys: Values, asked: Asked) -> Values:
    """Add the values of a line's method, for templates."""
    method = asked.table.methods.get(keys.get("method", ""))
    return {**method.values, **keys} if method else keys


def _part(column: Any, index: int) -> object:
    """Return the head of a column (index 0), or its cells (index 1)."""
    if isinstance(column, Mapping):
        return {**column, "is": [_part(one, index) for one in column["is"]]}
    if index == 0:
        return column[0]
    return column[1] if len(column) == 2 else column[1:]


def _line(cells: Sequence[object], asked: Asked, keys: Values, here: Sequence[Row]) -> list[Cell]:
    result = []
    for cell, values, _ in _flat(cells, asked, keys, here):
        text, has_figure = _cell(cell, asked, values, here)
        # A column's method may have ended in one line and not in the next.
        is_a_columns = has_figure and "method" in values and "method" not in keys
        if is_a_columns and cell[0] in SPREADS:
            text += marks(_under(values, here))
        result.append((text, has_figure))
    return result


def _cell(cell: Any, asked: Asked, keys: Values, here: Sequence[Row]) -> Cell:
    """Fill in one cell: a template, or a format with the rows that it applies to."""
    if isinstance(cell, str):
        return _named(cell, asked, keys, here), False
    how, *wanted = cell
    several = [one for some in wanted for one in (some if isinstance(some, list) else [some])]
    of_rows = {key: value for key, value in keys.items() if any(key in r for r in here)}
    result = [
        find(here, **{**of_rows, **match})
        for one in several
        for match in _matches({"metric": one} if isinstance(one, str) else one, asked, keys, here)
    ]
    return formatted(how, result), any(r is not None for r in result)


def _named(template: str, asked: Asked, keys: Values, here: Sequence[Row]) -> str:
    """Fill in a template, and append remarks to the name of a method."""
    text = fill(template, _with_values(keys, asked))
    method = asked.table.methods.get(keys.get("method", ""))
    words = {"method", *(method.values if method else ())}
    if not words & {field for _, field, _, _ in Formatter().parse(template)}:
        return text
    return text + marks(_under(keys, here))


def _under(keys: Values, here: Sequence[Row]) -> list[Row]:
    """Return the rows that agree with the keys; keys that no row has are ignored."""
    of_rows = {key: value for key, value in keys.items() if any(key in r for r in here)}
    return matching(here, of_rows)


def _matches(
    wanted: Values, asked: Asked, keys: Values, here: Sequence[Row]
) -> Iterator[dict[str, object]]:
    """List the keys of the wanted rows: lists are expanded, and ``all`` to all present values."""
    values: list[Sequence[object]] = []
    # Runs of one row may have other iterations than those of the next
    same_keys = _under(keys, here)
    for key, value in wanted.items():
        present = (
            sorted({r[key] for r in same_keys if key in r}) if value in ("all", "last") else []
        )
        if isinstance(value, str) and value not in ("all", "last"):
            values.append([fill(value, keys)])
        elif isinstance(value, list):
            values.append(_only_asked(key, value, asked))
        else:
            values.append(
                present if value == "all" else present[-1:] if value == "last" else [value]
            )
    return (dict(zip(wanted, one, strict=True)) for one in product(*values))


def _flat(
    items: Sequence[object], asked: Asked, keys: Values, here: Sequence[Row]
) -> Iterator[tuple[Any, Values, bool]]:
    """List cells with their keys, and whether they come from a repeated column."""
    for item in items:
        if isinstance(item, Mapping) and "is" in item:
            for more in _each(item["for"], here, asked):
                for inner in item["is"]:
                    yield inner, {**keys, **more}, True
        else:
            yield item, keys, False


def _each(keys: Any, here: Sequence[Row], asked: Asked) -> list[dict[str, object]]:
    """List the combinations of some keys' values, present in rows or given by the YAML."""
    if isinstance(keys, Mapping):
        lists = [
            _only_asked(key, values, asked) if values else _order(key, here, asked)
            for key, values in keys.items()
        ]
        return [dict(zip(keys, one, strict=True)) for one in product(*lists)]
    present = {tuple(r.get(key) for key in keys) for r in here} if keys else {()}
    orders = [_order(key, here, asked) for key in keys]
    return [dict(zip(keys, one, strict=True)) for one in product(*orders) if one in present]


def _order(key: str, here: Sequence[Row], asked: Asked) -> list[object]:
    """List the values of a key in the selected order, others in the order of the rows."""
    present = list(dict.fromkeys(r[key] for r in here if r.get(key) is not None))
    order = _asked(asked, key) if key in ("data", "method") else []

    def rank(value: object) -> int:
        begins = [number for number, one in enumerate(order) if str(value).startswith(one)]
        exact = [number for number, one in enumerate(order) if value == one]
        return (exact or begins or [len(order)])[0]

    return sorted(present, key=rank)


def _only_asked(key: str, values: Sequence[object], asked: Asked) -> list[object]:
    """Leave out methods that are not selected."""
    choices = asked.table.methods if key == "method" else {}
    return [value for value in values if value not in choices or value in asked.methods]


def _asked(asked: Asked, key: str) -> Sequence[str]:
    return {
        "data": asked.data,
        "model": asked.models,
        "method": asked.methods,
        "table": asked.tables,
    }[key]


def matching(rows: Sequence[Row], wanted: Values) -> list[Row]:
    """Return the rows that have these entries."""
    return [
        r
        for r in rows
        if all(
            r.get(key) in value if isinstance(value, list) else r.get(key) == value
            for key, value in wanted.items()
        )
    ]


# Figures as text ----------------------------------------------------------------------------------


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Write a Markdown table, line by line."""
    head = [columns, ["---"] * len(columns)]
    return ["| " + " | ".join(cells) + " |" for cells in [*head, *lines]]


def show_pictures(names: Sequence[str]) -> list[str]:
    """Name the pictures, if there are any: a table may be passed on without them."""
    shown = ", ".join(f"`{name}`" for name in names)
    return ["## Pictures", f"`flower-graph reproduce` draws {shown}."] if names else []


# Means with their deviations: scale, and format
SPREADS = {"accuracy": (1, ".3f"), "percent": (100, ".1f"), "points": (100, "+.1f")}
SPREADS |= {"number": (1, ".2f"), "change": (1, "+.2f")}  # in the unit of the data
ALONE = ("paired", "winner", "paper-deviation", "reached", "positive", "above", "setting", "seeds")
FORMATS = (*SPREADS, "mean", "paper", "key", *ALONE)


def formatted(how: str, rows: Sequence[Row | None]) -> str:
    """Format figures as the page says, such as ``accuracy``, ``mean:.3f``, ``paper:.1f:100``."""
    name, _, detail = how.partition(":")
    if name.endswith("→"):
        return " → ".join(formatted(name[:-1], [r]) for r in rows)
    one_of("format", name, FORMATS)
    if name == "seeds":  # one number, or one for each where they differ
        counts = [0 if r is None else len(r["seeds"]) for r in rows]
        return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    if name == "winner":
        return _winner([r for r in rows if r is not None])
    first = next((r for r in rows if r is not None), None)
    return NONE if first is None else _written(name, detail, first)


def _winner(rows: Sequence[Row]) -> str:
    """Name the method with the best mean, and those that do not differ from it significantly."""
    best = max(rows, key=lambda r: merit(measure_of(r), r["mean"]), default=None)
    if best is None:
        return NONE
    others = [r for r in rows if r is not best]
    near = [
        r["method"] + cut_off([r])
        for r, p in zip(others, holm([_chance(best, r) for r in others]), strict=True)
        if p is None or p >= MOST_CHANCE
    ]
    beside = f" (not apart: {', '.join(near)})" if near else ""
    return str(best["method"]) + cut_off([best]) + beside


def _chance(best: Row, other: Row) -> float | None:
    """Return the p value of the difference of two rows, paired by seed."""
    ours, theirs = by_seed(best), by_seed(other)
    chance: float | None = paired([*differences(ours, theirs).values()] or [0.0])["p"]
    return chance


def _written(name: str, detail: str, r: Row) -> str:
    """Format one row's figure."""
    if name in ("mean", "paper", "key"):
        key, form = (name, detail) if name != "key" else detail.split(":", 1)
        form, _, scale = form.partition(":")
        value = r.get(key)
        if value is None or not isfinite(value):
            return NONE
        return format(float(scale or 1) * value, form)
    if name in SPREADS:
        times, form = SPREADS[name]
        # One seed alone has no deviation.
        spread = f" ± {format(times * r['std'], form.lstrip('+'))}" if len(r["seeds"]) > 1 else ""
        return format(times * r["mean"], form) + spread
    if name == "paired":  # the difference, p as it is and by Holm, how many seeds agree in sign
        chance, holms = (NONE if r[key] is None else f"{r[key]:.2g}" for key in ("p", "holm"))
        agree = f"{r['agree']} of {len(r['values'])}"
        return f"{_written(detail or 'points', '', r)} (p {chance}, Holm {holms}, {agree})"
    if name == "setting":  # laid over the config, of rows that something was trained for
        laid = [one for one in r["settings"]["overrides"] if one.startswith(f"{detail}=")]
        return str(laid[-1].partition("=")[2]) if laid and "rounds" in r else NONE
    if name == "above":
        return "yes" if r["mean"] > float(detail) else "no"
    if name == "positive":
        return f"{sum(v > 0 for v in r['values'])} of {len(r['values'])}"
    if r["paper"] is None:
        return NONE
    if name == "reached":
        return "yes" if r["mean"] >= r["paper"] else "no"
    return f"{r['paper']:.4f} ± {r['paper-std']:.4f}"
