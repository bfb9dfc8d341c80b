"""Messages of nFedGNN: gradients down, latent vectors up, averaged weights both ways.

Each message is a dataclass that writes itself into a ``RecordDict`` and reads itself from what a
``NumPyClient`` is given, or the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.arrays import encode_array
from flower_graph.cohort import UserSettings
from flower_graph.errors import MalformedReplyError
from flower_graph.records.keys import (
    ARRAY_NAMES,
    ARRAYS,
    AVERAGE,
    AVERAGE_OVER,
    AVERAGE_ROUND,
    CHECKPOINT,
    CONFIG,
    GRADIENT_ROUND,
    HANDLED,
    HOLDERS,
    LATENT_SIZE,
    LEARNING_RATE,
    MAX_NUMBER,
    METRICS,
    NOT_SAVED,
    RELAY,
    ROUND,
    RUN_TOKEN,
    SEED,
    SEND_WEIGHTS,
    USER_BIAS,
    USERS,
    WEIGHT_DECAY,
    WEIGHT_SHAPE,
    WEIGHTS,
    FloatArray,
    IntArray,
    pack_integers,
    read_array,
    unpack_integers,
    without_empty,
)
from flower_graph.records.resume import Resume, read_handled, read_not_saved

MAX_WEIGHTS = 1 << 28  # of one user


def write_settings(settings: UserSettings) -> dict[str, Any]:
    """Return the config entries of ``UserSettings``."""
    return {
        LATENT_SIZE: settings.latent_size,
        USER_BIAS: settings.bias,
        LEARNING_RATE: settings.learning_rate,
        WEIGHT_DECAY: settings.weight_decay,
        SEED: settings.seed,
        AVERAGE_OVER: settings.average_over,
    }


def read_settings(config: dict[str, Any]) -> UserSettings:
    """Read ``UserSettings`` from config entries."""
    return UserSettings(
        int(config[LATENT_SIZE]),
        bool(config[USER_BIAS]),
        float(config[LEARNING_RATE]),
        float(config[WEIGHT_DECAY]),
        int(config[SEED]),
        str(config[AVERAGE_OVER]),
    )


@dataclass
class Hello:
    """Server to client, ``query``: who is there; and, when a run is resumed, from which round.

    Attributes
    ----------
    settings : UserSettings
        What the users' models and optimisers are to be.
    resume : Resume
        The run, and the checkpoint that the client is to load.
    """

    settings: UserSettings
    resume: Resume = field(default_factory=Resume)

    def to_record(self) -> RecordDict:
        """Write the message."""
        config = write_settings(self.settings) | self.resume.to_config()
        return RecordDict({CONFIG: ConfigRecord(config)})

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Hello:
        """Read the message at the client."""
        return cls(read_settings(config), Resume.from_config(config))


@dataclass
class HelloReply:
    """Client to server: the users it hosts.

    Attributes
    ----------
    users : ndarray
        ``[n_c]`` node numbers.
    weight_shape : tuple of int
        Shape of one user's weights as they are averaged, ``(f, h)``.
    handled : int or None
        Messages of this run that they have behind them: 0 if they begin, or their state is lost.
        None if the client does not say.
    """

    users: NDArray[np.int64]
    weight_shape: tuple[int, int]
    handled: int | None = None

    def to_properties(self) -> dict[str, Any]:
        """Return what ``get_properties`` returns."""
        found = {USERS: pack_integers(self.users), WEIGHT_SHAPE: list(self.weight_shape)}
        return found if self.handled is None else found | {HANDLED: self.handled}

    @classmethod
    def from_record(cls, content: RecordDict, num_nodes: int) -> HelloReply:
        """Read and check the reply; node numbers must be below ``num_nodes`` and unique."""
        config = content.config_records.get(CONFIG, ConfigRecord())
        users = unpack_integers(config.get(USERS), USERS)
        if users.size == 0:
            raise MalformedReplyError("it hosts no users")
        if users.min() < 0 or users.max() >= num_nodes:
            wrong = users.min() if users.min() < 0 else users.max()
            raise MalformedReplyError(
                f"it hosts user {wrong}, but the graph has nodes 0 to {num_nodes - 1}"
            )
        if np.unique(users).size != users.size:
            raise MalformedReplyError("it hosts a user twice")
        shape = config.get(WEIGHT_SHAPE)
        if not (isinstance(shape, list) and len(shape) == 2 and all(_is_size(s) for s in shape)):
            raise MalformedReplyError(f"{WEIGHT_SHAPE}: expected two sizes, got {shape!r:.60}")
        rows, width = map(int, shape)
        if rows * width > MAX_WEIGHTS:
            raise MalformedReplyError(f"{WEIGHT_SHAPE}: {shape} is more than {MAX_WEIGHTS} numbers")
        return cls(users, (rows, width), read_handled(config))


@dataclass
class RelayRequest:
    """Server to client, ``train`` and ``train.finish``: gradients of an earlier round.

    Attributes
    ----------
    server_round : int
        The current round.
    users : ndarray
        ``[p]`` the users that take part.
    gradient : ndarray
        ``[p, h]`` gradient of the loss with respect to the latent vector that each sent last.
    gradient_round : ndarray
        ``[p]`` round of that latent vector; 0 where there is no gradient. A client that has
        applied that round's gradient already ignores it, so a repeated message does no harm.
    settings : UserSettings
        What the users' models and optimisers are.
    average : ndarray or None
        ``[f, h]`` averaged weights, NaN in rows that nobody averaged.
    average_round : int
        Round in which they were averaged; 0 without.
    send_weights : bool
        Whether the reply is to carry the users' weights.
    checkpoint : bool
        Whether the client is to save its state after this round.
    run : str
        Token of the run that the checkpoint is of.
    """

    server_round: int
    users: IntArray
    gradient: FloatArray
    gradient_round: IntArray
    settings: UserSettings
    average: FloatArray | None = None
    average_round: int = 0
    send_weights: bool = False
    checkpoint: bool = False
    run: str = ""

    def to_record(self) -> RecordDict:
        """Write the message."""
        config: dict[str, Any] = write_settings(self.settings) | {
            ROUND: self.server_round,
            USERS: pack_integers(self.users),
            GRADIENT_ROUND: pack_integers(self.gradient_round),
            AVERAGE_ROUND: self.average_round,
            SEND_WEIGHTS: self.send_weights,
            CHECKPOINT: self.checkpoint,
            RUN_TOKEN: self.run,
        }
        content = RecordDict({CONFIG: ConfigRecord(without_empty(config))})
        content[ARRAYS] = ArrayRecord({RELAY: encode_array(RELAY, self.gradient)})
        if self.average is not None:
            content[AVERAGE] = ArrayRecord({WEIGHTS: encode_array(WEIGHTS, self.average)})
        return content

    @classmethod
    def from_numpy(cls, parameters: list[FloatArray], config: dict[str, Any]) -> RelayRequest:
        """Read the message at the client."""
        return cls(
            int(config[ROUND]),
            unpack_integers(config[USERS], USERS),
            parameters[0],
            unpack_integers(config[GRADIENT_ROUND], GRADIENT_ROUND),
            read_settings(config),
            parameters[1] if len(parameters) > 1 else None,
            int(config[AVERAGE_ROUND]),
            bool(config[SEND_WEIGHTS]),
            bool(config[CHECKPOINT]),
            str(config.get(RUN_TOKEN, "")),
        )


@dataclass
class RelayReply:
    """Client to server: latent vectors, and sums of weights if they were asked for.

    Attributes
    ----------
    server_round : int
        The request's round.
    latent : ndarray
        ``[p, h]`` latent vectors, in the order of the request's users.
    weight_sum, holders : ndarray or None
        ``[f, h]`` the users' weights added up, and ``[f]`` how many users each row has.
    not_saved : str
        Why the checkpoint that was asked for could not be written; empty if it was.
    """

    server_round: int
    latent: FloatArray
    weight_sum: FloatArray | None = None
    holders: IntArray | None = None
    not_saved: str = ""

    def to_numpy(self) -> tuple[list[Any], int, dict[str, Any]]:
        """Return what ``NumPyClient.fit`` returns."""
        arrays: list[NDArray[Any]] = [self.latent]
        names = [RELAY]
        if self.weight_sum is not None and self.holders is not None:
            arrays += [self.weight_sum, self.holders]
            names += [f"{AVERAGE}/{WEIGHTS}", f"{AVERAGE}/{HOLDERS}"]
        metrics: dict[str, Any] = {ARRAY_NAMES: names, ROUND: self.server_round}
        if self.not_saved:
            metrics[NOT_SAVED] = self.not_saved
        return arrays, self.latent.shape[0], metrics

    @classmethod
    def from_record(
        cls, content: RecordDict, request: RelayRequest, weight_shape: tuple[int, int]
    ) -> RelayReply:
        """Read the reply to a request; ``MalformedReplyError`` for all that is not as asked."""
        metrics = content.metric_records.get(METRICS)
        found = None if metrics is None else metrics.get(ROUND)
        if found != request.server_round:
            raise MalformedReplyError(f"round {found}, expected {request.server_round}")
        latent = read_array(content, ARRAYS, RELAY, request.gradient.shape)
        not_saved = read_not_saved(content)
        if not request.send_weights:
            return cls(request.server_round, latent, not_saved=not_saved)
        most = MAX_NUMBER * max(1, request.users.size)
        weights = read_array(content, AVERAGE, WEIGHTS, weight_shape, limit=most)
        holders = read_array(content, AVERAGE, HOLDERS, weight_shape[:1], limit=None)
        users = request.users.size
        if holders.dtype.kind not in "iu" or holders.min() < 0 or holders.max() > users:
            raise MalformedReplyError(f"{HOLDERS}: expected counts from 0 to {users}")
        return cls(request.server_round, latent, weights, holders, not_saved)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
