"""Ego-networks that come later: accuracy and bytes beside training with all from the start.

``python -m benchmarks.newcomers.fedscem`` measures all; ``--data cora --seeds 0`` some, whose rows
then are all that the file has.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import fmean
from typing import Any

import torch
from flwr.app import Context

from benchmarks.newcomers.common import START, Row, write
from flower_graph.client.adaptor import make_client_app
from flower_graph.client.state import StateStore, forget_run
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.graph_batch import Metrics
from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.method.load import load_config
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.masked_embedding_averaging.baselines import EgoFedAvg, EgoModelClient
from flower_graph.strategies.masked_embedding_averaging.cohort import (
    ChosenEgos,
    EgoCohort,
    EgoSettings,
    initial_weights,
)
from flower_graph.strategies.masked_embedding_averaging.cohort_client import (
    EgoCohortClient,
    EgoNetworkClient,
)
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig
from flower_graph.strategies.masked_embedding_averaging.method import METHOD, ego_settings

DATA = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
FORMS = {
    "FedSCem": [],
    "FedAvg+FedSCem": ["strategy.model_sharing=fedavg"],
    "FedAvg": ["strategy.name=fedavg"],
}
SHARE, STEPS, TEST = 0.1, (0, 1, 5, 20, 50), 2
PLAIN = ["strategy.alignment=plain", "strategy.aggregation=plain"]  # figures are those of masks
BEFORE, ALL, ALONE = "before they came", "everybody trains", "newcomers train alone"
NOBODY, POST_HOC = "alone, from the first weights", "mean of the others' models, which nobody has"
ABOUT = """A tenth of the 100 ego-networks of `fedscem/<data>`, the last that were drawn, comes
after {rounds} rounds. Accuracy is that of test nodes, a mean over ego-networks; settings are the
shipped ones but for `{settings}`. *Rounds* counts those since they came. At 0 a newcomer of FedAvg
and FedAvg+FedSCem has the mean that the server holds, and one of FedSCem, whose server holds none,
the weights that everybody began with. *{alone}* goes on from there without the others and without a
message. Bytes are payload, without keys and alignment. Of the data sets and
seeds 0, 1, 2 those that are not here were not measured: there was no time."""
Figures = dict[int, dict[int, float]]  # test accuracy by round and client


class Federation(InProcessGrid):
    """Two SuperNodes, of which one may connect later, and what their clients measure."""

    def __init__(
        self, egos: Sequence[EgoNetwork], kind: type[EgoCohortClient], later: int = 0
    ) -> None:
        figures = self.figures = Figures()
        self.is_open = not later
        cut = len(egos) - max(later, 1)
        parts = egos[:cut], egos[cut:]

        class Noting(kind):  # type: ignore[misc, valid-type]
            def _measured(
                self, number: int, chosen: ChosenEgos, judged: Metrics, loss: Any
            ) -> None:
                values = zip(chosen.batch.clients, judged.accuracy[:, TEST].tolist(), strict=True)
                figures.setdefault(number, {}).update(values)

        def client_fn(context: Context) -> EgoCohortClient:
            made: EgoCohortClient = Noting(context, parts[int(context.node_config["partition-id"])])
            return made

        super().__init__(make_client_app(client_fn), num_supernodes=2)

    def get_node_ids(self) -> list[int]:
        """Return who is connected."""
        return super().get_node_ids()[: 2 if self.is_open else 1]

    def mean_of_models(self, settings: EgoSettings) -> ModelWeights:
        """Average the models of those who are there, as nobody in the federation can."""
        context = self.contexts[self.get_node_ids()[0]]
        (cohort, _), _ = StateStore(context, "ego-client").load(lambda _: None)
        chosen = cohort.choose(cohort.batch.clients)
        chosen.start_from(initial_weights(settings), replace=False)
        (mean,) = chosen.weighted_sums(torch.ones(chosen.batch.size), divisor=chosen.batch.size)
        result: ModelWeights = mean
        return result


class Trial:
    """One form of training on one data set with one seed."""

    def __init__(self, config: FedSCemConfig, form: str, data: str) -> None:
        self.config, self.form, self.data = config, form, data
        self.egos, self.settings = METHOD.graphs(config), ego_settings(config)
        self.later = round(SHARE * len(self.egos))
        self.is_mean = config.strategy.name == "fedavg"
        self.shares = self.is_mean or config.strategy.model_sharing != "none"

    def rows(self) -> Iterator[Row]:
        """Train without newcomers, go on with them; and train with all from the start."""
        rounds, last = self.config.rounds, self.config.rounds + STEPS[-1]
        yield from self._joined(rounds, last)
        found = dict[int, RoundReport]()
        grid = self._run(
            last, 0, lambda grid, strategy, report: found.update({report.round: report})
        )
        for number in (rounds, last):
            yield self._row(START, number, grid.figures[number], self._payload(found[number]))

    def _joined(self, rounds: int, last: int) -> list[Row]:
        result = list[Row]()
        before = [0]

        def note(grid: Federation, strategy: Any, report: RoundReport) -> None:
            number = report.round
            # FedSCem measures a round in the next one's first message
            if number == rounds - (0 if self.is_mean else 1):
                grid.is_open = True
            if number == rounds:
                before[0] = self._payload(report)
                # FedSCem's newcomers have measured in the message that brought them.
                cut = len(self.egos) - self.later
                others = {c: value for c, value in grid.figures[number].items() if c < cut}
                result.append(self._row(BEFORE, rounds, others, before[0]))
                result.extend(self._unjoined(grid, strategy, others))
            if (step := number - rounds) in STEPS[1:]:
                sent = self._payload(report) - before[0]
                result.append(self._row(ALL, step, grid.figures[number], sent))

        self._run(last, self.later, note)
        return result

    def _unjoined(self, grid: Federation, strategy: Any, others: dict[int, float]) -> list[Row]:
        """Judge what newcomers have without the others, at once and after steps of their own."""
        start, setting = initial_weights(self.settings), ALONE if self.shares else NOBODY
        if self.shares:
            start = self._mean(strategy)
        model = 4 * (start.first.numel() + start.rest.numel()) if self.shares else 0
        chosen = self._newcomers(start)
        result = list[Row]()
        for step in range(STEPS[-1] + 1):
            if step in STEPS:
                result.append(self._own(setting, step, chosen, others, self.later * model))
            chosen.train(step)
        if not self.shares:
            mean = self._newcomers(grid.mean_of_models(self.settings))
            result.append(self._own(POST_HOC, 0, mean, others, 0))
        return result

    def _mean(self, strategy: Any) -> ModelWeights:
        if self.is_mean:
            arrays = [torch.from_numpy(array.numpy().copy()) for array in strategy.arrays.values()]
            return ModelWeights(*arrays)
        model: ModelWeights = strategy.kept.model
        return model

    def _newcomers(self, start: ModelWeights) -> ChosenEgos:
        egos = self.egos[-self.later :]
        chosen = EgoCohort(egos, self.settings._replace(proximal=0.0)).choose(
            [ego.client for ego in egos]
        )
        chosen.start_from(start)
        return chosen

    def _own(
        self, setting: str, step: int, chosen: ChosenEgos, others: dict[int, float], sent: int
    ) -> Row:
        accuracy = chosen.evaluate(chosen.embed()).accuracy[:, TEST].tolist()
        own = dict(zip(chosen.batch.clients, accuracy, strict=True))
        return self._row(setting, step, others | own, sent)

    def _row(self, setting: str, count: int, found: dict[int, float], sent: int) -> Row:
        first = len(self.egos) - self.later
        late, early = (
            [
                value
                for client, value in found.items()
                if (client >= first) == wanted and value == value
            ]
            for wanted in (True, False)
        )
        means = [fmean(part) if part else float("nan") for part in (late, early)]
        name = f"{self.form}: {setting}"
        return Row(self.data, self.config.seed, self.later, name, count, *means, sent)

    def _payload(self, report: RoundReport) -> int:
        assert report.bytes is not None
        total = sum(size for kinds in report.bytes.values() for size in kinds.values())
        # Plain sums are of 64 bits, and masked ones of 32 where no weights are among them.
        return total if self.shares else total // 2

    def _run(
        self, rounds: int, later: int, note: Callable[[Federation, Any, RoundReport], None]
    ) -> Federation:
        config, strategy = self.config, METHOD.build_strategy(self.config, None)
        kind = EgoModelClient if isinstance(strategy, EgoFedAvg) else EgoNetworkClient
        grid = Federation(self.egos, kind, later)
        server: Any = strategy
        try:
            server.start(
                grid,
                num_rounds=rounds,
                timeout=config.strategy.timeout,
                on_round=lambda report: note(grid, strategy, report),
            )
        finally:
            forget_run(grid.run.run_id)
        return grid


def measure(name: str, seed: int, form: str, settings: list[str]) -> list[Row]:
    """Measure one form of training on one data set with one seed."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    wanted = [f"seed={seed}", "device=cpu", *FORMS[form], *PLAIN, *settings]
    config = load_config(f"fedscem/{name}", wanted)
    assert isinstance(config, FedSCemConfig)
    return list(Trial(config, form, DATA[name]).rows())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--rounds", type=int, default=100, help="before newcomers come")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="settings that differ from the shipped ones")
    chosen = parser.parse_args(arguments)
    settings = [f"rounds={chosen.rounds}", *chosen.overrides]
    about = ABOUT.format(rounds=chosen.rounds, settings="` `".join(settings), alone=ALONE)
    order = [(n, s, f) for s in chosen.seeds for n in chosen.data for f in chosen.forms]
    done: dict[tuple[str, int, str], list[Row]] = {}
    with ProcessPoolExecutor(chosen.processes) as pool:
        jobs = {pool.submit(measure, *one, settings): one for one in order}
        for job in as_completed(jobs):
            done[jobs[job]] = job.result()
            for row in job.result():
                print(row, flush=True)
            by_data = sorted(done, key=lambda one: (chosen.data.index(one[0]), order.index(one)))
            write("FedSCem", about, [row for one in by_data for row in done[one]])


if __name__ == "__main__":
    main()
