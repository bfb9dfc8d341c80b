"""nFedGNN's server: what is asked of the users and what comes back, state, outputs.

``algorithm.py`` has the round itself and both halves as tensors; read it first. A *layer* here
carries the users' half: `OwnLayer` maps that are each user's own, averaged or not, `CommonLayer`
one map of all users, whose gradients a sum adds up: `PlainSum`, or `MaskedSum`, which the server
cannot read.
"""

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

from flower_graph.config.common import LINKS
from flower_graph.config.rules import at_least, require
from flower_graph.data.description import server_graph
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, MalformedReplyError
from flower_graph.ops.graph import sorted_edges
from flower_graph.ops.links import LinkSplit
from flower_graph.outputs.build import form_of
from flower_graph.outputs.client import node_figures
from flower_graph.outputs.files import (
    NO_CLIENT,
    Embeddings,
    KnownLinks,
    Predictions,
    Snapshot,
    role_of,
)
from flower_graph.records.participation import Participation
from flower_graph.records.rounds import RoundReport
from flower_graph.secure import common_key
from flower_graph.secure.ring import CHECKS
from flower_graph.server.membership import Membership
from flower_graph.server.round_loop import RoundStrategy, Session
from flower_graph.server.sums import PartySums, SecureSum, SumServer
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.algorithm import (
    RelayServer,
    ServerGraph,
    UserSettings,
    bounded,
    mean_weights,
    relay_round,
    scheduled,
)
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
    LatentReply,
    LatentRequest,
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
from flower_graph.strategies.nfedgnn.links import LinkRelayServer, held_links
from flower_graph.wire.arrays import FloatArray, IntArray
from flower_graph.wire.codec import Message, Resume, as_record
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
MOST_STOPPED = 2  # steps that a SuperNode may stop before it is left out
T = TypeVar("T")
Request = Message | Mapping[str, Any]  # Any: entries of a record


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
        at_least(1).check("latent_size", latent_size)
        self.config, self.section, model = config, config.strategy, config.model
        section = self.section
        is_common, over = section.share == SUMMED, section.average_over
        dropout, decay = model.dropout if is_common else 0.0, section.weight_decay
        users = UserSettings(latent_size, model.user_bias, decay, config.seed, over, dropout)
        self.server = server_of(data, server_model, config, latent_size)
        self.num_classes = self.server.data.num_classes
        self._name(data)
        form = CommonLayer if is_common else OwnLayer
        self.layer: OwnLayer | CommonLayer = form(self, users)
        places = checkpoint_dir, checkpoint_every
        super().__init__(Session(self.layer, section, config.seed, *places))

    def _name(self, data: Any) -> None:
        """Note what the nodes and the classes are called in outputs; nodes by default by number."""
        count, names = len(self.server.known), getattr(data, "names", None)
        self.nodes = np.arange(count) if names is None else np.array(list(names))
        self.classes: Sequence[str] | None = getattr(data, "classes", None)

    # A round

    def round(self, server_round: int) -> RoundReport:
        """Run a round: the users' latent vectors, the server's step, what the users' step needs."""
        layer, server = self.layer, self.server
        rate = scheduled(self.section, server_round, self.session.rounds)
        is_frozen = layer.is_alone(server_round)
        losses, skipped = relay_round(layer, server, server_round, rate, is_frozen=is_frozen)
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
        answered = NOBODY if skipped else self.layer.asked_at(self.layer.answered)
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
            "server": state_of(self.server),
            "layer": self.layer.state_dict(),
            "right-then": self._right_in_best,
        }

    def load_state(self, state: StateDict) -> None:
        self.layer.load_state_dict(state["layer"])
        restore(self.server, state["server"])
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
        """Return the server's half of a run, of users that have answered."""
        server, whole, label = self.server, self.server.data.whole, self.server.data.y
        models = [form_of(server.eval_model, type(server.eval_model), NO_CLIENT)]
        if whole is not None:
            edges = whole[:, server.known[whole].all(0)].cpu().numpy()
            known = KnownLinks(np.full(edges.shape[1], NO_CLIENT), *self.nodes[edges])
            return Snapshot(None, models, self._rows(server.logits(whole)), known)
        rows = self._rows(server.latent)
        users = torch.from_numpy(rows.number)
        role = role_of(*(server.data.masks[name].cpu()[users] for name in ROLES))
        logits, label = server.logits().cpu()[users], label.cpu()[users]
        predictions = Predictions.of(logits, NO_CLIENT, rows.node, role, label, self.classes)
        return Snapshot(predictions, models, rows)

    def _rows(self, rows: Tensor) -> Embeddings:
        users = self.server.known.nonzero().flatten().cpu().numpy()
        client, is_public = np.full(len(users), NO_CLIENT), np.zeros(len(users), bool)
        return Embeddings(client, self.nodes[users], users, is_public, rows.cpu().numpy()[users])

    def figures(self) -> Iterator[list[str]]:
        """Give the lines of ``clients.csv``: each present user in the last and the best round."""
        server, best = self.server, self.best
        rounds = ("last", best.last, server.right), ("best", best.number, self._right_in_best)
        return node_figures(server.known, server.data.masks, rounds, self.layer.traffic)

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
        self.server.take(known_graph(data, self.server.model, self.config, left))
        self._name(data)


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


