"""nFedGNN inside Flower and in somebody else's program: loops, mods, models, arguments, faults."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.clientapp.mod import LocalDpMod
from graph_helpers import small_graph
from relay_helpers import asked_users, client_app, run, strategy_for
from torch import nn

from flower_graph import SplitGradientRelay
from flower_graph.audit.attacks import RecordingGrid, config_of, of_kind
from flower_graph.errors import NoClientsError
from flower_graph.simulation import InProcessGrid


def test_initial_arrays_and_evaluate_fn() -> None:
    data = small_graph()
    first = run(data, rounds=2)
    seen: list[int] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append(number)
        return MetricRecord({"size": len(arrays)}) if number == 2 else None

    strategy = strategy_for(data, seed=3)
    other = strategy_for(data, seed=9)  # other initial weights at the server, replaced below
    arrays = ArrayRecord(strategy.server.model.state_dict())
    other.server.seed = 3
    other.layer.settings = strategy.layer.settings
    result = other.start(
        InProcessGrid(client_app(data), num_supernodes=2), arrays, 2, evaluate_fn=evaluate
    )
    losses = [metrics["loss"] for metrics in result.train_metrics_clientapp.values()]
    assert losses == first.losses
    assert seen == [1, 2]
    assert {k: dict(v) for k, v in result.evaluate_metrics_serverapp.items()} == {2: {"size": 3}}
    assert result.arrays is not None


def test_train_config_travels_and_stays_the_callers() -> None:
    data = small_graph()
    grid = RecordingGrid(client_app(data), num_supernodes=1)
    given = ConfigRecord({"note": "hello", "server-round": 99})
    strategy_for(data).start(grid, num_rounds=2, train_config=given)
    assert dict(given) == {"note": "hello", "server-round": 99}
    sent = [config_of(one.request) for one in of_kind(grid.exchanges, "train")]
    assert [(c["note"], c["server-round"]) for c in sent] == [("hello", 1), ("hello", 2)]


def test_local_dp_mod_clips_all_users_of_a_supernode_as_one() -> None:
    data = small_graph()
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=0.01, epsilon=10.0, delta=1e-5)
    grid = InProcessGrid(client_app(data, train_mods=[mod]), num_supernodes=1)
    outcome, first = run(data, grid=grid, rounds=1), run(data, rounds=1).weights["latent"]
    assert (outcome.reports[0].answered, outcome.reports[0].rejected) == (12, [])
    clipped = outcome.weights["latent"]
    assert first.norm() > 1.5 and clipped.norm() == pytest.approx(1.0, abs=0.2)
    assert not torch.equal(clipped, first / first.norm())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"participation": 1.5}, "participation: 1.5"),
        ({"average_every": 2, "average_over": "all", "participation": 0.5}, "participation: 0.5"),
        ({"latent_size": 0}, "latent_size: 0"),
        ({"checkpoint_every": 5}, "checkpoint_every.*checkpoint_dir"),
        ({"device": "gpu"}, "device: 'gpu'"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SplitGradientRelay(small_graph(), nn.Linear(1, 1), **{"latent_size": 4, **options})


def test_clients_are_not_asked_to_evaluate() -> None:
    grid = RecordingGrid(client_app(small_graph()), num_supernodes=2)
    with pytest.raises(ValueError, match="evaluate_config"):
        strategy_for(small_graph()).start(grid, evaluate_config=ConfigRecord())
    assert not grid.exchanges


def test_nobody_who_takes_part_is_connected() -> None:
    data, strategy = small_graph(15), strategy_for(small_graph(15), participation=1 / 15)
    grid = InProcessGrid(client_app(data), num_supernodes=15)

    def leave(report: Any) -> None:
        (drawn,) = asked_users(15, 1 / 15, 3, 2).tolist()
        for node, context in list(grid.contexts.items()):
            if context.node_config["partition-id"] == drawn:
                del grid.contexts[node]

    with pytest.raises(NoClientsError, match="round 2"):
        strategy.start(grid, num_rounds=2, on_round=leave)


def test_bytes_of_averaging_by_hand() -> None:
    # (8 features + bias) x 4 latent numbers x 4 bytes = 144 a user, in rounds 2 and 4; the mean
    # of round 2 goes down in round 3, that of round 4 after the last report.
    outcome = run(small_graph(12), rounds=4, average_every=2, user_bias=True)
    assert [r.bytes["up"].get("weights", 0) for r in outcome.reports] == [0, 1728, 1728, 3456]
    assert [r.bytes["down"].get("weights", 0) for r in outcome.reports] == [0, 0, 1728, 1728]
    assert outcome.strategy.layer.ledger.payload["down"]["weights"] == 3456


def test_bytes_with_participation_by_hand() -> None:
    # 4 of 12 users a round, 16 bytes each way; a gradient goes down when its user is asked again.
    outcome = run(small_graph(12), rounds=3, participation=1 / 3)
    rounds = [set(asked_users(12, 1 / 3, 3, number).tolist()) for number in (1, 2, 3)]
    again = [0, len(rounds[1] & rounds[0]), len(rounds[2] & (rounds[0] | rounds[1]))]
    assert [r.bytes["up"]["latent"] for r in outcome.reports] == [64, 128, 192]
    found = [r.bytes["down"]["gradient"] for r in outcome.reports]
    assert found == [0, 16 * again[1], 16 * (again[1] + again[2])]
