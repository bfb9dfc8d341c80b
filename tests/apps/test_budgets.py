"""A privacy budget by a setting, for every method: whole runs, reports, and what is refused."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import METHODS, one_fast
from safetensors.numpy import load_file

from flower_graph.apps.run import run, simulate_whole
from flower_graph.config.common import RunConfig
from flower_graph.errors import ConfigError, NoClientsError
from flower_graph.records.rounds import read_reports

BUDGET = ("privacy.epsilon=50", "privacy.clipping_norm=0.5")
SHOWN = (*BUDGET, "privacy.measurements=report")


def make(app: str, *overrides: str) -> RunConfig:
    return METHODS[app].load("rounds=3", *overrides)


def ran(config: RunConfig, out: Path, supernodes: int = 1) -> dict[str, Any]:
    result = run(config, out, supernodes=supernodes)
    assert (result["rejected"], result["skipped"]) == (0, 0)
    return result


# nFedGNN -----------------------------------------------------------------------------------------


def test_every_round_says_what_is_spent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "flower_graph")
    result = ran(make("nfedgnn", *BUDGET), tmp_path / "out")
    reports = read_reports(tmp_path / "out" / "metrics.jsonl")
    so_far = [report.privacy["epsilon"] for report in reports]
    assert so_far == sorted(set(so_far))
    assert so_far[0] == result["privacy"]["epsilon-of-a-round"]
    assert so_far[-1] == result["privacy"]["epsilon"]
    assert 49 < so_far[-1] <= 50
    assert {report.privacy["delta"] for report in reports} == {1e-5}
    # The server judges what has noise already, so nothing is withheld.
    assert math.isfinite(result["test-accuracy"])
    assert not [r for r in caplog.records if "withhold" in r.message]
    clear = ran(make("nfedgnn"), tmp_path / "clear")
    assert "privacy" not in clear
    assert read_reports(tmp_path / "clear" / "metrics.jsonl")[0].privacy == {}


@pytest.mark.parametrize("supernodes", one_fast([1, 90], 1))
def test_latent_vectors_have_noise_whoever_hosts_them(supernodes: int, tmp_path: Path) -> None:
    latent = []
    for name in ("out", "again"):
        result = ran(make("nfedgnn", *BUDGET), tmp_path / name, supernodes)
        latent.append(load_file(tmp_path / name / "weights.safetensors")["latent"])
    # 90 users with 4 numbers each: clipped to 0.5 together, and then noise
    assert abs(latent[0].std() / result["privacy"]["noise"] - 1) < 0.5
    assert not np.array_equal(*latent)  # of the same seed


# FedGLS, FedAvg and FedProx ----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["local", "central"])
def test_models_have_noise(form: str, tmp_path: Path) -> None:
    result = ran(make("fedgls", *SHOWN, f"privacy.form={form}"), tmp_path / "out", 4)
    ran(make("fedgls"), tmp_path / "clear", 4)
    found = load_file(tmp_path / "out" / "weights.safetensors")
    without = load_file(tmp_path / "clear" / "weights.safetensors")
    difference = np.concatenate([(found[k] - without[k]).ravel() for k in found])
    # Over three rounds the noise adds up. The mean of four clients thins theirs by the root of
    # four; the server's is that of one client in the sum, and so divided by four.
    deviation = result["privacy"]["noise"] * math.sqrt(3)
    expected = deviation / (4 if form == "central" else 2)
    assert 0.7 < difference.std() / expected < 1.5
    assert result["privacy"]["form"] == form
    assert math.isfinite(result["test-accuracy"])
    assert "accuracies" in result["privacy"]["not-covered"]


@pytest.mark.parametrize("form", ["local", "central"])
def test_measurements_are_withheld(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "flower_graph")
    result = ran(make("fedgls", *BUDGET, f"privacy.form={form}"), tmp_path / "out", 4)
    figures = ("test-accuracy", "val-accuracy", "train-accuracy", "loss")
    assert [result[name] for name in figures] == [None] * 4
    assert "not-covered" not in result["privacy"] and "structure" not in result
    (report, *_) = read_reports(tmp_path / "out" / "metrics.jsonl")
    assert math.isnan(report.regulariser)
    (said,) = [r.message for r in caplog.records if "privacy" in r.message]
    assert "privacy.measurements=report sends them" in said
    assert "the loss is nan" not in caplog.text


@pytest.mark.parametrize(("app", "more"), [("fedgls", ()), ("fedscem", ("strategy.name=fedavg",))])
@pytest.mark.parametrize("form", ["local", "central"])
def test_several_clients_at_one_supernode_are_refused(
    app: str, more: tuple[str, ...], form: str
) -> None:
    config = make(app, *BUDGET, *more, f"privacy.form={form}")
    with pytest.raises(NoClientsError):
        simulate_whole(config, supernodes=1)


# FedSCem -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [(), ("strategy.aggregation=plain", "strategy.alignment=plain")], ids=["masks", "plain"]
)
def test_embeddings_have_noise_before_masks(more: tuple[str, ...], tmp_path: Path) -> None:
    budget = ("privacy.epsilon=500", "privacy.clipping_norm=0.5", *more)
    result = ran(make("fedscem", *budget), tmp_path / "out", 4)
    assert result["test-accuracy"] is None
    assert 499 < result["privacy"]["epsilon"] <= 500
    shown = ran(make("fedscem", *budget, "privacy.measurements=report"), tmp_path / "shown", 4)
    assert math.isfinite(shown["test-accuracy"])


def test_noise_that_does_not_fit_the_masked_sum() -> None:
    budget = ("privacy.epsilon=1", "privacy.clipping_norm=10")
    with pytest.raises(NoClientsError, match=r"strategy.limit: 32") as it:
        simulate_whole(make("fedscem", *budget), supernodes=1)
    wanted = str(it.value).split("at least ")[1].split()[0]
    reports, _ = simulate_whole(make("fedscem", *budget, f"strategy.limit={wanted}"))
    assert [report.rejected for report in reports] == [[]] * 3


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nfedgnn strategy.share=averaged strategy.average_every=2", "strategy.share=averaged"),
        ("nfedgnn checkpoint_every=2", "checkpoint_every: 2.*rounds"),
        ("nfedgnn privacy.form=central", "privacy.form"),
        ("fedscem checkpoint_every=2", "checkpoint_every: 2"),
        ("fedscem privacy.form=central", "privacy.form"),
        ("fedscem strategy.model_sharing=fedavg", ""),
        ("fedscem strategy.name=self-training", ""),
        ("fedscem strategy.name=fed-sage", ""),
        ("fedgls strategy.name=fedproto", ""),
        ("fedgls strategy.name=fed-gnn-mlp", ""),
        ("fedgls strategy.name=local-gnn-knn", ""),
    ],
)
def test_combinations_that_would_give_a_wrong_figure(line: str, named: str) -> None:
    app, *overrides = line.split()
    with pytest.raises(ConfigError, match=named or overrides[0]):
        make(app, "privacy.epsilon=5", *overrides)
    more = ("privacy.epsilon=null", *(one for one in overrides if "privacy" not in one))
    assert make(app, *more).privacy.epsilon is None  # each is allowed without a budget
