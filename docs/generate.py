"""Make the tables of the pages of ``docs/reference/`` from what code and tests declare.

A page's prose is written by hand. Its tables stand between ``<!-- generated: NAME -->`` and
``<!-- end -->``: they are filled in when the site is built (``make docs``), and are not in the
repository.
"""

import argparse
import ast
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any

import flower_graph
from flower_graph.apps.cli.main import make_parser
from flower_graph.config.app_keys import SETTINGS
from flower_graph.config.common import RunConfig
from flower_graph.config.rules import Rule
from flower_graph.config.schema import Setting, settings_of
from flower_graph.lazy import declared
from flower_graph.method.registry import DEFAULT, known_apps, schema_of
from flower_graph.wire.codec import Field, Numbers, Part, Word, fields_of

REFERENCE = Path(__file__).resolve().parent / "reference"
PROMISES = Path(__file__).resolve().parents[1] / "tests" / "hostile" / "promises.json"
LIARS = PROMISES.with_name("liars.json")
ADVERSARIES = PROMISES.parents[1] / "privacy" / "adversaries.json"
MARKED = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)

# The order of keys that several methods have
SECTIONS = ("task", "partition", "links", "model", "strategy")


def markdown(head: str, rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table."""
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([head, re.sub(r"[^|]+", "---", head), *lines, ""])


def configuration(name: str) -> str:
    """Make one table of keys: of ``all`` methods, of ``several``, of one, or of the run config."""
    if name == "run config":
        pairs = ((f"`{key}`", f"`{name}`") for key, name in SETTINGS.items())
        return markdown("| in the run config | setting |", pairs)
    schemas = {app: settings_of(schema_of(app)) for app in known_apps()}
    if name == "all":
        return _table((setting, _defaults(setting, schemas)) for setting in _shared())
    groups = _groups(schemas)
    if name == "several":
        rows = [(setting, _by_app(found)) for setting, found in groups if len(found) > 1]
        return _table(sorted(rows, key=lambda row: SECTIONS.index(row[0].key.partition(".")[0])))
    own = [found[name] for _, found in groups if list(found) == [name]]
    return _table((setting, _value(setting.default)) for setting in own)


def _shared() -> list[Setting]:
    return [setting for setting in settings_of(RunConfig) if setting.key != "strategy.name"]


def _groups(schemas: dict[str, list[Setting]]) -> list[tuple[Setting, dict[str, Setting]]]:
    """Give settings that are not all methods', each with the methods that have just that one."""
    shared = {setting.key: setting for setting in _shared()}
    groups: list[tuple[Setting, dict[str, Setting]]] = []
    for app, settings in schemas.items():
        for setting in settings:
            if setting.key in shared and _same(setting, shared[setting.key]):
                continue
            like = [found for first, found in groups if _same(setting, first)]
            if like:
                like[0][app] = setting
            else:
                groups.append((setting, {app: setting}))
    return groups


def _same(setting: Setting, other: Setting) -> bool:
    parts = (setting.key, setting.rules, setting.help)
    return parts == (other.key, other.rules, other.help)


def _by_app(found: dict[str, Setting]) -> str:
    """Write the methods that have a setting, each with its default."""
    defaults: dict[str, list[str]] = {}
    for app, setting in found.items():
        defaults.setdefault(_value(setting.default), []).append(f"`{app}`")
    return "; ".join(f"{', '.join(apps)}: {default}" for default, apps in defaults.items())


def _defaults(setting: Setting, schemas: dict[str, list[Setting]]) -> str:
    """Write the default, and behind it those of methods that have another."""
    if setting.key == "app":
        return _value(DEFAULT)
    other = {}
    for app, settings in schemas.items():
        own = next(one for one in settings if one.key == setting.key)
        if own.default != setting.default:
            other[app] = own
    return "; ".join(filter(None, [_value(setting.default), _by_app(other)]))


def _table(rows: Iterable[tuple[Setting, str]]) -> str:
    cells = ((f"`{one.key}`", default, _allowed(one), one.help) for one, default in rows)
    return markdown("| key | default | allowed | meaning |", cells)


def _allowed(setting: Setting) -> str:
    if setting.key == "app":
        return ", ".join(f"`{app}`" for app in known_apps()) + ", or `package.module`"
    words = "; ".join(map(_words, setting.rules)) or setting.wanted
    is_open = setting.rules and setting.wanted.endswith(" or null")
    return words + (", or null" if is_open else "")


def _words(rule: Rule) -> str:
    if not rule.allowed:
        return rule.words
    also = rule.words.removeprefix(f"one of {', '.join(rule.allowed)}")
    return ", ".join(f"`{word}`" for word in rule.allowed) + also


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list):
        return ", ".join(_value(each) for each in value)
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return f"`{value}`" if isinstance(value, str) else str(value)


