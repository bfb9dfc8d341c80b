"""What ego-networks leave of a run: models as plain PyTorch modules, predictions, figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ego_helpers import CLASSES, FEATURES, HIDDEN, PROJECTION, SETTINGS, toy_egos
from test_ego_cohort import everyone, full_round
from without_flower import run_without_flower

from flower_graph.engine.graph_batch import evaluate
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.outputs.files import ROLES, read_models, write_outputs
from flower_graph.strategies.masked_embedding_averaging.cohort import ChosenEgos, initial_weights
from flower_graph.strategies.masked_embedding_averaging.kept import (
    common_model,
    own_models,
    predictions_of,
)

# Reads models, and calls them on graphs, where Flower and Ray cannot be imported
READER = """
from importlib import import_module
from pathlib import Path
import torch
from flower_graph.outputs.files import read_models
out, graphs = Path(sys.argv[1]), torch.load(sys.argv[1] + "/graphs.pt")
found = {}
for folder in sorted(out.glob("models-*")):
    for saved in read_models(folder):
        module, _, name = saved.module.rpartition(".")
        for client in saved.clients:
            model = getattr(import_module(module), name)(**saved.arguments).eval()
            model.load_state_dict(saved.state_dict(client))
            with torch.no_grad():
                logits = {c: model(x, edges) for c, (x, edges) in graphs.items()}
            found[folder.name, client] = logits if client < 0 else logits[client]
torch.save(found, out / "logits.pt")
"""


def trained() -> ChosenEgos:
    chosen = everyone(toy_egos())
    for _ in range(3):
        full_round(chosen)
    return chosen


def logits_of(chosen: ChosenEgos) -> list[torch.Tensor]:
    sizes = torch.tensor(chosen.batch.ptr).diff().tolist()
    return list(chosen.classify(chosen.embed()).split(sizes))


def mean_of(chosen: ChosenEgos) -> ModelWeights:
    chosen.start_from(initial_weights(SETTINGS), replace=False)
    (mean,) = chosen.weighted_sums(torch.ones(12), divisor=12)
    return mean


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], torch.Tensor]:
    """Logits of saved models, from a process without Flower."""
    out, chosen = tmp_path_factory.mktemp("kept"), trained()
    write_outputs(out / "models-own", None, [own_models(chosen)])
    mean = common_model(mean_of(chosen), SETTINGS, [-1])
    write_outputs(out / "models-common", None, [mean])
    torch.save({e.client: (e.x, e.edge_index) for e in toy_egos()}, out / "graphs.pt")
    run_without_flower(READER, out)
    found: dict[tuple[str, int], torch.Tensor] = torch.load(out / "logits.pt")
    return found


def test_a_saved_model_is_a_plain_module(logits: dict[tuple[str, int], torch.Tensor]) -> None:
    chosen = trained()
    for client, expected in zip(chosen.batch.clients, logits_of(chosen), strict=True):
        torch.testing.assert_close(logits["models-own", client], expected, atol=1e-5, rtol=0)
    spread = max(float((one[0] - logits_of(chosen)[0][0]).abs().max()) for one in logits_of(chosen))
    assert spread > 0.01  # clients do differ


def test_the_mean_model_too(logits: dict[tuple[str, int], torch.Tensor]) -> None:
    chosen = trained()
    chosen.start_from(mean_of(chosen))
    for client, expected in zip(chosen.batch.clients, logits_of(chosen), strict=True):
        found = logits["models-common", -1][client]  # type: ignore[index]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_first_layer_is_saved_by_rows_that_clients_have(tmp_path: Path) -> None:
    chosen = trained()
    write_outputs(tmp_path, None, [own_models(chosen)])
    (saved,) = read_models(tmp_path)
    assert saved.rows is not None
    assert saved.rows.values.shape == (chosen.batch.feature.numel(), HIDDEN)
    assert saved.shared["conv1.lin.weight"].shape == (HIDDEN, FEATURES)  # once for all
    assert saved.own["projection.weight"].shape == (12, PROJECTION, HIDDEN)
    # A feature that a client has no node of is as it was when the run began.
    start = initial_weights(SETTINGS).first
    for ego in toy_egos():
        has = (ego.x != 0).any(0)
        found = saved.state_dict(ego.client)["conv1.lin.weight"].T
        assert torch.equal(found[~has], start[~has])
        assert not has.any() or not torch.isclose(found[has], start[has]).all()


def test_predictions_are_those_that_are_judged() -> None:
    egos, chosen = toy_egos(), trained()
    found = predictions_of(egos[::-1], chosen, None)  # in whatever order
    logits = chosen.classify(chosen.embed())
    judged = evaluate(chosen.batch, logits)
    assert np.array_equal(found.predicted, logits.argmax(1).numpy())
    assert found.probability == pytest.approx(logits.softmax(1).amax(1).numpy())
    for place, ego in enumerate(egos):
        own = found.of_client(ego.client)
        assert own.node.tolist() == ego.nodes.tolist()
        for number in range(len(ROLES) - 1):
            there = own.role == number + 1
            right = (own.predicted == own.label)[there]
            accuracy = right.mean() if right.size else np.nan
            assert judged.accuracy[place, number].item() == pytest.approx(accuracy, nan_ok=True)
    assert set(found.label.tolist()) <= {-1, *range(CLASSES)}


def test_a_node_is_called_what_its_user_calls_it() -> None:
    egos = [replace(ego, called=tuple(f"n{node}" for node in ego.nodes)) for ego in toy_egos()]
    egos[2] = replace(egos[2], called=None, names=tuple("abcdef"))
    found = predictions_of(egos, everyone(egos), None)
    assert found.of_client(102).node.tolist() == list("abcdef")
    assert found.of_client(101).node.tolist() == list(egos[1].called or ())
