"""Communities that come to FedGLS later, beside training with all from the start.

``python -m benchmarks.newcomers.fedgls`` measures all; ``--data cora --seeds 0`` some, whose rows
take the place of those that the file has of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.newcomers.common import FOLDER, START, Row, write
from flower_graph.data.partition.client_graphs import ClientGraph
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.method.load import load_config
from flower_graph.rng import generator
from flower_graph.strategies.structure_fedavg.cohort import StructureCohort
from flower_graph.strategies.structure_fedavg.config import FedGLSConfig
from flower_graph.strategies.structure_fedavg.method import METHOD, structure_settings
from flower_graph.strategies.structure_fedavg.networks import StructureSettings, initial_models

DATA = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
SHARE, STEPS, ROUNDS = 0.1, (1, 5, 20, 50), 100
EDGES, GRAPHLESS = "with edges", "graphless"
NEAREST, AT_ONCE = "the run's model, no step", "the run's model, φ learnt first"
LEARNING = (10, 30, 100)  # steps of φ
VAL, TEST = 1, 2  # columns of accuracies
ALONE, ALL = "newcomers train alone", "everybody trains"
ABOUT = """Of the 8 communities of Cora and CiteSeer one comes later, once one with edges and once a
graphless one; of PubMed's 16 one of each together, drawn with the seed. Settings are those of
`fedgls/<data>`, with 100 rounds before. At 0 rounds newcomers use the means of θ and ω as they are.
A graphless one works on the graph of its nearest neighbours ("no step"), or first steps φ on L_c,
10, 30 or 100 times, which takes no label and no message. Then newcomers train, from the means,
alone among themselves or with everybody; others keep φ and Adam. Accuracy is the mean over clients
of that on their test nodes. *Others* are all that were there before. Bytes are arrays alone: a
round is both models down, up, and down to be measured. A data set that is not in the table, or
with fewer than three seeds, has not been measured yet. One community's test nodes are few: 20 to
60."""
Models = list[ModelWeights]


@dataclass
class Part:
    """Some clients, trained in one program."""

    cohort: StructureCohort

    def of(self, clients: Sequence[int], role: int = TEST) -> float:
        """Average the accuracy over some clients."""
        chosen = [place for place, one in enumerate(self.cohort.clients) if one in clients]
        return float(self.cohort.evaluate().accuracy[chosen, role].mean())


def train(
    parts: Sequence[Part],
    models: Models,
    rounds: range,
    on_round: Callable[[int], None] | None = None,
) -> Models:
    """Train for some rounds of FedAvg; all have the last means then."""
    for server_round in rounds:
        means, counts = [], []
        for part in parts:
            part.cohort.start_from(models)
            left_out = part.cohort.train(server_round).diverged
            mean, _, nodes = part.cohort.mean_models(left_out)
            means.append(mean)
            counts.append(nodes)
        models = [_mean([mean[n] for mean in means], counts) for n in range(len(models))]
        for part in parts:
            part.cohort.start_from(models)
        if on_round is not None:
            on_round(server_round)
    return models


def _mean(models: Sequence[ModelWeights], counts: Sequence[int]) -> ModelWeights:
    share = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    first, rest = (
        torch.tensordot(share, torch.stack([getattr(m, name) for m in models]).double(), 1).float()
        for name in ("first", "rest")
    )
    return ModelWeights(first, rest)


def held_back(graphs: Sequence[ClientGraph], seed: int) -> list[dict[str, list[int]]]:
    """Draw who comes later, by kind; several draws where only one community is a tenth."""
    count = max(1, round(SHARE * len(graphs)))
    order = torch.randperm(len(graphs), generator=generator(seed, "held-back")).tolist()
    drawn = {
        kind: [graphs[n].client for n in order if graphs[n].is_graphless == graphless]
        for kind, graphless in ((EDGES, False), (GRAPHLESS, True))
    }
    if count == 1:
        return [{kind: clients[:1]} for kind, clients in drawn.items()]
    sizes = {EDGES: count // 2, GRAPHLESS: count - count // 2}
    return [{kind: drawn[kind][:size] for kind, size in sizes.items()}]


class Held:
    """A federation some of whose clients come later."""

    def __init__(
        self, data: str, seed: int, graphs: Sequence[ClientGraph], settings: StructureSettings
    ) -> None:
        self.data, self.seed, self.graphs, self.settings = DATA[data], seed, graphs, settings
        self.validation: dict[int, list[float]] = {}  # of graphless newcomers, by steps of φ
        models = initial_models(settings)
        self.size = sum(4 * (model.first.numel() + model.rest.numel()) for model in models)

    def part(self, clients: Sequence[int]) -> Part:
        """Make some clients that have not trained."""
        graphs = [graph for graph in self.graphs if graph.client in clients]
        return Part(StructureCohort(graphs, self.settings))

    def rows(self) -> Iterator[Row]:
        """Measure everything."""
        everyone = [graph.client for graph in self.graphs]
        whole = self.part(everyone)
        train([whole], initial_models(self.settings), range(1, ROUNDS + 1))
        for later in held_back(self.graphs, self.seed):
            new = [client for clients in later.values() for client in clients]
            old = [client for client in everyone if client not in new]
            for kind, clients in later.items():
                sent = 3 * self.size * ROUNDS * len(everyone)
                figures = whole.of(clients), whole.of(old), sent
                yield self._row(kind, START, len(new), ROUNDS, *figures)
            yield from self._later(old, later)

    def _later(self, old: list[int], later: dict[str, list[int]]) -> Iterator[Row]:
        before, new = self.part(old), [c for clients in later.values() for c in clients]
        models, size = (
            train([before], initial_models(self.settings), range(1, ROUNDS + 1)),
            self.size,
        )
        others = before.of(old)
        for kind, clients in later.items():
            part, sent = self.part(clients), size * len(clients)
            part.cohort.start_from(models)
            if kind == GRAPHLESS:
                self.validation[0] = [part.of(clients, VAL)]
            yield self._row(kind, NEAREST, len(new), 0, part.of(clients), others, sent)
            if kind == GRAPHLESS:
                yield from self._learnt(part, clients, len(new), others)
            yield from self._trained([part], models, {kind: clients}, old, others)
        joined = [before, self.part(new)]
        yield from self._trained(joined, models, later, old, others)

    def _learnt(self, part: Part, clients: list[int], held: int, others: float) -> Iterator[Row]:
        """Learn φ by L_c alone; yield what it gives after some steps."""
        sent = self.size * len(clients)
        for step in range(1, max(LEARNING) + 1):
            part.cohort.learn_structure()
            if step in LEARNING:
                self.validation.setdefault(step, []).append(part.of(clients, VAL))
                what = f"{AT_ONCE} in {step} steps"
                yield self._row(GRAPHLESS, what, held, 0, part.of(clients), others, sent)

    def _trained(
        self,
        parts: list[Part],
        models: Models,
        later: dict[str, list[int]],
        old: list[int],
        others: float,
    ) -> list[Row]:
        """Train newcomers, alone or beside the others, who then come first."""
        rows, setting = list[Row](), ALONE if len(parts) == 1 else ALL
        held = sum(map(len, later.values()))
        count = held if setting == ALONE else held + len(old)

        def on_round(server_round: int) -> None:
            if (steps := server_round - ROUNDS) in STEPS:
                now = others if setting == ALONE else parts[0].of(old)
                sent = self.size * (3 * steps * count)
                for kind, clients in later.items():
                    figures = parts[-1].of(clients), now, sent
                    rows.append(self._row(kind, setting, held, steps, *figures))

        train(parts, models, range(ROUNDS + 1, ROUNDS + STEPS[-1] + 1), on_round)
        return rows

    def _row(
        self, kind: str, what: str, held: int, rounds: int, new: float, old: float, sent: int
    ) -> Row:
        return Row(self.data, self.seed, held, f"{kind}: {what}", rounds, new, old, sent)


def measure(data: str, seed: int) -> list[Row]:
    """Measure one data set with one seed."""
    config = load_config(f"fedgls/{data}", [f"seed={seed}"])
    assert isinstance(config, FedGLSConfig)
    held = Held(data, seed, METHOD.graphs(config), structure_settings(config))
    rows = list(held.rows())
    print(f"{data}, seed {seed}: validation accuracy by steps of φ: {held.validation}", flush=True)
    return rows


def known() -> list[Row]:
    """Read the rows that the file has."""
    path = FOLDER / "fedgls.json"
    if not path.is_file():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure data sets with seeds, and write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    asked = parser.parse_args(arguments)
    for data in asked.data:
        for seed in asked.seeds:
            rows = measure(data, seed)
            kept = [row for row in known() if (row.data, row.seed) != (DATA[data], seed)]
            order = list(DATA.values())
            write("FedGLS", ABOUT, sorted(kept + rows, key=lambda row: order.index(row.data)))
            print(f"{data}, seed {seed}: {len(rows)} rows")


if __name__ == "__main__":
    main()
