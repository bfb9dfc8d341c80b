"""nFedGNN: node-level federated learning by relaying the gradients of latent vectors.

"One Node Per User: Node-Level Federated Learning for Graph Neural Networks" (anonymous authors).
Every client, a *user*, is one node of a graph: it holds one feature vector ``x_i`` and its own
model ``f_u(theta_i, .)``. The server holds the graph ``A``, the labels of some nodes and every
layer but the first linear map, ``f_s(theta_s, A, .)``.

Round ``t`` of Algorithm 1, in one exchange instead of two. The message that asks for the latent
vectors of round ``t`` carries the gradients of round ``t - 1``:

1. server -> user ``i``: the gradient of the loss by the last latent vector of ``i``;
2. user ``i``: back-propagates it and takes an Adam step on ``theta_i`` (lines 11 and 12);
3. user ``i`` -> server: ``x'_i = f_u(theta_i, x_i)`` (lines 5 and 6);
4. server: ``Z = f_s(theta_s, A, X')``, ``L = CE(Z, Y) + lambda L_reg`` (equations 5 to 7), the
   gradients of ``L`` by every ``x'_i``, and an Adam step on ``theta_s`` (lines 9 and 8; the paper
   steps first, here both come from one pass).

One more message after the last round delivers the last gradients. At the end of step 4 the server
evaluates its present weights and latent vectors.

*Absent users.* A user that is not asked or does not answer keeps its weights; the server goes on
with its last latent vector, and its gradient waits until it is back. A user that has never
answered has no edges until it does.

*Averaging* (``average_every = K``). In every K-th round the users also send their weights; the
next message carries the mean, which a user takes over before its step. CNFGNN, the paper's
baseline, is ``K = 1`` over all users with ``reg_weight = 0``.
"""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import RecordDict
from torch import nn

from flower_graph.errors import NoClientsError
from flower_graph.records.rounds import RoundReport
from flower_graph.strategies.nfedgnn.messages import RelayReply, RelayRequest
from flower_graph.strategies.nfedgnn.relay_strategy import DEFAULTS, RelayStrategy
from flower_graph.strategies.nfedgnn.server_model import ServerData
from flower_graph.strategies.nfedgnn.server_state import OwnTable
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.exchange import Replies


class SplitGradientRelay(RelayStrategy[RelayRequest, RelayReply]):
    """Server of nFedGNN, for clients that answer as ``NodeClient`` does.

    Parameters
    ----------
    data : Data
        ``edge_index``, ``y``, ``train_mask`` and, for the report, ``val_mask``, ``test_mask``; a
        PyG ``Data`` will do. Features are not looked at.
    server_model : Module
        ``f_s``, called as ``server_model(latent, edge_index)``; returns logits ``[n, c]``.
    latent_size : int
        Length of a latent vector, ``h``.
    user_bias : bool
        Whether the users' linear map has a bias.
    reg_weight : float
        ``lambda`` of equation 7.
    learning_rate, weight_decay : float
        Of Adam, on both sides.
    schedule : str
        The learning rate over the rounds, on both sides: ``"constant"``; ``"cosine"``, down to
        nearly 0 in the last; or ``"warmup-cosine"``, which first rises for a tenth of the rounds.
    gradient_norm : float
        L2 norm to which a longer gradient, of the server's weights and all latent vectors
        together, is scaled down; 0 for none.
    server_average : float
        Share of an exponential average of the server's weights that stays in a round, below 1;
        the average predicts, is evaluated and is what the server has learnt. 0: the weights do.
    evaluate_every : int
        Rounds between evaluations; the last round is evaluated always. In the others the report
        has losses, and no accuracy.
    participation : float
        Share of the users asked each round, above 0 and at most 1.
    average_every : int
        Average the users' weights every so many rounds; 0 for never.
    average_over : str
        ``"holders"``: a feature's row over the users that have the feature, the bias not at all;
        ``"all"``: every row over all users, which needs full participation.
    seed : int
        Of initial weights, dropout and the choice of users.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``, for the server's model.
    min_nodes : int
        SuperNodes to wait for before a round.
    checkpoint_dir, checkpoint_every : Path, int
        Where and every how many rounds to save everything; 0 for never.
    links : HeldLinks, optional
        The edges that are held out if links are learnt; the model then gives a row for each node.

    Notes
    -----
    A client must answer ``query`` with the users it hosts, ``train`` with their latent vectors
    after applying the gradients that the message brings, and ``train.finish`` after applying the
    last ones (``messages.py`` beside this file).
    """

    users: OwnTable

    def __init__(
        self,
        data: ServerData,
        server_model: nn.Module,
        *,
        average_every: int = DEFAULTS.average_every,
        average_over: str = DEFAULTS.average_over,
        **settings: Any,  # the other parameters
    ) -> None:
        self.average_every, self.average_over = average_every, average_over
        super().__init__(data, server_model, **settings)
        if self.users.settings.average_over == "all" and self.session.share < 1:
            raise ValueError("average_over: 'all' needs participation 1, all users step together")

    def table(self, settings: UserSettings) -> OwnTable:
        settings = settings._replace(average_over=self.average_over)
        return OwnTable(self.server.num_nodes, settings, self.average_every)

    def ask(self, server_round: int) -> dict[int, RelayRequest]:
        """Step 1: ask this round's users for latent vectors, with the gradients that wait."""
        requests = self.users.requests(
            server_round,
            self.hosted(server_round),
            self.drawn(server_round),
            checkpoint=self.session.is_due(server_round),
            run=self.session.checkpoints.run,
        )
        if not requests:
            no_user = "no connected SuperNode hosts a user who takes part"
            raise NoClientsError(f"round {server_round}: {no_user}")
        return requests

    def read(self, node: int, content: RecordDict) -> RelayReply:
        return RelayReply.from_record(content, self.requests[node], self.users.weight_shape)

    def reply_bytes(self) -> int:
        return self.users.reply_bytes(self.requests.values())

    def learn(self, server_round: int, replies: Replies[RelayReply]) -> RoundReport:
        """Do steps 3 and 4: take in latent vectors, step the server, keep gradients for users."""
        self.session.must_have(server_round, replies)
        answered = {node: self.requests[node] for node in replies.values}
        for node, reply in replies.values.items():
            request = answered[node]
            self.server.receive(
                torch.from_numpy(request.users), torch.tensor(reply.latent, dtype=torch.float32)
            )
            # Of a million users neither is to take room while the server steps.
            reply.latent, request.gradient = reply.latent[:0].copy(), request.gradient[:0].copy()
        is_frozen = self.users.roster.is_alone(server_round)
        rate = self.step_size(server_round)
        losses, gradient = self.server.step(server_round, rate, is_frozen=is_frozen)
        self.users.delivered(answered)
        self.users.keep_gradients(server_round, answered, gradient.cpu().numpy(), rate)
        self.users.average(server_round, list(replies.values.values()))
        return self.measure(server_round, self.took_part(answered), losses)

    def finish(self, server_round: int) -> None:
        self.requests = self.users.requests(server_round, self.numbers(self.session.present()))
        replies = self.send(server_round, "train.finish")
        self.users.delivered({node: self.requests[node] for node in replies.values})