# The server's half -------------------------------------------------------------------------------


def server_of(data: Any, model: nn.Module, config: NFedGNNConfig, latent_size: int) -> RelayServer:
    """Build the server's half of a task, on its device."""
    model = model.to(resolve_device(config.device))
    kind = LinkRelayServer if config.task == LINKS else RelayServer
    return kind(model, known_graph(data, model, config), config, latent_size)


def known_graph(
    data: Any, model: nn.Module, config: NFedGNNConfig, left: Sequence[int] = ()
) -> ServerGraph:
    """Check the server's data, without users that left; where links are learnt hold out edges."""
    device, (edges, y, masks) = resolve_device(config.device), server_graph(data)
    n, present = y.shape[0], torch.ones_like(y, dtype=torch.bool)
    present[list(left)] = False
    masks = {name: (mask & present).to(device) for name, mask in masks.items()}
    if not masks["train"].any():
        raise DataError("train_mask: no node is marked; at least one labelled node is needed")
    if config.task != LINKS:
        # In 32 bits, if the model can use edges in that form
        in_order = sorted_edges(edges, n) if getattr(model, "takes_sorted", False) else None
        learnt, classes = (in_order or edges).to(device), 1 + int(y.max())
        return ServerGraph(learnt, y.to(device), masks, present.to(device), classes)
    # Labels and masks of nodes play no part
    split = LinkSplit(*(part.to(device) for part in vars(held_links(edges, n, config)).values()))
    nobody, whole = torch.zeros_like(present).to(device), edges.to(device)
    masks = dict.fromkeys(ROLES, nobody)
    return ServerGraph(split.messages, y.to(device), masks, present.to(device), 2, split, whole)


def state_of(server: RelayServer) -> dict[str, object]:
    """Return what a checkpoint has of the server's half."""
    has_average = server.eval_model is not server.model
    return {
        **({"average": server.eval_model.state_dict()} if has_average else {}),
        "model": server.model.state_dict(),
        "optimizer": server.optimizer.state_dict(),
        "latent": server.latent,
        "known": server.known,
    }


def restore(server: RelayServer, state: StateDict) -> None:
    """Go on from what `state_of` returned."""
    server.model.load_state_dict(state["model"])
    # A run without has none: what it has learnt is what is averaged from now on.
    if server.eval_model is not server.model:
        server.eval_model.load_state_dict(state.get("average", state["model"]))
    server.optimizer.load_state_dict(state["optimizer"])
    server.hold(state["latent"], state["known"])
    server.accuracy()  # there may be no later round to record which users are right


