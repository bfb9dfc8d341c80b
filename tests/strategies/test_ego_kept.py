"""What ego-networks leave of a run: models as plain PyTorch modules, predictions, figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from ego_helpers import FEATURES, HIDDEN, PROJECTION, SETTINGS, toy_egos
from test_ego_cohort import everyone, full_round

from flower_graph.outputs.files import read_models, write_outputs
from flower_graph.strategies.fedscem.cohort import (
    ChosenEgos,
    initial_weights,
    own_models,
    predictions_of,
)


def trained() -> ChosenEgos:
    chosen = everyone(toy_egos())
    for _ in range(3):
        full_round(chosen)
    return chosen


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


def test_a_node_is_called_what_its_user_calls_it() -> None:
    egos = [replace(ego, called=tuple(f"n{node}" for node in ego.nodes)) for ego in toy_egos()]
    egos[2] = replace(egos[2], called=None, names=tuple("abcdef"))
    found = predictions_of(egos, everyone(egos), None)
    assert found.of_client(102).node.tolist() == list("abcdef")
    assert found.of_client(101).node.tolist() == list(egos[1].called or ())
