"""What a run of nFedGNN leaves: predictions of those who answered, and both halves as modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from relay_helpers import CLASSES, FEATURES, run, small_graph

from flower_graph.models import build_server_model
from flower_graph.ops.active_rows import pack
from flower_graph.outputs.files import ROLES, write_outputs
from flower_graph.strategies.split_gradient_relay.kept import server_models, user_models
from flower_graph.strategies.split_gradient_relay.users import LinearCohort, UserSettings

READ = """
import sys
from importlib import import_module
from pathlib import Path
for name in ("flwr", "ray"):
    sys.modules[name] = None  # an import of it fails
import torch
from flower_graph.outputs.files import read_models
folder = Path(sys.argv[1])
given = torch.load(folder / "given.pt")
for name, (client, x, edges, wanted) in given.items():
    (one,) = read_models(folder / name)
    place, _, kind = one.module.rpartition(".")
    model = getattr(import_module(place), kind)(**one.arguments)
    model.load_state_dict(one.state_dict(client))
    torch.testing.assert_close(model.eval()(x, edges), wanted, atol=1e-5, rtol=1e-5)
print(len(given), "models")
"""


def test_both_halves_need_no_flower(tmp_path: Path) -> None:
    data, given, draw = small_graph(12), {}, torch.Generator().manual_seed(0)
    edges = data.edge_index[:, (data.edge_index != 5).all(0)]  # a node without neighbours
    for name in ("gcn", "gat", "sage"):
        how = {"hidden": 4, "heads": 2, "classes": CLASSES, "dropout": 0.5, "seed": 0}
        server = build_server_model(name, **how).eval()  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in server.parameters():
                parameter.normal_(generator=draw)
            latent = torch.randn(12, server.latent_size, generator=draw)
            given[name] = (-1, latent, edges, server(latent, edges))
        write_outputs(tmp_path / name, None, server_models(server))
    for bias in (False, True):
        cohort = trained(data.x, bias)
        users = [10 + user for user in range(12)]
        found = user_models(users, cohort.rows, cohort.tensors(), cohort.settings)
        write_outputs(tmp_path / f"users-{bias}", None, [found])
        given[f"users-{bias}"] = (17, data.x[7:8], None, cohort.forward(torch.tensor([7])))
    torch.save(given, tmp_path / "given.pt")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "5 models\n", done.stderr


def trained(x: torch.Tensor, bias: bool, average_over: str = "holders") -> LinearCohort:
    settings = UserSettings(4, bias, 0.1, 5e-4, 0, average_over)
    cohort = LinearCohort(pack(x, bias=bias), settings)
    for _ in range(3):
        cohort.step(None, torch.ones(x.shape[0], 4))
    return cohort


@pytest.mark.parametrize("average_over", ["holders", "all"])
def test_a_user_without_its_neighbours_in_the_file_has_its_own_rows(average_over: str) -> None:
    x = small_graph(4).x
    cohort = trained(x, True, average_over)
    found = user_models([0, 1, 2, 3], cohort.rows, cohort.tensors(), cohort.settings)
    state = found.state_dict(2)
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "linear.weight": (4, FEATURES),
        "linear.bias": (4,),
    }
    latent = x[2] @ state["linear.weight"].T + state["linear.bias"]
    torch.testing.assert_close(latent, cohort.forward(None)[2])


def test_predictions_are_those_of_the_last_report_and_of_who_answered() -> None:
    data = small_graph(24)
    outcome = run(data, rounds=4)
    found = outcome.strategy.snapshot().predictions
    assert found is not None and found.node.tolist() == list(range(24))
    right = found.predicted == found.label
    last = outcome.reports[-1]
    for role, accuracy in (
        ("train", last.train_accuracy),
        ("val", last.val_accuracy),
        ("test", last.test_accuracy),
    ):
        assert right[found.role == ROLES.index(role)].mean() == accuracy
    few = run(data, rounds=1, participation=0.25).strategy
    snapshot = few.snapshot()
    assert snapshot.predictions is not None and snapshot.embeddings is not None
    answered = few.server.known.nonzero().flatten().tolist()
    assert snapshot.predictions.node.tolist() == snapshot.embeddings.number.tolist() == answered
    assert len(answered) == 6
    latent = torch.from_numpy(snapshot.embeddings.embeddings)
    assert torch.equal(latent, few.server.latent[few.server.known])
