"""The ego-networks of one SuperNode under LocalSage+ and FedSage+, in one tensor program.

Every client has its own NeighGen and its own classifier; no number of one client depends on
another's: any assignment to cohorts gives the same result. First the generator learns on
the impaired ego-networks, together with the classifier; then the ego-networks are mended once, and
the classifier starts again on the mended ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from flower_graph.engine.mini_batches import BatchOrder, epochs_of
from flower_graph.errors import StateLostError
from flower_graph.ops.grouped import group_sum
from flower_graph.ops.mending import Slots, mean_by_client, nearest_hidden, number_loss, slots
from flower_graph.rng import generator
from flower_graph.strategies.fed_sage.neighbour_generation import (
    CLASSIFIER,
    ENCODER,
    FEATURES,
    LATENT,
    NEIGHBOURS,
    Mended,
    SageGraph,
    Tensors,
    bounds,
    class_loss,
    classify,
    encode,
    generate,
    initial_weights,
    judge,
    mend,
    owners,
    parameter_names,
    predict_numbers,
    rounded,
)

if TYPE_CHECKING:
    from flower_graph.data.partition.ego_networks import EgoNetwork

# NeighGen's own optimiser, as published.
GENERATOR_RATE, GENERATOR_DECAY = 0.001, 1e-4
GENERATOR_NAMES = parameter_names(ENCODER + FEATURES)
FEATURE_NAMES = parameter_names(FEATURES)
CLASSIFIER_NAMES = parameter_names(CLASSIFIER)
NOT_YET = -1
MEAN = "mean."  # of the classifier that all were last judged with


class SageSettings(NamedTuple):
    """What the server tells every client."""

    hidden: int  # Width of the classifier's two layers
    learning_rate: float  # The classifier's Adam
    weight_decay: float
    local_epochs: int  # Of the classifier in a round
    # Steps of the generator before the first round; FedSage+ takes as many again together
    generator_epochs: int
    seed: int  # The run's seed
    batch_size: int | None = None  # Training nodes of a classifier's step; without it all


class Upload(NamedTuple):
    """What a client shows of its generator: how it makes the neighbours that are to be judged."""

    rows: Tensor  # [c] nodes that miss neighbours, and [n] how many each, at most NEIGHBOURS
    missing: Tensor
    latent: Tensor  # [n, LATENT] these nodes encoded, noise added
    weights: Tensors  # Stacked weights of fGen


class Scores(NamedTuple):
    """How good the clients' classifiers are: ``[c]`` loss, ``[c, 3]`` correct, ``[c, 3]`` size."""

    loss: Tensor
    correct: Tensor
    size: Tensor