def messages(name: str) -> str:
    """Make one table of the entries that messages declare; ``group``: they travel with others."""
    group = name.startswith("group ")
    module, _, classes = name.removeprefix("group ").partition(": ")
    source = import_module(f"flower_graph.{module}")
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for one in classes.split():
        for way, kinds, field in _fields(getattr(source, one)):
            if not (field.key or field.group):
                continue  # another message's entries, which the prose names
            cells = ("", "", f"[{field.group.lower()}](#{_anchor(field.group)})", "")
            if not field.group:
                cells = _cells(field, way, "query" in kinds)
            told = rows.setdefault(cells, {}).setdefault(way, [])
            told += [] if group else [kind for kind in kinds if kind not in told]
    found: list[tuple[str, ...]] = []
    for cells, ways in rows.items():
        told = list(ways.items())
        if len(told) == 2 and told[0][1] == told[1][1]:
            told = [("both", told[0][1])]
        named = ((way, ", ".join(f"`{kind}`" for kind in kinds)) for way, kinds in told)
        found.append(("; ".join(f"**{way}** {kinds}".rstrip() for way, kinds in named), *cells))
    return entries(found)


def entries(rows: Iterable[tuple[str, ...]]) -> str:
    """Write a table of entries under their messages: (messages, record, key, type, says)."""
    under: dict[str, list[tuple[str, ...]]] = {}
    for message, record, key, kind, says in rows:
        name = key if record in ("", "`config`") else f"{record[:-1]}/{key[1:]}"
        cells = (name or kind, kind if name else "", says)
        under.setdefault(message, [(message, "", "")]).append(cells)
    return markdown("| key | type | what it is |", [row for own in under.values() for row in own])


def _fields(declared: Any) -> Iterator[tuple[str, tuple[str, ...], Field]]:
    """Give all fields of a message, or of a part, with the way and the messages that have them."""
    ways: tuple[tuple[str, tuple[str, ...]], ...] = (("down", ()),)
    if not isinstance(declared, Part):
        ways = (("down", declared.down), ("up", declared.up))
    for way, kinds in ways:
        if not kinds and not isinstance(declared, Part):
            continue
        for key, word in getattr(declared, "fixed", {}).items():
            yield way, kinds, Word(key, f"`{word}`")
        for field in _commented(declared):
            # Entries that a kind of field has besides its own
            others = [size for _, size in getattr(field, "sent", ())]
            others += [one for one in vars(type(field)).values() if isinstance(one, Field)]
            others += [field.pointer] if getattr(field, "pointer", None) else []
            if isinstance(field, Part):
                others += () if field.key else _commented(field)
                field = replace(field, group=field.key)
            yield from ((way, kinds, one) for one in (*others, field))


def _commented(declared: Any) -> list[Field]:
    """Give the fields of a message, or of a part, with what their comments say."""
    if isinstance(declared, Part):
        fields, cls = declared.parts, None if declared.fields else declared.make
    else:
        fields, cls = fields_of(declared), declared
    words = _comments(cls) if inspect.isclass(cls) else {}
    return [replace(f, says=f.says or words.get(name, "")) for name, f in fields.items()]


def _comments(cls: type) -> dict[str, str]:
    """Give what the comments behind, or else above, the fields of a class and its bases say."""
    found: dict[str, str] = {}
    for one in (one for one in cls.__mro__ if one.__module__.startswith("flower_graph.")):
        lines = inspect.getsource(one).splitlines()
        for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _, mark, words = lines[node.lineno - 1].partition("  # ")
                above = reversed(lines[: node.lineno - 1])
                told = [*takewhile(lambda line: line.startswith("    # "), above)]
                words = words if mark else " ".join(line[6:] for line in reversed(told))
                found.setdefault(node.target.id, words)
    return found


def _type(field: Field) -> str:
    """Give the type and the shape of an entry."""
    if isinstance(field, Numbers):
        return f"list of {'int' if field.whole else 'float'}"
    kind = getattr(field, "dtype", field.type)
    shape = getattr(field, "shape", "")
    return f"{kind} `[{', '.join(shape.split())}]`" if shape else kind


