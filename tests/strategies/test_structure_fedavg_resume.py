"""FedGLS or a baseline that goes on from a checkpoint ends where the uninterrupted run does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi
from plain_structure import FEDGLS
from structure_helpers import Outcome, client_app, cohort_of, run, settings_of

from flower_graph.errors import CheckpointError
from flower_graph.simulation import InProcessGrid
from flower_graph.storage import checkpoint
from flower_graph.strategies.structure_fedavg.strategy import StructureFedAvg

DROPOUT = {"dropout": 0.4, "input_dropout": 0.2}  # depends on the round


def saving(folder: Path, rounds: int, method: str = FEDGLS, **options: Any) -> Outcome:
    own = {"checkpoint_dir": folder, "checkpoint_every": 2, "settings": settings(method)}
    return run(method, rounds=rounds, **{**own, **options})


def settings(method: str) -> Any:
    return settings_of(method, **DROPOUT)


def assert_same(whole: Outcome, resumed: Outcome, first: int) -> None:
    """Compare what was reported from a round on, and everything in the end, bit by bit."""
    after = whole.reports[first - 1 :]
    assert [r.round for r in resumed.reports] == [r.round for r in after]
    rows = whole.figures[first - 1 :]
    assert torch.equal(rows.nan_to_num(-1), resumed.figures.nan_to_num(-1))
    for one, other in zip(after, resumed.reports, strict=True):
        assert one.participation == other.participation
        assert (one.bytes, one.answered) == (other.bytes, other.answered)
    for name, values in whole.arrays.items():
        assert torch.equal(values, resumed.arrays[name])
    assert_same_clients(whole, resumed)


def assert_same_clients(whole: Outcome, resumed: Outcome) -> None:
    for one, other in zip(whole.cohorts, resumed.cohorts, strict=True):
        assert one.clients == other.clients
        kept = other.tensors()
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, kept[name]), name


def test_wire_bytes_are_those_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = saving(tmp_path / "whole", 4)
    saving(tmp_path / "half", 2)
    resumed = saving(tmp_path / "half", 4, resume=True)
    assert [r.wire_bytes for r in resumed.reports] == [r.wire_bytes for r in whole.reports[2:]]


class Adam(StructureFedAvg, FedAdam):
    """FedAdam keeps moments at the server."""


class Yogi(StructureFedAvg, FedYogi):
    """FedYogi too."""


class Momentum(StructureFedAvg, FedAvgM):
    """FedAvgM keeps a list of arrays."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [(Adam, {"eta": 0.01}), (Yogi, {"eta": 0.01}), (Momentum, {"server_momentum": 0.5})],
)
def test_what_another_strategy_keeps_is_saved_too(
    tmp_path: Path, kind: type[StructureFedAvg], options: dict[str, Any]
) -> None:
    whole = run(rounds=4, strategy=kind, settings=settings(FEDGLS), **options)
    saving(tmp_path, 2, strategy=kind, **options)
    resumed = saving(tmp_path, 4, strategy=kind, resume=True, **options)
    assert_same(whole, resumed, 3)
    plain = run(rounds=4, settings=settings(FEDGLS))
    assert not torch.equal(plain.arrays["gnn-rest"], resumed.arrays["gnn-rest"])


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class Remembers(StructureFedAvg):
        """Keeps what no checkpoint can."""

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            self.last = {"seen": {server_round}}
            return super().aggregate_train(server_round, replies)

    with pytest.raises(CheckpointError, match=r"Remembers\.last\['seen'\] has changed.*is a set"):
        saving(tmp_path, 2, strategy=Remembers)
    assert checkpoint.complete_rounds(tmp_path) == []


# Faults ------------------------------------------------------------------------------------------


