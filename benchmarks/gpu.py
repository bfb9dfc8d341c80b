"""The same rounds and alignments on the CPU and on a GPU: equal numbers, and times.

Needs PyTorch alone: neither Flower nor Ray nor PyG has to be there. From a copy of the repository:
``python benchmarks/gpu.py [--quick]``. Without a GPU it runs on the CPU only and says so.

Dropout is off, because the two devices draw different random numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.bandwidth import settle, step_beside_triad, transfer_seconds
from benchmarks.ego_round import Overlap, engine_round
from benchmarks.gpu_engines import Attention, Communities
from benchmarks.ppfl_server import FORMS, Size, embeddings
from flower_graph.data.partition.ego_networks import partition_egos
from flower_graph.data.sources.generators import csbm
from flower_graph.engine.machine import resolve_device
from flower_graph.models import build_server_model
from flower_graph.ops.active_rows import ActiveRows, pack_csr
from flower_graph.rng import generator
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings
from flower_graph.strategies.split_gradient_relay.server_model import RelayServer
from flower_graph.strategies.split_gradient_relay.users import LinearCohort, UserSettings

HIDDEN, CLASSES, DEGREE, RATE = 16, 7, 10, 0.01
ROUNDS, WARM_UP = 10, 2
# Adam divides by the root of a gradient's square, so rounding shows in single numbers whose
# gradient is near zero; the norm over all of them is what float32 can promise.
TOLERANCE = 1e-4
# Users, features, active features of each user
SIZES = ((2_708, 1_433, 18), (19_717, 500, 50), (100_000, 512, 32))
GPU_SIZES = (*SIZES, (1_000_000, 512, 32))
QUICK = ((300, 64, 4),)
# Ego-network clients, nodes of the graph that they are cut out of
EGO_SIZES, EGO_QUICK = ((100, 5_000), (1_000, 20_000)), ((8, 200),)
EGO_DEGREE, EGO_FEATURES, EGO_ACTIVE = 5.0, 500, 20
# The engines of the other two methods: clients, nodes of each
ENGINES = {"FedGLS": Communities, "PPFL-GNN's GAT": Attention}
ENGINE_SIZES = {"FedGLS": ((100, 100), (400, 100)), "PPFL-GNN's GAT": ((10, 500), (10, 2_000))}
ENGINE_QUICK = {name: ((2, 40),) for name in ENGINES}
# Clients whose embeddings of common nodes PPFL-GNN's server aligns
ALIGNED = {"pairs": (Size(100), Size(300)), "consensus": (Size(100), Size(1_000))}
ALIGNED_QUICK = {form: (Size(5, 40, 4),) for form in ALIGNED}


class Run(NamedTuple):
    """Rounds on one device."""

    losses: list[float]  # of every round
    latent: Tensor  # the last latent vectors, on the CPU
    seconds: float  # a round's median
    transfer: float  # seconds that its latent vectors take to the host's memory and back
    step: dict[str, Any] | None = None  # nFedGNN's user step beside the memory bandwidth


def make_rows(users: int, features: int, active: int) -> ActiveRows:
    """Give every user one feature out of each of ``active`` ranges."""
    draw = generator(0, "features", users)
    width = features // active
    chosen = torch.randint(width, (users, active), generator=draw, dtype=torch.int32)
    chosen += torch.arange(active, dtype=torch.int32) * width
    pointers = torch.arange(users + 1) * active
    values = torch.full((users * active,), 1 / active)
    return pack_csr(pointers, chosen.flatten(), values, features)


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
    return RelayServer(
        data,
        model,
        latent_size=HIDDEN,
        reg_weight=1.0,
        weight_decay=5e-4,
        seed=0,
        device=device,
    )


def run(size: tuple[int, int, int], device: torch.device) -> Run:
    """Run rounds of one size on one device."""
    users, features, active = size
    settings = UserSettings(HIDDEN, False, 5e-4, 0, "holders")
    cohort = LinearCohort(make_rows(users, features, active).to(device), settings)
    server = make_server(users, device)
    everyone = torch.arange(users)
    losses, seconds = [], []
    for number in range(1, ROUNDS + 1):
        started = time.perf_counter()
        server.receive(everyone, cohort.forward(None))
        loss, gradient = server.step(number, RATE)
        server.accuracy()
        cohort.step(None, gradient, RATE)
        settle(device)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.total)
    latent = cohort.forward(None)
    found = latent.cpu().clone(), statistics.median(seconds[WARM_UP:]), transfer_seconds(latent)
    return Run(losses, *found, step_beside_triad(cohort, gradient, RATE, ROUNDS))


def compare(size: tuple[int, int, int], gpu: torch.device | None) -> dict[str, Any]:
    """Run one size on the CPU and, where there is one, on the GPU."""
    cpu = run(size, torch.device("cpu"))
    entry: dict[str, Any] = {"users": size[0], "cpu-seconds": cpu.seconds, "cpu-step": cpu.step}
    if gpu is None:
        return entry
    other = run(size, gpu)
    return entry | compare_runs(cpu, other, "latent") | {"gpu-step": other.step}


def compare_runs(cpu: Run, other: Run, what: str) -> dict[str, Any]:
    """Compare the GPU's run with the CPU's; ``what`` names its figures."""
    latent = ((other.latent - cpu.latent).norm() / cpu.latent.norm()).item()
    pairs = zip(cpu.losses, other.losses, strict=True)
    loss = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    return {
        "gpu-seconds": other.seconds,
        "transfer-seconds": other.transfer,
        "times-as-fast": cpu.seconds / other.seconds,
        f"{what}-difference": latent,
        "loss-difference": loss,
        "equal": max(latent, loss) <= TOLERANCE,
    }


def run_egos(size: tuple[int, int], device: torch.device) -> Run:
    """Run rounds of FedSCem; the figures are mean losses, embeddings and seconds."""
    clients, nodes = size
    data = csbm(
        nodes,
        CLASSES,
        degree=EGO_DEGREE,
        features=EGO_FEATURES,
        active=EGO_ACTIVE,
        homophily=0.8,
        seed=0,
    )
    partition = SimpleNamespace(
        hops=2, clients=clients, min_nodes=5, seed=0, split="per-client", ratios=[0.6, 0.2, 0.2]
    )
    egos = partition_egos(data, partition, 0)
    cohort = EgoCohort(egos, EgoSettings(EGO_FEATURES, CLASSES), device=device)
    chosen, overlap = cohort.choose([ego.client for ego in egos]), Overlap(egos, device)
    losses, seconds = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        losses.append(engine_round(chosen, overlap).loss.nanmean().item())
        seconds.append(time.perf_counter() - started)
    h = chosen.embed()
    return Run(losses, h.cpu(), statistics.median(seconds[WARM_UP:]), transfer_seconds(h))


def compare_egos(size: tuple[int, int], gpu: torch.device | None) -> dict[str, Any]:
    """Run one size of FedSCem on the CPU and, where there is one, on the GPU."""
    cpu = run_egos(size, torch.device("cpu"))
    nodes = cpu.latent.shape[0]
    entry: dict[str, Any] = {"clients": size[0], "nodes": nodes, "cpu-seconds": cpu.seconds}
    if gpu is None:
        return entry
    return entry | compare_runs(cpu, run_egos(size, gpu), "embedding")


def run_engine(name: str, size: tuple[int, int], device: torch.device) -> Run:
    """Run rounds of one size; the figures are losses, what is sent, and seconds."""
    engine, losses, seconds = ENGINES[name](*size, device), [], []
    for number in range(1, ROUNDS + 1):
        started = time.perf_counter()
        losses.append(engine.round(number))
        settle(device)
        seconds.append(time.perf_counter() - started)
    sent = engine.sent()
    return Run(losses, sent.cpu(), statistics.median(seconds[WARM_UP:]), transfer_seconds(sent))


def compare_engine(name: str, size: tuple[int, int], gpu: torch.device | None) -> dict[str, Any]:
    """Run one size of an engine on the CPU and, where there is one, on the GPU."""
    cpu = run_engine(name, size, torch.device("cpu"))
    entry = {"engine": name, "clients": size[0], "nodes": size[1], "cpu-seconds": cpu.seconds}
    if gpu is None:
        return entry
    return entry | compare_runs(cpu, run_engine(name, size, gpu), "sent")


def run_alignment(form: str, size: Size, device: torch.device) -> Run:
    """Align again and again; the figures are the means that go back, and seconds."""
    x, seconds = embeddings(size).to(device), []
    for _ in range(WARM_UP + 3):
        started = time.perf_counter()
        found = FORMS[form](x)
        settle(device)
        seconds.append(time.perf_counter() - started)
    means = found if isinstance(found, Tensor) else found.aligned
    return Run([], means.cpu(), statistics.median(seconds[WARM_UP:]), transfer_seconds(means))


def compare_alignment(form: str, size: Size, gpu: torch.device | None) -> dict[str, Any]:
    """Align one size on the CPU and, where there is one, on the GPU."""
    cpu = run_alignment(form, size, torch.device("cpu"))
    entry: dict[str, Any] = {"form": form, **size._asdict(), "cpu-seconds": cpu.seconds}
    if gpu is None:
        return entry
    differences = compare_runs(cpu, run_alignment(form, size, gpu), "means")
    del differences["loss-difference"]
    return entry | differences


def main() -> int:
    """Print the result as JSON; the exit code is 1 if CPU and GPU differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one tiny size")
    quick = parser.parse_args().quick
    gpu = resolve_device("cuda") if torch.cuda.is_available() else None
    if gpu is None:
        print("No CUDA GPU was found: CPU only, nothing to compare", file=sys.stderr)
    sizes = QUICK if quick else SIZES if gpu is None else GPU_SIZES
    entries = [compare(size, gpu) for size in sizes]
    card = None if gpu is None else torch.cuda.get_device_name(gpu)
    egos = [compare_egos(size, gpu) for size in (EGO_QUICK if quick else EGO_SIZES)]
    wanted = ALIGNED_QUICK if quick else ALIGNED
    aligned = [compare_alignment(form, size, gpu) for form in wanted for size in wanted[form]]
    tried = ENGINE_QUICK if quick else ENGINE_SIZES
    engines = [compare_engine(name, size, gpu) for name in tried for size in tried[name]]
    found = {"gpu": card, "rounds": ROUNDS, "tolerance": TOLERANCE}
    parts = {"entries": entries, "ego-entries": egos, "engines": engines, "aligned": aligned}
    print(json.dumps(found | parts))
    return int(not all(entry.get("equal", True) for part in parts.values() for entry in part))


if __name__ == "__main__":
    sys.exit(main())
