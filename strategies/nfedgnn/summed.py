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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.config.rules import BELOW_ONE
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import NoClientsError
from flower_graph.records.participation import Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.server.round_strategy import OwnRounds
from flower_graph.server.session import Session
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.common_layer import CommonSettings, bounded
from flower_graph.strategies.nfedgnn.common_messages import (
    CopyReply,
    CopyRequest,
    GradientRequest,
    HiddenSum,
    LatentReply,
    LatentRequest,
    SumReply,
)
from flower_graph.strategies.nfedgnn.common_state import (
    NEVER,
    CommonBook,
    CommonMembership,
    Latents,
    NoSum,
)
from flower_graph.strategies.nfedgnn.config import StrategyConfig
from flower_graph.strategies.nfedgnn.link_server import HeldLinks
from flower_graph.strategies.nfedgnn.relay_strategy import RelayStrategy
from flower_graph.strategies.nfedgnn.server_model import (
    Losses,
    ServerData,
    scheduled,
)
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.exchange import Replies, few
from flower_graph.wire.fields import Bytes
from flower_graph.wire.keys import CONFIG, SERVER_ROUND
from flower_graph.wire.ledger import reply_bytes, setup_bytes
from flower_graph.wire.numpy_client import Config

USUAL = StrategyConfig()  # where the defaults stand
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

    def __init__(
        self,
        data: ServerData,
        server_model: nn.Module,
        *,
        latent_size: int,
        user_bias: bool = False,
        reg_weight: float = 0.0,
        learning_rate: float = USUAL.learning_rate,
        weight_decay: float = USUAL.weight_decay,
        feature_dropout: float = 0.0,
        evaluate_every: int = USUAL.evaluate_every,
        schedule: str = USUAL.schedule,
        gradient_norm: float = USUAL.gradient_norm,
        server_average: float = USUAL.server_average,
        participation: float = USUAL.participation,
        seed: int = 0,
        device: str = "cpu",
        min_nodes: int = USUAL.min_nodes,
        limit: float = USUAL.limit,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        links: HeldLinks | None = None,
    ) -> None:
        BELOW_ONE.check("feature_dropout", feature_dropout)
        self.serve(
            data,
            server_model,
            links,
            schedule=schedule,
            learning_rate=learning_rate,
            evaluate_every=evaluate_every,
            latent_size=latent_size,
            reg_weight=reg_weight,
            weight_decay=weight_decay,
            gradient_norm=gradient_norm,
            average=server_average,
            seed=seed,
            device=resolve_device(device),
        )
        settings = CommonSettings(latent_size, user_bias, weight_decay, seed, feature_dropout)
        self.users: CommonBook = CommonBook(self.server.num_nodes, settings)
        self._latents, self.limit = Latents(), limit
        super().__init__(
            Session(
                self.membership(),
                min_nodes=min_nodes,
                participation=participation,
                seed=seed,
                checkpoint_dir=checkpoint_dir,
                checkpoint_every=checkpoint_every,
            )
        )

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
        there = session.gather(server_round, "no SuperNode hosts users of this graph")
        hosted = self.numbers(there)
        latents = self._gathered(server_round, hosted)
        answered = {node: latents.asked[node] for node in latents.came}
        rate = scheduled(self.schedule, self.learning_rate, server_round, session.rounds)
        losses, gradient = self._losses(server_round, latents)
        for node, local in answered.items():
            self.users.used(local, apart=node in latents.apart)
        void = self._add_up(server_round, answered, gradient, rate)
        why = "" if void is None else str(void)
        who = self._participation([] if why else list(answered), why)
        if void is not None:
            members = session.members
            assert isinstance(members, CommonMembership)
            members.stopped(void.nodes, answered)
        self.users.ended(server_round)
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
        pool = self.users.roster.pool(server_round)
        drawn = pool[self.session.draw(pool.size, server_round)]
        takes_part = np.zeros(self.users.roster.size, bool)
        takes_part[drawn] = True
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

    def _participation(self, nodes: Sequence[int], no_use: str) -> Participation:
        unhosted = self.users.unhosted(self.session.members.numbers())
        answered = self.session.clients_of(nodes)
        return self.session.participation(answered, left_out=unhosted, no_use=no_use)

    # The run

    def finish(self, server_round: int) -> None:
        content = RecordDict({CONFIG: ConfigRecord({SERVER_ROUND: server_round})})
        self.session.tell_all(server_round, content, "train.finish")

    def load_state(self, state: StateDict) -> None:
        """Go on from ``state``'s result; vectors that were asked for ahead are asked for again."""
        super().load_state(state)
        self._latents = Latents()

    def fixed_settings(self) -> dict[str, object]:
        return {**self.users.settings._asdict(), "learning_rate": self.learning_rate}


def _tensor(latent: NDArray[np.generic]) -> Tensor:
    return torch.tensor(latent, dtype=torch.float32)


def _users(numbers: IntArray) -> Tensor:
    return torch.from_numpy(numbers)
