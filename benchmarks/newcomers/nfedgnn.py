"""Users of nFedGNN that sign up later: accuracy and bytes beside training with all from the start.

``python -m benchmarks.newcomers.nfedgnn`` measures all; ``--data cora --seeds 0`` some, whose rows
then are all that the file has.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from flwr.app import Context
from torch import Tensor

from benchmarks.newcomers.common import FOLDER, START, Row, write
from flower_graph import NodeClient, SplitGradientRelay
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import forget_run
from flower_graph.data.graph import Graph, take_rows
from flower_graph.data.sources.datasets import cached_data
from flower_graph.method.load import load_config
from flower_graph.models import build_server_model
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.split_gradient_relay.config import NFedGNNConfig

DATA = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
SHARE, STEPS, CHOSEN_AFTER, NEVER = 0.1, (0, 1, 5, 20, 50), 20, 10**6
ALONE, ALL, BEFORE = "newcomers train alone", "everybody trains", "before they came"
FIRST_ALONE = "newcomers alone for 5 rounds, then everybody"
SETTINGS = {ALONE: STEPS[-1] + 1, FIRST_ALONE: 6, ALL: 0}  # rounds of newcomers alone
ABOUT = """A tenth of the users, drawn with the seed, signs up after the others have trained
up to the round that validated best of the paper's 200 (repeated up to there, with a checkpoint),
with labels and edges as the data have them; settings are those of `nfedgnn/<data>`. *Rounds* counts
the steps that newcomers have taken: 0 is the exchange in which they first answer, with weights from
the seed. Accuracy is over the nodes that neither train nor validate, in the round with the best
validation accuracy of those so far (since they came). That validation accuracy after 20 rounds, by
which one would choose: """
Validation = dict[tuple[str, str], list[float]]


class Held:
    """A graph whose last users come later."""

    def __init__(self, config: NFedGNNConfig) -> None:
        graph, self.config = cached_data(config), config
        n = graph.num_nodes
        order = torch.randperm(n, generator=generator(config.seed, "held-back"))
        self.whole, self.old = _first(graph, order), n - round(SHARE * n)
        self.before = _first(graph, order[: self.old])
        later = torch.arange(n) >= self.old
        judged = ~(self.whole.train_mask | self.whole.val_mask)
        self.parts = {"newcomers": later & judged, "others": ~later & judged}
        self.parts["validation"] = self.whole.val_mask

    def strategy(self, graph: Graph, folder: Path | None) -> SplitGradientRelay:
        """Build the server's half for the graph that is there."""
        how, model = self.config.strategy, self.config.model
        server = build_server_model(
            model.name,
            hidden=model.hidden,
            heads=model.heads,
            classes=graph.num_classes,
            dropout=model.dropout,
            seed=self.config.seed,
        )
        return SplitGradientRelay(
            graph,
            server,
            latent_size=server.latent_size,
            user_bias=model.user_bias,
            reg_weight=how.smoothness,
            learning_rate=how.learning_rate,
            weight_decay=how.weight_decay,
            seed=self.config.seed,
            checkpoint_dir=folder,
            checkpoint_every=NEVER if folder else 0,  # and after the last round
        )

    def figures(self, strategy: SplitGradientRelay) -> dict[str, float]:
        """Judge what the server has now, part by part."""
        server = strategy.server
        server.model.eval()
        with torch.no_grad():
            right = server.model(server.latent, server.edges).argmax(1) == server.y
        parts = {name: part[: right.numel()] for name, part in self.parts.items()}
        return {name: float(right[part].double().mean()) for name, part in parts.items()}


class Best:
    """The figures of the round with the best validation accuracy so far."""

    def __init__(self, held: Held, strategy: SplitGradientRelay) -> None:
        self.held, self.strategy, self.sent, self.round = held, strategy, 0, 0
        self.found = {"validation": -1.0}

    def note(self, report: RoundReport) -> None:
        """Judge a round."""
        found = self.held.figures(self.strategy)
        if found["validation"] > self.found["validation"]:
            self.found, self.round = found, report.round
        self.sent = sum(report.wire_bytes.values())


