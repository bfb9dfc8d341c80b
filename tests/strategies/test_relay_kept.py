"""What a run of nFedGNN leaves: predictions of those who answered, and both halves as modules."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_helpers import small_graph
from relay_helpers import run, strategy_for
from torch.nn import functional

from flower_graph import SplitGradientRelay
from flower_graph.outputs.build import build_module, form_of
from flower_graph.outputs.files import Embeddings, Predictions, Snapshot, read_models


@pytest.mark.parametrize("name", ["gcn", "gat", "sage"])
def test_the_servers_half_is_saved_as_it_was_trained(name: str, tmp_path: Path) -> None:
    data = small_graph(12)
    server = strategy_for(data, name).server.model.eval()
    Snapshot(None, [form_of(server, type(server), -1)]).write(tmp_path)
    (saved,) = read_models(tmp_path)
    latent = torch.randn(12, server.latent_size)
    again = build_module(saved)
    assert type(again) is type(server)
    assert torch.equal(again(latent, data.edge_index), server(latent, data.edge_index))


def test_predictions_are_of_who_answered() -> None:
    few = run(small_graph(24), rounds=1, participation=0.25).strategy
    snapshot = few.snapshot()
    assert snapshot.predictions is not None and snapshot.embeddings is not None
    answered = few.server.known.nonzero().flatten().tolist()
    assert snapshot.predictions.node.tolist() == snapshot.embeddings.number.tolist() == answered
    assert len(answered) == 6
    latent = torch.from_numpy(snapshot.embeddings.embeddings)
    assert torch.equal(latent, few.server.latent[few.server.known])


def keeping(folder: Path, rounds: int, *, left: Any = (), **how: Any) -> SplitGradientRelay:
    """Run three SuperNodes that keep their best round; go on from it if some have left."""
    data, out = small_graph(24), folder / "out"
    strategy = strategy_for(data, checkpoint_dir=folder, checkpoint_every=2, **how)
    if left:
        strategy.grow(data, left=left)
    of: dict[str, Any] = {"of_client": {"left": left, "out": out}, "folder": folder}
    of |= {"start": {"save": "all", "keep": "best", "output_dir": out}, "resume": bool(left)}
    return run(data, rounds=rounds, supernodes=3, strategy=strategy, **of).strategy


@pytest.mark.parametrize(
    ("user_bias", "averaging"),
    [(False, {}), (True, {}), (True, {"average_every": 2, "average_over": "all"})],
)
def test_users_halves_give_the_servers_latent_vectors(
    user_bias: bool, averaging: dict[str, Any], tmp_path: Path
) -> None:
    x = small_graph(24).x
    keeping(tmp_path, 5, user_bias=user_bias, **averaging)
    kept = Embeddings.read(tmp_path / "out")
    assert kept is not None and len(kept.number) == 24
    models = [read_models(path)[0] for path in sorted((tmp_path / "out" / "clients").glob("*"))]
    assert len(models) == 3, "one file a SuperNode"
    for user, latent in zip(kept.number.tolist(), kept.embeddings, strict=True):
        state = next(one for one in models if user in one.clients).state_dict(user)
        own = functional.pad(x[user], (0, int(user_bias)), value=1.0) @ state["weight"]
        torch.testing.assert_close(own, torch.from_numpy(latent))


def test_the_server_writes_figures_of_users(tmp_path: Path) -> None:
    strategy = keeping(tmp_path, 5, server_average=0.5)
    trained, average = (
        one.state_dict() for one in (strategy.server.model, strategy.server.eval_model)
    )
    assert torch.equal(strategy.weights()["server.bias"], average["bias"])
    learnt = strategy.learnt().to_torch_state_dict()
    assert torch.equal(learnt["bias"], average["bias"]) and learnt.keys() == trained.keys()
    assert not torch.equal(trained["bias"], average["bias"])
    with (tmp_path / "out" / "clients.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["client"] for line in lines[::2]] == [str(user) for user in range(24)]
    assert {(line["at"], line["rounds-measured"]) for line in lines} == {
        ("last", "5"),
        ("best", "5"),
    }
    best = [line for line in lines if line["at"] == "best" and line["val-accuracy"]]
    assert sum(float(line["val-accuracy"]) for line in best) / len(best) == strategy.best.accuracy
    # The last gradients travel later: in `train.finish`
    size = 4 * 4
    assert {(line["bytes-up"], line["bytes-down"]) for line in lines} == {
        (str(5 * size), str(4 * size))
    }


def test_who_left_is_in_no_output(tmp_path: Path) -> None:
    keeping(tmp_path, 4)
    keeping(tmp_path, 6, left=[2, 7])
    out = tmp_path / "out"
    folders = [out, *out.glob("snapshots/*"), *out.glob("clients/*"), *out.glob("clients/*/*/*")]
    there = set[int]()
    for folder in folders:
        predictions, embeddings = Predictions.read(folder), Embeddings.read(folder)
        there |= set() if predictions is None else set(predictions.node.tolist())
        there |= set() if embeddings is None else set(embeddings.number.tolist())
        there |= {user for one in read_models(folder) for user in one.clients}
    assert there == {-1, *range(24)} - {2, 7}
    assert not any(line.startswith(("2,", "7,")) for line in (out / "clients.csv").open())
