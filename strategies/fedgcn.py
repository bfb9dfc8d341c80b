"""FedGCN: clients keep the edges to each other's nodes, and add up neighbours' features once.

Yao, Jin, Ravi and Joe-Wong, "FedGCN: Convergence-Communication Tradeoffs in Federated Training of
Graph Convolutional Networks", NeurIPS 2023. Each node is one client's. A client knows its nodes,
their features and classes, all their edges, and of a neighbour at another client only the number.
It *touches* a node that has an edge between two clients if the node or a neighbour of it is its
own. With ``d_j`` the degree of ``j``, self-loop included, before the first round:

1. client -> server: the numbers of the nodes that it touches;
2. server: a node has a *slot* if at least ``least_holders`` clients touch it;
3. client: for each of its slots ``i`` the sum over its own nodes ``j`` that are ``i`` or neighbours
   of ``i`` of ``[x_j / sqrt(d_j), 1]``; one vector ``[slots, f + 1]`` is masked and padded;
4. server: one secure sum of these vectors, which the pads hide from it;
5. server -> client: the sums of its own nodes, with two hops of all that it touches. It takes the
   pads off and divides: ``h_i = sum_j x_j / sqrt(d_i d_j)``, where the ones have added up to
   ``d_i``. So ``h`` is ``A X``, ``A`` the normalised adjacency of the whole graph.

Then FedAvg of the GCN ``A dropout(ReLU(h W_1 + b_1)) W_2 + b_2``. Its second ``A`` is over the
client's nodes and, with two hops, over their neighbours at others, whose ``h`` it has: own nodes'
logits are then those of the GCN on the whole graph. Without hops a client has no foreign edge.

Without a slot an own node keeps the sum over the client's own nodes, and a neighbour at another
client is left out of the second ``A``. The paper encrypts step 3 homomorphically; here it is under
the masks and pads of a secure sum. If a client is missing from the sum, the sum is not opened, and
made without that client before the next round; a client that comes later gets the sums of its slots
and adds its own part, which nobody else then has.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch import Tensor, nn
from torch.nn.functional import pad as padded

from flower_graph.client.learner import NodeTask, Seen
from flower_graph.client.module_client import GraphOnDevice, ModuleClient
from flower_graph.client.state import Tensors
from flower_graph.config.common import (
    DISJOINT,
    LOUVAIN,
    NODES,
    ModuleRunConfig,
    TrainingSection,
)
from flower_graph.config.common import GCN as GCN_NAME
from flower_graph.config.rules import ABOVE_ZERO, Rule, at_least, choice
from flower_graph.config.schema import section, setting
from flower_graph.data.folders.party import RunFolder
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Cohort
from flower_graph.errors import DataError, MalformedReplyError, StateLostError
from flower_graph.method.module_method import ModuleFedAvg, ModuleMethod
from flower_graph.models import GCN
from flower_graph.ops.graph import adjacency, propagate
from flower_graph.outputs.files import Predictions
from flower_graph.secure import common_key
from flower_graph.secure.node_config import LEAST_HOLDERS
from flower_graph.secure.ring import SIGNED, WORDS, Ring, SumPad
from flower_graph.secure.sum.client import MaskingClient
from flower_graph.server.membership import Membership
from flower_graph.server.sums import SecureSum, SumServer
from flower_graph.wire import codec
from flower_graph.wire.arrays import Answer, Config, IntArray, Measurements, Parameters
from flower_graph.wire.codec import Bytes, Exact, Flag, Part, Whole, split_rows
from flower_graph.wire.exchange import Rejected
from flower_graph.wire.ledger import reply_bytes, setup_bytes

APP = "fedgcn"
LOG = logging.getLogger(__name__)
PURPOSE, RESOLUTION = "FedGCN neighbours", 2.0**-14  # of the sum
HAS_SUMS = "has-sums"  # in a message to clients that have got them
SUMS, IN_SUM = "sums", "in-sum"  # of the clients' state
NO_SLOT, NO_KEY = -1, np.frombuffer(common_key.NO_KEY, np.uint8)
NOBODY: IntArray = np.zeros(0, np.int64)

# Settings ----------------------------------------------------------------------------------------


@dataclass
class FedGCNSection(TrainingSection):
    """Settings of the clients' training and of the sums before it."""

    name: str = setting(APP, choice(APP), help="what server and clients do")
    local_epochs: int = 3
    weight_decay: float = 0.0  # by validation: docs/results/fedgcn
    hops: int = setting(2, Rule("0, 1 or 2", lambda hops: 0 <= hops <= 2, ("0", "1", "2")))
    """0: no edge to another client's node; 1: the sums of own nodes; 2: of their neighbours too"""
    least_holders: int = setting(LEAST_HOLDERS, at_least(LEAST_HOLDERS))
    """clients that must touch a node whose sum is made; of two each learns the other's part"""
    limit: float = setting(512.0, ABOVE_ZERO)
    """largest size of a number in a client's part, which may be a count of its nodes"""


