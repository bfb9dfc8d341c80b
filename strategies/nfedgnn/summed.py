"""nFedGNN whose users have one first layer: the training of one network in one place, exactly.

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

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.config.rules import BELOW_ONE
from flower_graph.errors import MalformedReplyError, NoClientsError, RefusedError
from flower_graph.records.rounds import RoundReport
from flower_graph.secure.common_key import (
    NO_KEY,
    SIGNED_BY,
    KeyPacket,
    ShareKeyReply,
    ShareKeyRequest,
    check_signed,
)
from flower_graph.secure.parties.server import PartySums
from flower_graph.secure.relayed import CHECKS
from flower_graph.secure.sum.messages import MaskRequest
from flower_graph.secure.sum.round import Skipped
from flower_graph.secure.sum.server import SumServer
from flower_graph.secure.sum.service import SecureSum
from flower_graph.server.round_strategy import OwnRounds
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.common_client import (
    AS_PARTY,
    GRADIENTS,
    IN_SUM,
    LEAST_FRACTION_BITS,
    detail_of,
)
from flower_graph.strategies.nfedgnn.common_layer import bounded
from flower_graph.strategies.nfedgnn.messages import (
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
from flower_graph.strategies.nfedgnn.relay_strategy import DEFAULTS, RelayStrategy
from flower_graph.strategies.nfedgnn.server_model import Losses, ServerData
from flower_graph.strategies.nfedgnn.server_state import (
    NEVER,
    CommonMembership,
    CommonTable,
    Latents,
    NoSum,
)
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.exchange import Replies, few
from flower_graph.wire.fields import Bytes
from flower_graph.wire.keys import CONFIG, SERVER_ROUND
from flower_graph.wire.ledger import reply_bytes, setup_bytes
from flower_graph.wire.numpy_client import Config

NOBODY: IntArray = np.zeros(0, np.int64)


class SummedGradientRelay(
    OwnRounds[LatentRequest, LatentReply], RelayStrategy[LatentRequest, LatentReply]
):
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

    usual_reg_weight = 0.0
    users: CommonTable

    def __init__(
        self,
        data: ServerData,
        server_model: nn.Module,
        *,
        feature_dropout: float = 0.0,
        limit: float = DEFAULTS.limit,
        **settings: Any,  # the other parameters
    ) -> None:
        BELOW_ONE.check("feature_dropout", feature_dropout)
        self.feature_dropout, self.limit = feature_dropout, limit
        self._latents = Latents()
        super().__init__(data, server_model, **settings)

    def table(self, settings: UserSettings) -> CommonTable:
        return CommonTable(self.server.num_nodes, settings._replace(dropout=self.feature_dropout))

    # What is otherwise where sums are masked

    def membership(self) -> CommonMembership:
        return CommonMembership(self.users)

    def beside(self, server_round: int, nodes: Sequence[int]) -> dict[int, Config]:
        return {}

    def add(
        self, server_round: int, requests: Mapping[int, GradientRequest]
    ) -> FloatArray | HiddenSum | NoSum:
        """Ask for the sums of gradients; return the whole sum, or why there is none."""
        users, session = self.users, self.session
        replies = session.send(
            {node: request.to_record() for node, request in requests.items()},
            server_round,
            lambda node, content: SumReply.from_record(content, requests[node], users.weight_shape),
            message_type="train.add_up",
            max_reply_bytes=reply_bytes(int(np.prod(users.weight_shape))),
        )
        total = np.zeros(users.weight_shape)
        for node in session.members.present(replies.values):
            total += bounded(replies.values[node].total, self.limit)
            users.added_up(requests[node].users, replies.values[node].total.nbytes)
        missing = [node for node in requests if node not in replies.values]
        return NoSum.unanswered(missing) if missing else total.astype(np.float32)

    def round(self, server_round: int) -> RoundReport:
        """Run a round: steps 2 to 5, then 1 and 2 of the next."""
        session = self.session
        latents = self._gathered(server_round, self.hosted(server_round))
        answered = {node: latents.asked[node] for node in latents.came}
        rate = self.step_size(server_round)
        losses, gradient = self._losses(server_round, latents)
        for node, local in answered.items():
            self.users.used(local, apart=node in latents.apart)
        void = self._add_up(server_round, answered, gradient, rate)
        why = "" if void is None else str(void)
        who = self.took_part([] if why else answered, why)
        if void is not None:
            members = session.members
            assert isinstance(members, CommonMembership)
            members.stopped(void.nodes, answered)
        self.users.round = server_round
        self._look_ahead(server_round)
        report = self.measure(server_round, who, losses)
        report.skipped = why
        return report

    # Steps 1 and 2

    def _gathered(self, server_round: int, hosted: Mapping[int, IntArray]) -> Latents:
        """Return a round's latent vectors: asked for ahead, and from new SuperNodes."""
        session, latents = self.session, self._latents
        if latents.server_round != server_round:
            latents = Latents(server_round)
        latents.keep(list(hosted))
        session.rejected += few(latents.rejected)
        new = [node for node in hosted if node not in latents.asked]
        users = self._drawn(server_round, {node: hosted[node] for node in new})
        self._ask(latents, {node: (drawn, NOBODY) for node, drawn in users.items() if drawn.size})
        session.asked = {n: users for n, users in latents.asked.items() if users.size}
        if not session.asked:
            no_user = "no connected SuperNode hosts a user who takes part"
            raise NoClientsError(f"round {server_round}: {no_user}")
        latents.came = {n: latent for n, latent in latents.came.items() if latent.size}
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
        self._ask(self._latents, asked, saves=self.session.is_due(server_round))

    def _drawn(self, server_round: int, hosted: Mapping[int, IntArray]) -> dict[int, IntArray]:
        takes_part = np.zeros(self.users.roster.size, bool)
        takes_part[self.drawn(server_round)] = True
        return {node: users[takes_part[users]] for node, users in hosted.items()}

    def _ask(
        self,
        latents: Latents,
        asked: Mapping[int, tuple[IntArray, IntArray]],
        *,
        saves: bool = False,
    ) -> None:
        session, settings = self.session, self.users.settings
        if not asked:
            return
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
        contents = {node: request.to_record() for node, request in self.requests.items()}
        for node, entries in self.beside(latents.server_round, list(contents)).items():
            local = contents[node].config_records[CONFIG]
            contents[node][CONFIG] = ConfigRecord({**local, **entries})
        replies = session.exchange.send(
            contents,
            server_round=latents.server_round,
            timeout=session.timeout,
            read=lambda node, content: LatentReply.from_record(content, self.requests[node]),
            max_reply_bytes=self.reply_bytes(),
        )
        self.answers = replies.values
        session.members.note(replies.rejected)
        latents.rejected = replies.rejected
        for node, request in self.requests.items():
            latents.asked[node] = request.users
        for node, reply in replies.values.items():
            latents.came[node] = self._take(node, reply)
            if reply.latent is not None:
                latents.apart.add(node)

    def _take(self, node: int, reply: LatentReply) -> FloatArray:
        """Take in a SuperNode's answer; return the vectors that its users train with."""
        request = self.requests[node]
        self.users.took_step(node, request)
        if reply.measured is not None:
            self.server.receive(torch.from_numpy(request.measured), _tensor(reply.measured))
        if reply.latent is not None:
            return reply.latent
        if reply.measured is None or not request.users.size:
            return np.zeros((0, self.users.settings.latent_size), np.float32)
        latent: FloatArray = reply.measured[np.isin(request.measured, request.users)]
        return latent

    def reply_bytes(self) -> int:
        users = (one.users.size + one.measured.size for one in self.requests.values())
        return reply_bytes(max(users, default=0) * self.users.settings.latent_size)

    def _copy(self, server_round: int, nodes: Sequence[int]) -> tuple[int, Bytes | None]:
        if all(map(self.users.can_go_on, nodes)):
            return NEVER, None
        hosted = self.session.hosted()
        if not any(map(self.users.can_go_on, hosted)):
            self.users.go_back(hosted)
        request = CopyRequest(self.users.settings).to_record()
        for donor in filter(self.users.can_go_on, hosted):
            replies = self.session.send(
                {donor: request},
                server_round,
                lambda _, content: CopyReply.read(content),
                message_type="train.copy_layer",
                max_reply_bytes=setup_bytes(),
            )
            for reply in replies.values.values():
                if reply.layer_round == self.users.at[donor]:
                    self.users.ledger.count("up", "copy", reply.copy.nbytes)
                    return reply.layer_round, reply.copy
        return NEVER, None

    # Steps 3 to 5

    def _losses(self, server_round: int, latents: Latents) -> tuple[Losses, Tensor]:
        """Do step 3: the loss over the users that answered, and the gradients by their vectors."""
        server = self.server
        heard = torch.zeros(server.num_nodes, dtype=torch.bool, device=server.device)
        came = [(_users(latents.asked[n]), _tensor(x)) for n, x in latents.came.items()]
        for users, latent in came:
            unknown = ~server.known.cpu()[users]
            if unknown.any():  # the first word from them
                server.receive(users[unknown], latent[unknown])
        mixed = server.latent.clone()
        for users, latent in came:
            mixed[users.to(server.device)] = latent.to(server.device)
            heard[users.to(server.device)] = True
        return server.gradients(server_round, mixed, heard)

    def _add_up(
        self, server_round: int, answered: Mapping[int, IntArray], gradient: Tensor, rate: float
    ) -> NoSum | None:
        """Do steps 4 and 5; return the reason if nobody steps."""
        users, gradients = self.users, gradient.cpu().numpy()
        requests = {
            node: GradientRequest(server_round, local, gradients[local], users.last, users.settings)
            for node, local in answered.items()
        }
        total = self.add(server_round, requests)
        if isinstance(total, NoSum):
            return total
        self.server.move(server_round, rate)
        users.made(server_round, total, rate)
        return None

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


