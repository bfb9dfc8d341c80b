"""nFedGNN whose server knows some edges and predicts others."""

import pytest
import torch
from torch import Tensor, nn

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


def test_users_who_come_and_go_keep_their_classes() -> None:
    with pytest.raises(ConfigError, match=r"^task") as caught:
        load_config("nfedgnn/cora", ["task=links", "data.remove=[3]"])
    assert "links" in str(caught.value)
