"""The users of one SuperNode: messages, their half of a round, their state, checkpoints.

``strategy.py`` has the rounds. ``NodeClient`` has users with a layer each, ``CommonLayerClient``
users that share one layer; with ``masked`` what it sends is under masks and pads. A SuperNode that
does not trust the server never steps with a changed sum: from its addition the server would know
how the layer moved, and so, by the next latent vectors, each user's features.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor

from flower_graph.client.state import CohortState, Tensors, forms_of, places_of
from flower_graph.data.description import check_rows
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import CheckpointError, MalformedReplyError, RefusedError, StateLostError
from flower_graph.flower_compat import NumPyClient
from flower_graph.ops.active_rows import ActiveRows, pack, take
from flower_graph.ops.graph import row_entries
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import SavedModels, Snapshot, SparseRows
from flower_graph.secure import common_key
from flower_graph.secure.common_key import HiddenSum, MemberKey
from flower_graph.secure.parties.registry import TrustSettings
from flower_graph.secure.ring import CHECKS, Ring
from flower_graph.secure.sum.client import MaskingClient
from flower_graph.secure.sum.messages import MaskRequest
from flower_graph.storage import row_file
from flower_graph.storage.files import node_name, state_key
from flower_graph.strategies.nfedgnn.algorithm import (
    ADAM_TENSORS,
    STEP,
    CommonMap,
    Maps,
    OwnMaps,
    UserSettings,
    bounded,
)
from flower_graph.wire import codec
from flower_graph.wire.arrays import Answer, Config, FloatArray, IntArray, Parameters
from flower_graph.wire.codec import (
    Block,
    Bytes,
    Clients,
    Exact,
    Flag,
    Message,
    Part,
    Resume,
    Whole,
)
from flower_graph.wire.codec import Tensor as Entries
from flower_graph.wire.keys import GRADIENT_ROUND, SERVER_ROUND, SUM_STATE, USERS

STEPS = b"steps of the layer"  # in the journal
SETTINGS_KEY = "user-settings"  # in Context.state, from enrolment until the run is over
AT_A_TIME = 1 << 14  # users whose rows are read from a file at a time
ROWS = "rows"  # where each user's rows of weights begin, for a run that goes on with other users
# Per user: the last round whose gradient was applied, and whose averaged weights were taken over.
# A message that comes twice, because its reply was lost, is applied once.
AVERAGE_ROUND = "average-round"
ROUNDS = (GRADIENT_ROUND, AVERAGE_ROUND)
MODULE = "flower_graph.strategies.nfedgnn.modules.UserModel"  # of saved models


# Messages: latent vectors up, gradients down; weights or their sums both ways -------------------

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
    "weight_decay": codec.Real("weight-decay", "of the users' Adam"),
    "seed": Whole("seed", "of the users' first weights"),
    "average_over": codec.Word("average-over", "`holders` or `all`"),
    "dropout": codec.Real("dropout", "share of its features that a user drops in training"),
}
ServerRound = Annotated[int, Whole(SERVER_ROUND, "the round")]
STEPPED = "round of the last step of the layer that is here; 0 before"
LayerRound = Annotated[int, Whole("layer-round", STEPPED, least=0)]
Users = Annotated[IntArray, Exact(USERS, "who is meant, and the order of all rows", shape="p")]
SLOPES = Entries("arrays/relay", "gradient of the loss by each user's last vector", shape="p h")
Gradient = Annotated[FloatArray, SLOPES]
Rate = Annotated[float, codec.Real("learning-rate", "of the step with these gradients")]
Copy = Block("layer-copy", "a SuperNode's layer, in safetensors", shape="b 4")


class EnrolmentRequest(Message, down="query"):
    """Server to client: asks for its users, and names the checkpoint if the run is resumed."""

    # What the users' models and optimisers are to be
    settings: Annotated[UserSettings, Part(make=UserSettings, fields=SETTINGS)]
    # The run, and the checkpoint that the client is to load
    resume: Annotated[Resume, Part("checkpoints", make=Resume)] = field(default_factory=Resume)
    # users from this number on begin anew
    before: Annotated[int | None, Whole("users-before", least=0)] = None


class EnrolmentReply(Message, up="query"):
    """Client to server: its users."""

    users: Annotated[NDArray[np.int64], Clients(USERS)]  # its users, rows of the server's graph
    # of weights, with a bias
    weight_shape: Annotated[list[int], codec.Numbers(shape="2", whole=True)]
    handled: codec.Handled = None
    # round of the common layer's last step
    layer_round: Annotated[int | None, Whole(least=0)] = None
    key: Annotated[MemberKey | None, Part(make=MemberKey, when="key-public")] = None

    clients = property(attrgetter("users"))

    def check(self, known: codec.Known) -> None:
        last = known["num_nodes"] - 1
        if (wrong := self.users[self.users > last]).size:
            text = f"it hosts user {wrong[0]}, but the graph has nodes 0 to {last}"
            raise MalformedReplyError(text)
        if min(self.weight_shape) < 1 or math.prod(self.weight_shape) > MAX_WEIGHTS:
            given = f"weight-shape: {self.weight_shape}"
            raise MalformedReplyError(f"{given}; at most {MAX_WEIGHTS} numbers are allowed")


# A layer of each user's own ----------------------------------------------------------------------

MEAN = Entries("average/weights", shape="f w", when="average_round")
KINDS = "float32 or float64"
ADDED = Entries("average/weights", shape="f w", dtype=KINDS, per="p", when="send_weights")
COUNTS = Entries("average/holders", shape="f", dtype="int64", limit=None, when="send_weights")


class RelayRequest(Message, down="train train.finish"):
    """Server to client: gradients of an earlier round."""

    server_round: ServerRound
    users: Users
    gradient: Gradient
    # round of that vector, whose gradient is applied once; 0: no gradient
    gradient_round: Annotated[IntArray, Exact(GRADIENT_ROUND, shape="p")]
    rate: Rate
    average: Annotated[FloatArray | None, MEAN] = None  # mean, taken over before the step; not NaN
    average_round: Annotated[int, Whole()] = 0  # round of that mean; 0 without
    send_weights: Annotated[bool, Flag()] = False  # whether weights are asked for
    checkpoint: codec.Saves = False
    run: codec.Token = ""


class RelayReply(Message, up="train"):
    """Client to server: latent vectors, and sums of weights if the request asks for them."""

    # The answer to ``train.finish``, too; there only its shape matters.

    server_round: ServerRound
    latent: Annotated[FloatArray, Entries("arrays/relay", shape="p h")]  # latent vectors
    weight_sum: Annotated[FloatArray | None, ADDED] = None  # the users' weights, added up
    holders: Annotated[IntArray | None, COUNTS] = None  # how many users have each row
    not_saved: codec.NotSaved = ""

    def check(self, known: codec.Known) -> None:
        if (holders := self.holders) is None:
            return
        users = known["p"]
        if holders.dtype.kind not in "iu" or holders.min() < 0 or holders.max() > users:
            raise MalformedReplyError(f"holders: expected counts from 0 to {users}")


# One layer for all -------------------------------------------------------------------------------

TOTAL = Entries("total/gradient", shape="f w", when="has_total")
TRAINED = Entries("arrays/relay", shape="p h", when="trains")
MEASURED = Entries("arrays/measured", shape="m h", when="measures")


class Advance(Message):
    """Server to client: the step, or copy, that brings the layer up to date; applied once."""

    layer_round: LayerRound = 0
    before: Annotated[int, Whole("layer-before")] = 0  # round of the step before that
    rate: Rate = 0.0
    has_total: Annotated[bool, Flag()] = False  # whether the sum comes along
    total: Annotated[FloatArray | None, TOTAL] = None  # sum of all users' gradients
    hidden: Annotated[HiddenSum | None, Part(make=HiddenSum, when="pad-contributors")] = None
    copy: Annotated[Bytes | None, Copy] = None


class LatentRequest(Message, down="train"):
    """Server to client: the sum of an earlier round; asks for this round's latent vectors."""

    server_round: ServerRound
    users: Users
    measured: Annotated[IntArray, Exact(shape="m")]  # users to send without dropout
    advance: Annotated[Advance, Part(make=Advance)] = field(default_factory=Advance)
    key: Annotated[
        common_key.KeyPacket | None, Part(make=common_key.KeyPacket, when="key-packet")
    ] = None
    trains: Annotated[bool, Flag()] = True  # whether `users` send vectors with dropout
    checkpoint: codec.Saves = False
    run: codec.Token = ""