@dataclass
class FedGCNConfig(ModuleRunConfig):
    """Everything that a run of FedGCN needs to be repeated."""

    networks = (GCN_NAME,)
    takes_edge_weights = False
    judges_all = False  # kept models take a whole graph, not the sums
    app: str = APP
    strategy: FedGCNSection = section(FedGCNSection)

    def validate(self) -> None:
        super().validate()
        self.need(self.task == NODES, "task", f"{NODES} with app={APP}")
        ways = ", ".join(DISJOINT)
        how = self.partition
        has_all = how.method in DISJOINT and (how.every_node or how.method != LOUVAIN)
        self.need(has_all, "partition.method", f"one of {ways}, with partition.every_node=true")
        why = "noise is for weights, and sums of features have none"
        self.refuse_noise(self.strategy.hops > 0, "strategy.hops", why)


# Formulas ----------------------------------------------------------------------------------------


class Near(NamedTuple):
    """A client's ``n`` nodes and, behind them, the ``g`` of other clients beside them."""

    n: int
    foreign: Tensor  # [g] numbers in the whole graph, ascending
    edges: Tensor  # [2, e] between own nodes, in both directions
    cut: Tensor  # [2, m] from a foreign node to an own one, by place among n + g
    ends: Tensor  # places of the own nodes with a foreign neighbour
    hops: int

    @classmethod
    def of(cls, graph: ClientGraph, hops: int) -> Near:
        """Place a client's nodes; without hops there is no foreign node."""
        cut = graph.cut_edges if hops else torch.zeros(2, 0, dtype=torch.int64)
        assert cut is not None  # which the method has checked
        n, (foreign, place) = graph.y.numel(), torch.unique(cut[1], return_inverse=True)
        edges = torch.stack([place + n, cut[0]])
        return cls(n, foreign, graph.edges, edges, torch.unique(cut[0]), hops)

    @property
    def touched(self) -> Tensor:
        """The places of the nodes that it touches: its own first."""
        return torch.cat([self.ends, torch.arange(self.n, self.n + self.foreign.numel())])

    @property
    def wanted(self) -> Tensor:
        """The places of those whose sums it gets."""
        return self.touched if self.hops > 1 else self.ends


def own_parts(x: Tensor, near: Near) -> Tensor:
    """Add up ``[x_j / sqrt(d_j), 1]`` over own ``j`` that are a node or its neighbours (step 3)."""
    # x [n, f]; the result [n + g, f + 1], of foreign nodes too
    n, size = near.n, near.n + near.foreign.numel()
    loops = torch.arange(n).expand(2, n)
    degree = torch.bincount(torch.cat([near.edges[1], near.cut[1]]), minlength=n) + 1.0
    rows = torch.cat([x / degree.sqrt()[:, None], torch.ones(n, 1)], 1)
    away = torch.cat([near.edges, loops, near.cut.flip(0)], 1)  # from own nodes to all
    graph = adjacency(away, torch.ones(away.shape[1]), size)
    return propagate(graph, padded(rows, (0, 0, 0, size - n)))