def _cells(field: Field, way: str, is_query: bool) -> tuple[str, str, str, str]:
    record, slash, key = field.key.partition("/")
    if not slash:
        is_metric = field.is_number and way == "up" and not is_query
        record, key = "metrics" if is_metric else "config", field.key
    return f"`{record}`", f"`{key}`", _type(field), field.says


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def promises(guide: str) -> str:
    """Make the table of one guide: words that promise something, what keeps and what attacks them.

    A function that keeps a promise stands before its tests, where the table names any.
    """
    if guide == "adversaries":
        return _adversaries()
    if guide == "liars":
        return _liars()
    attacks: dict[str, list[str]] = json.loads(PROMISES.read_text(encoding="utf-8"))[guide]
    rows = [(f'"{words}"', *_kept(named)) for words, named in attacks.items()]
    if not any(kept for _, kept, _ in rows):
        return markdown("| words | tests |", ((words, tests) for words, _, tests in rows))
    return markdown("| words | kept by | tests |", rows)


def _kept(named: list[str]) -> tuple[str, str]:
    """Write the functions that keep a promise, and the tests that attack it."""
    functions = [one.split("::") for one in named if not one.startswith("tests/")]
    kept = ", ".join(f"`{name}` in `{module}`" for module, name in functions)
    return kept, _listed([one for one in named if one.startswith("tests/")])


def _liars() -> str:
    """Make the table of tests for each who lies, in docs/security.md."""
    shown: dict[str, dict[str, list[str]]] = json.loads(LIARS.read_text("utf-8"))
    rows = [
        # Links are the guide's
        (who, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", setting), _listed(tests))
        for who, settings in shown.items()
        for setting, tests in settings.items()
    ]
    return markdown("| who lies | setting | tests |", rows)


def _adversaries() -> str:
    """Make the table of tests for each adversary and setting on the pages on privacy."""
    shown: dict[str, dict[str, dict[str, list[str]]]] = json.loads(ADVERSARIES.read_text("utf-8"))
    rows = [
        (f"{page}.md", who, setting, _listed(tests))
        for page, adversaries in shown.items()
        for who, settings in adversaries.items()
        for setting, tests in settings.items()
    ]
    return markdown("| page | adversary | setting | tests |", rows)


def _listed(tests: list[str]) -> str:
    return ", ".join(f"`{test}`" for test in tests)


def commands(name: str) -> str:
    """Write each command's help under a heading; ``name`` is ``all``."""
    assert name == "all", name
    return "\n".join(
        f"## {one.prog}\n\n{said[:1].upper()}{said[1:]}.\n\n```text\n{one.format_help()}```\n"
        for one, said in _commands(make_parser())
    )


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Give all parsers that do something, those within others too, each with what it does."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {one.dest: one.help or "" for one in action._choices_actions}
            for word, own in action.choices.items():
                own.formatter_class = partial(argparse.HelpFormatter, width=88)
                inner = list(_commands(own))
                yield from inner or [(own, said[word])]


def names(where: str) -> str:
    """Have Sphinx describe public names: those of modules, or those after a colon of one module."""
    module, _, chosen = where.partition(": ")
    if chosen:
        return _described(f"flower_graph.{module}.{one}" for one in chosen.split())
    public = sorted(declared("flower_graph"))
    found = (one for one in public if _module(one).startswith(tuple(where.split())))
    return _described(f"flower_graph.{one}" for one in found)


def _module(name: str) -> str:
    """Give the module in which a public name stands, without the package's name."""
    value = getattr(flower_graph, name)
    module: str = value.__name__ if inspect.ismodule(value) else value.__module__
    return module.removeprefix("flower_graph.")


def _described(paths: Iterator[str]) -> str:
    lines = ["```{eval-rst}"]
    for path in paths:
        module, _, name = path.rpartition(".")
        value = getattr(import_module(module), name)
        if inspect.ismodule(value):
            lines += [f".. automodule:: {value.__name__}", "   :members:"]
        elif inspect.isclass(value):
            lines += [f".. autoclass:: {path}", "   :members:"]
        else:
            kind = "function" if callable(value) else "data"
            lines += [f".. auto{kind}:: {path}"]
        lines.append("")
    return "\n".join([*lines, "```\n"])


# page: what makes its tables
PAGES: dict[str, Callable[[str], str]] = {
    "api": names,
    "command-line": commands,
    "configuration": configuration,
    "messages": messages,
    "promises": promises,
}


def filled(page: str, text: str) -> str:
    """Give a page's text with its tables, if it is one that has such."""
    if page not in PAGES:
        return text
    return MARKED.sub(lambda found: found[1] + PAGES[page](found[2]) + found[3], text)


def generate(page: str) -> str:
    """Give a page of this folder with its tables."""
    return filled(page, (REFERENCE / f"{page}.md").read_text(encoding="utf-8"))