class LatentReply(Message, up="train"):
    """Client to server: latent vectors for training, and others for evaluation."""

    server_round: ServerRound
    layer_round: LayerRound
    latent: Annotated[FloatArray | None, TRAINED] = None  # vectors of `users` with dropout
    measured: Annotated[FloatArray | None, MEASURED] = None  # vectors of `measured`
    not_saved: codec.NotSaved = ""


class GradientRequest(Message, down="train.add_up"):
    """Server to client: gradients with respect to this round's latent vectors; asks for sums."""

    server_round: ServerRound
    users: Users
    gradient: Gradient
    layer_round: LayerRound


class SumReply(Message, up="train.add_up"):
    """Client to server: its users' summed gradients with respect to the layer's weights."""

    server_round: ServerRound
    total: Annotated[FloatArray, Entries("arrays/sum", shape="f w", per="p")]  # the sum


class CopyReply(Message, up="train.copy_layer"):
    """Client to server: a copy of the layer, for SuperNodes that have missed a step."""

    layer_round: LayerRound
    copy: Annotated[Bytes, Copy]


# Users' maps between messages --------------------------------------------------------------------


def shared_map(maps: Maps, users: Sequence[int], weight: Tensor) -> SavedModels:
    """Return the saved form of a linear map ``[f, h]`` that some users share."""
    bias = maps.settings.bias
    arguments = {"features": len(weight) - int(bias), "latent_size": weight.shape[1], "bias": bias}
    return SavedModels(MODULE, arguments, list(users), {"weight": weight.detach().cpu()}, {})