def first_layer_rows(sums: Tensor) -> Tensor:
    """Divide sums ``[m, f + 1]`` by the root of the degree that their last column is (step 5)."""
    return sums[:, :-1] / sums[:, -1:].clamp(min=1).sqrt()


def second_layer_edges(near: Near, degree: Tensor, is_known: Tensor) -> tuple[Tensor, Tensor]:
    """Return edges and weights that a GCN normalises to ``1 / sqrt(d_i d_j)`` at own nodes ``i``.

    Foreign nodes send and do not get: their missing edges are weighed as a loop.
    """
    # degree [n + g]; is_known [n + g], of foreign nodes whether their sum is here
    cut = near.cut[:, is_known[near.cut[0]]]
    others = near.n + is_known[near.n :].nonzero().flatten()
    edges = torch.cat([near.edges, cut, others.expand(2, -1)], 1)
    ones = torch.ones(edges.shape[1] - others.numel())
    return edges, torch.cat([ones, degree[others] - 1])


class NeighbourGCN(GCN):
    """The GCN whose input is ``h``, the first aggregation; its weights are a GCN's."""

    def embed(self, x: Tensor, edge_index: Tensor, *weight: Tensor) -> Tensor:  # type: ignore[override]
        """Return the hidden layer ``[n, h]`` from ``h`` ``[n, f]``."""
        return (self._lifted(x) + self.first.bias).relu()


class OwnNodes(NodeTask):
    """Learns classes where a placed graph has others' nodes behind a client's own."""

    def predictions(self, seen: Seen, classes: Sequence[str] | None) -> Predictions:
        own = seen.judged._replace(logits=seen.judged.logits[: seen.local.y.numel()])
        return super().predictions(seen._replace(judged=own), classes)


# Messages ----------------------------------------------------------------------------------------


class Touched(codec.Message, up="query"):
    """Client to server, with its enrolment: the nodes that its clients touch, and a public key."""

    own: Annotated[IntArray, Exact(shape="c")]  # nodes of each that have a foreign neighbour
    others: Annotated[IntArray, Exact(shape="c")]  # nodes of others beside these
    nodes: Annotated[IntArray, Exact(shape="n")]  # numbers of all, client by client, own first
    has_sums: Annotated[bool, Flag()]  # whether their sums are here already
    key: Annotated[common_key.MemberKey, Part(make=common_key.MemberKey)]

    @property
    def each(self) -> list[IntArray]:
        """The nodes of each client."""
        return split_rows(self.nodes, self.own + self.others)

    def wanted(self, hops: int) -> IntArray:
        """Return those of the nodes whose sums the clients get."""
        sizes, wanted = np.stack([self.own, self.others], 1).ravel(), [True, hops > 1]
        chosen: IntArray = self.nodes[np.tile(wanted, self.own.size).repeat(sizes)]
        return chosen

    def check(self, known: codec.Known) -> None:
        sizes = np.append(self.own, self.others)
        if (sizes < 0).any() or sizes.sum() != self.nodes.size:
            raise MalformedReplyError(f"nodes: {self.nodes.size}, {sizes.sum()} are announced")
        if any(np.unique(nodes).size < nodes.size for nodes in self.each):
            raise MalformedReplyError("nodes: a client has one of them twice")


KEY = Part(make=common_key.KeyPacket, when="key-packet")


class PartsRequest(codec.Message, down="train.neighbours"):
    """Server to client: the slots of its vector; the entries of a secure sum travel beside."""

    size: Annotated[int, Whole(least=1)]  # slots in the vector
    slots: Annotated[IntArray, Exact(shape="n")]  # of each node that is touched, or -1
    key: Annotated[common_key.KeyPacket | None, KEY] = None  # the common key, if it lacks it


