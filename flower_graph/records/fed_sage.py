"""Messages of LocalSage+ and FedSage+: generators and their judgement, classifiers and scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.arrays import encode_array
from flower_graph.errors import MalformedReplyError
from flower_graph.neighbour_generation import LATENT, NEIGHBOURS
from flower_graph.records.keys import (
    ARRAY_NAMES,
    ARRAYS,
    CLIENTS,
    CONFIG,
    COUNTS,
    ENCODED,
    EPOCH,
    GENERATOR_EPOCHS,
    HANDLED,
    HIDDEN_SIZE,
    LEARNING_RATE,
    LOCAL_EPOCHS,
    LOSSES,
    METRICS,
    MISSING,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_FEATURES,
    OTHERS,
    ROUND,
    ROWS,
    SEED,
    SHARE,
    WEIGHT_DECAY,
    FloatArray,
    IntArray,
    pack_integers,
    read_array,
    unpack_integers,
)
from flower_graph.records.resume import read_handled
from flower_graph.sage_cohort import CLASSIFIER_NAMES, FEATURE_NAMES, SageSettings, Scores

Arrays = dict[str, FloatArray]
Shapes = Mapping[str, tuple[int, ...]]


def write_settings(settings: SageSettings) -> dict[str, Any]:
    """Return the config entries of ``SageSettings``."""
    return {
        HIDDEN_SIZE: settings.hidden,
        LEARNING_RATE: settings.learning_rate,
        WEIGHT_DECAY: settings.weight_decay,
        LOCAL_EPOCHS: settings.local_epochs,
        GENERATOR_EPOCHS: settings.generator_epochs,
        SEED: settings.seed,
    }


def read_settings(config: dict[str, Any]) -> SageSettings:
    """Read ``SageSettings`` from config entries."""
    return SageSettings(
        int(config[HIDDEN_SIZE]),
        float(config[LEARNING_RATE]),
        float(config[WEIGHT_DECAY]),
        int(config[LOCAL_EPOCHS]),
        int(config[GENERATOR_EPOCHS]),
        int(config[SEED]),
    )


def _record(config: dict[str, Any], arrays: Mapping[str, FloatArray]) -> RecordDict:
    encoded = {name: encode_array(name, value) for name, value in arrays.items()}
    return RecordDict({CONFIG: ConfigRecord(config), ARRAYS: ArrayRecord(encoded)})


def _named(names: tuple[str, ...], parameters: list[FloatArray]) -> Arrays:
    """Name the arrays of a message; none at all is allowed too."""
    return dict(zip(names, parameters, strict=True)) if parameters else {}


def _config(content: RecordDict) -> ConfigRecord:
    return content.config_records.get(CONFIG, ConfigRecord())


def _metrics(content: RecordDict, counter: str, expected: int) -> MetricRecord:
    """Return a reply's metrics; refuse one of another round or epoch."""
    metrics = content.metric_records.get(METRICS, MetricRecord())
    if metrics.get(counter) != expected:
        raise MalformedReplyError(f"{counter} {metrics.get(counter)}, expected {expected}")
    return metrics


def _check_clients(config: ConfigRecord, expected: IntArray) -> None:
    found = unpack_integers(config.get(CLIENTS), CLIENTS)
    if not np.array_equal(found, expected):
        raise MalformedReplyError(f"{CLIENTS}: {found[:5]}..., expected {expected[:5]}...")


@dataclass
class SageHello:
    """Client to server, the reply to ``query``: the clients here and the sizes of their data.

    Attributes
    ----------
    clients : ndarray
        ``[c]`` numbers, unique over the run.
    features, classes : int
        Width of the features, number of classes.
    handled : int or None
        Messages of this run that the clients have behind them, if the reply says so.
    """

    clients: NDArray[np.int64]
    features: int
    classes: int
    handled: int | None = None

    def to_properties(self) -> dict[str, Any]:
        """Return what ``get_properties`` returns."""
        sizes = {NUM_FEATURES: self.features, NUM_CLASSES: self.classes}
        found = {CLIENTS: pack_integers(self.clients), **sizes}
        return found if self.handled is None else found | {HANDLED: self.handled}

    @classmethod
    def from_record(cls, content: RecordDict) -> SageHello:
        """Read and check the reply."""
        config = _config(content)
        clients = unpack_integers(config.get(CLIENTS), CLIENTS)
        if clients.size == 0 or clients.min() < 0 or np.unique(clients).size != clients.size:
            raise MalformedReplyError(f"{CLIENTS}: expected different numbers, got {clients}")
        sizes = [config.get(NUM_FEATURES), config.get(NUM_CLASSES)]
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MalformedReplyError(f"numbers of features and classes: got {sizes}")
        known = (int(sizes[0]), int(sizes[1]))  # type: ignore[arg-type]  # checked above
        return cls(clients, *known, read_handled(config))


