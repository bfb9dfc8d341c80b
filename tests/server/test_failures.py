"""A fault that all clients have stops a simulation; a run without a usable round is no success."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flower_graph.apps.cli.main import main
from flower_graph.apps.run import simulate
from flower_graph.errors import ClientBugError, NoClientsError
from flower_graph.method.load import load_config
from flower_graph.wire.client_errors import fault_of

METHOD = """
from dataclasses import dataclass

from flower_graph.client.module_client import ModuleClient
from flower_graph.config.common import ModuleRunConfig
from flower_graph.method.module_method import ModuleMethod


@dataclass
class Config(ModuleRunConfig):
    app: str = "faulty"


class Client(ModuleClient):
    def loss(self, module, graph):
        if FAULTY(graph):
            graph.train_mask
        return super().loss(module, graph)


class Faulty(ModuleMethod):
    name, schema, client_class = "faulty", Config, Client


METHOD = Faulty()
"""
SMALL = """rounds=3 device=cpu data.name=csbm data.nodes=60 data.classes=2 data.num_features=8
data.active=3 data.split=random data.ratios=[0.4,0.3,0.3] partition.clients=3
partition.method=random model.hidden=4 strategy.local_epochs=3"""
SETTINGS = SMALL.split()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Write a config for a method that fails at every client."""
    write(str(tmp_path / "faulty.yaml"), "True")
    (tmp_path / "faulty.yaml").write_text("app: faulty\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    yield str(tmp_path / "faulty.yaml")
    sys.modules.pop("faulty", None)


# The three clients have trained in the first round, each at a SuperNode of its own
LATER = "next(CALLS) >= 3 * EPOCHS"
DIFFERENT = "next(CALLS) >= 3 * EPOCHS and exec(f'raise {ERRORS[next(CALLS) % 3]}')"


def write(config: str, faulty: str) -> None:
    """Write a method whose clients fail sometimes."""
    text = METHOD.replace("FAULTY(graph)", faulty).replace("EPOCHS", "3")
    errors = "ERRORS = 'KeyError', 'OSError', 'OSError'"
    head = f"from itertools import count\n\nCALLS = count()\n{errors}\n"
    Path(config).with_name("faulty.py").write_text(head + text, encoding="utf-8")


def test_a_fault_in_a_later_round_stops_a_run_too(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(config, LATER)
    words = [*SETTINGS, "--supernodes", "3", "--out", str(tmp_path / "out")]
    assert main(["run", config, *words]) == 1
    captured = capsys.readouterr()
    assert "AttributeError" in captured.err and "graph.train_mask" in captured.err
    assert "round 1/3" in captured.err and "round 2/3" not in captured.err and not captured.out
    assert not (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize(
    ("faulty", "hidden", "error", "said"),
    [
        # As in a deployment: nothing but its kind leaves the clients' machines
        (LATER, ("is_own_machine", lambda _: False), ClientBugError, "AttributeError"),
        # ... nor has its grid tracebacks of its nodes
        ("True", ("Failures._said", lambda *_: ""), NoClientsError, "skipped"),
    ],
)
def test_where_the_server_is_told_little_a_run_still_fails(
    faulty: str, hidden: Any, error: type, said: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, instead = hidden
    write(config, faulty)
    monkeypatch.setattr(f"flower_graph.wire.client_errors.{name}", instead)
    with pytest.raises(error, match=said) as caught:
        simulate(load_config(config, SETTINGS), supernodes=3)
    assert caught.type is error and "train_mask" not in str(caught.value)


def test_skipped_rounds_are_told_in_the_end(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(config, DIFFERENT)
    words = [*SETTINGS, "--supernodes", "3", "--out", str(tmp_path / "out")]
    assert main(["run", config, *words]) == 0
    assert "skipped   2 of 3 rounds" in capsys.readouterr().out


def test_faults_at_one_line_are_one_whatever_their_values() -> None:
    said = 'Traceback (most recent call last):\n  File "a.py", line {}, in loss\n    x[i]\n{}: {}\n'
    first = fault_of(said.format(3, "IndexError", "271"))
    assert first == ("a.py", "3", "IndexError")
    assert fault_of(said.format(3, "IndexError", "268")) == first
    assert fault_of(said.format(4, "IndexError", "271")) != first
    assert fault_of(said.format(3, "KeyError", "271")) != first
    assert fault_of("no reply") is None
