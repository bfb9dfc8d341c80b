"""Pages whose tables come from declarations say what these say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from doc_helpers import DOCS

from benchmarks import page as performance
from flower_graph.config.registry import known_apps, schema_of
from flower_graph.config.schema import known_keys, settings_of


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_what_is_generated(generator: ModuleType) -> None:
    for page in generator.PAGES:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert generator.generate(page) == text, f"python docs/generate.py {page}"


def test_the_configuration_page_has_every_key_of_every_method_and_no_other() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    _, shared, several, *own = text.split("<!-- generated: ")
    for app, table in zip(known_apps(), own, strict=True):
        ours = [row for row in several.splitlines() if re.search(f"`{app}`[,:]", row)]
        rows = [*shared.splitlines(), *ours, *table.splitlines()]
        named = [row.split("|")[1].strip(" `") for row in rows if row.startswith("| `")]
        assert set(named) == set(known_keys(schema_of(app)))


def test_every_setting_says_what_it_means() -> None:
    for app in known_apps():
        assert [setting.key for setting in settings_of(schema_of(app)) if not setting.help] == []


def test_the_pages_on_performance_are_made_of_the_results(tmp_path: Path) -> None:
    results = json.loads(performance.RESULTS.read_text(encoding="utf-8"))
    performance.write_pages(results, tmp_path / "performance.md")
    for name in ("performance.md", "results/performance/README.md"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), (
            "python -m benchmarks.page"
        )