@dataclass
class GeneratorRequest:
    """Server to client, ``train.generate``: learn alone (epoch 0), or by the others' judgement.

    Attributes
    ----------
    epoch : int
        0: train NeighGen alone. From 1 on: step ``fGen`` with ``gradient`` as that epoch.
    settings : SageSettings
        What to train with.
    share : bool
        Whether the reply is to show the generators, for the next epoch.
    gradient : dict of ndarray
        ``[c, ...]`` gradients by ``fGen``'s weights, summed over the other clients.
    others : int
        How many these are.
    """

    epoch: int
    settings: SageSettings
    share: bool
    gradient: Arrays
    others: int = 0

    def to_record(self) -> RecordDict:
        """Write the message."""
        own = {EPOCH: self.epoch, SHARE: self.share, OTHERS: self.others}
        return _record(write_settings(self.settings) | own, self.gradient)

    @classmethod
    def from_numpy(cls, parameters: list[FloatArray], config: dict[str, Any]) -> GeneratorRequest:
        """Read the message at the client."""
        gradient = _named(FEATURE_NAMES, parameters)
        return cls(
            int(config[EPOCH]),
            read_settings(config),
            bool(config[SHARE]),
            gradient,
            int(config[OTHERS]),
        )


@dataclass
class Generators:
    """What clients show of their generators; the reply to ``train.generate``.

    It goes on to all cohorts as ``train.judge``.

    Attributes
    ----------
    epoch : int
        The epoch in which they are to be judged, from 1.
    clients, rows : ndarray
        ``[c]`` the clients, and how many nodes each shows.
    missing : ndarray
        ``[n]`` missing neighbours of every node shown.
    encoded : ndarray
        ``[n, LATENT]`` the nodes, encoded, with noise.
    weights : dict of ndarray
        ``[c, ...]`` weights of ``fGen``.
    """

    epoch: int
    clients: IntArray
    rows: IntArray
    missing: IntArray
    encoded: FloatArray
    weights: Arrays

    def _entries(self) -> dict[str, Any]:
        return {
            EPOCH: self.epoch,
            CLIENTS: pack_integers(self.clients),
            ROWS: pack_integers(self.rows),
            MISSING: pack_integers(self.missing),
        }

    def to_record(self, settings: SageSettings) -> RecordDict:
        """Write the message to the judges."""
        arrays = {ENCODED: self.encoded, **self.weights}
        return _record(self._entries() | write_settings(settings), arrays)

    def to_numpy(self) -> tuple[list[Any], int, dict[str, Any]]:
        """Return what a ``NumPyClient``'s method returns."""
        names = [ENCODED, *self.weights]
        metrics = self._entries() | {ARRAY_NAMES: names}
        return [self.encoded, *self.weights.values()], int(self.clients.size), metrics

    @classmethod
    def from_numpy(cls, parameters: list[FloatArray], config: dict[str, Any]) -> Generators:
        """Read the message at a judge."""
        return cls(
            int(config[EPOCH]),
            unpack_integers(config[CLIENTS], CLIENTS),
            unpack_integers(config[ROWS], ROWS),
            unpack_integers(config[MISSING], MISSING),
            parameters[0],
            _named(FEATURE_NAMES, parameters[1:]),
        )

    @classmethod
    def from_record(
        cls, content: RecordDict, epoch: int, clients: IntArray, shapes: Shapes
    ) -> Generators:
        """Read and check the reply of some clients; ``shapes`` are those of one client."""
        _metrics(content, EPOCH, epoch)
        config = _config(content)
        _check_clients(config, clients)
        rows = unpack_integers(config.get(ROWS), ROWS)
        missing = unpack_integers(config.get(MISSING), MISSING)
        if rows.shape != clients.shape or (rows < 0).any() or rows.sum() != missing.size:
            raise MalformedReplyError(f"{ROWS}: counts for {missing.size} nodes, got {rows[:5]}...")
        if missing.size and (missing.min() < 1 or missing.max() > NEIGHBOURS):
            raise MalformedReplyError(f"{MISSING}: expected 1 to {NEIGHBOURS}")
        encoded = read_array(content, ARRAYS, ENCODED, (missing.size, LATENT))
        return cls(epoch, clients, rows, missing, encoded, _read_stacked(content, clients, shapes))


