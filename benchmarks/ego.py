"""A round of FedSCem by the batched engine, beside a plain loop over the same clients with PyG.

Rounds of both are run in turns, so that they meet the same state of the machine. Messages, masks
and alignment are in neither. Run alone: ``python -m benchmarks.ego [--quick]``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import GCNConv

from benchmarks.ego_round import Overlap, engine_round
from benchmarks.measure import peak_bytes, run_part, say, summary
from flower_graph.data import load_data
from flower_graph.data.partition.ego_networks import EgoNetwork, partition_egos
from flower_graph.engine.machine import keep_freed_memory
from flower_graph.errors import DataError
from flower_graph.method.load import load_config
from flower_graph.strategies.masked_embedding_averaging.cohort import EgoCohort, EgoSettings

# The target is for the engine with masks and alignment.
TARGETS = {"ratio": 0.2, "bytes": 8 * 2**30}
WARM_UP = 2  # rounds that are not counted
CONFIGS = ("fedscem/cora", "fedscem/citeseer", "fedscem/pubmed")
QUICK = ("fedscem/cora-linqs",)
THREADS = (1, 2)


class PlainClient(nn.Module):
    """A client as PyG's users write it; the normalised graph is kept between rounds."""

    def __init__(self, ego: EgoNetwork, settings: EgoSettings) -> None:
        super().__init__()
        h = settings.hidden
        self.settings = settings
        self.x = ego.x.to_dense() if ego.x.layout == torch.sparse_csr else ego.x
        self.y, self.edge_index = ego.y, ego.edge_index
        self.masks = ego.train_mask, ego.val_mask, ego.test_mask
        self.first = GCNConv(settings.num_features, h, cached=True)
        self.second = GCNConv(h, h, cached=True)
        self.classifier = nn.Linear(h, settings.num_classes)
        self.head = nn.Linear(h, settings.projection)
        self.optimizer = torch.optim.Adam(
            self.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    def embed(self) -> Tensor:
        """Return ``[n_c, h]``."""
        return F.relu(self.second(F.relu(self.first(self.x, self.edge_index)), self.edge_index))

    def classification(self, h: Tensor) -> Tensor:
        """Return ``L_nc``."""
        return F.cross_entropy(self.classifier(h)[self.masks[0]], self.y[self.masks[0]])

    def contrast(self, h: Tensor, rows: Tensor, mean: Tensor) -> Tensor:
        """Return ``L_ct``, by matrices."""
        if not rows.numel():
            return h.new_zeros(())
        z, means = F.normalize(self.head(h)), F.normalize(self.head(mean))
        logits = z[rows] @ torch.cat([z, means]).T / self.settings.tau
        number = torch.arange(rows.numel())
        itself = torch.zeros_like(logits, dtype=torch.bool)
        itself[number, rows] = True
        return F.cross_entropy(logits.masked_fill(itself, -torch.inf), number + h.shape[0])

    def step(self, loss: Callable[[Tensor], Tensor]) -> None:
        """Take one step on a loss of the embeddings."""
        self.optimizer.zero_grad()
        loss(self.embed()).backward()
        self.optimizer.step()

    def judge(self) -> list[float]:
        """Return the accuracy on the nodes for training, validation and test."""
        right = (self.classifier(self.embed()).argmax(1) == self.y).float()
        return [right[mask].mean().item() for mask in self.masks]


def plain_round(clients: Sequence[PlainClient], overlap: Overlap) -> list[list[float]]:
    """Take the round of ``engine_round``, client by client."""
    for client in clients:
        client.step(client.classification)
    with torch.no_grad():
        parts = [client.embed() for client in clients]
    sizes = [part.shape[0] for part in parts]
    ends = torch.tensor(sizes).cumsum(0)
    counts = torch.bincount(
        torch.searchsorted(ends, overlap.place, right=True), minlength=len(sizes)
    )
    means = overlap.mean(torch.cat(parts)).split(counts.tolist())
    places = overlap.place.split(counts.tolist())
    for client, end, size, place, mean in zip(clients, ends, sizes, places, means, strict=True):
        rows = place - (end - size)
        client.step(
            lambda h, client=client, rows=rows, mean=mean: (
                client.classification(h) + client.settings.mu * client.contrast(h, rows, mean)
            )
        )
    with torch.no_grad():
        return [client.judge() for client in clients]


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure one configuration, or say why it cannot be."""
    config = load_config(name, ["device=cpu"])
    try:
        data = load_data(config.data, seed=config.seed, download=False)
    except DataError:
        return {"config": name, "skipped": f"{config.data.name} is not on this machine"}
    keep_freed_memory()
    egos = partition_egos(data, config.partition, config.seed)
    how = config.strategy
    settings = EgoSettings(int(data.x.shape[1]), int(data.num_classes), mu=how.mu, tau=how.tau)
    before = time.perf_counter()
    cohort = EgoCohort(egos, settings)
    packing = time.perf_counter() - before
    numbers = [ego.client for ego in egos]
    choosing = summary([timed(lambda k=k: cohort.choose(numbers[k:])) for k in range(1, 6)])
    chosen, overlap = cohort.choose(numbers), Overlap(egos)
    engine_round(chosen, overlap)
    peak = peak_bytes()
    clients = [PlainClient(ego, settings) for ego in egos]
    runs = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        times = [
            (
                timed(lambda: engine_round(chosen, overlap)),
                timed(lambda: plain_round(clients, overlap)),
            )
            for _ in range(WARM_UP + rounds)
        ]
        engine, plain = (summary(column) for column in zip(*times[WARM_UP:], strict=True))
        ratio = engine["median"] / plain["median"]
        runs.append({"threads": threads, "engine": engine, "plain": plain, "ratio": ratio})
    return {
        "config": name,
        "data": config.data.name,
        "clients": len(egos),
        "nodes": cohort.batch.ptr[-1],
        "shared": overlap.place.numel(),
        "packing-seconds": packing,
        "choosing": choosing,
        "peak-bytes": peak,
        "runs": runs,
    }


def main() -> None:
    """Print the result as JSON; each configuration is measured in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--config")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    if given.config:
        print(json.dumps(measure(given.config, given.rounds)))
        return
    load, entries = os.getloadavg()[0], []
    for name in QUICK if given.quick else CONFIGS:
        say(f"ego: {name}")
        rounds = 1 if given.quick else given.rounds
        entries.append(run_part("ego", ["--config", name, "--rounds", str(rounds)]))
    if all("skipped" in entry for entry in entries):
        entries.append(run_part("ego", ["--config", QUICK[0], "--rounds", str(given.rounds)]))
    print(json.dumps({"load": load, "entries": entries, "targets": TARGETS}))


if __name__ == "__main__":
    main()
