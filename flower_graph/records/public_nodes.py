"""PPFL-GNN's messages: embeddings of public nodes up, their aligned means down.

A SuperNode speaks for one or more clients; their rows lie one behind the other. Ids travel once,
when a SuperNode says who is there; later messages name them by a fingerprint.
"""

from __future__ import annotations

import hashlib
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
    CLIENTS,
    CONFIG,
    DIMENSIONS,
    DISAGREEMENT,
    FINGERPRINTS,
    IS_LAST,
    JUDGED,
    LEFT_OUT,
    LOSS,
    METRICS,
    NODES,
    PUBLIC,
    ROWS,
    SERVER_ROUND,
    WANTS_EMBEDDINGS,
    WITH_TARGETS,
    pack_integers,
    unpack_integers,
)

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]

MAX_DIMENSION = 1 << 16


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
    """

    clients: list[int]
    nodes: list[IntArray]
    dimensions: list[int]

    def to_properties(self) -> dict[str, Any]:
        """Return what ``get_properties`` returns."""
        return {
            CLIENTS: list(self.clients),
            ROWS: [int(part.size) for part in self.nodes],
            NODES: pack_integers(np.concatenate(self.nodes)),
            DIMENSIONS: list(self.dimensions),
        }

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
        return cls(clients, parts, dimensions)


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
    """

    server_round: int
    clients: list[int]
    nodes: list[IntArray]
    targets: list[FloatArray | None]
    dimension: int
    is_last: bool = False
    wants_embeddings: bool = True

    def to_record(self) -> RecordDict:
        """Write the message.

        Rows without a target are zeros, so that the array has the shape of the answer's:
        Flower's ``LocalDpMod`` works on the difference of the two.
        """
        config = ConfigRecord(
            {
                SERVER_ROUND: self.server_round,
                CLIENTS: self.clients,
                WITH_TARGETS: [int(part is not None) for part in self.targets],
                FINGERPRINTS: [fingerprint(part) for part in self.nodes],
                IS_LAST: self.is_last,
                WANTS_EMBEDDINGS: self.wants_embeddings,
            }
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
        server_round, is_last = int(config[SERVER_ROUND]), bool(config[IS_LAST])
        return cls(server_round, clients, wanted, targets, dimension, is_last, wants_embeddings)


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
    """

    embeddings: list[FloatArray | None]
    loss: list[float]
    disagreement: list[float]
    judged: dict[str, list[float]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

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
        judged = {
            name.removeprefix(JUDGED): _numbers(metrics, name, count)
            for name in metrics
            if name.startswith(JUDGED)
        }
        present = _numbers(metrics, WITH_TARGETS, count)
        config = content.config_records.get(CONFIG) or ConfigRecord()
        said = config.get(LEFT_OUT, [])
        left_out = [one_line(str(why)) for why in (said if isinstance(said, list) else [said])]
        embeddings: list[FloatArray | None] = [None] * count
        if request.wants_embeddings:
            parts = split_rows(_rows(content, request), [part.size for part in request.nodes])
            for place, (client, part) in enumerate(zip(request.clients, parts, strict=True)):
                if not present[place]:
                    continue
                if np.isfinite(part).all():
                    embeddings[place] = part
                else:
                    left_out.append(f"client {client}: its embeddings are not finite")
        return cls(embeddings, loss, disagreement, judged, left_out[:count])


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


def _whole_numbers(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise MalformedReplyError(f"{key}: expected whole numbers, got {value!s:.60}")
    return list(value)