@dataclass
class Judgement:
    """Client to server, the reply to ``train.judge``.

    Attributes
    ----------
    epoch : int
        The epoch.
    gradient : dict of ndarray
        ``[a, ...]`` gradients by every author's ``fGen``, summed over the clients here.
    """

    epoch: int
    gradient: Arrays

    def to_numpy(self, judges: int) -> tuple[list[Any], int, dict[str, Any]]:
        """Return what a ``NumPyClient``'s method returns."""
        metrics = {EPOCH: self.epoch, ARRAY_NAMES: list(self.gradient)}
        return list(self.gradient.values()), judges, metrics

    @classmethod
    def from_record(
        cls, content: RecordDict, epoch: int, authors: IntArray, shapes: Shapes
    ) -> Judgement:
        """Read and check the reply."""
        _metrics(content, EPOCH, epoch)
        return cls(epoch, _read_stacked(content, authors, shapes))


def _read_stacked(content: RecordDict, clients: IntArray, shapes: Shapes) -> Arrays:
    return {
        name: read_array(content, ARRAYS, name, (clients.size, *shapes[name]))
        for name in FEATURE_NAMES
    }


@dataclass
class SageRequest:
    """Server to client, ``train`` and ``evaluate``.

    Attributes
    ----------
    server_round : int
        The round.
    clients : ndarray
        ``[p]`` the clients that are to train, or to be judged.
    settings : SageSettings
        What to train with.
    weights : dict of ndarray
        FedSage+: the averaged classifier. Empty for LocalSage+, where each keeps its own.
    """

    server_round: int
    clients: IntArray
    settings: SageSettings
    weights: Arrays

    def to_record(self) -> RecordDict:
        """Write the message."""
        own = {ROUND: self.server_round, CLIENTS: pack_integers(self.clients)}
        return _record(write_settings(self.settings) | own, self.weights)

    @classmethod
    def from_numpy(cls, parameters: list[FloatArray], config: dict[str, Any]) -> SageRequest:
        """Read the message at the client."""
        clients = unpack_integers(config[CLIENTS], CLIENTS)
        weights = _named(CLASSIFIER_NAMES, parameters)
        return cls(int(config[ROUND]), clients, read_settings(config), weights)


@dataclass
class SageScores:
    """How good the classifiers of some clients at one SuperNode are.

    Attributes
    ----------
    server_round : int
        The round.
    losses : ndarray
        ``[c]`` mean cross-entropy over each client's training nodes.
    counts : ndarray
        ``[c, 2, 3]`` correct predictions and nodes; training, validation, test.
    """

    server_round: int
    losses: FloatArray
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, server_round: int, scores: Scores, places: Tensor) -> SageScores:
        """Take over what a cohort found of the clients at some places."""
        counts = torch.stack([scores.correct, scores.size], 1).cpu()[places].numpy()
        return cls(server_round, scores.loss.cpu()[places].numpy(), counts)

    def to_metrics(self) -> dict[str, Any]:
        """Return the entries for a client's metrics."""
        return {
            ROUND: self.server_round,
            LOSSES: [float(loss) for loss in self.losses],
            COUNTS: pack_integers(self.counts.reshape(-1)),
        }

    @classmethod
    def from_record(cls, content: RecordDict, server_round: int, clients: IntArray) -> SageScores:
        """Read and check a reply from some clients."""
        metrics = _metrics(content, ROUND, server_round)
        losses = metrics.get(LOSSES)
        if not isinstance(losses, list) or len(losses) != clients.size:
            raise MalformedReplyError(f"{LOSSES}: expected {clients.size} numbers")
        if not all(map(math.isfinite, losses)):
            raise MalformedReplyError(f"{LOSSES}: not all are numbers: {losses[:5]}")
        counts = unpack_integers(_config(content).get(COUNTS), COUNTS)
        if counts.size != clients.size * 6:
            raise MalformedReplyError(f"{COUNTS}: {counts.size} numbers for {clients.size} clients")
        counts = counts.reshape(-1, 2, 3)
        if counts.min() < 0 or (counts[:, 0] > counts[:, 1]).any():
            raise MalformedReplyError(f"{COUNTS}: more correct predictions than nodes, or below 0")
        return cls(server_round, np.array(losses), counts)


def read_mean(content: RecordDict, server_round: int, shapes: Shapes) -> tuple[RecordDict, int]:
    """Check the mean classifier of a SuperNode's clients; return the reply and its weight.

    Flower's FedAvg can average the reply as it is.
    """
    metrics = _metrics(content, ROUND, server_round)
    weight = metrics.get(NUM_EXAMPLES)
    if not isinstance(weight, int) or weight < 0:
        raise MalformedReplyError(f"{NUM_EXAMPLES}: expected a number from 0, got {weight!r:.60}")
    arrays = {name: read_array(content, ARRAYS, name, shapes[name]) for name in CLASSIFIER_NAMES}
    checked = ArrayRecord({name: encode_array(name, value) for name, value in arrays.items()})
    return RecordDict({ARRAYS: checked, METRICS: MetricRecord({NUM_EXAMPLES: weight})}), weight
