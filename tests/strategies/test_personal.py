"""FedGTA, FED-PUB, and the methods that all tables compare: by hand, and as FedAvg."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import METHODS, Trained, run_rounds
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.client.learner import GraphOnDevice
from flower_graph.errors import ConfigError
from flower_graph.models import GCN
from flower_graph.ops.graph import gcn_adjacency
from flower_graph.ops.grouped import distance_to_means, sums_by
from flower_graph.strategies import fed_gta
from flower_graph.strategies.fed_proto import FedProtoClient, WithPrototypes
from flower_graph.strategies.fed_pub import Masked, random_graph, softmax_weights

SMALL = METHODS["fedgta"]
# Two nodes with an edge between them; the first one's class, 0, is known.
EDGE = torch.tensor([[0, 1], [1, 0]])
Y, TRAIN = torch.tensor([0, 1]), torch.tensor([True, False])


def softmax(*values: float) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


# The path 0 - 1 - 2 with self-loops: degrees 2, 3, 2.
PATH = gcn_adjacency(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), 3)
START = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])


def test_one_step_on_a_path_by_hand() -> None:
    found = fed_gta.propagate_labels(PATH, START, 1, 0.5)
    root = 1 / math.sqrt(6)
    first = [0.5 + 0.5 * (0.5 + 0.5 * root), 0.5 * 0.5 * root]
    middle = 0.25 + 0.5 * (root + 0.5 / 3)
    wanted = torch.tensor([first, [middle, middle], first[::-1]])
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("raw", [0.5, 0.5, 0.25, 0.5, 0.125, 0.5]),
        ("central", [0, 0, 0, 0.25, 0, 0]),
        ("hybrid", [0.5, 0.5, 0.25, 0.5, 0.125, 0.5, 0, 0, 0, 0.25, 0, 0]),
    ],
)
def test_moments_of_two_rows_by_hand(kind: str, wanted: list[float]) -> None:
    rows = torch.tensor([[0.5, 0.0], [0.5, 1.0]])
    torch.testing.assert_close(fed_gta.moments(rows, 3, kind), torch.tensor(wanted).float())


def test_confidence_by_hand_counts_a_sure_node_as_often_as_it_has_neighbours() -> None:
    def confidence(shares: list[list[float]], degree: list[int]) -> float:
        return fed_gta.smoothing_confidence(torch.tensor(shares), torch.tensor(degree))

    sure, half = 2 / math.e, 2 / math.e - math.log(2)
    assert confidence([[1.0, 0.0]], [1]) == pytest.approx(sure)
    assert confidence([[0.5, 0.5]], [1]) == pytest.approx(half)
    assert confidence([[1.0, 0.0], [0.5, 0.5]], [2, 3]) == pytest.approx(2 * sure + 3 * half)


def test_predictions_of_two_nodes_are_spread_by_hand() -> None:
    how = fed_gta.FedGTASection(steps=1, restart=0.5, temperature=2.0)
    logits = torch.tensor([[-9.0, 9.0], [0.0, math.log(3)]])  # the second node: 1/4 and 3/4
    shares, smooth = fed_gta.spread_predictions(logits, Y, TRAIN, EDGE, how)
    # A' has 1/2 everywhere: the mean of (1, 0) and (1/4, 3/4) is (5/8, 3/8).
    spread = [0.5 * 0.25 + 0.5 * 5 / 8, 0.5 * 0.75 + 0.5 * 3 / 8]
    assert shares[0].tolist() == smooth[0].tolist() == [1, 0]
    assert shares[1].tolist() == pytest.approx(softmax(*spread))
    assert smooth[1].tolist() == pytest.approx(softmax(spread[0] / 2, spread[1] / 2))


def test_the_server_weighs_those_that_are_alike_by_their_confidence() -> None:
    vectors = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])  # cosines 0.71, 0, 0.71
    weights = fed_gta.peer_weights(vectors, np.array([1.0, 2.0, 5.0]), 0.5)
    assert weights.tolist() == [[1, 2, 0], [1, 2, 5], [0, 2, 5]]
    assert fed_gta.peer_weights(vectors, np.ones(3), 0.8).tolist() == np.eye(3).tolist()
    assert fed_gta.peer_weights(vectors, np.ones(3), -1.0).tolist() == np.ones((3, 3)).tolist()
    assert fed_gta.peer_weights(vectors, np.ones(3), 1.0).tolist() == np.eye(3).tolist()


def test_the_server_averages_for_each_client_by_hand() -> None:
    server = fed_gta.METHOD.build_strategy(
        SMALL.load("strategy.moments=raw", "strategy.order=1"), None
    )
    assert server.extras() == {"moments": (3,), "confidence": ()}
    replies = [
        SimpleNamespace(
            client=client,
            arrays={"w": np.float32([value])},
            extras={"moments": np.array(fed_gta.moments), "confidence": np.float32(sure)},
        )
        for client, value, fed_gta.moments, sure in (
            (4, 0.0, [1.0, 0.0, 0.0], 1.0),
            (7, 8.0, [1.0, 0.1, 0.0], 3.0),
            (9, 5.0, [0.0, 0.0, 1.0], -2.0),  # impossible; alone all the same
        )
    ]
    found = server.combine(replies)
    assert {client: arrays["w"].tolist() for client, arrays in found.items()} == {
        4: [6.0],
        7: [6.0],
        9: [5.0],
    }


SMALL_PUB, ENTRIES = METHODS["fedpub"], ("weight", "bias")


class Linear(nn.Module):
    """A module that takes a graph and does not look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.bias = nn.Parameter(torch.tensor([10.0, 20.0]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


def test_the_random_graph_has_dense_blocks_and_nothing_between_them() -> None:
    x, edges = random_graph(6, 3, 40, 0.25, seed=0)
    full = random_graph(2, 1, 3, 1.0, 0)[1]
    assert sorted(map(tuple, full.t().tolist())) == [
        (a, b) for a in range(3) for b in range(3) if a != b
    ]
    assert x.shape == (120, 6)
    assert float(x.mean()) == pytest.approx(0, abs=0.15)
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    source, target = edges
    assert torch.equal(source // 40, target // 40) and not bool((source == target).any())
    pairs = set(map(tuple, edges.t().tolist()))
    assert len(pairs) == edges.shape[1]
    assert pairs == {(b, a) for a, b in pairs}
    assert len(pairs) / (3 * 40 * 39) == pytest.approx(0.25, abs=0.03)
    one, same, other = (random_graph(4, 5, 20, 0.1, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])


def test_weights_are_a_softmax_of_scaled_cosines_by_hand() -> None:
    found = softmax_weights(np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), 3.0)
    high, low = math.exp(3) / (2 * math.exp(3) + 1), 1 / (2 * math.exp(3) + 1)
    assert found[0] == pytest.approx([high, low, high])
    assert found[1] == pytest.approx(np.array([1, math.exp(3), 1]) / (2 + math.exp(3)))
    assert softmax_weights(np.eye(2), 0.0).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert softmax_weights(np.eye(2), 5000.0).tolist() == [[1, 0], [0, 1]]


def test_a_mask_is_multiplied_in_and_a_small_one_is_nothing_in_evaluation() -> None:
    masked = Masked(Linear(), threshold=0.1)
    x, nothing = torch.tensor([[1.0, 1.0]]), torch.zeros(2, 0, dtype=torch.long)
    assert masked(x, nothing).tolist() == [[13, 27]]
    with torch.no_grad():
        masked.masks["weight"].copy_(torch.tensor([[0.5, -0.05], [1.0, 2.0]]))
    assert masked(x, nothing).tolist()[0] == pytest.approx([10.4, 31])
    assert masked.eval()(x, nothing).tolist()[0] == pytest.approx([10.5, 31])
    assert float(masked.size().detach()) == pytest.approx(3.55)
    masked.size().backward()
    assert masked.masks["weight"].grad.tolist() == [[1, -1], [1, 1]]
    assert masked.train().merged().weight.tolist() == [[0.5, 0], [3, 8]]


def test_masks_never_leave_a_client_and_each_client_has_its_own_model(tmp_path: Path) -> None:
    done = SMALL_PUB.run(tmp_path)
    assert not any(report.rejected or report.skipped for report in done.reports)
    layers = [f"module.{layer}.{part}" for layer in ("first", "second") for part in ENTRIES]
    assert {name.partition(".")[2] for name in done.kept} == set(layers)
    one, other = (done.kept[f"client-{client}.module.first.weight"] for client in (0, 1))
    assert not torch.equal(one, other)


def run(name: str, *settings: str, supernodes: int = 4, rounds: int = 2) -> Trained:
    """Run a few rounds without dropout and without files, with one weight decay for all."""
    alike = ("model.dropout=0", "strategy.weight_decay=5e-4", f"rounds={rounds}")
    config = METHODS[name].load(*alike, *settings)
    return run_rounds(config, supernodes)


def test_fedprox_is_fedavg_at_zero_and_stays_near_what_came_above() -> None:
    weights, figures = run("fedavg", rounds=1)
    same, again = run("fedprox", "strategy.proximal=0", rounds=1)
    assert again == figures
    near, _ = run("fedprox", "strategy.proximal=100", rounds=1)
    for name in ("first.bias", "second.bias"):  # they begin at 0
        np.testing.assert_array_equal(same[name], weights[name])
        assert abs(near[name]).max() < abs(weights[name]).max()


def test_ditto_is_fedavg_and_beside_it_local_training_at_zero() -> None:
    common, _ = run("fedavg")
    nothing, alone = run("local")
    assert nothing == {}
    free, figures = run("ditto", "strategy.pull=0")
    assert figures == pytest.approx(alone, abs=1e-5)
    drawn, figures = run("ditto", "strategy.pull=1")
    assert figures != pytest.approx(alone, abs=1e-3)
    for name, value in common.items():
        for ditto in (free, drawn):
            np.testing.assert_allclose(ditto[f"common.{name}"], value, atol=1e-5)


def test_fedproto_without_weight_is_local_training() -> None:
    _, alone = run("local")
    _, figures = run("fedproto", "strategy.prototype_weight=0")
    assert figures == pytest.approx(alone, abs=1e-6)
    weights, figures = run("fedproto", "strategy.prototype_weight=5")
    assert figures != pytest.approx(alone, abs=1e-4)
    assert weights["shares"].sum() == pytest.approx(1)


def test_prototypes_by_hand() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 6.0]])
    sums, counts = sums_by(torch.tensor([0, 0, 2]), rows, 3)
    assert sums.tolist() == [[4, 6], [0, 0], [0, 6]]
    assert counts.tolist() == [2, 0, 1]
    means = sums / counts[:, None]  # (2, 3), nobody's, (0, 6)
    apart = distance_to_means(rows, torch.tensor([0, 1, 0]), means)
    assert apart.tolist() == [1, 0, (2**2 + 3**2) / 2]