class HostedMaps(OwnMaps):
    """Users' own maps, with what a SuperNode notes about each user."""

    def start(self) -> Tensors:
        return super().start() | self._notes() | {ROWS: self.rows.ptr}

    def _notes(self) -> Tensors:
        never = torch.zeros(self.rows.num_users, dtype=torch.int32)
        return {name: never.clone() for name in ROUNDS}

    def note_new(self, name: str, users: Tensor, rounds: Tensor) -> Tensor:
        """Return which users have not had a round's message yet; note that they have it now."""
        seen = self.tensors[name]
        fresh = seen[users] < rounds
        seen[users[fresh]] = rounds[fresh].to(seen)
        return fresh

    def adopt(self, saved: Tensors, theirs: Tensor, ours: Tensor) -> Tensors:
        """Take the tensors of those of our users that are among the users that were saved."""
        # theirs, ours: the numbers of both
        result, ptr = self.tensors, (self.rows.ptr.cpu(), saved.pop(ROWS))
        both = np.intersect1d(ours.numpy(), theirs.numpy(), return_indices=True)[1:]
        users = [torch.from_numpy(place) for place in both]
        rows = [row_entries(p, one)[1] for p, one in zip(ptr, users, strict=True)]
        for name, tensor in saved.items():
            here, there = rows if name in ADAM_TENSORS else users
            result[name][here] = tensor[there].to(result[name])
        return result

    def models(self, users: Sequence[int]) -> SavedModels:
        rows, tensors = self.rows, self.tensors
        inactive = tensors["inactive-weight"] if "inactive-weight" in tensors else self.first()
        weight, feature, ptr = (t.cpu() for t in (tensors["weight"], rows.feature, rows.ptr.long()))
        own = SparseRows("weight", weight, feature, ptr)
        return replace(shared_map(self, users, inactive), rows=own)


