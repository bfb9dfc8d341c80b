"""What LocalSage+ and FedSage+ leave: modules of PyG's layers that compute what clients do."""

from __future__ import annotations

import pytest
import torch
from sage_helpers import learners_of, networks, new_client

from flower_graph.strategies.fed_sage.modules import SageModel


@pytest.mark.parametrize("averages", [False, True])
def test_modules_compute_what_clients_do(averages: bool) -> None:
    client = new_client(networks(), averages=averages, generator_epochs=300)
    begun = client.arrays(learners_of(client)[0].module)  # of LocalSage+ nothing
    sent, *_ = client.fit([value.numpy() for value in begun.values()], {"server-round": 1})
    client.evaluate(sent, {"server-round": 1})
    snapshot = client.snapshot()
    (models,) = snapshot.models
    shared = {name.partition(".")[0] for name in models.shared} - {"generator"}
    assert shared == ({"conv1", "conv2", "classifier"} if averages else set())
    assert snapshot.predictions is not None
    made = 0
    for network in networks():
        model = SageModel(**models.arguments)
        model.load_state_dict(models.state_dict(network.client))
        logits = model.eval()(network.x, network.edge_index)
        own = snapshot.predictions.of_client(network.client)
        assert own.node.tolist() == network.nodes.tolist()
        assert own.predicted.tolist() == logits.argmax(1).tolist()
        share = torch.from_numpy(own.probability)
        torch.testing.assert_close(share, logits.softmax(1).amax(1), atol=1e-5, rtol=1e-5)
        made += len(model.mend(network.x, network.edge_index)[0]) - len(network.x)
    assert made
