"""Collect the messages that the code raises or logs, from its source."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGGED = {"warning": "warning", "error": "log", "info": "log", "warn": "warning"}
# Functions whose second argument is a message, with what the page calls it
SAID = {"told": "to the server", "Rejected": "reply refused"}
FOLDERS = ("flower_graph", "strategies", "apps")
MOST = 12  # sentences that one call may have
LONGEST = 40  # characters of a field

Part = tuple[bool, str]  # whether it is a field, and its words
Sentence = tuple[Part, ...]


@dataclass(frozen=True)
class Told:
    """One message: where it is made, what is raised or logged with it, and its words."""

    module: str
    line: int
    kind: str
    sentence: Sentence

    @property
    def words(self) -> str:
        """The sentence, its fields in braces."""
        return " ".join("".join(f"{{{w}}}" if field else w for field, w in self.sentence).split())

    @property
    def says_something(self) -> bool:
        """Whether the sentence has a word besides its fields."""
        return any(re.search("[a-z]{2}", words) for field, words in self.sentence if not field)


class Function:
    """A function, or the module's own lines, with the names that it assigns."""

    def __init__(self, node: ast.FunctionDef | None, module: Module) -> None:
        self.node, self.module = node, module
        self.name = "" if node is None else node.name
        self.parameters: list[str] = []
        if node is not None:
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            self.parameters = [one.arg for one in given if one.arg not in ("self", "cls")]
        self.values: dict[str, list[ast.expr]] = {}
        for part in module.tree.body if node is None else ast.walk(node):
            for name, value in _assigned(part):
                known = self.values.setdefault(name, [])
                if known and isinstance(part, ast.AugAssign):
                    value = ast.BinOp(known.pop(), ast.Add(), value)
                known.append(value)

    def assigned(self, name: str) -> list[ast.expr]:
        """Give all that is assigned to a name here, or else by the module."""
        if name in self.parameters:
            return []
        return self.values.get(name) or self.module.own.values.get(name, [])

    def returned(self) -> list[ast.expr]:
        """Give all that the function returns."""
        nodes = ast.walk(self.node) if self.node is not None else iter(())
        return [node.value for node in nodes if isinstance(node, ast.Return) and node.value]