def test_a_run_that_broke_off_goes_on(tmp_path: Path) -> None:
    """The server dies in round 4, after the clients trained: round 3 is lost, and run again."""

    class KilledError(Exception):
        """Stands for the end of the process."""

    class Dies(StructureFedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            if server_round == 4:
                raise KilledError
            return super().aggregate_train(server_round, replies)

        def fixed_settings(self) -> dict[str, Any]:
            return super().fixed_settings() | {"strategy": "StructureFedAvg"}

    with pytest.raises(KilledError):
        saving(tmp_path, 6, strategy=Dies)
    assert checkpoint.complete_rounds(tmp_path) == [2]
    assert_same(run(rounds=6, settings=settings(FEDGLS)), saving(tmp_path, 6, resume=True), 3)


def test_a_client_that_is_silent_when_it_should_save(tmp_path: Path) -> None:
    def fails(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        config = message.content["config"]
        is_there = (message.metadata.message_type, config.get("server-round")) == ("evaluate", 2)
        if is_there and context.node_config["partition-id"] == 0:
            raise OSError("gone")
        return call_next(message, context)

    own = settings(FEDGLS)
    app = client_app(FEDGLS, settings=own, checkpoint_dir=tmp_path, mods=[fails])
    saving(tmp_path, 3, app=app)
    assert checkpoint.complete_rounds(tmp_path) == [3]


def test_the_report_comes_before_the_checkpoint(tmp_path: Path) -> None:
    seen: list[tuple[int, list[int]]] = []
    own = settings(FEDGLS)
    app = client_app(FEDGLS, settings=own, checkpoint_dir=tmp_path)
    strategy = StructureFedAvg(own, checkpoint_dir=tmp_path, checkpoint_every=1)
    strategy.start(
        InProcessGrid(app, num_supernodes=2),
        num_rounds=2,
        timeout=1,
        on_round=lambda r: seen.append((r.round, checkpoint.complete_rounds(tmp_path))),
    )
    assert seen == [(1, []), (2, [1])]


def test_a_place_of_the_supernodes_own(tmp_path: Path) -> None:
    """Clients of a deployment save on their own machines; the server's folder is not theirs."""
    states = [tmp_path / "one", tmp_path / "two"]

    class Apart(InProcessGrid):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            for context, state in zip(self.contexts.values(), states, strict=True):
                context.node_config["state-dir"] = str(state)

    own, server = settings(FEDGLS), tmp_path / "server"
    parts = {"app": client_app(FEDGLS, settings=own), "make_grid": Apart}
    saving(server, 2, **parts)
    assert [p.name for p in (server / "round-000002").iterdir()] == ["server.pt"]
    assert all(list(state.rglob("round-000002/client-*.safetensors")) for state in states)
    resumed = saving(server, 4, resume=True, **parts)
    whole = run(rounds=4, settings=own)
    assert torch.equal(whole.figures[2:], resumed.figures)


def test_a_supernode_that_comes_again_keeps_what_it_has(tmp_path: Path) -> None:
    """After a resumption it gets another id: it is asked again, and does not go back."""
    saving(tmp_path, 2)

    class Renamed(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            messages = list(messages)
            found = [m for m in messages if m.content["config"].get("server-round") == 4]
            if found and found[0].metadata.message_type == "evaluate" and 77 not in self.contexts:
                answer = super().push_messages(messages)
                first = next(iter(self.contexts))
                context = self.contexts.pop(first)
                self.contexts = {77: self._moved(context), **self.contexts}
                return answer
            return super().push_messages(messages)

        @staticmethod
        def _moved(context: Context) -> Context:
            cohort_of(context)  # its state is there
            return Context(context.run_id, 77, context.node_config, context.state, {})

    states = {"state-dir": str(tmp_path / "state")}
    make_grid = lambda app, num_supernodes: Renamed(  # noqa: E731
        app, num_supernodes=num_supernodes, node_config=states
    )
    own = settings(FEDGLS)
    app = client_app(FEDGLS, settings=own)
    server = tmp_path / "server"
    saving(
        server,
        2,
        app=app,
        make_grid=lambda a, num_supernodes: InProcessGrid(
            a, num_supernodes=num_supernodes, node_config=states
        ),
    )
    resumed = saving(server, 6, app=app, make_grid=make_grid, resume=True)
    assert 77 in resumed.strategy.session.members.clients
    whole = run(rounds=6, settings=own)
    assert torch.allclose(whole.figures[2:], resumed.figures, atol=1e-6, equal_nan=True)


# Refusals ----------------------------------------------------------------------------------------


def test_what_does_not_fit(tmp_path: Path) -> None:
    saving(tmp_path, 2)
    own = settings(FEDGLS)
    with pytest.raises(CheckpointError, match=r"its tau is 0\.5, this run's is 0\.6"):
        saving(tmp_path, 4, resume=True, settings=own._replace(tau=0.6))
    with pytest.raises(
        CheckpointError, match="its strategy is StructureFedAvg, this run's is Adam"
    ):
        saving(tmp_path, 4, resume=True, strategy=Adam)
    with pytest.raises(CheckpointError, match="a checkpoint_dir is needed"):
        run(resume=True)
    with pytest.raises(ValueError, match="checkpoint_every: 3 needs a checkpoint_dir"):
        run(checkpoint_every=3)
    with pytest.raises(ValueError, match="fraction_evaluate is 0: clients save a checkpoint when"):
        saving(tmp_path, 2, fraction_evaluate=0.0)
