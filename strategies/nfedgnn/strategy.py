"""nFedGNN: node-level federated learning by relaying the gradients of latent vectors.

"One Node Per User: Node-Level Federated Learning for Graph Neural Networks" (anonymous authors).
Every client, a *user*, is one node of a graph: it holds one feature vector ``x_i`` and its own
model ``f_u(theta_i, .)``. The server holds the graph ``A``, the labels of some nodes and every
layer but the first linear map, ``f_s(theta_s, A, .)``.

A round of the relay, Algorithm 1 (``SplitGradientRelay.round``):

1. user ``i`` -> server: ``x'_i = f_u(theta_i, x_i)`` (lines 5 and 6);
2. server: ``Z = f_s(theta_s, A, X')``, ``L = CE(Z, Y) + lambda L_reg`` (equations 5 to 7), the
   gradients ``g_i`` of ``L`` by every ``x'_i``, and an Adam step on ``theta_s`` (lines 9 and 8; the
   paper steps first, here both come from one pass);
3. server -> user ``i``: ``g_i``; the users' layer takes an Adam step (lines 11 and 12).

A layer says what travels in steps 1 and 3, and how it steps.

*Own layers* (``OwnLayer``) take one exchange a round. The message that asks for the latent vectors
of round ``t`` carries the gradients of round ``t - 1``; one more message after the last round
delivers the last gradients. The server evaluates its present weights and latent vectors at the end
of step 2. A user that is not asked or does not answer keeps its weights. The server goes on with
its last latent vector, and its gradient waits until it is back. A user that has never answered has
no edges until it does.

*Averaged layers* (``average_every = K``). In every K-th round the users also send their weights.
The next message carries the mean, which a user takes over before its step. CNFGNN, the paper's
baseline, is ``K = 1`` over all users with ``reg_weight = 0``.

*One common layer* (``CommonLayer``): all users hold the same ``W`` and the same Adam, which is
exactly the training of one network in one place. A round takes two exchanges:

- server -> user: the sum of the round before, with which the user steps; user -> server: ``x'_i``,
  with dropout on ``x_i``, and once more without dropout if the server evaluates the round before;
- server -> user: ``g_i``; SuperNode -> server: the gradient by ``W``, ``sum_i x_i g_i^T``.

The server asks for the first as soon as the round before has its sum. Loss and sum are over the
users that answered; the other users take part by their last vector without dropout. A SuperNode
that has missed a step, or is new, gets weights and optimiser of another SuperNode, which the server
relays. Without the sum of one of them nobody steps; a SuperNode that stops two steps in this way is
left out with its users, until another SuperNode joins.

*Masked sums*: the server can see neither the sums of gradients nor the layer. One SuperNode draws a
common key and seals it for the others; the server carries the packets. First weights, dropout and
pads come from that key, and a copy of the layer travels under it. The sum of gradients is a secure
sum of 64-bit words with 40 fraction bits. The server takes the masks off, and sends the sum on,
still under the pads. With a registry the SuperNodes do not trust the server: public keys are
signed, and each sum ends in checks that show any change.
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from flower_graph.client.learner import judged_pairs
from flower_graph.config.common import LINKS
from flower_graph.config.rules import at_least, require
from flower_graph.data.description import server_graph
from flower_graph.engine.cohort import Judged
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, DivergedError, MalformedReplyError
from flower_graph.models import PairModel
from flower_graph.ops.adam import Adam
from flower_graph.ops.graph import (
    LaplacianTerm,
    SortedEdges,
    laplacian_regulariser,
    laplacian_term,
    sorted_edges,
)
from flower_graph.ops.links import LinkSplit, dot_products, drawn_pairs, split_links
from flower_graph.outputs.build import form_of
from flower_graph.outputs.files import (
    NO_CLIENT,
    Embeddings,
    KnownLinks,
    Predictions,
    SavedModels,
    Snapshot,
    role_of,
)
from flower_graph.records.participation import Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.rng import generator, seeded
from flower_graph.secure import common_key
from flower_graph.secure.channel import KEY_BYTES
from flower_graph.secure.ring import CHECKS
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy, Session
from flower_graph.server.sums import PartySums, SecureSum, SumServer
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.client import (
    AS_PARTY,
    GRADIENTS,
    IN_SUM,
    LEAST_FRACTION_BITS,
    WORD,
    Advance,
    CopyReply,
    EnrolmentReply,
    EnrolmentRequest,
    GradientRequest,
    HiddenSum,
    LatentReply,
    LatentRequest,
    MemberKey,
    RelayReply,
    RelayRequest,
    SumReply,
    detail_of,
)
from flower_graph.strategies.nfedgnn.config import (
    AVERAGED,
    MASKED,
    OWN,
    SUMMED,
    ModelConfig,
    NFedGNNConfig,
    StrategyConfig,
)
from flower_graph.strategies.nfedgnn.users import UserSettings, bounded
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import Resume, as_record
from flower_graph.wire.counts import counted
from flower_graph.wire.exchange import Rejected, Replies, few
from flower_graph.wire.keys import ROLES, SERVER_ROUND
from flower_graph.wire.ledger import NUMBER, ROOM, reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
ANSWERED, UP, DOWN = range(3)  # columns of the traffic
FLOAT = 4  # bytes of a number
NOBODY: IntArray = np.zeros(0, np.int64)
UNHOSTED = "no SuperNode hosts users of this graph"
NEVER = -1  # the round of no step
WARM_UP = 0.1  # share of the rounds in which ``warmup-cosine`` raises the step size
MOST_STOPPED = 2  # steps that a SuperNode may stop before it is left out
T = TypeVar("T")


class SplitGradientRelay(RoundStrategy[Any, Any]):
    """Server of nFedGNN, for clients that answer as ``NodeClient`` does.

    Parameters
    ----------
    data : Data
        ``edge_index``, ``y``, ``train_mask`` and, for the report, ``val_mask``, ``test_mask``; a
        PyG ``Data`` will do. Features are not looked at.
    server_model : Module
        ``f_s``, called as ``server_model(latent, edge_index)``; returns logits ``[n, c]``, or a row
        for each node if links are learnt.
    config : NFedGNNConfig, optional
        The settings of a run.
    latent_size : int
        Length of a latent vector, ``h``.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    **fields
        In place of a config: fields of its section ``strategy`` (``flower-graph docs
        configuration``), such as ``learning_rate``, ``share="summed"`` for clients as
        ``CommonLayerClient``, or ``average_every``, which makes ``share="averaged"``; ``seed`` and
        ``device``; ``user_bias``, whether the users' linear map has a bias; ``feature_dropout``,
        the share of its features that each user drops in training, with ``share="summed"`` only.

    Notes
    -----
    A client must answer ``query`` with the users it hosts, ``train`` with their latent vectors
    after applying the gradients that the message brings, and ``train.finish`` after applying the
    last ones (``client.py`` beside this file).
    """

    usual_rounds = 200
    refused = ("evaluate_config",)
    _right_in_best: Tensor | None = None  # users that the server predicted right in the best round

    def __init__(
        self,
        data: Any,
        server_model: nn.Module,
        config: NFedGNNConfig | None = None,
        *,
        latent_size: int,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **fields: Any,
    ) -> None:
        config = config_of(**fields) if config is None else config
        self.section = section = config.strategy
        is_common, model = section.share == SUMMED, config.model
        dropout = model.dropout if is_common else 0.0
        over, decay = section.average_over, section.weight_decay
        users = UserSettings(latent_size, model.user_bias, decay, config.seed, over, dropout)
        kind = LinkRelayServer if config.task == LINKS else RelayServer
        self.server: RelayServer = kind(data, server_model, config, latent_size)
        self.num_classes = self.server.num_classes
        form = CommonLayer if is_common else OwnLayer
        self.layer: OwnLayer | CommonLayer = form(self, users)
        places = checkpoint_dir, checkpoint_every
        super().__init__(Session(self.layer, section, config.seed, *places))

    # A round

    def round(self, server_round: int) -> RoundReport:
        """Run a round: the users' latent vectors, the server's step, the step of their layer."""
        layer, server, section = self.layer, self.server, self.section
        latent, heard = layer.latents(server_round)
        losses, gradient = server.gradients(server_round, latent, heard)
        rate = scheduled(section, server_round, self.session.rounds)
        skipped = layer.step(server_round, gradient, rate)
        if not skipped and not layer.is_alone(server_round):
            server.move(server_round, rate)
        who = self._took_part(skipped)
        layer.round = server_round
        layer.look_ahead(server_round)
        accuracy, self.counts = dict.fromkeys(ROLES, math.nan), None
        if self.evaluates(server_round):
            accuracy = server.accuracy()
            self.counts = counted(*server.judged[:3], self.counting)
        return self.report(server_round, who, accuracy, **losses, skipped=skipped)

    def _took_part(self, skipped: str) -> Participation:
        nobody = ~self.layer.left
        for users in self.layer.numbers().values():
            nobody[users] = False
        unhosted = {"no SuperNode hosts it": np.flatnonzero(nobody)}
        asked, used = self.session.asked, () if skipped else self.layer.answered
        answered = np.concatenate([NOBODY, *(asked[node] for node in used)])
        return self.session.participation(answered, left_out=unhosted, no_use=skipped)

    def evaluates(self, server_round: int) -> bool:
        """Whether a round is evaluated: every so many, and a round that may be the last."""
        may_end = server_round >= self.session.rounds or self.session.stops_early(server_round)
        return may_end or server_round % self.section.evaluate_every == 0

    def finish(self, server_round: int) -> None:
        self.layer.finish(server_round)

    # State and outputs

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        if initial_arrays is not None:
            for model in (self.server.model, self.server.eval_model):
                model.load_state_dict(initial_arrays.to_torch_state_dict())

    def fixed_settings(self) -> dict[str, object]:
        return {**self.layer.settings._asdict(), "learning_rate": self.section.learning_rate}

    def saw_best(self) -> None:
        self._right_in_best = self.server.right

    def _resume(self) -> int:
        """Go on from a checkpoint, which from now on has nothing of users that left."""
        last, layer = super()._resume(), self.layer
        if layer.is_change:
            # What was the best is of other users; nobody needs what is held of it.
            self.best.forget()
            self._right_in_best = None
            if layer.left.any():
                self._rewrite(last)
        return last

    def state(self) -> dict[str, object]:
        return {
            "server": self.server.state_dict(),
            "layer": self.layer.state_dict(),
            "right-then": self._right_in_best,
        }

    def load_state(self, state: StateDict) -> None:
        self.layer.load_state_dict(state["layer"])
        self.server.load_state_dict(state["server"])
        self._right_in_best = state["right-then"]

    def learnt(self) -> ArrayRecord:
        return ArrayRecord(self.server.eval_model.state_dict())

    def weights(self) -> dict[str, Tensor]:
        """Return what the last report was made with.

        ``server.<name>``: parameters and buffers of the server's model, as in its ``state_dict``;
        ``latent`` ``[n, h]``: the users' latent vectors, zeros for a user that never answered.
        """
        model = {f"server.{name}": t for name, t in self.server.eval_model.state_dict().items()}
        return model | {"latent": self.server.latent}

    def snapshot(self) -> Snapshot:
        return self.server.snapshot()

    def figures(self) -> Iterator[list[str]]:
        """Give the lines of ``clients.csv``: each present user in the last and the best round."""
        server, best = self.server, self.best
        role = role_of(*(server.masks[name] for name in ROLES))
        rounds = [("last", best.last, server.right), ("best", best.number, self._right_in_best)]
        texts = [(at, str(n), right.cpu().tolist()) for at, n, right in rounds if right is not None]
        for user in server.known.nonzero().flatten().tolist():
            counts = [str(count) for count in self.layer.traffic[user].tolist()]
            for at, number, right in texts:
                accuracy = ["", "", ""]
                if role[user]:
                    accuracy[role[user] - 1] = "1.0" if right[user] else "0.0"
                yield [str(user), at, number, "1", "", *accuracy, *counts]

    def grow(self, data: Any, *, left: Sequence[int] = (), alone: int = 0) -> None:
        """Go on with other users: the next ``start`` is to be with ``resume=True``.

        Parameters
        ----------
        data : Data
            The grown graph. Its first nodes are the users so far, in their order; newcomers follow.
        left : sequence of int
            Users that have left, of all users there ever were; they keep only their numbers.
        alone : int
            Rounds in which the newcomers alone train: the server's model and the others are frozen.

        Raises
        ------
        ValueError
            If the users' weights are averaged over ``"all"``, or a number is impossible.

        Notes
        -----
        Old users keep weights, optimiser and latent vector. Newcomers begin with the common layer,
        else with the last mean if weights are averaged, else with the seed's weights. The data of
        users that left are removed from the checkpoints as the run goes on; what other users have
        learnt from them stays.
        """
        at_least(0).check("alone", alone)
        count = int(data.y.shape[0])
        if left and not 0 <= min(left) <= max(left) < count:
            raise ValueError(f"left: users {list(left)!s:.60} of {count}")
        if self.section.average_over == "all":
            raise ValueError("average_over: 'all' lets nobody join or leave; 'holders' does")
        self.layer.grow(count, left, alone)
        self.server.take(data, left)


def config_of(
    *,
    user_bias: bool = False,
    feature_dropout: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
    **fields: Any,  # of the section ``strategy``
) -> NFedGNNConfig:
    """Return and check the settings of a strategy in somebody's own app."""
    share = AVERAGED if fields.get("average_every") else OWN
    section = StrategyConfig(**{"share": share, **fields})
    model = ModelConfig(user_bias=user_bias, dropout=feature_dropout)
    config = NFedGNNConfig(seed=seed, device=device, model=model, strategy=section)
    config.validate()
    has_use = section.share == SUMMED or not feature_dropout
    require(has_use, "feature_dropout", feature_dropout, f"0 without share={SUMMED}")
    return config