def test_a_client_adds_the_distance_and_sends_sums_by_node() -> None:
    gcn = GCN(2, 3, 2, dropout=0.0)
    graph = GraphOnDevice(
        (0,),
        x=torch.eye(3, 2),
        edge_index=torch.tensor([[0, 1], [1, 0]]),
        y=torch.tensor([1, 1, 0]),
        masks={"train": torch.tensor([True, True, False])},
    )
    module = WithPrototypes(gcn)
    module.sums[1], module.shares[1] = torch.tensor([0.5, 1.0, 1.5]), 0.5  # C_1 = (1, 2, 3)
    client = FedProtoClient.__new__(FedProtoClient)
    client.received = {"sums": module.sums, "shares": module.shares}
    client.how = SimpleNamespace(prototype_weight=2.0)  # type: ignore[assignment]
    hidden, logits = gcn.embed(graph.x, graph.edge_index), gcn(graph.x, graph.edge_index)
    plain = functional.cross_entropy(logits[:2], graph.y[:2])
    apart: Tensor = (hidden[:2] - torch.tensor([1.0, 2.0, 3.0])).square().mean()
    torch.testing.assert_close(client.loss(module, graph), plain + 2 * apart)
    sent = client.sent(module, graph)
    torch.testing.assert_close(sent["sums"][1], hidden[:2].mean(0))
    assert sent["shares"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["local", "fedproto", "fedgta", "fedpub", "scaffold"])
def test_what_sends_no_weights_or_more_refuses_a_budget(name: str) -> None:
    with pytest.raises(ConfigError, match=f"app={name}"):
        METHODS[name].load("privacy.epsilon=1")


@pytest.mark.parametrize("form", ["local", "central"])
def test_weights_get_noise_of_a_budget(form: str) -> None:
    budget = ("privacy.epsilon=1", f"privacy.form={form}")
    (noisy, _), (plain, _) = run("ditto", *budget), run("ditto")
    assert min(np.abs(noisy[name] - plain[name]).max() for name in plain) > 0.1
