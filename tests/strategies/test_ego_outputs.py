"""Predictions, models and figures of a run's ego-networks, beside what its server reports."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ego_helpers import SETTINGS, toy_egos
from ego_strategy_helpers import FINE, RESOLUTION, client_app, seven_egos

from flower_graph.client import state
from flower_graph.outputs.files import (
    ROLES,
    Predictions,
    SavedModels,
    read_models,
    read_predictions,
)
from flower_graph.outputs.messages import KeepRequest
from flower_graph.records.rounds import RoundReport
from flower_graph.simulation import InProcessGrid
from flower_graph.strategies.masked_embedding_averaging import ego_secrets
from flower_graph.strategies.masked_embedding_averaging.baselines import (
    EgoFedAvg,
    EgoFedProx,
    EgoModelClient,
    SelfTraining,
)
from flower_graph.strategies.masked_embedding_averaging.cohort_client import EgoNetworkClient
from flower_graph.strategies.masked_embedding_averaging.modules import EgoGCN
from flower_graph.strategies.masked_embedding_averaging.strategy import MaskedEmbeddingAveraging
from flower_graph.wire.exchange import Exchange

RUN, ROUNDS, SUPERNODES = "ab" * 16, 4, 2
FAST = SETTINGS._replace(learning_rate=0.05)  # so that predictions move from round to round
EGOS = {ego.client: ego for ego in toy_egos()}
PLAIN = {"aggregation": "plain", "alignment": "plain"}
METHODS: dict[str, Any] = {
    "masked": lambda: MaskedEmbeddingAveraging(FAST, **FINE),
    "plain": lambda: MaskedEmbeddingAveraging(FAST, **PLAIN),
    "iter": lambda: MaskedEmbeddingAveraging(FAST, variant="iter", **PLAIN),
    "minus": lambda: MaskedEmbeddingAveraging(FAST, variant="minus", **PLAIN),
    "shared": lambda: MaskedEmbeddingAveraging(FAST, model_sharing="fedavg", **FINE),
    "self-training": lambda: SelfTraining(FAST),
    "fedavg": lambda: EgoFedAvg(FAST),
    "fedprox": lambda: EgoFedProx(FAST._replace(proximal=0.5)),
}


class Kept:
    """A run in which clients keep what they have, of the last round or of the best."""

    def __init__(
        self, name: str, out: Path, keep: str = "last", state_dir: Path | None = None
    ) -> None:
        self._how: dict[str, Any] = {"keep": keep, "every": 1}
        self.folder = out / "clients" if state_dir is None else state_dir / "outputs" / RUN
        self.reports: list[RoundReport] = []
        strategy = METHODS[name]()
        kind = EgoModelClient if isinstance(strategy, EgoFedAvg) else EgoNetworkClient
        app = client_app(seven_egos(), client=kind, output_dir=out)
        where = {} if state_dir is None else {"state-dir": str(state_dir)}
        self._grid = InProcessGrid(app, num_supernodes=SUPERNODES, node_config=where)
        self._tell("begin", 0)
        strategy.start(self._grid, num_rounds=ROUNDS, timeout=5, on_round=self._on_round)
        self.server_weights = strategy.weights()

    @property
    def best(self) -> int:
        return max(self.reports, key=lambda report: report.val_accuracy).round

    def _on_round(self, report: RoundReport) -> None:
        self.reports.append(report)
        if self._how["keep"] == "best" and self.best == report.round:
            self._tell("snapshot", report.round)
        if report.round == ROUNDS:
            self._tell("finish", ROUNDS)

    def _tell(self, action: str, number: int) -> None:
        best = self.best if self.reports else 0
        content = KeepRequest(RUN, number, best, action, **self._how).to_record()
        replies = Exchange(self._grid).send(
            dict.fromkeys(self._grid.get_node_ids(), content),
            message_type="query.keep",
            server_round=number,
            timeout=5,
            read=lambda _, reply: reply,
        )
        assert len(replies.values) == SUPERNODES, replies.rejected

    @property
    def places(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    @property
    def predictions(self) -> Predictions:
        found = [read_predictions(place) for place in self.places]
        return Predictions.join([one for one in found if one is not None])

    @property
    def models(self) -> list[SavedModels]:
        return [one for place in self.places for one in read_models(place)]

    def rows(self, table: str) -> list[dict[str, str]]:
        lines = [(place / table).read_text("utf-8").splitlines() for place in self.places]
        return [row for part in lines for row in csv.DictReader(part)]


def accuracy_of(found: Predictions, role: str) -> float:
    """Each client that has such nodes counts once, as in a report."""
    there, right = found.role == ROLES.index(role), found.predicted == found.label
    clients = sorted(set(found.client[there].tolist()))
    return float(np.mean([right[there & (found.client == client)].mean() for client in clients]))


def check_accuracies(kept: Kept, report: RoundReport) -> None:
    found = kept.predictions
    assert sorted(set(found.client.tolist())) == [ego.client for ego in seven_egos()]
    for role in ROLES[1:]:
        reported = getattr(report, f"{role}_accuracy")
        assert accuracy_of(found, role) == pytest.approx(reported, abs=2 * RESOLUTION)


def check_models(kept: Kept) -> None:
    """A client's module predicts what its table says."""
    found, clients = kept.predictions, []
    for saved in kept.models:
        for client in saved.clients:
            model, ego = EgoGCN(**saved.arguments), EGOS[client]
            model.load_state_dict(saved.state_dict(client))
            said = model(ego.x, ego.edge_index).argmax(1).numpy()
            assert np.array_equal(found.of_client(client).predicted, said)
            clients.append(client)
    assert sorted(clients) == [ego.client for ego in seven_egos()]


