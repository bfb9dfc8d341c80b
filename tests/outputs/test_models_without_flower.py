"""A saved model of FedGLS, FED-PUB or FedSage+ needs PyTorch and PyG, neither Flower nor Ray."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from sage_helpers import learners_of, networks, new_client
from structure_helpers import settings_of, toy_clients
from without_flower import Given, call_saved

from flower_graph import models
from flower_graph.outputs.files import SavedModels, write_outputs
from flower_graph.outputs.form import form_of
from flower_graph.strategies.fed_pub import Masked
from flower_graph.strategies.fedgls import modules
from flower_graph.strategies.fedgls.cohort import StructureCohort


@pytest.mark.slow  # a process that imports PyG
def test_models_need_no_flower(tmp_path: Path) -> None:
    given = list[Given]()

    def add(
        name: str,
        forms: list[SavedModels],
        client: int,
        *rest: *tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        write_outputs(tmp_path / name, None, forms)
        given.append((name, client, "__call__", *rest))

    cohort = StructureCohort(toy_clients(), settings_of("structure-fedavg"))
    cohort.train(1)
    cohort.start_from(cohort.mean_models([])[0])
    begin, end = (cohort.batch.ptr[cohort.clients.index(21) + more] for more in (0, 1))
    x, edges = toy_clients()[1].x, torch.zeros((2, 0), dtype=torch.int64)
    forms = modules.models_of(cohort, shared=True)
    add("fedgls", forms, 21, x, edges, cohort.logits()[begin:end])

    alone, ego = new_client(networks()[:1], averages=False), networks()[0]
    alone.fit([], {"server-round": 1})
    logits = learners_of(alone)[0].module(ego.x, ego.edge_index).detach()
    add("sage", alone.snapshot().models, ego.client, ego.x, ego.edge_index, logits)

    make = partial(models.GCN, ego.x.shape[1], 4, 3)
    masked = Masked(make(), 0.1)
    for mask in masked.masks.values():
        torch.nn.init.uniform_(mask, -1, 1, generator=torch.Generator().manual_seed(0))
    wanted = masked.eval()(ego.x, ego.edge_index).detach()
    form = form_of(masked.merged(), make, 4)
    add("fedpub", SavedModels.join([form]), 4, ego.x, ego.edge_index, wanted)

    call_saved(tmp_path, given)