class SumsRequest(codec.Message, down="train.sums"):
    """Server to client: sums of nodes that its clients get."""

    size: Annotated[int, Whole()]  # slots in the whole sum
    in_sum: Annotated[IntArray, Exact(shape="c")]  # of each client, 1 if its part is in it
    slots: Annotated[IntArray, Exact(shape="n")]  # of each node whose sum is wanted, or -1
    hidden: Annotated[common_key.HiddenSum, Part(make=common_key.HiddenSum)]  # of those with slots
    key: Annotated[common_key.KeyPacket | None, KEY] = None


# Client ------------------------------------------------------------------------------------------


# Both parents have a ``received``: here it is the server's arrays, as of the first
class FedGCNClient(ModuleClient, MaskingClient):  # type: ignore[misc]
    """The clients of one SuperNode; arguments as of ``ModuleClient``."""

    how: FedGCNSection
    actions = (*MaskingClient.actions, "share_key", "neighbours", "sums")

    # Any: as of its parent
    def __init__(self, context: Context, graphs: Sequence[ClientGraph], *of: Any, **more: Any):
        self._rows: dict[int, tuple[Tensor, int]] = {}  # of each client: sums, and if it is in them
        ModuleClient.__init__(self, context, graphs, *of, **more)
        MaskingClient.__init__(self, context, self._clients)
        self._key = common_key.CommonKey(context)

    def near(self, graph: ClientGraph) -> Near:
        return Near.of(graph, self.how.hops)

    def place(self, graph: ClientGraph) -> GraphOnDevice:
        """Put a client's graph on its device, with first-layer rows from what sums there are."""
        near = self.near(graph)
        sums, (came, in_sum) = own_parts(graph.x.to_dense(), near), self._rows[graph.client]
        is_here = ~came[:, -1].isnan()
        places = near.wanted[is_here]
        # A part that is not in the sum comes to it here
        sums[places] = came[is_here] + (0 if in_sum == 1 else sums[places])
        is_known = torch.arange(len(sums)) < near.n
        is_known[places] = True
        edges, weight = second_layer_edges(near, sums[:, -1], is_known)
        more, masks = (0, len(sums) - near.n), graph.masks.items()
        return GraphOnDevice(
            (graph.client,),
            first_layer_rows(torch.where(is_known[:, None], sums, 0)).to(self.device),
            edges.to(self.device),
            padded(graph.y, more, value=-1).to(self.device),
            {part.removesuffix("_mask"): padded(m, more).to(self.device) for part, m in masks},
            weight.to(self.device),
        )

    def exported(self, module: nn.Module) -> nn.Module:
        """Return the GCN of a whole graph: it takes features, not sums."""
        assert isinstance(module, NeighbourGCN)
        (gcn := GCN(**module.arguments)).load_state_dict(module.state_dict())  # type: ignore[arg-type]
        return gcn.train(module.training)

    # Before the first round

    def get_properties(self, config: Config) -> Config:
        """Enrol, and say which nodes clients touch (step 1)."""
        enrolled, near = super().get_properties(config), [*map(self.near, self.graphs)]
        each = zip(self.graphs, near, strict=True)
        nodes = [part for graph, one in each for part in (graph.nodes[one.ends], one.foreign)]
        own, others = np.array([[one.ends.numel(), one.foreign.numel()] for one in near]).T
        touched = own, others, torch.cat(nodes).numpy(), self._has_sums(), self._key.shown
        return enrolled | Touched(*touched).to_config()

    def share_key(self, parameters: Parameters, config: Config) -> Answer:
        request = common_key.ShareKeyRequest.from_config(config)
        return [], 1, self._key.share(request).to_config()

    def neighbours(self, parameters: Parameters, config: Config) -> Answer:
        """Send the clients' parts of the sums, masked and padded (step 3)."""
        request = PartsRequest.from_config(config)
        self._take(request.key)
        mask, ring, _ = received = MaskingClient.received(self, config)
        near, vectors = [*map(self.near, self.graphs)], {}
        slots = split_rows(request.slots, [one.touched.numel() for one in near])
        for graph, one, at in zip(self.graphs, near, slots, strict=True):
            parts = own_parts(graph.x.to_dense(), one)[one.touched].numpy()
            vector = np.zeros((request.size, parts.shape[1]), np.float32)
            vector[at[at != NO_SLOT]] = parts[at != NO_SLOT]
            vectors[graph.client] = vector.ravel()
        detail = b"%d" % request.size
        pad = self._key.pad(mask.run_id, mask.server_round, detail, ring, mask.length).words
        reply, entries = self.masked(received, vectors, PURPOSE, detail, (), pad)
        return [reply.total], 1, entries

    def sums(self, parameters: Parameters, config: Config) -> Answer:
        """Take the pads off sums, and keep them (step 5)."""
        came = SumsRequest.from_numpy(parameters, config)
        self._take(came.key)
        hidden, has_slot = came.hidden, came.slots != NO_SLOT
        rows = torch.full_like(self._state.tensors()[SUMS], torch.nan)
        of = hidden.sum_run, hidden.sum_round, b"%d" % came.size, hidden.ring
        pads = self._key.pad(*of, came.size * rows.shape[1]).words.reshape(came.size, -1)
        pad = SumPad(pads[came.slots[has_slot]].ravel(), None)
        sums = pad.taken(hidden.ring, hidden.words, hidden.contributors)
        rows[has_slot] = torch.from_numpy(sums).to(rows).view(-1, rows.shape[1])
        self._state.replace({SUMS: rows, IN_SUM: torch.from_numpy(came.in_sum.copy())})
        return [], 1, {}

    def _take(self, key: common_key.KeyPacket | None) -> None:
        if key is not None:
            self._key.take(key)

    # In the rounds

    def _trained(
        self, parameters: Parameters, config: Config
    ) -> tuple[Cohort, list[int], dict[int, str]]:
        self._check(config)
        return super()._trained(parameters, config)

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        self._check(config)
        return super().evaluate(parameters, config)

    def _check(self, config: Config) -> None:
        if config.get(HAS_SUMS) and not self._has_sums():
            raise StateLostError("the sums of its neighbours are not here any more")

    def _has_sums(self) -> bool:
        return bool((self._state.tensors()[IN_SUM] >= 0).all())

    def _made(self, tensors: Tensors | None) -> tuple[Cohort, Tensors]:
        sizes = [self.near(graph).wanted.numel() for graph in self.graphs]
        none = torch.full((sum(sizes), self.graphs[0].x.shape[1] + 1), torch.nan)
        own = {SUMS: none, IN_SUM: torch.full((len(sizes),), -1), **(tensors or {})}
        beside = {name: own.pop(name).cpu() for name in (SUMS, IN_SUM)}
        each = zip(beside[SUMS].split(sizes), beside[IN_SUM].tolist(), strict=True)
        self._rows = dict(zip(self._clients, each, strict=True))
        cohort, kept = super()._made(own or None)
        return cohort, kept | beside


