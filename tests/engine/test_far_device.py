"""Every engine's step on a device that is not the CPU: the same numbers, and what it waits for.

What this cannot see: whether a GPU's kernel gives these numbers (`benchmarks/gpu.py` compares them
where there is one), how long it takes, operations that wait without a copy (`nonzero`, a boolean
mask, `repeat_interleave`), random numbers of the device's own, copies from the host to the device,
and whether memory is pinned. PyTorch's Adam for the common layer, and modules that users bring to
a `ModuleClient`, are PyTorch's and theirs.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from ego_helpers import SETTINGS as EGO
from ego_helpers import toy_egos, toy_shared
from graph_helpers import CLASSES, small_graph
from other_device import ELSEWHERE, Far, watched
from test_gat import ROWS, Client, make_client, make_targets
from test_gat import SETTINGS as GAT
from torch import Tensor

from flower_graph.models import build_server_model
from flower_graph.ops.active_rows import pack
from flower_graph.strategies.fedscem.modules import EgoCohort, EgoGroup, Shared
from flower_graph.strategies.nfedgnn.strategy import RelayServer, config_of
from flower_graph.strategies.nfedgnn.users import CommonLayer, LinearCohort, UserSettings
from flower_graph.strategies.ppfl.modules import PublicGAT

USERS = UserSettings(4, True, 5e-4, 0, "holders")
DATA = small_graph(12)
Place = torch.device
Step = Callable[[], None]
Reply = Callable[[], list[Tensor]]


def linear(device: Place) -> tuple[Step, Reply]:
    cohort = LinearCohort(pack(DATA.x, bias=True).to(device), USERS)
    cohort.hold(cohort.start())
    some = torch.tensor([1, 4, 7])

    def step() -> None:
        cohort.step(None, torch.ones(12, 4, device=device), 0.01)
        cohort.step(some, torch.ones(3, 4, device=device), 0.01)

    return step, lambda: [cohort.forward(None), cohort.forward(some)]


def relay_server(device: Place) -> tuple[Step, Reply]:
    config = config_of(reg_weight=1.0, seed=3)
    config.device = str(device)  # which no user may choose
    model = build_server_model("gcn", hidden=4, heads=1, classes=CLASSES, dropout=0.0, seed=3)
    server = RelayServer(DATA, model, config, 4)
    latent = torch.rand(12, 4, generator=torch.Generator().manual_seed(1)).to(device)
    found: list[Tensor] = []

    def step() -> None:
        server.receive(torch.arange(12), latent)
        found[:] = [server.gradients(1, server.latent, server.known)[1]]
        server.move(1, 0.01)

    return step, lambda: found


def egos(device: Place) -> tuple[Step, Reply]:
    cohort = EgoCohort(toy_egos(), EGO, device=device)
    group = EgoGroup(cohort.group(cohort.clients), EGO)
    shared = Shared(*(part.to(device) for part in toy_shared(toy_egos())))

    def step() -> None:
        group.train(1)
        group.fuse(shared, 1)

    return step, lambda: [group.embed(), group.logits()]


def common_layer(device: Place) -> tuple[Step, Reply]:
    settings = UserSettings(4, True, 5e-4, 0, dropout=0.5)
    users = torch.arange(12, device=device)
    common = CommonLayer(pack(DATA.x, bias=True).to(device), users, settings)
    common.hold({name: t.to(device) for name, t in common.start().items()})
    total: list[Tensor] = []

    def step() -> None:
        total[:] = [common.gradient(users, torch.ones(12, 4, device=device), 1)]

    return step, lambda: [*total, common.forward(users, 1)]


def attention(device: Place) -> tuple[Step, Reply]:
    still = dataclasses.replace(GAT, gat=dataclasses.replace(GAT.gat, dropout=0.0))
    model = PublicGAT(placed(make_client(), device), still, 3)
    return (
        lambda: (model.learn(ROWS, make_targets(), 1), None)[1],
        lambda: [torch.from_numpy(model.embed())],
    )


def placed(graph: Client, device: Place) -> Client:
    parts = {name: getattr(graph, name) for name in graph.__dataclass_fields__}
    moved = {n: t.to(device) for n, t in parts.items() if isinstance(t, Tensor)}
    return dataclasses.replace(graph, **moved)


ENGINES = {f.__name__: f for f in (linear, relay_server, egos, common_layer, attention)}
SERVER = "strategies/nfedgnn/strategy.py"
EGOS = "strategies/fedscem/modules.py"
# Where a step waits for the device: numbers that it reads, and tensors that it copies to the host
READS = {
    # Losses, which go to the report, and sizes that depend on who has answered
    "relay_server": {f"{SERVER}:{f}" for f in ("gradients", "receive", "among", "entropy")},
    "egos": {f"{EGOS}:_contrast_losses"},  # how many shared nodes each client has
    # Losses, which are replied, and once the bounds of clients' edges
    "attention": {f"strategies/ppfl/modules.py:{f}" for f in ("train", "of")},
}
COPIES = {
    "egos": {f"{EGOS}:_contrast"},  # losses, which are replied
    "common_layer": {"flower_graph/rng.py:chances"},  # what users drop is drawn on the host
}
REPLIES = {
    "attention": {"strategies/ppfl/modules.py:outputs"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_elsewhere_gives_the_same_and_waits_where_it_is_known_to(name: str) -> None:
    step, reply = ENGINES[name](torch.device("cpu"))
    step()
    here = reply()
    with watched():
        step, reply = ENGINES[name](ELSEWHERE)
        with watched() as log:
            step()
        with watched() as replies:
            there = reply()
    assert log.mixed + replies.mixed == {}
    assert set(log.reads) == READS.get(name, set())
    assert set(log.copies) == COPIES.get(name, set())
    assert set(replies.copies) == REPLIES.get(name, set())
    for one, other in zip(here, there, strict=True):
        near = other.near if isinstance(other, Far) else other
        assert torch.equal(one.nan_to_num(7.5), near.nan_to_num(7.5))
