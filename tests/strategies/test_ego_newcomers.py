"""New clients of a trained run: with the mean model, with a client's, and with nobody's."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ego_helpers import CLASSES, FEATURES, SETTINGS, PlainClient, toy_egos
from test_ego_cohort import everyone, full_round
from torch import Tensor

from flower_graph.data.graph import Treatment
from flower_graph.data.new_graph import DataForm, NewGraph
from flower_graph.method.load import load_config, to_yaml
from flower_graph.method.run import Run, load_run
from flower_graph.outputs.files import SavedModels, write_outputs
from flower_graph.strategies.fedscem.cohort import initial_weights, own_models

NEW, ROUNDS = toy_egos()[8], 3
SAME = (
    *("model.hidden=5", "model.projection=4", "seed=3", f"rounds={ROUNDS}"),
    *("strategy.learning_rate=0.005", "strategy.weight_decay=0.01"),
)


def trained_run(folder: Path, models: list[SavedModels], *overrides: str) -> Run:
    """Write what a run of all toy clients leaves, of which a newcomer needs."""
    folder.mkdir()
    config = load_config("fedscem/cora-linqs", [*SAME, *overrides])
    (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    form = DataForm(Treatment("as-is", FEATURES), CLASSES, None)
    (folder / "data.json").write_text(json.dumps(form.to_json()), encoding="utf-8")
    chosen = everyone(toy_egos())
    full_round(chosen)
    write_outputs(folder / "clients" / "0", None, [own_models(chosen)])
    write_outputs(folder, None, models)
    return load_run(folder)


def new(y: Tensor | None = None, **values: Any) -> NewGraph:
    nobody = torch.full_like(NEW.y, -1)
    return NewGraph(NEW.x, NEW.edge_index, nobody if y is None else y, values=values)


@pytest.mark.parametrize("name", ["masked-embedding-averaging", "self-training"])
def test_without_a_mean_a_newcomer_trains_alone_and_hears_it(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained_run(tmp_path / "run", [], f"strategy.name={name}")
    with caplog.at_level(logging.WARNING):
        found = run.predict_graph(new(NEW.y, train_mask=NEW.train_mask))
    alone = PlainClient(NEW, initial_weights(SETTINGS), SETTINGS)
    for _ in range(ROUNDS):
        alone.step()
    with torch.no_grad():
        expected = alone.classifier(alone.embed()).softmax(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert f"{int(NEW.train_mask.sum())} nodes" in caplog.text
