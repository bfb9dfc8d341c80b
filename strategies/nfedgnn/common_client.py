"""The users of one SuperNode, if all users have one first layer.

A message brings the sum for the last step; a SuperNode that has missed a step first gets a copy of
the layer. The same sum is applied only once, however often it comes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from safetensors.torch import load, save
from torch import Tensor, nn

from flower_graph.client.state import CohortState, Makers, Tensors
from flower_graph.errors import StateLostError
from flower_graph.outputs.weights import SavedModels
from flower_graph.storage.reading import Tree
from flower_graph.strategies.nfedgnn.chosen_users import unless_all
from flower_graph.strategies.nfedgnn.cohort_client import UsersClient
from flower_graph.strategies.nfedgnn.common_layer import (
    LINEAR,
    CommonLayer,
    CommonSettings,
    Layer,
    LinearLayer,
    ModuleLayer,
)
from flower_graph.strategies.nfedgnn.common_messages import (
    Advance,
    CommonEnrolment,
    CommonQuestion,
    CopyReply,
    CopyRequest,
    GradientRequest,
    LatentReply,
    LatentRequest,
    SumReply,
)
from flower_graph.strategies.nfedgnn.kept import common_model
from flower_graph.wire.numpy_client import Answer, Config, Parameters


class CommonLayerClient(UsersClient):
    """The users of one SuperNode, with the layer and the optimiser that all users share.

    Parameters
    ----------
    context, x, users, user_model, **more
        As of ``NodeClient``; ``user_model`` is the same for all users.
    """

    actions: tuple[str, ...] = ("finish", "add_up", "copy_layer")
    settings_key = "common-settings"

    def __init__(
        self,
        context: Context,
        x: Tensor,
        users: Tensor,
        *,
        user_model: nn.Module | None = None,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
    ) -> None:
        super().__init__(
            context, x, users, user_model=user_model, device=device, output_dir=output_dir
        )
        self._state = CohortState[CommonLayer](
            context, "common-layer", self.users, checkpoint_dir, key="users"
        )

    def get_properties(self, config: Config) -> Config:
        question = CommonQuestion.from_config(config)
        settings, resume, before = question.settings, question.resume, question.before
        makers = self._makers(settings)
        if before is not None and int(self.users.min()) >= before:
            self._state.begin(resume)  # all have come since that checkpoint
        else:
            # All users share the layer, so it fits after users came or went.
            self._state.restore(resume, makers, lambda saved, *_: saved if before else None)
        handled = self._state.processed(makers)
        layer_round = self._state.look(makers).round if handled else 0
        shape = self._weight_shape(settings.latent_size, settings.bias)
        of_layer = CommonEnrolment(self.users.numpy(), shape, handled, layer_round)
        return self._enrolment(of_layer).to_config()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        request = LatentRequest.from_numpy(parameters, config)
        settings, advance = request.settings, request.advance
        self._remember(settings)
        self._take_key(config)
        makers = self._makers(settings)
        with self._state.opened(makers) as layer:
            layer.settings = settings._replace(seed=self._seed(settings))
            self._advance(layer, advance)
            reply = LatentReply(request.server_round, layer.round)
            if request.trains:
                place = self._unless_all(request.users)
                reply.latent = _array(layer.forward(place, request.server_round))
            if request.measured.size:
                reply.measured = _array(layer.forward(self._unless_all(request.measured)))
        if request.checkpoint:
            saved = request.server_round - 1, request.run
            reply.not_saved = self._state.save(*saved, makers)
        return reply.to_numpy(request.users.size)

    def add_up(self, parameters: Parameters, config: Config) -> Answer:
        """Add up this round's gradients with respect to the layer's weights."""
        request = GradientRequest.from_numpy(parameters, config)
        layer = self._state.look(self._makers(request.settings))
        layer.settings = request.settings._replace(seed=self._seed(request.settings))
        if layer.round != request.layer_round:
            raise StateLostError(
                f"the layer is of round {layer.round}, the gradients of {request.layer_round}"
            )
        gradient, place = torch.from_numpy(request.gradient), self._places(request.users)
        total = layer.gradient(place, gradient, request.server_round)
        return self._summed(request, total.cpu().numpy(), config)

    def copy_layer(self, parameters: Parameters, config: Config) -> Answer:
        layer = self._state.look(self._makers(CopyRequest.from_config(config).settings))
        data = self._seal(save({n: t.cpu().contiguous() for n, t in layer.tensors.items()}))
        return CopyReply(layer.round, np.frombuffer(data, np.uint8).reshape(-1, 4)).to_numpy()

    def finish(self, parameters: Parameters, config: Config) -> Answer:
        self._forget()
        return [], self.users.numel(), {}

    def _halves(self, settings: Tree) -> SavedModels:
        common = CommonSettings(**settings)
        weight = self._state.look(self._makers(common)).weights[LINEAR]
        return common_model(self.users.tolist(), weight, common.bias)

    def _advance(self, layer: CommonLayer, advance: Advance) -> None:
        if layer.round == advance.layer_round:
            return
        if layer.round != advance.before and advance.copy is not None:
            self._take(layer, load(self._open(advance.copy.tobytes())))
        if layer.round == advance.before and (total := self._total(advance)) is not None:
            layer.step(total, advance.layer_round, advance.learning_rate)
        if layer.round != advance.layer_round:
            raise StateLostError(
                f"the layer is of round {layer.round}, the others' of {advance.layer_round}"
            )

    # What is otherwise where the server is to read no sum and no weight

    def _enrolment(self, of_layer: CommonEnrolment) -> CommonEnrolment:
        return of_layer

    def _take_key(self, config: Config) -> None:
        """Take what a request brings besides."""

    def _seed(self, settings: CommonSettings) -> int:
        return settings.seed

    def _total(self, advance: Advance) -> Tensor | None:
        return torch.from_numpy(advance.total) if advance.total is not None else None

    def _summed(
        self, request: GradientRequest, total: NDArray[np.float64], config: Config
    ) -> Answer:
        answer = SumReply(request.server_round, total.astype(np.float32))
        return answer.to_numpy(request.users.size)

    def _seal(self, data: bytes) -> bytes:
        return data

    def _open(self, data: bytes) -> bytes:
        return data

    def _take(self, layer: CommonLayer, copy: Tensors) -> None:
        for name, tensor in layer.tensors.items():
            if name not in copy or copy[name].shape != tensor.shape:
                raise ValueError(f"the copy of the layer does not fit: {name}")
            tensor.copy_(copy[name])

    def _makers(self, settings: CommonSettings) -> Makers[CommonLayer]:
        settings = settings._replace(seed=self._seed(settings))
        layer = self._state.store.once(lambda: self._layer(settings))

        def build(tensors: Tensors) -> tuple[CommonLayer, Tensors]:
            placed = {name: t.to(self._device) for name, t in tensors.items()}
            return CommonLayer(layer, settings, placed), placed

        return Makers(lambda: CommonLayer.start(layer, settings), build)

    def _layer(self, settings: CommonSettings) -> Layer:
        if self._model is not None:
            return ModuleLayer(self._x.to(self._device), self.users, self._model)
        return LinearLayer(self._pack(self._x, settings.bias), self.users, settings)

    def _unless_all(self, users: np.ndarray) -> Tensor | None:
        """Return indices of users; ``None``, the fast path, for all users in their order."""
        return unless_all(self._places(users), self.users.numel())


def _array(latent: Tensor) -> np.ndarray:
    return latent.cpu().numpy()
