"""The server's half of a round, as tensors: one step of ``theta_s``, and users' gradients.

For link prediction the server knows some edges, and predicts the others.

This file needs PyTorch alone: it runs where Flower and Ray are not installed.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from flower_graph.config.module import LinksSection
from flower_graph.config.rules import at_least
from flower_graph.data.description import server_graph
from flower_graph.engine.cohort import Judged
from flower_graph.errors import DataError, DivergedError
from flower_graph.models import PairModel, SplitModel
from flower_graph.ops.adam import Adam
from flower_graph.ops.graph import (
    LaplacianTerm,
    SortedEdges,
    laplacian_regulariser,
    laplacian_term,
    sorted_edges,
)
from flower_graph.ops.links import (
    LinkSplit,
    dot_products,
    draw_absent,
    ends,
    split_links,
    undirected,
)
from flower_graph.outputs.files import (
    NO_CLIENT,
    Embeddings,
    KnownLinks,
    Predictions,
    SavedModels,
    Snapshot,
    role_of,
)
from flower_graph.rng import generator, seeded
from flower_graph.storage.reading import StateDict
from flower_graph.strategies.nfedgnn.config import StrategyConfig
from flower_graph.strategies.nfedgnn.users import UserSettings
from flower_graph.wire.keys import ROLES

LOG = logging.getLogger(__name__)
MODULES = "flower_graph.strategies.nfedgnn.modules"
WARM_UP = 0.1  # share of the rounds in which ``warmup-cosine`` raises the step size


def scheduled(schedule: str, rate: float, server_round: int, rounds: int) -> float:
    """Return the step size of a round of so many; rounds count from 1. It is never 0."""
    if schedule == "constant":
        return rate
    rise = math.ceil(WARM_UP * rounds) if schedule == "warmup-cosine" else 0
    if server_round <= rise:
        return rate * server_round / rise
    done = (server_round - 1 - rise) / (rounds - rise)
    return rate * (1 + math.cos(math.pi * done)) / 2


class RelayServer:
    """The server's model and data, as tensors."""

    # Made of the edges between users that have answered, when it is needed
    _graph: Tensor | SortedEdges | None
    _term: LaplacianTerm | None

    def __init__(
        self,
        data: Any,
        model: nn.Module,
        section: StrategyConfig,
        users: UserSettings,
        device: torch.device,
    ) -> None:
        at_least(1).check("latent_size", users.latent_size)
        self.section, self.reg_weight = section, section.smoothness
        self.device, self.seed = device, users.seed
        self.model = model.to(device)
        self.optimizer = Adam(self.model.parameters(), weight_decay=section.weight_decay)
        # What predicts and is evaluated: the model that is trained, or the average of its weights
        self._decay = section.server_average
        self.eval_model = copy.deepcopy(self.model) if self._decay else self.model
        self.latent = torch.zeros(0, users.latent_size, device=device)
        self.known = torch.zeros(0, dtype=torch.bool, device=device)
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
        # In 32 bits, if the model can use edges in that form
        takes_sorted = getattr(self.model, "takes_sorted", False)
        in_order = sorted_edges(edges, self.num_nodes) if takes_sorted else None
        self._all_edges = (in_order or edges).to(self.device)
        self.num_classes = 1 + int(y.max())
        self.right = torch.zeros(self.num_nodes, dtype=torch.bool, device=self.device)
        self._hold(self.latent, self.known)

    def _hold(self, latent: Tensor, known: Tensor) -> None:
        more = self.num_nodes - len(known)
        self.latent = functional.pad(latent.to(self.device), (0, 0, 0, more))
        self.latent[~self.present] = 0
        self.known = functional.pad(known.to(self.device), (0, more)) & self.present
        self._forget_graph()

    def receive(self, users: Tensor, latent: Tensor) -> None:
        users = users.to(self.device)
        self.latent[users] = latent.to(self.device)
        if not self.known[users].all():
            self.known[users] = True
            self._forget_graph()

    @property
    def graph(self) -> Tensor | SortedEdges:
        """The edges between users that have answered, in the form that the model takes."""
        # Not as each SuperNode's first answer comes: there may be a million.
        if self._graph is None:
            edges = self._all_edges
            if self.known.all():
                self._graph = edges
            elif isinstance(edges, SortedEdges):
                self._graph = edges.among(self.known)
            else:
                self._graph = among(edges, self.known)
        return self._graph

    def _forget_graph(self) -> None:
        self._graph, self._term = None, None

    def move(self, server_round: int, rate: float) -> None:
        self.optimizer.lr = rate
        self.optimizer.step()
        self._average(server_round)

    def gradients(
        self, server_round: int, latent: Tensor, heard: Tensor
    ) -> tuple[dict[str, float], Tensor]:
        """Compute the loss over the users in ``heard``, and every latent vector's gradient."""
        # latent [n, h], heard [n]
        latent = latent.detach().requires_grad_()
        self.optimizer.zero_grad()
        # The regulariser's part goes first and by itself, so that its tensors are free again.
        smooth = self._smoothness(latent)
        self.model.train()
        with seeded(self.device, self.seed, "server-dropout", server_round):
            logits = self.model(latent, self.graph, *self._learnt_from(heard))
        entropy = self.entropy(logits, heard, server_round)
        loss = entropy.detach() + self.reg_weight * smooth
        if not torch.isfinite(loss):
            keys = " or ".join(self.section.steadying)
            raise DivergedError(f"round {server_round}: the loss is {loss.item()}; lower {keys}")
        entropy.backward()
        if longest := self.section.gradient_norm:
            clip_grad_norm_([*self.model.parameters(), latent], longest)
        assert latent.grad is not None
        losses = {"loss": loss, "cross_entropy": entropy, "regulariser": smooth}
        return {name: one.item() for name, one in losses.items()}, latent.grad

    def _learnt_from(self, heard: Tensor) -> tuple[Tensor, ...]:
        """Return the nodes ``[m]`` whose logits the loss needs, if the model can use that."""
        # A GPU would have to be waited for.
        if self.device.type != "cpu" or not getattr(self.model, "takes_nodes", False):
            return ()
        return ((self.masks["train"] & heard).nonzero().flatten(),)

    def _smoothness(self, latent: Tensor) -> Tensor:
        """Return the regulariser; add its gradient to the latent vectors'."""
        if not self.reg_weight:
            return torch.zeros((), device=self.device)
        if self._term is None:
            self._term = laplacian_term(self.graph, self.num_nodes)
        smooth = laplacian_regulariser(self._term, latent)
        (self.reg_weight * smooth).backward()
        return smooth.detach()

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
    def _average(self, server_round: int) -> None:
        """Let the average follow the weights: their plain mean, until there are enough of them."""
        if not self._decay:
            return
        share = max(1 - self._decay, 1 / server_round)
        now = self.model.state_dict()
        for name, kept in self.eval_model.state_dict().items():
            if kept.is_floating_point():
                kept.lerp_(now[name], share)
            else:
                kept.copy_(now[name])

    @torch.no_grad()
    def logits(self) -> Tensor:
        self.eval_model.eval()
        result: Tensor = self.eval_model(self.latent, self.graph)
        return result

    def judge(self) -> Judged:
        return Judged(self.logits(), self.y, self.masks, [0, len(self.y)])

    def accuracy(self) -> dict[str, float]:
        """Return the accuracy over each mask; NaN where a mask is missing or empty."""
        judged = self.judged = self.judge()
        self.right = judged.logits.argmax(1) == judged.y
        return {r: judged.means(self.right, mask).item() for r, mask in judged.masks.items()}

    def snapshot(self) -> Snapshot:
        """Return the server's half of a run, of users that have answered."""
        rows = self._rows(self.latent)
        users = torch.from_numpy(rows.number)
        role = role_of(*(self.masks[name].cpu()[users] for name in ROLES))
        logits, label = self.logits().cpu()[users], self.y.cpu()[users]
        predictions = Predictions.of(logits, NO_CLIENT, rows.node, role, label, self.classes)
        return Snapshot(predictions, server_models(self.eval_model), rows)

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


