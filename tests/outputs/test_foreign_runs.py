"""A run's folder that somebody else made or spoiled: no code runs, every error is named."""

import csv
import io
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_files import in_json, in_lines
from run_folders import GRAPH, MODEL, SMALL, make_run

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.config import foreign
from flower_graph.config.foreign import Trust
from flower_graph.errors import ConfigError, OutputError
from flower_graph.method import registry
from flower_graph.method.compare import Comparison
from flower_graph.method.load import load_config
from flower_graph.method.run import latest_in
from flower_graph.outputs.build import build_module
from flower_graph.outputs.files import Predictions, as_text, read_models, table_of
from flower_graph.records.participation import MOST_CLIENTS, known_clients
from flower_graph.records.rounds import RoundReport, read_reports
from flower_graph.report.plots import Panel, curves_panel, draw_confusion, plot, svg

EVIL = """
from pathlib import Path
from torch import nn
Path({marker!r}).touch()
class Thing(nn.Module):
    pass
"""
OWN = """
from dataclasses import dataclass
from torch_geometric.nn import Sequential
from flower_graph.config.common import ModuleRunConfig
from flower_graph.method.module_method import ModuleMethod
from flower_graph.models import GCN

class Mine(GCN):
    pass

@dataclass
class Settings(ModuleRunConfig):
    app: str = "mine.of_mine"

class Method(ModuleMethod):
    name, schema = "mine.of_mine", Settings

METHOD = Method()
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the modules and methods that a test brings."""
    before = set(sys.modules)
    monkeypatch.setattr(foreign, "GIVEN", {})
    monkeypatch.setattr(registry, "GIVEN", foreign.GIVEN)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("evil", "mine", "of_mine"):
            del sys.modules[name]


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name the file that code in a run would make; ``evil`` can be imported, and makes it."""
    path, code = tmp_path / "marker", tmp_path / "code"
    code.mkdir()
    (code / "evil.py").write_text(EVIL.format(marker=str(path)))
    monkeypatch.syspath_prepend(code)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", own=False)


def say(folder: Path, **changes: Any) -> None:
    for path in folder.glob("clients/*/model.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "config.yaml"
    lines = [one for one in path.read_text().splitlines() if one.partition(":")[0] not in changes]
    path.write_text("\n".join([*lines, *(f"{k}: {json.dumps(v)}" for k, v in changes.items())]))


def commanded(*words: object) -> None:
    if code := main([*map(str, words)]):
        raise ConfigError(f"exit {code}")


def at_a_client(folder: Path) -> None:
    home = folder.parent / "home" / "outputs"
    home.mkdir(parents=True)
    (folder / "clients" / "0").rename(home / "run")
    latest_in(home.parent).model()


def predict_command(folder: Path) -> None:
    torch.save(GRAPH, folder.parent / "graph.pt")
    commanded("predict", folder, "--client", "0", "--data", folder.parent / "graph.pt")


def config_as_parent(folder: Path) -> None:
    (folder.parent / "mine.yaml").write_text("defaults: run/config.yaml\nrounds: 3\n")
    load_config(str(folder.parent / "mine.yaml"))


def resumed_without_traces(folder: Path) -> None:
    for one in folder.iterdir():
        if one.is_file() and one.name != "config.yaml":
            one.unlink()
    (folder / "clients").rename(folder.parent / "elsewhere")
    commanded("run", "--resume", folder)


# All that reads a run's models, and its settings
MODELS: dict[str, Callable[[Path], object]] = {
    "model": lambda run: fg.load_run(run).model(0),
    "predict": lambda run: fg.load_run(run).predict(**GRAPH, client=0),
    "files alone": lambda run: build_module(*read_models(run / "clients" / "0")),
    "at a client": at_a_client,
    "command": predict_command,
}
SETTINGS: dict[str, Callable[[Path], object]] = {
    "read": lambda run: fg.load_run(run).config,
    "given": lambda run: load_config(str(run / "config.yaml")),
    "parent": config_as_parent,
    "resumed": lambda run: commanded("run", "--resume", run),
    "resumed without traces": resumed_without_traces,
    "run again": lambda run: commanded("run", run / "config.yaml", "--out", run.parent / "out"),
    "shown": lambda run: commanded("show", run / "config.yaml"),
    "predict": MODELS["predict"],
    "command": predict_command,
}


HINT = "x -> __import__('pathlib').Path({marker!r}).touch()"
CLASSES: dict[str, dict[str, Any]] = {
    "evil.Thing": {},
    "torch_geometric.nn.Sequential": {"input_args": HINT, "modules": []},
    "flower_graph.models.nn.Module": {},  # a class that ships makes others' in no way
}


@pytest.mark.parametrize("door", MODELS)
@pytest.mark.parametrize("module", CLASSES)
def test_a_models_class_runs_no_code(door: str, module: str, folder: Path, marker: Path) -> None:
    hint = json.dumps(CLASSES[module]).replace("{marker!r}", f"'{marker}'")
    say(folder, module=module, arguments=json.loads(hint))
    with pytest.raises((OutputError, ConfigError)):
        MODELS[door](folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hidden", one) for one in (10**12, 2**20, True)),  # 2**20: allowed, not the weights'
        *(("dropout", "0.5"), ("dropout", 7), ("classes", [2]), ("other", 1)),
    ],
)
def test_arguments_of_classes_that_ship_are_checked(name: str, value: Any, folder: Path) -> None:
    say(folder, arguments=MODEL[1] | {name: value})
    with pytest.raises(OutputError):
        MODELS["model"](folder)


@pytest.mark.parametrize("door", SETTINGS)
def test_settings_import_no_method(door: str, folder: Path, marker: Path) -> None:
    configure(folder, app="evil")
    with pytest.raises(ConfigError):
        SETTINGS[door](folder)
    assert not marker.exists()


def test_interpolation_is_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    texts = ("${oc.env:SECRET}", "a\\${oc.env:SECRET}", "${.app} ${oc.decode:x} {", "\\\\${app}\\")
    path = folder / "config.yaml"
    before = path.read_text()
    for text in texts:
        path.write_text(before.replace("name: cora-linqs", f"name: {json.dumps(text)}"))
        for config in (fg.load_run(folder).config, load_config(str(path), ["rounds=2"])):
            assert config.data.name == text
    configure(folder, rounds="${oc.env:SECRET}")
    with pytest.raises(ConfigError, match="rounds") as refused:
        SETTINGS["read"](folder)
    assert "swordfish" not in str(refused.value)
    monkeypatch.setenv("ROUNDS", "7")
    own = folder.parent / "config.yaml"  # a person's own file is filled in
    own.write_text("app: fedgta\nrounds: ${oc.env:ROUNDS}\n")
    assert load_config(str(own)).rounds == 7


def test_a_run_does_not_choose_where_raw_data_lie(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, root = folder / "config.yaml", tmp_path / "raw"
    root.mkdir()
    path.write_text(path.read_text().replace("root: null", f"root: {root}"))
    assert fg.load_run(folder).config.data.root == str(root)  # it is only told
    with pytest.raises(ConfigError, match=r"data\.root"):
        load_config(str(path))
    assert load_config(str(path), [f"data.root={root}"]).data.root == str(root)
    assert main(["run", "--resume", str(folder), "device=cpu"]) == 2
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(root))
    assert load_config(str(path)).data.root == str(root)


def test_trust_is_said_before_anything_is_imported(
    folder: Path, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[bool] = []
    trust = Trust(code=True, say=lambda text: seen.append("evil" in text and not marker.exists()))
    say(folder, module="evil.Thing", arguments={})
    with pytest.raises(OutputError):  # of other weights
        fg.load_run(folder, trust=trust).model(0)
    assert seen == [True] and marker.exists()
    marker.unlink()
    del sys.modules["evil"]
    configure(folder, app="evil")
    assert main(["run", "--resume", str(folder), "--trust-code"]) == 2  # evil has no METHOD
    assert marker.exists() and "evil" in caplog.text


@pytest.mark.parametrize("how", ["given by file", "imported"])
def test_a_method_of_ones_own_needs_no_trust(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine" / "of_mine.py"
    file.parent.mkdir()
    file.write_text(OWN)
    (folder / "config.yaml").write_text("app: mine.of_mine\n")
    say(folder, module="mine.of_mine.Mine")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OutputError):
        MODELS["model"](folder)
    with pytest.raises(ConfigError):
        SETTINGS["read"](folder)
    if how == "imported":
        __import__("mine.of_mine")
    else:
        commanded("show", folder / "config.yaml", "--app", file)
    run = fg.load_run(folder)
    assert run.config.app == "mine.of_mine" and type(run.model(0)).__name__ == "Mine"
    say(folder, module="mine.of_mine.Sequential", arguments={})  # not its own
    with pytest.raises(OutputError):
        MODELS["model"](folder)


def test_a_file_that_is_no_method(tmp_path: Path) -> None:
    path = tmp_path / "of_mine.py"
    for text in (None, "x = 1\n", "METHOD = 3\n", "raise OSError\n"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError):
            registry.give_file(path)
        assert "of_mine" not in sys.modules


# Spoiled ------------------------------------------------------------------------------------------


COUNTED = {"metrics": ["accuracy", "macro-f1"], "checkpoint_every": 1, "graph.neighbours": 3}
LINES, RESULT = "metrics.jsonl", "result.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "run"
    fg.run("fedgls/cora-linqs", SMALL | COUNTED, out=folder, quiet=True)
    return folder


LATER = [pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.release]) for seed in range(1, 30)]


@pytest.mark.parametrize("seed", [0, *LATER])
def test_commands_that_read_a_spoiled_run_end_in_a_page_or_a_named_error(
    seed: int, made: Path, tmp_path: Path
) -> None:
    draw, page = random.Random(seed), str(tmp_path / "page.html")
    for number in range(8):
        run = str(shutil.copytree(made, tmp_path / f"run-{number}"))
        for _ in range(draw.choice([1, 1, 2])):
            file = Path(run, draw.choice([LINES, LINES, LINES, RESULT, RESULT, "data.json"]))
            change = in_lines if file.name == LINES else in_json
            file.write_bytes(change(file.read_bytes(), draw))
        resume = ["run", "--resume", run, "--quiet"]
        commands = ["report", run, "--out", page], ["compare", run, run], ["predict", run], resume
        assert main([*commands[number % 4]]) in (0, 1, 2), (number, run)


HALF = MOST_CLIENTS // 2
GOOD = (["0-5,7", "6,8-9"], [f"0-{HALF - 1}", f"{HALF}-{2 * HALF - 1}"])
GOOD += ([str(2**62), f"{2**63 - 2}-{2**63 - 1}"],)  # claimed by a SuperNode
BAD = ("1-", "a", "3,2", " 1", "1,,2", "0-" + "9" * 30, f"0-{2**63 - 1}", str(2**63))


def test_many_clients_in_many_rounds_are_counted_together(tmp_path: Path) -> None:
    for texts in (*GOOD, *([one] for one in BAD), [f"0-{HALF}", f"{HALF}-{2 * HALF}"]):
        records = [{"asked": t, "answered": t, "failed": [], "left-out": []} for t in texts]
        if texts in GOOD:
            known_clients([*records, {}])
            continue
        with pytest.raises(ValueError):
            known_clients(records)
        report = RoundReport(1, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0, 2, 2).to_record()
        lines = [f"{json.dumps(report | {'participation': one})}\n" for one in records]
        (tmp_path / LINES).write_text("".join(lines))
        with pytest.raises(OutputError, match=LINES):  # no memory is taken for such a file
            read_reports(tmp_path / LINES)


PLANTED = [
    ".probe", ".running", ".partial-result.json", ".partial-metrics.jsonl", ".config.yaml.1",
    "checkpoints", "clients", "rows", "rows/users-0.rows", "metrics.jsonl", "weights.safetensors",
    "checkpoints/round-000001", "checkpoints/round-000002/server.safetensors", "seed-0",
    "tensorboard",
]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_foreign_run_that_is_resumed_writes_nothing_elsewhere(
    name: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, home = shutil.copytree(made, tmp_path / "run"), tmp_path / "home"
    (home / "inner").mkdir(parents=True)
    (home / ".bashrc").write_text("mine")
    (honest / RESULT).unlink()
    link = honest / name
    shutil.rmtree(link) if link.is_dir() else link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    is_folder = name in ("checkpoints", "clients", "rows", "seed-0", "tensorboard")
    link.symlink_to(home / "inner" if is_folder or "round-000001" in name else home / ".bashrc")
    assert main(["run", "--resume", str(honest), "--quiet", "rounds=3"]) == 2
    assert name.partition("/")[0] in capsys.readouterr().err
    assert (home / ".bashrc").read_text() == "mine" and not [*(home / "inner").iterdir()]
    assert sorted(path.name for path in home.iterdir()) == [".bashrc", "inner"]


# Names of data, classes and nodes are text: in tables, in pictures and on a terminal -------------

NAMES = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "fine"]
ESCAPES = "\x1b[2J\x1b]0;owned\x07"


def test_tables_have_no_formulas() -> None:
    assert [as_text(one)[0] for one in NAMES] == ["'"] * 5 + ["f"]
    for number in ("-1", "+1.5", "-1e-9", "0", "", "-inf"):
        assert as_text(number) == number
    nobody = np.zeros(6, np.int8)
    found = Predictions.of(torch.eye(6), -1, NAMES, nobody, nobody, NAMES)
    for line in list(csv.reader(io.StringIO(table_of(found).to_csv(index=False))))[1:]:
        assert len(line) == 6
        assert not any(cell[:1] in ("=", "+", "-", "@", "\t") and cell for cell in line), line
    figure = {"mean": -0.5, "std": 0.0, "values": [-0.5]}
    words = {"run": "=HYPERLINK(1)", "path": "@x", "app": "+a", "version": "-v"}
    row = {
        **words, "seeds": [0], "settings": {"data.name": "=1+1"}, "metric": "accuracy",
        "figures": {"test-accuracy": figure}, "baselines": {}, "beaten": [],
    }  # fmt: skip
    other = row | {"settings": {"data.name": "b"}}
    first, _ = csv.DictReader(io.StringIO(Comparison([row, other], []).to_csv()))
    assert all(first[key].startswith("'") for key in (*words, "data.name")), first
    assert first["test-accuracy"] == "-0.5"


def test_two_dollar_signs_make_no_formula(tmp_path: Path) -> None:
    name = "a$\\frac$"
    draw = partial(draw_confusion, nodes=[[1, 0], [0, 1]], classes=[name, "b"])
    assert plot(tmp_path / "a.png", [[draw]], name) and svg(draw).startswith("<svg")
    assert name in curves_panel(Panel({name: [[1.0, 2.0]]}))


def lay_data(folder: Path) -> Path:
    folder.mkdir()
    rows = [f"{node},{node % 2}.5,{'ab'[node % 2]}{ESCAPES}" for node in range(40)]
    (folder / "nodes.csv").write_text("\n".join(["id,x,label", *rows]) + "\n")
    edges = [f"{node},{(node + 2) % 40}" for node in range(40)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]) + "\n")
    return folder


def test_names_move_no_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown, data = lay_data(tmp_path / f"mine{ESCAPES}"), lay_data(tmp_path / "mine")
    run, people = str(tmp_path / "run"), tmp_path / "people.csv"
    given = [f"data.name={data}", "data.split=random", "data.ratios=[0.4,0.3,0.3]", "rounds=1"]
    given += ["partition.clients=2", "partition.method=random", "model.hidden=4"]
    given += ["data.features=as-is"]
    for command in (
        ["check", str(data)],
        ["run", "fedgta/cora-linqs", *given, "--out", run],
        ["predict", run, "--client", "0", "--out", str(people)],
        ["predict", str(shown)],
        ["check", "fedgta/cora-linqs", *given],
    ):
        assert main(command) == (2 if command[1] == str(shown) else 0)
        said = "".join(capsys.readouterr())
        assert "\x1b" not in said and "\x07" not in said, command
    assert ESCAPES in people.read_text()  # a file has the names as they are