@pytest.mark.parametrize("name", METHODS)
def test_predictions_are_those_of_the_last_report(name: str, tmp_path: Path) -> None:
    kept = Kept(name, tmp_path)
    check_accuracies(kept, kept.reports[-1])
    check_models(kept)
    # Otherwise this would not tell the last round from one before.
    assert len({report.loss for report in kept.reports}) == ROUNDS


@pytest.mark.parametrize("name", ["masked", "shared", "fedavg"])
def test_the_best_round_is_as_it_was_measured(name: str, tmp_path: Path) -> None:
    kept = Kept(name, tmp_path, keep="best")
    check_accuracies(kept, kept.reports[kept.best - 1])
    check_models(kept)
    last = Kept(name, tmp_path / "last")
    same = np.array_equal(kept.predictions.probability, last.predictions.probability)
    assert kept.best < ROUNDS and not same


@pytest.mark.parametrize("name", ["plain", "shared", "fedavg", "self-training"])
def test_figures_of_each_client(name: str, tmp_path: Path) -> None:
    kept = Kept(name, tmp_path)
    for report in kept.reports:
        rows = [row for row in kept.rows("curves.csv") if row["round"] == str(report.round)]
        assert len(rows) == len(seven_egos())
        for role in ROLES[1:]:
            figures = [float(row[f"{role}-accuracy"]) for row in rows if row[f"{role}-accuracy"]]
            reported = getattr(report, f"{role}_accuracy")
            assert np.mean(figures) == pytest.approx(reported, abs=2 * RESOLUTION)
        for row in rows:
            assert int(row["nodes"]) == EGOS[int(row["client"])].y.numel()
    if name in ("fedavg", "self-training"):  # one loss, over the same clients
        losses = [float(row["loss"]) for row in kept.rows("clients.csv")
                  if row["at"] == "last" and row["loss"]]  # fmt: skip
        assert np.mean(losses) == pytest.approx(kept.reports[-1].loss, abs=2 * RESOLUTION)


@pytest.mark.parametrize(
    ("name", "keep"), [("masked", "best"), ("shared", "last"), ("fedavg", "last")]
)
def test_another_process_may_be_asked(
    name: str, keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Kept._tell

    def elsewhere(kept: Kept, action: str, number: int) -> None:
        for module in (state, ego_secrets):
            monkeypatch.setattr(module, "_LIVE", {})
        tell(kept, action, number)

    here = Kept(name, tmp_path / "here", keep)
    monkeypatch.setattr(Kept, "_tell", elsewhere)
    there = Kept(name, tmp_path / "there", keep, state_dir=tmp_path / "state")
    assert np.array_equal(here.predictions.probability, there.predictions.probability)
    check_models(there)
    (place, _) = there.places
    assert place.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o600}


def test_averaged_clients_have_one_model_in_the_file(tmp_path: Path) -> None:
    kept = Kept("fedavg", tmp_path)
    for saved in kept.models:
        assert not saved.own and saved.rows is None
        found = saved.shared["conv1.lin.weight"].T.numpy()
        assert np.array_equal(found, kept.server_weights["first"])
