"""LocalSage+ and FedSage+: classifiers on graphs mended by generated neighbours.

Zhang, Yang, Li, Sun and Yiu, "Subgraph Federated Learning with Missing Neighbor Generation",
NeurIPS 2021; here as baselines of FedSCem, on ego-networks and with FedSCem's classifier.

1. *Alone* (``train.generate``, epoch 0). Each client hides a quarter of its nodes and trains
   NeighGen on what is left: smooth L1 on the number of hidden neighbours, the squared distance of
   each generated neighbour to the nearest hidden one, and the classes on the mended graph.
2. *Together* (FedSage+, epochs 1, 2, ...). Each client shows its feature generator ``fGen`` and
   its encoded nodes, with noise. Every other client answers with the gradient, by the weights of
   ``fGen``, of ``sum ||g - x_u||^2``, where ``x_u`` is its own node nearest to the generated ``g``
   (``train.compare``). The author adds it to its own loss and steps ``fGen`` (``train.generate``).
3. Every client mends its whole ego-network, once.
4. *Rounds*, Flower's own. Each client trains the classifier on its mended ego-network and
   measures it. FedSage+ averages the classifiers, weighted by training nodes (FedAvg); of
   LocalSage+ nothing but measurements travels.

*Where we differ.* ``fGen`` is smaller (``modules.py``). As in the paper, and unlike
its published code, nodes are hidden among all nodes, the number and feature losses run over all
that are left, and others compare with their nearest node, not a random one. Of a node's slots the
losses see as many as neighbours are hidden, ``NEIGHBOURS`` at most.

*Late clients.* One that comes after the first round trains its generator alone.
*Privacy.* The server sees generators, encoded nodes with unit noise, and gradients, unmasked.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from flower_graph.client.learner import SharedModule
from flower_graph.client.module_client import ModuleClient
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import GraphOnDevice, Learner, epochs_of
from flower_graph.errors import MalformedReplyError
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.ops.grouped import one_thread
from flower_graph.ops.mending import slots
from flower_graph.strategies.fed_sage import modules
from flower_graph.strategies.fedscem.baselines import EgoFedAvg, EgoModelClient
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire import codec
from flower_graph.wire.arrays import Answer, Config, FloatArray, IntArray, Parameters
from flower_graph.wire.codec import Exact, Flag, Whole
from flower_graph.wire.keys import CLIENTS, EPOCH, ROWS
from flower_graph.wire.ledger import reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
# NeighGen's own optimiser, as published.
PUBLISHED = {"lr": 0.001, "weight_decay": 1e-4}
GENERATOR_EPOCHS = 20  # steps of NeighGen alone; FedSage+ takes as many together after them

# Messages ----------------------------------------------------------------------------------------


class GeneratorRequest(codec.Message, down="train.generate"):
    """Server to client: train alone (epoch 0), or with the other clients' gradients."""

    epoch: Annotated[int, Whole(EPOCH)]  # 0: train alone; from 1 on: step by the gradients
    share: Annotated[bool, Flag()]  # whether to show the generators
    # gradients of each client here by the weights of its `fGen`, `lin1` to `lin3`
    gradient: Annotated[
        FloatArray | None, codec.Tensor("arrays/gradient", shape="c w", when="epoch")
    ] = None
    others: Annotated[int, Whole()] = 0  # clients that the gradients are summed over


