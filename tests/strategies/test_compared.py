"""FedAvg, FedProx, local training, Ditto and FedProto, each against its special cases."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import METHODS, Trained, run_rounds
from torch import Tensor
from torch.nn import functional

from flower_graph.client.learner import GraphOnDevice
from flower_graph.errors import ConfigError
from flower_graph.models import GCN
from flower_graph.ops.grouped import class_sums, distance_to_means
from flower_graph.strategies.fed_proto import FedProtoClient, WithPrototypes


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
    sums, counts = class_sums(rows, torch.tensor([0, 0, 2]), 3)
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


@pytest.mark.parametrize("name", ["local", "fedproto", "fedgta", "fedpub"])
def test_what_sends_no_weights_or_more_refuses_a_budget(name: str) -> None:
    with pytest.raises(ConfigError, match=f"app={name}"):
        METHODS[name].load("privacy.epsilon=1")


@pytest.mark.parametrize("form", ["local", "central"])
def test_weights_get_noise_of_a_budget(form: str) -> None:
    budget = ("privacy.epsilon=1", f"privacy.form={form}")
    (noisy, _), (plain, _) = run("ditto", *budget), run("ditto")
    assert min(np.abs(noisy[name] - plain[name]).max() for name in plain) > 0.1
