"""The command: what it hands on, what it prints, and how it ends. Nothing is trained here."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from flower_graph import errors
from flower_graph.apps.cli import main as cli
from flower_graph.apps.cli.run import RoundPrinter, default_folder
from flower_graph.config.common import RunConfig
from flower_graph.config.schema import settings_of
from flower_graph.data.sources.names import ABSENT, HERE, OWN
from flower_graph.method.load import data_name_of, list_configs, load_config, to_dict, to_yaml
from flower_graph.records.rounds import RoundReport
from flower_graph.report.writer import RunWriter
from flower_graph.storage.checkpoint import save_server

Call = dict[str, Any]
CHECKS = {"check_run": lambda *_: 1, "supernodes_of": lambda config, asked, **_: asked}


def report(number: int) -> RoundReport:
    sizes = {"up": {"latent": 64 * number}, "down": {"gradient": 64 * number}}
    return RoundReport(number, 1.0, 1.0, 0.0, 0.9, 0.5, 0.4, 2, 2, bytes=sizes, seconds=0.01)


class Runner:
    """Stands for the runner: notes its calls, reports the rounds, writes real outputs."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.fail: Callable[[RunConfig, Path], None] = lambda config, out: None

    def run(self, config: RunConfig, out: Path, **rest: Any) -> dict[str, Any]:
        self.calls.append({"config": config, "out": out, **rest})
        writer = RunWriter(
            out, to_dict(config), resume_round=(lambda: 0) if rest["resume"] else None
        )
        self.fail(config, out)
        for number in range(1, config.rounds + 1):
            writer.write_round(report(number))
            rest["progress"](writer.reports[-1])
        return writer.finish({"clients": 2, "engine": "in-process"})


def printer_of(rounds: int, out: Path = Path(), **given: Any) -> RoundPrinter:
    args = cli.make_parser().parse_args(["run"])
    vars(args).update(given)
    return RoundPrinter(load_config("quickstart", [f"rounds={rounds}"]), args, out)


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    fake = ModuleType(f"flower_graph.{name}")
    vars(fake).update(members)
    monkeypatch.setitem(sys.modules, fake.__name__, fake)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runner:
    runner = Runner()
    module(monkeypatch, "apps.run", run=runner.run, **CHECKS)
    module(monkeypatch, "apps.cli.check", short_form=lambda config: (["a graph"], []))
    monkeypatch.chdir(tmp_path)
    return runner


Captured = pytest.CaptureFixture[str]


def test_one_run(runner: Runner, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["run", "quickstart", "rounds=2", "--out", "here", "model.hidden=4"]) == 0
    (call,) = runner.calls
    assert call["config"] == load_config("quickstart", ["rounds=2", "model.hidden=4"])
    assert (call["out"], call["resume"], call["supernodes"]) == (tmp_path / "here", False, None)
    shown = capsys.readouterr()
    assert shown.err.count("round ") == 2 and "round 2/2  loss 1" in shown.err
    assert shown.err.startswith("data  a graph\n")
    assert "quickstart: 2 users, 2 rounds, seed 0" in shown.out
    assert f"outputs   {tmp_path / 'here'}" in shown.out
    assert not (tmp_path / "here" / "summary.json").exists()


def test_a_finished_run_is_read_and_a_longer_one_goes_on(
    runner: Runner, tmp_path: Path, capsys: Captured
) -> None:
    """Neither config nor seed is named again, whatever the app."""
    words = ["fedscem/cora-linqs", "rounds=2", "partition.hops=1", "seed=7"]
    assert cli.main(["run", *words, "--out", "here", "--quiet"]) == 0
    shown = capsys.readouterr().out.splitlines()[1:]
    config = load_config(words[0], words[1:])
    assert runner.calls[0]["config"] == config
    assert load_config(str(tmp_path / "here" / "config.yaml")) == config
    assert cli.main(["run", "--resume", "here"]) == 0
    assert len(runner.calls) == 1  # it was done
    assert capsys.readouterr().out.splitlines()[1:] == shown
    assert cli.main(["run", "--resume", "here", "rounds=3"]) == 0
    assert runner.calls[1]["config"] == load_config(words[0], [*words[1:], "rounds=3"])
    assert (runner.calls[1]["resume"], runner.calls[1]["out"]) == (True, tmp_path / "here")


