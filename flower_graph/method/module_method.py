"""Methods whose clients train torch modules on their own graphs, combined by a server."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from torch import nn

from flower_graph.client.learner import NODES, LinkTask, NodeTask, SharedModule, ValueTask
from flower_graph.client.module_client import ModuleClient
from flower_graph.config.common import GCN as GCN_NAME
from flower_graph.config.common import (
    LINKS,
    MLP,
    VALUES,
    ModuleRunConfig,
    TrainingSection,
    checkpoint_settings,
)
from flower_graph.data.baselines import Figures, link_baselines, value_baselines
from flower_graph.data.description import DataForm
from flower_graph.data.folders.party import DATA_FORM, RunFolder, graphs_of
from flower_graph.data.graph import Scale
from flower_graph.errors import ConfigError, DataError
from flower_graph.method.base import GraphMethod, scale_of
from flower_graph.method.evaluation import judge_run
from flower_graph.models import GCN, GCNPairs, PyGNetwork
from flower_graph.outputs.client import client_folders
from flower_graph.privacy.noise import central_noise
from flower_graph.server.averaging import ReportedFedAvg
from flower_graph.wire.arrays import encode_array
from flower_graph.wire.averaging import Measured

M = TypeVar("M", bound=ModuleRunConfig)  # a method's schema
FIXED = ("local_epochs", "learning_rate", "weight_decay", "optimiser")  # stay on resume


class ModuleFedAvg(ReportedFedAvg):
    """``ReportedFedAvg`` for ``ModuleClient``: reports its figures, makes the first weights.

    Parameters
    ----------
    shared, how
        As the clients have them.
    classes
        For a subclass: how many numbers the module gives a node (the classes, if classes are
        learnt).
    kinds
        Number of measured classes, if it differs: two for pairs of nodes.
    **more
        As for ``ReportedFedAvg``; the seed is the module's, the rest by default the section's.
    """

    def __init__(
        self,
        shared: SharedModule,
        how: TrainingSection,
        *,
        classes: int = 0,
        kinds: int = 0,
        **more: Any,
    ) -> None:
        own = {"participation": how.participation, "min_nodes": how.min_nodes}
        super().__init__(seed=shared.seed, **own | more)
        self.shared, self.how = shared, how
        self.classes, self.num_classes = classes, kinds or classes

    def first_arrays(self) -> ArrayRecord:
        state = self.shared.first().state_dict()
        return ArrayRecord(
            {
                name: encode_array(name, value.cpu().numpy())
                for name, value in state.items()
                if self.shared.is_sent(name)
            }
        )

    def fixed_settings(self) -> dict[str, object]:
        fixed = {key: getattr(self.how, key) for key in FIXED}
        return super().fixed_settings() | fixed | {"local": self.shared.local}

    def report_fields(self, trained: MetricRecord, evaluated: MetricRecord) -> dict[str, object]:
        return Measured.from_config(evaluated).to_report() | {"regulariser": math.nan}


class ModuleMethod(GraphMethod[M, ModuleFedAvg]):
    """A ``GraphMethod`` of a ``ModuleFedAvg`` and a ``ModuleClient``.

    Its schema is a ``flower_graph.config.common.ModuleRunConfig``. A subclass names the two classes
    and may override the module, the entries that never leave a client, and the arguments of the two
    classes.

    Attributes
    ----------
    strategy_class : type[ModuleFedAvg]
        The server's half.
    client_class : type[ModuleClient]
        The clients'.
    wrapper : type[nn.Module], optional
        A module that takes the network and is trained in its place.
    own_entries : tuple of str
        What ``local`` returns.
    common_part : str
        The part of the module that all clients have in common, if they predict with another.
    """

    needs_variety = True
    heterophily = "clients train a GCN, which smooths over edges; not tried on such graphs here"
    strategy_class: type[ModuleFedAvg] = ModuleFedAvg
    client_class: type[ModuleClient] = ModuleClient
    wrapper: type[nn.Module] | None = None
    own_entries: tuple[str, ...] = ()
    common_part = ""

    def module(self, config: M, features: int, classes: int) -> Callable[[], nn.Module]:
        """Return a function that makes a module, by default the network of ``model.name``."""
        how = config.model
        sizes = features, how.hidden, classes, how.dropout, how.input_dropout
        name = getattr(how, "name", GCN_NAME)  # FedGLS's clients have no choice
        kind = GCNPairs if config.task == LINKS and config.links.decoder == MLP else GCN
        make = partial(kind, *sizes) if name == GCN_NAME else partial(PyGNetwork, name, *sizes)
        wrapper = self.wrapper
        return make if wrapper is None else lambda: wrapper(make())

    def server(self, config: M) -> type[ModuleFedAvg]:
        """Return the server's half, by default ``strategy_class``."""
        return self.strategy_class

    def local(self, config: M) -> tuple[str, ...]:
        """Return patterns of the module's entries that never leave a client."""
        return self.own_entries

    def build_strategy(
        self, config: M, out: Path | None, folder: RunFolder | None = None
    ) -> ModuleFedAvg:
        whole = self.whole(config, folder)
        strategy = self.server(config)(
            self._shared(config, whole),
            config.strategy,
            classes=self.outputs(config, whole),
            kinds=2 if config.task == LINKS else 0,
            **checkpoint_settings(config, out),
        )
        strategy.central_noise = central_noise(config.privacy, config.rounds)
        return strategy

    def build_client(self, config: M, context: Context, out: Path | None) -> ModuleClient:
        graphs, whole = self.hosted(config, context)
        return self.client_class(
            context,
            graphs,
            self._shared(config, whole),
            config.strategy,
            device=config.device,
            task=self.task(config, whole),
            **client_folders(context, out, whole.class_names),
        )

    def _shared(self, config: M, whole: RunFolder) -> SharedModule:
        sizes = whole.features, self.outputs(config, whole)
        names = getattr(config.model, "names", ())  # FedGLS's clients have no choice
        each = [replace(config, model=replace(config.model, name=one)) for one in names]
        make, *others = (self.module(one, *sizes) for one in each or [config])
        shared = SharedModule(make, config.seed, self.local(config), tuple(others))
        shapes = [form.shared_shapes() for form in shared.forms if others]
        if any(one != shapes[0] for one in shapes):
            words = f"model.name: {config.model.name}: clients of {self.name} share weights"
            raise ConfigError(f"{words}, so that they have one network", key="model.name")
        return shared

    def judge_all(self, config: M, strategy: ModuleFedAvg, out: Path) -> dict[str, object]:
        common = None
        if self.common_part:
            module = strategy.shared.first().eval()
            state = {name: torch.tensor(value) for name, value in strategy.weights().items()}
            module.load_state_dict(state, strict=False)
            common = module.get_submodule(self.common_part)
        graphs = [NODES.place(graph, torch.device("cpu")) for graph in self.graphs(config)]
        return judge_run(out, graphs, common, strategy.session.rounds)

    def outputs(self, config: M, whole: RunFolder) -> int:
        """Return how many numbers the module gives a node: classes, or those of its row."""
        return config.model.hidden if config.task == LINKS else whole.classes

    def task(self, config: M, whole: RunFolder | None = None) -> NodeTask:
        if config.task == VALUES:
            return ValueTask(self._scale(config, whole))
        if config.task != LINKS:
            return NODES
        how = config.links
        seed = config.seed if how.seed is None else how.seed
        return LinkTask(how.val, how.test, seed, how.decoder)

    def _scale(self, config: M, whole: RunFolder | None) -> Scale:
        if whole is None or not whole.path.name:  # it is no folder
            return scale_of(self.graphs(config))
        form = DataForm.from_json(whole.detail(DATA_FORM, dict))
        if form.scale is None:
            words = f"it says no scale of numbers, which task={VALUES} needs"
            raise DataError(f"{whole.path}: {words}")
        return form.scale

    def baselines(self, config: M, folder: RunFolder | None = None) -> Figures:
        graphs = self.data(config) if folder is None else graphs_of(folder)
        if config.task == VALUES:
            return value_baselines(graphs, config.metrics[0])
        if config.task != LINKS:
            return super().baselines(config, folder)
        task = self.task(config)
        assert isinstance(task, LinkTask)
        return link_baselines([(one.x, task.split(one)) for one in graphs], config.metrics[0])
