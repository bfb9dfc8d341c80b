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
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import RecordDict

from flower_graph.method.module_method import ModuleFedAvg
from flower_graph.strategies.fed_sage.client import GENERATOR_EPOCHS, model_maker, module_settings
from flower_graph.strategies.fed_sage.messages import GeneratorRequest, Generators, PeerGradients
from flower_graph.strategies.fed_sage.modules import feature_shapes
from flower_graph.strategies.fedscem.config import EgoSettings
from flower_graph.wire.ledger import reply_bytes, setup_bytes

LOG = logging.getLogger(__name__)
T = TypeVar("T")


class LocalSage(ModuleFedAvg):
    """Server of LocalSage+, for ``SageClient``: nothing but measurements travels.

    Parameters
    ----------
    settings : EgoSettings
        Sizes, optimiser and seed of the classifier; the rest plays no part.
    **more
        As for ``ReportedFedAvg``.
    """

    usual_rounds = 400
    averages = False  # whether classifiers are averaged and generators trained together

    # Any, here and below: further arguments are those of the parent
    def __init__(self, settings: EgoSettings, **more: Any) -> None:
        how = module_settings(settings, averages=self.averages)
        super().__init__(model_maker(settings), how, classes=settings.num_classes, **more)
        self._settings = settings

    def fixed_settings(self) -> dict[str, object]:
        own = {"hidden": self._settings.hidden, "batch_size": self._settings.batch_size}
        return super().fixed_settings() | own


class FedSage(LocalSage):
    """LocalSage+ with generators trained together and classifiers averaged; the same parameters."""

    averages = True

    # Any: likewise
    def __init__(self, settings: EgoSettings, **more: Any) -> None:
        super().__init__(settings, **more)
        self._size = sum(map(math.prod, feature_shapes(settings.num_features)))

    def prepare(self, server_round: int) -> None:
        """Have the generators of the first clients trained (steps 1 and 2)."""
        if server_round != 1:
            return
        started, clients = time.perf_counter(), self.session.members.clients
        first = GeneratorRequest(0, share=True).to_record()
        shown = self._generated(dict.fromkeys(self.session.hosted(), first), 1)
        for epoch in range(1, GENERATOR_EPOCHS + 1):
            is_last = epoch == GENERATOR_EPOCHS
            requests = self._compared(epoch, shown, share=not is_last) if shown else {}
            if not requests:
                LOG.warning("epoch %d: no generator was compared; the rounds begin", epoch)
                break
            shown = self._generated(requests, 0 if is_last else epoch + 1)
        seconds = time.perf_counter() - started
        LOG.info("generators of %d SuperNodes trained in %.1f s", len(clients), seconds)

    def _generated(self, requests: Mapping[int, RecordDict], epoch: int) -> dict[int, Generators]:
        members = self.session.members.clients

        def read(node: int, content: RecordDict) -> Generators | None:
            clients = np.array(members[node])
            expected = {"epoch": epoch, "clients": clients, "w": self._size}
            return Generators.read(content, **expected) if epoch else None

        shown = self._sent(requests, "train.generate", 0, read)
        return {node: one for node, one in shown.items() if one is not None}

    def _compared(
        self, epoch: int, shown: Mapping[int, Generators], *, share: bool
    ) -> dict[int, RecordDict]:
        everyone = Generators.join(list(shown.values()))

        def read(_: int, reply: RecordDict) -> PeerGradients:
            expected = {"epoch": epoch, "a": everyone.clients.size, "w": self._size}
            return PeerGradients.read(reply, **expected)

        content = dict.fromkeys(shown, everyone.to_record())
        replies = self._sent(content, "train.compare", epoch, read)
        if not replies:
            return {}
        total = np.sum([reply.gradient for reply in replies.values()], axis=0)
        clients = sum(shown[node].clients.size for node in replies)
        self._count(everyone, clients)
        starts = np.cumsum([0, *(part.clients.size for part in shown.values())])
        requests = {}
        for node, first, last in zip(shown, starts, starts[1:], strict=False):
            others = clients - int(node in replies)  # nobody compares its own
            request = GeneratorRequest(epoch, share, total[first:last], others)
            requests[node] = request.to_record()
        return requests

    def _sent(
        self,
        requests: Mapping[int, RecordDict],
        message_type: str,
        number: int,
        read: Callable[[int, RecordDict], T],
    ) -> dict[int, T]:
        clients = sum(map(len, self.session.members.clients.values()))
        most = setup_bytes(clients) + reply_bytes(clients * self._size)
        return self.session.send(
            requests, number, read, message_type=message_type, max_reply_bytes=most
        ).values

    def _count(self, shown: Generators, clients: int) -> None:
        """Count an epoch's payload: each generator goes to all others and comes back."""
        authors, others = shown.clients.size, max(clients - 1, 0)
        weights, ledger = 4 * authors * self._size, self.session.ledger
        ledger.count("up", "generators", weights + shown.encoded.nbytes)
        ledger.count("down", "generators", (weights + shown.encoded.nbytes) * others)
        ledger.count("up", "gradients", weights * others)
        ledger.count("down", "gradients", weights)