def test_quiet_prints_the_summary_only(runner: Runner, tmp_path: Path, capsys: Captured) -> None:
    words = ["run", "nfedgnn/cora", "rounds=2", "--quiet", "--supernodes", "3", "--seeds", "4"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and "accuracy" in shown.out
    (call,) = runner.calls
    assert (call["supernodes"], call["config"].seed) == (3, 4)
    # Where no folder is named, its name has config and time; one seed needs no sub-folder.
    assert call["out"].parent == tmp_path / "runs"
    assert call["out"].name.startswith("nfedgnn-cora-2")
    assert default_folder("some/where/mine.yaml").name.startswith("mine-2")


def failing(error: BaseException) -> Callable[[RunConfig, Path], None]:
    """Make a runner's `fail` that raises an error at once."""

    def fail(config: RunConfig, out: Path) -> None:
        raise error

    return fail


@pytest.mark.parametrize("kind", cli.OUR_ERRORS, ids=lambda kind: kind.__name__)
def test_every_named_error_is_told_in_a_line(
    runner: Runner, capsys: Captured, kind: type[Exception]
) -> None:
    assert kind.__module__ == errors.__name__
    runner.fail = failing(kind("what was wrong"))
    failed = kind in (errors.ClientBugError, errors.EngineFailedError)
    assert cli.main(["run", "quickstart", "--quiet"]) == (1 if failed else 2)
    assert capsys.readouterr().err == "error: what was wrong\n"


def test_our_own_mistakes_keep_their_traceback(runner: Runner) -> None:
    runner.fail = failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", "quickstart", "--quiet"])


def test_ctrl_c_names_the_checkpoint_and_how_to_go_on(
    runner: Runner, tmp_path: Path, capsys: Captured
) -> None:
    runner.fail = failing(KeyboardInterrupt())
    assert cli.main(["run", "quickstart", "--out", "none"]) == 130
    assert "no checkpoint (checkpoint_every=0)" in capsys.readouterr().err

    def interrupt(config: RunConfig, out: Path) -> None:
        (out / "metrics.jsonl").touch()
        save_server(out / "checkpoints", 10, {"round": 10})
        raise KeyboardInterrupt

    runner.fail = interrupt
    assert cli.main(["run", "quickstart", "--out", "my run"]) == 130
    assert f"flower-graph run --resume '{tmp_path / 'my run'}'" in capsys.readouterr().err


def test_resuming_several_seeds_does_what_is_left(runner: Runner, tmp_path: Path) -> None:
    def interrupt(config: RunConfig, out: Path) -> None:
        if config.seed == 1:
            (out / "metrics.jsonl").touch()
            raise KeyboardInterrupt

    runner.fail = interrupt
    words = ["run", "quickstart", "rounds=1", "--seeds", "0,1,2", "--out", "all", "--quiet"]
    assert cli.main(words) == 130
    runner.fail = lambda config, out: None
    runner.calls.clear()
    assert cli.main(["run", "--resume", "all", "--quiet"]) == 0
    done = [(call["config"].seed, call["resume"]) for call in runner.calls]
    assert done == [(1, True), (2, False)]
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert summary["seed"]["values"] == [0, 1, 2]
    assert summary["test-accuracy"] == {"mean": 0.4, "std": 0.0, "values": [0.4] * 3}


def test_flwr_engine_gets_paths_in_full(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    calls: list[tuple[tuple[Any, ...], Call]] = []

    def flwr_run(*given: Any, **rest: Any) -> dict[str, Any]:
        calls.append((given, rest))
        rest["echo"]("a line of the log")
        if len(calls) == 2:
            raise errors.EngineFailedError("`flwr run` ended without a result")
        writer = RunWriter(given[2], {"seed": rest["seed"]})
        writer.write_round(report(1))
        return writer.finish({"clients": 2, "engine": "flwr"})

    module(monkeypatch, "apps.cli.launch", flwr_run=flwr_run)
    module(monkeypatch, "apps.run", run=None, **CHECKS)
    module(monkeypatch, "apps.cli.check", short_form=lambda config: ([], []))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my graph.pt").write_bytes(b"")
    (tmp_path / "mine.yaml").write_text("data: {name: my graph.pt, root: raw}\nseed: 3\n")
    words = ["run", "mine.yaml", "--engine", "flwr", "--supernodes", "4", "--out"]
    assert cli.main([*words, "out"]) == 0
    ((config, overrides, out), rest) = calls[0]
    assert (config, out) == (str(tmp_path / "mine.yaml"), tmp_path / "out")
    assert (rest["supernodes"], rest["seed"], rest["resume"]) == (4, 3, False)
    there = load_config(config, overrides)
    assert there.data.name == str(tmp_path / "my graph.pt")
    assert there.data.root == str(tmp_path / "raw")
    assert "a line of the log" in capsys.readouterr().err
    assert cli.main([*words, "fails", "--quiet"]) == 1
    assert capsys.readouterr().err == "error: `flwr run` ended without a result\n"


def test_show_explains_every_key_in_yaml_that_is_read_back(
    tmp_path: Path, capsys: Captured
) -> None:
    long = f"data.name={tmp_path}/{' '.join(['a folder'] * 20)}/graph.pt"  # over several lines
    assert cli.main(["show", "nfedgnn/cora", "model.name=gat", "--plain"]) == 0
    assert capsys.readouterr().out == to_yaml(load_config("nfedgnn/cora", ["model.name=gat"]))
    assert cli.main(["show", "fedgls/cora-linqs", "rounds=7", long]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(shown)
    config = load_config("fedgls/cora-linqs", ["rounds=7", long])
    assert load_config(str(tmp_path / "shown.yaml")) == config
    assert "# rounds of training (a whole number, at least 1)\nrounds: 7\n" in shown
    about = " ".join(shown.replace("#", " ").split())
    for one in settings_of(type(config)):
        assert " ".join(one.help.replace("#", " ").split()) in about, one.key


def test_list_names_apps_configs_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("FLOWER_GRAPH_DATA", str(tmp_path))
    monkeypatch.setenv("FLOWER_GRAPH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "Planetoid" / "PubMed").mkdir(parents=True)
    (tmp_path / "cache" / "Planetoid-CiteSeer-0123").mkdir(parents=True)
    marks = {"fedavg/cora": ABSENT, "fedavg/pubmed": HERE, "fedavg/citeseer": HERE}
    marks |= {"fedavg/cora-linqs": HERE, "fedavg/own-graph": OWN}
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in [*list_configs(), "nfedgnn", "cora-linqs", "csbm", "PubMed", "Coauthor/CS"]:
        assert f"  {name}" in shown
    rows = {line.split()[0]: line for line in shown.splitlines() if line[:2] == "  "}
    assert "FedAvg" in rows["fedprox"]  # its sentence
    for name, where in marks.items():
        assert (f"[{where}]" in rows[name]) is (where != HERE), name


def test_the_quick_reader_of_a_configs_data_says_what_the_loader_says() -> None:
    for name in list_configs():
        assert data_name_of(name) == load_config(name).data.name.rpartition("/")[2], name


def test_reproduce_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flower_graph.apps.reproduce import command

    papers = list[command.Paper]()
    monkeypatch.setattr(command, "reproduce", lambda paper, out: papers.append(paper))
    words = ["reproduce", "fedgls", "--out", str(tmp_path), "--only", "data=Cora"]
    words += ["--only", "data=PubMed", "--only", "model=MLP", "--seeds", "0,1", "--rounds", "5"]
    assert cli.main(words) == 0
    assert cli.main(["reproduce", "fedgls", "--out", str(tmp_path)]) == 0
    chosen, whole = (paper.lines for paper in papers)
    assert {(one.data, one.model) for one in chosen} == {("Cora", "MLP"), ("PubMed", "MLP")}
    assert {(*one.seeds, one.rounds) for one in chosen} == {(0, 1, 5)}
    assert len(whole) == len(command.read_paper("fedgls").lines)


def test_a_closed_pipe_is_no_fault() -> None:
    command = f"{sys.executable} -m flower_graph.apps.cli.main show quickstart | true"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(["bash", "-c", command], cwd=root, capture_output=True, text=True)
    assert done.stderr == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    printer = printer_of(4)
    printer(report(3))  # a resumed run starts here
    printer(report(4))
    printer.close()
    shown = capsys.readouterr().err
    assert "seed 0: 100%" in shown and "4/4" in shown and "test 0.400" in shown
    assert "users" not in shown


def test_lines_every_so_many_rounds_and_where_something_is_unusual(capsys: Captured) -> None:
    printer = printer_of(7, log_every=3)
    for number in range(1, 8):
        printer(replace(report(number), skipped="too few" if number == 5 else ""))
    shown = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1].partition("/")[0]) for line in shown] == [3, 5, 6, 7]


def test_json_on_stdout_and_the_rest_on_stderr(runner: Runner, capsys: Captured) -> None:
    words = ["run", "quickstart", "rounds=2", "--json", "--seeds", "0,1", "--out", "here"]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    records = [json.loads(line) for line in shown.out.splitlines()]
    assert [(one["seed"], one["round"]) for one in records] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert RoundReport.from_record(records[0]) == report(1)
    assert "accuracy" in shown.err
    assert cli.main(["run", "quickstart", "rounds=1", "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1 and shown.err == ""


def test_flowers_lines_become_rounds_and_only_what_is_new_is_shown(
    tmp_path: Path, capsys: Captured
) -> None:
    """Of a resumed run, whose file begins with a round that was shown before."""
    seen: list[int] = []
    lines = printer_of(3, tmp_path, on_round=lambda one: seen.append(one.round)).read_line
    writer = RunWriter(tmp_path / "x", {"seed": 0})
    for number in (1, 2):
        writer.write_round(report(number))
    (tmp_path / "x" / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    for line in (
        "WARNING :   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.",
        "INFO :      configure_train: Sampled 3 nodes (out of 3)",
        "WARNING :   a client is ill",
        "INFO :      round 2/3  loss 1.0",
        "INFO :      round 3: this takes long",
    ):
        lines(line)
    writer.write_round(report(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write((tmp_path / "x" / "metrics.jsonl").read_text())
    lines("INFO :      round 3/3  loss 1.0")
    assert seen == [2, 3]
    shown = [line for line in capsys.readouterr().err.splitlines() if " : " in line]
    assert [line.split(":")[1].strip() for line in shown] == ["a client is ill", "round 3"]


def test_completion_names_commands_and_configs(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fake = SimpleNamespace(FILE="file", DIRECTORY="folder", __spec__="is there")
    fake.complete = lambda parser, preamble, **_: f"{preamble['bash']} {parser.format_help()}"
    monkeypatch.setitem(sys.modules, "shtab", fake)
    assert cli.main(["completion", "bash"]) == 0
    shown = capsys.readouterr().out
    assert "fedgls/cora-linqs" in shown and "reproduce" in shown
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "flower-graph[completion]" in capsys.readouterr().err


def test_the_package_is_the_command() -> None:
    words = [sys.executable, "-m", "flower_graph", "--version"]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("flower-graph ")