# The users' layers -------------------------------------------------------------------------------


class Layer(Membership):
    """The server's half of the users' layer: who hosts which users, who is there, and bytes.

    A form has ``latents(round)``, a round's latent vectors ``[n, h]`` and the users that were heard
    ``[n]``; ``step(round, gradient, rate)``, which returns why the layer cannot step, or ""; and
    ``finish``.
    """

    needs_query = True
    # Of the state: arrays with a row for each user, and others
    rows: ClassVar[tuple[str, ...]] = ("joined", "traffic")
    others: ClassVar[tuple[str, ...]] = ("round",)
    round = 0  # the last
    alone = 0  # rounds in which only the last newcomers train
    # How many users the checkpoint has that the run goes on from; None where nobody may come or go
    users_before: int | None = None
    is_change = False  # whether users came or went since that checkpoint
    answered: Collection[int] = ()  # SuperNodes whose latent vectors the last round used

    def __init__(self, relay: SplitGradientRelay, settings: UserSettings) -> None:
        super().__init__()
        self.relay, self.settings = relay, settings
        self._begin(relay.server.num_nodes)

    def _begin(self, count: int) -> None:
        self.size = count  # of all users there ever were
        # The round after which each joined; 0: there from the start
        self.joined = np.zeros(count, np.int64)
        self.left = np.zeros(count, bool)
        # Of each user: rounds that it answered, and its payload up and down
        self.traffic = np.zeros((count, 3), np.int64)

    # Enrolment: the weights of all users have one shape

    def question(self, resume: Resume) -> RecordDict:
        before = self.users_before if resume.server_round else None
        return EnrolmentRequest(self.settings, resume, before).to_record()

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        return EnrolmentReply.read(content, num_nodes=self.size)

    def most_bytes(self) -> int:
        return max(super().most_bytes(), ROOM + NUMBER * self.size)

    def form_of(self, answer: EnrolmentReply) -> list[int]:
        return answer.weight_shape

    # A round

    def users_of(self, nodes: Iterable[int]) -> dict[int, IntArray]:
        every = self.numbers()
        return {node: every[node] for node in nodes}

    def drawn(self, server_round: int, hosted: Mapping[int, IntArray]) -> dict[int, IntArray]:
        """Draw a round's users; return those of each SuperNode."""
        last = self.joined.max() if self.is_alone(server_round) else self.joined
        pool = np.flatnonzero((self.joined == last) & ~self.left)
        takes_part = np.zeros(self.size, bool)
        takes_part[pool[self.relay.session.draw(pool.size, server_round)]] = True
        return {node: users[takes_part[users]] for node, users in hosted.items()}

    def is_alone(self, server_round: int) -> bool:
        last = int(self.joined.max())
        return last > 0 and server_round <= last + self.alone

    def look_ahead(self, server_round: int) -> None:
        """Ask, after the step, for what the round's evaluation needs."""

    def tally(self, way: str, kind: str, users: IntArray, nbytes: int) -> None:
        """Count bytes that some users, each as many, sent or were sent."""
        self.relay.session.ledger.count(way, kind, nbytes)
        self.traffic[users, UP if way == "up" else DOWN] += nbytes // max(1, users.size)

    # State

    def grow(self, count: int, left: Sequence[int], alone: int) -> None:
        self._begin(count)
        self.left[list(left)] = True
        self.alone, self.users_before = alone, count

    def state_dict(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("left", *self.rows, *self.others)}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from what ``state_dict`` returned; nothing waits for new or departed users."""
        left, gone, known = self.left, state["left"], len(state["left"])
        if known > self.size or (known < self.size and self.users_before is None):
            raise ValueError(f"its num_users is {known}, this run's is {self.size}")
        for name in self.others:
            setattr(self, name, state[name])
        self._begin(self.size)
        self.joined[:] = self.round
        for name in self.rows:
            held = getattr(self, name)
            held[:known] = state[name]
            held[left] = 0
        self.left[:known] = gone
        # A checkpoint that was rewritten without departed users names its newcomers already.
        is_new = self.joined == self.round
        self.is_change = bool(is_new.any() or (left & ~self.left).any())
        self.users_before = None if self.users_before is None else int((~is_new).sum())
        self.left = left


class OwnLayer(Layer):
    """A layer of each user's own: gradients and averaged weights wait for users."""

    rows = (*Layer.rows, "gradient", "gradient_round", "has_average")
    others = (*Layer.others, "rate", "average", "average_round")
    rate = 0.0  # with which users take their gradients: of the last round
    average: FloatArray | None = None
    average_round = 0

    def _begin(self, count: int) -> None:
        super()._begin(count)
        self.gradient = np.zeros((count, self.settings.latent_size), np.float32)
        self.gradient_round = np.zeros(count, np.int64)  # 0: none waits
        self.has_average = np.zeros(count, np.int64)  # round of the mean each user has

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        if answer.handled == 0:
            # Gradients belong to weights that are no more; averaged weights are sent again.
            self.gradient_round[answer.users] = self.has_average[answer.users] = 0

    def latents(self, server_round: int) -> tuple[Tensor, Tensor]:
        """Ask this round's users for latent vectors, with the gradients that wait."""
        relay, session, server = self.relay, self.relay.session, self.relay.server
        drawn = self.drawn(server_round, self.users_of(session.gather(server_round, UNHOSTED)))
        # For a checkpoint every host is asked, even if none of its users takes part.
        saves, every = session.is_due(server_round), relay.section.average_every
        drawn = {node: users for node, users in drawn.items() if saves or users.size}
        # A mean of the newcomers alone would become everybody's.
        averages = every > 0 and server_round % every == 0 and not self.is_alone(server_round)
        replies = self._send(server_round, drawn, averages=averages, saves=saves)
        relay.answers = self.answered = replies.values
        session.must_have(server_round, self.answered)
        for node, reply in replies.values.items():
            request = relay.requests[node]
            server.receive(request.users, reply.latent)
            # Of a million users neither is to take room while the server steps.
            reply.latent, request.gradient = reply.latent[:0].copy(), request.gradient[:0].copy()
        return server.latent, server.known

    def _send(
        self,
        server_round: int,
        users: Mapping[int, IntArray],
        message_type: str = "train",
        *,
        averages: bool = False,
        saves: bool = False,
    ) -> Replies[RelayReply]:
        """Send users the gradients that wait for them, and the mean if they lack it."""
        relay, session, (f, w) = self.relay, self.relay.session, self.form
        requests = relay.requests = {
            node: RelayRequest(
                server_round,
                local,
                self.gradient[local],
                self.gradient_round[local],
                self.rate,
                *self._mean_for(local),
                averages,
                saves,
                "" if message_type == "train.finish" else session.run,
            )
            for node, local in users.items()
        }

        def read(node: int, content: RecordDict) -> RelayReply:
            (p, h), asked = requests[node].gradient.shape, {"send_weights": averages}
            return RelayReply.read(content, server_round=server_round, p=p, h=h, f=f, w=w, **asked)

        session.asked = dict(users)
        numbers = max((one.gradient.size for one in requests.values()), default=0)
        return session.send(
            {node: as_record(relay._config, one) for node, one in requests.items()},
            server_round,
            read,
            message_type=message_type,
            max_reply_bytes=reply_bytes(numbers + averages * f * (w + 1)),
        )

    def _mean_for(self, users: IntArray) -> tuple[FloatArray | None, int]:
        if self.average is None or (self.has_average[users] >= self.average_round).all():
            return None, 0
        return self.average, self.average_round

    def step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Keep the gradients for users, and the mean of the weights that they sent."""
        relay, gradients = self.relay, gradient.cpu().numpy()
        self._delivered(self.answered)
        self.rate = rate
        for request in (relay.requests[node] for node in self.answered):
            users = request.users
            self.gradient[users] = gradients[users]
            self.gradient_round[users] = server_round
            self.traffic[users, ANSWERED] += 1
            self.tally("up", "latent", users, self.gradient[users].nbytes)
            if request.send_weights:
                nbytes = users.size * math.prod(self.form) * FLOAT
                self.tally("up", "weights", users, nbytes)
        sent = [reply for reply in relay.answers.values() if reply.weight_sum is not None]
        if sent:  # rows that nobody holds are NaN
            total = np.stack([reply.weight_sum for reply in sent]).sum(0, dtype=np.float64)
            count = np.stack([reply.holders for reply in sent]).sum(0, dtype=np.int64)[:, None]
            mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
            self.average, self.average_round = mean.astype(np.float32), server_round
        return ""

    def _delivered(self, nodes: Iterable[int]) -> None:
        # Payload is what a user alone would be sent, whatever its cohort shares: its gradient, and
        # the averaged weights in full.
        for request in (self.relay.requests[node] for node in nodes):
            users = request.users
            waited = users[request.gradient_round > 0]
            self.tally("down", "gradient", waited, self.gradient[waited].nbytes)
            self.gradient_round[users] = 0
            if request.average is not None:
                lacking = users[self.has_average[users] < request.average_round]
                self.tally("down", "weights", lacking, lacking.size * request.average.nbytes)
                self.has_average[users] = request.average_round

    def finish(self, server_round: int) -> None:
        hosted = self.users_of(self.relay.session.present()).items()
        present = {node: users[~self.left[users]] for node, users in hosted}
        present = {node: users for node, users in present.items() if users.size}
        self._delivered(self._send(server_round, present, "train.finish").values)


class CommonLayer(Layer):
    """One layer of all users: its last step, and which SuperNodes have taken that step.

    Under masks the server can read neither the layer nor the sums of gradients.
    """

    taken = Advance(before=NEVER)  # the last step, with its sum; round 0: the first weights
    stoppers: Collection[int] = ()  # SuperNodes for want of which this round has no sum

    def __init__(self, relay: SplitGradientRelay, settings: UserSettings) -> None:
        super().__init__(relay, settings)
        self.at = dict[int, int]()  # round of the last step of each SuperNode's layer
        self.stopped = Counter[int]()  # steps that SuperNodes stopped, by their users
        self.keys = dict[int, MemberKey]()  # of SuperNodes that have enrolled
        self._masks, registry = relay.section.aggregation == MASKED, relay.section.registry
        # Under pads two sums tell the server nothing, however few SuperNodes they differ by.
        self._parties = None if registry is None else PartySums(registry, differ_by=1)
        self._count = IN_SUM if registry is None else AS_PARTY
        self._vector = FLOAT * settings.latent_size  # bytes
        self._ask_anew(0)

    def _ask_anew(self, server_round: int) -> None:
        self.asked_round = server_round  # for which latent vectors were asked
        self.relay.requests, self.relay.answers, self.rejected = {}, {}, list[Rejected]()

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"last": self.taken.layer_round}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from a state; vectors that were asked for ahead are asked for again."""
        super().load_state_dict(state)
        self.taken = Advance(state["last"], NEVER)
        self._ask_anew(0)
        if self._parties is None:
            self.__dict__.pop("sums", None)  # of an earlier start of the run

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        """Refuse a SuperNode whose public key no other SuperNode would take."""
        answer = super().read(node, content)
        if not self._masks:
            return answer
        if (key := answer.key) is None:
            raise MalformedReplyError("key-public: missing; masked sums need it")
        if self._parties is not None:
            run = str(self.relay.session.exchange.grid.run.run_id).encode()
            common_key.check_signed(self._parties.registry, run, key.public, key.signed_by)
        return answer

    def refusal(self, answer: EnrolmentReply) -> str:
        return super().refusal(answer) or self._stops(answer.users.tolist())

    def _stops(self, users: Iterable[int]) -> str:
        if max((self.stopped[user] for user in users), default=0) < MOST_STOPPED:
            return ""
        return f"it stopped {MOST_STOPPED} steps of all: left out until another SuperNode joins"

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        self.stopped.clear()
        self.at[node] = answer.layer_round or 0
        if answer.key is not None:
            self.keys[node] = answer.key

    # Latent vectors

    def latents(self, server_round: int) -> tuple[Tensor, Tensor]:
        """Return the vectors that were asked for ahead, and those of new SuperNodes."""
        relay, session, server = self.relay, self.relay.session, self.relay.server
        hosted = self.users_of(session.gather(server_round, UNHOSTED))
        if self.asked_round != server_round:
            self._ask_anew(server_round)
        new = {node: users for node, users in hosted.items() if node not in relay.requests}
        users = self.drawn(server_round, new)
        self._ask({node: (drawn, NOBODY) for node, drawn in users.items() if drawn.size})
        session.rejected += few(self.rejected)
        asked = {node: relay.requests[node].users for node in hosted if node in relay.requests}
        session.asked = {node: users for node, users in asked.items() if users.size}
        self.answered = [node for node in session.asked if node in relay.answers]
        session.must_have(server_round, self.answered)
        latent, heard = server.latent.clone(), torch.zeros_like(server.known)
        for node in self.answered:
            reply, request = relay.answers[node], relay.requests[node]
            rows = reply.latent
            if rows is None:
                rows = reply.measured[np.isin(request.measured, request.users)]
            unknown = ~server.known.cpu().numpy()[request.users]
            server.receive(request.users[unknown], rows[unknown])  # the first word from them
            local, vectors = server.placed(request.users, rows)
            latent[local], heard[local] = vectors, True
        return latent, heard

    def look_ahead(self, server_round: int) -> None:
        """Ask for the next round's latent vectors, and for vectors that evaluate this round."""
        relay, session = self.relay, self.relay.session
        # If most of them stopped the step, it is no fault of theirs.
        for node in self.stoppers if 2 * len(self.stoppers) < len(self.answered) else ():
            self.stopped.update(self.clients[node])
            if why := self._stops(self.clients[node]):
                LOG.warning("node %d and its %d users: %s", node, len(self.clients[node]), why)
                self.forget(node)
        # All present SuperNodes are asked: measuring needs no training, and all write checkpoints.
        self._ask_anew(server_round + 1)
        hosted = self.users_of(session.hosted())
        nobody = dict.fromkeys(hosted, NOBODY)
        is_last = server_round >= session.rounds
        drawn = nobody if is_last else self.drawn(server_round + 1, hosted)
        measured = hosted if relay.evaluates(server_round) else nobody
        asked = {node: (drawn[node], measured[node]) for node in hosted}
        self._ask(asked, saves=session.is_due(server_round))

    def _ask(self, asked: Mapping[int, tuple[IntArray, IntArray]], *, saves: bool = False) -> None:
        if not asked:
            return
        relay, session = self.relay, self.relay.session
        copy, sealed = self._copy(asked), self._sealed_keys(asked) if self._masks else {}
        requests = {
            node: LatentRequest(
                self.asked_round,
                users,
                measured,
                self._advance(node, copy),
                sealed.get(node),
                # Without dropout one vector will do for both.
                trains=bool(users.size) and (self.settings.dropout > 0 or not measured.size),
                checkpoint=saves,
                run=session.run,
            )
            for node, (users, measured) in asked.items()
        }

        def read(node: int, content: RecordDict) -> LatentReply:
            one = requests[node]
            known = {"server_round": one.server_round, "layer_round": one.advance.layer_round}
            sizes = {"p": one.users.size, "m": one.measured.size, "h": self.settings.latent_size}
            measures = bool(one.measured.size)
            return LatentReply.read(content, trains=one.trains, measures=measures, **known, **sizes)

        vectors = max(one.users.size + one.measured.size for one in requests.values())
        replies = session.exchange.send(
            {node: one.to_record() for node, one in requests.items()},
            server_round=self.asked_round,
            timeout=session.timeout,
            read=read,
            max_reply_bytes=reply_bytes(vectors * self.settings.latent_size),
        )
        relay.requests |= requests
        relay.answers |= replies.values
        self.rejected += replies.rejected
        self.note(replies.rejected)
        for node, reply in replies.values.items():
            advance, measured = requests[node].advance, requests[node].measured
            self.at[node] = advance.layer_round
            total = advance.total if advance.hidden is None else advance.hidden.words
            for kind, sent in (("sum", total), ("copy", advance.copy)):
                if sent is not None:
                    self.tally("down", kind, measured, sent.nbytes)
            if reply.measured is not None:
                self.tally("up", "measured", measured, measured.size * self._vector)
                relay.server.receive(measured, reply.measured)

    def _sealed_keys(self, nodes: Iterable[int]) -> Mapping[int, common_key.KeyPacket]:
        """Have the common key sealed for SuperNodes that do not have it."""
        keys, hosted = self.keys, list(self.relay.session.hosted())
        checks = {node: keys[node].key_check.tobytes() for node in hosted}
        known = [check for check in checks.values() if any(check)][:1]
        having = [node for node, check in checks.items() if check in known]
        lacking = [node for node in nodes if node not in having]
        for donor in (having or hosted) if lacking else ():
            others = [node for node in lacking if node != donor]
            public = np.array([keys[node].public for node in others], np.uint8)
            signed = None
            if self._parties is not None:
                rows = [keys[node].signed_by for node in others]
                signed = np.array(rows, np.uint8).reshape(-1, common_key.SIGNED_BY)
            request = common_key.ShareKeyRequest(public.reshape(-1, KEY_BYTES), not having, signed)
            read = partial(common_key.ShareKeyReply.read, k=len(others))
            reply = self.ask_one(donor, "train.share_key", request.to_record(), read)
            if reply is not None:
                for node in (donor, *others):
                    keys[node].key_check = reply.key_check
                sender = keys[donor].public, keys[donor].signed_by
                packets = [common_key.KeyPacket(packet, *sender) for packet in reply.packets]
                return dict(zip(others, packets, strict=True))
        return {}

    # The last step, and SuperNodes that lack it

    def _can_go_on(self, node: int) -> bool:
        """Whether a SuperNode has the last step, or can take it with the sum."""
        at, taken = self.at.get(node, 0), self.taken
        has_sum = taken.has_total or taken.hidden is not None
        return at == taken.layer_round or (at == taken.before and has_sum)

    def _advance(self, node: int, copy: CopyReply | None) -> Advance:
        at, taken = self.at.get(node, 0), self.taken
        copy = None if self._can_go_on(node) else copy
        begins, sent = (at, None) if copy is None else (copy.layer_round, copy.copy)
        bare = Advance(taken.layer_round, taken.before, taken.rate)
        return replace(taken if begins == taken.before else bare, copy=sent)

    def _copy(self, nodes: Iterable[int]) -> CopyReply | None:
        """Fetch a copy of the layer if a SuperNode needs it."""
        if all(map(self._can_go_on, nodes)):
            return None
        hosted = self.relay.session.hosted()
        if not any(map(self._can_go_on, hosted)):
            newest = max(self.at.get(node, 0) for node in hosted)
            lost = "the layer of round %d is lost: all go on from round %d"
            LOG.warning(lost, self.taken.layer_round, newest)
            self.taken = Advance(newest, NEVER)
        request = as_record()
        for donor in filter(self._can_go_on, hosted):
            read = partial(CopyReply.read, layer_round=self.at[donor])
            if reply := self.ask_one(donor, "train.copy_layer", request, read):
                self.relay.session.ledger.count("up", "copy", reply.copy.nbytes)
                return reply
        return None

    def ask_one(
        self, node: int, message_type: str, request: RecordDict, read: Callable[[RecordDict], T]
    ) -> T | None:
        replies = self.relay.session.send(
            {node: request},
            self.asked_round,
            lambda _, content: read(content),
            message_type=message_type,
            max_reply_bytes=setup_bytes(),
        )
        return replies.values.get(node)

    # The sum

    def step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Have the SuperNodes' gradients by the layer added up for the next message."""
        gradients, requests = gradient.cpu().numpy(), {}
        for node in self.answered:
            users = self.relay.requests[node].users
            if self.relay.requests[node].trains:  # otherwise counted as vectors to be measured
                self.tally("up", "latent", users, users.size * self._vector)
            self.traffic[users, ANSWERED] += 1
            self.tally("down", "gradient", users, users.size * self._vector)
            at = self.taken.layer_round
            requests[node] = GradientRequest(server_round, users, gradients[users], at)
        total = self._summed(server_round, requests)
        if isinstance(total, str):
            return f"no sum of gradients: {total}"
        hidden, plain = (total, None) if isinstance(total, HiddenSum) else (None, total)
        before = self.taken.layer_round
        self.taken = Advance(server_round, before, rate, plain is not None, plain, hidden)
        return ""

    @cached_property
    def sums(self) -> SecureSum:
        session, section = self.relay.session, self.relay.section
        return SecureSum(
            session.exchange,
            limit=section.limit,
            resolution=2.0**-LEAST_FRACTION_BITS,
            server=self._parties or SumServer(dropout=0.0),
            timeout=session.timeout,
            guard=True,
        )

    def _summed(
        self, server_round: int, requests: Mapping[int, GradientRequest]
    ) -> HiddenSum | FloatArray | str:
        if self._masks:
            return self._hidden(server_round, requests)
        (f, w), length = self.form, math.prod(self.form)

        def read(node: int, content: RecordDict) -> FloatArray:
            users = requests[node].users.size
            return SumReply.read(content, server_round=server_round, f=f, w=w, p=users).total

        replies = self.relay.session.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            read,
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(length),
        )
        for node in replies.values:
            self.tally("up", "sum", requests[node].users, length * FLOAT)
        self.stoppers = requests.keys() - replies.values.keys()
        if self.stoppers:
            return f"missing from {len(self.stoppers)} SuperNode(s)"
        limit = self.relay.section.limit
        sums = [bounded(replies.values[node], limit) for node in self.present(replies.values)]
        total: FloatArray = np.stack(sums).sum(0, dtype=np.float64).astype(np.float32)
        return total

    def _hidden(
        self, server_round: int, requests: Mapping[int, GradientRequest]
    ) -> HiddenSum | str:
        session, sums = self.relay.session, self.sums
        length = math.prod(self.form) + CHECKS * (self._parties is not None)
        voices = {node: self.clients[node][: self._count] for node in requests}
        if {*sums.clients} != {*chain.from_iterable(voices.values())}:
            sums.clients = []
        sums.prepare(server_round, voices)
        detail = detail_of(server_round, self.taken.layer_round)
        what = length, GRADIENTS, detail
        found = sums.add(server_round, requests, "train.add_up", *what, padded=True)
        left_out = [*found.replies.rejected, *found.silent]
        session.leave_out(left_out)
        silent = {entry.node_id for entry in left_out}
        for node in found.asked.keys() - silent:
            self.tally("up", "sum", requests[node].users, length * WORD // 8)
        if found.total is None:
            self.stoppers = silent & voices.keys()
            return found.skipped
        there = {*found.contributors}
        self.stoppers = [node for node, local in voices.items() if not there.issuperset(local)]
        if self.stoppers:
            return f"{len(self.stoppers)} of {len(voices)} SuperNodes were left out"
        return HiddenSum(len(there), found.run_id, found.number, found.ring, found.total)

    def finish(self, server_round: int) -> None:
        self.relay.session.tell_all(server_round, {SERVER_ROUND: server_round}, "train.finish")


# The server's model, as tensors ------------------------------------------------------------------


def scheduled(section: StrategyConfig, server_round: int, rounds: int) -> float:
    """Return the step size of a round of so many; rounds count from 1. It is never 0."""
    rate = section.learning_rate
    if section.schedule == "constant":
        return rate
    rise = math.ceil(WARM_UP * rounds) if section.schedule == "warmup-cosine" else 0
    if server_round <= rise:
        return rate * server_round / rise
    done = (server_round - 1 - rise) / (rounds - rise)
    return rate * (1 + math.cos(math.pi * done)) / 2


class RelayServer:
    """The server's model and data, as tensors."""

    def __init__(
        self, data: Any, model: nn.Module, config: NFedGNNConfig, latent_size: int
    ) -> None:
        at_least(1).check("latent_size", latent_size)
        self.config, self.section = config, config.strategy
        self.reg_weight, self.seed = self.section.smoothness, config.seed
        self.device = resolve_device(config.device)
        self.model = model.to(self.device)
        # Whether the model can do with the nodes of the loss; a GPU would have to be waited for.
        self._takes_nodes = self.device.type == "cpu" and getattr(model, "takes_nodes", False)
        self.optimizer = Adam(self.model.parameters(), weight_decay=self.section.weight_decay)
        # What predicts and is evaluated: the model that is trained, or the average of its weights
        self._decay = self.section.server_average
        self.eval_model = copy.deepcopy(self.model) if self._decay else self.model
        self.latent = torch.zeros(0, latent_size, device=self.device)
        self.known = torch.zeros(0, dtype=torch.bool, device=self.device)
        self.take(data)

    def take(self, data: Any, left: Sequence[int] = ()) -> None:
        """Take a graph whose first nodes are the old ones; users that left have no part in it."""
        edges, y, masks = server_graph(data)
        self.num_nodes = y.shape[0]
        names: Sequence[str] | None = getattr(data, "names", None)
        # What the nodes are called, else their numbers
        self.nodes = np.arange(self.num_nodes) if names is None else np.array(list(names))
        self.classes: Sequence[str] | None = getattr(data, "classes", None)
        present = torch.ones(self.num_nodes, dtype=torch.bool)
        present[list(left)] = False
        self.present = present.to(self.device)
        self.y = y.to(self.device)
        self.masks = {name: (mask & present).to(self.device) for name, mask in masks.items()}
        if not self.masks["train"].any():
            raise DataError("train_mask: no node is marked; at least one labelled node is needed")
        self._all_edges = self._learnt_over(edges)
        self.num_classes = 1 + int(y.max())
        self.right = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.device)
        self._hold(self.latent, self.known)

    def _learnt_over(self, edges: Tensor) -> Tensor | SortedEdges:
        # In 32 bits, if the model can use edges in that form
        takes_sorted = getattr(self.model, "takes_sorted", False)
        in_order = sorted_edges(edges, self.num_nodes) if takes_sorted else None
        return (in_order or edges).to(self.device)

    def _hold(self, latent: Tensor, known: Tensor) -> None:
        more = self.num_nodes - len(known)
        self.latent = functional.pad(latent.to(self.device), (0, 0, 0, more))
        self.latent[~self.present] = 0
        self.known = functional.pad(known.to(self.device), (0, more)) & self.present
        self._forget_graph()

    def placed(self, users: IntArray, latent: FloatArray) -> tuple[Tensor, Tensor]:
        """Copy users' numbers and vectors to where the model is."""
        rows = torch.tensor(latent, dtype=torch.float32)
        return torch.tensor(users).to(self.device), rows.to(self.device)

    def receive(self, users: IntArray, latent: FloatArray) -> None:
        local, rows = self.placed(users, latent)
        self.latent[local] = rows
        if not self.known[local].all():
            self.known[local] = True
            self._forget_graph()

    # Made when it is needed, not as each SuperNode's first answer comes: there may be a million.
    @cached_property
    def graph(self) -> Tensor | SortedEdges:
        """The edges between users that have answered, in the form that the model takes."""
        return among(self._all_edges, self.known)

    @cached_property
    def _term(self) -> LaplacianTerm:
        return laplacian_term(self.graph, self.num_nodes)

    def _forget_graph(self) -> None:
        for made in ("graph", "_term"):
            self.__dict__.pop(made, None)

    @torch.no_grad()
    def move(self, server_round: int, rate: float) -> None:
        """Take a step; the average follows, a plain mean until there are enough weights."""
        self.optimizer.lr = rate
        self.optimizer.step()
        if not self._decay:
            return
        share, now = max(1 - self._decay, 1 / server_round), self.model.state_dict()
        for name, kept in self.eval_model.state_dict().items():
            kept.copy_(kept.lerp(now[name], share) if kept.is_floating_point() else now[name])

    def gradients(
        self, server_round: int, latent: Tensor, heard: Tensor
    ) -> tuple[dict[str, float], Tensor]:
        """Compute the loss over the users in ``heard``, and every latent vector's gradient."""
        # latent [n, h], heard [n]
        latent = latent.detach().requires_grad_()
        self.optimizer.zero_grad()
        smooth, nodes = torch.zeros((), device=self.device), list[Tensor]()
        if self.reg_weight:
            # The regulariser's part goes first and by itself, so that its tensors are free again.
            term = laplacian_regulariser(self._term, latent)
            (self.reg_weight * term).backward()
            smooth = term.detach()
            del term
        if self._takes_nodes:
            nodes = [(self.masks["train"] & heard).nonzero().flatten()]
        self.model.train()
        with seeded(self.device, self.seed, "server-dropout", server_round):
            logits = self.model(latent, self.graph, *nodes)
        entropy = self.entropy(logits, heard, server_round)
        loss = entropy.detach() + self.reg_weight * smooth
        if not torch.isfinite(loss):
            keys = " or ".join(self.config.steadying)
            raise DivergedError(f"round {server_round}: the loss is {loss.item()}; lower {keys}")
        entropy.backward()
        if longest := self.section.gradient_norm:
            clip_grad_norm_([*self.model.parameters(), latent], longest)
        assert latent.grad is not None
        losses = {"loss": loss, "cross_entropy": entropy, "regulariser": smooth}
        return {name: one.item() for name, one in losses.items()}, latent.grad

    def entropy(self, logits: Tensor, heard: Tensor, server_round: int) -> Tensor:
        """Compute the cross-entropy of the training nodes whose users were heard."""
        # logits [n, c], heard [n]
        if logits.shape[1] < self.num_classes:
            text = f"y has {self.num_classes - 1}, the model gives {logits.shape[1]} classes"
            raise DataError(f"{text}: flower_graph.data.as_graph(data) numbers classes from 0 on")
        train = self.masks["train"] & heard
        # Until a labelled user has answered there is nothing but the regulariser to learn from.
        if not train.any():
            return 0 * logits.sum()
        return functional.cross_entropy(logits[train], self.y[train])

    @torch.no_grad()
    def logits(self, edges: Tensor | None = None) -> Tensor:
        """Return each node's row of the model that is evaluated, over given or learnt edges."""
        self.eval_model.eval()
        among_known = self.graph if edges is None else among(edges, self.known)
        result: Tensor = self.eval_model(self.latent, among_known)
        return result

    def judge(self) -> Judged:
        return Judged(self.logits(), self.y, self.masks, [0, len(self.y)])

    def accuracy(self) -> dict[str, float]:
        judged = self.judged = self.judge()
        self.right = judged.logits.argmax(1) == judged.y
        # There may be ten million users: no sum by groups.
        return {
            role: self.right[mask].double().mean().item() for role, mask in judged.masks.items()
        }

    def snapshot(self) -> Snapshot:
        """Return the server's half of a run, of users that have answered."""
        rows = self._rows(self.latent)
        users = torch.from_numpy(rows.number)
        role = role_of(*(self.masks[name].cpu()[users] for name in ROLES))
        logits, label = self.logits().cpu()[users], self.y.cpu()[users]
        predictions = Predictions.of(logits, NO_CLIENT, rows.node, role, label, self.classes)
        return Snapshot(predictions, self._models(), rows)

    def _models(self) -> list[SavedModels]:
        return [form_of(self.eval_model, type(self.eval_model), NO_CLIENT)]

    def _rows(self, rows: Tensor) -> Embeddings:
        users = self.known.nonzero().flatten().cpu().numpy()
        client, is_public = np.full(len(users), NO_CLIENT), np.zeros(len(users), bool)
        return Embeddings(client, self.nodes[users], users, is_public, rows.cpu().numpy()[users])

    def state_dict(self) -> dict[str, object]:
        average = {"average": self.eval_model.state_dict()} if self._decay else {}
        return {
            **average,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "latent": self.latent,
            "known": self.known,
        }

    def load_state_dict(self, state: StateDict) -> None:
        self.model.load_state_dict(state["model"])
        # A run without has none: what it has learnt is what is averaged from now on.
        if self._decay:
            self.eval_model.load_state_dict(state.get("average", state["model"]))
        self.optimizer.load_state_dict(state["optimizer"])
        self._hold(state["latent"], state["known"])
        self.accuracy()  # there may be no later round to record which users are right


