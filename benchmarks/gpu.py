"""The same rounds and alignments on the CPU and on a GPU: equal numbers, and times.

Needs PyTorch alone, without Flower, Ray or PyG. From a copy of the repository:
``python benchmarks/gpu.py [--quick]``. Without a GPU it runs on the CPU only and says so.

Dropout is off, because the two devices draw different random numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from flower_graph.config.module import GCNSection
from flower_graph.config.partition import PartitionSection
from flower_graph.data.partition.client_graphs import ClientGraph, split_nodes
from flower_graph.data.partition.ego_networks import partition_egos
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.data.sources.generators import csbm
from flower_graph.engine.machine import resolve_device
from flower_graph.models import build_server_model
from flower_graph.ops import align_pairs, consensus
from flower_graph.ops.active_rows import ActiveRows
from flower_graph.rng import generator
from flower_graph.strategies.fedgls.cohort import StructureCohort, initial_models
from flower_graph.strategies.fedgls.config import StructureSettings
from flower_graph.strategies.fedscem.cohort import EgoCohort, EgoGroup, Shared
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.nfedgnn.config import StrategyConfig
from flower_graph.strategies.nfedgnn.server_model import RelayServer
from flower_graph.strategies.nfedgnn.users import LinearCohort, UserSettings
from flower_graph.strategies.ppfl.config import GATConfig, PPFLConfig
from flower_graph.strategies.ppfl.modules import PublicGAT

HIDDEN, CLASSES, DEGREE, RATE = 16, 7, 10, 0.01
FEATURES, ACTIVE, EGO_DEGREE, RATIOS = 500, 20, 5.0, [0.6, 0.2, 0.2]
ROUNDS, WARM_UP = 10, 2
# Adam divides by the root of a gradient's square, so rounding shows in single numbers whose
# gradient is near zero; the norm over all of them is what float32 can promise.
TOLERANCE = 1e-4
# Sizes of each case, and the tiny one of `--quick`
SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "nFedGNN": ((2_708, 1_433, 18), (19_717, 500, 50), (100_000, 512, 32)),
    "FedSCem": ((100, 5_000), (1_000, 20_000)),
    "FedGLS": ((100, 100), (400, 100)),
    "PPFL-GNN's GAT": ((10, 500), (10, 2_000)),
    "alignment by pairs": ((100, 1_000, 16), (300, 1_000, 16)),
    "alignment by a consensus": ((100, 1_000, 16), (1_000, 1_000, 16)),
}
QUICK: dict[str, tuple[int, ...]] = {
    "nFedGNN": (300, 64, 4),
    "FedSCem": (8, 200),
    "FedGLS": (2, 40),
    "PPFL-GNN's GAT": (2, 40),
    "alignment by pairs": (5, 40, 4),
    "alignment by a consensus": (5, 40, 4),
}
T = TypeVar("T")


class Program(NamedTuple):
    """A round that returns its loss, and the tensors that travel after the last round."""

    round: Callable[[int], float]
    sent: Callable[[], Tensor]


def settle(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_rows(users: int, features: int, active: int) -> ActiveRows:
    """Give every user one feature out of each of ``active`` ranges."""
    draw = generator(0, "features", users)
    width = features // active
    chosen = torch.randint(width, (users, active), generator=draw, dtype=torch.int32)
    chosen += torch.arange(active, dtype=torch.int32) * width
    pointers = torch.arange(users + 1, dtype=torch.int32) * active
    values = torch.full((users * active,), 1 / active)
    return ActiveRows(pointers, chosen.flatten(), values, features)


SETTINGS = UserSettings(HIDDEN, False, 5e-4, 0)


def make_server(users: int, device: torch.device) -> RelayServer:
    """Build the server of a random graph."""
    draw = generator(0, "graph", users)
    ends = torch.randint(users, (2, users * DEGREE // 2), generator=draw)
    ends = ends[:, ends[0] != ends[1]]
    labelled = torch.arange(users) < max(CLASSES, users // 20)
    is_even = torch.arange(users) % 2 == 0
    data = SimpleNamespace(
        edge_index=torch.cat([ends, ends.flip(0)], 1),
        y=torch.randint(CLASSES, (users,), generator=draw),
        train_mask=labelled,
        val_mask=~labelled & is_even,
        test_mask=~labelled & ~is_even,
    )
    model = build_server_model("gcn", hidden=HIDDEN, heads=1, classes=CLASSES, dropout=0.0, seed=0)
    return RelayServer(data, model, StrategyConfig(reg_weight=1.0), SETTINGS, device)


def relay(device: torch.device, users: int, features: int, active: int) -> Program:
    """nFedGNN: users' forward pass, the server's step, users' step."""
    cohort = LinearCohort(make_rows(users, features, active).to(device), SETTINGS)
    server, everyone = make_server(users, device), torch.arange(users)

    def round_(number: int) -> float:
        server.receive(everyone, cohort.forward(None))
        loss, gradient = server.gradients(number, server.latent, server.known)
        server.move(number, RATE)
        server.accuracy()
        cohort.step(None, gradient, RATE)
        return loss["loss"]

    return Program(round_, lambda: cohort.forward(None))


