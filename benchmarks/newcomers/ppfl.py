"""PPFL-GNN: a graph that comes when the others are trained, and is put beside them.

``python -m benchmarks.newcomers.ppfl [--only GAT/Cora] [--seeds 0,1,2]`` adds what it measures to
the rows that are there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from benchmarks.newcomers.common import FOLDER, START, Row, numbers, write
from flower_graph.client.adaptor import make_client_app
from flower_graph.data.partition.overlapping import OverlappingGraph
from flower_graph.method.load import load_config
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.procrustes_alignment.cohort_client import PublicNodeClient
from flower_graph.strategies.procrustes_alignment.evaluation import GraphJudge, untrained
from flower_graph.strategies.procrustes_alignment.method import METHOD, make_member
from flower_graph.strategies.procrustes_alignment.newcomer import (
    HELD_BACK,
    PublicSpace,
    join_space,
    learn_beside,
)

METHOD_NAME, CLIENTS, BESIDE, ROUNDS = "PPFL", 10, 0, (0, 1, 5, 20, 50)
CONFIGS = {"GAT": "ppfl/cora-gat", "DeepWalk": "ppfl/cora-deepwalk"}
DATA = ("Cora", "CiteSeer", "PubMed")
SHARES = [f"partition.clients={CLIENTS}", "partition.private_share=0.06"]
JUDGING = ["judge.every=1000000", "judge.mlp=false"]
ALONE, PULLED = "alone, then aligned", "pulled to public nodes"
ABOUT = f"""Ten clients have 40 % of the nodes in common and 6 % each alone; one of them comes
when the others have trained for 10 rounds, with the settings of `ppfl/cora-gat` or
`ppfl/cora-deepwalk`. It gets the embeddings of the public nodes in one client's space, once, and
sends nothing. *{ALONE}*: it trains at home and turns its embeddings into that space. *{PULLED}*:
in each round after its first it turns these embeddings into its own space, and learns from them as
from means. A fifth of the public nodes is held back from both: *P@k* says how often such a node is
among the k nearest to where the newcomer puts it (from the start: nodes that all were trained
with). *Newcomers* and *others* are judged as every client is, by an SVC among the client's own test
nodes; *there* is an SVC that the other client trained on its own embeddings, asked for the classes
of the newcomer's private nodes that it did not train with. Settings are those of the shipped
configs; nothing was chosen by these figures. What is not in the table was not measured."""


class Trained(NamedTuple):
    """What a run leaves."""

    places: dict[int, Any]  # nodes, public and embeddings of each client
    accuracy: dict[int, float]
    payload: int


def train(config: Any, graphs: Sequence[OverlappingGraph], classes: int) -> Trained:
    """Train some clients together."""
    members = [make_member(graph, config, classes) for graph in graphs]
    with TemporaryDirectory() as folder:

        def client(context: Context) -> PublicNodeClient:
            return PublicNodeClient(context, members, save_to=Path(folder))

        strategy = METHOD.build_strategy(config, None)
        strategy.start(
            InProcessGrid(make_client_app(client), num_supernodes=1), num_rounds=config.rounds
        )
        places = {}
        for graph in graphs:
            with np.load(Path(folder) / f"client-{graph.client}.npz") as file:
                places[graph.client] = dict(file)
    payload = strategy.session.exchange.ledger.payload
    sent = sum(amount for way in payload.values() for amount in way.values())
    return Trained(places, strategy.clients.measured["test"], sent)


class Beside:
    """One client's space, what is held back of it, and its own SVC."""

    def __init__(self, trained: Trained, graphs: Sequence[OverlappingGraph], config: Any) -> None:
        self.new, found = graphs[-1], trained.places[BESIDE]
        self.config, self.nodes = config, self.new.nodes.numpy()
        whole = PublicSpace(found["nodes"][found["public"]], found["embeddings"][found["public"]])
        self.space, self.held = whole.split(self.nodes, HELD_BACK, config.seed)
        known = GraphJudge(graphs[BESIDE], config)
        judged = (known.roles >= 2) & (known.labels >= 0)
        self.svc = untrained("svc").fit(found["embeddings"][judged], known.labels[judged])
        self.judge = GraphJudge(self.new, config)

    def figures(self, embeddings: NDArray[np.float32]) -> tuple[float, dict[str, float]]:
        """Judge the newcomer's embeddings as they are, and beside the others'."""
        joined = join_space(embeddings, self.nodes, self.space, self.held)
        more = {f"P@{k}": share for k, share in joined.precision.items() if k != 5}
        own = (~self.new.train_mask & ~self.new.public & (self.new.y >= 0)).numpy()
        said = self.svc.predict(joined.embeddings[own])
        more["there"] = float((said == self.judge.labels[own]).mean())
        return self.judge(embeddings, 1, True)["test"], more


def measure(model: str, data: str, seed: int) -> Iterator[Row]:
    """Measure one model on one data set."""
    settings = [f"data.name={data}", f"seed={seed}", *SHARES, *JUDGING]
    config = load_config(CONFIGS[model], settings)
    graphs = METHOD.graphs(config)
    classes, name = METHOD.num_classes(config), f"{data}, {model}"
    before, new = train(config, graphs[:-1], classes), graphs[-1].client
    others, beside = float(np.mean([*before.accuracy.values()])), Beside(before, graphs, config)
    # The ids, and the numbers of each embedding
    got = beside.space.nodes.nbytes + beside.space.embeddings.nbytes
    for setting, space in ((ALONE, None), (PULLED, beside.space)):
        learner, done = make_member(graphs[-1], config, classes).build(), 0
        for rounds in ROUNDS:
            learn_beside(learner, beside.nodes, space, range(done + 1, rounds + 1))
            done, (accuracy, more) = rounds, beside.figures(learner.embed())
            yield Row(name, seed, 1, setting, rounds, accuracy, others, got, more)
    together = train(config, graphs, classes)
    _, more = Beside(together, graphs, config).figures(together.places[new]["embeddings"])
    others = float(np.mean([a for client, a in together.accuracy.items() if client != new]))
    accuracy = together.accuracy[new]
    yield Row(name, seed, 1, START, config.rounds, accuracy, others, together.payload, more)


def main() -> None:
    """Measure, and write after each data set and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="such as GAT/Cora")
    parser.add_argument("--seeds", default="0,1,2")
    args = parser.parse_args()
    cases = args.only or [f"{model}/{data}" for model in CONFIGS for data in DATA]
    path = FOLDER / f"{METHOD_NAME.lower()}.json"
    known = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    rows = [Row(**numbers(row)) for row in known]
    for seed in map(int, args.seeds.split(",")):
        for case in cases:
            model, data = case.split("/")
            rows = [row for row in rows if (row.data, row.seed) != (f"{data}, {model}", seed)]
            rows += measure(model, data, seed)
            rows.sort(key=lambda row: (row.data, row.setting == START))
            print(write(METHOD_NAME, ABOUT, rows), case, seed, flush=True)


if __name__ == "__main__":
    main()
