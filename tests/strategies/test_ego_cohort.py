"""Cohorts of ego-networks against plain PyG clients, one by one, and for any assignment."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ego_helpers import (
    CLASSES,
    FEATURES,
    HIDDEN,
    PROJECTION,
    SETTINGS,
    PlainClient,
    toy_egos,
    toy_shared,
)
from torch import Tensor

from flower_graph.data.graph import Treatment
from flower_graph.data.new_graph import DataForm, NewGraph
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.method.load import load_config, to_yaml
from flower_graph.method.run import Run, load_run
from flower_graph.outputs.files import SavedModels, read_models, write_outputs
from flower_graph.strategies.fedscem.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    Shared,
    initial_weights,
    own_models,
    predictions_of,
)


def everyone(egos: Sequence[EgoNetwork], settings: EgoSettings = SETTINGS) -> ChosenEgos:
    return EgoCohort(egos, settings).choose([ego.client for ego in egos])


def full_round(chosen: ChosenEgos) -> None:
    """Take a step of each kind."""
    egos = {ego.client: ego for ego in toy_egos()}
    shared = toy_shared([egos[client] for client in chosen.batch.clients])
    chosen.train(1)
    chosen.fuse(shared, 1)
    chosen.fuse(shared, 1, classify=False)


def by_client(chosen: ChosenEgos) -> dict[int, Tensor]:
    """Return each client's embeddings, active rows and other weights, one behind the other."""
    batch, (first, rest) = chosen.batch, chosen.weights()
    sizes = torch.tensor(batch.ptr).diff().tolist(), torch.tensor(batch.row_ptr).diff().tolist()
    parts = zip(chosen.embed().split(sizes[0]), first.split(sizes[1]), rest, strict=True)
    flat = [torch.cat([part.reshape(-1) for part in own]) for own in parts]
    return dict(zip(batch.clients, flat, strict=True))


def test_all_clients_start_alike_as_pyg_and_pytorch_do():
    _, rest = everyone(toy_egos()).weights()
    start = initial_weights(SETTINGS)
    assert torch.equal(rest, start.rest.expand(12, -1))
    assert start.first.abs().max() <= (6 / (FEATURES + HIDDEN)) ** 0.5
    assert torch.equal(initial_weights(SETTINGS).rest, start.rest)
    assert not torch.equal(initial_weights(SETTINGS._replace(seed=4)).first, start.first)


def test_a_choice_is_these_clients_alone_and_leaves_the_others():
    egos = toy_egos()
    cohort, some = EgoCohort(egos, SETTINGS), [108, 101, 105]
    everybody = [ego.client for ego in egos]
    alone = everyone([egos[1], egos[5], egos[8]])
    full_round(cohort.choose(everybody))
    before = by_client(cohort.choose(everybody))
    for _ in range(3):
        full_round(cohort.choose(some))
    after = by_client(cohort.choose(everybody))
    # From here on the clients have taken different numbers of steps.
    full_round(cohort.choose(everybody))
    mixed = by_client(cohort.choose(everybody))
    for rounds, found in ((4, after), (1, mixed)):
        for _ in range(rounds):
            full_round(alone)
        own = {client: found[client] for client in sorted(some)}
        torch.testing.assert_close(own, by_client(alone), rtol=0, atol=1e-6)
    for client in set(before) - set(some):
        assert torch.equal(before[client], after[client])


def test_embeddings_are_kept_until_the_weights_change_whoever_changes_them():
    egos = toy_egos()
    cohort = EgoCohort(egos, SETTINGS)
    chosen, state = cohort.choose([ego.client for ego in egos]), cohort.tensors()
    seen = [chosen.embed()]
    assert chosen.embed().data_ptr() == seen[0].data_ptr()
    chosen.train(1)
    seen.append(chosen.embed())
    state["weight.rest"].mul_(2)
    seen.append(chosen.embed())
    # As another process does to a mapped state: PyTorch here hears nothing of it
    state["weight.rest"].numpy()[:] *= 2
    state["step"].numpy()[:] += 1
    seen.append(chosen.embed())
    assert all(not torch.equal(one, two) for one, two in pairwise(seen))
    anew = EgoCohort(egos, SETTINGS, {name: value.clone() for name, value in state.items()})
    assert torch.equal(seen[-1], anew.choose([ego.client for ego in egos]).embed())


def test_nobody_has_shared_nodes():
    nothing = Shared(torch.empty(0, dtype=torch.long), torch.empty(0, HIDDEN))
    fused, trained = everyone(toy_egos()), everyone(toy_egos())
    assert fused.fuse(nothing, 1).isnan().all()
    trained.train(1)
    torch.testing.assert_close(by_client(fused), by_client(trained), rtol=0, atol=0)
    fused.fuse(nothing, 1, classify=False)
    assert all(weights.isfinite().all() for weights in by_client(fused).values())


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
