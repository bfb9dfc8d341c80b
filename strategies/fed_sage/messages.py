"""Messages of LocalSage+ and FedSage+: generators and their judgement, classifiers and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor as TorchTensor

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.fed_sage.cohort import (
    CLASSIFIER_NAMES,
    FEATURE_NAMES,
    SageSettings,
    Scores,
)
from flower_graph.strategies.fed_sage.neighbour_generation import LATENT, NEIGHBOURS
from flower_graph.wire.arrays import FloatArray, IntArray, encode_array
from flower_graph.wire.codec import Entries, Message, Named, Part, Tensor
from flower_graph.wire.fields import Exact, Flag, Handled, Numbers, Real, Whole
from flower_graph.wire.keys import (
    ARRAYS,
    CLIENTS,
    EPOCH,
    MAX_CLASSES,
    METRICS,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_FEATURES,
    ROWS,
    SERVER_ROUND,
)

Arrays = dict[str, FloatArray]
Shapes = Mapping[str, tuple[int, ...]]

SETTINGS = Part(
    make=SageSettings,
    fields={
        "hidden": Whole("hidden-size"),
        "learning_rate": Real("learning-rate", "of Adam"),
        "weight_decay": Real("weight-decay", "of Adam"),
        "local_epochs": Whole("local-epochs", "epochs a round"),
        "generator_epochs": Whole("generator-epochs", "steps of the generator alone"),
        "seed": Whole("seed"),
        "batch_size": Whole(
            "batch-size", "nodes of a step; without it all", least=1, optional=True
        ),
    },
)
Settings = Annotated[SageSettings, SETTINGS]
write_settings, read_settings = SETTINGS.to_config, SETTINGS.from_config


@dataclass
class SageEnrolment(Message, up="query"):
    """Client to server: the clients here and the sizes of their data."""

    # Unique over the run
    clients: Annotated[NDArray[np.int64], Exact(CLIENTS, "numbers of the clients here", shape="c")]
    features: Annotated[int, Whole(NUM_FEATURES, least=1)]
    classes: Annotated[int, Whole(NUM_CLASSES, least=1, most=MAX_CLASSES)]
    handled: Handled = None

    def check(self, known: Entries) -> None:
        """Refuse no clients, and the same twice."""
        clients = self.clients
        if clients.size == 0 or clients.min() < 0 or np.unique(clients).size != clients.size:
            raise MalformedReplyError(f"{CLIENTS}: expected different numbers, got {clients}")


@dataclass
class GeneratorRequest(Message, down="train.generate"):
    """Server to client: learn alone (epoch 0), or by the others' judgement."""

    epoch: Annotated[int, Whole(EPOCH, "0: train alone; from 1 on: step by the gradients")]
    settings: Settings  # What to train with
    share: Annotated[bool, Flag("share", "whether to show the generators")]
    gradient: Annotated[
        Arrays,
        Named(
            "arrays/generator-*",
            "gradients by `generator-1.weight`, `.bias`, to `3`, of each client here",
            names=FEATURE_NAMES,
            first="c",
        ),
    ]
    others: Annotated[int, Whole("others", "clients that the gradients are summed over")] = 0


@dataclass
class Generators(Message, down="train.judge", up="train.generate"):
    """What clients show of their generators."""

    # It goes on to all cohorts as ``train.judge``, with the run's settings.

    epoch: Annotated[int, Whole(EPOCH, "the epoch in which they are to be judged")]  # from 1
    clients: Annotated[IntArray, Exact(CLIENTS, "authors of the generators", shape="c")]
    rows: Annotated[IntArray, Exact(ROWS, "nodes that each of them shows", shape="c")]
    missing: Annotated[
        IntArray, Exact("missing", "neighbours that each of these misses", shape="n")
    ]
    encoded: Annotated[
        FloatArray, Tensor("arrays/encoded", "the nodes, encoded, with noise", shape=f"n {LATENT}")
    ]
    weights: Annotated[  # of fGen
        Arrays, Named("arrays/generator-*", "weights", names=FEATURE_NAMES, first="c")
    ]

    @property
    def examples(self) -> int:
        """Count the clients."""
        return int(self.clients.size)

    def check(self, known: Entries) -> None:
        """Refuse rows that do not add up, and more neighbours than can be missing."""
        rows, missing = self.rows, self.missing
        if (rows < 0).any() or rows.sum() != missing.size:
            raise MalformedReplyError(f"{ROWS}: counts for {missing.size} nodes, got {rows[:5]}...")
        if missing.size and (missing.min() < 1 or missing.max() > NEIGHBOURS):
            raise MalformedReplyError(f"missing: expected 1 to {NEIGHBOURS}")