def egos(device: torch.device, clients: int, nodes: int) -> Program:
    """FedSCem without messages, masks and alignment: train, average, fuse, evaluate."""
    partition = PartitionSection(clients=clients, min_nodes=5, seed=0, ratios=RATIOS)
    networks = partition_egos(_generated(0, nodes, homophily=0.8), partition, 0)
    cohort = EgoCohort(networks, EgoSettings(FEATURES, CLASSES), device=device)
    learner = cohort.group(cohort.clients)[1]
    group = EgoGroup(learner, cohort.settings)
    held = torch.cat([ego.nodes for ego in networks])
    _, slot, count = (
        part.to(device) for part in torch.unique(held, return_inverse=True, return_counts=True)
    )
    place = (count[slot] > 1).nonzero().flatten()

    def round_(number: int) -> float:
        group.train(1)
        h = group.embed()
        total = h.new_zeros(count.numel(), h.shape[1]).index_add_(0, slot, h)
        group.fuse(Shared(place, (total / count[:, None])[slot[place]]), 1)
        train = learner.graph.masks["train"]
        logits, y = group.logits()[train], learner.graph.y[train]
        return torch.nn.functional.cross_entropy(logits, y).item()

    return Program(round_, group.embed)


def communities(device: torch.device, clients: int, nodes: int) -> Program:
    """FedGLS: every second client has no edges and learns a graph."""
    settings = StructureSettings(FEATURES, CLASSES, model=GCNSection(dropout=0.0))
    graphs = [_community(client, nodes) for client in range(clients)]
    cohort = StructureCohort(graphs, settings, device=device)
    models = [_to(model, device) for model in initial_models(settings)]

    def round_(number: int) -> float:
        nonlocal models
        cohort.start_from(models)
        trained = cohort.train(number)
        models, _, _ = cohort.mean_models(set(cohort.clients) - set(trained.diverged))
        cohort.start_from(models)
        return cohort.evaluate().loss.nanmean().item()

    def sent() -> Tensor:
        parts = (part for model in models for part in (model.first, model.rest))
        return torch.cat([part.flatten() for part in parts])

    return Program(round_, sent)


