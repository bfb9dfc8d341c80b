"""What every method leaves: predictions, figures and metrics that agree, models for all."""

import csv
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import ALL, METHODS, Setup, tried
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score
from without_flower import run_without_flower

import flower_graph as fg
from flower_graph.data.graph import called
from flower_graph.data.sources.datasets import cached_data
from flower_graph.errors import ConfigError, DataError, OutputError
from flower_graph.method import GraphMethod
from flower_graph.method.load import load_config
from flower_graph.method.registry import method_of

FAST = ("nfedgnn", "fedscem", "fedgls", "fedpub")


def check_accuracies(setup: Setup, left: fg.Run) -> None:
    """Hold a run's predictions against its result."""
    predictions, compared = left.predictions(), []
    # Sums of other orders differ in the last of sixteen digits; masked ones are of whole numbers.
    config = setup.load()
    is_masked = config.masks_sums
    atol = getattr(config.strategy, "resolution", 2.0**-16) if is_masked else 1e-12
    for role in ("train", "val", "test"):
        reported = left.result[f"{role}-accuracy"]
        if reported is None:
            continue
        found = predictions.of_role(role).accuracy()
        assert found == pytest.approx(reported, abs=atol, rel=0), role
        compared.append(role)
    assert "test" in compared
    certain = predictions.probability[np.isfinite(predictions.probability)]  # a judge has none
    assert ((certain > 0) & (certain <= 1 + 1e-6)).all()
    with (left.path / "clients.csv").open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["at"] == "last"]
    assert len({row["client"] for row in rows}) == len(rows) == left.result["clients"]
    for role in compared:
        own = [float(row[f"{role}-accuracy"]) for row in rows if row[f"{role}-accuracy"]]
        assert np.mean(own) == pytest.approx(left.result[f"{role}-accuracy"], abs=2 * atol), role


def left(name: str) -> tuple[Setup, fg.Run]:
    """Run a method on a small federation, and read what it left."""
    setup = ALL[name]
    return setup, fg.load_run(setup.whole("rounds=3", state_dir=None).out)


def every(names: Any, fast: Any = FAST) -> Any:
    """Give a test each of some methods' runs."""
    return pytest.mark.parametrize("name", tried(names, fast=fast))


@every(ALL)
def test_predictions_make_the_results_accuracies(name: str) -> None:
    check_accuracies(*left(name))


@every([n for n in ALL if n.startswith(("deepwalk", "gat"))], fast=["deepwalk"])
def test_embeddings_lie_beside_predictions(name: str) -> None:
    """Of all nodes, with whether they are public; a DeepWalk has no module."""
    setup, there = left(name)
    config: Any = setup.load("rounds=3")
    method: Any = method_of(config)
    for graph in method.graphs(config):
        found, names = there.embeddings(graph.client), called([graph])
        assert [*map(str, found.node)] == [*map(str, np.asarray(names))]
        assert found.number.tolist() == graph.nodes.tolist()
        assert found.public.tolist() == graph.public.tolist()
        assert found.embeddings.shape == (len(graph.nodes), config.model.dimension)
        assert found.embeddings.dtype == np.float32
        if config.model.name == "deepwalk":
            with pytest.raises(OutputError):
                there.model(graph.client)


@every(METHODS)
def test_accuracies_stand_beside_those_of_a_guess(name: str) -> None:
    setup, there = left(name)
    written: Any = there.result["baselines"]
    assert all(v is None or 0 <= v <= 1 for figures in written.values() for v in figures.values())
    found = {key: one["test"] for key, one in written.items() if one["test"] is not None}
    of_nodes = name in ("nfedgnn", "lpgnn")  # a client is one node
    alone = {"majority-per-client"} if of_nodes else set()
    of_all = {"majority", "majority-per-client", "logistic-regression", "label-propagation"}
    assert found.keys() == of_all - alone
    config = setup.load("rounds=3")
    assert found["majority"] == method_of(config).baselines(config)["majority"]["test"]


# Whose model a newcomer can use, whoever it is; who has edges of its own making; and whose
# newcomers join the run instead, or lie beside it by nodes that they share
COMMON = ("fedgls", "fedgls, reset", "fedgta", "fedscem, shared", "fedscem, fedavg")
COMMON += ("fedavg", "fedprox", "fedopt", "scaffold", "moon", "fedgcn")
COMMON += ("fedscem, median", "fedgls, median")
LEARN = {name for name in ALL if name.startswith("fedgls")} - {"fedgls, proto"}
JOIN = ("nfedgnn", "lpgnn", "deepwalk", "gat")


@every(ALL)
def test_a_newcomer_is_classified_or_refused(name: str) -> None:
    """With the model of all and with a client's, with edges and without."""
    _, there = left(name)
    form, n = there.data, 12
    x = torch.rand(n, form.treatment.width, generator=torch.Generator().manual_seed(0)).round()
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    for client, edges in itertools.product((None, 0), (ring, None)):
        has_model = client == 0 or name in COMMON
        has_edges = edges is not None or name in LEARN
        if has_model and has_edges and not name.startswith(JOIN):
            found = there.predict(x, edges, client=client)
            assert found.shape == (n, form.num_classes)
            torch.testing.assert_close(found.sum(1), torch.ones(n))
        else:
            with pytest.raises((DataError, OutputError)):
                there.predict(x, edges, client=client)