class Module:
    """One file of the source."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.tree = name, ast.parse(source)
        self.own = Function(None, self)
        self.functions: dict[str, Function] = {}  # methods too
        self.calls: list[tuple[Function, ast.Call]] = []
        self._read(self.tree, self.own)

    def _read(self, node: ast.AST, function: Function) -> None:
        if isinstance(node, ast.FunctionDef):
            function = self.functions[node.name] = Function(node, self)
        if isinstance(node, ast.Call):
            self.calls.append((function, node))
        for child in ast.iter_child_nodes(node):
            self._read(child, function)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Give the names that a statement, or `:=`, assigns, with the value."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)):
        targets = [node.target]
    else:
        return
    for target in targets:
        if isinstance(target, ast.Name) and node.value is not None:
            yield target.id, node.value


# Sentences ----------------------------------------------------------------------------------------


def sentences(value: ast.expr, function: Function, depth: int = 3) -> list[Sentence]:
    """Give the texts that an expression may have; what is not known before a run is a field."""
    if isinstance(value, ast.Constant):
        return [((False, value.value),)] if isinstance(value.value, str) else [()]
    if isinstance(value, ast.JoinedStr):
        return _joined(value.values, function, depth)
    if isinstance(value, ast.FormattedValue):
        found = [] if value.format_spec else sentences(value.value, function, depth)
        return found if found and not _is_field(found) else [_field(value.value)]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _joined([value.left, value.right], function, depth)
    if isinstance(value, ast.IfExp):
        return [
            one for way in (value.body, value.orelse) for one in sentences(way, function, depth)
        ]
    return _looked_up(value, function, depth) or [_field(value)]


def _joined(parts: Sequence[ast.expr], function: Function, depth: int) -> list[Sentence]:
    ways = [sentences(part, function, depth) for part in parts]
    return [sum(one, ()) for one in islice(product(*ways), MOST)]


def _looked_up(value: ast.expr, function: Function, depth: int) -> list[Sentence]:
    """Give the texts of a name that is assigned, or of a function that returns them."""
    given: list[ast.expr] = []
    if depth and isinstance(value, ast.Name):
        given = function.assigned(value.id)
    elif depth and isinstance(value, ast.Call):
        own = function.module.functions.get(_name(value.func), function)
        given, function = own.returned() if own is not function else [], own
    found = [one for way in given for one in sentences(way, function, depth - 1)]
    return found[:MOST] if found and not _is_field(found) else []


def _field(value: ast.expr) -> Sentence:
    words = ast.unparse(value).replace("self.", "")
    return ((True, words if len(words) <= LONGEST else words[: LONGEST - 3] + "..."),)


def _is_field(found: Sequence[Sentence]) -> bool:
    """Whether no text of these has words of its own."""
    texts = [words for one in found for field, words in one if not field]
    return not any(re.search("[a-z] |[a-z][^a-z]* [a-z]", words) for words in texts)


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


# Messages -----------------------------------------------------------------------------------------


def collect(modules: Sequence[Module]) -> list[Told]:
    """Collect the messages of modules, in the order of the source."""
    calls = [one for module in modules for one in module.calls]
    makers = Makers(modules)
    found: dict[Told, None] = {}
    for function, call in calls:
        for told in _direct(function, call):
            found[told] = None
            makers.note(function, told)
    for function, call in calls:
        filled = dict(makers.filled(function, call))
        found |= dict.fromkeys(filled)
        makers.general |= set(filled.values())
    order = {module.name: number for number, module in enumerate(modules)}
    kept = [one for one in found if one not in makers.general and one.says_something]
    return sorted(kept, key=lambda one: (order[one.module], one.line))


class Makers:
    """Functions that make a message of words that they are given."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.defined = Counter(name for module in modules for name in module.functions)
        self.made: dict[str, list[tuple[Function, Told]]] = {}
        self.general: set[Told] = set()  # messages that callers give words to

    def note(self, function: Function, told: Told) -> None:
        """Note a message that has an argument of its function as a field."""
        if any(field and words in function.parameters for field, words in told.sentence):
            self.made.setdefault(function.name, []).append((function, told))

    def filled(self, function: Function, call: ast.Call) -> Iterator[tuple[Told, Told]]:
        """Give what a call makes of such messages, each with the message that it fills."""
        name = _name(call.func)
        for maker, told in self.made.get(name, []):
            if self.defined[name] > 1 and maker.module is not function.module:
                continue  # the name alone does not say which function is called
            names = dict(zip(maker.parameters, call.args, strict=False))
            names |= {word.arg: word.value for word in call.keywords if word.arg}
            given = {key: sentences(value, function) for key, value in names.items()}
            if all(_is_field(one) for key, one in given.items() if (True, key) in told.sentence):
                continue
            ways = [
                given.get(words, [(part,)]) if part[0] else [(part,)]
                for part in told.sentence
                for words in [part[1]]
            ]
            for one in islice(product(*ways), MOST):
                whole: Sentence = sum(one, ())
                yield Told(function.module.name, call.lineno, told.kind, whole), told


def _direct(function: Function, call: ast.Call) -> Iterator[Told]:
    """Give the messages of a call that makes an error or writes to a log."""
    name = _name(call.func)
    if name in SAID:
        kind, place = SAID[name], 1
    elif name in LOGGED and ast.unparse(call.func).lower().startswith(("log.", "warnings.")):
        kind, place = LOGGED[name], 0
    elif name.endswith("Error"):
        kind, place = name, 0
    else:
        return
    if len(call.args) > place:
        for one in sentences(call.args[place], function):
            yield Told(function.module.name, call.lineno, kind, one)


@cache
def _all() -> list[Told]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")) for file in files]
    return collect([Module(name, text) for name, text in texts])


def table(folder: str) -> str:
    """Write the table of a folder's messages."""
    lines, seen, last = ["| module | error | message |", "|---|---|---|"], set(), ""
    for one in _all():
        module = one.module.removesuffix(".py").removeprefix(f"{folder}/")
        row = one.kind, one.words.replace("|", "\\|").replace("`", "'")
        if not one.module.startswith(f"{folder}/") or (module, *row) in seen:
            continue
        seen.add((module, *row))
        shown = f" {module} " if module != last else " "
        lines.append(f"|{shown}| {row[0]} | `{row[1]}` |")
        last = module
    return "\n".join([*lines, ""])