# Server ------------------------------------------------------------------------------------------


class Touching(Membership):
    """The members, the nodes that they touch, and who has got the sums."""

    needs_query = True
    sum: SecureSum | None = None

    def __init__(self) -> None:
        super().__init__()
        self.touched: dict[int, Touched] = {}
        self.served = set[int]()  # SuperNodes that have their sums
        self.silent = Counter[int]()  # times that a client was missing from a sum

    def read(self, node: int, content: RecordDict) -> object:
        self.touched[node] = touched = Touched.read(content)
        self.served = self.served - {node} | ({node} if touched.has_sums else set())
        return super().read(node, content)

    def enrolled(self, node: int, answer: Any) -> None:  # Any: as of its parent
        super().enrolled(node, answer)
        if len(answer.clients) != (count := self.touched[node].own.size):
            raise MalformedReplyError(f"own: of {count} clients, expected {len(answer.clients)}")


class FedGCN(ModuleFedAvg):
    """The server's half; arguments as of its parent."""

    how: FedGCNSection
    # Of the opened sum: numbers of the nodes, ascending; words under pads [s, f + 1], signed as a
    # checkpoint has them; clients in it; fields of its ring; run and number; hash of the pads' key
    opened: Sequence[Any] = ()
    closed = 0  # nodes that too few clients touch

    def __init__(self, *of: Any, **more: Any) -> None:  # Any: as of its parent
        super().__init__(*of, **more)
        self.session.members = self.members = Touching()

    def prepare(self, server_round: int) -> None:
        """Have neighbours' features added up, once; give clients the sums that they lack."""
        hosted = self.session.hosted()
        if self.how.hops and not self.opened:
            self._add_up(server_round, hosted)
        if self.opened and (lacking := [n for n in hosted if n not in self.members.served]):
            self._give(server_round, lacking)

    def _add_up(self, server_round: int, hosted: Mapping[int, list[int]]) -> None:
        """Choose slots, and have the clients' parts added up (steps 2 to 4)."""
        members, session, how = self.members, self.session, self.how
        if members.sum is None:
            size: dict[str, Any] = {"limit": how.limit, "resolution": RESOLUTION, "guard": True}
            size |= {"server": SumServer(dropout=0.0), "timeout": session.timeout}
            members.sum = SecureSum(session.exchange, **size)
        secure, touched = members.sum, {node: members.touched[node] for node in hosted}
        ready = {*secure.prepare(server_round, hosted)}
        clients = [client for local in hosted.values() for client in local]
        each = zip(clients, (ids for one in touched.values() for ids in one.each), strict=True)
        in_it = [ids for client, ids in each if client in ready]
        nodes, holders = np.unique(np.concatenate([NOBODY, *in_it]), return_counts=True)
        slotted = nodes[has_slot := holders >= how.least_holders]
        self.closed, count = int((~has_slot).sum()), slotted.size
        if not count:
            LOG.warning("round %d: %d clients touch no node together", server_round, len(ready))
            return
        # Whatever is said of a common key, one is sealed for all; another donor in each try
        first, order = server_round % len(hosted), [*hosted]
        keys = self._keys([*order[first:], *order[:first]], NO_KEY)
        packets, requests = self._packets(server_round, keys, keys), {}
        for node, one in touched.items():
            requests[node] = PartsRequest(count, slots_of(one.nodes, slotted), packets.get(node))
        width = self.arrays["first.weight"].shape[1] + 1
        what = "train.neighbours", count * width, PURPOSE, b"%d" % count
        last: dict[str, Any] = {"padded": True, "following": lambda: None}
        found = secure.add(server_round, requests, *what, **last)
        missing, bound = [*found.replies.rejected, *found.silent], members.bound
        session.leave_out(missing)
        session.leave_out([Rejected(bound[c], f"client {c}: {w}") for c, w in found.failed.items()])
        if found.total is None:
            LOG.warning("round %d: no sum of neighbours: %s", server_round, found.skipped)
            if 2 * len(missing) <= len(hosted):  # otherwise the fault may be another's
                members.silent.update(c for n in missing for c in hosted.get(n.node_id, ()))
            often = [client for client, times in members.silent.items() if times > 1]
            secure.server.exclude([*found.failed, *often])
            return
        ring = [found.ring.word, found.ring.fraction_bits, found.ring.guard_bits, found.ring.limit]
        who, words = np.array(found.contributors, np.int64), found.total.reshape(-1, width)
        check = next(iter(keys.values())).key_check
        of = who, ring, found.run_id, found.number, check
        self.opened = slotted, words.view(SIGNED[found.ring.word]), *of
        session.ledger.count("up", SUMS, words.nbytes * who.size)
        done = count, who.size, self.closed
        LOG.info("sums of %d nodes of %d clients; %d nodes are touched by too few", *done)

    def _give(self, server_round: int, nodes: Sequence[int]) -> None:
        """Give clients the sums of their nodes (step 5)."""
        slotted, words, clients, ring, run, number, check = self.opened
        keys = self._keys(self.session.hosted(), check)
        if not any(key.key_check.any() for key in keys.values()):
            LOG.warning("nobody has the key of the sums any more: nodes %s get none", nodes)
            return
        packets, requests, sent = self._packets(server_round, nodes, keys), dict[int, Any](), {}
        for node in nodes:
            slots = slots_of(self.members.touched[node].wanted(self.how.hops), slotted)
            rows = words[slots[slots != NO_SLOT]].ravel().view(WORDS[ring[0]])
            hidden = common_key.HiddenSum(clients.size, run, number, Ring(*ring), rows)
            in_sum = np.isin(self.members.clients[node], clients).astype(np.int64)
            request = SumsRequest(slotted.size, in_sum, slots, hidden, packets.get(node))
            requests[node], sent[node] = request.to_record(), rows.nbytes
        how: dict[str, Any] = {"message_type": "train.sums", "max_reply_bytes": reply_bytes()}
        served = self.session.send(requests, server_round, lambda *_: None, **how).values
        self.members.served |= served.keys()
        self.session.ledger.count("down", SUMS, sum(sent[node] for node in served))

    def _keys(self, nodes: Iterable[int], check: Bytes) -> dict[int, common_key.MemberKey]:
        """Return what SuperNodes say of the common key; any other one counts as none."""
        keys = {node: self.members.touched[node].key for node in nodes}
        for key in keys.values():
            key.key_check = key.key_check if (key.key_check == check).all() else NO_KEY
        return keys

    def _packets(
        self, server_round: int, nodes: Iterable[int], keys: Mapping[int, common_key.MemberKey]
    ) -> dict[int, common_key.KeyPacket]:
        """Have the common key sealed for SuperNodes that lack it."""

        # Any: as ``AskOne`` has it
        def ask(donor: int, request: codec.Message, read: Callable[[RecordDict], Any]) -> Any:
            how: dict[str, Any] = {"message_type": "train.share_key"}
            how["max_reply_bytes"] = setup_bytes()
            asked = {donor: request.to_record()}
            said = self.session.send(asked, server_round, lambda _, reply: read(reply), **how)
            return said.values.get(donor)

        return common_key.packets_for(nodes, keys, ask)

    def told(self, node: int) -> dict[str, bool]:
        return {HAS_SUMS: True} if node in self.members.served else {}

    def fixed_settings(self) -> dict[str, object]:
        return super().fixed_settings() | {"hops": self.how.hops}


