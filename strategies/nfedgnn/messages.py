"""Messages of nFedGNN: latent vectors up, gradients down; weights or their sums both ways."""

from __future__ import annotations

import math
import struct
from dataclasses import field, replace
from operator import attrgetter
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.secure.channel import KEY_BYTES
from flower_graph.secure.common_key import CHECK_BYTES, SIGNED_KEY
from flower_graph.secure.ring import Ring, RingArray
from flower_graph.secure.sum.messages import RING
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import FloatArray, IntArray, each_once
from flower_graph.wire.codec import Known, Message, Part, Tensor
from flower_graph.wire.fields import (
    Block,
    Bytes,
    Exact,
    Flag,
    Handled,
    NotSaved,
    Numbers,
    Raw,
    Real,
    Resume,
    Saves,
    Token,
    Whole,
    Word,
)
from flower_graph.wire.keys import GRADIENT_ROUND, SERVER_ROUND, USERS

MAX_WEIGHTS = 1 << 28  # of one user
GRADIENTS = "sum of gradients"  # the purpose of the secure sums
WORD, LEAST_FRACTION_BITS = 64, 40  # with fewer, Adam makes of the rounding what can be seen
# Clients of a secure sum that stand for a SuperNode's users: two, since there is no sum of one
# client; where SuperNodes have keys of their own these are counted
IN_SUM, AS_PARTY = 2, 1


def detail_of(server_round: int, layer_round: int) -> bytes:
    """Describe a sum: the round of its gradients, and the round of their layer."""
    return struct.pack("<qq", server_round, layer_round)


SETTINGS = {
    "latent_size": Whole("latent-size", "`h`"),
    "bias": Flag("user-bias", "whether the users' linear map has a bias"),
    "weight_decay": Real("weight-decay", "of the users' Adam"),
    "seed": Whole("seed", "of the users' first weights"),
    "average_over": Word("average-over", "`holders` or `all`"),
    "dropout": Real("dropout", "share of its features that a user drops in training"),
}
ServerRound = Annotated[int, Whole(SERVER_ROUND, "the round")]
STEPPED = "round of the last step of the layer that is here; 0 before"
LayerRound = Annotated[int, Whole("layer-round", STEPPED, least=0)]
Users = Annotated[IntArray, Exact(USERS, "who is meant, and the order of all rows", shape="p")]
SLOPES = Tensor("arrays/relay", "gradient of the loss by each user's last vector", shape="p h")
Gradient = Annotated[FloatArray, SLOPES]
Rate = Annotated[float, Real("learning-rate", "of the step with these gradients")]
Copy = Block("layer-copy", "a SuperNode's layer, in safetensors", shape="b 4")
USERS_OF = property(attrgetter("users"))
# Optional entries
BEFORE = Whole("users-before", "users from this number on begin anew", least=0, optional=True)
STEP = Whole("layer-round", "round of the common layer's last step", least=0, optional=True)


class EnrolmentRequest(Message, down="query"):
    """Server to client: asks for its users, and names the checkpoint if the run is resumed."""

    # What the users' models and optimisers are to be
    settings: Annotated[UserSettings, Part(make=UserSettings, fields=SETTINGS)]
    # The run, and the checkpoint that the client is to load
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)
    # What a checkpoint has of users that are not here any more is dropped.
    before: Annotated[int | None, BEFORE] = None


class MemberKey(Message, prefix="key-"):
    """Client to server: a SuperNode's key for masked sums, and whether it has the common key."""

    public: Annotated[Bytes, Block(shape=f"{KEY_BYTES}")]  # its public key (X25519)
    # hash of the common key, or zeros
    key_check: Annotated[Bytes, Block("key-check", shape=f"{CHECK_BYTES}")]
    signed_by: Annotated[Bytes | None, SIGNED_KEY] = None


class EnrolmentReply(Message, up="query"):
    """Client to server: its users."""

    users: Annotated[NDArray[np.int64], Exact(USERS)]  # its users, rows of the server's graph
    weight_shape: Annotated[list[int], Numbers(shape="2", whole=True)]  # of weights, with a bias
    handled: Handled = None
    layer_round: Annotated[int | None, STEP] = None
    key: Annotated[MemberKey | None, Part(make=MemberKey, when="key-public")] = None

    clients = USERS_OF

    def check(self, known: Known) -> None:
        users, last = self.users, known["num_nodes"] - 1
        if users.size == 0 or not each_once(users):
            raise MalformedReplyError("it hosts no users, or one twice")
        if (wrong := users[(users < 0) | (users > last)]).size:
            text = f"it hosts user {wrong[0]}, but the graph has nodes 0 to {last}"
            raise MalformedReplyError(text)
        if min(self.weight_shape) < 1 or math.prod(self.weight_shape) > MAX_WEIGHTS:
            given = f"weight-shape: {self.weight_shape}"
            raise MalformedReplyError(f"{given}; at most {MAX_WEIGHTS} numbers are allowed")


# A layer of each user's own ----------------------------------------------------------------------

