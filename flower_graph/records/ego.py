"""Messages of FedSCem: sums of embeddings down, one masked vector up.

The vector that a client adds to the sum has four parts, one behind the other (``Layout``):
embeddings by slot, a one for each slot that it holds, what it measured, and, where models are
shared, its weights. Entries of the secure sum and of the alignment travel in the same messages;
they have keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flower_graph.arrays import encode_array
from flower_graph.ego_cohort import EgoSettings
from flower_graph.errors import MalformedReplyError
from flower_graph.records import keys
from flower_graph.records.fields import read_clients, read_reasons
from flower_graph.records.keys import (
    ARRAY_NAMES,
    CONFIG,
    FloatArray,
    IntArray,
    pack_integers,
    read_array,
    without_empty,
)
from flower_graph.records.resume import Resume, read_not_saved
from flower_graph.records.secure_sum import KeyRequest, MaskRequest
from flower_graph.records.sum_setup import read_ring, write_ring
from flower_graph.secure.ring import Ring

# What a client measures, as sums over clients: accuracies with the number of clients that have
# such nodes, losses with the number of clients that have them.
METRIC_NAMES = (
    *("train", "has-train", "val", "has-val", "test", "has-test"),
    *("cross-entropy", "contrast", "has-contrast"),
)
# What is summed: that, and how many clients could not read the means of the round before. Who they
# are is not said: a wrong word is noticed by those who hold its slot.
UNREAD = "unread"
SUMMED_NAMES = (*METRIC_NAMES, UNREAD)

MAX_SECONDS = 1e6


class Layout(NamedTuple):
    """Sizes of the parts of a vector.

    Attributes
    ----------
    slots, hidden : int
        Slots, and numbers in an embedding.
    weights : int
        Numbers in a model; 0 where models are not shared.
    """

    slots: int
    hidden: int
    weights: int = 0

    @property
    def embeddings(self) -> slice:
        """``slots × hidden`` embeddings, slot by slot."""
        return slice(0, self.slots * self.hidden)

    @property
    def counts(self) -> slice:
        """``slots`` ones and zeros."""
        return slice(self.embeddings.stop, self.embeddings.stop + self.slots)

    @property
    def metrics(self) -> slice:
        """What ``SUMMED_NAMES`` lists."""
        return slice(self.counts.stop, self.counts.stop + len(SUMMED_NAMES))

    @property
    def model(self) -> slice:
        """The first layer row by row, then all the rest."""
        return slice(self.metrics.stop, self.metrics.stop + self.weights)

    @property
    def length(self) -> int:
        """Numbers in the whole vector."""
        return int(self.model.stop)


class Sums(NamedTuple):
    """What the server added up in a round, as clients get it.

    Attributes
    ----------
    server_round : int
        The round.
    sum_round : int
        Number of the secure sum, which the pads belong to.
    contributors : int
        How many clients are in it.
    embeddings, counts : ndarray
        ``[slots × h]`` and ``[slots]``: ring words under pads, or plain float64.
    """

    server_round: int
    sum_round: int
    contributors: int
    embeddings: NDArray[Any]
    counts: NDArray[Any]


def write_settings(settings: EgoSettings) -> dict[str, Any]:
    """Return the config entries of ``EgoSettings``."""
    return {_SETTING_KEYS[name]: value for name, value in settings._asdict().items()}


def read_settings(config: Mapping[str, Any]) -> EgoSettings:
    """Read ``EgoSettings`` from config entries."""
    return EgoSettings(**{name: config[key] for name, key in _SETTING_KEYS.items()})


def write_save(settings: EgoSettings, server_round: int, run: str) -> dict[str, Any]:
    """Return the entries of ``train.save``: write the checkpoint of a round of a run."""
    return write_settings(settings) | {keys.ROUND: server_round, keys.RUN_TOKEN: run}


_SETTING_KEYS = {
    "num_features": keys.NUM_FEATURES,
    "num_classes": keys.NUM_CLASSES,
    "hidden": keys.HIDDEN_SIZE,
    "projection": keys.PROJECTION,
    "learning_rate": keys.LEARNING_RATE,
    "weight_decay": keys.WEIGHT_DECAY,
    "seed": keys.SEED,
    "local_epochs": keys.LOCAL_EPOCHS,
    "mu": keys.MU,
    "tau": keys.TAU,
    "proximal": keys.PROXIMAL,
}
assert tuple(_SETTING_KEYS) == EgoSettings._fields


@dataclass
class EgoHello:
    """Server to client, ``query``: who is there; make keys; load a checkpoint.

    Attributes
    ----------
    settings : EgoSettings
        What the clients' models and training are to be.
    run_id : bytes
        Of the secure sum.
    alignment : str
        Form of alignment that will follow.
    resume : Resume
        The run, and the checkpoint that the client is to load.
    """

    settings: EgoSettings
    run_id: bytes
    alignment: str
    resume: Resume = field(default_factory=Resume)

    def to_record(self) -> RecordDict:
        """Write the message; the answer is a ``KeyReply``."""
        config = write_settings(self.settings) | KeyRequest(self.run_id).to_config()
        more = {keys.ALIGNMENT: self.alignment, **self.resume.to_config()}
        return RecordDict({CONFIG: ConfigRecord(config | more)})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EgoHello:
        """Read the message at the client."""
        run_id = KeyRequest.from_config(config).run_id
        settings, alignment = read_settings(config), str(config[keys.ALIGNMENT])
        return cls(settings, run_id, alignment, Resume.from_config(config))


@dataclass
class EgoRequest:
    """Server to client, ``train``: the last round's sums; asks for this round's vector.

    Attributes
    ----------
    server_round : int
        The current round.
    clients : ndarray
        ``[p]`` clients that take part.
    settings : EgoSettings
        What the clients' models and training are.
    variant : str
        ``full``, ``iter`` or ``minus``.
    sums : Sums or None
        Of the round before; None before the first, and where it was skipped.
    model : (ndarray, ndarray) or None
        ``[f, h]`` and ``[D]``: the model to start from, where models are shared.
    ring : Ring or None
        How numbers are written; None for plain sums.
    mask : MaskRequest or None
        The secure sum's part; None for plain sums.
    is_last : bool
        After the last round: only measure, nothing is trained or shared any more.
    checkpoint : bool
        Whether the client is to save its state.
    run : str
        Token of the run that the checkpoint is of.
    slots : dict
        Entries of the alignment's last message, when slots are new.
    """

    server_round: int
    clients: IntArray
    settings: EgoSettings
    variant: str
    sums: Sums | None = None
    model: tuple[FloatArray, FloatArray] | None = None
    ring: Ring | None = None
    mask: MaskRequest | None = None
    is_last: bool = False
    checkpoint: bool = False
    run: str = ""
    slots: Mapping[str, Any] = field(default_factory=dict)

    def to_record(self) -> RecordDict:
        """Write the message."""
        config: dict[str, Any] = write_settings(self.settings) | dict(self.slots)
        config |= {
            keys.ROUND: self.server_round,
            keys.CLIENTS: pack_integers(self.clients),
            keys.VARIANT: self.variant,
            keys.SHARES_MODEL: self.model is not None,
            keys.IS_LAST: self.is_last,
            keys.CHECKPOINT: self.checkpoint,
            keys.RUN_TOKEN: self.run,
            keys.SUMS_ROUND: 0,
        }
        content = RecordDict()
        if self.sums is not None:
            config[keys.SUMS_ROUND] = self.sums.server_round
            config[keys.CONTRIBUTORS] = [self.sums.sum_round, self.sums.contributors]
            found = {keys.EMBEDDINGS: self.sums.embeddings, keys.HOLDER_COUNTS: self.sums.counts}
            content[keys.SUMS] = _arrays(found)
        if self.model is not None:
            content[keys.MODEL] = _arrays({keys.FIRST: self.model[0], keys.REST: self.model[1]})
        if self.ring is not None and self.mask is not None:
            config |= write_ring(self.ring) | self.mask.to_config()
        content[CONFIG] = ConfigRecord(without_empty(config))
        return content

    @classmethod
    def from_numpy(cls, parameters: Sequence[NDArray[Any]], config: dict[str, Any]) -> EgoRequest:
        """Read the message at the client."""
        arrays, sums, model, ring, mask = list(parameters), None, None, None, None
        if server_round := int(config[keys.SUMS_ROUND]):
            sum_round, contributors = config[keys.CONTRIBUTORS]
            sums = Sums(server_round, sum_round, contributors, arrays.pop(0), arrays.pop(0))
        if config[keys.SHARES_MODEL]:
            model = arrays.pop(0), arrays.pop(0)
        if keys.RING_WORD in config:
            ring, mask = read_ring(config), MaskRequest.from_config(config)
        return cls(
            int(config[keys.ROUND]),
            read_clients(config, keys.CLIENTS),
            read_settings(config),
            str(config[keys.VARIANT]),
            sums,
            model,
            ring,
            mask,
            bool(config[keys.IS_LAST]),
            bool(config[keys.CHECKPOINT]),
            str(config.get(keys.RUN_TOKEN, "")),
            config,
        )


@dataclass
class EgoReply:
    """Client to server: the sum of its clients' vectors.

    Attributes
    ----------
    server_round : int
        The request's round.
    entries : dict
        Of the ``MaskedReply``; or, for plain sums, clients in the sum and those left out.
    total : ndarray
        ``[L]`` the sum: masked ring words, or float64.
    train_seconds, mask_seconds : float
        What training and masking took.
    not_saved : str
        Why the checkpoint that was asked for could not be written; empty if it was.
    """

    server_round: int
    entries: dict[str, Any]
    total: NDArray[Any]
    train_seconds: float
    mask_seconds: float
    not_saved: str = ""

    def to_numpy(self) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        """Return what ``NumPyClient.fit`` returns."""
        metrics = self.entries | {
            ARRAY_NAMES: [f"{keys.SUMS}/{keys.TOTAL}"],
            keys.ROUND: self.server_round,
            keys.TRAIN_SECONDS: self.train_seconds,
            keys.MASK_SECONDS: self.mask_seconds,
        }
        if self.not_saved:
            metrics[keys.NOT_SAVED] = self.not_saved
        return [self.total], 1, metrics

    @classmethod
    def from_record(cls, content: RecordDict, server_round: int, length: int) -> EgoReply:
        """Read and check the reply; the entries are the secure sum's to check."""
        metrics = content.metric_records.get(keys.METRICS, MetricRecord())
        config = content.config_records.get(CONFIG, ConfigRecord())
        if metrics.get(keys.ROUND) != server_round:
            raise MalformedReplyError(f"round {metrics.get(keys.ROUND)}, expected {server_round}")
        total = read_array(content, keys.SUMS, keys.TOTAL, (length,), limit=None)
        train, mask = (_seconds(metrics.get(k)) for k in (keys.TRAIN_SECONDS, keys.MASK_SECONDS))
        entries = {k: v for k, v in metrics.items() if k not in (keys.ROUND, keys.NUM_EXAMPLES)}
        not_saved = read_not_saved(content)
        return cls(server_round, entries | dict(config), total, train, mask, not_saved)


