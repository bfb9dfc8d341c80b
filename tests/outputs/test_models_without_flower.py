"""A saved model of FedGLS, FED-PUB or FedSage+ needs PyTorch and PyG, neither Flower nor Ray."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from sage_helpers import CLASSES, networks
from structure_helpers import settings_of, toy_clients

from flower_graph import models
from flower_graph.outputs.files import SavedModels, write_outputs
from flower_graph.outputs.form import form_of
from flower_graph.strategies.fed_pub import Masked
from flower_graph.strategies.fed_sage import kept as sage
from flower_graph.strategies.fed_sage.cohort import SageCohort, SageSettings
from flower_graph.strategies.structure_fedavg import kept
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort

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
    (one,) = [form for form in read_models(folder / name) if client in form.clients]
    place, _, kind = one.module.rpartition(".")
    model = getattr(import_module(place), kind)(**one.arguments)
    model.load_state_dict(one.state_dict(client))
    torch.testing.assert_close(model.eval()(x, edges), wanted, atol=1e-5, rtol=1e-5)
print(len(given), "models")
"""


@pytest.mark.slow  # a process that imports PyG
def test_models_need_no_flower(tmp_path: Path) -> None:
    given = {}

    def add(name: str, forms: list[SavedModels], client: int, *rest: torch.Tensor) -> None:
        write_outputs(tmp_path / name, None, forms)
        given[name] = (client, *rest)

    cohort = StructureCohort(toy_clients(), settings_of("structure-fedavg"))
    cohort.train(1)
    cohort.start_from(cohort.mean_models([])[0])
    begin, end = (cohort.batch.ptr[cohort.clients.index(21) + more] for more in (0, 1))
    x, edges = toy_clients()[1].x, torch.zeros((2, 0), dtype=torch.int64)
    forms = kept.models_of(cohort, shared=True)
    add("fedgls", forms, 21, x, edges, cohort.logits()[begin:end])

    alone = SageCohort(networks()[:1], CLASSES, SageSettings(6, 0.02, 0.0, 2, 4, 5), x.device)
    alone.pretrain()
    alone.begin()
    ego, logits = networks()[0], alone.logits()
    add("sage", [sage.models_of(alone)], ego.client, ego.x, ego.edge_index, logits)

    make = partial(models.GCN, ego.x.shape[1], 4, 3)
    masked = Masked(make(), 0.1)
    for mask in masked.masks.values():
        torch.nn.init.uniform_(mask, -1, 1, generator=torch.Generator().manual_seed(0))
    wanted = masked.eval()(ego.x, ego.edge_index).detach()
    form = form_of(masked.merged(), make, 4)
    add("fedpub", SavedModels.join([form]), 4, ego.x, ego.edge_index, wanted)

    torch.save(given, tmp_path / "given.pt")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "3 models\n", done.stderr
