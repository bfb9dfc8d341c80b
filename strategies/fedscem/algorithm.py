"""FedSCem: node classification over ego-networks by averaging masked embeddings.

Xie, Xiong and Yang, "Federated Node Classification over Distributed Ego-Networks with Secure
Contrastive Embedding Sharing", CIKM 2024. Every client holds an ego-network, its own GNN and
classifier, and a projection head ``f``. Ego-networks overlap: of the same node, one
client may know neighbours that another client lacks.

Once, before the first round:

1. clients make keys, and the server hands the public ones on;
2. *secure alignment* (section 4.3.1): all clients agree on one order of the *slots*, the nodes
   that at least two clients hold; the server learns neither nodes nor holders.

Pass ``t``, in two exchanges (plain sums: one). Steps 3 and 4 end round ``t - 1``, whose sums the
first exchange brings; steps 5 to 7 begin round ``t``:

3. client: takes the sums' pads off, ``h~_v = sum / count`` (equation 7), for its own slots
   (``mean_embeddings``);
4. client: *contrastive fusion*, a step on ``L_nc + mu L_ct``, NT-Xent between ``f(h)`` and
   ``f(h~)`` (equations 8 to 11; ``EgoGroup.fuse``);
5. client: a step on ``L_nc`` (equation 3; ``EgoGroup.train``), then ``H = GNN(X, A)`` (equation 1;
   ``EgoGroup.embed``);
6. client -> server: embeddings by slot and a 1 for each held slot (the activation mask;
   ``ops.grouped.sums_by``), under pads and masks (*secure aggregation*, section 4.3.2), and its
   measurements after step 4 (``measure``);
7. server: adds the vectors; the second exchange removes the masks. The pads stay, so clients divide
   (paper: the server); clients prepare the keys of round ``t + 1`` in the same message. The server
   reads the mean measurements (``mean_metrics``).

After the last round one more pass does steps 3, 4 and 6; step 6 then sends measurements alone.

*Variants.* ``full`` is FedSCem. ``minus`` (FedSCem−) only embeds in step 5. ``iter``
(FedSCem_iter) steps on ``mu L_ct`` alone in step 4, then takes step 5; with mini-batches, both
losses alternate in step 4, and step 5 only embeds. *Model sharing*: with ``fedavg`` or ``fedprox``
the clients' weights are added up as well, and every pass begins with their mean (FedAvg;
``mean_model``), which FedProx pulls to.

*Absent clients* keep their weights. A round in which too few clients answer is skipped: nothing of
it is revealed, and step 4 goes on without ``L_ct``.

*Unlike the paper*, or unsaid there:

- of a node with two holders, each holder can compute the other holder's embedding;
- ``alignment: plain`` shows the server identities and sums, ``aggregation: plain`` each SuperNode's
  sum;
- both losses are means over a client's nodes; equations 3, 10 and 11 have sums;
- activation masks travel in every round (paper: computed once), as clients may be absent.

*Where to change* the loss: ``EgoGroup._classification`` and ``_contrast`` (NT-Xent:
``flower_graph/ops/contrast.py``); the model: ``EgoGCN`` in ``modules.py``; upload:
``VectorEncoding.add_up`` and ``Layout`` in ``vector.py``; download: ``Sums`` there; averaging:
``mean_embeddings``, ``mean_model``; the adding: ``SecureSum.add`` in
``flower_graph/server/sums.py``. ``vector.py`` also has the pads
(``flower_graph/secure/align/client.py`` says why they hide a sum). ``client.py`` and
``strategy.py`` carry the two halves over Flower; this file runs without it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.data.description import NewGraph
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import Cohort, Learner, MiniBatch, Tensors, epochs_of, placed_on
from flower_graph.ops.adam import Adam
from flower_graph.ops.contrast import projected_nt_xent
from flower_graph.ops.graph import pointers
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.strategies.fedscem.modules import EgoGCN, first_model
from flower_graph.wire.keys import ROLES

# What a client measures, as sums over clients: accuracies with the number of clients that have
# such nodes, losses with the number of clients that have them.
METRIC_NAMES = (
    *("train", "has-train", "val", "has-val", "test", "has-test"),
    *("cross-entropy", "contrast", "has-contrast"),
)
FIRST = "gnn.first.weight"  # clients store only its rows for features they have
# For each client: ``2 t - 1`` once it has trained for round ``t``, ``2 t`` once it has used its
# means. A repeated message, or a resumed run, does neither a second time.
STEPS = "steps"

# Client: its steps -------------------------------------------------------------------------------


class Shared(NamedTuple):
    """Mean embeddings of the nodes that several clients hold."""

    place: Tensor  # [s] row of each such node among the chosen clients' nodes, rising
    mean: Tensor  # [s, h] its mean embedding, h~


@dataclass
class EgoGroup:
    """Some ego-networks, each with a model of its own, which train as one tensor program.

    Nothing mixes clients, so any assignment of clients to groups gives the same result up to the
    rounding of sums.
    """

    learner: Learner  # the clients as a group
    settings: EgoSettings
    # The weights that ``proximal`` pulls to, FedProx's term
    begun: Mapping[str, Tensor] = field(default_factory=dict)
    proximal: float = 0.0

    def __post_init__(self) -> None:
        self.graph, module = self.learner.graph, self.learner.module
        assert isinstance(module, EgoGCN)
        self.module = module

    def fuse(
        self, shared: Shared | None, server_round: int, variant: str = "full"
    ) -> Tensor | None:
        """Fuse embeddings with their means (step 4): descend on ``L_nc + mu L_ct`` (equation 11).

        ``iter`` descends on ``mu L_ct`` alone, by batches in turn with ``L_nc``. Without means of
        any client (None) there is no ``L_ct``, and ``iter`` has the turns on ``L_nc`` alone.
        Returns each client's mean of NT-Xent over its shared nodes in the last epoch.
        """
        train, in_turn = self.graph.masks["train"], variant == "iter" and self._has_batches
        if shared is None and variant == "iter":
            if in_turn:
                self.train(server_round)
            return None
        if shared is None:
            none = self.graph.y.new_zeros(0)
            shared = Shared(none, none.new_zeros(0, self.settings.hidden, dtype=torch.float32))
        others: Iterator[Sequence[MiniBatch]] = repeat(())
        if in_turn:
            others = self._epochs("local", train, server_round)
        fusion = self._epochs("fusion", torch.ones_like(train), server_round)
        losses = list[Tensor]()
        for epoch, turns in zip(fusion, others, strict=False):
            losses = []
            # No client has more batches of training nodes than of all its nodes.
            for part, local in zip_longest(epoch, turns):
                if local is not None:
                    self._classify(local)
                losses.append(self._contrast(part, shared, classify=variant != "iter"))
        total = torch.stack(losses).sum(0)
        return total[0] / total[1]

    def steps_locally(self, variant: str) -> bool:
        """Whether a variant trains in step 5; with batches the turns of ``iter`` are in step 4."""
        return variant != "minus" and not (variant == "iter" and self._has_batches)

    def train(self, server_round: int) -> Tensor:
        """Descend on ``L_nc`` (step 5, equation 3); return the logits from before."""
        every = self._epochs("local", self.graph.masks["train"], server_round)
        logits = [self._classify(part) for epoch in every for part in epoch]
        return logits[0]

    def embed(self) -> Tensor:
        """Return the embeddings ``H`` of all nodes, ``[n, h]`` (equation 1)."""
        return self._embedded().detach()

    @torch.no_grad()
    def logits(self) -> Tensor:
        logits: Tensor = self.module.classifier(self._embedded())
        return logits

    # A step

    def _classify(self, part: MiniBatch) -> Tensor:
        """Step on ``L_nc`` of a batch; return the logits of all nodes from before."""
        logits: Tensor = self.module.classifier(self._embedded())
        self._descend(self._classification(logits, part), part)
        return logits.detach()

    def _contrast(self, part: MiniBatch, shared: Shared, *, classify: bool) -> Tensor:
        """Step on ``mu L_ct`` of a batch, plus ``L_nc`` if ``classify``.

        Return NT-Xent's sum and its number of nodes for each client, ``[2, c]``.
        """
        # A client without shared nodes takes the step too, so that all have taken equally many: its
        # gradient of ``L_ct`` is zero, and only weight decay and Adam's momentum move it.
        h = self._embedded()
        losses, count = self._contrast_losses(h, shared, part)
        loss = self.settings.mu * (losses / count.clamp(min=1)).sum()
        if classify:
            loss = loss + self._classification(self.module.classifier(h), part)
        self._descend(loss, part)
        return torch.stack([losses.detach().double(), count.double()]).cpu()

    def _classification(self, logits: Tensor, part: MiniBatch) -> Tensor:
        """``L_nc``: cross-entropy, mean over each client's training nodes, summed over clients."""
        mask, graph = self.graph.masks["train"], self.graph
        mask = mask if part.nodes is None else mask & part.nodes
        losses = nn.functional.cross_entropy(logits[mask], graph.y[mask], reduction="none")
        return graph.sum_of_means(losses, mask)

    def _contrast_losses(self, h: Tensor, shared: Shared, part: MiniBatch) -> tuple[Tensor, Tensor]:
        """Return each client's sum of NT-Xent, ``[c]``, and its number of shared nodes, ``[c]``."""
        ptr, owner, clients = self.graph.ptr, self.graph.owner, len(self.graph.clients)
        if part.nodes is not None:  # nodes outside the batch are no negatives
            here = part.nodes.nonzero().flatten()
            h, owner = h.index_select(0, here), owner[here]
            kept = part.nodes[shared.place]
            place = (part.nodes.cumsum(0) - 1)[shared.place[kept]]
            shared = Shared(place, shared.mean[kept])
            ptr = pointers(owner, clients).tolist()
        count = torch.bincount(owner[shared.place], minlength=clients)
        bounds = ptr, [0, *count.cumsum(0).tolist()]
        head = dict(self.module.projection.named_parameters())
        weight, tau = head["weight"].mT, self.settings.tau
        losses = projected_nt_xent(h, shared.mean, weight, head["bias"], shared.place, *bounds, tau)
        return losses, count

    def _descend(self, loss: Tensor, part: MiniBatch) -> None:
        """Take an Adam step on the loss plus FedProx's pull; unused parameters decay too."""
        parameters = dict(self.module.named_parameters())
        grads = torch.autograd.grad(loss, [*parameters.values()], materialize_grads=True)
        for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
            if self.proximal:
                grad = grad + self.proximal * (parameter.detach() - self.begun[name])
            parameter.grad = grad
        self.learner.optimiser.step(moves=part.moves)
        del self.module.__dict__["_kept"]  # PyTorch does not count a fused step as a change

    @torch.enable_grad()  # the first caller may need no gradient, but a later step does
    def _embedded(self) -> Tensor:
        """Return the embeddings; they are kept until the weights change."""
        known = [parameter._version for parameter in self.module.parameters()]
        kept: tuple[list[int], Tensor] | None = self.module.__dict__.get("_kept")
        if kept is None or kept[0] != known:
            kept = known, self.module.embed(self.graph.x, self.graph.edge_index)
            self.module.__dict__["_kept"] = kept
        return kept[1]

    @property
    def _has_batches(self) -> bool:
        return self.settings.batch_size is not None

    def _epochs(self, purpose: str, among: Tensor, server_round: int) -> Iterator[list[MiniBatch]]:
        sizes = self.settings.batch_size, self.settings.local_epochs, self.settings.seed
        return epochs_of(self.graph, among, *sizes, purpose, server_round)


