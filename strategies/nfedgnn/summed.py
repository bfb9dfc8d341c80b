"""nFedGNN with one first layer for all users: exactly the training of one network in one place.

All users hold the same ``W`` and the same Adam. The loss and its gradients are those of the whole
network, and the gradient by ``W`` is a sum over users, ``sum_i x_i g_i^T``. A step with this sum is
the step of training in one place. No feature vector leaves its user.

Round ``t``, in two exchanges:

1. server -> user ``i``: the sum of round ``t - 1``; user: a step with it;
2. user -> server: ``x'_i = W x_i``, with dropout on ``x_i``; and once more without dropout if the
   server evaluates round ``t - 1``;
3. server: ``Z = f_s(theta_s, A, X')``, the loss, and its gradients ``g_i`` by every ``x'_i``;
4. server -> user: ``g_i``; SuperNode -> server: the sum of ``x_i g_i^T`` over its users;
5. server: adds up, and takes its own step.

The server asks for steps 1 and 2 as soon as the round before has its sum, so that it can evaluate
that round, too.

*A missing sum.* If a SuperNode sends latent vectors but not its sum, nobody steps. A SuperNode that
stops two steps in this way is left out with its users, until another SuperNode joins.

*Absent users.* The loss and the sum are over the users that answered. The other users take part by
their last vector without dropout, from an evaluation. A SuperNode that has missed a step, or is
new, gets weights and optimiser of another SuperNode, which the server relays.

*Masked sums.* Differences where the server can see neither the sums nor the layer:

- Before the first round one SuperNode draws a common key and seals it for the others; the server
  carries the packets. First weights and dropout come from that key.
- The sum of gradients is a secure sum, ``SecureSum``, of 64-bit words with 40 fraction bits, under
  pads from the same key. The server adds up, takes the masks off, and sends the sum on, still under
  the pads.
- A copy of the layer travels under the same key.
- Every SuperNode of a sum must stay until the sum is opened; otherwise nobody steps.

With a registry the SuperNodes have keys of their own, and do not trust the server. The sums are
then ``PartySums``, public keys for the common key are signed, and each sum ends in checks by which
clients know that it was not changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.config.rules import BELOW_ONE
from flower_graph.errors import MalformedReplyError, NoClientsError, RefusedError
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.common_key import (
    SIGNED_BY,
    KeyPacket,
    ShareKeyReply,
    ShareKeyRequest,
    check_signed,
)
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.sum.messages import MaskRequest
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import PartySums, SumServer
from flower_graph.secure.sum.service import SecureSum
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.common_client import (
    AS_PARTY,
    GRADIENTS,
    IN_SUM,
    LEAST_FRACTION_BITS,
    detail_of,
)
from flower_graph.strategies.nfedgnn.config import MASKED, SUMMED
from flower_graph.strategies.nfedgnn.messages import (
    Advance,
    CommonEnrolment,
    CopyReply,
    CopyRequest,
    EnrolmentReply,
    GradientRequest,
    HiddenSum,
    LatentReply,
    LatentRequest,
    MaskedEnrolment,
    SumReply,
)
from flower_graph.strategies.nfedgnn.strategy import (
    ANSWERED,
    DOWN,
    FLOAT,
    UP,
    RelayMembership,
    RelayStrategy,
    UserTable,
)
from flower_graph.strategies.nfedgnn.users import UserSettings, bounded
from flower_graph.wire.arrays import Config, FloatArray, IntArray
from flower_graph.wire.codec import Message
from flower_graph.wire.exchange import Rejected, Replies, few
from flower_graph.wire.fields import Bytes
from flower_graph.wire.keys import CONFIG, SERVER_ROUND
from flower_graph.wire.ledger import reply_bytes, setup_bytes

NOBODY: IntArray = np.zeros(0, np.int64)
T = TypeVar("T")
NEVER = -1  # the round of no step
MISSING = "missing from %d SuperNode(s)"
MOST_STOPPED = 2  # steps that a SuperNode may stop before it is left out
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class NoSum:
    """The reason why a round has no sum of gradients, so that nobody steps."""

    text: str  # One line for a person
    nodes: tuple[int, ...] = ()  # SuperNodes that it is for want of, as far as they are known


class CommonTable(UserTable):
    """Users, the last step of their layer, and which SuperNodes have taken it."""

    def __init__(self, num_users: int, settings: UserSettings) -> None:
        super().__init__(num_users, settings)
        self.last, self.before = 0, NEVER  # rounds of the last two steps; 0: the first weights
        # [f, w] that the last was taken with, or the same under pads
        self.total: FloatArray | HiddenSum | None = None
        self.learning_rate = 0.0  # of it
        self.at: dict[int, int] = {}  # round of the last step of each SuperNode's layer
        self.stopped = Counter[int]()  # steps that SuperNodes stopped, by their users

    # The last step

    def can_go_on(self, node: int) -> bool:
        """Whether a SuperNode has the last step, or can take it with the sum."""
        at = self.at.get(node, 0)
        return at == self.last or (at == self.before and self.total is not None)

    def go_back(self, nodes: Collection[int]) -> None:
        newest = max(self.at.get(node, 0) for node in nodes)
        LOG.warning("the layer of round %d is lost: all go on from round %d", self.last, newest)
        self.last, self.before, self.total = newest, NEVER, None

    def advance(self, node: int, copied: int = NEVER, copy: Bytes | None = None) -> Advance:
        at = self.at.get(node, 0)
        copy = None if self.can_go_on(node) else copy
        result = Advance(self.last, self.before, self.learning_rate, copy=copy)
        if at == self.last or self.before not in (at, copied):
            return result
        if isinstance(self.total, HiddenSum):
            return replace(result, hidden=self.total)
        return replace(result, has_total=self.total is not None, total=self.total)

    # What travelled

    def took_step(self, node: int, request: LatentRequest) -> None:
        advance = request.advance
        self.at[node] = advance.layer_round
        measured = request.measured
        total = advance.hidden if advance.total is None else advance.total
        for kind, sent in (("sum", total), ("copy", advance.copy)):
            if sent is not None:
                self.ledger.count("down", kind, sent.nbytes)
                self.traffic[measured, DOWN] += sent.nbytes // max(1, measured.size)
        if measured.size:
            self.count("up", "measured", measured, self.settings.latent_size * FLOAT)

    def used(self, users: IntArray, *, apart: bool) -> None:
        # apart: vectors to be measured were sent too, and are counted already
        size = self.settings.latent_size * FLOAT
        if apart:
            self.count("up", "latent", users, size)
        self.traffic[users, ANSWERED] += 1
        self.count("down", "gradient", users, size)

    def added_up(self, users: IntArray, nbytes: int) -> None:
        self.ledger.count("up", "sum", nbytes)
        self.traffic[users, UP] += nbytes // users.size

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"layer-round": self.last}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        self.last, self.before, self.total = int(state["layer-round"]), NEVER, None


class CommonMembership(RelayMembership):
    """The users of each SuperNode, and the round of its layer."""

    state: CommonTable

    def stopped(self, nodes: Collection[int], asked: Collection[int]) -> None:
        # If most of them have, it is no fault of theirs.
        for node in nodes if 2 * len(nodes) < len(asked) else ():
            self.state.stopped.update(self.clients[node])
            if why := self._refused_for(self.clients[node]):
                LOG.warning("node %d and its %d users: %s", node, len(self.clients[node]), why)
                self.forget(node)

    def refusal(self, answer: EnrolmentReply) -> str:
        """Refuse a SuperNode that stops steps, even under another id."""
        return self._refused_for(answer.users.tolist()) or super().refusal(answer)

    def _refused_for(self, users: Iterable[int]) -> str:
        if max((self.state.stopped[user] for user in users), default=0) < MOST_STOPPED:
            return ""
        return f"it stopped {MOST_STOPPED} steps of all: left out until another SuperNode joins"

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        super().enrolled(node, answer)
        assert isinstance(answer, CommonEnrolment)
        self.state.stopped.clear()
        self.state.at[node] = answer.layer_round


@dataclass
class Latents:
    """The latent vectors of one round, asked for and received."""

    server_round: int = 0
    requests: dict[int, LatentRequest] = field(default_factory=dict)
    came: dict[int, FloatArray] = field(default_factory=dict)  # [p, h] of users that train
    rejected: list[Rejected] = field(default_factory=list)


class SummedGradientRelay(RelayStrategy[LatentRequest, LatentReply]):
    """Server of nFedGNN with one first layer, for clients that answer as ``CommonLayerClient``.

    Parameters
    ----------
    data, server_model, latent_size, user_bias, learning_rate, weight_decay, schedule
        As of ``SplitGradientRelay``.
    reg_weight : float
        Weight of the smoothness of neighbouring latent vectors.
    feature_dropout : float
        Share of its features that each user drops in training.
    evaluate_every, gradient_norm, server_average, participation, seed, device, min_nodes
        As of ``SplitGradientRelay``.
    limit : float
        L2 norm to which a SuperNode's longer sum of gradients is scaled down.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    """

    form: ClassVar = {"share": SUMMED}
    users: CommonTable
    members: CommonMembership

    def __init__(
        self,
        data: Any,
        server_model: nn.Module,
        *,
        feature_dropout: float = 0.0,
        **settings: Any,  # the other parameters
    ) -> None:
        BELOW_ONE.check("feature_dropout", feature_dropout)
        self.feature_dropout = feature_dropout
        self._latents = Latents()
        super().__init__(data, server_model, **settings)

    def table(self, settings: UserSettings) -> CommonTable:
        return CommonTable(self.server.num_nodes, settings._replace(dropout=self.feature_dropout))

    # What is otherwise where sums are masked

    def membership(self) -> CommonMembership:
        return CommonMembership(self.users, CommonEnrolment)

    def beside(self, server_round: int, nodes: Sequence[int]) -> dict[int, Config]:
        return {}

    def add(
        self, server_round: int, requests: Mapping[int, GradientRequest]
    ) -> FloatArray | HiddenSum | NoSum:
        """Ask for the sums of gradients; return the whole sum, or why there is none."""
        users, session = self.users, self.session
        f, w = users.weight_shape
        replies = session.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: SumReply.read(
                content, server_round=server_round, f=f, w=w, p=requests[node].users.size
            ),
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(f * w),
        )
        total = np.zeros(users.weight_shape)
        for node in session.members.present(replies.values):
            total += bounded(replies.values[node].total, self.section.limit)
            users.added_up(requests[node].users, replies.values[node].total.nbytes)
        missing = [node for node in requests if node not in replies.values]
        if missing:
            return NoSum(MISSING % len(missing), tuple(missing))
        return total.astype(np.float32)

    def round(self, server_round: int) -> RoundReport:
        """Run a round: steps 2 to 5, then 1 and 2 of the next."""
        users, latents = self.users, self._gathered(server_round)
        answered = {node: latents.requests[node].users for node in latents.came}
        rate = self.step_size(server_round)
        losses, gradient = self._losses(server_round, latents)
        gradients = gradient.cpu().numpy()
        for node, local in answered.items():
            users.used(local, apart=latents.requests[node].trains)
        requests = {
            node: GradientRequest(server_round, local, gradients[local], users.last, users.settings)
            for node, local in answered.items()
        }
        total, skipped = self.add(server_round, requests), ""
        if isinstance(total, NoSum):
            skipped = f"no sum of gradients: {total.text}"
        else:
            self.server.move(server_round, rate)
            users.last, users.before = server_round, users.last
            users.total, users.learning_rate = total, rate
        who = self.took_part(() if skipped else answered, skipped)
        if isinstance(total, NoSum):
            self.members.stopped(total.nodes, answered)
        users.round = server_round
        self._look_ahead(server_round)
        report = self.measure(server_round, who, losses)
        report.skipped = skipped
        return report

    # Steps 1 and 2

    def _gathered(self, server_round: int) -> Latents:
        """Return a round's latent vectors: asked for ahead, and from new SuperNodes."""
        session, hosted = self.session, self.hosted(server_round)
        if self._latents.server_round != server_round:
            self._latents = Latents(server_round)
        latents = self._latents
        latents.requests = {n: asked for n, asked in latents.requests.items() if n in hosted}
        session.rejected += few(latents.rejected)
        new = {node: users for node, users in hosted.items() if node not in latents.requests}
        users = self._drawn(server_round, new)
        self._ask({node: (drawn, NOBODY) for node, drawn in users.items() if drawn.size})
        asked = {node: request.users for node, request in latents.requests.items()}
        session.asked = {node: users for node, users in asked.items() if users.size}
        if not session.asked:
            no_user = "no connected SuperNode hosts a user who takes part"
            raise NoClientsError(f"round {server_round}: {no_user}")
        latents.came = {n: latent for n, latent in latents.came.items() if n in session.asked}
        session.must_have(server_round, Replies(dict(latents.came), list(session.rejected)))
        return latents

    def _look_ahead(self, server_round: int) -> None:
        """Ask for the next round's latent vectors, and for vectors that evaluate this round."""
        # All present SuperNodes are asked: measuring needs no training, and all write checkpoints.
        self._latents = Latents(server_round + 1)
        hosted = self.numbers(self.session.hosted())
        nobody = dict.fromkeys(hosted, NOBODY)
        is_last = server_round >= self.session.rounds
        drawn = nobody if is_last else self._drawn(server_round + 1, hosted)
        measured = hosted if self.evaluates(server_round) else nobody
        asked = {node: (drawn[node], measured[node]) for node in hosted}
        self._ask(asked, saves=self.session.is_due(server_round))

    def _drawn(self, server_round: int, hosted: Mapping[int, IntArray]) -> dict[int, IntArray]:
        takes_part = np.zeros(self.users.size, bool)
        takes_part[self.drawn(server_round)] = True
        return {node: users[takes_part[users]] for node, users in hosted.items()}

    def _ask(self, asked: Mapping[int, tuple[IntArray, IntArray]], *, saves: bool = False) -> None:
        """Ask SuperNodes for vectors of users that train, and of users that are measured."""
        if not asked:
            return
        session, settings, latents = self.session, self.users.settings, self._latents
        copied, copy = self._copy(latents.server_round, list(asked))
        self.requests = {
            node: LatentRequest(
                latents.server_round,
                users,
                measured,
                settings,
                self.users.advance(node, copied, copy),
                # Without dropout one vector will do for both.
                trains=bool(users.size) and (settings.dropout > 0 or not measured.size),
                checkpoint=saves,
                run=session.checkpoints.run,
            )
            for node, (users, measured) in asked.items()
        }
        latents.requests |= self.requests
        contents = {node: request.to_record() for node, request in self.requests.items()}
        for node, entries in self.beside(latents.server_round, list(contents)).items():
            local = contents[node].config_records[CONFIG]
            contents[node][CONFIG] = ConfigRecord({**local, **entries})
        replies = session.exchange.send(
            contents,
            server_round=latents.server_round,
            timeout=session.timeout,
            read=self.read,
            max_reply_bytes=self.reply_bytes(),
        )
        self.answers, latents.rejected = replies.values, replies.rejected
        session.members.note(replies.rejected)
        for node, reply in replies.values.items():
            request = self.requests[node]
            self.users.took_step(node, request)
            if reply.measured is not None:
                self.server.receive(torch.from_numpy(request.measured), _tensor(reply.measured))
            if reply.latent is not None:
                latents.came[node] = reply.latent
            elif reply.measured is not None:
                latents.came[node] = reply.measured[np.isin(request.measured, request.users)]

    def read(self, node: int, content: RecordDict) -> LatentReply:
        request = self.requests[node]
        return LatentReply.read(
            content,
            server_round=request.server_round,
            layer_round=request.advance.layer_round,
            trains=request.trains,
            measures=bool(request.measured.size),
            p=request.users.size,
            m=request.measured.size,
            h=request.settings.latent_size,
        )

    def reply_bytes(self) -> int:
        users = (one.users.size + one.measured.size for one in self.requests.values())
        return reply_bytes(max(users, default=0) * self.users.settings.latent_size)

    def _copy(self, server_round: int, nodes: Sequence[int]) -> tuple[int, Bytes | None]:
        """Fetch a copy of the layer if a SuperNode needs it; return the copy's round, too."""
        users = self.users
        if all(map(users.can_go_on, nodes)):
            return NEVER, None
        hosted = self.session.hosted()
        if not any(map(users.can_go_on, hosted)):
            users.go_back(hosted)
        request = CopyRequest(users.settings)
        for donor in filter(users.can_go_on, hosted):
            reply = self.ask_one(donor, server_round, "train.copy_layer", request, CopyReply.read)
            if reply is not None and reply.layer_round == users.at[donor]:
                users.ledger.count("up", "copy", reply.copy.nbytes)
                return reply.layer_round, reply.copy
        return NEVER, None

    def ask_one(
        self,
        node: int,
        server_round: int,
        message_type: str,
        request: Message,
        read: Callable[[RecordDict], T],
    ) -> T | None:
        """Ask one SuperNode, and return its answer if it gives one."""
        replies = self.session.send(
            {node: request.to_record()},
            server_round,
            lambda _, content: read(content),
            message_type=message_type,
            max_reply_bytes=setup_bytes(),
        )
        return replies.values.get(node)

    # Step 3

    def _losses(self, server_round: int, latents: Latents) -> tuple[dict[str, float], Tensor]:
        server, device = self.server, self.server.device
        heard = torch.zeros(server.num_nodes, dtype=torch.bool, device=device)
        came = [
            (torch.from_numpy(latents.requests[node].users), _tensor(latent))
            for node, latent in latents.came.items()
        ]
        for users, latent in came:
            unknown = ~server.known.cpu()[users]
            if unknown.any():  # the first word from them
                server.receive(users[unknown], latent[unknown])
        mixed = server.latent.clone()
        for users, latent in came:
            mixed[users.to(device)] = latent.to(device)
            heard[users.to(device)] = True
        return server.gradients(server_round, mixed, heard)

    # The run

    def finish(self, server_round: int) -> None:
        content = RecordDict({CONFIG: ConfigRecord({SERVER_ROUND: server_round})})
        self.session.tell_all(server_round, content, "train.finish")

    def load_state(self, state: StateDict) -> None:
        """Go on from ``state``'s result; vectors that were asked for ahead are asked for again."""
        super().load_state(state)
        self._latents = Latents()


