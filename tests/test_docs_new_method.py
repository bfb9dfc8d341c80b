"""The methods that docs/new-method.md writes run, as a package outside the repository."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flower_graph.apps.cli.main import main
from flower_graph.storage.reading import read_packed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "new-method.md"
FILES = re.compile(r"`([\w/-]+\.(?:py|yaml))`:\n\n```(?:python|yaml)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page's files into a folder of their own."""
    folder = tmp_path_factory.mktemp("outside")
    for name, text in FILES.findall(PAGE.read_text(encoding="utf-8")):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def inside(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in that folder, as `PYTHONPATH=. flower-graph` is."""
    monkeypatch.chdir(package)
    monkeypatch.syspath_prepend(package)


@pytest.mark.slow
def test_the_ditto_of_the_page_is_the_app_that_ships(package: Path) -> None:
    words = ["data.name=cora-linqs", "data.features=presence", "strategy.local_epochs=3"]
    words += ["strategy.weight_decay=0", "rounds=2", "device=cpu", "--quiet"]
    (package / "mine.yaml").write_text("app: my_methods.ditto\n")
    (package / "theirs.yaml").write_text("app: ditto\n")
    for name in ("mine", "theirs"):
        assert main(["run", f"{name}.yaml", *words, "--out", name]) == 0
    mine, theirs = (
        json.loads((package / f"{name}/result.json").read_text()) for name in ("mine", "theirs")
    )
    # The page's loss is one mean, so that its clients train one by one.
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)


@pytest.mark.slow
def test_distillation_sends_no_weights(package: Path) -> None:
    command = "flower-graph run cut.yaml --app my_methods/distillation.py"
    assert command in PAGE.read_text()
    assert main([*command.split()[1:], "--out", "distilled", "rounds=2", "device=cpu"]) == 0
    result = json.loads((package / "distilled" / "result.json").read_text())
    assert result["bytes"]["up"]["weights"] < 2 * 6 * 600  # in two rounds, of six clients
    assert result["rejected"] == 0 and result["test-accuracy"] > 0.2


@pytest.mark.slow
def test_what_new_method_writes_passes_its_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-method", "fed_mine"]) == 0
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fed_mine.py"]
    subprocess.run(tests, check=True, capture_output=True)
    assert main(["run", "fed_mine.yaml", "--app", "fed_mine.py", "rounds=1", "--quiet"]) == 0


def test_new_method_takes_no_name_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-method", "fed_mine", "--out", "new"]) == 0
    for name in ("fed_mine", "ditto", "fed-mine", "class", "json"):
        assert main(["new-method", name, "--out", "new"]) == 2
        assert repr(name) in capsys.readouterr().err
    assert len(list(Path("new").iterdir())) == 3


def test_the_pages_command_runs_it(package: Path) -> None:
    assert "PYTHONPATH=. flower-graph run my.yaml" in PAGE.read_text()
    assert main(["run", "my.yaml", "--out", "out", "rounds=1", "device=cpu"]) == 0
    result = json.loads((package / "out" / "result.json").read_text())
    assert result["clients"] == 10
    assert result["rounds"] == 1
    assert 0.2 < result["test-accuracy"] <= 1


@pytest.mark.slow
def test_it_goes_on_and_predicts_only_where_it_is_given(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "my.yaml", "--out", "kept", "rounds=1", "checkpoint_every=1", "device=cpu"]
    assert main(words) == 0
    given = ["--app", "my_methods/fed_amp.py"]
    for more, code in (([], 2), (given, 0)):
        for module in [name for name in sys.modules if name.startswith("my_methods")]:
            monkeypatch.delitem(sys.modules, module)  # it is imported already
        assert main(["run", "--resume", "kept", "rounds=2", *more]) == code
    # In a process of its own, where nothing imported it
    script = Path(sys.executable).with_name("flower-graph")
    table = [script, "predict", "kept", "--client", "3", *given, "--out", "three.csv"]
    subprocess.run(table, check=True, capture_output=True)
    assert (package / "three.csv").is_file()


@pytest.mark.slow
def test_the_pages_table_is_run(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--out", "table", "--rounds", "1", "--seeds", "0"]
    assert main(["reproduce", "my_table.py", *short]) == 0
    assert {row["method"] for row in read_packed(package / "table/runs.json.xz")["rows"]} == {
        "FedAMP",
        "without pull",
    }
    page = (package / "table/table.md").read_text()
    assert re.search(r"^\| without pull.*\| 0\.\d{3}", page, re.MULTILINE), page
