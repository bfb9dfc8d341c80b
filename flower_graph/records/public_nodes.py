"""PPFL-GNN's messages: embeddings of public nodes up, their aligned means down.

A SuperNode speaks for one or more clients; their rows lie one behind the other. Ids travel once,
when a SuperNode says who is there; later messages name them by a fingerprint.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.arrays import decode_array, encode_array
from flower_graph.errors import MalformedReplyError
from flower_graph.gathering import one_line
from flower_graph.records.keys import (
    ARRAY_NAMES,
    ARRAYS,
    CHECKPOINT,
    CLIENTS,
    CONFIG,
    DIMENSIONS,
    DISAGREEMENT,
    FINGERPRINTS,
    FOLLOWS,
    HANDLED,
    IS_LAST,
    JUDGED,
    LEFT_OUT,
    LOSS,
    MAX_NUMBER,
    METRICS,
    NODES,
    NOT_SAVED,
    PUBLIC,
    ROWS,
    RUN_TOKEN,
    SERVER_ROUND,
    WANTS_EMBEDDINGS,
    WITH_TARGETS,
    largest_size,
    pack_integers,
    unpack_integers,
    without_empty,
)
from flower_graph.records.resume import read_handled, read_not_saved

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

MAX_DIMENSION = 1 << 16
MAX_JUDGED = 64  # measurements of a round
SHARES = ("train", "val", "test")  # measurements with these ends are shares of right answers


def fingerprint(nodes: IntArray) -> int:
    """Give 63 bits that tell one list of ids from another."""
    digest = hashlib.blake2b(pack_integers(nodes), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass
class PublicHello:
    """Client to server, answer to ``query``: who is there, and which nodes each can share.

    Attributes
    ----------
    clients : list of int
        Numbers of the clients.
    nodes : list of ndarray
        Ids of each client's public nodes, int64 ``[p]``.
    dimensions : list of int
        Numbers of an embedding, of each client.
    handled : int or None
        Messages of this run that they have behind them: 0 if they begin, or their state is lost.
        None if the SuperNode does not say.
    """

    clients: list[int]
    nodes: list[IntArray]
    dimensions: list[int]
    handled: int | None = None

    def to_properties(self) -> dict[str, Any]:
        """Return what ``get_properties`` returns."""
        found: dict[str, Any] = {
            CLIENTS: list(self.clients),
            ROWS: [int(part.size) for part in self.nodes],
            NODES: pack_integers(np.concatenate(self.nodes)),
            DIMENSIONS: list(self.dimensions),
        }
        return found if self.handled is None else found | {HANDLED: self.handled}

    @classmethod
    def from_record(cls, content: RecordDict) -> PublicHello:
        """Read and check the reply."""
        config = content.config_records.get(CONFIG, ConfigRecord())
        clients, sizes, dimensions = (
            _whole_numbers(config, key) for key in (CLIENTS, ROWS, DIMENSIONS)
        )
        if not clients:
            raise MalformedReplyError("it hosts no clients")
        if len(set(clients)) != len(clients) or min(clients) < 0:
            raise MalformedReplyError(f"its clients {clients!s:.60} are not different numbers >= 0")
        if not len(clients) == len(sizes) == len(dimensions):
            raise MalformedReplyError(f"{CLIENTS}, {ROWS} and {DIMENSIONS} differ in length")
        for client, size, dimension in zip(clients, sizes, dimensions, strict=True):
            if size < 1:
                raise MalformedReplyError(f"client {client} has no public nodes")
            if not 1 <= dimension <= MAX_DIMENSION:
                raise MalformedReplyError(f"client {client} has embeddings of {dimension} numbers")
        nodes = unpack_integers(config.get(NODES), NODES)
        if nodes.size != sum(sizes):
            raise MalformedReplyError(f"{NODES}: {nodes.size} ids came, {ROWS} says {sum(sizes)}")
        parts = split_rows(nodes, sizes)
        for client, part in zip(clients, parts, strict=True):
            if np.unique(part).size != part.size:
                raise MalformedReplyError(f"client {client} names a public node twice")
        return cls(clients, parts, dimensions, read_handled(config))


@dataclass
class PublicRequest:
    """Server to client, ``train``: aligned means of the last round.

    Attributes
    ----------
    server_round : int
        The round.
    clients : list of int
        Who is asked, all at one SuperNode.
    nodes : list of ndarray
        Ids of their public nodes, as they said themselves; only their fingerprints travel.
    targets : list of (ndarray or None)
        ``[p, d]`` means of each client; None for a client that has none yet.
    dimension : int
        Numbers of an embedding.
    is_last : bool
        Whether no further round follows.
    wants_embeddings : bool
        Whether the answer is to hold embeddings; without, the round is training alone.
    follows : bool
        Whether the server knows of earlier rounds of one of them, so that its state must be there.
    save : str
        Token of the run, if the clients are to save a checkpoint of the round; else empty.
    """

    server_round: int
    clients: list[int]
    nodes: list[IntArray]
    targets: list[FloatArray | None]
    dimension: int
    is_last: bool = False
    wants_embeddings: bool = True
    follows: bool = False
    save: str = ""

    def to_record(self) -> RecordDict:
        """Write the message.

        Rows without a target are zeros, so that the array has the shape of the answer's:
        Flower's ``LocalDpMod`` works on the difference of the two.
        """
        config = ConfigRecord(
            without_empty(
                {
                    SERVER_ROUND: self.server_round,
                    CLIENTS: self.clients,
                    WITH_TARGETS: [int(part is not None) for part in self.targets],
                    FINGERPRINTS: [fingerprint(part) for part in self.nodes],
                    IS_LAST: self.is_last,
                    WANTS_EMBEDDINGS: self.wants_embeddings,
                    FOLLOWS: self.follows,
                    CHECKPOINT: bool(self.save),
                    RUN_TOKEN: self.save,
                }
            )
        )
        if not self.wants_embeddings:
            return RecordDict({CONFIG: config})
        rows = [
            np.zeros((nodes.size, self.dimension), np.float32) if part is None else part
            for nodes, part in zip(self.nodes, self.targets, strict=True)
        ]
        arrays = ArrayRecord({PUBLIC: encode_array(PUBLIC, np.concatenate(rows))})
        return RecordDict({ARRAYS: arrays, CONFIG: config})

    @classmethod
    def from_fit(
        cls,
        parameters: Sequence[NDArray[Any]],
        config: Mapping[str, Any],
        nodes: Mapping[int, IntArray],
    ) -> PublicRequest:
        """Read the message at the client.

        Parameters
        ----------
        parameters, config : sequence of ndarray, mapping
            What ``fit`` is given.
        nodes : mapping
            Ids of the public nodes of each client that is here.

        Raises
        ------
        ValueError
            If a client is asked who is not here, or for other nodes than it has.
        """
        clients = [int(client) for client in config[CLIENTS]]
        for client, print_ in zip(clients, config[FINGERPRINTS], strict=True):
            if client not in nodes:
                raise ValueError(f"client {client} is not here; here are {sorted(nodes)!s:.60}")
            if fingerprint(nodes[client]) != int(print_):
                raise ValueError(
                    f"client {client}: the server knows other public nodes of it than it has; "
                    "the ids must stay the same during a run"
                )
        wanted, found = [nodes[client] for client in clients], [None] * len(clients)
        wants_embeddings = bool(config[WANTS_EMBEDDINGS])
        targets: list[FloatArray | None] = list(found)
        dimension = 0
        if wants_embeddings:
            (rows,) = parameters
            total = sum(part.size for part in wanted)
            if rows.ndim != 2 or rows.shape[0] != total:
                raise ValueError(f"{PUBLIC} has shape {rows.shape}, expected [{total}, d]")
            dimension = int(rows.shape[1])
            parts = split_rows(rows.astype(np.float32), [part.size for part in wanted])
            has = [bool(flag) for flag in config[WITH_TARGETS]]
            targets = [p if flag else None for p, flag in zip(parts, has, strict=True)]
        return cls(
            int(config[SERVER_ROUND]),
            clients,
            wanted,
            targets,
            dimension,
            bool(config[IS_LAST]),
            wants_embeddings,
            bool(config.get(FOLLOWS, False)),
            str(config.get(RUN_TOKEN, "")),
        )


@dataclass
class PublicReply:
    """Client to server: embeddings of public nodes, and what the clients measured.

    Attributes
    ----------
    embeddings : list of (ndarray or None)
        ``[p, d]`` of each client that was asked, in order; None for one that is left out.
    loss, disagreement : list of float
        Of each client: its model's own loss; mean of 1 - cos between embedding and target over
        its public nodes, NaN without a target.
    judged : dict
        Further measurements by name, each a number for every client.
    left_out : list of str
        Who is left out, and why.
    not_saved : str
        Why the checkpoint that was asked for could not be written; empty if it was.
    """

    embeddings: list[FloatArray | None]
    loss: list[float]
    disagreement: list[float]
    judged: dict[str, list[float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    not_saved: str = ""

    def reasons(self, clients: Sequence[int]) -> dict[int, str]:
        """Give, of these clients, those that are left out with the reason."""
        found = (re.fullmatch(r"client (\d+): (.*)", why) for why in self.left_out)
        named = {int(one[1]): one[2] for one in found if one}
        return {client: named[client] for client in clients if client in named}

    def to_fit(
        self, request: PublicRequest
    ) -> tuple[list[NDArray[np.float32]], int, dict[str, Any]]:
        """Return what ``fit`` returns; a client that is left out has rows of zeros, and is named.

        Zeros, because the array must have the request's shape; the server never reads them.
        """
        metrics: dict[str, Any] = {LOSS: self.loss, DISAGREEMENT: self.disagreement}
        metrics |= {JUDGED + name: values for name, values in self.judged.items()}
        metrics[WITH_TARGETS] = [int(part is not None) for part in self.embeddings]
        if self.left_out:
            metrics[LEFT_OUT] = list(self.left_out)
        if self.not_saved:
            metrics[NOT_SAVED] = self.not_saved
        weight = max(1, sum(part.size for part in request.nodes))
        if not request.wants_embeddings:
            return [], weight, metrics
        shapes = [(part.size, request.dimension) for part in request.nodes]
        rows = [
            np.zeros(shape, np.float32) if part is None else part
            for shape, part in zip(shapes, self.embeddings, strict=True)
        ]
        return [np.concatenate(rows)], weight, metrics | {ARRAY_NAMES: [PUBLIC]}

    @classmethod
    def from_record(cls, content: RecordDict, request: PublicRequest) -> PublicReply:
        """Read and check the reply to a request.

        A client whose rows are not finite is left out and named; the others of its SuperNode
        stay.
        """
        count = len(request.clients)
        metrics = content.metric_records.get(METRICS, MetricRecord())
        loss, disagreement = (_numbers(metrics, key, count) for key in (LOSS, DISAGREEMENT))
        for name, values, most in ((LOSS, loss, MAX_NUMBER), (DISAGREEMENT, disagreement, 2.001)):
            if wrong := [v for v in values if math.isfinite(v) and abs(v) > most]:
                raise MalformedReplyError(f"{name} is {wrong[0]:g}, at most {most:g} is possible")
        judged = {
            name.removeprefix(JUDGED): _numbers(metrics, name, count)
            for name in metrics
            if name.startswith(JUDGED)
        }
        _check_judged(judged)
        present = _numbers(metrics, WITH_TARGETS, count)
        if not set(present) <= {0.0, 1.0}:
            raise MalformedReplyError(f"{WITH_TARGETS}: expected 0 or 1, got {present!s:.60}")
        config = content.config_records.get(CONFIG) or ConfigRecord()
        said = config.get(LEFT_OUT, [])
        left_out = [one_line(str(why)) for why in (said if isinstance(said, list) else [said])]
        embeddings: list[FloatArray | None] = [None] * count
        if request.wants_embeddings:
            parts = split_rows(_rows(content, request), [part.size for part in request.nodes])
            for place, (client, part) in enumerate(zip(request.clients, parts, strict=True)):
                if not present[place]:
                    continue
                if not np.isfinite(part).all():
                    left_out.append(f"client {client}: its embeddings are not finite")
                elif part.size and (largest := largest_size(part)) > MAX_NUMBER:
                    left_out.append(
                        f"client {client}: its embeddings have a number of size {largest:g}, at "
                        f"most {MAX_NUMBER:g} is possible"
                    )
                else:
                    embeddings[place] = part
        said_not = read_not_saved(content)
        return cls(embeddings, loss, disagreement, judged, left_out[:count], said_not)


def split_rows(values: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    """Cut rows that lie one behind the other into parts."""
    return list(np.split(values, np.cumsum(sizes)[:-1]))


def _rows(content: RecordDict, request: PublicRequest) -> FloatArray:
    """Read the array of a reply; whether it is finite is looked at client by client."""
    records = content.array_records
    if list(records) != [ARRAYS] or list(records[ARRAYS]) != [PUBLIC]:
        raise MalformedReplyError(f"the array {ARRAYS}/{PUBLIC} is missing, or not alone")
    try:
        value = decode_array(PUBLIC, records[ARRAYS][PUBLIC])
    except (ValueError, TypeError) as error:
        raise MalformedReplyError(f"{PUBLIC} cannot be read: {error}") from error
    shape = (sum(part.size for part in request.nodes), request.dimension)
    if value.shape != shape or value.dtype.kind != "f":
        raise MalformedReplyError(
            f"{PUBLIC} has shape {value.shape} and type {value.dtype}, expected numbers {shape}"
        )
    with np.errstate(over="ignore"):
        return value.astype(np.float32)


def _numbers(metrics: Mapping[str, Any], key: str, count: int) -> list[float]:
    value = metrics.get(key)
    if not (isinstance(value, list) and len(value) == count):
        raise MalformedReplyError(f"{key}: expected {count} numbers, got {value!s:.60}")
    return [float(number) for number in value]


def _check_judged(judged: Mapping[str, Sequence[float]]) -> None:
    """Refuse measurements that are none: their names end up in the result."""
    if len(judged) > MAX_JUDGED:
        raise MalformedReplyError(f"{len(judged)} measurements, at most {MAX_JUDGED} are possible")
    for name, values in judged.items():
        if not re.fullmatch(r"[a-z0-9-]{1,40}", name):
            raise MalformedReplyError(f"{JUDGED}{name!a:.60}: not the name of a measurement")
        is_share = name.endswith(SHARES) or name.startswith("precision")
        wrong = [v for v in values if is_share and not (math.isnan(v) or 0 <= v <= 1)]
        if wrong:
            raise MalformedReplyError(f"{JUDGED}{name} is {wrong[0]:g}, must be from 0 to 1")


def _whole_numbers(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise MalformedReplyError(f"{key}: expected whole numbers, got {value!s:.60}")
    return list(value)