class StoredMaps(HostedMaps):
    """Users whose weights and moments are in a file, for more users than fit into memory.

    The file's numbers ``[3 r h]`` are mapped into memory. A user that was never asked has the
    common first weights, and takes no room on the disk.
    """

    def __init__(
        self,
        rows: ActiveRows,
        settings: UserSettings,
        path: Path,
        tensors: Tensors | None = None,
    ) -> None:
        self._path, self._width = path, len(ADAM_TENSORS) * settings.latent_size  # of a row
        super().__init__(rows, settings, tensors)
        numbers = row_file.mapped(path, self._width * rows.feature.numel())
        shape = len(ADAM_TENSORS), -1, settings.latent_size
        self.tensors |= zip(ADAM_TENSORS, numbers.view(shape), strict=True)

    def start(self) -> Tensors:
        row_file.create(self._path, self._width * self.rows.feature.numel())
        return self._notes() | {STEP: torch.zeros(self.rows.num_users, dtype=torch.int32)}

    def forward(self, users: Tensor) -> Tensor:  # type: ignore[override]
        forward = super().forward
        return torch.cat([forward(part) for part in self._begun(users)])

    def step(self, users: Tensor, gradient: Tensor, rate: float) -> None:  # type: ignore[override]
        # Users with equal counts side by side step together, which is quicker.
        order = torch.argsort(self.tensors[STEP][users], stable=True)
        parts = zip(self._begun(users[order]), order.split(AT_A_TIME), strict=True)
        for part, place in parts:
            super().step(part, gradient[place], rate)

    def models(self, users: Sequence[int]) -> SavedModels:
        for _ in self._begun(torch.arange(self.rows.num_users)):
            pass
        return super().models(users)

    def check_room(self, users: Tensor) -> None:
        """Raise ``OSError`` if the disk has no room for the rows of these users."""
        rows = int((self.rows.ptr[users + 1] - self.rows.ptr[users]).sum())
        row_file.check_room(self._path, self._width * rows)

    def _begun(self, users: Tensor) -> Iterator[Tensor]:
        first = self.first()
        for part in users.split(AT_A_TIME):
            rows, place = take(self.rows, part[self.tensors[STEP][part] == 0])
            self.tensors["weight"][place] = first[rows.feature]
            yield part


# Clients -----------------------------------------------------------------------------------------


class UsersClient(NumPyClient):
    """The users of one SuperNode, as the clients of all forms have them: ``NodeClient``."""

    actions: tuple[str, ...] = ("finish",)
    copies = False  # whether a message that fails costs nothing

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        outputs: ClientOutputs | None = None,
        rows: Path | None = None,
    ) -> None:
        if x.shape[0] != users.numel() or users.numel() == 0:
            raise ValueError(f"x has {x.shape[0]} rows for {users.numel()} users; give one each")
        check_rows(x)
        self.users, self.context = users.long().cpu(), context
        self.outputs = outputs or ClientOutputs(context)
        self._x, self._device = x, resolve_device(device)
        places = self.users, checkpoint_dir, self._made
        self._state = CohortState[Any](context, *places, copies=self.copies, rows=rows)

    @property
    def settings(self) -> UserSettings:
        kept = self.context.state.config_records.get(SETTINGS_KEY)
        if kept is None:
            raise StateLostError("the settings of this run are not here")
        return UserSettings(**dict(kept))  # type: ignore[arg-type]

    def get_properties(self, config: Config) -> Config:
        return self._enrol(EnrolmentRequest.from_config(config)).to_config()

    def _enrol(self, question: EnrolmentRequest) -> EnrolmentReply:
        self.context.state[SETTINGS_KEY] = ConfigRecord(question.settings._asdict())
        if question.before is not None and int(self.users.min()) >= question.before:
            self._state.begin(question.resume)  # all have come since that checkpoint
        else:
            self._restore(question)
        shape = [self._x.shape[1] + int(self.settings.bias), self.settings.latent_size]
        return EnrolmentReply(self.users.numpy(), shape, self._state.processed())

    def _restore(self, question: EnrolmentRequest) -> None:
        raise NotImplementedError

    def _made(self, saved: Tensors | None) -> tuple[Any, Tensors]:
        """Return the users' maps, and the tensors that are kept between messages."""
        begun = None
        if saved is not None:  # counts of rounds stay with the CPU's bookkeeping
            begun = {n: t if n in ROUNDS else t.to(self._device) for n, t in saved.items()}
        maps = self._maps(pack(self._x, bias=self.settings.bias).to(self._device), begun)
        in_file = ADAM_TENSORS if isinstance(maps, StoredMaps) else ()
        return maps, {name: t for name, t in maps.tensors.items() if name not in in_file}

    def _maps(self, rows: ActiveRows, tensors: Tensors | None) -> Maps:
        raise NotImplementedError


