"""Tables of promises, adversaries and liars: what is on the pages, and tests that show it."""

import ast
import json
from collections.abc import Iterator
from typing import Any

import pytest
from doc_helpers import DOCS
from federation import NAMES

ROOT = DOCS.parent


def table(name: str) -> Any:
    return json.loads((ROOT / "tests" / name).read_text(encoding="utf-8"))


# guide: words that promise something: functions that keep it, tests that attack it
PROMISES = table("hostile/promises.json")
# page: adversary: setting: tests that show what it learns
SHOWN = table("privacy/adversaries.json")
# who lies: setting: files of tests
LIARS = table("hostile/liars.json")
WHOLE = ("security", "secure-sum")  # guides of which each section that promises is here
KEPT = (*WHOLE, "reference/protocol")  # pages whose promises name the functions that keep them
PROMISE_NOTHING = {"Parts", "Supply chain"}
OF_ALL = ("network in between", "SuperLink that also delivers the app")  # whatever the method
ADVERSARIES = (
    "curious server",
    "deviating server",
    "curious server with *c* SuperNodes",
    "clients alone",
)


def named_in(part: Any) -> Iterator[str]:
    for one in part.values() if isinstance(part, dict) else part:
        if isinstance(one, str):
            yield one
        else:
            assert one or part is LIARS["a server and more than *k*"]  # of whom nothing is to show
            yield from named_in(one)


def defined_in(place: str) -> set[str]:
    """Return the functions of a file, methods behind their class; or all names in a folder."""
    path, found = ROOT / place, set[str]()
    for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            inside, of = [node], ""
            if isinstance(node, ast.ClassDef):
                inside, of = node.body, "" if path.is_dir() else f"{node.name}."
            found |= {of + one.name for one in inside if isinstance(one, ast.FunctionDef)}
    return found


def test_every_test_and_function_that_a_table_names_is_there() -> None:
    there = dict[str, set[str]]()
    for one in (*named_in(PROMISES), *named_in(SHOWN), *named_in(LIARS)):
        place, _, name = one.partition("::")
        if place not in there:
            there[place] = defined_in(place)
        assert not name or name in there[place], one


def test_every_promise_of_security_names_what_keeps_it_and_what_attacks_it() -> None:
    for name in KEPT:
        for words, named in PROMISES[name].items():
            tests = [one for one in named if one.startswith("tests/")]
            assert tests and len(tests) < len(named), words


def one_line(text: str) -> str:
    """Return a text with single spaces in the place of line breaks."""
    return " ".join(text.split())


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PROMISES)
def test_every_promise_is_on_its_page(name: str) -> None:
    assert [words for words in PROMISES[name] if words not in one_line(page(name))] == []


@pytest.mark.parametrize("name", WHOLE)
def test_every_section_has_its_promises_in_the_table(name: str) -> None:
    for section in page(name).split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        promises = any(words in one_line(body) for words in PROMISES[name])
        assert promises is not (title in PROMISE_NOTHING), title


def rows(name: str, head: str) -> list[tuple[str, ...]]:
    """Read the table of a page that has this head, by cells."""
    _, _, part = page(name).partition(head)
    lines = part.partition("\n\n")[0].splitlines()
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


LEARNS = "| adversary | setting | learns |\n|---|---|---|\n"


@pytest.mark.parametrize("name", SHOWN)
def test_every_row_says_what_is_learnt(name: str) -> None:
    named = [(who, setting) for who, settings in SHOWN[name].items() for setting in settings]
    assert [(who, setting) for who, setting, learns in rows(name, LEARNS) if learns] == named


def test_every_adversary_meets_every_method_and_there_is_no_other() -> None:
    for name in NAMES:
        assert {who for who, *_ in rows(f"privacy/{name}", LEARNS)} == set(ADVERSARIES)
    assert {who for who, *_ in rows("privacy", LEARNS)} - set(ADVERSARIES) == set(OF_ALL)
    assert set(SHOWN) == {"privacy", *(f"privacy/{name}" for name in NAMES)}


def test_each_liar_has_its_row() -> None:
    found = rows("security", "|---|---|---|---|\n")
    assert [row[:2] for row in found] == [
        (who, setting) for who, settings in LIARS.items() for setting in settings
    ]
    assert all(learn and stays for *_, learn, stays in found)
    assert "(docs/security.md#who-lies-and-what-follows)" in (ROOT / "SECURITY.md").read_text()
