"""Every registered method that learns numbers of nodes: figures, resuming, faults, newcomers."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federation import METHODS, Setup, at
from own_graphs import valued
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_absolute_error, mean_squared_error

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.data.folders.party import (
    CLIENTS,
    deciding_settings,
    graphs_of,
    open_folder,
    server_folder,
)
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.load import to_dict
from flower_graph.method.module_method import ModuleMethod
from flower_graph.method.registry import method_of

REFUSED = (
    "nfedgnn",
    "lpgnn",
    "fedscem",
    "fedgls",
    "deepwalk",
    "gat",
    "fedgta",
    "fedproto",
    "fedgcn",
)
TAKES = [name for name in METHODS if name not in REFUSED]
FAST = "fedavg"
EACH = [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in TAKES]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("valued") / "graph.pt"
    torch.save(valued(), path)
    return path


def learning(name: str, saved: Path, *more: str) -> Setup:
    """Take the method's own settings, on the graph of numbers."""
    small = [one for one in METHODS[name].overrides if not one.startswith("data.")]
    words = ("task=values", "metrics=[mse,mae]", "partition.method=metis", f"data.name={saved}")
    split = "partition.ratios=[0.5,0.25,0.25]"
    if name == "fedopt":  # as shipped it needs more rounds
        more = (*more, "strategy.server_learning_rate=0.03")
    return replace(
        METHODS[name],
        overrides=(*small, "data.split=auto", "data.features=standardise", *words, split, *more),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_methods_about_classes_refuse_numbers(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^task"):
        METHODS[name].load("task=values", "metrics=[mse]")


@pytest.mark.parametrize("name", EACH)
def test_figures_are_those_of_all_predictions_together(
    name: str, saved: Path, tmp_path: Path
) -> None:
    done = learning(name, saved, "rounds=12", "keep=best").run(tmp_path / "run", state_dir=None)
    run, result = fg.load_run(done.out), done.result
    found, y = run.predictions(), valued().y.numpy()
    best = min(done.reports, key=lambda one: one.scores["mse"]["val"])  # the less, the better
    assert result["best-round"] == best.round == run.kept_rounds[0]
    np.testing.assert_allclose(found.label, y[found.node], rtol=1e-6)
    for role in ("train", "val", "test"):
        local = found.of_role(role)
        pair, scores = (local.label, local.predicted), best.scores
        assert scores["mse"][role] == pytest.approx(mean_squared_error(*pair), rel=1e-4)
        assert scores["mae"][role] == pytest.approx(mean_absolute_error(*pair), rel=1e-4)
        assert np.isnan(getattr(best, f"{role}_accuracy"))
    assert result["test-mse-at-best-val"] == best.scores["mse"]["test"]
    assert np.isfinite(result["baselines"]["linear-regression"]["test"])
    first = done.reports[0].scores["mse"]["train"]
    assert best.scores["mse"]["train"] < 0.8 * first  # it learns


@pytest.mark.parametrize("name", EACH)
def test_a_client_that_fails_or_lies_is_left_out(name: str, saved: Path, tmp_path: Path) -> None:
    def lie(content: object) -> None:
        content["config"]["counts"] = np.array([-1.0] * 9).tobytes()  # type: ignore[index]

    setup = learning(name, saved, "rounds=3")
    for kind, word in (("train", "error"), ("evaluate", lie)):
        faults = at(word, rounds=[2], kind=kind)  # type: ignore[arg-type]
        done = setup.run(tmp_path / kind, faults=faults, state_dir=None)
        first, second, third = done.reports
        assert second.rejected and not first.rejected and not third.rejected
        assert np.isfinite(second.scores["mse"]["test"])
    assert "errors" in str(second.rejected)


@pytest.mark.parametrize("name", EACH)
def test_newcomers_are_given_numbers_in_their_own_unit(
    name: str, saved: Path, tmp_path: Path
) -> None:
    """All old nodes as new ones: a client's model says of its own nodes what it said in the run."""
    setup = learning(name, saved, "rounds=8")
    setup.run(tmp_path / "run", state_dir=None)
    run, table = fg.load_run(tmp_path / "run"), tmp_path / "new.csv"
    graph = method_of(setup.load()).graphs(setup.load())[0]  # type: ignore[attr-defined]
    data, number = valued(), {node: row for row, node in enumerate(graph.nodes.tolist())}
    said = run.predict(data.x[graph.nodes], graph.edge_index, client=0)
    assert said.shape == (graph.nodes.numel(),)
    old = run.predictions(0)
    np.testing.assert_allclose(said[[number[one] for one in old.node]], old.predicted, rtol=1e-3)
    torch.save(data, tmp_path / "new.pt")
    words = ["predict", str(run.path), "--client", "0", "--data", str(tmp_path / "new.pt")]
    assert main([*words, "--out", str(table)]) == 0
    lines = [*csv.DictReader(table.read_text(encoding="utf-8").splitlines())]
    assert [*lines[0]] == ["client", "node", "value", "role", "target"]
    known = [one for one in lines if one["target"]]
    assert len(known) == int((~data.y.isnan()).sum())
    assert float(known[-1]["target"]) == pytest.approx(float(data.y[-1]), rel=1e-5)


def test_baselines_are_scikit_learns(saved: Path) -> None:
    config = learning(FAST, saved).load()
    method = method_of(config)
    graphs = method.graphs(config)  # type: ignore[attr-defined]
    figures = method.baselines(config)
    x, y = (torch.cat([getattr(one, key) for one in graphs]).numpy() for key in ("x", "targets"))
    masks = {r: torch.cat([getattr(g, f"{r}_mask") for g in graphs]) for r in ("train", "test")}
    train, test = (mask.numpy() for mask in masks.values())
    by_mean = mean_squared_error(y[test], np.full(test.sum(), y[train].mean()))
    assert figures["mean"]["test"] == pytest.approx(by_mean, rel=1e-5)
    x = (x - x[train].mean(0)) / x[train].std(0)
    tried = [
        mean_squared_error(
            y[test], Ridge(share * train.sum()).fit(x[train], y[train]).predict(x[test])
        )
        for share in (1e-3, 1e-1, 10.0)
    ]
    reached = figures["linear-regression"]["scores"]["mse"]["test"]
    assert min(abs(reached - one) for one in tried) < 1e-3 * reached


def test_parties_folders_have_their_numbers_and_the_scale_of_all(
    saved: Path, tmp_path: Path
) -> None:
    setup, out = learning(FAST, saved), tmp_path / "parts"
    assert main(["partition", setup.config, *setup.overrides, "--out", str(out)]) == 0
    config = setup.load()
    method = method_of(config)
    assert isinstance(method, ModuleMethod)
    folder = open_folder(out / "client-0001", deciding_settings(to_dict(config)), CLIENTS)
    (graph,) = graphs_of(folder)
    torch.testing.assert_close(graph.targets, method.graphs(config)[1].targets, equal_nan=True)
    numbers = torch.cat([g.targets[g.train_mask] for g in method.graphs(config)])
    expected = float(numbers.mean()), float(numbers.std(correction=0))
    for scale in (method.task(config).scale, method.task(config, folder).scale):
        assert [*scale] == pytest.approx(expected, rel=1e-5)
    assert server_folder(config, str(out / "server")) is not None
    with pytest.raises(DataError, match="task"):  # of a run that learns classes
        other = setup.load("task=nodes", "metrics=[accuracy]")
        open_folder(out / "client-0001", deciding_settings(to_dict(other)), CLIENTS)