def among(edges: Tensor | SortedEdges, known: Tensor) -> Tensor | SortedEdges:
    """Return the edges between known nodes."""
    if known.all():
        return edges
    if isinstance(edges, SortedEdges):
        return edges.among(known)
    return edges[:, known[edges].all(0)]


# Links


def held_links(edge_index: Tensor, num_nodes: int, config: NFedGNNConfig) -> LinkSplit:
    """Hold out edges of the whole graph as one client with number 0 would."""
    links = config.links
    rng = generator(config.seed if links.seed is None else links.seed, "links", 0)
    return split_links(edge_index, num_nodes, links.val, links.test, rng)


class LinkRelayServer(RelayServer):
    """The server's model and data, as tensors, where links are learnt; arguments as there.

    The logit of a pair is its rows' dot product, or what a ``PairModel``'s decoder gives.
    """

    def take(self, data: Any, left: Sequence[int] = ()) -> None:
        """Take a graph; hold out some of its edges. Labels and masks of nodes play no part."""
        super().take(data, left)
        self.num_classes, self._takes_nodes = 2, False  # the loss needs the rows of all
        self.masks = {role: torch.zeros_like(self.present) for role in ROLES}

    def _learnt_over(self, edges: Tensor) -> Tensor:
        split = held_links(edges, self.num_nodes, self.config)
        self.split = LinkSplit(*(part.to(self.device) for part in vars(split).values()))
        self.whole = edges.to(self.device)
        return self.split.messages

    def entropy(self, logits: Tensor, heard: Tensor, server_round: int) -> Tensor:
        """Compute the cross-entropy of training edges and as many drawn pairs without an edge."""
        # logits: rows of nodes [n, h]; of pairs whose users were heard
        assert isinstance(self.graph, Tensor)
        rng = generator(self.seed, "absent-links", server_round)
        pairs, is_edge = drawn_pairs(self.graph, self.num_nodes, rng)
        kept = heard[pairs[0]] & heard[pairs[1]]
        if not kept.any():
            return 0 * logits.sum()
        scores, truth = _scores(self.model, logits, pairs[:, kept]), is_edge[kept].to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(scores, truth)

    @torch.no_grad()
    def judge(self) -> Judged:
        split = self.split
        early, later = (
            _scores(self.eval_model, self.logits(edges), split.pairs)
            for edges in (split.messages, split.later)
        )
        return judged_pairs(split, early, later)

    def snapshot(self) -> Snapshot:
        edges = self.whole[:, self.known[self.whole].all(0)].cpu().numpy()
        known = KnownLinks(np.full(edges.shape[1], NO_CLIENT), *self.nodes[edges])
        rows = self._rows(self.logits(self.whole))
        return Snapshot(None, self._models(), rows, known)


def _scores(model: nn.Module, rows: Tensor, pairs: Tensor) -> Tensor:
    if isinstance(model, PairModel):
        return model.decoder(rows, pairs)  # type: ignore[no-any-return]
    return dot_products(rows, pairs)
