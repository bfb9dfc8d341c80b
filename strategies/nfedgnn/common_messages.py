"""Messages of nFedGNN with one first layer: latents up, gradients down, sums up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from flwr.app import RecordDict

from flower_graph.secure.channel import KEY_BYTES
from flower_graph.secure.common_key import CHECK_BYTES, SIGNED_KEY
from flower_graph.secure.ring import Ring, RingArray
from flower_graph.secure.sum.messages import RING
from flower_graph.strategies.nfedgnn.common_layer import CommonSettings
from flower_graph.strategies.nfedgnn.messages import EnrolmentReply, EnrolmentRequest
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import Message, Part, Tensor
from flower_graph.wire.fields import (
    Block,
    Bytes,
    Exact,
    Flag,
    NotSaved,
    Raw,
    Real,
    Saves,
    Token,
    Whole,
)
from flower_graph.wire.keys import SERVER_ROUND, USERS

SETTINGS = Part(
    make=CommonSettings,
    fields={
        "latent_size": Whole("latent-size", "`h`"),
        "bias": Flag("user-bias", "whether the linear map has a bias"),
        "weight_decay": Real("weight-decay", "of the users' Adam"),
        "seed": Whole("seed", "of the first weights, and of what users drop"),
        "dropout": Real("dropout", "share of its features that a user drops in training"),
    },
)
Settings = Annotated[CommonSettings, SETTINGS]
LayerRound = Annotated[
    int, Whole("layer-round", "round of the last step of the layer that is here; 0 before", least=0)
]


@dataclass
class CommonQuestion(EnrolmentRequest, down="query"):
    """Server to client: asks for its users, as without a common layer."""

    settings: Settings  # type: ignore[assignment]


@dataclass
class CommonEnrolment(EnrolmentReply, up="query"):
    """Client to server: its users, and the round of its layer."""

    layer_round: LayerRound = 0


@dataclass
class MaskedEnrolment(CommonEnrolment, up="query"):
    """Client to server: the further entries of masked sums."""

    public: Annotated[
        Bytes, Block("key-public", "its public key (X25519)", shape=f"{KEY_BYTES}")
    ] = field(default_factory=lambda: np.zeros(KEY_BYTES, np.uint8))
    key_check: Annotated[
        Bytes,
        Block("key-check", "hash of the common key; zeros without one", shape=f"{CHECK_BYTES}"),
    ] = field(default_factory=lambda: np.zeros(CHECK_BYTES, np.uint8))
    signed_by: Annotated[Bytes | None, SIGNED_KEY] = None


@dataclass
class HiddenSum(Message):
    """Server to client: a sum that the server cannot read; clients take the pads off."""

    contributors: Annotated[
        int, Whole("pad-contributors", "how often the pad is in the words", least=1)
    ]
    sum_run: Annotated[bytes, Raw("pad-run", "run of the secure sum, which the pad is made for")]
    sum_round: Annotated[int, Whole("pad-round", "its number, too")]
    ring: Annotated[Ring, RING]
    words: Annotated[
        RingArray,
        Tensor(
            "total/words",
            "sum of the users' gradients in words of the ring, under pads, and its checks",
            shape="L",
            dtype="uint64",
            limit=None,
        ),
    ]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


@dataclass
class Advance(Message):
    """Server to client: the step, or copy, that brings the layer up to date; applied once."""

    layer_round: Annotated[
        int, Whole("layer-round", "round of the last step; 0: none was taken", least=0)
    ] = 0
    before: Annotated[
        int, Whole("layer-before", "round of the step before that, which the sum goes on from")
    ] = 0
    learning_rate: Annotated[float, Real("learning-rate", "of that step")] = 0.0
    has_total: Annotated[bool, Flag("has-total", "whether the sum comes along")] = False
    total: Annotated[
        FloatArray | None,
        Tensor(
            "total/gradient",
            "sum of the users' gradients of that round by the layer's weights, over all SuperNodes",
            shape="f w",
            when="has_total",
        ),
    ] = None
    hidden: Annotated[HiddenSum | None, Part(make=HiddenSum, when="pad-contributors")] = None
    copy: Annotated[
        Bytes | None,
        Block(
            "layer-copy",
            "weights and optimiser of another SuperNode, in safetensors' form, for one that has "
            "missed a step",
            shape="b 4",
            optional=True,
        ),
    ] = None


@dataclass
class LatentRequest(Message, down="train"):
    """Server to client: the sum of an earlier round; asks for this round's latent vectors."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]
    users: Annotated[IntArray, Exact(USERS, "who takes part, in order", shape="p")]
    measured: Annotated[
        IntArray,
        Exact("measured", "whose latent vector is wanted without dropout, in order", shape="m"),
    ]
    settings: Settings
    advance: Annotated[Advance, Part(make=Advance)] = field(default_factory=Advance)
    trains: Annotated[
        bool, Flag("trains", "whether latent vectors with dropout are wanted, of `users`")
    ] = True
    checkpoint: Saves = False
    run: Token = ""

    @property
    def clients(self) -> IntArray:
        return self.users


@dataclass
class LatentReply(Message, up="train"):
    """Client to server: latent vectors for training, and others for evaluation."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "as asked")]
    layer_round: LayerRound
    latent: Annotated[
        FloatArray | None,
        Tensor(
            "arrays/relay",
            "with `trains`: latent vectors, with dropout, in the order of `users`",
            shape="p h",
            when="trains",
        ),
    ] = None
    measured: Annotated[
        FloatArray | None,
        Tensor(
            "arrays/measured",
            "latent vectors without dropout, in the order of `measured`, if that has any",
            shape="m h",
            when="measures",
        ),
    ] = None
    not_saved: NotSaved = ""

    @classmethod
    def from_record(cls, content: RecordDict, request: LatentRequest) -> LatentReply:
        sizes: dict[str, object] = {
            "p": request.users.size,
            "m": request.measured.size,
            "h": request.settings.latent_size,
        }
        return cls.read(
            content,
            server_round=request.server_round,
            layer_round=request.advance.layer_round,
            trains=request.trains,
            measures=bool(request.measured.size),
            **sizes,
        )


@dataclass
class GradientRequest(Message, down="train.add_up"):
    """Server to client: gradients with respect to this round's latent vectors; asks for sums."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]
    users: Annotated[IntArray, Exact(USERS, "whose they are, in order", shape="p")]
    gradient: Annotated[
        FloatArray,
        Tensor(
            "arrays/relay",
            "gradient of the loss by the latent vector that each user has sent in this round",
            shape="p h",
        ),
    ]
    layer_round: LayerRound
    settings: Settings

    @property
    def clients(self) -> IntArray:
        return self.users


@dataclass
class SumReply(Message, up="train.add_up"):
    """Client to server: its users' summed gradients with respect to the layer's weights."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "as asked")]
    total: Annotated[
        FloatArray,
        Tensor("arrays/sum", "as one user's weights lie", shape="f w", per="p"),
    ]

    @classmethod
    def from_record(
        cls, content: RecordDict, request: GradientRequest, shape: tuple[int, int]
    ) -> SumReply:
        (f, w), p = shape, request.users.size
        return cls.read(content, server_round=request.server_round, f=f, w=w, p=p)


@dataclass
class CopyRequest(Message, down="train.copy_layer"):
    """Server to client: asks for a copy of the layer, for SuperNodes that have missed a step."""

    settings: Settings


@dataclass
class CopyReply(Message, up="train.copy_layer"):
    """Client to server: a copy of the layer's weights and optimiser."""

    layer_round: LayerRound
    copy: Annotated[Bytes, Block("layer-copy", "in safetensors' form", shape="b 4")]