# The users' layer --------------------------------------------------------------------------------


class HostedLayer(Membership):
    """The server's half of the users' layer: who hosts which users, who is there, and bytes.

    A form has what `relay_round` needs, ``latents`` and ``prepare_step``, and ``finish``.
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
        self._begin(len(relay.server.known))

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

    def hosted(self, server_round: int) -> dict[int, IntArray]:
        """Wait for SuperNodes, enrol new ones, and return the users of each."""
        return self.users_of(self.relay.session.gather(server_round, UNHOSTED))

    def users_of(self, nodes: Iterable[int]) -> dict[int, IntArray]:
        every = self.numbers()
        return {node: every[node] for node in nodes}

    def asked_at(self, nodes: Iterable[int]) -> IntArray:
        """Return the users whose vectors some SuperNodes were asked for in this round."""
        asked = self.relay.session.asked
        return np.concatenate([NOBODY, *(asked[node] for node in nodes)])

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

    def send(
        self,
        server_round: int,
        requests: Mapping[int, Request],
        read: Callable[[int, RecordDict], T],
        most: int,  # bytes of a reply
        message_type: str = "train",
    ) -> Replies[T]:
        """Send a message to each SuperNode; leave out those without a good reply."""
        return self.relay.session.send(
            {node: as_record(self.relay._config, one) for node, one in requests.items()},
            server_round,
            read,
            message_type=message_type,
            max_reply_bytes=most,
        )

    def look_ahead(self, server_round: int) -> None:
        """Ask, after the step, for what the round's evaluation needs."""

    # Bytes

    def tally(self, way: str, kind: str, users: IntArray, nbytes: int) -> None:
        """Count bytes that some users, each as many, sent or were sent."""
        self.relay.session.ledger.count(way, kind, nbytes)
        self.traffic[users, UP if way == "up" else DOWN] += nbytes // max(1, users.size)

    def tally_vectors(self, way: str, kind: str, users: IntArray) -> None:
        self.tally(way, kind, users, users.size * self.settings.latent_size * FLOAT)

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


