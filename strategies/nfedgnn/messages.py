"""Messages of nFedGNN: gradients down, latent vectors up, averaged weights both ways."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from flower_graph.errors import MalformedReplyError
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.claims import each_once
from flower_graph.wire.codec import Known, Message, Part, Tensor
from flower_graph.wire.fields import (
    Exact,
    Flag,
    Handled,
    NotSaved,
    Numbers,
    Real,
    Resume,
    Saves,
    Token,
    Whole,
    Word,
)
from flower_graph.wire.keys import GRADIENT_ROUND, SERVER_ROUND, USERS

MAX_WEIGHTS = 1 << 28  # of one user

SETTINGS = Part(
    make=UserSettings,
    fields={
        "latent_size": Whole("latent-size", "`h`"),
        "bias": Flag("user-bias", "whether the users' linear map has a bias"),
        "weight_decay": Real("weight-decay", "of the users' Adam"),
        "seed": Whole("seed", "of the users' first weights"),
        "average_over": Word("average-over", "`holders` or `all`"),
    },
)
Settings = Annotated[UserSettings, SETTINGS]
read_settings = SETTINGS.from_config


@dataclass
class EnrolmentRequest(Message, down="query"):
    """Server to client: asks for its users, and names the checkpoint if the run is resumed."""

    settings: Settings  # What the users' models and optimisers are to be
    # The run, and the checkpoint that the client is to load
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)
    before: Annotated[
        int | None,
        Whole(
            "users-before",
            "how many users the checkpoint is of. Only where a run goes on with others: users from "
            "this number on begin anew, and what a checkpoint has of users that are not here any "
            "more is dropped",
            least=0,
            optional=True,
        ),
    ] = None


@dataclass
class EnrolmentReply(Message, up="query"):
    """Client to server: its users."""

    users: Annotated[
        NDArray[np.int64], Exact(USERS, "numbers of the users here, rows of the server's graph")
    ]
    # Of one user's weights as they are averaged
    weight_shape: Annotated[
        list[int],
        Numbers(
            "weight-shape",
            "`f` (one more with a bias) and `h`: what a user's averaged weights look like",
            shape="2",
            whole=True,
        ),
    ]
    handled: Handled = None

    @property
    def clients(self) -> IntArray:
        return self.users

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one user's weights, ``(f, h)``."""
        rows, size = self.weight_shape
        return rows, size

    def check(self, known: Known) -> None:
        users, num_nodes = self.users, known["num_nodes"]
        if users.size == 0:
            raise MalformedReplyError("it hosts no users")
        if users.min() < 0 or users.max() >= num_nodes:
            wrong = users.min() if users.min() < 0 else users.max()
            raise MalformedReplyError(
                f"it hosts user {wrong}, but the graph has nodes 0 to {num_nodes - 1}"
            )
        if not each_once(users):
            raise MalformedReplyError("it hosts a user twice")
        if min(self.weight_shape) < 1:
            raise MalformedReplyError(f"weight-shape: expected two sizes, got {self.weight_shape}")
        if math.prod(self.weight_shape) > MAX_WEIGHTS:
            raise MalformedReplyError(
                f"weight-shape: {self.weight_shape} is more than {MAX_WEIGHTS} numbers"
            )


@dataclass
class RelayRequest(Message, down="train train.finish"):
    """Server to client: gradients of an earlier round."""

    server_round: Annotated[int, Whole(SERVER_ROUND, "the round")]
    users: Annotated[IntArray, Exact(USERS, "who takes part, and the order of all rows", shape="p")]
    gradient: Annotated[
        FloatArray,
        Tensor(
            "arrays/relay",
            "gradient of the loss by the vector that each user sent last",
            shape="p h",
        ),
    ]
    gradient_round: Annotated[
        IntArray,
        Exact(
            GRADIENT_ROUND,
            "round of that vector; 0: there is no gradient. Each round's is to be applied once, "
            "however often it comes",
            shape="p",
        ),
    ]
    learning_rate: Annotated[
        float, Real("learning-rate", "of the users' Adam as it takes these gradients")
    ]
    settings: Settings  # What the users' models and optimisers are
    average: Annotated[
        FloatArray | None,
        Tensor(
            "average/weights",
            "mean weights, to be taken over before the step; NaN in rows that nobody averaged. "
            "Only where one is due",
            shape="f w",
            when="average_round",
        ),
    ] = None
    average_round: Annotated[
        int, Whole("average-round", "round of that mean; 0 without. Once, too")
    ] = 0
    send_weights: Annotated[
        bool, Flag("send-weights", "whether the answer is to have the users' weights")
    ] = False
    checkpoint: Saves = False
    run: Token = ""

    @property
    def clients(self) -> IntArray:
        return self.users


@dataclass
class RelayReply(Message, up="train"):
    """Client to server: latent vectors, and sums of weights if the request asks for them."""

    # The answer to ``train.finish``, too; there only its shape matters.

    server_round: Annotated[int, Whole(SERVER_ROUND, "as asked")]
    latent: Annotated[
        FloatArray, Tensor("arrays/relay", "latent vectors, in the order of `users`", shape="p h")
    ]
    weight_sum: Annotated[
        FloatArray | None,
        Tensor(
            "average/weights",
            "with `send-weights`: the users' weights, added up",
            shape="f w",
            dtype="float32 or float64",
            per="p",
            when="send_weights",
        ),
    ] = None
    holders: Annotated[
        IntArray | None,
        Tensor(
            "average/holders",
            "with `send-weights`: how many users have each row",
            shape="f",
            dtype="int64",
            limit=None,
            when="send_weights",
        ),
    ] = None
    not_saved: NotSaved = ""

    @property
    def examples(self) -> int:
        return int(self.latent.shape[0])

    @classmethod
    def from_record(
        cls, content: RecordDict, request: RelayRequest, weight_shape: tuple[int, int]
    ) -> RelayReply:
        (p, h), (f, w) = request.gradient.shape, weight_shape
        asked = {"server_round": request.server_round, "send_weights": request.send_weights}
        return cls.read(content, p=p, h=h, f=f, w=w, **asked)

    def check(self, known: Known) -> None:
        if (holders := self.holders) is None:
            return
        users = known["p"]
        if holders.dtype.kind not in "iu" or holders.min() < 0 or holders.max() > users:
            raise MalformedReplyError(f"holders: expected counts from 0 to {users}")