# Client: what lasts between rounds --------------------------------------------------------------


class EgoCohort(Cohort):
    """All ego-networks of one SuperNode; ``tensors``: what lasts between rounds, if any did."""

    def __init__(
        self,
        egos: Sequence[ClientGraph],
        settings: EgoSettings,
        tensors: Tensors | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.settings, device = settings, torch.device(device)
        rate, decay = settings.learning_rate, settings.weight_decay
        super().__init__(
            first_model(settings),
            [placed_on(ego, device, is_dense=False) for ego in egos],
            tensors,
            lambda made: Adam(made.parameters(), lr=rate, weight_decay=decay),
            by_rows=(FIRST,),
        )
        never = torch.zeros(len(egos), dtype=torch.int32, device=device)
        self.tensors = {STEPS: never} | self.tensors

    @contextmanager
    def part(self, clients: Sequence[int] | None = None) -> Iterator[EgoGroup]:
        """Yield some clients, or all, as a group; the tensors then have its changes."""
        clients = self.clients if clients is None else clients
        if strange := sorted(set(clients).difference(self.graphs)):
            raise ValueError(f"clients {strange} are not among {self.clients}")
        with self.learners(sorted(clients, key=self._places.__getitem__)) as (learner,):
            yield EgoGroup(learner, self.settings)

    @torch.no_grad()
    def start_from(self, group: EgoGroup, weights: Tensor, *, is_new: bool) -> None:
        """Begin with the server's model, flat; keep it, as ``proximal`` and inactive rows do."""
        held, plain = dict(group.module.named_parameters()), dict(self.module.named_parameters())
        parts = weights.split([parameter.numel() for parameter in plain.values()])
        took = partial(self.take_over, group.learner, replace=is_new)
        group.proximal = self.settings.proximal
        group.begun = {
            name: took(name, held[name], part.view_as(one).to(one.device))
            for (name, one), part in zip(plain.items(), parts, strict=True)
        }

    def is_behind(self, clients: Sequence[int], step: int) -> bool:
        """Whether one of the clients has not come to a step yet (``STEPS``)."""
        places = [self._places[client] for client in clients]
        return bool((self.tensors[STEPS][places] < step).any())

    def note(self, clients: Sequence[int], step: int) -> None:
        self.tensors[STEPS][[self._places[client] for client in clients]] = step


def trained_alone(
    graph: ClientGraph, settings: EgoSettings, rounds: int, device: torch.device | str = "cpu"
) -> Iterator[EgoGroup]:
    """Train a graph on its own nodes alone; yield it after each round's step."""
    with EgoCohort([graph], settings, device=device).part() as group:
        for number in range(rounds):
            group.train(number)
            yield group


def train_alone(graph: NewGraph, settings: EgoSettings, rounds: int) -> Tensor:
    """Train a newcomer on its own nodes; return probabilities ``[n, k]`` of all."""
    bare = ClientGraph.bare(0, graph.x, graph.y, graph.edge_index)
    *_, group = trained_alone(replace(bare, train_mask=graph.trains), settings, rounds)
    return group.logits().softmax(1)


# Client: what it adds to the sum, and takes of it ------------------------------------------------


def mean_embeddings(total: Tensor, holders: Tensor, slots: Tensor) -> Shared:
    """Divide sums ``[s, h]`` by holders ``[s]``: ``h~`` of nodes with two or more (equation 7)."""
    # slots [n], of the chosen clients' nodes; -1 for a node that no other client holds
    mean = (total / holders.clamp(min=1)[:, None]).float()
    place = (slots >= 0).nonzero().flatten()
    place = place[holders[slots[place]] >= 2]
    return Shared(place, mean[slots[place]])


def measure(
    accuracy: Tensor, loss: Tensor, contrast: Tensor | None, tau: float
) -> NDArray[np.float64]:
    """Return the measurements of ``METRIC_NAMES``, ``[c, 9]``; zeros without such nodes."""
    # accuracy [c, 3], loss, contrast [c]
    shares = torch.stack([accuracy.nan_to_num(0.0), (~accuracy.isnan()).to(accuracy)], 2)
    # A client without training nodes has no loss; the loss of one that diverged is NaN.
    loss = torch.where(accuracy[:, 0].isnan(), 0.0, loss)
    contrast = torch.full_like(loss, torch.nan) if contrast is None else contrast
    scaled = contrast.nan_to_num(0.0) / contrast_scale(tau)
    columns = [*shares.flatten(1).T, loss, scaled, ~contrast.isnan()]
    return torch.stack([column.double() for column in columns], 1).numpy()


def contrast_scale(tau: float) -> float:
    """Return the divisor of the contrastive loss on the wire, which grows with ``1 / tau``."""
    # The quotient is below ``2 + log(2 n_c)``, which fits the ring at any temperature.
    return 1 + 1 / tau


# Server: what it reads of the sum ----------------------------------------------------------------


def mean_metrics(sums: Mapping[str, float], tau: float) -> dict[str, float]:
    """Turn sums over clients of ``measure``'s results into means; NaN where no client has any."""

    def mean(name: str, count: str) -> float:
        return sums[name] / sums[count] if sums[count] > 0 else math.nan

    means = {name: mean(name, f"has-{name}") for name in (*ROLES, "contrast")}
    means["contrast"] *= contrast_scale(tau)
    return means | {"cross-entropy": mean("cross-entropy", "has-train")}


def mean_model(weights: NDArray[np.float64], clients: int) -> NDArray[np.float32]:
    """Divide the sum of the clients' weights by the number of clients (FedAvg)."""
    return (weights / clients).astype(np.float32)