class Generators(codec.Message, down="train.compare", up="train.generate"):
    """Client to server, and on to all others: the clients' generators and encoded nodes."""

    epoch: Annotated[int, Whole(EPOCH)]  # the epoch in which they are to be compared
    clients: Annotated[IntArray, Exact(CLIENTS, shape="c")]  # authors of the generators
    rows: Annotated[IntArray, Exact(ROWS, shape="c")]  # nodes that each of them shows
    missing: Annotated[IntArray, Exact(shape="n")]  # neighbours that each of these misses
    # the nodes, encoded, with noise
    encoded: Annotated[FloatArray, codec.Tensor("arrays/encoded", shape=f"n {modules.LATENT}")]
    weights: Annotated[FloatArray, codec.Tensor("arrays/weights", shape="c w")]  # each `fGen`, flat

    def check(self, known: codec.Known) -> None:
        """Refuse rows that do not add up, and more neighbours than can be missing."""
        rows, missing = self.rows, self.missing
        if (rows < 0).any() or rows.sum() != missing.size:
            raise MalformedReplyError(f"{ROWS}: counts for {missing.size} nodes, got {rows[:5]}...")
        if missing.size and (missing.min() < 1 or missing.max() > modules.NEIGHBOURS):
            raise MalformedReplyError(f"missing: expected 1 to {modules.NEIGHBOURS}")

    @classmethod
    def join(cls, parts: Sequence[Generators]) -> Generators:
        arrays = [list(vars(part).values())[1:] for part in parts]
        return cls(parts[0].epoch, *map(np.concatenate, zip(*arrays, strict=True)))


class PeerGradients(codec.Message, up="train.compare"):
    """Client to server: the gradients that move generators towards the nodes here."""

    epoch: Annotated[int, Whole(EPOCH)]  # the epoch
    # gradients by each author's weights, summed over the clients here
    gradient: Annotated[FloatArray, codec.Tensor("arrays/gradient", shape="a w")]


# Client ------------------------------------------------------------------------------------------


def _shared(settings: EgoSettings, *, averages: bool) -> SharedModule:
    """Return the model of both halves."""
    widths = settings.num_features, settings.hidden, settings.num_classes
    local = ("generator.*",) if averages else ("*",)  # never leave the clients
    return SharedModule(partial(modules.first_model, *widths, settings.seed), settings.seed, local)


