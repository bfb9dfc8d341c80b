"""What LocalSage+ and FedSage+ leave: modules that compute what the cohort does."""

from __future__ import annotations

import pytest
import torch
from sage_helpers import CLASSES, networks

from flower_graph.strategies.fed_sage.cohort import CLASSIFIER_NAMES, SageCohort, SageSettings
from flower_graph.strategies.fed_sage.kept import models_of, predictions_of
from flower_graph.strategies.fed_sage.modules import SageModel


def trained(*, averages: bool) -> SageCohort:
    settings = SageSettings(6, 0.02, 5e-4, 2, 4, 5)
    cohort = SageCohort(networks(), CLASSES, settings, torch.device("cpu"))
    cohort.pretrain()
    cohort.begin()
    # Else nobody would be given a neighbour after so few steps.
    cohort.tensors["number.bias"].fill_(1.7)
    everyone = torch.arange(cohort.num_clients)
    cohort.train(1, everyone)
    if averages:
        mean, _ = cohort.mean_weights(everyone)
        cohort.score(mean)
        cohort.train(2, everyone)  # for a round that nobody judged
    else:
        cohort.score()
    return cohort


@pytest.mark.parametrize("averages", [False, True])
def test_modules_compute_what_the_cohort_does(averages: bool) -> None:
    cohort = trained(averages=averages)
    models, logits = models_of(cohort), cohort.logits()
    assert {name.partition(".")[0] for name in models.shared} == (
        {"conv1", "conv2", "classifier"} if averages else set()
    )
    made = 0
    for place, network in enumerate(networks()):
        model = SageModel(**models.arguments)
        model.load_state_dict(models.state_dict(network.client))
        wanted = logits[cohort.graph.ptr[place] : cohort.graph.ptr[place + 1]]
        said = model.eval()(network.x, network.edge_index)
        torch.testing.assert_close(said, wanted, atol=1e-5, rtol=1e-5)
        made += len(model.generator(network.x, network.edge_index)[0])
    assert made


@pytest.mark.parametrize("averages", [False, True])
def test_predictions_give_the_scores(averages: bool) -> None:
    cohort = trained(averages=averages)
    mean = {name: cohort.tensors[f"mean.{name}"].clone() for name in CLASSIFIER_NAMES}
    found = predictions_of(cohort, networks())
    scores = cohort.score(mean if averages else None)
    for place, network in enumerate(networks()):
        own = found.of_client(network.client)
        assert own.node.tolist() == network.nodes.tolist()
        right = (own.predicted == own.label)[:, None] & (own.role[:, None] == (1, 2, 3))
        assert right.sum(0).tolist() == scores.correct[place].tolist()