class SageCohort:
    """Generators and classifiers of some ego-networks."""

    def __init__(
        self,
        networks: Sequence[EgoNetwork],
        classes: int,
        settings: SageSettings,
        device: torch.device,
        tensors: Tensors | None = None,
    ) -> None:
        self.settings, self.classes, self.device = settings, classes, device
        self.clients = torch.tensor([network.client for network in networks])
        self.graph = SageGraph(networks, settings.seed, device)
        self.tensors = self._initial() if tensors is None else tensors
        self._mended: Mended | None = None

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return self.clients.numel()

    def _start(self) -> Tensors:
        s = self.settings
        return initial_weights(self.graph.x.shape[1], s.hidden, self.classes, s.seed)

    def _initial(self) -> Tensors:
        state: Tensors = {}
        for name, value in self._start().items():
            state[name] = value.expand(self.num_clients, *value.shape).to(self.device).clone()
            state[f"exp-avg.{name}"] = torch.zeros_like(state[name])
            state[f"exp-avg-sq.{name}"] = torch.zeros_like(state[name])
            state[f"step.{name}"] = torch.zeros(self.num_clients, device=self.device)
        state["round"] = torch.full((self.num_clients,), NOT_YET, dtype=torch.int64)
        state["epoch"] = torch.full((1,), NOT_YET, dtype=torch.int64)
        state["averaged"] = torch.zeros(1, dtype=torch.int64)
        for name in CLASSIFIER_NAMES:
            state[f"{MEAN}{name}"] = state[name][0].clone()
        return state

    # The generator

    def pretrain(self) -> None:
        """Train generators and classifiers on the impaired ego-networks, each on its own."""
        if int(self.tensors["epoch"]) != NOT_YET:
            return  # the message came twice
        for epoch in range(self.settings.generator_epochs):
            weights = self._weights(GENERATOR_NAMES + CLASSIFIER_NAMES)
            loss = self._generator_loss(weights, self._noise("local", epoch)).sum()
            self._step(weights, loss, GENERATOR_RATE, GENERATOR_DECAY)
        self._forget(FEATURE_NAMES)  # FedSage+ goes on with an optimiser of its own
        self.tensors["epoch"].fill_(0)

    def upload(self, epoch: int) -> Upload:
        """Return what the other clients need to judge the generators in an epoch, from 1."""
        graph = self.graph
        with torch.no_grad():
            weights = {name: self.tensors[name] for name in GENERATOR_NAMES}
            latent = encode(weights, graph.rest)
        chosen = (graph.impaired.missing > 0).nonzero().flatten()
        owner = owners(graph.rest.ptr, self.device)[chosen]
        return Upload(
            torch.bincount(owner, minlength=self.num_clients),
            graph.impaired.missing[chosen].clamp(max=NEIGHBOURS),
            (latent + self._noise("together", epoch))[chosen],
            {name: self.tensors[name] for name in FEATURE_NAMES},
        )

    def judge(self, upload: Upload, authors: Tensor) -> Tensors:
        """Return the gradients that this cohort's clients have for all authors' ``fGen``."""
        # authors [a]
        weights = {n: w.to(self.device).requires_grad_() for n, w in upload.weights.items()}
        slot, ptr = slots(upload.missing.to(self.device)), bounds(upload.rows)
        made = generate(weights, upload.latent.to(self.device), ptr, slot)
        author = authors.to(self.device)[owners(ptr, self.device)][slot.parent]
        graph, judges = self.graph, self.clients.to(self.device)
        wanted = judge(made.detach(), author, graph.sparse_x, graph.ptr, judges)
        grads = torch.autograd.grad(made, list(weights.values()), wanted)
        return dict(zip(weights, grads, strict=True))

    def learn(self, epoch: int, gradient: Tensors, others: int) -> None:
        """Step ``fGen`` on its own loss and the others' judgement of the same neighbours."""
        # gradient [c, ...]
        if int(self.tensors["epoch"]) >= epoch:
            return
        weights = self._weights(FEATURE_NAMES)
        frozen = {n: self.tensors[n] for n in (*parameter_names(ENCODER), *CLASSIFIER_NAMES)}
        local = self._generator_loss(weights | frozen, self._noise("together", epoch)).sum()
        grads = torch.autograd.grad(local, list(weights.values()))
        # The own term is a mean over the client's nodes, the others' arrives as a sum.
        nodes = torch.tensor(self.graph.rest.ptr, device=self.device).diff().clamp(min=1)
        for (name, weight), grad in zip(weights.items(), grads, strict=True):
            theirs = gradient[name].to(self.device) / nodes.view(-1, *[1] * (grad.dim() - 1))
            weight.grad = (grad + theirs) / (others + 1)
        self._adam(weights, GENERATOR_RATE, GENERATOR_DECAY, None)
        self.tensors["epoch"].fill_(epoch)

    def _generator_loss(self, weights: Tensors, noise: Tensor) -> Tensor:
        """Add up number, features and classes on the impaired ego-networks, ``[c]``."""
        graph, missing = self.graph, self.graph.impaired.missing
        z = encode(weights, graph.rest)
        numbers = predict_numbers(weights, z, graph.rest.ptr)
        count, true = rounded(numbers), missing.clamp(max=NEIGHBOURS)
        slot = slots(torch.maximum(count, true))
        made = generate(weights, z + noise, graph.rest.ptr, slot)
        is_true = slot.slot < true[slot.parent]
        matched = Slots(slot.parent[is_true], slot.slot[is_true])
        nearest = nearest_hidden(made[is_true], matched, graph.impaired, graph.x)
        distance = (made[is_true] - graph.x[nearest]).square().sum(1)
        by_node = torch.zeros_like(numbers).index_add(0, matched.parent, distance)
        parent = slot.parent.where(slot.slot < count[slot.parent], NOT_YET)
        mended = mend(graph.rest, graph.impaired.edge_index, made, slot, parent)
        logits = classify(weights, mended)
        return (
            number_loss(numbers, missing, graph.rest.ptr)
            + mean_by_client(by_node, graph.rest.ptr)
            + class_loss(logits, graph.y[graph.impaired.kept], graph.kept_train, graph.rest.ptr)
        )

    def _noise(self, purpose: str, epoch: int) -> Tensor:
        """Draw each client's noise on its encoded nodes."""
        ptr = self.graph.ptr if purpose == "mend" else self.graph.rest.ptr
        sizes = torch.tensor(ptr).diff().tolist()
        seed = self.settings.seed
        parts = [
            torch.randn(size, LATENT, generator=generator(seed, "noise", purpose, client, epoch))
            for client, size in zip(self.clients.tolist(), sizes, strict=True)
        ]
        return torch.cat(parts).to(self.device)

    # The classifier

    def train(self, server_round: int, chosen: Tensor) -> None:
        """Step the classifiers of some clients on the mended ego-networks."""
        # chosen [p]
        due = chosen[self.tensors["round"][chosen] < server_round]
        if not due.numel():
            return
        mended = self._mend_all()
        graph, settings = self.graph, self.settings
        order = BatchOrder(settings.batch_size, settings.seed, server_round, "local")
        clients, epochs = self.clients.tolist(), settings.local_epochs
        for epoch in epochs_of(graph.masks[0], graph.ptr, clients, order, epochs=epochs):
            for part in epoch:
                weights = self._weights(CLASSIFIER_NAMES)
                logits = classify(weights, mended)
                trains = graph.masks[0] if part.nodes is None else graph.masks[0] & part.nodes
                loss = class_loss(logits, graph.y, trains, graph.ptr).sum()
                moving = due if part.moves is None else due[part.moves[due]]
                self._step(weights, loss, settings.learning_rate, settings.weight_decay, moving)
        self.tensors["round"][due] = server_round

    def begin(self) -> None:
        """Before the first round: put the classifiers back to where all methods start."""
        if int(self.tensors["epoch"]) == NOT_YET:
            raise StateLostError("these clients have no generator: send train.generate first")
        if int(self.tensors["round"].max()) != NOT_YET:
            return
        start = self._start()
        for name in CLASSIFIER_NAMES:
            self.tensors[name].copy_(start[name])
        self._forget(CLASSIFIER_NAMES)
        self.tensors["round"].fill_(0)

    def score(self, shared: Tensors | None = None) -> Scores:
        """Judge every client's classifier, or one for all, on its own mended ego-network."""
        # shared [a, b]
        self.tensors["averaged"].fill_(shared is not None)
        for name, value in (shared or {}).items():
            self.tensors[f"{MEAN}{name}"].copy_(value)
        graph, logits = self.graph, self.logits()
        with torch.no_grad():
            loss = class_loss(logits, graph.y, graph.masks[0], graph.ptr)
        right = logits.argmax(1) == graph.y
        correct = [group_sum((right & mask).long(), graph.ptr) for mask in graph.masks]
        size = [group_sum(mask.long(), graph.ptr) for mask in graph.masks]
        return Scores(loss, torch.stack(correct, 1), torch.stack(size, 1))

    @property
    def is_averaged(self) -> bool:
        """Whether all were last judged with one classifier."""
        return bool(self.tensors["averaged"])

    def judged(self) -> Tensors:
        """Return the classifier that all were last judged with, or the clients' own, stacked."""
        start = MEAN if self.is_averaged else ""
        return {name: self.tensors[f"{start}{name}"] for name in CLASSIFIER_NAMES}

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Return what the classifiers say of the real nodes, ``[n, k]``."""
        weights = self.judged()
        if self.is_averaged:
            weights = {n: w.expand(self.num_clients, *w.shape) for n, w in weights.items()}
        return classify(weights, self._mend_all())

    def mean_weights(self, chosen: Tensor) -> tuple[dict[str, Tensor], int]:
        """Average some clients' classifiers by their training nodes, which are counted too."""
        size = group_sum(self.graph.masks[0].double(), self.graph.ptr)[chosen.to(self.device)]
        share = size / size.sum().clamp(min=1)
        mean = {
            name: torch.tensordot(share, self.tensors[name][chosen].double(), 1).float()
            for name in CLASSIFIER_NAMES
        }
        return mean, int(size.sum())

    def set_weights(self, server_round: int, chosen: Tensor, weights: Tensors) -> None:
        """Give some clients averaged weights, unless they took part in the round already."""
        due = chosen[self.tensors["round"][chosen] < server_round]
        for name in CLASSIFIER_NAMES:
            self.tensors[name][due] = weights[name].to(self.device)

    def _mend_all(self) -> Mended:
        """Mend the whole ego-networks; the generators do not change any more."""
        if self._mended is None:
            graph = self.graph
            weights = {name: self.tensors[name] for name in GENERATOR_NAMES}
            with torch.no_grad():
                z = encode(weights, graph.whole)
                slot = slots(rounded(predict_numbers(weights, z, graph.ptr)))
                made = generate(weights, z + self._noise("mend", 0), graph.ptr, slot)
            self._mended = mend(graph.whole, graph.edge_index, made, slot, slot.parent)
        return self._mended

    # Adam

    def _weights(self, names: tuple[str, ...]) -> Tensors:
        return {name: self.tensors[name].detach().requires_grad_() for name in names}

    def _forget(self, names: tuple[str, ...]) -> None:
        for name in names:
            for kind in ("exp-avg", "exp-avg-sq", "step"):
                self.tensors[f"{kind}.{name}"].zero_()

    def _step(
        self,
        weights: Tensors,
        loss: Tensor,
        rate: float,
        decay: float,
        chosen: Tensor | None = None,
    ) -> None:
        grads = torch.autograd.grad(loss, list(weights.values()))
        for weight, grad in zip(weights.values(), grads, strict=True):
            weight.grad = grad
        self._adam(weights, rate, decay, chosen)

    def _adam(self, weights: Tensors, rate: float, decay: float, chosen: Tensor | None) -> None:
        """Step each chosen client's part of the stacked weights, in place."""
        places = range(self.num_clients) if chosen is None else chosen.tolist()
        for name, weight in weights.items():
            assert weight.grad is not None
            grad = weight.grad
            state = [self.tensors[key] for key in (name, f"exp-avg.{name}", f"exp-avg-sq.{name}")]
            steps = self.tensors[f"step.{name}"]
            adam(
                [state[0][c] for c in places],
                [grad[c] for c in places],
                [state[1][c] for c in places],
                [state[2][c] for c in places],
                [],
                [steps[c] for c in places],
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=rate,
                weight_decay=decay,
                eps=1e-8,
                maximize=False,
            )
