"""The clients of one SuperNode as one cohort of the engine: their state, enrolment and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from flwr.app import Context

from flower_graph.client.state import CohortState, Tensors, check_graphs
from flower_graph.engine.graph_batch import check_sizes
from flower_graph.engine.machine import resolve_device
from flower_graph.flower_compat import NumPyClient
from flower_graph.outputs.client import ClientOutputs
from flower_graph.wire.arrays import Config
from flower_graph.wire.averaging import Enrolment
from flower_graph.wire.fields import Resume

C = TypeVar("C")  # the class of the cohort


class CohortClient(NumPyClient, Generic[C]):
    """A base of clients whose cohort trains in one tensor program; parameters as of a subclass."""

    # Any: makes a cohort of graphs, settings, tensors (None: new ones) and a device
    cohort: ClassVar[Callable[..., Any]]
    all_train = True  # whether clients without a training node are refused

    # Any: graphs and settings of the method
    def __init__(
        self,
        context: Context,
        graphs: Sequence[Any],
        settings: Any,
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        check_graphs(graphs, all_train=self.all_train)
        for graph in graphs:
            check_sizes(graph, settings.num_features, settings.num_classes)
        self.graphs, self.settings, self._classes = list(graphs), settings, classes
        self._device, self.outputs = resolve_device(device), ClientOutputs(context, output_dir)
        self._clients = [graph.client for graph in self.graphs]
        places = "cohort-client", self._clients, checkpoint_dir
        self._state = CohortState[C](context, *places, self._start, self._build)

    def get_properties(self, config: Config) -> Config:
        self._state.restore(Resume.from_config(config))
        handled = self._state.processed()
        return Enrolment(self._clients, handled, self.most_examples()).to_config()

    def most_examples(self) -> int:
        """Return what an answer to ``train`` counts for at most: by default the clients."""
        return len(self._clients)

    def _start(self) -> Tensors:
        tensors: Tensors = self.cohort(self.graphs, self.settings, device=self._device).tensors()
        return tensors

    def _build(self, tensors: Tensors) -> tuple[C, Tensors]:
        # Counts stay on the CPU, as Adam requires.
        to = self._device
        placed = {k: t if t.dtype == torch.int32 else t.to(to) for k, t in tensors.items()}
        return self.cohort(self.graphs, self.settings, placed, to), placed