PLAIN = """
from pathlib import Path
import numpy as np, torch
import flower_graph as fg

run, graphs, rows = fg.load_run(sys.argv[1]), torch.load(sys.argv[2]), 0
for client, (x, edges, names) in graphs.items():
    found = run.predictions(client)
    if x is None:  # what a server computes with
        x = torch.from_numpy(run.embeddings().embeddings)
    model = run.model(client)
    if edges is None and type(model).__name__ != "StructureModel":  # it makes a graph
        edges = torch.zeros(2, 0).long()
    assert isinstance(model, torch.nn.Module) and not model.training
    with torch.no_grad():
        said = model(x, edges).softmax(1).double().numpy()
    # What a judge says, who has no probabilities, is not the model's.
    found = found.rows(np.isfinite(found.probability))
    place = {str(name): row for row, name in enumerate(names)}
    said = said[[place[str(name)] for name in found.node]]
    np.testing.assert_allclose(said.max(1), found.probability, atol=1e-5, err_msg=str(client))
    rows += len(said)
    close = np.abs(said[np.arange(len(said)), found.predicted] - said.max(1)) < 2e-5
    assert close.all(), client
assert rows
print("same", len(graphs))
"""


# FedGCN's clients predict with sums of features that no graph of theirs has
@every((name for name in ALL if not name.startswith(("deepwalk", "fedgcn"))), fast=())
def test_saved_models_are_plain_modules(name: str, tmp_path: Path) -> None:
    """In a process without Flower each client's model gives what the client predicted."""
    setup, there = left(name)
    config = setup.load("rounds=3")
    method, graphs = method_of(config), dict[int | None, Any]()
    if isinstance(method, GraphMethod):
        for graph in method.graphs(config):
            x = graph.x if graph.x.layout == torch.strided else graph.x.to_dense()
            names = called([graph])
            names = names.tolist() if isinstance(names, torch.Tensor) else names
            graphs[graph.client] = (x, graph.edge_index, [*map(str, names)])
    else:
        whole = cached_data(config)
        graphs[None] = (None, whole.edge_index, list(range(whole.num_nodes)))
    torch.save(graphs, tmp_path / "graphs.pt")
    said = run_without_flower(PLAIN, there.path, tmp_path / "graphs.pt")
    assert said.split() == ["same", str(len(graphs))]


@pytest.mark.flwr
# The server has nFedGNN's predictions, and clients have those of FedGLS
@pytest.mark.parametrize(
    "name", tried(["nfedgnn", "fedgls", "fedscem", "gat", "fedgta"], (), ["nfedgnn", "fedgls"])
)
def test_predictions_of_a_run_on_ray_make_its_accuracies(name: str, tmp_path: Path) -> None:
    from flower_graph.apps.cli.launch import flwr_run

    setup = ALL[name]
    words, how = [*setup.overrides, "rounds=2"], {"supernodes": setup.supernodes}
    flwr_run(setup.config, words, tmp_path / "run", seed=setup.load().seed, **how)
    check_accuracies(setup, fg.load_run(tmp_path / "run"))


def asked(setup: Setup) -> str:
    more = "" if setup.config.startswith("ppfl") else ",auc"
    return f"metrics=[macro-f1,accuracy,balanced-accuracy{more}]"


@pytest.mark.parametrize("name", tried(ALL, fast=FAST))
def test_metrics_are_those_of_all_predictions_together(name: str, tmp_path: Path) -> None:
    setup = ALL[name]
    done = setup.run(tmp_path / "run", "rounds=3", asked(setup), state_dir=None)
    reports, kept, compared = done.reports, fg.load_run(done.out).predictions(), []
    report, scores = reports[-1], reports[-1].scores
    for role in ("val", "test"):
        local = kept.of_role(role)
        if not len(local.label):
            continue
        pair = local.label, local.predicted
        assert scores["macro-f1"][role] == pytest.approx(f1_score(*pair, average="macro"))
        balanced = balanced_accuracy_score(*pair)
        assert scores["balanced-accuracy"][role] == pytest.approx(balanced)
        if role == "test":
            classes = range(len(report.confusion))
            assert report.confusion == confusion_matrix(*pair, labels=[*classes]).tolist()
        compared.append(role)
    assert "test" in compared
    measured = [one for one in reports if one.scores["macro-f1"]["val"] >= 0]  # not if it is NaN
    best = max(measured, key=lambda report: report.scores["macro-f1"]["val"])
    assert done.result["best-round"] == best.round
    assert done.result["test-macro-f1-at-best-val"] == best.scores["macro-f1"]["test"]
    if "auc" in scores:
        assert all(0 <= one.scores["auc"]["test"] <= 1 for one in reports)


def test_impossible_metrics_are_refused() -> None:
    private = ["metrics=[macro-f1]", "privacy.epsilon=8"]
    for words in (["metrics=[]"], ["metrics=[accuracy,accuracy]"], ["metrics=[f1]"], private):
        with pytest.raises(ConfigError, match=words[-1].partition("=")[0]):
            load_config("fedpub/cora", words)
    load_config("nfedgnn/cora", private)  # the server measures
    with pytest.raises(ConfigError, match="auc"):  # a judge has no probabilities
        load_config("ppfl/cora-gat", ["metrics=[auc]"])
