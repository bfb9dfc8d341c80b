"""A client that trains any torch module on its graph, for strategies that average weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.client.learner import (
    NODES,
    GraphOnDevice,
    Judged,
    Learner,
    LocalGraph,
    NodeTask,
    Seen,
    asked,
    first_module,
    is_finite,
    trained_parameters,
    weighed,
)
from flower_graph.client.state import CohortState, Makers, Tensors, check_graphs
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, RefusedError, brief, told
from flower_graph.flower_compat import NumPyClient
from flower_graph.ops.grouped import one_thread
from flower_graph.outputs.build import form_of
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import SavedModels, Snapshot
from flower_graph.rng import seeded
from flower_graph.wire.arrays import Answer, Config, Measurements, Parameters
from flower_graph.wire.averaging import Asked, Enrolment, Measured, RoundRequest, Rows, Trained
from flower_graph.wire.fields import Resume
from flower_graph.wire.keys import ARRAY_NAMES, EXTRAS

__all__ = ["GraphOnDevice", "Learner", "ModuleClient", "ModuleSettings", "first_module"]

NO_FIT = re.compile("shapes cannot be multiplied|size mismatch")  # of PyTorch's errors
PROXIMAL = "proximal-mu"  # the key of Flower's FedProx
NO_EXAMPLE = "no example to train on"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # Adam's names


class ModuleSettings(NamedTuple):
    """How clients train a module. Server and clients have the same settings.

    Attributes
    ----------
    learning_rate, weight_decay : float
        Adam's.
    local_epochs : int
        Steps of a round, each on all training nodes of a client.
    keep_optimiser : bool
        Whether Adam's moments stay from round to round.
    local : tuple of str
        Patterns such as ``"mask.*"`` of the module's entries that never leave a client.
    seed : int
        Seed of the first weights and, with client and round, of the module's dropout.
    """

    learning_rate: float = 0.01
    weight_decay: float = 0.0
    local_epochs: int = 1
    keep_optimiser: bool = False
    local: tuple[str, ...] = ()
    seed: int = 0

    def is_shared(self, name: str) -> bool:
        return not any(fnmatch(name, pattern) for pattern in self.local)


class ModuleClient(NumPyClient):
    """The clients of one SuperNode, each with a module on its own graph.

    The server asks some or all clients to train. The reply has each client's arrays, or, if the
    server needs no more (``ReportedFedAvg.weighted_sum``), their mean weighted by ``examples`` and
    the sum of the weights. So the result does not depend on which SuperNode hosts a client.

    A subclass may override the call of a module (``logits``), its loss (``loss``), its optimiser
    and the graph of each step (``optimiser``, ``steps``), a preparation (``prepare``), the arrays
    that are received and sent (``arrays``, ``sent``, ``extras``), a client's weight (``examples``),
    and the module that is saved (``exported``). In a round ``received`` has the server's arrays, by
    the names of ``arrays``.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps modules and optimisers.
    graphs : sequence of ClientGraph or EgoNetwork
        The clients' data.
    make_module : callable
        Makes a module of the same form at all clients and the server; the seed determines its
        initial values.
    settings : ModuleSettings
        How they train.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir, output_dir : Path, optional
        Folders of checkpoints and outputs, if the SuperNode has no folder of its own
        (``state-dir``).
    how : optional
        The config's section ``strategy``, for a subclass.
    classes : sequence of str, optional
        Names of the classes, for predictions.
    task : NodeTask
        What the clients learn: by default the classes of nodes.

    Raises
    ------
    ValueError
        If there is no graph, two have one number, or one has no training node.
    """

    all_train = True  # whether clients without a training node are refused

    def __init__(
        self,
        context: Context,
        graphs: Sequence[LocalGraph],
        make_module: Callable[[], nn.Module],
        settings: ModuleSettings,
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        output_dir: Path | None = None,
        how: object = None,
        classes: Sequence[str] | None = None,
        task: NodeTask = NODES,
    ) -> None:
        all_train = self.all_train and task.needs_training_nodes
        self.settings, self.how, self.task = settings, how, task
        self.graphs = check_graphs(graphs, all_train=all_train)
        self._graph_of = {graph.client: graph for graph in self.graphs}
        self.device, self._make_module = resolve_device(device), make_module
        self.received: dict[str, Tensor] = {}
        self.outputs, self._classes = ClientOutputs(context, output_dir), classes
        self._makers = Makers(self._start, self._build)
        self._state = CohortState[list[Learner]](
            context, "module-client", self._clients, checkpoint_dir
        )

    # What a method may override

    def logits(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Return logits ``[n, k]`` for the graph's nodes or ``[m]`` for its pairs."""
        result: Tensor = module(*weighed(module, graph), **asked(module, graph))
        return result

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Return the loss of a step: by default the cross-entropy of the training nodes."""
        return self.task.loss(partial(self.logits, module), graph)

    def optimiser(self, module: nn.Module) -> torch.optim.Optimizer:
        """Make a client's optimiser: Adam on all parameters."""
        how = self.settings
        return torch.optim.Adam(
            module.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay
        )

    def steps(self, graph: GraphOnDevice, server_round: int) -> Iterator[GraphOnDevice]:
        """Yield the graph of each step of a round: the whole graph, once an epoch."""
        return repeat(graph, self.settings.local_epochs)

    def prepare(self, learner: Learner) -> None:
        """Prepare a client before it trains or measures; by default nothing."""

    def distance(self, module: nn.Module, prefix: str = "") -> Tensor:
        """Return the squared distance between a module's parameters and the server's.

        ``prefix`` stands before the parameters' names in ``received``. Parameters that the server
        did not send are left out.
        """
        pairs = [
            (parameter, self.received[prefix + name])
            for name, parameter in module.named_parameters()
            if prefix + name in self.received
        ]
        return torch.stack([(own - came).square().sum() for own, came in pairs]).sum()

    def arrays(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the entries, by name, that the server's arrays replace."""
        state = module.state_dict().items()
        return {name: value for name, value in state if self.settings.is_shared(name)}

    def sent(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Return the arrays to send after training; by default those of ``arrays``."""
        return self.arrays(module)

    def extras(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Return further arrays to send, as the server's ``extras`` declares them."""
        return {}

    def examples(self, graph: LocalGraph) -> int:
        """Return a client's weight: the number of its training examples."""
        return self.task.weight(graph)

    def exported(self, module: nn.Module) -> nn.Module:
        """Return the module to save after the run; its outputs equal this module's."""
        return module

    # Answers

    def get_properties(self, config: Config) -> Config:
        self._state.restore(Resume.from_config(config), self._makers)
        processed = self._state.processed(self._makers)
        weight = sum(map(self.examples, self.graphs))
        return Enrolment(self._clients, processed, weight).to_config()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Train the clients that are asked. Send their mean, without clients that diverged."""
        learners = self._trained(parameters, config)
        # Outside the block: clients keep their state even if nobody is left to average.
        weight, arrays, left_out = 0, dict[str, NDArray[Any]](), dict[int, str]()
        for _, examples, sent in self._sent_by(learners, left_out):
            weight += examples
            for name, values in sent.items():
                arrays[name] = arrays.get(name, 0) + examples * values
        means = {name: values / weight for name, values in arrays.items()}
        trained = Trained(clients=len(learners), left_out=left_out)
        return _answered(means, weight, parameters, trained)

    def fit_each(self, parameters: Parameters, config: Config) -> Rows:
        learners, left_out = self._trained(parameters, config), dict[int, str]()
        rows = {
            client: _answered(sent, examples, parameters, Trained(clients=1))
            for client, examples, sent in self._sent_by(learners, left_out)
        }
        return Rows(rows, left_out)

    def _trained(self, parameters: Parameters, config: Config) -> list[Learner]:
        request = RoundRequest.from_config(config)
        begun = Asked.from_config(config).arrays_for(parameters, self._clients)
        with self._state.opened(self._makers) as learners, one_thread(len(self.graphs) > 1):
            chosen = [one for one in learners if one.graph.client in begun]
            for learner in chosen:
                if not self._examples_of(learner):
                    continue
                self._take_over(learner.module, begun[learner.graph.client])
                with _fitting(learner.graph):
                    self.prepare(learner)
                    self._train(learner, request.server_round, float(config.get(PROXIMAL, 0)))
        return chosen

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        request, judged = RoundRequest.from_config(config), list[Judged]()
        begun = Asked.from_config(config).arrays_for(parameters, self._clients)
        with self._state.opened(self._makers) as learners, one_thread(len(self.graphs) > 1):
            for learner in learners:
                self._take_over(learner.module, begun[learner.graph.client])
                with _fitting(learner.graph):
                    self.prepare(learner)
                    judged.append(self._judged(learner))
            measured = torch.stack([self.task.measure(one) for one in judged])
        loss, train, val, test = measured.T
        nodes = [graph.y.numel() for graph in self.graphs]
        self.outputs.measured(
            request.server_round, self._clients, loss=loss, accuracy=measured[:, 1:], nodes=nodes
        )
        counts = self.task.count_all(judged, request.counting)
        said = Measured(
            weight=len(learners), cross_entropy=loss, train=train, val=val, test=test, counts=counts
        )
        return self._state.save_if_asked(config, said.answer(), self._makers)

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        models, seen = [], []
        for one in self._state.look(self._makers):
            client = one.graph.client
            models.append(form_of(self.exported(one.module), self._make_module, client))
            forward = partial(self.logits, one.module)
            seen.append(Seen(self._graph_of[client], one.graph, self._judged(one), forward))
        good = [one for one in seen if not self.task.has_diverged(one.judged)]
        return self.task.snapshot(good, SavedModels.join(models), self._classes)

    @property
    def _clients(self) -> list[int]:
        return [graph.client for graph in self.graphs]

    def _take_over(self, module: nn.Module, parameters: Sequence[NDArray[np.generic]]) -> None:
        local = self.arrays(module)
        if len(local) != len(parameters):
            raise ValueError(f"{len(parameters)} arrays came, but the module shares {len(local)}")
        with torch.no_grad():
            for (name, value), values in zip(local.items(), parameters, strict=True):
                if tuple(value.shape) != values.shape:
                    wanted = f"expected {tuple(value.shape)} as in the clients' module"
                    raise ValueError(f"{name} has shape {values.shape}, {wanted}")
                # A mean of counters is no whole number.
                came = torch.from_numpy(values)
                value.copy_(came if value.is_floating_point() else came.double().round())

    def _train(self, learner: Learner, server_round: int, proximal: float) -> None:
        learner.module.train()
        if not self.settings.keep_optimiser:
            learner.optimiser.state.clear()
        client, graph = learner.graph.client, learner.graph
        came = self.arrays(learner.module).items()
        self.received = {name: value.detach().clone() for name, value in came}
        with seeded(self.device, self.settings.seed, "module-client", client, server_round):
            for part in self.steps(graph, server_round):
                learner.optimiser.zero_grad()
                loss = self.loss(learner.module, part)
                if proximal:
                    loss = loss + proximal / 2 * self.distance(learner.module)
                loss.backward()
                learner.optimiser.step()

    def _sent_by(
        self, learners: Sequence[Learner], left_out: dict[int, str]
    ) -> Iterator[tuple[int, int, dict[str, NDArray[np.generic]]]]:
        """Yield client, weight and arrays; record clients that send nothing, and why."""
        for learner in learners:
            client, examples = learner.graph.client, self._examples_of(learner)
            if not examples:
                left_out[client] = NO_EXAMPLE
            elif is_finite(learner.module, sent := self._numbers_of(learner)):
                yield client, examples, sent
            else:
                left_out[client] = "weights are not finite"
        if len(left_out) == len(learners):
            why = " and ".join(sorted(set(left_out.values())))
            kind = RefusedError if why == NO_EXAMPLE else ValueError
            raise kind(f"clients {brief(sorted(left_out), 60)}: {why}; nobody is left")

    def _examples_of(self, learner: Learner) -> int:
        return self.examples(self._graph_of[learner.graph.client])

    @torch.no_grad()
    def _numbers_of(self, learner: Learner) -> dict[str, NDArray[np.generic]]:
        learner.module.eval()
        more = self.extras(learner.module, learner.graph)
        own = self.sent(learner.module, learner.graph)
        sent = own | {f"{EXTRAS}/{n}": value for n, value in more.items()}
        return {name: value.double().cpu().numpy() for name, value in sent.items()}

    @torch.no_grad()
    def _judged(self, learner: Learner) -> Judged:
        learner.module.eval()
        return self.task.judge(partial(self.logits, learner.module), learner.graph)

    # The clients' state

    def _start(self) -> Tensors:
        module, device = first_module(self._make_module, self.settings.seed), self.device
        tensors: Tensors = {}
        for client in self._clients:
            for name, value in module.state_dict().items():
                tensors[f"{client}/{name}"] = value.detach().clone().to(device)
            if self.settings.keep_optimiser:
                for name, value in trained_parameters(module):
                    for each in MOMENTS[:2]:
                        tensors[f"{client}/{name}/{each}"] = torch.zeros_like(value, device=device)
                    # Adam counts steps on the CPU.
                    tensors[f"{client}/{name}/step"] = torch.zeros(())
        return tensors

    def _build(self, tensors: Tensors) -> tuple[list[Learner], Tensors]:
        placed = {n: t if n.endswith("/step") else t.to(self.device) for n, t in tensors.items()}
        how, learners = self.settings, list[Learner]()
        for graph in self.graphs:
            module = first_module(self._make_module, how.seed).to(self.device)
            names = module.state_dict().keys()
            local = {name: placed[f"{graph.client}/{name}"] for name in names}
            module.load_state_dict(local, assign=True)
            adam = self.optimiser(module)
            if how.keep_optimiser:
                for name, parameter in trained_parameters(module):
                    held = {each: placed[f"{graph.client}/{name}/{each}"] for each in MOMENTS}
                    adam.state[parameter] = held
            learners.append(Learner(module, adam, self.task.place(graph, self.device)))
        return learners, placed


def _answered(
    sent: Mapping[str, NDArray[np.generic]], weight: int, came: Parameters, trained: Trained
) -> Answer:
    """Write an answer in the types of the server's arrays: a mean of integers is no integer."""
    dtypes = [values.dtype for values in came]
    dtypes += [np.dtype(np.float32)] * (len(sent) - len(dtypes))
    arrays = [
        np.asarray(np.rint(values) if dtype.kind in "iu" else values, dtype)
        for values, dtype in zip(sent.values(), dtypes, strict=True)
    ]
    return arrays, weight, {ARRAY_NAMES: list(sent)} | trained.to_config()


@contextmanager
def _fitting(graph: GraphOnDevice) -> Iterator[None]:
    """Name the client if its number of features does not fit the module."""
    try:
        yield
    except RuntimeError as error:
        if not NO_FIT.search(str(error)):
            raise
        words = f"client {graph.client}: x has not as many features as the run's module takes"
        raise told(DataError(words), words) from error