class SageClient(EgoModelClient):
    """The ego-networks of one SuperNode: one in a deployment, many in a simulation.

    Parameters
    ----------
    context, egos, settings, **more
        As of ``EgoModelClient``; of the settings sizes, optimiser and seed of the classifier.
    averages : bool
        Whether classifiers are averaged and generators trained together (FedSage+).
    """

    first_layers: tuple[str, ...] = ()
    actions, shared_by = ("generate", "compare"), staticmethod(_shared)

    # What a ready client may say anew

    _train = ModuleClient._train

    def steps(self, graph: GraphOnDevice, server_round: int) -> Iterator[GraphOnDevice]:
        """Yield a step for each batch of a client's training nodes."""
        train, how = graph.masks["train"], self._ego
        sizes = how.batch_size, how.local_epochs, how.seed
        for epoch in epochs_of(graph, train, *sizes, "local", server_round):
            for part in epoch:
                nodes = train if part.nodes is None else train & part.nodes
                yield graph._replace(masks=graph.masks | {"train": nodes})

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        """Step classifiers as the settings say, and ``fGen`` as published."""
        how, features = self.how, _model(module).generator.feature_weights()
        shared = [p for n, p in module.named_parameters() if not n.startswith("generator.")]
        rates = {"lr": how.learning_rate, "weight_decay": how.weight_decay}
        return self._adam({"params": shared, **rates}, {"params": features, **PUBLISHED})

    def examples(self, graph: ClientGraph) -> int:
        """Return a client's weight: its training nodes, or 1 without any."""
        return max(1, self.task.weight(graph))

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        return modules.class_loss(self.logits(module, graph), graph.y, graph.masks["train"])

    def prepare(self, learner: Learner) -> None:
        """Train a new client's generator; the classifier then starts again (steps 1 and 3)."""
        model = _model(learner.module)
        if int(model.generator.client) == modules.UNTRAINED:
            state = model.state_dict().items()
            begun = {name: value.clone() for name, value in state if "generator" not in name}
            self._train_alone(learner, self._impaired(learner))
            model.load_state_dict(begun, strict=False)

    # Generators

    def generate(self, parameters: Parameters, config: Config) -> Answer:
        """Train NeighGen alone, or step ``fGen`` with the others' gradients (steps 1 and 2)."""
        request = GeneratorRequest.from_numpy(parameters, config)
        with self._state.opened() as learners, one_thread(len(learners) > 1):
            shown = []
            for index, learner in enumerate(learners):
                graph, generator = self._impaired(learner), _model(learner.module).generator
                if int(generator.client) == modules.UNTRAINED:
                    self._train_alone(learner, graph)
                if request.gradient is not None:
                    loss = self._generator_loss(learner, graph, "together", request.epoch)
                    weights = generator.feature_weights()
                    own = parameters_to_vector(torch.autograd.grad(loss, weights))
                    # The own term is a mean over the client's nodes, the others' arrives as a sum.
                    came = torch.from_numpy(request.gradient[index]).to(own) / len(graph.rest)
                    mean = (own + came) / (request.others + 1)
                    for weight, grad in zip(
                        weights, modules.split_like(mean, weights), strict=True
                    ):
                        weight.grad = grad
                    learner.optimiser.step()
                    learner.optimiser.zero_grad()
                if request.share:
                    shown.append(self._shown(learner, graph, request.epoch + 1))
        if not request.share:
            return [], len(self.graphs), {}
        return Generators.join(shown).to_numpy(len(shown))

    def compare(self, parameters: Parameters, config: Config) -> Answer:
        """Compare what all clients generate with the nodes here (step 2)."""
        shown, device = Generators.from_numpy(parameters, config), self.device
        weights, rows = torch.from_numpy(shown.weights).to(device).requires_grad_(), shown.rows
        encoded = torch.from_numpy(shown.encoded).to(device).split(rows.tolist())
        missing = torch.from_numpy(shown.missing).to(device).split(rows.tolist())
        features = [graph.x.to_dense().to(device) for graph in self.graphs]
        like = _model(self.shared.make()).generator.feature_weights()
        with one_thread(len(rows) > 1):
            parts = [
                modules.features_of(modules.split_like(own, like), z, slots(count))
                for own, z, count in zip(weights.unbind(), encoded, missing, strict=True)
            ]
        made, sizes = torch.cat(parts), torch.tensor([len(part) for part in parts])
        author = torch.from_numpy(shown.clients).repeat_interleave(sizes).to(device)
        ptr, here = [0, *accumulate(map(len, features))], torch.tensor(self._clients, device=device)
        wanted = modules.distance_gradient(made.detach(), author, torch.cat(features), ptr, here)
        (gradient,) = torch.autograd.grad(made, weights, wanted)
        return PeerGradients(shown.epoch, gradient.cpu().numpy()).to_numpy(len(self.graphs))

    def _train_alone(self, learner: Learner, graph: modules.ImpairedGraph) -> None:
        model = _model(learner.module)
        adam = self._adam({"params": model.parameters(), **PUBLISHED})
        model.generator.requires_grad_()
        for epoch in range(GENERATOR_EPOCHS):
            adam.zero_grad()
            self._generator_loss(learner, graph, "local", epoch).backward()
            adam.step()
        adam.zero_grad()
        model.freeze_encoder()
        model.generator.client.fill_(learner.graph.client)

    # Any: a group of parameters as PyTorch's optimisers take it
    def _adam(self, *groups: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(groups), fused=self.device.type == "cpu")

    def _generator_loss(
        self, learner: Learner, graph: modules.ImpairedGraph, purpose: str, epoch: int
    ) -> Tensor:
        model = _model(learner.module)
        noise = model.generator.noise(learner.graph.client, purpose, epoch, graph.rest)
        return modules.generator_loss(model, graph, noise)

    @torch.no_grad()
    def _shown(self, learner: Learner, graph: modules.ImpairedGraph, epoch: int) -> Generators:
        model, client = _model(learner.module), learner.graph.client
        z = model.generator.encode(graph.rest, graph.adjacency)
        z = z + model.generator.noise(client, "together", epoch, z)
        chosen = (graph.impaired.missing > 0).nonzero().flatten()
        weights = parameters_to_vector(model.generator.feature_weights())
        return Generators(
            epoch,
            np.array([client]),
            np.array([chosen.numel()]),
            graph.impaired.missing[chosen].clamp(max=modules.NEIGHBOURS).cpu().numpy(),
            z[chosen].cpu().numpy(),
            weights[None].cpu().numpy(),
        )

    def _impaired(self, learner: Learner) -> modules.ImpairedGraph:
        return modules.ImpairedGraph.of(learner.graph, self.shared.seed)