def attention(device: torch.device, clients: int, nodes: int) -> Program:
    """PPFL-GNN with a GAT: each client is pulled towards its own public embeddings."""
    config = PPFLConfig(gat=GATConfig(dropout=0.0))
    members = [_to(_member(i, nodes), device) for i in range(clients)]
    models = [PublicGAT(member, config, CLASSES) for member in members]
    public = torch.arange(nodes // 2).numpy()

    def round_(number: int) -> float:
        losses = [model.learn(public, model.embed()[public], number) for model in models]
        return sum(losses) / len(losses)

    def sent() -> Tensor:
        return torch.cat([torch.from_numpy(model.embed()[public]) for model in models]).to(device)

    return Program(round_, sent)


def aligned(form: Callable[[Tensor], Any]) -> Callable[..., Program]:
    """Have the server of PPFL-GNN align embeddings of the same nodes again and again."""

    def build(device: torch.device, clients: int, nodes: int, dimension: int) -> Program:
        draw = generator(0, "alignment", clients)
        own = torch.randn(clients, nodes, dimension, generator=draw)
        turns = torch.linalg.qr(torch.randn(clients, dimension, dimension, generator=draw)).Q
        common = torch.randn(nodes, dimension, generator=draw)
        x = own.baddbmm_(common.expand(clients, -1, -1), turns).to(device)
        found: list[Any] = [None]

        def round_(number: int) -> float:
            found[0] = form(x)
            return 0.0

        return Program(
            round_, lambda: found[0] if isinstance(found[0], Tensor) else found[0].aligned
        )

    return build


def _community(client: int, nodes: int) -> ClientGraph:
    whole = _generated(client, nodes)
    edges = (None, whole.edge_index) if client % 2 == 1 else (whole.edge_index, None)
    masks = [torch.zeros(nodes, dtype=torch.bool) for _ in range(3)]
    graph = ClientGraph(client, torch.arange(nodes), whole.x, whole.y, *edges, *masks)
    return split_nodes(graph, RATIOS, 0)


def _member(client: int, nodes: int) -> OverlappingGraph:
    whole, place = _generated(client, nodes), torch.arange(nodes)
    masks = (place % 5 < 3, place % 5 == 3, place % 5 == 4)
    public = place < nodes // 2
    held = place, whole.x, whole.y, whole.edge_index, None, *masks
    return OverlappingGraph(client, *held, public=public, train_y=whole.y)


def _generated(seed: int, nodes: int, **more: float) -> Any:
    sizes = {"degree": EGO_DEGREE, "features": FEATURES, "active": ACTIVE}
    return csbm(nodes, CLASSES, **sizes, **more, seed=seed)  # type: ignore[arg-type]


def _to(thing: T, device: torch.device) -> T:
    parts = {field.name: getattr(thing, field.name) for field in fields(thing)}  # type: ignore[arg-type]
    moved = {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(thing, **moved)  # type: ignore[type-var]


PROGRAMS: dict[str, Callable[..., Program]] = {
    "nFedGNN": relay,
    "FedSCem": egos,
    "FedGLS": communities,
    "PPFL-GNN's GAT": attention,
    "alignment by pairs": aligned(align_pairs),
    "alignment by a consensus": aligned(consensus),
}


def run(
    name: str, size: tuple[int, ...], device: torch.device
) -> tuple[list[float], Tensor, float]:
    """Run rounds on one device; return losses, the last tensors, and a round's median seconds."""
    program, losses, seconds = PROGRAMS[name](device, *size), [], []
    for number in range(1, ROUNDS + 1):
        started = time.perf_counter()
        losses.append(program.round(number))
        settle(device)
        seconds.append(time.perf_counter() - started)
    return losses, program.sent().cpu().clone(), statistics.median(seconds[WARM_UP:])


def compare(name: str, size: tuple[int, ...], gpu: torch.device | None) -> dict[str, Any]:
    """Run one size on the CPU and, where there is one, on the GPU."""
    losses, sent, seconds = run(name, size, torch.device("cpu"))
    entry: dict[str, Any] = {"program": name, "size": size, "cpu-seconds": seconds}
    if gpu is None:
        return entry
    others, found, quick = run(name, size, gpu)
    apart = ((found - sent).norm() / sent.norm()).item()
    pairs = zip(losses, others, strict=True)
    loss = max(abs(a - b) / abs(a) if a else abs(b) for a, b in pairs)
    equal = max(apart, loss) <= TOLERANCE
    entry |= {"gpu-seconds": quick, "times-as-fast": seconds / quick, "equal": equal}
    return entry | {"sent-difference": apart, "loss-difference": loss}


def main() -> int:
    """Print the result as JSON; the exit code is 1 if CPU and GPU differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    quick = parser.parse_args().quick
    gpu = resolve_device("cuda") if torch.cuda.is_available() else None
    if gpu is None:
        print("No CUDA GPU was found: CPU only, nothing to compare", file=sys.stderr)
    entries = [
        compare(name, size, gpu)
        for name in PROGRAMS
        for size in ((QUICK[name],) if quick else SIZES[name])
    ]
    card = None if gpu is None else torch.cuda.get_device_name(gpu)
    print(json.dumps({"gpu": card, "rounds": ROUNDS, "tolerance": TOLERANCE, "entries": entries}))
    return int(not all(entry.get("equal", True) for entry in entries))


if __name__ == "__main__":
    sys.exit(main())