class NodeClient(UsersClient):
    """The users of one SuperNode: one in a deployment, thousands in a simulation.

    Parameters
    ----------
    context : Context
        The ClientApp's context, with the users' weights (``flower_graph.client.state``).
    x : Tensor
        ``[n_c, f]`` the users' features, dense or sparse CSR.
    users : Tensor
        ``[n_c]`` the users' numbers in the server's graph.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Where to save the users' weights when the server asks for a checkpoint.
    outputs : ClientOutputs, optional
        Where outputs go, if the SuperNode has no folder of its own.
    rows_dir : Path, optional
        Folder for a file that holds the users' weights and moments instead of the memory, without
        averaging. The users are computed on the CPU.

    Raises
    ------
    ValueError
        If users and features do not fit, or ``rows_dir`` is given for a SuperNode whose files are
        encrypted.
    """

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        rows_dir: Path | None = None,
        **more: Any,  # the other parameters
    ) -> None:
        self._file = None if rows_dir is None else rows_dir / f"users-{node_name(context)}.rows"
        if self._file is not None:
            more["device"] = "cpu"  # what is read from the disk changes there
            if state_key(context) is not None:
                raise ValueError("rows_dir: not with state-key")
        super().__init__(context, x, users, rows=self._file, **more)

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = RelayRequest.from_numpy(parameters, config)
        with self._updated(request) as (maps, users):
            reply = RelayReply(request.server_round, maps.forward(users).cpu().numpy())
            if request.send_weights:
                total, count = maps.weight_sum(users)
                reply.weight_sum, reply.holders = total.cpu().numpy(), count.cpu().numpy()
        if request.checkpoint:
            reply.not_saved = self._state.save(request.server_round, request.run)
        return reply.to_numpy(request.users.size)

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        request = RelayRequest.from_numpy(parameters, config)
        with self._updated(request):
            pass
        self._state.drop(SETTINGS_KEY)
        # Nothing more to tell; but mods such as LocalDpMod compare the shapes of both messages.
        zeros = np.zeros_like(request.gradient)
        return RelayReply(request.server_round, zeros).to_numpy(request.users.size)

    @contextmanager
    def _updated(self, request: RelayRequest) -> Iterator[tuple[HostedMaps, Tensor]]:
        # The state must be there if a gradient comes for what the users have sent.
        follows = bool(request.gradient_round.any())
        if self._file is not None and (request.send_weights or request.average is not None):
            raise ValueError("rows_dir: users whose weights are in a file do not average them")
        place = places_of(self.users, request.users)
        with self._state.opened(follows=follows) as maps:
            if isinstance(maps, StoredMaps):  # before a row changes, which nothing undoes
                maps.check_room(place)
            if request.average is not None:
                rounds = torch.full_like(place, request.average_round)
                fresh = maps.note_new(AVERAGE_ROUND, place, rounds)
                if fresh.any():
                    maps.set_weights(place[fresh], torch.from_numpy(request.average))
            rounds = torch.from_numpy(request.gradient_round)
            fresh = maps.note_new(GRADIENT_ROUND, place, rounds)
            if fresh.any():
                gradient = torch.from_numpy(request.gradient)
                gradient = gradient if fresh.all() else gradient[fresh]
                maps.step(place[fresh], gradient, request.rate)
            yield maps, place

    def _restore(self, question: EnrolmentRequest) -> None:
        """Go on from a checkpoint; if users have changed, take the part of the users here."""
        before, resume = question.before, question.resume

        def adopt(saved: Tensors, numbers: Tensor) -> Tensors | None:
            here = None if before is None or self._file else self.users[self.users < before]
            if here is None or not torch.isin(here, numbers).all():
                return None
            self._state.drop()  # what a run that was stopped left in this process is of others
            maps: HostedMaps = self._made(None)[0]
            return maps.adopt(saved, numbers, self.users)

        is_restored = self._state.restore(resume, adopt)
        # The file that was read may have users that have left.
        changes = is_restored and before is not None
        if changes and (why := self._state.save(resume.server_round, resume.run)):
            raise CheckpointError(why)

    def _maps(self, rows: ActiveRows, tensors: Tensors | None) -> HostedMaps:
        if self._file is None:
            return HostedMaps(rows, self.settings, tensors)
        return StoredMaps(rows, self.settings, self._file, tensors)

    def snapshot(self) -> Snapshot:
        return Snapshot(None, [self._state.look().models(self.users.tolist())])


