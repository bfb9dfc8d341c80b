"""A model of two numbers, clients that add to it, and runs in which something goes wrong."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from federation import Who, who_of
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.clientapp import ClientApp

from flower_graph.client.adaptor import make_client_app
from flower_graph.errors import NoClientsError
from flower_graph.flower_compat import NumPyClient
from flower_graph.records.rounds import RoundReport
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.simulation import InProcessGrid
from flower_graph.wire.averaging import Asked, Enrolment, RowsBeside

Hosted = list[list[int]]  # clients of each SuperNode; nobody where it does not say
# Called with place, kind of message and round before each answer: None, or what is answered
Bad = Callable[[int, str, int], Any]
Log = list[tuple[str, int, int, float]]  # kind of message, round, place, model


class Client(NumPyClient):
    """Adds its place plus one to the model; weighs as much if it does not say whom it hosts.

    Where a single client is asked, or a row of each, its number stands for the place.
    """

    def __init__(self, place: int, clients: list[int], log: Log, bad: Bad, extra: Any) -> None:
        self.place, self.clients, self.log, self.extra = place, clients, log, extra
        self.bad = bad

    def get_properties(self, config: Any) -> Any:
        resumed = int(config.get("resume-round", 0))
        said = self.bad(self.place, "query", resumed)
        if resumed:
            self.log.append(("resume", resumed, self.place, math.nan))
        return said or (Enrolment(self.clients).to_config() if self.clients else {})

    def fit(self, parameters: Any, config: Any) -> Any:
        number = config["server-round"]
        request = Asked.from_config(config)
        place = self.place_of(request)
        self.log.append(("train", number, place, float(parameters[0][0])))
        arrays, metrics = [parameters[0] + np.float32(place + 1)], {"number": float(number)}
        weight = len(request.chosen(self.clients)) or self.place + 1
        if (said := self.bad(self.place, "train", number)) is not None:
            values, weight, more = said
            arrays, metrics = [arrays[0] if values is None else values], metrics | more
        if self.extra is not None:
            arrays.append(np.asarray(self.extra))
            metrics["array-names"] = ["arrays/w", "extras/side"]  # type: ignore[assignment]
        return arrays, weight, metrics

    def place_of(self, request: Asked) -> int:
        chosen = request.chosen(self.clients)
        return chosen[0] if len(chosen) == 1 else self.place

    def fit_each(self, parameters: Any, config: Any) -> Any:
        request = Asked.from_config(config)
        number = config["server-round"]
        begun = request.arrays_for(parameters, self.clients)
        for client, (values,) in begun.items():
            self.log.append(("train", number, client, float(values[0])))
        made = {client: values[0] + np.float32(client + 1) for client, values in begun.items()}
        said = self.bad(self.place, "train", number) or {}
        made |= {c: values for c, values in said.items() if c in made}
        rows = {c: values for c, values in sorted(made.items()) if values is not None}
        entries = {"number": [float(number)] * len(rows)}
        beside = RowsBeside(np.array([*rows], np.int64)).to_config()
        return [np.stack([*rows.values()])], [1] * len(rows), entries | beside

    def evaluate(self, parameters: Any, config: Any) -> Any:
        number, request = config["server-round"], Asked.from_config(config)
        if request.has_rows:
            for client, (values,) in request.arrays_for(parameters, self.clients).items():
                self.log.append(("evaluate", number, client, float(values[0])))
            return float(np.mean(parameters[0])), len(self.clients), {}
        self.log.append(("evaluate", number, self.place_of(request), float(parameters[0][0])))
        usual = float(parameters[0][0]), len(self.clients) or 2
        loss, weight = self.bad(self.place, "evaluate", number) or usual
        return loss, weight, {}


def good(place: int, kind: str, number: int) -> Any:
    """Let nothing go wrong."""
    return None


class Simple(ReportedFedAvg):
    """Reports the loss, and the number that clients send, as a regulariser."""

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, Any]:
        nothing = dict.fromkeys(("train_accuracy", "val_accuracy", "test_accuracy"), math.nan)
        loss, number = evaluated.get("loss", math.nan), trained.get("number", math.nan)
        return {"loss": loss, "cross_entropy": loss, "regulariser": number, **nothing}


def start() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(2, np.float32))})


def app_of(hosted: Hosted, log: Log, bad: Bad = good, extra: Any = None) -> ClientApp:
    def client_fn(context: Context) -> Client:
        place = int(context.node_config["partition-id"])
        return Client(place, hosted[place], log, bad, extra)

    return make_client_app(client_fn)


class Run:
    """A run over some SuperNodes that do not say whom they host, or that do."""

    def __init__(
        self,
        strategy: ReportedFedAvg,
        hosted: Hosted | int = 3,
        rounds: int = 1,
        bad: Bad = good,
        *,
        extra: Any = None,
        app: ClientApp | None = None,
        make_grid: Callable[..., InProcessGrid] = InProcessGrid,
        skipped: bool = False,  # whether no round is of use, which ends a run with an error
        **how: Any,
    ) -> None:
        self.log: Log = []
        self.reports: list[RoundReport] = []
        self.strategy = strategy
        hosted = [[] for _ in range(hosted)] if isinstance(hosted, int) else hosted
        app = app or app_of(hosted, self.log, bad, extra)
        self.grid = make_grid(app, num_supernodes=len(hosted))
        self.ids = list(self.grid.contexts)
        with pytest.raises(NoClientsError) if skipped else nullcontext():
            self.result = strategy.start(
                self.grid, start(), rounds, 0.05, on_round=self.reports.append, **how
            )

    @property
    def model(self) -> list[float]:
        (values,) = self.strategy.weights().values()
        return values.tolist()

    @property
    def who(self) -> list[Who]:
        """Who took part, by round."""
        return [who_of(report.participation) for report in self.reports]

    def got(self, kind: str, number: int) -> dict[int, float]:
        """Say who was asked in a round, by place, and with which model."""
        return {place: value for what, at, place, value in self.log if (what, at) == (kind, number)}

    def rejected(self, number: int = 1) -> dict[int, str]:
        """Give the reasons of a round by the place of the SuperNode."""
        entries = self.reports[number - 1].rejected
        return {self.ids.index(entry["node"]): entry["reason"] for entry in entries}