def _users(numbers: IntArray) -> Tensor:
    return torch.from_numpy(numbers)


# Masked ------------------------------------------------------------------------------------------


def _shared(count: int, node: int, content: RecordDict) -> ShareKeyReply:
    return ShareKeyReply.read(content, k=count)


class MaskedMembership(CommonMembership):
    """The users of each SuperNode, and which SuperNodes have the common key."""

    answer_type = MaskedEnrolment

    def __init__(self, state: CommonTable, check: Callable[[MaskedEnrolment], None]) -> None:
        super().__init__(state)
        self._check = check
        self.public: dict[int, Bytes] = {}  # key of each SuperNode
        self.signed_by: dict[int, Bytes | None] = {}
        self.checks: dict[int, bytes] = {}  # hash of the common key that it has

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        answer = super().read(node, content)
        assert isinstance(answer, MaskedEnrolment)
        self._check(answer)
        return answer

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        super().enrolled(node, answer)
        assert isinstance(answer, MaskedEnrolment)
        self.public[node], self.checks[node] = answer.public, answer.key_check.tobytes()
        self.signed_by[node] = answer.signed_by


class MaskedGradientRelay(SummedGradientRelay):
    """Server of nFedGNN with one first layer, for clients that are ``MaskedLayerClient``.

    Parameters
    ----------
    *data, **more
        As of ``SummedGradientRelay``.
    registry : Path or str, optional
        File of the SuperNodes' registered keys, for clients that do not trust the server.
    """

    def __init__(
        self,
        *data: Any,  # Any: arguments are those of its parent
        registry: Path | str | None = None,
        **more: Any,
    ) -> None:
        # Under pads two sums tell the server nothing, however few SuperNodes they differ by.
        self._parties = None if registry is None else PartySums(registry, differ_by=1)
        super().__init__(*data, **more)

    def membership(self) -> CommonMembership:
        return MaskedMembership(self.users, self._check)

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
            limit=self.limit,
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
        members = self.session.members
        assert isinstance(members, MaskedMembership)
        hosted = list(self.session.hosted())
        holders = [node for node in hosted if members.checks[node] != NO_KEY]
        check = members.checks[holders[0]] if holders else NO_KEY
        has_key = {node: bool(holders) and members.checks[node] == check for node in nodes}
        lacking = [node for node in nodes if not has_key[node]]
        if not lacking:
            return {}
        for donor in [node for node in holders if members.checks[node] == check] or hosted:
            others = [node for node in lacking if node != donor]
            public = np.array([members.public[node] for node in others], np.uint8).reshape(-1, 32)
            replies = self.session.send(
                {donor: ShareKeyRequest(public, not holders, self._signed(others)).to_record()},
                server_round,
                partial(_shared, len(others)),
                message_type="train.share_key",
                max_reply_bytes=setup_bytes(),
            )
            for reply in replies.values.values():
                members.checks |= dict.fromkeys([donor, *others], reply.key_check.tobytes())
                sender = members.public[donor], members.signed_by[donor]
                return {
                    node: KeyPacket(packet, *sender).to_config()
                    for node, packet in zip(others, reply.packets, strict=True)
                }
        return {}

    def _signed(self, nodes: Sequence[int]) -> Bytes | None:
        members = self.session.members
        assert isinstance(members, MaskedMembership)
        if self._parties is None:
            return None
        rows = [members.signed_by[node] for node in nodes]
        return np.array(rows, np.uint8).reshape(-1, SIGNED_BY)

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
            return NoSum.unanswered(missing)
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
