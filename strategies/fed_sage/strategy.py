"""LocalSage+ and FedSage+ for Flower: messages, clients of a SuperNode, and both strategies.

The method is in ``algorithm.py``, which is to be read first. Step 1 is ``train.generate`` with
epoch 0; in step 2 ``train.compare`` and ``train.generate`` alternate.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor, nn

from flower_graph.client.learner import SharedModule
from flower_graph.client.module_client import ModuleClient
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import GraphOnDevice, Learner, epochs_of
from flower_graph.errors import MalformedReplyError
from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.ops.grouped import one_thread
from flower_graph.strategies.fed_sage import algorithm, modules
from flower_graph.strategies.fed_sage.algorithm import ImpairedGraph
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
        return algorithm.class_loss(self.logits(module, graph), graph.y, graph.masks["train"])

    def prepare(self, learner: Learner) -> None:
        """Train a new client's generator; the classifier then starts again (steps 1 and 3)."""
        model = _model(learner.module)
        if int(model.generator.client) == modules.UNTRAINED:
            state = model.state_dict().items()
            begun = {name: value.clone() for name, value in state if "generator" not in name}
            self._train_alone(model, self._impaired(learner))
            model.load_state_dict(begun, strict=False)

    # Generators

    def generate(self, parameters: Parameters, config: Config) -> Answer:
        """Train NeighGen alone, or step ``fGen`` with the others' gradients (steps 1 and 2)."""
        request = GeneratorRequest.from_numpy(parameters, config)
        with self._state.opened() as learners, one_thread(len(learners) > 1):
            shown = []
            for index, learner in enumerate(learners):
                model, graph = _model(learner.module), self._impaired(learner)
                if int(model.generator.client) == modules.UNTRAINED:
                    self._train_alone(model, graph)
                if request.gradient is not None:
                    came = torch.from_numpy(request.gradient[index])
                    how = request.others, learner.optimiser
                    algorithm.step_together(model, graph, request.epoch, came, *how)
                if request.share:
                    shown.append(self._shown(model, graph, request.epoch + 1))
        if not request.share:
            return [], len(self.graphs), {}
        return Generators.join(shown).to_numpy(len(shown))

    def compare(self, parameters: Parameters, config: Config) -> Answer:
        """Compare what all clients generate with the nodes here (step 2)."""
        came, device = Generators.from_numpy(parameters, config), self.device
        shown = came.clients, came.missing, came.encoded, came.weights
        authors, *parts, weights = (torch.from_numpy(one).to(device) for one in shown)
        missing, encoded = (part.split(came.rows.tolist()) for part in parts)
        features = [graph.x.to_dense().to(device) for graph in self.graphs]
        like = _model(self.shared.make()).generator.feature_weights()
        here = features, torch.tensor(self._clients, device=device)
        with one_thread(len(came.rows) > 1):
            generated = algorithm.generate(missing, encoded, weights, like)
        # The nodes of all clients are compared at once, in large products: on all threads
        gradient = algorithm.compare(authors, generated, weights, *here)
        return PeerGradients(came.epoch, gradient.cpu().numpy()).to_numpy(len(self.graphs))

    def _shown(self, model: modules.SageModel, graph: ImpairedGraph, epoch: int) -> Generators:
        shown = (one.cpu().numpy() for one in algorithm.show(model, graph, epoch))
        missing, encoded, weights = shown
        client, rows = np.array([graph.client]), np.array([len(missing)])
        return Generators(epoch, client, rows, missing, encoded, weights[None])

    def _train_alone(self, model: modules.SageModel, graph: ImpairedGraph) -> None:
        adam = self._adam({"params": model.parameters(), **PUBLISHED})
        algorithm.train_alone(model, graph, adam)

    # Any: a group of parameters as PyTorch's optimisers take it
    def _adam(self, *groups: dict[str, Any]) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(groups), fused=self.device.type == "cpu")

    def _impaired(self, learner: Learner) -> ImpairedGraph:
        return ImpairedGraph.of(learner.graph, self.shared.seed)


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
        for epoch in range(1, algorithm.GENERATOR_EPOCHS + 1):
            shown = send(requests, 0, generators, message_type="train.generate").values
            replies = dict[int, PeerGradients]()
            if shown:
                everyone = Generators.join(list(shown.values()))
                asked = dict.fromkeys(shown, everyone.to_record())
                replies = send(asked, epoch, gradients, message_type="train.compare").values
            if not replies:
                LOG.warning("epoch %d: no generator was compared; the rounds begin", epoch)
                return
            clients = sum(shown[node].clients.size for node in replies)
            # Each generator goes to all others and comes back
            weights, others = 4 * everyone.clients.size * w, max(clients - 1, 0)
            ledger.count("up", "generators", weights + everyone.encoded.nbytes)
            ledger.count("down", "generators", (weights + everyone.encoded.nbytes) * others)
            ledger.count("up", "gradients", weights * others)
            ledger.count("down", "gradients", weights)
            share, nodes = epoch < algorithm.GENERATOR_EPOCHS, [*shown]
            sizes = [shown[node].clients.size for node in nodes]
            totals = algorithm.add_up([reply.gradient for reply in replies.values()], sizes)
            requests = {
                # Nobody compares its own
                node: GeneratorRequest(epoch, share, own, clients - (node in replies)).to_record()
                for node, own in zip(nodes, totals, strict=True)
            }
        send(requests, 0, lambda *_: None, message_type="train.generate")