def slots_of(nodes: IntArray, slotted: IntArray) -> IntArray:
    """Return where nodes are among those that have slots, ascending; -1 for others."""
    return np.where(np.isin(nodes, slotted), np.searchsorted(slotted, nodes), NO_SLOT)


class FedGCNMethod(ModuleMethod[FedGCNConfig]):
    """FedGCN for the command line and the apps."""

    name, schema = APP, FedGCNConfig
    strategy_class, client_class = FedGCN, FedGCNClient
    keeps_cut = True
    tables = ("fedgcn",)
    attacks = "flower_graph.strategies.fedgcn_attack:SumsAudit"

    def module(self, config: FedGCNConfig, features: int, classes: int) -> Callable[[], nn.Module]:
        how = config.model
        return partial(NeighbourGCN, features, how.hidden, classes, how.dropout, how.input_dropout)

    def task(self, config: FedGCNConfig, whole: RunFolder | None = None) -> NodeTask:
        return OwnNodes()

    def check(self, config: FedGCNConfig, graphs: Sequence[ClientGraph]) -> None:
        if config.strategy.hops and any(graph.cut_edges is None for graph in graphs):
            why = "clients' own graphs name no nodes of others; give one graph, which is cut"
            raise DataError(f"data.name: {config.data.name}: {why}, or set strategy.hops=0")

    def final_figures(
        self, config: FedGCNConfig, strategy: ModuleFedAvg, folder: RunFolder | None = None
    ) -> dict[str, object]:
        assert isinstance(strategy, FedGCN)
        sums = {"nodes": len(strategy.opened[0]) if strategy.opened else 0}
        sums |= {"touched-by-too-few": strategy.closed}
        return super().final_figures(config, strategy, folder) | {"neighbour-sums": sums}


METHOD = FedGCNMethod()