def _first(graph: Graph, nodes: Tensor) -> Graph:
    """Give the graph of some nodes, in their order."""
    place = torch.full((graph.num_nodes,), -1)
    place[nodes] = torch.arange(nodes.numel())
    edges = place[graph.edge_index]
    edges = edges[:, (edges >= 0).all(0)]
    masks = {part: getattr(graph, part)[nodes] for part in ("train_mask", "val_mask", "test_mask")}
    x, y = take_rows(graph.x, nodes), graph.y[nodes]
    return replace(graph, x=x, y=y, edge_index=edges, names=None, **masks)


def run(
    strategy: SplitGradientRelay,
    graph: Graph,
    rounds: int,
    *,
    folder: Path | None = None,
    resume: bool = False,
    on_round: Callable[[RoundReport], None],
) -> None:
    """Run a strategy in process, on one SuperNode."""
    users = torch.arange(graph.num_nodes)

    def client_fn(context: Context) -> NodeClient:
        return NodeClient(context, graph.x, users, checkpoint_dir=folder)

    grid = InProcessGrid(make_client_app(client_fn), num_supernodes=1)
    try:
        strategy.start(grid, num_rounds=rounds, resume=resume, on_round=on_round)
    finally:
        forget_run(grid.run.run_id)


def measure(name: str, seed: int, validation: Validation) -> Iterator[Row]:
    """Measure one data set with one seed."""
    config = load_config(f"nfedgnn/{name}", [f"seed={seed}"])
    assert isinstance(config, NFedGNNConfig)
    held, rounds = Held(config), config.rounds
    later = held.whole.num_nodes - held.old

    def row(setting: str, count: int, best: Best, before: int = 0) -> Row:
        figures = best.found["newcomers"], best.found["others"], best.sent - before
        return Row(DATA[name], seed, later, setting, count, *figures)

    with tempfile.TemporaryDirectory() as place:
        trained = Path(place) / "trained"
        trial = held.strategy(held.before, None)
        found = Best(held, trial)
        run(trial, held.before, rounds, on_round=found.note)
        first = held.strategy(held.before, trained)
        best = Best(held, first)
        run(first, held.before, found.round, folder=trained, on_round=best.note)
        yield row(BEFORE, rounds, best)
        for setting, alone in SETTINGS.items():
            folder = Path(place) / "grown"
            shutil.copytree(trained, folder)
            for step, came in _grown(held, folder, alone, found.round):
                yield row(setting, step, came, best.sent)
                if step == CHOSEN_AFTER:
                    said = validation.setdefault((DATA[name], setting), [])
                    said.append(came.found["validation"])
            shutil.rmtree(folder)
    everybody = held.strategy(held.whole, None)
    best = Best(held, everybody)
    run(everybody, held.whole, rounds, on_round=best.note)
    yield row(START, rounds, best)


def _grown(held: Held, folder: Path, alone: int, begun: int) -> list[tuple[int, Best]]:
    """Go on with all users from a checkpoint of the old ones; give what so many steps came to."""
    strategy = held.strategy(held.before, folder)
    strategy.grow(held.whole, alone=alone)
    best, result = Best(held, strategy), list[tuple[int, Best]]()

    def note(report: RoundReport) -> None:
        best.note(report)
        if (step := report.round - begun - 1) in STEPS:
            result.append((step, copy.copy(best)))

    last = begun + STEPS[-1] + 1
    run(strategy, held.whole, last, folder=folder, resume=True, on_round=note)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the file and the page")
    chosen = parser.parse_args(arguments)
    rows, validation = list[Row](), Validation()
    for name in chosen.data:
        for seed in chosen.seeds:
            for found in measure(name, seed, validation):
                print(found, flush=True)
                rows.append(found)
            said = [f"{data}, {how}: {100 * fmean(v):.1f}" for (data, how), v in validation.items()]
            write("nFedGNN", f"{ABOUT}{'; '.join(said)}.", rows, folder=chosen.out)


if __name__ == "__main__":
    main()
