"""FedProto's prototypes by hand: what goes up, what the server makes of it, what comes down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from plain_structure import PlainFederation
from structure_helpers import client_app, run, settings_of, toy_clients
from torch import Tensor

from flower_graph.strategies.structure_fedavg.fedproto import FedProto, PrototypeClient

SETTINGS = settings_of("fedproto")
K, H = SETTINGS.num_classes, SETTINGS.hidden


def client(places: list[int], settings: Any = SETTINGS) -> PrototypeClient:
    context = Context(len(places), places[0] + 1, {"state-dir": ""}, RecordDict(), {})
    return PrototypeClient(context, [toy_clients()[place] for place in places], settings)


def fit(places: list[int], vectors: Tensor, share: Tensor, settings: Any = SETTINGS) -> Any:
    return client(places, settings).fit([vectors.numpy(), share.numpy()], {"server-round": 1})


def nothing() -> tuple[Tensor, Tensor]:
    return torch.zeros(K, H), torch.zeros(K)


def test_a_client_sends_the_means_of_its_classes() -> None:
    (vectors, share), weight, metrics = fit([0, 5], *nothing())
    assert weight == 6 + 11
    assert metrics["array-names"] == ["prototypes", "prototypes-share"]
    federation = PlainFederation([toy_clients()[0], toy_clients()[5]], "fedproto", SETTINGS)
    federation.round(1)
    counts = [
        sum(label == k for c in federation.clients for label, _ in c.training_vectors())
        for k in range(K)
    ]
    np.testing.assert_allclose(share * weight, counts, atol=1e-5)
    for label, wanted in federation.prototypes.items():
        mean = torch.from_numpy(vectors[label] / share[label])
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-5)


def test_a_prototype_pulls_and_a_class_without_one_does_not() -> None:
    def moved(vectors: Tensor, share: Tensor, weight: float) -> np.ndarray:
        settings = SETTINGS._replace(prototype_weight=weight)
        return fit([0], vectors, share, settings)[0][0]

    plain = moved(*nothing(), weight=5.0)
    far, everyone = torch.full((K, H), 3.0), torch.ones(K)
    # Without a share the vectors are not read; with weight 0 they count for nothing.
    assert np.array_equal(moved(far, torch.zeros(K), weight=5.0), plain)
    assert np.allclose(moved(far, everyone, weight=0.0), plain, atol=1e-6)
    assert moved(far, everyone, weight=5.0).sum() > plain.sum()


def test_the_first_round_sends_no_prototype() -> None:
    start = FedProto(SETTINGS).first_arrays()
    assert {name: tuple(array.shape) for name, array in start.items()} == {
        "prototypes": (K, H),
        "prototypes-share": (K,),
    }
    assert not any(array.numpy().any() for array in start.values())


def test_only_prototypes_travel() -> None:
    outcome = run("fedproto", rounds=2, supernodes=3)
    size = outcome.strategy.arrays.count_bytes()
    assert 4 * (K * H + K) <= size < 4 * (K * H + K) + 2 * 200
    assert outcome.strategy.payload["up"] == {"weights": 2 * 6 * size}  # of each of six clients


def test_a_class_whose_only_client_is_away_keeps_its_prototype() -> None:
    def away(message: Message, context: Context, call_next: Any) -> Message:
        is_25 = context.node_config["partition-id"] == 5
        is_training = message.metadata.message_type == "train"
        if is_25 and is_training and message.content["config"]["server-round"] == 2:
            raise OSError("away")
        return call_next(message, context)

    app = client_app("fedproto", mods=[away])
    one = run("fedproto", app=app, supernodes=6, rounds=1).arrays
    two = run("fedproto", app=app, supernodes=6, rounds=2).arrays
    assert one["prototypes-share"][2] > 0
    for name in one:
        assert torch.equal(two[name][2], one[name][2])
        assert not torch.equal(two[name][0], one[name][0])


def test_wrong_arrays_are_refused_before_anything_changes() -> None:
    with pytest.raises(ValueError, match=r"prototypes has shape \(1,\), expected \[4, 5\]"):
        client([0]).fit([np.zeros(1)] * 3, {"server-round": 1})
