"""One SuperNode's weight-sharing clients: what they refuse, and what they keep between messages."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from plain_structure import FEDGLS
from structure_helpers import settings_of, toy_clients

from flower_graph.client import state
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort
from flower_graph.strategies.structure_fedavg.strategy import StructureClient

SETTINGS = settings_of(FEDGLS)


def changed(place: int, **values: Any) -> list[ClientGraph]:
    graphs = toy_clients()
    graphs[place] = replace(graphs[place], **values)
    return graphs


NOBODY = torch.zeros(7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("graphs", "said"),
    [
        ([], "graphs: none is given"),
        (changed(1, client=20), r"client numbers \[20, 20, 22.* are not all different"),
        (changed(1, x=torch.ones(7, 9)), "client 21 has 9 features, the run has 8"),
        (changed(1, y=torch.full((7,), 4)), "client 21 has class 4, the run's classes are 0 to 3"),
        (changed(1, train_mask=NOBODY), "client 21 has no training node: it cannot train"),
    ],
)
def test_clients_that_do_not_fit_are_refused(graphs: list[ClientGraph], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StructureClient(Context(1, 2, {}, RecordDict(), {}), graphs, SETTINGS)


@pytest.mark.parametrize("place", ["", ":memory:", "own"])
@pytest.mark.parametrize("small", [state.SMALL_BYTES, 0])
def test_an_error_inside_does_not_count(
    place: str, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "SMALL_BYTES", small)
    place = str(tmp_path) if place == "own" else place
    run_id = secrets.randbits(40)
    context = Context(run_id, 2, {"state-dir": place}, RecordDict(), {})
    host = StructureClient(context, toy_clients(), SETTINGS)
    with host.opened() as cohort:
        cohort.train(1)
        before = {name: tensor.clone() for name, tensor in cohort.tensors().items()}
    with pytest.raises(OSError, match="full"), host.opened() as cohort:
        cohort.train(2)
        raise OSError("the disk is full")
    with StructureClient(context, toy_clients(), SETTINGS).opened() as cohort:
        assert all(torch.equal(cohort.tensors()[name], tensor) for name, tensor in before.items())
        # The graphs too are made of what the learners were.
        _, fresh = cohort._adjacency(), StructureCohort(toy_clients(), SETTINGS, before)
        assert torch.equal(cohort.evaluate().loss, fresh.evaluate().loss)
    state.forget_run(run_id)
