"""The clients of LocalSage+ and FedSage+ that one SuperNode hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from flower_graph.client.learner import LocalGraph, dense
from flower_graph.client.module_client import GraphOnDevice, Learner, ModuleClient, ModuleSettings
from flower_graph.data.partition.ego_networks import EgoNetwork
from flower_graph.engine.graph_batch import check_sizes
from flower_graph.engine.mini_batches import BatchOrder, epochs_of
from flower_graph.ops.grouped import one_thread
from flower_graph.ops.mending import slots
from flower_graph.strategies.fed_sage.messages import GeneratorRequest, Generators, PeerGradients
from flower_graph.strategies.fed_sage.modules import (
    NEIGHBOURS,
    UNTRAINED,
    ImpairedGraph,
    SageModel,
    class_loss,
    distance_gradient,
    features_of,
    first_model,
    generator_loss,
    split_features,
)
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire.arrays import Answer, Config, Measurements, Parameters

# NeighGen's own optimiser, as published.
PUBLISHED = {"lr": 0.001, "weight_decay": 1e-4}
GENERATOR_EPOCHS = 20  # steps of NeighGen alone; FedSage+ takes as many together after them


def model_maker(settings: EgoSettings) -> Callable[[], SageModel]:
    """Return a function that makes the model from which all clients start."""
    how = settings.num_features, settings.hidden, settings.num_classes, settings.seed
    return partial(first_model, *how)


def module_settings(settings: EgoSettings, *, averages: bool) -> ModuleSettings:
    """Return the training settings; generators, or whole models, never leave the clients."""
    return ModuleSettings(
        settings.learning_rate,
        settings.weight_decay,
        settings.local_epochs,
        keep_optimiser=True,
        local=("generator.*",) if averages else ("*",),
        seed=settings.seed,
    )


class SageClient(ModuleClient):
    """The ego-networks of one SuperNode: one in a deployment, many in a simulation.

    Parameters
    ----------
    context : Context
        The ClientApp's context, with the clients' weights.
    egos : sequence of EgoNetwork
        The clients.
    settings : EgoSettings
        Sizes, optimiser and seed of the classifier; the rest plays no part.
    averages : bool
        Whether classifiers are averaged and generators trained together (FedSage+).
    **more
        ``device``, ``checkpoint_dir``, ``output_dir`` and ``classes``, as of ``ModuleClient``.
    """

    actions = ("generate", "compare")
    all_train = False

    def __init__(
        self,
        context: Context,
        egos: Sequence[EgoNetwork],
        settings: EgoSettings,
        *,
        averages: bool,
        **more: Any,  # arguments of ``ModuleClient``
    ) -> None:
        for ego in egos:
            check_sizes(ego, settings.num_features, settings.num_classes)
        how = module_settings(settings, averages=averages)
        super().__init__(context, egos, model_maker(settings), how, **more)
        self._batch_size = settings.batch_size

    # What a ready client may say anew

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        """Step classifiers as the settings say, and ``fGen`` as published."""
        assert isinstance(module, SageModel)
        shared = [p for n, p in module.named_parameters() if not n.startswith("generator.")]
        how = self.settings
        rates = {"lr": how.learning_rate, "weight_decay": how.weight_decay}
        return self._adam(
            {"params": shared, **rates}, {"params": module.generator.feature_weights(), **PUBLISHED}
        )

    def examples(self, graph: LocalGraph) -> int:
        """Return a client's weight: its training nodes, or 1 without any."""
        return max(1, super().examples(graph))

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        return class_loss(self.logits(module, graph), graph.y, graph.masks["train"])

    def steps(self, graph: GraphOnDevice, server_round: int) -> Iterator[GraphOnDevice]:
        order = BatchOrder(self._batch_size, self.settings.seed, server_round, "local")
        train, ptr = graph.masks["train"], [0, graph.y.numel()]
        epochs = self.settings.local_epochs
        for epoch in epochs_of(train, ptr, [graph.client], order, epochs=epochs):
            for part in epoch:
                nodes = train if part.nodes is None else train & part.nodes
                yield graph._replace(masks=graph.masks | {"train": nodes})

    def prepare(self, learner: Learner) -> None:
        """Train a new client's generator; the classifier then starts again (steps 1 and 3)."""
        model = _model(learner)
        if int(model.generator.client) == UNTRAINED:
            state = model.state_dict().items()
            begun = {name: value.clone() for name, value in state if "generator" not in name}
            self._train_alone(learner, self._impaired(learner))
            model.load_state_dict(begun, strict=False)

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        """Measure the clients; where none has a training node, the loss of all is 0."""
        loss, weight, metrics = super().evaluate(parameters, config)
        has_loss = any(bool(graph.train_mask.any()) for graph in self.graphs)
        return loss if has_loss else 0.0, weight, metrics

    # Generators

    def generate(self, parameters: Parameters, config: Config) -> Answer:
        """Train NeighGen alone, or step ``fGen`` with the others' gradients (steps 1 and 2)."""
        request = GeneratorRequest.from_numpy(parameters, config)
        with self._state.opened(self._makers) as learners, one_thread(len(learners) > 1):
            shown = []
            for index, learner in enumerate(learners):
                graph = self._impaired(learner)
                if int(_model(learner).generator.client) == UNTRAINED:
                    self._train_alone(learner, graph)
                if request.gradient is not None:
                    others = torch.from_numpy(request.gradient[index])
                    self._learn(learner, graph, request, others)
                if request.share:
                    shown.append(self._shown(learner, graph, request.epoch + 1))
        if not request.share:
            return [], len(self.graphs), {}
        return Generators.join(shown).to_numpy()

    def compare(self, parameters: Parameters, config: Config) -> Answer:
        """Compare what all clients generate with the nodes here (step 2)."""
        shown, device = Generators.from_numpy(parameters, config), self.device
        weights, rows = torch.from_numpy(shown.weights).to(device).requires_grad_(), shown.rows
        encoded = torch.from_numpy(shown.encoded).to(device).split(rows.tolist())
        missing = torch.from_numpy(shown.missing).to(device).split(rows.tolist())
        features = [dense(graph.x).to(device) for graph in self.graphs]
        width = features[0].shape[1]
        with one_thread(len(rows) > 1):
            parts = [
                features_of(split_features(own, width), z, slots(count))
                for own, z, count in zip(weights.unbind(), encoded, missing, strict=True)
            ]
        made, sizes = torch.cat(parts), torch.tensor([len(part) for part in parts])
        author = torch.from_numpy(shown.clients).repeat_interleave(sizes).to(device)
        wanted = distance_gradient(
            made.detach(),
            author,
            torch.cat(features),
            [0, *accumulate(map(len, features))],
            torch.tensor(self._clients, device=device),
        )
        (gradient,) = torch.autograd.grad(made, weights, wanted)
        return PeerGradients(shown.epoch, gradient.cpu().numpy()).to_numpy(len(self.graphs))

    def _train_alone(self, learner: Learner, graph: ImpairedGraph) -> None:
        model = _model(learner)
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

    def _learn(
        self, learner: Learner, graph: ImpairedGraph, request: GeneratorRequest, others: Tensor
    ) -> None:
        loss = self._generator_loss(learner, graph, "together", request.epoch)
        weights = _model(learner).generator.feature_weights()
        grads, theirs = torch.autograd.grad(loss, weights), split_features(others, graph.x.shape[1])
        # The own term is a mean over the client's nodes, the others' arrives as a sum.
        for weight, grad, other in zip(weights, grads, theirs, strict=True):
            came = other.to(grad) / graph.rest.shape[0]
            weight.grad = (grad + came) / (request.others + 1)
        learner.optimiser.step()
        learner.optimiser.zero_grad()

    def _generator_loss(
        self, learner: Learner, graph: ImpairedGraph, purpose: str, epoch: int
    ) -> Tensor:
        model = _model(learner)
        noise = model.generator.noise(learner.graph.client, purpose, epoch, graph.rest)
        return generator_loss(model, graph, noise)

    @torch.no_grad()
    def _shown(self, learner: Learner, graph: ImpairedGraph, epoch: int) -> Generators:
        model, client = _model(learner), learner.graph.client
        z = model.generator.encode(graph.rest, graph.adjacency)
        z = z + model.generator.noise(client, "together", epoch, z)
        chosen = (graph.impaired.missing > 0).nonzero().flatten()
        weights = parameters_to_vector(model.generator.feature_weights())
        return Generators(
            epoch,
            np.array([client]),
            np.array([chosen.numel()]),
            graph.impaired.missing[chosen].clamp(max=NEIGHBOURS).cpu().numpy(),
            z[chosen].cpu().numpy(),
            weights[None].cpu().numpy(),
        )

    def _impaired(self, learner: Learner) -> ImpairedGraph:
        graph, seed = learner.graph, self.settings.seed
        train = graph.masks["train"]
        return ImpairedGraph.of(graph.client, graph.x, graph.edge_index, graph.y, train, seed)


def _model(learner: Learner) -> SageModel:
    assert isinstance(learner.module, SageModel)
    return learner.module
