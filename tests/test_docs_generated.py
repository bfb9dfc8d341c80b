"""Pages whose tables come from declarations say what these say."""

from __future__ import annotations

import importlib.util
import json
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


def test_the_configuration_page_has_every_key_of_every_method() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    tables = dict(
        zip(["before", "all", *known_apps()], text.split("<!-- generated: "), strict=True)
    )
    for app in known_apps():
        found = tables["all"] + tables[app]
        assert [key for key in known_keys(schema_of(app)) if f"| `{key}` |" not in found] == []


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