def among(edges: Tensor, known: Tensor) -> Tensor:
    """Return the edges between known nodes."""
    return edges[:, known[edges].all(0)]


# Links -------------------------------------------------------------------------------------------


def held_links(edge_index: Tensor, num_nodes: int, links: LinksSection, seed: int) -> LinkSplit:
    """Hold out edges of the whole graph as one client with number 0 would."""
    rng = generator(seed if links.seed is None else links.seed, "links", 0)
    return split_links(edge_index, num_nodes, links.val, links.test, rng)


class LinkRelayServer(RelayServer):
    """The server's model and data, as tensors, where links are learnt.

    The logit of a pair is its rows' dot product, or what a ``PairModel``'s decoder gives.
    Arguments are those of ``RelayServer``, and ``links``: what is held out.
    """

    # Any: arguments are those of its parent
    def __init__(self, *data_and_model: Any, links: LinksSection, **more: Any) -> None:
        self.links = links
        super().__init__(*data_and_model, **more)

    def take(self, data: Any, left: Sequence[int] = ()) -> None:
        """Take a graph; hold out some of its edges. Labels and masks of nodes play no part."""
        edges, y, _ = server_graph(data)
        n = len(y)
        split = held_links(edges, n, self.links, self.seed)
        self.split = LinkSplit(*(part.to(self.device) for part in vars(split).values()))
        self.whole = edges.to(self.device)
        super().take(data, left)
        self.num_classes = 2
        self.masks = {role: torch.zeros_like(self.present) for role in ROLES}
        self._all_edges = self.split.messages
        self._forget_graph()

    def _forget_graph(self) -> None:
        super()._forget_graph()
        self._own: Tensor | None = None

    def _learnt_from(self, heard: Tensor) -> tuple[()]:
        """Return no nodes: the loss needs the rows of all."""
        return ()

    def entropy(self, logits: Tensor, heard: Tensor, server_round: int) -> Tensor:
        """Compute the cross-entropy of training edges and as many drawn pairs without an edge."""
        # logits: rows of nodes [n, h]; of pairs whose users were heard
        if self._own is None:
            self._own = undirected(among(self.split.messages, self.known).cpu(), self.num_nodes)
        own = self._own
        rng = generator(self.seed, "absent-links", server_round)
        absent = draw_absent(own, self.num_nodes, len(own), rng)
        pairs = ends(torch.cat([own, absent]), self.num_nodes).to(self.device)
        is_edge = torch.arange(pairs.shape[1], device=self.device) < len(own)
        kept = heard[pairs[0]] & heard[pairs[1]]
        if not kept.any():
            return 0 * logits.sum()
        scores, truth = _scores(self.model, logits, pairs[:, kept]), is_edge[kept].to(logits.dtype)
        return functional.binary_cross_entropy_with_logits(scores, truth)

    @torch.no_grad()
    def rows(self, edges: Tensor) -> Tensor:
        """Return nodes' rows over some edges, for users that have answered, ``[n, h]``."""
        self.eval_model.eval()
        result: Tensor = self.eval_model(self.latent, among(edges, self.known))
        return result

    @torch.no_grad()
    def judge(self) -> Judged:
        """Judge pairs; for test pairs the model also sees the validation edges."""
        split = self.split
        early, later = (
            _scores(self.eval_model, self.rows(edges), split.pairs)
            for edges in (split.messages, split.later)
        )
        score = torch.where(split.role == len(ROLES) - 1, later, early)
        masks = {role: split.role == number for number, role in enumerate(ROLES)}
        logits = torch.stack([torch.zeros_like(score), score], 1)
        return Judged(logits, split.is_edge.long(), masks, [0, len(score)])

    def snapshot(self) -> Snapshot:
        edges = among(self.whole, self.known).cpu().numpy()
        known = KnownLinks(np.full(edges.shape[1], NO_CLIENT), *self.nodes[edges])
        rows = self._rows(self.rows(self.whole))
        return Snapshot(None, server_models(self.eval_model), rows, known)


def _scores(model: nn.Module, rows: Tensor, pairs: Tensor) -> Tensor:
    """Return the logits ``[m]`` of pairs ``[2, m]`` from the nodes' rows ``[n, h]``."""
    if isinstance(model, PairModel):
        return model.decoder(rows, pairs)  # type: ignore[no-any-return]
    return dot_products(rows, pairs)


# Outputs -----------------------------------------------------------------------------------------


def server_models(model: nn.Module) -> list[SavedModels]:
    """Return the server's half as it was trained; nothing for a module of somebody's own."""
    rows = model.rows if isinstance(model, PairModel) else model
    if not isinstance(rows, SplitModel):
        LOG.warning("%s: saved by its own name alone, in weights.safetensors", type(rows).__name__)
        return []
    name, arguments = type(rows).__name__, dict[str, object](rows.arguments)
    if model is not rows:
        name, arguments = "SplitPairs", {"rows": name} | arguments
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    return [SavedModels(f"{MODULES}.{name}", arguments, [NO_CLIENT], state, {})]