class CommonLayerClient(UsersClient, MaskingClient):
    """The users of one SuperNode, with the layer and the optimiser that all users share.

    Parameters
    ----------
    context, x, users, **more
        As of ``NodeClient``.
    masked : bool
        Whether the server may see neither the layer nor the sums.
    trust : TrustSettings, optional
        The SuperNode's key and the parties that it trusts, if it does not trust the server.
    """

    actions: tuple[str, ...] = ("finish", "add_up", "copy_layer")
    copies = True

    # Any: arguments are those of its parent
    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        masked: bool = False,
        trust: TrustSettings | None = None,
        **more: Any,
    ) -> None:
        super().__init__(context, x, users, **more)
        count = IN_SUM if trust is None else AS_PARTY
        MaskingClient.__init__(self, context, self.users[:count].tolist(), trust)
        self._key = common_key.CommonKey(context, trust) if masked else None
        self._checks = 0 if trust is None else CHECKS
        if masked:
            self.actions = (*self.actions, *MaskingClient.actions, "share_key")

    @property
    def settings(self) -> UserSettings:
        settings, key = super().settings, self._key
        # Without a key a layer is never begun: a SuperNode that is asked has a key, or is sent one.
        has_key = key is not None and key.check.any()
        return settings._replace(seed=key.seed()) if key is not None and has_key else settings

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Take the last step, then answer with latent vectors; refuse without the common key."""
        request = LatentRequest.from_numpy(parameters, config)
        if self._key is not None and request.key is not None:
            self._key.take(request.key)
        elif self._key is not None and not self._key.check.any():
            raise StateLostError("the common key is not here")
        with self._state.opened() as layer:
            layer.settings = self.settings  # the seed is another once the common key is here
            self._advance(layer, request.advance)
            reply = LatentReply(request.server_round, layer.round)
            if request.trains:
                users = places_of(self.users, request.users)
                reply.latent = layer.forward(users, request.server_round).cpu().numpy()
            if request.measured.size:
                reply.measured = (
                    layer.forward(places_of(self.users, request.measured)).cpu().numpy()
                )
        if request.checkpoint:
            reply.not_saved = self._state.save(request.server_round - 1, request.run)
        return reply.to_numpy(request.users.size)

    def _advance(self, layer: CommonMap, advance: Advance) -> None:
        if layer.round == advance.layer_round:
            return
        if layer.round != advance.before and advance.copy is not None:
            data = advance.copy.tobytes()
            copy = load(data if self._key is None else self._key.open(data))
            if forms_of(copy) != forms_of(layer.tensors):
                raise ValueError("the copy of the layer does not fit")
            for name, tensor in layer.tensors.items():
                tensor.copy_(copy[name])
        if layer.round == advance.before and (total := self._total(advance)) is not None:
            layer.step(torch.from_numpy(total), advance.layer_round, advance.rate)
        if layer.round != advance.layer_round:
            text = f"the layer is of round {layer.round}, the others' of {advance.layer_round}"
            raise StateLostError(text)

    def _total(self, advance: Advance) -> NDArray[np.floating] | None:
        if (key := self._key) is None:
            return advance.total
        if advance.total is not None:
            raise RefusedError("a sum came that the server can read: nobody here takes part")
        if (hidden := advance.hidden) is None:
            return None
        # Which sum it is follows from the step that it is for.
        of = hidden.sum_run, hidden.sum_round, detail_of(advance.layer_round, advance.before)
        with ExitStack() as stack:
            if (trust := self.trust) is not None:
                stack.enter_context(trust.journal.one_trial(advance.layer_round, STEPS))
            pad = key.pad(*of, hidden.ring, hidden.words.size - self._checks)
            total = pad.taken(hidden.ring, hidden.words, hidden.contributors)
        # At most as long as honest SuperNodes can make it: a liar cannot make it longer.
        return bounded(total, hidden.contributors * hidden.ring.limit)

    def add_up(self, parameters: Parameters, config: Config) -> Answer:
        request = GradientRequest.from_numpy(parameters, config)
        layer, size = self._state.look(), request.users.size
        if layer.round != request.layer_round:
            text = f"the layer is of round {layer.round}, the gradients of {request.layer_round}"
            raise StateLostError(text)
        gradient, place = torch.from_numpy(request.gradient), places_of(self.users, request.users)
        total = layer.gradient(place, gradient, request.server_round).cpu().numpy()
        if (key := self._key) is None:
            return SumReply(request.server_round, total.astype(np.float32)).to_numpy(size)
        if "mask-run" not in config:
            raise RefusedError("a sum of gradients is asked for without masks: nothing is sent")
        mask, ring = MaskRequest.from_config(config), Ring.from_config(config)
        if ring.word != WORD or ring.fraction_bits < LEAST_FRACTION_BITS:
            form = f"words of {ring.word} bits with {ring.fraction_bits} of a fraction"
            raise RefusedError(f"{form}: {WORD} with at least {LEAST_FRACTION_BITS} are needed")
        # A SuperNode that refused a sum that is too long would tell of its users' features.
        total = bounded(total, ring.limit)
        first, *others = self.clients
        numbers = np.concatenate([total.ravel(), np.zeros(self._checks)])
        vectors = {first: numbers, **{other: np.zeros(numbers.size) for other in others}}
        detail = detail_of(request.server_round, request.layer_round)
        pad = key.pad(mask.run_id, mask.server_round, detail, ring, total.size)
        words = pad.added(ring, total.ravel())
        # Under pads two sums tell the server nothing: each is of a state of its own.
        state = [np.array([request.server_round, request.layer_round]), np.frombuffer(mask.run_id)]
        reply, entries = self.masked(
            self.received(config), vectors, GRADIENTS, detail, state, words
        )
        return [reply.total], size, entries

    def share_key(self, parameters: Parameters, config: Config) -> Answer:
        assert self._key is not None  # else it is no action
        request = common_key.ShareKeyRequest.from_config(config)
        self._key.public  # noqa: B018  # its pair is there from then on
        return [], self.users.numel(), self._key.share(request).to_config()

    def copy_layer(self, parameters: Parameters, config: Config) -> Answer:
        layer = self._state.look()
        data = save({name: t.cpu().contiguous() for name, t in layer.tensors.items()})
        data = data if self._key is None else self._key.seal(data)
        return CopyReply(layer.round, np.frombuffer(data, np.uint8).reshape(-1, 4)).to_numpy()

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._state.drop(SETTINGS_KEY, SUM_STATE, common_key.COMMON_KEY)
        return [], self.users.numel(), {}

    def _enrol(self, question: EnrolmentRequest) -> EnrolmentReply:
        reply = super()._enrol(question)
        reply.layer_round = self._state.look().round if reply.handled else 0
        if (key := self._key) is not None:
            reply.key = key.shown
        return reply

    def _restore(self, question: EnrolmentRequest) -> None:
        # All users share the layer, so it fits after users came or went.
        before = question.before
        self._state.restore(question.resume, lambda saved, _: saved if before else None)

    def _maps(self, rows: ActiveRows, tensors: Tensors | None) -> CommonMap:
        return CommonMap(rows, self.settings, self.users, tensors)

    def snapshot(self) -> Snapshot:
        one, users = self._state.look(), self.users.tolist()
        return Snapshot(None, [shared_map(one, users, one.tensors["weight"])])