@dataclass
class PlainPresence:
    """Who is in a plain sum: the entries of an ``EgoReply`` without masks.

    Attributes
    ----------
    clients : ndarray
        ``[q]`` clients in the sum.
    left_out : dict
        Those that are not, with the reason.
    """

    clients: IntArray
    left_out: dict[int, str]

    def to_config(self) -> dict[str, Any]:
        """Write the entries."""
        entries: dict[str, Any] = {keys.PRESENT: pack_integers(self.clients)}
        if self.left_out:
            entries[keys.LEFT_OUT] = [f"{c}:{why}" for c, why in self.left_out.items()]
        return entries

    @classmethod
    def from_config(cls, config: Mapping[str, Any], asked: IntArray) -> PlainPresence:
        """Read and check the entries; all clients must have been asked."""
        clients = read_clients(config, keys.PRESENT)
        if strange := sorted(set(clients.tolist()) - set(asked.tolist())):
            raise MalformedReplyError(f"{keys.PRESENT}: client {strange[0]} was not asked here")
        return cls(clients, read_reasons(config, keys.LEFT_OUT))


def _seconds(value: object) -> float:
    """Return a time that a client took; 0 for what is none, since nothing is computed with it."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < MAX_SECONDS else 0.0


def _arrays(values: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    return ArrayRecord({name: encode_array(name, value) for name, value in values.items()})