def _tensor(latent: NDArray[np.generic]) -> Tensor:
    return torch.tensor(latent, dtype=torch.float32)


# Masked ------------------------------------------------------------------------------------------


class MaskedGradientRelay(SummedGradientRelay):
    """Server of nFedGNN with one first layer, for clients that are ``MaskedLayerClient``.

    Parameters
    ----------
    *data, **more
        As of ``SummedGradientRelay``. ``registry`` is the file of the SuperNodes' registered keys,
        for clients that do not trust the server (``trust="malicious-server"``).
    """

    form: ClassVar = {"share": SUMMED, "aggregation": MASKED}

    def membership(self) -> CommonMembership:
        registry = self.section.registry
        # Under pads two sums tell the server nothing, however few SuperNodes they differ by.
        self._parties = None if registry is None else PartySums(registry, differ_by=1)
        return CommonMembership(self.users, MaskedEnrolment, self._check)

    def _check(self, answer: MaskedEnrolment) -> None:
        """Refuse a SuperNode whose public key no other SuperNode would take."""
        if self._parties is not None:
            run = str(self.session.exchange.grid.run.run_id).encode()
            try:
                check_signed(self._parties.registry, run, answer.public, answer.signed_by)
            except RefusedError as error:
                raise MalformedReplyError(str(error)) from error

    @cached_property
    def sums(self) -> SecureSum:
        return SecureSum(
            self.session.exchange,
            limit=self.section.limit,
            resolution=2.0**-LEAST_FRACTION_BITS,
            server=self._parties or SumServer(dropout=0.0),
            timeout=self.session.timeout,
            guard=True,
        )

    def load_state(self, state: StateDict) -> None:
        """Go on from what ``state`` returned; keys of sums are made anew."""
        super().load_state(state)
        if self._parties is None:
            self.__dict__.pop("sums", None)

    def beside(self, server_round: int, nodes: Sequence[int]) -> dict[int, Config]:
        """Have the common key sealed for SuperNodes that do not have it."""
        keys, hosted = self.members.answers, list(self.session.hosted())
        holders = [node for node in hosted if keys[node].key_check.any()]
        checks = {node: keys[node].key_check.tobytes() for node in holders}
        having = [node for node in holders if checks[node] == checks[holders[0]]]
        lacking = [node for node in nodes if node not in having]
        for donor in (having or hosted) if lacking else ():
            others = [node for node in lacking if node != donor]
            public = np.array([keys[node].public for node in others], np.uint8).reshape(-1, 32)
            signed = None
            if self._parties is not None:
                rows = [keys[node].signed_by for node in others]
                signed = np.array(rows, np.uint8).reshape(-1, SIGNED_BY)
            request = ShareKeyRequest(public, not holders, signed)
            read = partial(ShareKeyReply.read, k=len(others))
            reply = self.ask_one(donor, server_round, "train.share_key", request, read)
            if reply is not None:
                for node in (donor, *others):
                    keys[node].key_check = reply.key_check
                sender = keys[donor].public, keys[donor].signed_by
                return {
                    node: KeyPacket(packet, *sender).to_config()
                    for node, packet in zip(others, reply.packets, strict=True)
                }
        return {}

    def add(self, server_round: int, requests: Mapping[int, GradientRequest]) -> HiddenSum | NoSum:
        """Have the sums added up under masks; return the padded sum, or why there is none."""
        session, sums = self.session, self.sums
        clients = session.members.clients
        count, checks = (IN_SUM, 0) if self._parties is None else (AS_PARTY, CHECKS)
        asked = {node: clients[node][:count] for node in requests}
        every = {one for local in asked.values() for one in local}
        if set(sums.clients) != every:
            sums.give_up()
        sums.prepare(server_round, asked)
        length = int(np.prod(self.users.weight_shape)) + checks
        ring = sums.ring
        entries = sums.requests(
            length, GRADIENTS, detail_of(server_round, self.users.last), padded=True
        )
        contents = {node: requests[node].to_record() for node in entries}
        for node, content in contents.items():
            content[CONFIG] = ConfigRecord({**content.config_records[CONFIG], **entries[node]})
        replies = session.send(
            contents,
            server_round,
            sums.take,
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(length, IN_SUM),
        )
        missing = [node for node in contents if node not in replies.values]
        for node in replies.values:
            self.users.added_up(requests[node].users, 8 * length)
        result = sums.close_padded(server_round)
        rejected = sums.take_rejected()
        session.rejected += rejected
        if missing:
            return NoSum(MISSING % len(missing), tuple(missing))
        if isinstance(result, Skipped):
            silent = tuple({one.node_id for one in rejected} & requests.keys())
            return NoSum(str(result.reason), silent)
        if lost := every.difference(result.contributors.tolist()):
            text = f"{len(lost)} of {len(every)} parties were left out"
            nodes = (node for node, local in asked.items() if not lost.isdisjoint(local))
            return NoSum(text, tuple(nodes))
        mask = MaskRequest.from_config(next(iter(entries.values())))
        return HiddenSum(
            result.contributors.size, mask.run_id, mask.server_round, ring, result.total
        )