def _model(module: nn.Module) -> modules.SageModel:
    assert isinstance(module, modules.SageModel)
    return module


# Server ------------------------------------------------------------------------------------------


class LocalSage(EgoFedAvg):
    """Server of LocalSage+, for ``SageClient``: nothing but measurements travels.

    Arguments are those of ``EgoFedAvg``; of the settings sizes, optimiser and seed of the
    classifier play a part.
    """

    averages, shared_by = False, staticmethod(_shared)
    # A client's weight is its training nodes, and the server has no generator to save
    most_examples, snapshot = ModuleFedAvg.most_examples, ModuleFedAvg.snapshot


class FedSage(LocalSage):
    """LocalSage+ with generators trained together and classifiers averaged; the same arguments."""

    averages = True

    def prepare(self, server_round: int) -> None:
        """Have the generators of the first clients trained (steps 1 and 2)."""
        if server_round != 1:
            return
        hosted, ledger = self.session.members.clients, self.session.ledger
        w = sum(one.numel() for one in _model(self.shared.make()).generator.feature_weights())

        def generators(node: int, content: RecordDict) -> Generators:
            return Generators.read(content, clients=np.array(hosted[node]), epoch=epoch, w=w)

        def gradients(_: int, content: RecordDict) -> PeerGradients:
            return PeerGradients.read(content, epoch=epoch, w=w, a=everyone.clients.size)

        every = sum(map(len, hosted.values()))
        most = setup_bytes(every) + reply_bytes(every * w)
        send = partial(self.session.send, max_reply_bytes=most)
        first = GeneratorRequest(0, share=True).to_record()
        requests = dict.fromkeys(self.session.hosted(), first)
        for epoch in range(1, GENERATOR_EPOCHS + 1):
            shown = send(requests, 0, generators, message_type="train.generate").values
            replies = dict[int, PeerGradients]()
            if shown:
                everyone = Generators.join(list(shown.values()))
                asked = dict.fromkeys(shown, everyone.to_record())
                replies = send(asked, epoch, gradients, message_type="train.compare").values
            if not replies:
                LOG.warning("epoch %d: no generator was compared; the rounds begin", epoch)
                return
            total = np.sum([reply.gradient for reply in replies.values()], axis=0)
            clients = sum(shown[node].clients.size for node in replies)
            # Each generator goes to all others and comes back
            weights, others = 4 * everyone.clients.size * w, max(clients - 1, 0)
            ledger.count("up", "generators", weights + everyone.encoded.nbytes)
            ledger.count("down", "generators", (weights + everyone.encoded.nbytes) * others)
            ledger.count("up", "gradients", weights * others)
            ledger.count("down", "gradients", weights)
            ends = np.cumsum([part.clients.size for part in shown.values()])
            share = epoch < GENERATOR_EPOCHS
            requests = {
                # Nobody compares its own
                node: GeneratorRequest(epoch, share, own, clients - (node in replies)).to_record()
                for node, own in zip(shown, np.split(total, ends[:-1]), strict=True)
            }
        send(requests, 0, lambda *_: None, message_type="train.generate")
