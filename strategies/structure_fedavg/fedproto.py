"""FedProto: clients with different models that share what a class looks like.

Tan, Long, Liu, Zhou, Lu, Jiang and Zhang, "FedProto: Federated Prototype Learning across
Heterogeneous Clients", AAAI 2022; a baseline of FedGLS, where clients with edges have a GNN and
graphless clients an MLP. The *prototype* of a class is the mean hidden vector of its training
nodes. Round ``t``:

1. server -> clients: the global prototype of each class;
2. client, ``E`` times: a step of its own model on the cross-entropy plus ``prototype_weight`` times
   the mean squared distance between the hidden vectors of its training nodes and their classes'
   prototypes;
3. client -> server: the sum of the hidden vectors of each class, and their number;
4. server: the mean over all clients' nodes of the class, weighted by nodes as in the paper's
   equation 6. A class that nobody has keeps its last prototype;
5. server -> clients: Flower's ``evaluate``; each client judges its own model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from flower_graph.messages.averaging import RoundRequest
from flower_graph.messages.keys import ARRAYS
from flower_graph.strategies.structure_fedavg.messages import SharedPrototypes
from flower_graph.strategies.structure_fedavg.strategy import (
    Answer,
    LocalClient,
    SharewiseFedAvg,
    training_answer,
)


class PrototypeClient(LocalClient):
    """The clients of one SuperNode, each with a model of its own; arguments as of its parents."""

    def fit(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> Answer:
        """Train towards the prototypes and add up the clients' own (steps 2 and 3)."""
        k, h = self.settings.num_classes, self.settings.hidden
        known = SharedPrototypes.from_numpy(parameters, {}, k=k, h=h)
        means, share = (
            torch.from_numpy(np.ascontiguousarray(part, np.float32))
            for part in (known.vectors, known.share)
        )
        goal = torch.where(share[:, None] > 0, means, torch.nan)
        with self.opened() as cohort:
            trained = cohort.train(RoundRequest.from_config(config).server_round, goal)
            sums, count = cohort.class_sums(trained.diverged)
            nodes = int(cohort.nodes.sum())
        parts = [(part / nodes).float().cpu().numpy() for part in (sums, count)]
        return training_answer(SharedPrototypes(*parts), nodes, cohort.size, trained)


class FedProto(SharewiseFedAvg):
    """The server's half for ``PrototypeClient``; arguments as of ``StructureFedAvg``."""

    def first_arrays(self) -> ArrayRecord:
        """Give prototypes that nobody has yet."""
        k, h = self.settings.num_classes, self.settings.hidden
        nothing = SharedPrototypes(np.zeros((k, h), np.float32), np.zeros(k, np.float32))
        return nothing.to_record().array_records[ARRAYS]
