"""FedGLS's messages: models or prototypes both ways, and the clients' measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from flower_graph.engine.stacked_weights import ModelWeights
from flower_graph.strategies.fedgls.networks import OWN, StructureSettings
from flower_graph.wire.arrays import Parameters
from flower_graph.wire.averaging import ClientMean, Measured, PerClient, Trained
from flower_graph.wire.codec import Message, Tensor

Floats = NDArray[np.float32]
# Ending of the divisor's name of an array in which not every client has a part
SHARE_END = "-share"
STRUCTURE_NAMES = ("precision", "recall", "homophily", "true-homophily", "degree", "true-degree")
NONE = torch.zeros(0)  # share of no client
# What the page says
FIRST_LAYER = (
    "θ: first layer (not FedProto, Local-GNN_k); up: mean over the SuperNode's clients by nodes; "
    "with shares: sum divided by `num-examples`"
)
GNN_SHARE = "Fed-GNNMLP: part of all nodes that the GNN was trained on"
ENCODER_LAYER = "ω, of FedGLS, and Fed-GNNMLP's MLP"


@dataclass
class SharedModels(Message, down="train evaluate", up="train"):
    """The models, each as its first layer and the flat rest."""

    gnn_first: Annotated[Floats, Tensor("arrays/gnn-first", FIRST_LAYER, shape="f h")]
    gnn_rest: Annotated[Floats, Tensor("arrays/gnn-rest", "θ: the other weights, flat", shape="D")]
    gnn_share: Annotated[
        Floats | None,
        Tensor("arrays/gnn-share", GNN_SHARE, shape="1", when="shares"),
    ] = None
    encoder_first: Annotated[
        Floats | None, Tensor("arrays/encoder-first", ENCODER_LAYER, shape="f h", when="encoder")
    ] = None
    encoder_rest: Annotated[
        Floats | None, Tensor("arrays/encoder-rest", "likewise", shape="D", when="encoder")
    ] = None
    encoder_share: Annotated[
        Floats | None,
        Tensor("arrays/encoder-share", "Fed-GNNMLP: of the MLP", shape="1", when="shares"),
    ] = None

    @classmethod
    def of(cls, models: Sequence[ModelWeights], shares: Sequence[float] | None) -> SharedModels:
        """Return the message of models, with each array's share of nodes if clients lack some."""
        parts: list[Any] = []
        for index, model in enumerate(models):
            share = None if shares is None else np.array([shares[index]], np.float32)
            parts += [model.first.cpu().numpy(), model.rest.cpu().numpy(), share]
        return cls(*parts)

    @classmethod
    def of_server(cls, parameters: Parameters, settings: StructureSettings) -> SharedModels:
        """Read the server's models; ``ValueError`` if the server has other settings."""
        has_shares, models = settings.graphs == OWN, settings.num_models
        h, k = settings.hidden, settings.num_classes
        try:
            if len(parameters) != models * (3 if has_shares else 2):
                raise ValueError(f"{len(parameters)} arrays came for {models} models")
            return cls.from_numpy(
                parameters,
                {},
                encoder=models > 1,
                shares=has_shares,
                f=settings.num_features,
                h=h,
                D=h + h * k + k,
            )
        except ValueError as error:
            why = "server and clients must have the same settings"
            raise ValueError(f"{error}: {why}") from error

    @property
    def models(self) -> list[ModelWeights]:
        pairs = [(self.gnn_first, self.gnn_rest), (self.encoder_first, self.encoder_rest)]
        return [
            ModelWeights(*(torch.from_numpy(np.ascontiguousarray(p, np.float32)) for p in pair))
            for pair in pairs
            if pair[0] is not None
        ]


@dataclass
class SharedPrototypes(Message, down="train evaluate", up="train"):
    """FedProto's prototypes."""

    vectors: Annotated[
        Floats,
        Tensor(
            "arrays/prototypes",
            "FedProto: means of embeddings by class; up: sums over nodes divided by `num-examples`",
            shape="k h",
        ),
    ]
    share: Annotated[
        Floats,
        Tensor(
            "arrays/prototypes-share",
            "FedProto: 0 for a class without; up: nodes of the class divided by `num-examples`",
            shape="k",
        ),
    ]


@dataclass(kw_only=True)
class StructureTrained(Trained, up="train"):
    """The entries of ``fit`` besides arrays."""

    # Flower needs the same names from all, even from SuperNodes without graphless clients.
    contrast: Annotated[
        PerClient,
        ClientMean(
            "contrast", "with `distillation`: losses summed over clients, divided by `num-examples`"
        ),
    ] = NONE
    distillation: Annotated[PerClient, ClientMean("distillation")] = NONE


@dataclass(kw_only=True)
class StructureMeasured(Measured, up="evaluate"):
    """The measurements of ``evaluate``."""

    precision: Annotated[
        PerClient,
        ClientMean(
            "precision", "this and the rest: learnt graphs against true ones, graphless clients"
        ),
    ] = NONE
    recall: Annotated[PerClient, ClientMean("recall")] = NONE
    homophily: Annotated[PerClient, ClientMean("homophily")] = NONE
    true_homophily: Annotated[PerClient, ClientMean("true-homophily")] = NONE
    degree: Annotated[PerClient, ClientMean("degree")] = NONE
    true_degree: Annotated[PerClient, ClientMean("true-degree")] = NONE

    def to_report(self) -> dict[str, object]:
        figures = {name: getattr(self, name.replace("-", "_")) for name in STRUCTURE_NAMES}
        numbers = {name: value for name, value in figures.items() if value == value}
        return super().to_report() | {"structure": numbers}
