"""Pages whose tables come from declarations or results say what these say, and they are whole."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from inspect import ismodule
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_helpers import DOCS

import flower_graph
from benchmarks import reliability
from benchmarks import run as benchmarks
from flower_graph.apps.cli.main import _COMMANDS
from flower_graph.config.schema import known_keys, settings_of
from flower_graph.lazy import declared
from flower_graph.method.registry import known_apps, schema_of

FAULTS: dict[str, dict[str, Any]] = json.loads(reliability.RESULTS.read_text(encoding="utf-8"))
# Only these have sums that nobody can take apart
SECURE = {"a client is killed between the stages of a secure sum": {"FedSCem", "PPFL-GNN"}}


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        yield importlib.import_module("generate")


def test_tables_can_be_made_and_are_not_committed(generator: ModuleType) -> None:
    for page in generator.PAGES:
        text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
        made = generator.generate(page)
        assert text == generator.MARKED.sub(r"\1\3", made)
        assert len(made) > len(text) + 1000


def test_every_public_name_and_command_is_on_its_page(generator: ModuleType) -> None:
    names, commands = generator.generate("api"), generator.generate("command-line")
    found = re.findall(r"^\.\. auto\w+:: flower_graph\.(\w+)$", names, re.MULTILINE)
    modules = {name for name in declared("flower_graph") if ismodule(getattr(flower_graph, name))}
    assert sorted([*found, *modules]) == sorted(declared("flower_graph"))
    assert names.count(".. automodule:: ") == len(modules)
    shown = set(re.findall(r"^## flower-graph ([\w-]+)", commands, re.MULTILINE))
    assert shown == set(_COMMANDS)


def test_the_configuration_page_has_every_key_of_every_method_and_no_other(
    generator: ModuleType,
) -> None:
    text = generator.generate("configuration")
    _, _, shared, several, *own = text.split("<!-- generated: ")
    for app, table in zip(known_apps(), own, strict=True):
        ours = [row for row in several.splitlines() if re.search(f"`{app}`[,:]", row)]
        rows = [*shared.splitlines(), *ours, *table.splitlines()]
        named = [row.split("|")[1].strip(" `") for row in rows if row.startswith("| `")]
        assert set(named) == set(known_keys(schema_of(app)))


def test_every_setting_says_what_it_means() -> None:
    for app in known_apps():
        assert [setting.key for setting in settings_of(schema_of(app)) if not setting.help] == []


def test_the_page_on_performance_is_made_of_the_results() -> None:
    results = json.loads(benchmarks.RESULTS.read_text(encoding="utf-8"))
    assert benchmarks.PAGE.read_text(encoding="utf-8") == benchmarks.page(results)


# Faults that tests noted -------------------------------------------------------------------------


def test_the_page_on_reliability_has_the_table_of_the_results() -> None:
    page = reliability.PAGE.read_text(encoding="utf-8")
    written = page.partition(reliability.BEGIN)[2].partition(reliability.END)[0]
    assert written.strip() == reliability.table(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_method_was_tried(fault: str) -> None:
    assert set(FAULTS[fault]) >= SECURE.get(fault, set(reliability.METHODS))


def test_every_test_that_is_named_is_there() -> None:
    named = {one["test"] for methods in FAULTS.values() for one in methods.values()}
    for test in named:
        file, _, name = test.partition("::")
        tree = ast.parse((DOCS.parent / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="marks"):
        reliability.write_page(page, FAULTS)


def test_methods_to_which_the_same_happened_share_a_row_in_their_order() -> None:
    one = {"happened": "nothing", "test": "tests/contracts/test_x.py::test_y"}
    other = {"happened": "something", "test": "tests/contracts/test_x.py::test_y"}
    text = reliability.table({"a fault": {"PPFL-GNN": one, "FedSCem": other, "nFedGNN": one}})
    assert text.splitlines() == [
        "## A fault",
        "",
        "| methods | what happened | test |",
        "| --- | --- | --- |",
        "| nFedGNN; PPFL-GNN | nothing | `test_x.py::test_y` |",
        "| FedSCem | something | `test_x.py::test_y` |",
    ]