class OwnLayer(HostedLayer):
    """Users with a map each: gradients, and averaged weights if there are any, wait for users.

    A round is one exchange. The message that asks for the latent vectors of round ``t`` carries the
    gradients of round ``t - 1``; one more message after the last round delivers the last gradients.
    A user that is not asked or does not answer keeps its weights. The server goes on with its last
    latent vector, and its gradient waits until it is back. A user that has never answered has no
    edges until it does.
    """

    rows = (*HostedLayer.rows, "gradient", "gradient_round", "has_average")
    others = (*HostedLayer.others, "rate", "average", "average_round")
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
        drawn = self.drawn(server_round, self.hosted(server_round))
        # For a checkpoint every host is asked, even if none of its users takes part.
        saves, every = session.is_due(server_round), relay.section.average_every
        drawn = {node: users for node, users in drawn.items() if saves or users.size}
        # A mean of the newcomers alone would become everybody's.
        averages = every > 0 and server_round % every == 0 and not self.is_alone(server_round)
        relay.answers = self.answered = self._relay(server_round, drawn, averages, saves).values
        session.must_have(server_round, self.answered)
        for node, reply in relay.answers.items():
            request = relay.requests[node]
            server.receive(request.users, reply.latent)
            # Of a million users neither is to take room while the server steps.
            reply.latent, request.gradient = reply.latent[:0].copy(), request.gradient[:0].copy()
        return server.latent, server.known

    def _relay(
        self,
        server_round: int,
        users: Mapping[int, IntArray],
        averages: bool = False,
        saves: bool = False,
        message_type: str = "train",
    ) -> Replies[RelayReply]:
        """Send users the gradients that wait for them, and the mean if they lack it."""
        relay, session, (f, w) = self.relay, self.relay.session, self.form
        relay.requests = {
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
        session.asked = dict(users)

        def read(node: int, content: RecordDict) -> RelayReply:
            (p, h), asked = relay.requests[node].gradient.shape, {"send_weights": averages}
            return RelayReply.read(content, server_round=server_round, p=p, h=h, f=f, w=w, **asked)

        numbers = max((one.gradient.size for one in relay.requests.values()), default=0)
        numbers += averages * f * (w + 1)
        return self.send(server_round, relay.requests, read, reply_bytes(numbers), message_type)

    def _mean_for(self, users: IntArray) -> tuple[FloatArray | None, int]:
        if self.average is None or (self.has_average[users] >= self.average_round).all():
            return None, 0
        return self.average, self.average_round

    def prepare_step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Keep the gradients for users, and the mean of the weights that they sent."""
        self._delivered(self.answered)
        users, answers = self.asked_at(self.answered), self.relay.answers.values()
        gradients = gradient.cpu().numpy()
        for local in (self.relay.requests[node].users for node in self.answered):
            self.gradient[local] = gradients[local]  # of a million users no second copy of all
        self.gradient_round[users], self.rate = server_round, rate
        self.traffic[users, ANSWERED] += 1
        self.tally_vectors("up", "latent", users)
        if sums := [one.weight_sum for one in answers if one.weight_sum is not None]:
            self.tally("up", "weights", users, users.size * math.prod(self.form) * FLOAT)
            self.average = mean_weights(sums, [one.holders for one in answers])
            self.average_round = server_round
        return ""

    def _delivered(self, nodes: Iterable[int]) -> None:
        # Payload is what a user alone would be sent, whatever its cohort shares: its gradient, and
        # the averaged weights in full.
        users = self.asked_at(nodes)
        self.tally_vectors("down", "gradient", users[self.gradient_round[users] > 0])
        self.gradient_round[users] = 0
        if self.average is not None:
            lacking = users[self.has_average[users] < self.average_round]
            self.tally("down", "weights", lacking, lacking.size * self.average.nbytes)
            self.has_average[users] = self.average_round

    def finish(self, server_round: int) -> None:
        hosted = self.users_of(self.relay.session.present()).items()
        present = {node: users[~self.left[users]] for node, users in hosted}
        present = {node: users for node, users in present.items() if users.size}
        replies = self._relay(server_round, present, message_type="train.finish")
        self._delivered(replies.values)


class CommonLayer(HostedLayer):
    """One map of all users: its last step, and which SuperNodes have taken that step.

    A round is two exchanges:

    - server -> user: the sum of the round before, with which the user steps; user -> server:
      ``x'_i``, with dropout on ``x_i``, and once more without dropout if the server evaluates the
      round before;
    - server -> user: ``g_i``; SuperNode -> server: the gradient by ``W``, ``sum_i x_i g_i^T``.

    The server asks for the first as soon as the round before has its sum. Loss and sum are over the
    users that answered; the other users take part by their last vector without dropout. A SuperNode
    that has missed a step, or is new, gets weights and optimiser of another SuperNode, which the
    server relays. Without the sum of one of them nobody steps; a SuperNode that stops two steps in
    this way is left out with its users, until another SuperNode joins.
    """

    taken = Advance(before=NEVER)  # the last step, with its sum; round 0: the first weights
    stoppers: Collection[int] = ()  # SuperNodes for want of which this round has no sum

    def __init__(self, relay: SplitGradientRelay, settings: UserSettings) -> None:
        super().__init__(relay, settings)
        self.at = dict[int, int]()  # round of the last step of each SuperNode's layer
        self.stopped = Counter[int]()  # steps that SuperNodes stopped, by their users
        self.sum = (MaskedSum if relay.section.aggregation == MASKED else PlainSum)(self)
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
        self.sum.start()

    def read(self, node: int, content: RecordDict) -> EnrolmentReply:
        answer = super().read(node, content)
        self.sum.check(answer)
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
        self.sum.enrolled(node, answer)

    # Latent vectors

    def latents(self, server_round: int) -> tuple[Tensor, Tensor]:
        """Return the vectors that were asked for ahead, and those of new SuperNodes."""
        relay, session, server = self.relay, self.relay.session, self.relay.server
        hosted = self.hosted(server_round)
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
        """Ask SuperNodes for vectors of users, with and without dropout."""
        if not asked:
            return
        relay, session = self.relay, self.relay.session
        copy, packets = self._copy(asked), self.sum.packets(asked)
        requests = {
            node: LatentRequest(
                self.asked_round,
                users,
                measured,
                self._advance(node, copy),
                packets.get(node),
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
        # Not by `send`: who is left out here is so in the next round
        replies = session.exchange.send(
            {node: as_record(relay._config, one) for node, one in requests.items()},
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
                self.tally_vectors("up", "measured", measured)
                relay.server.receive(measured, reply.measured)

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
        for donor in filter(self._can_go_on, hosted):
            read = partial(CopyReply.read, layer_round=self.at[donor])
            if reply := self.ask_one(donor, "train.copy_layer", {}, read):
                self.relay.session.ledger.count("up", "copy", reply.copy.nbytes)
                return reply
        return None

    def ask_one(
        self, node: int, message_type: str, request: Request, read: Callable[[RecordDict], T]
    ) -> T | None:
        one, most = {node: request}, setup_bytes()
        replies = self.send(self.asked_round, one, lambda _, said: read(said), most, message_type)
        return replies.values.get(node)

    # The sum

    def prepare_step(self, server_round: int, gradient: Tensor, rate: float) -> str:
        """Have the SuperNodes' gradients by the layer added up for the next message."""
        gradients, requests, before = gradient.cpu().numpy(), {}, self.taken.layer_round
        for node in self.answered:
            users = self.relay.requests[node].users
            if self.relay.requests[node].trains:  # otherwise counted as vectors to be measured
                self.tally_vectors("up", "latent", users)
            self.traffic[users, ANSWERED] += 1
            self.tally_vectors("down", "gradient", users)
            requests[node] = GradientRequest(server_round, users, gradients[users], before)
        found = self.sum.add(server_round, requests)
        if isinstance(found, str):
            return f"no sum of gradients: {found}"
        self.taken = replace(found, layer_round=server_round, before=before, rate=rate)
        return ""

    def finish(self, server_round: int) -> None:
        self.relay.session.tell_all(server_round, {SERVER_ROUND: server_round}, "train.finish")


class PlainSum:
    """The sum of the SuperNodes' gradients, which the server reads."""

    def __init__(self, layer: CommonLayer) -> None:
        self.layer, self.section = layer, layer.relay.section

    def start(self) -> None:
        """Forget what an earlier start of the run has agreed on."""

    def check(self, answer: EnrolmentReply) -> None:
        """Refuse a SuperNode that can take part in no sum."""

    def enrolled(self, node: int, answer: EnrolmentReply) -> None: ...

    def packets(self, nodes: Iterable[int]) -> Mapping[int, common_key.KeyPacket]:
        """Return what SuperNodes must have to read the sum."""
        return {}

    def add(self, server_round: int, requests: Mapping[int, GradientRequest]) -> Advance | str:
        """Have gradients added up, for the step with their sum; or return why there is none."""
        layer, (f, w) = self.layer, self.layer.form

        def read(node: int, content: RecordDict) -> FloatArray:
            users = requests[node].users.size
            return SumReply.read(content, server_round=server_round, f=f, w=w, p=users).total

        most = reply_bytes(f * w)
        replies = layer.send(server_round, requests, read, most, "train.add_up").values
        for node in replies:
            layer.tally("up", "sum", requests[node].users, f * w * FLOAT)
        layer.stoppers = requests.keys() - replies.keys()
        if layer.stoppers:
            return f"missing from {len(layer.stoppers)} SuperNode(s)"
        sums = [bounded(one, self.section.limit) for one in replies.values()]
        total: FloatArray = np.stack(sums).sum(0, dtype=np.float64).astype(np.float32)
        return Advance(has_total=True, total=total)


class MaskedSum(PlainSum):
    """The same as a secure sum: the server can see neither the sums of gradients nor the layer.

    One SuperNode draws a common key and seals it for the others; the server carries the packets.
    First weights, dropout and pads come from that key, and a copy of the layer travels under it.
    The sum is of 64-bit words with 40 fraction bits. The server takes the masks off, and sends the
    sum on, still under the pads. With a registry the SuperNodes do not trust the server: public
    keys are signed, and each sum ends in checks that show any change.
    """

    def __init__(self, layer: CommonLayer) -> None:
        super().__init__(layer)
        self.keys = dict[int, common_key.MemberKey]()  # of SuperNodes that have enrolled
        registry = self.section.registry
        # Under pads two sums tell the server nothing, however few SuperNodes they differ by.
        self._parties = None if registry is None else PartySums(registry, differ_by=1)
        self._count = IN_SUM if registry is None else AS_PARTY

    def start(self) -> None:
        if self._parties is None:
            self.__dict__.pop("sums", None)

    @cached_property
    def sums(self) -> SecureSum:
        session = self.layer.relay.session
        return SecureSum(
            session.exchange,
            limit=self.section.limit,
            resolution=2.0**-LEAST_FRACTION_BITS,
            server=self._parties or SumServer(dropout=0.0),
            timeout=session.timeout,
            guard=True,
        )

    def check(self, answer: EnrolmentReply) -> None:
        """Refuse a SuperNode whose public key no other SuperNode would take."""
        if (key := answer.key) is None:
            raise MalformedReplyError("key-public: missing; masked sums need it")
        if self._parties is not None:
            run = str(self.layer.relay.session.exchange.grid.run.run_id).encode()
            common_key.check_signed(self._parties.registry, run, key.public, key.signed_by)

    def enrolled(self, node: int, answer: EnrolmentReply) -> None:
        if answer.key is not None:
            self.keys[node] = answer.key

    def packets(self, nodes: Iterable[int]) -> Mapping[int, common_key.KeyPacket]:
        """Have the common key sealed for SuperNodes that do not have it."""
        hosted = list(self.layer.relay.session.hosted())
        ask = partial(self.layer.ask_one, message_type="train.share_key")
        return common_key.packets_for(nodes, {node: self.keys[node] for node in hosted}, ask)

    def add(self, server_round: int, requests: Mapping[int, GradientRequest]) -> Advance | str:
        layer, sums = self.layer, self.sums
        length = math.prod(layer.form) + CHECKS * (self._parties is not None)
        voices = {node: layer.clients[node][: self._count] for node in requests}
        if {*sums.clients} != {*chain.from_iterable(voices.values())}:
            sums.clients = []
        sums.prepare(server_round, voices)
        detail = detail_of(server_round, layer.taken.layer_round)
        what = length, GRADIENTS, detail
        found = sums.add(server_round, requests, "train.add_up", *what, padded=True)
        left_out = [*found.replies.rejected, *found.silent]
        layer.relay.session.leave_out(left_out)
        silent = {entry.node_id for entry in left_out}
        for node in found.asked.keys() - silent:
            layer.tally("up", "sum", requests[node].users, length * WORD // 8)
        if found.total is None:
            layer.stoppers = silent & voices.keys()
            return found.skipped
        there = {*found.contributors}
        layer.stoppers = [node for node, local in voices.items() if not there.issuperset(local)]
        if layer.stoppers:
            return f"{len(layer.stoppers)} of {len(voices)} SuperNodes were left out"
        of = found.run_id, found.number, found.ring, found.total
        sealed = common_key.HiddenSum(len(there), *of)
        return Advance(hidden=sealed)
