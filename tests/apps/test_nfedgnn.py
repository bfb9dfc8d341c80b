"""What a config of nFedGNN becomes: the strategy, and each SuperNode's users."""

from itertools import pairwise

import pytest
from app_helpers import MakeConfig, context_of, own_graph

from flower_graph.apps.run import simulate
from flower_graph.errors import DataError, RefusedError
from flower_graph.method.load import load_config
from flower_graph.strategies.nfedgnn.method import METHOD


def test_a_deployed_client_shows_no_sum_of_gradients_unless_its_node_allows_it(
    config_of: MakeConfig,
) -> None:
    config = config_of(own_graph(), "strategy.share=summed")
    node: dict[str, str] = {"data-folder": "/nowhere"}
    for more in ({}, {"allow-trust": "semi-honest"}):
        with pytest.raises(RefusedError, match=r"strategy\.share.*allow-trust"):
            METHOD.build_client(config, context_of(node | more), None)
    masked = config_of(own_graph(), "strategy.share=summed", "strategy.aggregation=masked")
    with pytest.raises(DataError):  # it goes on to read the folder
        METHOD.build_client(masked, context_of(node), None)
    with pytest.raises(DataError):
        METHOD.build_client(config, context_of(node | {"allow-trust": "plain,semi-honest"}), None)


@pytest.mark.slow
def test_quickstart_is_calm(caplog: pytest.LogCaptureFixture) -> None:
    """It is the first that people see: no warning, the loss falls, accuracy does not jump."""
    reports = simulate(load_config("quickstart", ["device=cpu"]))
    found, losses = [one.val_accuracy for one in reports], [one.loss for one in reports]
    assert len(reports) == 200 and not caplog.messages
    assert max(losses) < 1.05 * losses[0] and losses[-1] < losses[100] < losses[50] < losses[0]
    assert max(abs(one - other) for one, other in pairwise(found[50:])) < 0.03
    assert min(found[100:]) > 0.74  # the paper's form: between 0.63 and 0.75
