"""What is not Flower's public interface goes through one module, which says what is missing."""

import ast
import re
import tomllib
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.serverapp.strategy import Strategy

from flower_graph import flower_compat
from flower_graph.errors import FlowerVersionError
from flower_graph.lazy import declared
from flower_graph.server.round_loop import RoundLoop

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flower_graph", "strategies", "apps", "deploy", "benchmarks", "examples", "tests")
PUBLIC = ("app", "clientapp", "clientapp.mod", "serverapp", "serverapp.strategy")
DOCUMENTED = {f"flwr.{name}" for name in PUBLIC}
INNER = ("TaskIdentity._", "metadata.__dict__", "_registered_funcs")  # attributes, not imports
NAMES = declared(flower_compat.__name__)


def is_public(module: str, name: str) -> bool:
    return module in DOCUMENTED and name in import_module(module).__all__


def private_names(source: str) -> set[str]:
    """Return what a source imports of Flower that Flower does not document."""
    found = set()
    for node in ast.walk(ast.parse(source if "flwr" in source else "")):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.startswith("flwr.")}
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "flwr":
            module = str(node.module)
            names = {one.name for one in node.names if not is_public(module, one.name)}
            found |= {f"{module}.{name}" for name in names - {"__version__"}}
    return found | {part for part in INNER if part in source}


def test_an_answer_whose_objects_are_gone_is_noticed_whatever_flowers_grid_says_of_it() -> None:
    a = SimpleNamespace
    about = a(message_id="reply", reply_to_message_id="request", src_node_id=7)
    trees = [a(object_id="reply", children=[])]
    told = a(messages_list=[a(metadata=about)], message_object_trees=trees)
    nothing = a(object_found=False, object_available=False, object_content=b"")
    grid = flower_compat.HttpGrid(token="secret")
    grid._run = a(run_id=1)
    grid._client = a(PullMessages=lambda request: told, PullObject=lambda request: nothing)
    replies, lost = flower_compat.pull(grid, ["request"])
    assert lost == {"request": 7} if not replies else [reply.has_error() for reply in replies]
    assert len(replies) + len(lost) == 1


def test_no_other_module_names_what_flower_does_not_document() -> None:
    # One benchmark measures Flower's older interface, the only one that SecAgg+ has
    older = ROOT / "benchmarks" / "averages.py"
    spared = {Path(flower_compat.__file__), Path(__file__), older}
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} - spared
    found = {
        str(p): names for p in paths if (names := private_names(p.read_text(encoding="utf-8")))
    }
    assert found == {}
    assert len(paths) > 400


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_not_public(name: str) -> None:
    module, there = NAMES[name]
    assert getattr(flower_compat, name) is getattr(import_module(module), there)
    assert not is_public(module, there)


def test_a_client_is_found_where_flower_has_moved_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_compat, "declared", lambda _: {"NumPyClient": ("flwr.gone", "N")})
    monkeypatch.setattr(flower_compat, "MOVED", {"NumPyClient": ("flwr.gone.too", "queue")})
    monkeypatch.setattr("queue.N", 5, raising=False)
    assert flower_compat.NumPyClient == 5  # type: ignore[comparison-overlap]


def test_strategies_start_as_flowers_do() -> None:
    """Flower 1.43 has ``should_stop`` too, which is then compared; it stands last, as ours."""
    flowers, ours = (list(signature(one.start).parameters) for one in (Strategy, RoundLoop))
    assert ours[: len(flowers)] == flowers
    assert [*flowers, "should_stop"][:9] == ours[:9]


def test_what_is_gone_is_named_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"Run": ("flwr.no_such", "Run"), "SType": ("flwr.common.constant", "NoSuchName")}
    monkeypatch.setattr(flower_compat, "declared", lambda _: gone)
    monkeypatch.setattr(flower_compat, "_installed", lambda: "1.99.1")
    for name, place in (("Run", "flwr.no_such.Run"), ("SType", "flwr.common.constant.NoSuchName")):
        with pytest.raises(FlowerVersionError, match=f"{place}.*1.99"):
            getattr(flower_compat, name)
        with pytest.raises(ImportError, match=r"tested.*1\.39.*1\.42"):
            exec(f"from flower_graph.flower_compat import {name}")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flower_compat.nothing


def test_the_versions_that_are_tried_are_those_that_are_said() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = f">={flower_compat.OLDEST}"
    assert f"flwr[simulation]{wanted}" in project["dependencies"]
    assert project["optional-dependencies"]["dp"] == [f"flwr[dp]{wanted}"]
    oldest, newest = ROOT / ".ci" / "constraints-oldest.txt", ROOT / "constraints.txt"
    for file, version in ((oldest, flower_compat.OLDEST), (newest, flower_compat.NEWEST)):
        text = file.read_text(encoding="utf-8")
        assert re.search(rf"^flwr=={re.escape(version)}\.\d+$", text, re.MULTILINE)
