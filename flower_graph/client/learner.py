"""What the clients of a ``ModuleClient`` learn: classes of nodes, numbers of nodes, or links."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from flower_graph.config.common import DOT, MLP
from flower_graph.data.description import Caution, tell
from flower_graph.data.graph import ClientGraph, Scale, called
from flower_graph.engine.cohort import (
    BEGUN,
    Cohort,
    GraphOnDevice,
    Judged,
    by_feature,
    judged_pairs,
    placed_on,
)
from flower_graph.errors import ConfigError, DataError
from flower_graph.models import GCN, PyGNetwork, network_of
from flower_graph.ops.counts import Counts, Errors
from flower_graph.ops.graph import values_at
from flower_graph.ops.grouped import group_sum
from flower_graph.ops.links import (
    LinkSplit,
    both_directions,
    dot_products,
    drawn_pairs,
    split_links,
)
from flower_graph.outputs.build import form_of
from flower_graph.outputs.files import (
    Embeddings,
    KnownLinks,
    Predictions,
    SavedModels,
    Snapshot,
    SparseRows,
    predictions_from,
)
from flower_graph.rng import generator, seeded
from flower_graph.wire.counts import added, counted
from flower_graph.wire.keys import ROLES

UNUSED = "its forward takes no edge_weight, so all edges count the same"


class SharedModule(NamedTuple):
    """The module of all clients, and what of it the server averages.

    Attributes
    ----------
    make : callable
        Makes a module of the same form at all clients and the server.
    seed : int
        Seed of the first weights and, with client and round, of the module's dropout.
    local : tuple of str
        Patterns such as ``"mask.*"`` of entries that never leave a client.
    others : tuple of callable
        Make modules of other forms: client ``i`` of ``n`` forms has number ``i mod n``, from 0 on.
        The entries that leave a client are alike in all.
    """

    make: Callable[[], nn.Module]
    seed: int = 0
    local: tuple[str, ...] = ()
    others: tuple[Callable[[], nn.Module], ...] = ()

    @property
    def forms(self) -> list["SharedModule"]:
        """The modules of each form, of which clients have one in turn."""
        return [self._replace(make=make, others=()) for make in (self.make, *self.others)]

    def of(self, client: int) -> "SharedModule":
        return self.forms[client % len(self.forms)]

    def first(self) -> nn.Module:
        """Make the initial module, the same for every client."""
        with seeded(torch.device("cpu"), self.seed, "module"):
            return self.make()

    def is_sent(self, name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in self.local)

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the entries that leave a client, by name."""
        state = self.first().state_dict().items()
        return {name: tuple(value.shape) for name, value in state if self.is_sent(name)}


def weighed(module: nn.Module, graph: GraphOnDevice) -> tuple[Tensor, ...]:
    """Return a module's arguments: features, edges and, if ``forward`` takes them, edge weights."""
    if graph.edge_weight is None:
        return graph.x, graph.edge_index
    if not takes_weights(module):
        tell(type(network_of(module)).__name__, [Caution(UNUSED)])
        return graph.x, graph.edge_index
    return graph.x, graph.edge_index, graph.edge_weight


def hidden(net: nn.Module, graph: GraphOnDevice) -> Tensor:
    """Return the hidden layer ``[n, h]`` that a network gives a graph's nodes, before dropout."""
    assert isinstance(net, GCN | PyGNetwork)
    return net.embed(*weighed(net, graph))


def classified(net: nn.Module, rows: Tensor, graph: GraphOnDevice) -> Tensor:
    """Return the logits ``[n, k]`` that a network makes of its hidden layer."""
    assert isinstance(net, GCN | PyGNetwork)
    return net.classify(rows, *weighed(net, graph)[1:])


