"""A client that trains any torch module on its graph, for strategies that average weights."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.client.learner import (
    NODES,
    NodeTask,
    Seen,
    SharedModule,
    asked,
    saved_rows,
    weighed,
)
from flower_graph.client.state import CohortState, Tensors, check_graphs
from flower_graph.config.common import LASTS, TrainingSection
from flower_graph.data.graph import ClientGraph
from flower_graph.engine.cohort import (
    ClientDropout,
    Cohort,
    Cohorts,
    GraphOnDevice,
    Judged,
    Learner,
    drawing_nothing,
    placed_on,
    same_numbers,
    spread_,
)
from flower_graph.engine.machine import resolve_device
from flower_graph.errors import DataError, RefusedError, brief, told
from flower_graph.flower_compat import NumPyClient
from flower_graph.models import network_of
from flower_graph.ops.adam import Adam
from flower_graph.ops.grouped import one_thread
from flower_graph.outputs.build import form_of
from flower_graph.outputs.client import ClientOutputs
from flower_graph.outputs.files import SavedModels, Snapshot
from flower_graph.rng import generator, seeded
from flower_graph.wire import averaging
from flower_graph.wire.arrays import Answer, Config, Measurements, Parameters
from flower_graph.wire.codec import Resume
from flower_graph.wire.keys import ARRAY_NAMES, CHECKPOINT, EXTRAS

__all__ = ["GraphOnDevice", "Learner", "ModuleClient", "SharedModule"]

NO_FIT = re.compile("shapes cannot be multiplied|size mismatch")  # of PyTorch's errors
PROXIMAL = "proximal-mu"  # the key of Flower's FedProx
NO_EXAMPLE, NOT_FINITE = "no example to train on", "weights are not finite"
LOGITS = "logits"
ONE_BY_ONE = ("steps", "prepare")  # hooks of a client alone
ALONE = "clients train client by client, not as one group: their module cannot be grouped"
LOG = logging.getLogger(__name__)


class ModuleClient(NumPyClient):
    """The clients of one SuperNode, each with a module on its own graph.

    The reply to ``train`` has each client's arrays, or, if the server needs no more
    (``ReportedFedAvg.weighted_sum``), their mean weighted by ``examples`` and the sum of the
    weights. So the result does not depend on which SuperNode hosts a client. Without training nodes
    a client has weight 0: it does not train, but is measured, and predicts.

    The clients train as one program, each parameter a stack ``[c, ...]`` over their block-diagonal
    graph (``flower_graph.engine.cohort``), if a step of two clients gives what each gives alone;
    otherwise, or with another optimiser, ``steps`` or ``prepare``, one by one. ``loss``
    gets a graph of several clients then, and returns the sum over clients of each one's own
    (``graph.sum_of_means``); ``sent``, ``extras`` and ``exported`` get one client at a time.

    A subclass may override the methods from ``logits`` to ``exported``. In a round ``received`` has
    the server's arrays, by the names of the module's entries. If its module takes sparse features,
    ``first_layers`` may name weights of which clients keep the active rows alone; they then train
    as one program in any case.

    Parameters
    ----------
    context : Context
        The ClientApp's context, which keeps modules and optimisers.
    graphs : sequence of ClientGraph
        The clients' data.
    shared : SharedModule
        What they train.
    how : TrainingSection
        How they train: the config's section ``strategy``.
    device : str
        ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    checkpoint_dir : Path, optional
        Folder of checkpoints, if the SuperNode has no folder of its own (``state-dir``).
    outputs : ClientOutputs, optional
        Where outputs go without such a folder, and the names of the classes.
    task : NodeTask
        What the clients learn: by default the classes of nodes.

    Raises
    ------
    ValueError
        If there is no graph, or two have one number.
    """

    first_layers: tuple[str, ...] = ()  # weights of which clients keep the active rows

    def __init__(
        self,
        context: Context,
        graphs: Sequence[ClientGraph],
        shared: SharedModule,
        how: TrainingSection,
        *,
        device: str = "cpu",
        checkpoint_dir: Path | None = None,
        outputs: ClientOutputs | None = None,
        task: NodeTask = NODES,
    ) -> None:
        self.shared, self.how, self.task = shared, how, task
        self.graphs = check_graphs(graphs)
        self._graph_of = {graph.client: graph for graph in self.graphs}
        self.device, self.outputs = resolve_device(device), outputs or ClientOutputs(context)
        self.received: dict[str, Tensor] = {}
        self._state = CohortState[Cohort](context, self._clients, checkpoint_dir, self._made)

    # What a method may override

    def logits(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Return logits ``[n, k]`` for the graph's nodes or ``[m]`` for its pairs."""
        result: Tensor = module(*weighed(module, graph), **asked(module, graph))
        return result

    def loss(self, module: nn.Module, graph: GraphOnDevice) -> Tensor:
        """Return the loss of a step: by default the cross-entropy of the training nodes."""
        return self.task.loss(partial(self.logits, module), graph)

    # Any: one of PyTorch's or of this library's
    def optimiser(self, module: nn.Module) -> Any:
        """Make a client's optimiser: Adam on all parameters; SGD and ``decoupled`` Adam do, too."""
        how = self.how
        return Adam(module.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)

    def steps(self, graph: GraphOnDevice, server_round: int) -> Iterator[GraphOnDevice]:
        """Yield the graph of each step of a round: the whole graph, once an epoch."""
        return repeat(graph, self.how.local_epochs)

    def prepare(self, learner: Learner) -> None:
        """Prepare a client before it trains or measures; by default nothing."""

    def begin(self, learner: Learner, server_round: int) -> None:
        """Prepare a client, or several as a group, before its first step; by default nothing.

        Round 0 is the step that shows whether clients can be grouped.
        """

    def finish(self, learner: Learner) -> None:
        """Change a client, or several as a group, after its last step; by default nothing."""

    def distance(self, module: nn.Module, prefix: str = "") -> Tensor:
        """Return the squared distance between a module's parameters and the server's.

        ``prefix`` stands before the parameters' names in ``received``. Parameters that the server
        did not send are left out.
        """
        start, own = len(prefix), module.named_parameters()
        came = {n[start:]: v for n, v in self.received.items() if n.startswith(prefix)}
        return torch.stack([(p - came[n]).square().sum() for n, p in own if n in came]).sum()

    def sent(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Return the arrays to send after training; by default the entries that may leave."""
        return self._shared_entries(module)

    def counted(self, name: str, weights: Mapping[int, int]) -> Mapping[int, int]:
        """Return the clients whose arrays of this name are added up, with their weights."""
        return weights

    def extras(self, module: nn.Module, graph: GraphOnDevice) -> dict[str, Tensor]:
        """Return further arrays to send, as the server's ``extras`` declares them."""
        return {}

    def measured(self, clients: Sequence[int], weight: int) -> dict[str, float]:
        """Return further numbers of an answer to ``train``, such as ``wire.averaging.sums``."""
        return {}

    def examples(self, graph: ClientGraph) -> int:
        """Return a client's weight: the number of its training examples."""
        return self.task.weight(graph)

    def place(self, graph: ClientGraph) -> GraphOnDevice:
        """Move a client's graph to the device, in the form that the module takes."""
        if self.first_layers:
            return placed_on(graph, self.device, is_dense=False)
        return self.task.place(graph, self.device)

    def exported(self, module: nn.Module) -> nn.Module:
        """Return the module to save after the run; its outputs equal this module's."""
        return network_of(module)

    # Answers

    def get_properties(self, config: Config) -> Config:
        self._state.restore(Resume.from_config(config))
        processed = self._state.processed()
        weight = sum(map(self.examples, self.graphs))
        return averaging.Enrolment(self._clients, processed, weight).to_config()

    def fit(self, parameters: Parameters, config: Config) -> Answer:
        """Train the clients that are asked. Send their mean, without clients that diverged."""
        cohort, clients, left_out = self._trained(parameters, config)
        weight, sums = 0, dict[str, NDArray[Any]]()
        if self._overrides("sent", "extras"):
            for _, examples, sent in self._sent_by(cohort, clients, left_out):
                weight += examples
                for name, values in sent.items():
                    sums[name] = sums.get(name, 0) + examples * values
        else:
            good = {one: self._examples_of(one) for one in clients if one not in left_out}
            weight = sum(good.values())
            for name in filter(self.shared.is_sent, cohort.names):
                sums[name] = cohort.total(name, self.counted(name, good)).numpy()
        means = {name: values / weight for name, values in sums.items()}
        trained = averaging.Trained(clients=len(clients), left_out=left_out).to_config()
        return _answered(means, weight, parameters, trained | self.measured(clients, weight))

    # Any: the weight is a list
    def fit_each(self, parameters: Parameters, config: Config) -> tuple[Parameters, Any, Config]:
        """Train the clients that are asked; each sends a row of all arrays, and its numbers."""
        cohort, clients, left_out = self._trained(parameters, config)
        rows = self._sent_by(cohort, clients, left_out)
        numbers, weights, sent = map(list, zip(*rows, strict=True))
        stacks = {name: np.stack([one[name] for one in sent]) for name in sent[0]}
        alone = averaging.Trained(clients=1).to_config()
        each = zip(numbers, weights, strict=True)
        measured = [alone | self.measured([client], weight) for client, weight in each]
        entries = {name: [one[name] for one in measured] for name in measured[0]}
        beside = averaging.RowsBeside(np.array(numbers, np.int64), left_out).to_config()
        return _answered(stacks, weights, parameters, entries | beside)

    def _trained(
        self, parameters: Parameters, config: Config
    ) -> tuple[Cohort, list[int], dict[int, str]]:
        """Train clients; return all that are asked, and the clients that send nothing, and why.

        A client whose numbers are no longer finite begins anew in the next round.
        """
        request = averaging.RoundRequest.from_config(config)
        begun = averaging.Asked.from_config(config).arrays_for(parameters, self._clients)
        chosen = [client for client in begun if self._examples_of(client)]
        proximal = float(config.get(PROXIMAL, 0))
        with self._opened() as cohort:
            with cohort.learners(chosen) as learners:
                for learner in learners:
                    self._take_over(cohort, learner, begun)
                    with _fitting(learner.graph):
                        self.prepare(learner)
                        self._train(learner, request.server_round, proximal)
            finite = cohort.finite(filter(self.shared.is_sent, cohort.names))
            cohort.restart([client for client in chosen if client not in finite])
        good, why = finite.intersection(chosen), {one: NOT_FINITE for one in chosen}
        left_out = {one: why.get(one, NO_EXAMPLE) for one in begun if one not in good}
        _refuse_if_all(left_out, [*begun])
        return cohort, list(begun), left_out

    def evaluate(self, parameters: Parameters, config: Config) -> Measurements:
        request, judged = averaging.RoundRequest.from_config(config), list[Judged]()
        begun = averaging.Asked.from_config(config).arrays_for(parameters, self._clients)
        with self._opened() as cohort, cohort.learners(self._clients) as learners:
            for learner in learners:
                self._take_over(cohort, learner, begun)
                with _fitting(learner.graph):
                    self.prepare(learner)
                    judged.append(self._judged(learner))
            # In the order of the clients, which another than theirs trained together
            order = np.argsort([client for one in learners for client in one.graph.clients])
            measured = torch.cat([self.task.measure(one) for one in judged])[order]
        loss, train, val, test = measured.T
        nodes = [graph.y.numel() for graph in self.graphs]
        self.outputs.measured(
            request.server_round, self._clients, loss=loss, accuracy=measured[:, 1:], nodes=nodes
        )
        counts = self.task.count_all(judged, request.counting)
        figures = {"cross_entropy": loss, "train": train, "val": val, "test": test}
        mean, weight, metrics = averaging.Measured(
            weight=len(nodes), **figures, counts=counts
        ).answer()
        # Where nobody has a loss, 0: a server must be able to tell that from a loss that is lost.
        if not any(bool(one.masks["train"].any()) for one in judged):
            mean = 0.0
        if config.get(CHECKPOINT):
            metrics |= self._state.save_asked(config)
        return mean, weight, metrics

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        cohort, of = self._state.look(), self.shared.of
        with cohort.learners(self._clients) as learners:
            judged = {
                client: part
                for one in learners
                for client, part in zip(one.graph.clients, self._judged(one).each(), strict=True)
            }
        if len(self.first_layers) == 1:
            models = saved_rows(cohort, self.shared.make)
        else:
            forms = [
                form_of(self.exported(cohort.alone(one).module.eval()), of(one).make, one)
                for one in self._clients
            ]
            models = SavedModels.join(forms)

        def logits(client: int, graph: GraphOnDevice) -> Tensor:
            return self.logits(cohort.alone(client).module, graph)

        seen = [
            Seen(self._graph_of[one], cohort.graphs[one], judged[one], partial(logits, one))
            for one in self._clients
        ]
        good = [one for one in seen if not self.task.has_diverged(one.judged)]
        return self.task.snapshot(good, models, self.outputs.classes)

    @property
    def _clients(self) -> list[int]:
        return [graph.client for graph in self.graphs]

    @torch.no_grad()
    def _take_over(self, cohort: Cohort, learner: Learner, begun: Mapping[int, Parameters]) -> None:
        """Begin with the server's arrays, which ``received`` then has."""
        local, wholes = self._shared_entries(learner.module), cohort.module.state_dict()
        came = [begun[client] for client in learner.graph.clients]
        came = came[:1] if all(one is came[0] for one in came) else came
        wanted = [tuple(wholes[name].shape) for name in local]
        if any(wanted != [values.shape for values in one] for one in came):
            shapes = [values.shape for values in came[0]]
            raise ValueError(f"arrays of shapes {shapes!s:.200}; the module shares {wanted!s:.200}")
        self.received = {}
        for (name, value), *each in zip(local.items(), *came, strict=True):
            stack = torch.from_numpy(each[0] if len(each) == 1 else np.stack(each))
            # A mean of counters is no whole number.
            stack = stack if value.is_floating_point() else stack.double().round()
            self.received[name] = cohort.take_over(learner, name, value, stack)

    def _train(self, learner: Learner, server_round: int, proximal: float) -> None:
        learner.module.train()
        if self.how.optimiser != LASTS:
            learner.optimiser.state.clear()
        with self._drawing(learner.graph, server_round):
            self.begin(learner, server_round)
            for part in self.steps(learner.graph, server_round):
                learner.optimiser.zero_grad()
                loss = self.loss(learner.module, part)
                if proximal:
                    loss = loss + proximal / 2 * self.distance(learner.module)
                loss.backward()
                learner.optimiser.step()
        with torch.no_grad():
            self.finish(learner)

    @contextmanager
    def _drawing(self, graph: GraphOnDevice, server_round: int) -> Iterator[None]:
        """Give each client a stream of its own for its dropout."""
        words = self.shared.seed, "module-client"
        if graph.layout is None:
            with seeded(self.device, *words, graph.client, server_round):
                yield
            return
        each = [(*words, client, server_round) for client in graph.clients]
        streams = [generator(*labels, device=self.device) for labels in each]
        with ClientDropout(graph.layout, streams), drawing_nothing():
            yield

    def _shared_entries(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the entries, by name, that the server's arrays replace."""
        state = module.state_dict().items()
        return {name: value for name, value in state if self.shared.is_sent(name)}

    def _overrides(self, *names: str) -> bool:
        return any(getattr(type(self), name) is not getattr(ModuleClient, name) for name in names)

    @torch.no_grad()
    def _sent_by(
        self, cohort: Cohort, clients: Sequence[int], left_out: dict[int, str]
    ) -> Iterator[tuple[int, int, dict[str, NDArray[np.generic]]]]:
        """Yield client, weight and arrays; record clients that send nothing, and why."""
        for client in (one for one in clients if one not in left_out):
            learner = cohort.alone(client)
            module, graph = learner.module.eval(), learner.graph
            more = {f"{EXTRAS}/{n}": value for n, value in self.extras(module, graph).items()}
            values_of = self.sent(module, graph) | more
            sent = {name: value.double().cpu().numpy() for name, value in values_of.items()}
            if all(np.isfinite(values).all() for values in sent.values()):
                yield client, self._examples_of(client), sent
            else:
                left_out[client] = NOT_FINITE
        _refuse_if_all(left_out, clients)

    def _examples_of(self, client: int) -> int:
        return self.examples(self._graph_of[client])

    @torch.no_grad()
    def _judged(self, learner: Learner) -> Judged:
        learner.module.eval()
        return self.task.judge(partial(self.logits, learner.module), learner.graph)

    # The clients' state

    @contextmanager
    def _opened(self) -> Iterator[Cohort]:
        with self._state.opened() as cohort, one_thread(len(self.graphs) > 1):
            yield cohort

    def _made(self, tensors: Tensors | None) -> tuple[Cohort, Tensors]:
        makes = dict[str, Callable[[Tensors | None], Cohort]]()
        count = len(self.shared.forms)
        for number, form in enumerate(self.shared.forms):
            if own := [graph for graph in self.graphs if graph.client % count == number]:
                makes[str(number)] = partial(self._cohort_of, form, own)
        (make, *others) = makes.values()
        cohort = Cohorts(makes, tensors) if others else make(tensors)
        return cohort, cohort.tensors

    def _cohort_of(
        self, shared: SharedModule, own: Sequence[ClientGraph], tensors: Tensors | None
    ) -> Cohort:
        module, graphs = shared.first().to(self.device), list(map(self.place, own))
        is_grouped = bool(self.first_layers) or self._can_group(module, graphs)
        if not is_grouped and len(graphs) > 1:
            LOG.info(ALONE)
        return Cohort(
            module,
            graphs,
            tensors,
            self.optimiser,
            is_grouped=is_grouped,
            by_rows=self.first_layers,
            keeps_moments=self.how.optimiser == LASTS,
        )

    def _can_group(self, module: nn.Module, graphs: Sequence[GraphOnDevice]) -> bool:
        """Whether a step of two clients as a group is the step of each by itself."""
        trains = [graph for graph in graphs if self._examples_of(graph.client)][:2]
        if len(trains) < 2 or self._overrides(*ONE_BY_ONE):
            return False
        if not _is_elementwise(self.optimiser(module)):
            return False
        try:
            two = Cohort(module, trains, None, self.optimiser, is_grouped=True, keeps_moments=False)
            group = two.group(two.clients)
            alone = [two.alone(graph.client) for graph in trains]
            state = [self._shared_entries(one.module) for one in (group, *alone)]
            received = [{n: v.detach().clone() for n, v in one.items()} for one in state]
            spread_(two.tensors.values())
            every = zip((group, *alone), received, strict=True)
            together, *each = [self._probed(one, came) for one, came in every]
        except Exception as error:  # any error that a module raises over another graph than its own
            LOG.debug("clients train one by one: %s", error)
            return False
        finally:
            self.received = {}
        logits = torch.cat([one.pop(LOGITS) for one in each])
        is_alike = same_numbers({LOGITS: together.pop(LOGITS)[None]}, [{LOGITS: logits}])
        return is_alike and same_numbers(together, each)

    def _probed(self, learner: Learner, received: dict[str, Tensor]) -> Tensors:
        """Return a step's gradients, and what the module gives and keeps then."""
        self.received = received
        learner.module.train()
        with self._drawing(learner.graph, 0):
            self.begin(learner, 0)
            self.loss(learner.module, learner.graph).backward()
        result = {
            f"of {n}": p.grad for n, p in learner.module.named_parameters() if p.grad is not None
        }
        kept = {name: value.clone() for name, value in learner.module.named_buffers()}
        return result | kept | {LOGITS: self._judged(learner).logits}


# Any: an optimiser of PyTorch's or of this library's
def _is_elementwise(optimiser: Any) -> bool:
    """Whether a step over stacks is the step of each client, whatever each has trained before."""
    if isinstance(optimiser, Adam):
        return True
    is_plain = type(optimiser) is torch.optim.SGD
    return is_plain and not any(group["momentum"] for group in optimiser.param_groups)


def _refuse_if_all(left_out: Mapping[int, str], clients: Sequence[int]) -> None:
    if len(left_out) == len(clients):
        why = " and ".join(sorted(set(left_out.values())))
        raise RefusedError(f"clients {brief(sorted(left_out), 60)}: {why}; nobody is left")


# Any: a weight, or one of each row; entries may be lists
def _answered(
    sent: Mapping[str, NDArray[np.generic]], weight: Any, came: Parameters, entries: dict[str, Any]
) -> tuple[Parameters, Any, dict[str, Any]]:
    """Write an answer in the types of the server's arrays: a mean of integers is no integer."""
    dtypes = [values.dtype for values in came]
    dtypes += [np.dtype(np.float32)] * (len(sent) - len(dtypes))
    arrays = [
        np.asarray(np.rint(values) if dtype.kind in "iu" else values, dtype)
        for values, dtype in zip(sent.values(), dtypes, strict=True)
    ]
    return arrays, weight, {ARRAY_NAMES: list(sent), **entries}


@contextmanager
def _fitting(graph: GraphOnDevice) -> Iterator[None]:
    """Name the client if its number of features does not fit the module."""
    try:
        yield
    except RuntimeError as error:
        if not NO_FIT.search(str(error)):
            raise
        words = f"client {graph.clients[0]}: x has not as many features as the run's module takes"
        raise told(DataError(words), words) from error