@dataclass
class PeerGradients(Message, up="train.judge"):
    """Client to server: what generators are worth at others."""

    epoch: Annotated[int, Whole(EPOCH, "the epoch")]
    gradient: Annotated[
        Arrays,
        Named(
            "arrays/generator-*",
            "gradients by each author's weights, summed over the clients here",
            names=FEATURE_NAMES,
            first="a",
        ),
    ]


@dataclass
class SageRequest(Message, down="train evaluate"):
    """Server to client: train, or say how good you are."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]
    clients: Annotated[IntArray, Exact(CLIENTS, "who trains, or is judged", shape="p")]
    settings: Settings  # What to train with
    # Empty for LocalSage+, where each keeps its own
    weights: Annotated[
        Arrays,
        Named(
            "arrays/classifier-*",
            "FedSage+: mean of `classifier-1.weight`, `.bias`, to `3`",
            names=CLASSIFIER_NAMES,
        ),
    ]


@dataclass
class SageScores(Message, up="train evaluate"):
    """How good the classifiers of some clients at one SuperNode are."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "as asked")]
    losses: Annotated[
        list[float],
        Numbers(
            "losses",
            "LocalSage+ in `train`, FedSage+ in `evaluate`: cross-entropy of each client",
            shape="p",
        ),
    ]
    counts: Annotated[
        NDArray[np.int64],
        Exact(
            "counts",
            "likewise: right answers and nodes, by training, validation, test",
            shape="p 2 3",
        ),
    ]

    @classmethod
    def of(cls, server_round: int, scores: Scores, places: TorchTensor) -> SageScores:
        """Take over what a cohort found of the clients at some places."""
        counts = torch.stack([scores.correct, scores.size], 1).cpu()[places].numpy()
        return cls(server_round, scores.loss.cpu()[places].tolist(), counts)

    @classmethod
    def of_request(cls, content: RecordDict, request: SageRequest) -> SageScores:
        """Read and check a reply to a request."""
        return cls.read(content, server_round=request.server_round, p=request.clients.size)

    def check(self, known: Entries) -> None:
        """Refuse losses that are not finite, and more right answers than nodes."""
        if not all(map(math.isfinite, self.losses)):
            raise MalformedReplyError(f"losses: not all are numbers: {self.losses[:5]}")
        counts = self.counts
        if counts.min() < 0 or (counts[:, 0] > counts[:, 1]).any():
            raise MalformedReplyError("counts: more correct predictions than nodes, or below 0")


@dataclass
class MeanClassifier(Message, up="train"):
    """Client to server: the mean of its clients' classifiers."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "as asked")]
    weight: Annotated[int, Whole(NUM_EXAMPLES, "training nodes, the weight of the mean", least=0)]
    weights: Annotated[
        Arrays,
        Named(
            "arrays/classifier-*",
            "FedSage+: mean of the clients here, weighted",
            names=CLASSIFIER_NAMES,
        ),
    ]


def tensors_of(arrays: Arrays) -> dict[str, TorchTensor]:
    """Give arrays as tensors."""
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def read_mean(content: RecordDict, server_round: int, shapes: Shapes) -> tuple[RecordDict, int]:
    """Check the mean classifier of a SuperNode's clients; return the reply and its weight."""
    # Flower's FedAvg can average the reply as it is.
    mean = MeanClassifier.read(content, server_round=server_round, shapes=shapes)
    checked = ArrayRecord({name: encode_array(name, value) for name, value in mean.weights.items()})
    metrics = MetricRecord({NUM_EXAMPLES: mean.weight})
    return RecordDict({ARRAYS: checked, METRICS: metrics}), mean.weight