def asked(module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
    """Return the pairs that the module must decode, if any; ``ConfigError`` if it takes none."""
    if graph.pairs is None:
        return {}
    if not _takes(module, "pairs"):
        kind = type(network_of(module)).__name__
        raise ConfigError(f"links.decoder: mlp is not for {kind}, whose forward takes no pairs")
    return {"pairs": graph.pairs}


def takes_weights(module: nn.Module) -> bool:
    """Whether a module's third argument is the edges' weights."""
    return _takes(module, "edge_weight")


def _takes(module: nn.Module, name: str) -> bool:
    return name in inspect.signature(network_of(module).forward).parameters


def saved_rows(cohort: Cohort, make: Callable[[], nn.Module]) -> list[SavedModels]:
    """Return the models of clients that keep active rows; what they have in common once."""
    (name,), (feature, _, ptr) = cohort.by_rows, cohort.rows
    begun, active = cohort.tensors[name + BEGUN], cohort.tensors[name].detach()
    common, rows = by_feature(cohort.module, name, begun), None  # as the module has it
    if not torch.equal(active, begun[feature]):
        is_turned = common is not begun
        rows = SparseRows(name, active, feature, torch.tensor(ptr), transposed=is_turned)
    form = form_of(cohort.module, make, cohort.clients[0])
    own = {one: cohort.tensors[one].detach() for one in cohort.names if one != name}
    shared, clients = {name: common}, cohort.clients
    return SavedModels.join([replace(form, clients=clients, shared=shared, own=own, rows=rows)])


# What is learnt: classes of nodes, numbers, or links -------------------------------------------

Forward = Callable[[GraphOnDevice], Tensor]  # what a module gives for a graph's nodes, [n, k]


class Seen(NamedTuple):
    """A client's graph, the predictions of its examples, and its module's outputs."""

    local: ClientGraph
    graph: GraphOnDevice
    judged: Judged
    forward: Forward


class NodeTask:
    """Learns the classes of nodes."""

    def place(self, graph: ClientGraph, device: torch.device) -> GraphOnDevice:
        return placed_on(graph, device)

    def weight(self, graph: ClientGraph) -> int:
        return int(graph.train_mask.sum())

    def loss(self, forward: Forward, graph: GraphOnDevice) -> Tensor:
        out, mask = forward(graph), graph.masks["train"]
        losses = functional.cross_entropy(out[mask], graph.y[mask], reduction="none")
        return graph.sum_of_means(losses, mask)

    def judge(self, forward: Forward, graph: GraphOnDevice) -> Judged:
        return graph.judged(forward(graph))

    def training_loss(self, judged: Judged) -> Tensor:
        """Return each client's loss, ``[c]``; NaN without training examples."""
        y = judged.y.clamp(min=0)  # of nodes without a label, which do not train
        losses = functional.cross_entropy(judged.logits, y, reduction="none")
        return judged.means(losses, judged.masks["train"])

    def shares(self, judged: Judged) -> list[Tensor]:
        """Return each client's accuracy by role, ``[c]`` each; NaN without examples."""
        right = judged.logits.argmax(1) == judged.y
        return [judged.means(right, judged.masks[role]) for role in ROLES]

    def count(self, judged: Judged, counting: str) -> Counts | Errors | None:
        return counted(judged.logits, judged.y, judged.masks, counting)

    def measure(self, judged: Judged) -> Tensor:
        """Return each client's loss and accuracy by role, ``[c, 4]``; NaN without examples."""
        result = torch.stack([loss := self.training_loss(judged), *self.shares(judged)], 1)
        return torch.where(self.has_diverged(judged, loss)[:, None], torch.nan, result).cpu()

    def count_all(self, judged: Sequence[Judged], counting: str) -> Counts | Errors | None:
        """Count the predictions of all clients, except diverged ones, if counts are asked for."""
        parts = []
        for one in judged if counting else ():
            sizes = torch.tensor(one.ptr, device=one.y.device).diff()
            good = ~self.has_diverged(one).repeat_interleave(sizes)
            masks = {role: mask & good for role, mask in one.masks.items()}
            parts.append(self.count(one._replace(masks=masks), counting))
        return added(parts)

    def has_diverged(self, judged: Judged, loss: Tensor | None = None) -> Tensor:
        """Return whether a client has a training loss that is not finite, ``[c]``."""
        trains = group_sum(judged.masks["train"].long(), judged.ptr) > 0
        return trains & ~(self.training_loss(judged) if loss is None else loss).isfinite()

    def snapshot(
        self, seen: Sequence[Seen], models: list[SavedModels], classes: Sequence[str] | None
    ) -> Snapshot:
        parts = [self.predictions(one, classes) for one in seen]
        return Snapshot(Predictions.join(parts) if parts else None, models)

    def predictions(self, seen: Seen, classes: Sequence[str] | None) -> Predictions:
        return predictions_from([seen.local], seen.judged.logits, classes)


@dataclass
class ValueTask(NodeTask):
    """Learns a number of each node: one output of the module, standardised.

    Parameters
    ----------
    scale : Scale
        Mean and deviation of the training nodes' numbers, the same at all clients.
    """

    scale: Scale = field(default_factory=Scale)

    def place(self, graph: ClientGraph, device: torch.device) -> GraphOnDevice:
        if (targets := graph.targets) is None:
            raise DataError(f"client {graph.client}: its nodes have no numbers (task: values)")
        placed, scaled = placed_on(graph, device), self.scale.apply(targets).to(device)
        # No classes, so that a loss about classes fails
        return placed._replace(y=torch.full_like(placed.y, -1), targets=scaled)

    def loss(self, forward: Forward, graph: GraphOnDevice) -> Tensor:
        assert graph.targets is not None
        out, mask = forward(graph), graph.masks["train"]
        return graph.sum_of_means((out[mask, 0] - graph.targets[mask]).square(), mask)

    def judge(self, forward: Forward, graph: GraphOnDevice) -> Judged:
        assert graph.targets is not None
        return Judged(forward(graph), graph.targets, graph.masks, graph.ptr)

    def training_loss(self, judged: Judged) -> Tensor:
        apart = judged.logits[:, 0] - judged.y
        return judged.means(apart.square(), judged.masks["train"])

    def shares(self, judged: Judged) -> list[Tensor]:
        """Return NaN: a regression has no accuracy."""
        return [torch.full_like(self.training_loss(judged), torch.nan)] * len(ROLES)

    def count(self, judged: Judged, counting: str) -> Errors:
        """Add up errors in the numbers' own unit."""
        apart = (judged.logits[:, 0] - judged.y).double() * self.scale.deviation
        return Errors.of(apart, judged.masks)

    def predictions(self, seen: Seen, classes: Sequence[str] | None) -> Predictions:
        values = self.scale.undo(seen.judged.logits[:, 0].double())
        return predictions_from([seen.local], values)


@dataclass
class LinkTask(NodeTask):
    """Learns which nodes are linked, from the two rows of a pair.

    Parameters
    ----------
    val, test : float
        Shares of each client's edges that are held out.
    seed : int
        Seed, with the client, of the held-out edges and of as many pairs without an edge.
    decoder : str
        ``dot``: the logit of a pair is the rows' product. ``mlp``: the module computes it.
    """

    val: float = 0.1
    test: float = 0.2
    seed: int = 0
    decoder: str = DOT
    _splits: dict[int, LinkSplit] = field(default_factory=dict)
    _weights: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # edges, and theirs

    def split(self, graph: ClientGraph) -> LinkSplit:
        """Return the client's held-out edges, always the same."""
        if graph.client not in self._splits:
            edges = graph.edge_index
            if edges is None or not edges.shape[1]:
                raise DataError(f"client {graph.client} has no edges, and links are to be learnt")
            rng = generator(self.seed, "links", graph.client)
            self._splits[graph.client] = split_links(
                edges, graph.y.numel(), self.val, self.test, rng
            )
        return self._splits[graph.client]

    def place(self, graph: ClientGraph, device: torch.device) -> GraphOnDevice:
        """Move the graph without its held-out edges and labels."""
        split, placed = self.split(graph), placed_on(graph, device)
        if placed.edge_weight is not None:
            self._weights[graph.client] = placed.edge_index, placed.edge_weight
        nobody = torch.zeros_like(placed.y, dtype=torch.bool)
        return self.over(placed, split.messages.to(device))._replace(
            y=torch.full_like(placed.y, -1),
            masks=dict.fromkeys(ROLES, nobody),
            links=LinkSplit(*(part.to(device) for part in vars(split).values())),
        )

    def over(self, graph: GraphOnDevice, edges: Tensor) -> GraphOnDevice:
        if graph.client not in self._weights:
            return graph._replace(edge_index=edges)
        weight = values_at(edges, *self._weights[graph.client], graph.y.numel())
        return graph._replace(edge_index=edges, edge_weight=weight)

    def weight(self, graph: ClientGraph) -> int:
        return self.split(graph).messages.shape[1] // 2

    def loss(self, forward: Forward, graph: GraphOnDevice) -> Tensor:
        """Return the cross-entropy of training edges and as many drawn pairs without an edge."""
        rows = None if self.decoder == MLP else forward(graph)  # whose dropout is drawn first
        # By PyTorch's own generator, which is seeded for the round as for dropout
        pairs, is_edge = drawn_pairs(graph.edge_index, graph.y.numel(), None)
        score = self.scores(forward, graph, pairs) if rows is None else dot_products(rows, pairs)
        return functional.binary_cross_entropy_with_logits(score, is_edge.to(score.dtype))

    def scores(self, forward: Forward, graph: GraphOnDevice, pairs: Tensor) -> Tensor:
        if self.decoder == MLP:
            return forward(graph._replace(pairs=pairs))
        return dot_products(forward(graph), pairs)

    def judge(self, forward: Forward, graph: GraphOnDevice) -> Judged:
        """Return the logits of all pairs; test pairs use the validation edges too."""
        split = graph.links
        assert split is not None
        early = self.scores(forward, graph, split.pairs)
        return judged_pairs(
            split, early, self.scores(forward, self.over(graph, split.later), split.pairs)
        )

    def snapshot(
        self, seen: Sequence[Seen], models: list[SavedModels], classes: Sequence[str] | None
    ) -> Snapshot:
        rows, known = [], []
        for local, graph, _, forward in seen:
            assert graph.links is not None
            edges = both_directions(graph.links.pairs[:, graph.links.is_edge])  # held-out ones too
            names = _named(local)
            client = np.full(len(names), local.client)
            out = forward(self.over(graph, edges)).float().cpu().numpy()
            nobody = np.zeros(len(names), bool)
            rows.append(Embeddings(client, names, np.arange(len(names)), nobody, out))
            one, other = names[edges.cpu().numpy()]
            known.append(KnownLinks(np.full(len(one), local.client), one, other))
        if not rows:
            return Snapshot(None, models)
        return Snapshot(None, models, Embeddings.join(rows), KnownLinks.join(known))


def _named(graph: ClientGraph) -> NDArray[np.generic]:
    names = called([graph])
    return names.numpy() if isinstance(names, Tensor) else np.asarray(names)


NODES = NodeTask()
