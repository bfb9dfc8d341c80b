"""What ego-networks with generators leave of a run: predictions, and models with PyTorch's names.

This file needs neither Flower nor Ray, and PyTorch Geometric only where a model is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flower_graph.data.graph import called
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.outputs.files import Predictions, SavedModels, role_of
from flower_graph.strategies.fed_sage.cohort import SageCohort
from flower_graph.strategies.fed_sage.neighbour_generation import (
    CLASSIFIER,
    CODE,
    ENCODER,
    ENCODER_HIDDEN,
    FEATURES,
    GENERATOR_HIDDEN,
    LATENT,
    NEIGHBOURS,
    parameter_names,
)

MODULE = "flower_graph.strategies.fed_sage.modules.SageModel"
LAYERS = dict(
    zip(
        ENCODER + FEATURES + CLASSIFIER,
        (
            *(f"generator.{name}" for name in ("conv1", "conv2", "number", "lin1", "lin2", "lin3")),
            *("conv1", "conv2", "classifier"),
        ),
        strict=True,
    )
)


def predictions_of(
    cohort: SageCohort, networks: Sequence[EgoNetwork], classes: Sequence[str] | None = None
) -> Predictions:
    """Read off what the clients say of all nodes of theirs, as they were last judged."""
    graph = cohort.graph
    return Predictions.of(
        cohort.logits(),
        cohort.clients.repeat_interleave(torch.tensor(graph.ptr).diff()),
        called(networks),
        role_of(*graph.masks),
        graph.y.cpu(),
        classes,
    )


def models_of(cohort: SageCohort) -> SavedModels:
    """Give the clients' models: generators of their own, and their classifiers or the mean."""
    settings = cohort.settings
    arguments = {
        "features": cohort.graph.x.shape[1],
        "hidden": settings.hidden,
        "classes": cohort.classes,
        "generator": {
            "encoder_hidden": ENCODER_HIDDEN,
            "latent": LATENT,
            "hidden": GENERATOR_HIDDEN,
            "code": CODE,
            "neighbours": NEIGHBOURS,
            "seed": settings.seed,
        },
    }
    own = {"generator.client": cohort.clients}
    own |= {_named(name): cohort.tensors[name].mT if name.endswith("weight")
            else cohort.tensors[name] for name in parameter_names(ENCODER + FEATURES)}  # fmt: skip
    shared: dict[str, Tensor] = {}
    for name, value in cohort.judged().items():
        (shared if cohort.is_averaged else own)[_named(name)] = (
            value.mT if name.endswith("weight") else value
        )
    return SavedModels(MODULE, arguments, cohort.clients.tolist(), shared, own)


def _named(name: str) -> str:
    """Name a parameter as PyG's layers do."""
    layer, _, part = name.partition(".")
    named = LAYERS[layer]
    inner = "lin." if part == "weight" and "conv" in named else ""
    return f"{named}.{inner}{part}"
