"""Every method that learns links, by either decoder: figures, what is kept, what is predicted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import METHODS
from sklearn.metrics import roc_auc_score
from torch_geometric.data import Data

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.method.registry import method_of

LEARNT = (
    "task=links metrics=[auc,ap,hits@20,hits@50,mrr,accuracy] data.split=auto data.features=as-is "
    "model.hidden=8 model.dropout=0"
)
CUT = "rounds=30 partition.clients=2 partition.method=metis keep=best strategy.learning_rate=0.02"
USERS = "rounds=20 device=cpu strategy.reg_weight=0 strategy.learning_rate=0.05"
FORMS = {
    "own": "strategy.share=own",
    "averaged": "strategy.share=averaged strategy.average_every=2",
    "summed": "strategy.share=summed",
    "masked": "strategy.share=summed strategy.aggregation=masked",
}
WHO = ("fedavg", "fedprox", "fedopt", "scaffold", "local", "ditto", "fedgta", "fedpub", *FORMS)
TRIED = [(name, decoder) for name in WHO for decoder in ("dot", "mlp")]
FAST, SLOW = (), (pytest.mark.slow,)
MARKS = {("fedavg", "mlp"): FAST, ("own", "mlp"): SLOW, ("summed", "dot"): FAST}
MARKS |= dict.fromkeys([("ditto", "mlp"), ("fedprox", "dot"), ("masked", "dot")], SLOW)


def save_ring(n: int, path: Path) -> None:
    """Save nodes on a circle, each linked with those that are near, and features that say where."""
    place = torch.arange(n)
    edges = torch.cat([torch.stack([place, (place + step) % n]) for step in (1, 2, 3)], 1)
    angle = 2 * torch.pi * place[:, None] / n * torch.arange(1, 5)
    torch.save(
        Data(x=torch.cat([angle.sin(), angle.cos()], 1), edge_index=edges, y=0 * place), path
    )


@pytest.mark.parametrize(
    ("name", "decoder"),
    [pytest.param(*one, marks=MARKS.get(one, (pytest.mark.release,))) for one in TRIED],
)
def test_every_method_learns_links_by_either_decoder(
    name: str, decoder: str, tmp_path: Path
) -> None:
    save_ring(120, tmp_path / "graph.pt")
    setup = METHODS["nfedgnn" if name in FORMS else name]
    words = [f"data.name={tmp_path / 'graph.pt'}", f"links.decoder={decoder}", *LEARNT.split()]
    if name in FORMS:
        words += [*USERS.split(), *FORMS[name].split()]
    else:
        small = [one for one in setup.overrides if not one.startswith(("data.", "rounds"))]
        setup, words = replace(setup, supernodes=2), [*small, *words, *CUT.split()]
        words += ["strategy.learning_rate=0.5"] * (name == "scaffold")  # of SGD
    setup = replace(setup, overrides=tuple(words))
    done = setup.run(tmp_path / "run", state_dir=None)
    run, report, known = (
        fg.load_run(done.out),
        done.reports[-1],
        fg.load_run(done.out).known_links(),
    )
    assert done.result["test-auc-at-best-val"] > 0.75
    assert 0 < report.score("mrr", "test") <= 1 and 0 <= report.score("auc", "test") <= 1
    baselines = {"common-neighbours", "adamic-adar", "feature-product"}
    assert done.result["baselines"].keys() == baselines
    if name in FORMS:
        rows, own = run.embeddings(), []
        assert set(rows.client.tolist()) == {-1} and len(rows.node) == done.result["clients"]
        assert decoder == "dot" or run.model().decoder is not None
    else:
        method: Any = method_of(setup.load())
        task, graphs = method.task(setup.load()), method.graphs(setup.load())
        assert len(known.node) == sum(one.edge_index.shape[1] for one in graphs)
        rows, own = run.embeddings(0), ["--client", "0"]
    predict = ["predict", str(done.out), "--links", *own, "--out"]
    node, table = str(rows.node[0]), tmp_path / "best.csv"
    assert main([*predict, str(table), "--node", node, "--top", "4"]) == 0
    lines = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    linked = {str(o) for n, o in zip(known.node, known.other, strict=True) if str(n) == node}
    assert len(lines) == 4 and not {line[2] for line in lines} & {*linked, node}
    if name in FORMS or decoder == "dot":
        return
    # The saved decoder says of held-out pairs what the client said
    split, pairs = task.split(graphs[0]), tmp_path / "pairs.csv"
    said = run.model(0).decoder(torch.from_numpy(rows.embeddings), split.pairs)  # type: ignore[operator]
    assert roc_auc_score(split.is_edge, said.detach()) > 0.75
    one, other = (str(rows.node[place]) for place in split.pairs[:, 0].tolist())
    pairs.write_text(f"{one},{other}\n{other},{one}\n", encoding="utf-8")
    assert main([*predict, str(table), "--pairs", str(pairs)]) == 0
    chances = [float(line.split(",")[3]) for line in table.read_text().splitlines()[1:]]
    assert chances == pytest.approx([float(said[0].sigmoid())] * 2, rel=1e-4)