GIVEN = Exact(GRADIENT_ROUND, "round of that vector; 0: no gradient", shape="p")
MEAN = Tensor(
    "average/weights",
    "mean, taken over before the step; not NaN",
    shape="f w",
    when="average_round",
)
ADDED = Tensor(
    "average/weights",
    "the users' weights, added up",
    shape="f w",
    dtype="float32 or float64",
    per="p",
    when="send_weights",
)
COUNTS = Tensor(
    "average/holders",
    "how many users have each row",
    shape="f",
    dtype="int64",
    limit=None,
    when="send_weights",
)


class RelayRequest(Message, down="train train.finish"):
    """Server to client: gradients of an earlier round."""

    server_round: ServerRound
    users: Users
    gradient: Gradient
    # Each round's gradient is applied once, however often it comes.
    gradient_round: Annotated[IntArray, GIVEN]
    rate: Rate
    average: Annotated[FloatArray | None, MEAN] = None
    average_round: Annotated[int, Whole()] = 0  # round of that mean; 0 without
    send_weights: Annotated[bool, Flag()] = False  # whether weights are asked for
    checkpoint: Saves = False
    run: Token = ""

    clients = USERS_OF


class RelayReply(Message, up="train"):
    """Client to server: latent vectors, and sums of weights if the request asks for them."""

    # The answer to ``train.finish``, too; there only its shape matters.

    server_round: ServerRound
    latent: Annotated[FloatArray, Tensor("arrays/relay", shape="p h")]  # latent vectors
    weight_sum: Annotated[FloatArray | None, ADDED] = None
    holders: Annotated[IntArray | None, COUNTS] = None
    not_saved: NotSaved = ""

    @property
    def examples(self) -> int:
        return int(self.latent.shape[0])

    def check(self, known: Known) -> None:
        if (holders := self.holders) is None:
            return
        users = known["p"]
        if holders.dtype.kind not in "iu" or holders.min() < 0 or holders.max() > users:
            raise MalformedReplyError(f"holders: expected counts from 0 to {users}")


# One layer for all -------------------------------------------------------------------------------

WORDS = Tensor(
    "total/words", "the sum under pads, and checks", shape="L", dtype="uint64", limit=None
)
TOTAL = Tensor("total/gradient", "sum of all users' gradients", shape="f w", when="has_total")
TRAINED = Tensor("arrays/relay", "vectors of `users` with dropout", shape="p h", when="trains")
MEASURED = Tensor("arrays/measured", "vectors of `measured`", shape="m h", when="measures")


class HiddenSum(Message, prefix="pad-"):
    """Server to client: a sum that the server cannot read; clients take the pads off."""

    contributors: Annotated[int, Whole(least=1)]  # pads in the words
    sum_run: Annotated[bytes, Raw("pad-run")]  # run of the secure sum, which the pad is made for
    sum_round: Annotated[int, Whole("pad-round")]  # its number, too
    ring: Annotated[Ring, RING]
    words: Annotated[RingArray, WORDS]

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


class Advance(Message):
    """Server to client: the step, or copy, that brings the layer up to date; applied once."""

    layer_round: LayerRound = 0
    before: Annotated[int, Whole("layer-before")] = 0  # round of the step before that
    rate: Rate = 0.0
    has_total: Annotated[bool, Flag()] = False  # whether the sum comes along
    total: Annotated[FloatArray | None, TOTAL] = None
    hidden: Annotated[HiddenSum | None, Part(make=HiddenSum, when="pad-contributors")] = None
    copy: Annotated[Bytes | None, replace(Copy, optional=True)] = None


class LatentRequest(Message, down="train"):
    """Server to client: the sum of an earlier round; asks for this round's latent vectors."""

    server_round: ServerRound
    users: Users
    measured: Annotated[IntArray, Exact(shape="m")]  # users to send without dropout
    advance: Annotated[Advance, Part(make=Advance)] = field(default_factory=Advance)
    trains: Annotated[bool, Flag()] = True  # whether `users` send vectors with dropout
    checkpoint: Saves = False
    run: Token = ""

    clients = USERS_OF


class LatentReply(Message, up="train"):
    """Client to server: latent vectors for training, and others for evaluation."""

    server_round: ServerRound
    layer_round: LayerRound
    latent: Annotated[FloatArray | None, TRAINED] = None
    measured: Annotated[FloatArray | None, MEASURED] = None
    not_saved: NotSaved = ""


class GradientRequest(Message, down="train.add_up"):
    """Server to client: gradients with respect to this round's latent vectors; asks for sums."""

    server_round: ServerRound
    users: Users
    gradient: Gradient
    layer_round: LayerRound

    clients = USERS_OF


class SumReply(Message, up="train.add_up"):
    """Client to server: its users' summed gradients with respect to the layer's weights."""

    server_round: ServerRound
    total: Annotated[FloatArray, Tensor("arrays/sum", shape="f w", per="p")]  # the sum


class CopyReply(Message, up="train.copy_layer"):
    """Client to server: a copy of the layer, for SuperNodes that have missed a step."""

    layer_round: LayerRound
    copy: Annotated[Bytes, Copy]
