"""nFedGNN whose server knows some edges and predicts others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federation import METHODS
from torch import Tensor, nn
from torch_geometric.data import Data

import flower_graph as fg
from flower_graph.apps.cli.main import main
from flower_graph.config.module import LinksSection
from flower_graph.data.graph import Graph
from flower_graph.errors import ConfigError
from flower_graph.method.load import load_config
from flower_graph.ops.links import both_directions, dot_products, undirected
from flower_graph.strategies.nfedgnn.config import StrategyConfig
from flower_graph.strategies.nfedgnn.server_model import LinkRelayServer
from flower_graph.strategies.nfedgnn.users import UserSettings

N = 70


class Heard(nn.Module):
    """Gives latent vectors as they are, and notes over which edges it was to pass messages."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = nn.Parameter(torch.ones(1)), list[set[int]]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(set(undirected(edge_index, N).tolist()))
        return self.scale * x


def server(model: nn.Module) -> LinkRelayServer:
    rng = torch.Generator().manual_seed(0)
    pairs = torch.randint(N, (2, 5 * N), generator=rng)
    edges = both_directions(pairs[:, pairs[0] != pairs[1]]).unique(dim=1)
    train = torch.ones(N) > 0
    data = Graph(torch.zeros(N, 1), edges, torch.zeros(N).long(), 2, train, ~train, ~train)
    one = LinkRelayServer(
        data,
        model,
        StrategyConfig(reg_weight=0.0, weight_decay=0.0),
        UserSettings(4, False, 0.0, 0),
        torch.device("cpu"),
        links=LinksSection(0.1, 0.2, 3),
    )
    one.receive(torch.arange(N), torch.randn(N, 4, generator=rng))
    return one


def test_the_server_passes_over_no_edge_that_it_is_judged_by() -> None:
    model = Heard()
    relay = server(model)
    split = relay.split
    code = split.pairs[0] * N + split.pairs[1]
    train, val, test = (
        set(code[split.is_edge & (split.role == role)].tolist()) for role in range(3)
    )
    relay.gradients(1, relay.latent, relay.known)
    accuracy = relay.accuracy()
    learnt, early, late = model.seen
    assert learnt == early == train and late == train | val and not late & test
    score = dot_products(relay.rows(split.later), split.pairs)
    chosen = split.role == 2
    assert accuracy["test"] == pytest.approx(
        float(((score > 0) == split.is_edge)[chosen].double().mean())
    )


def test_users_who_were_not_heard_teach_nothing() -> None:
    relay = server(Heard())
    heard = torch.arange(N) < 40
    _, gradient = relay.gradients(1, relay.latent, heard)
    assert not gradient[~heard].any() and bool(gradient[heard].any())
    losses, nothing = relay.gradients(1, relay.latent, heard & False)
    assert losses["cross_entropy"] == 0 and not nothing.any()


FORMS = {
    "own": ("strategy.share=own",),
    "averaged": ("strategy.share=averaged", "strategy.average_every=2"),
    "summed": ("strategy.share=summed",),
    "masked": ("strategy.share=summed", "strategy.aggregation=masked"),
}
TRIED = [(form, decoder) for form in FORMS for decoder in ("dot", "mlp")]
MARKS = {("own", "mlp"): (), ("summed", "dot"): (), ("masked", "dot"): (pytest.mark.slow,)}


@pytest.mark.parametrize(
    ("form", "decoder"),
    [pytest.param(*one, marks=MARKS.get(one, (pytest.mark.release,))) for one in TRIED],
)
def test_every_form_learns_links_by_either_decoder(form: str, decoder: str, tmp_path: Path) -> None:
    """On a ring with chords, where who is near is linked."""
    n = 120
    place = torch.arange(n)
    edges = torch.cat([torch.stack([place, (place + step) % n]) for step in (1, 2, 3)], 1)
    angle = 2 * torch.pi * place[:, None] / n * torch.arange(1, 5)
    x = torch.cat([angle.sin(), angle.cos()], 1)
    torch.save(Data(x=x, edge_index=edges, y=0 * place), tmp_path / "graph.pt")
    learnt = ("task=links", "metrics=[auc,mrr]", "model.hidden=8")
    words = (*FORMS[form], *learnt, f"data.name={tmp_path / 'graph.pt'}", "data.features=as-is")
    words = (*words, "data.split=auto", "rounds=20", "strategy.reg_weight=0", "model.dropout=0")
    words = (*words, f"links.decoder={decoder}", "strategy.learning_rate=0.05", "device=cpu")
    setup = replace(METHODS["nfedgnn"], overrides=words)
    done = setup.run(tmp_path / "run", state_dir=None)
    assert done.result["test-auc-at-best-val"] > 0.75
    run, report = fg.load_run(done.out), done.reports[-1]
    assert 0 < report.score("mrr", "test") <= 1 and 0 <= report.score("auc", "test") <= 1
    baselines = {"common-neighbours", "adamic-adar", "feature-product"}
    assert done.result["baselines"].keys() == baselines
    assert decoder == "dot" or run.model().decoder is not None
    rows, known = run.embeddings(), run.known_links()
    assert set(rows.client.tolist()) == {-1} and len(rows.node) == done.result["clients"]
    node, table = str(rows.node[0]), tmp_path / "best.csv"
    words = ("predict", str(done.out), "--links", "--node", node, "--top", "4")
    assert main([*words, "--out", str(table)]) == 0
    lines = [line.split(",") for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    linked = {str(o) for n, o in zip(known.node, known.other, strict=True) if str(n) == node}
    assert len(lines) == 4 and not {line[2] for line in lines} & {*linked, node}


def test_users_who_come_and_go_keep_their_classes() -> None:
    with pytest.raises(ConfigError, match=r"^task") as caught:
        load_config("nfedgnn/cora", ["task=links", "data.remove=[3]"])
    assert "links" in str(caught.value)
