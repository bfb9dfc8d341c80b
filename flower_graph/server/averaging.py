"""Flower's FedAvg, with checked replies and a report a round; any strategy that averages.

What is added to Flower's code: nodes are waited for with a limit, asked which clients they host,
and drawn by the run's seed; replies that cannot be averaged are left out and reported; bytes are
counted; a run can be saved and resumed. The averaging is Flower's, and may be that of another
strategy: ``class Mine(ReportedFedAvg, FedProx)``.

Clients save when they have measured a round's model, which all do; then the server reports the
round and completes the checkpoint, if all clients have saved.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord
from numpy.typing import NDArray
from torch import Tensor

from flower_graph.config.common import Robust
from flower_graph.errors import CheckpointError
from flower_graph.privacy.central import CentralNoise
from flower_graph.records.rounds import RoundReport
from flower_graph.server.averaging_round import CheckedFedAvg, SoFar
from flower_graph.server.membership import Membership
from flower_graph.server.outputs import BestRound
from flower_graph.server.round_loop import RoundLoop
from flower_graph.server.session import Session
from flower_graph.wire.boundary import no_content
from flower_graph.wire.fields import read_not_saved

LOG = logging.getLogger(__name__)
SCALARS = (bool, int, float, str, type(None))
PLAIN = (*SCALARS, np.ndarray, np.generic, list, dict, ArrayRecord)
RECORD = "array-record"  # key of a dict that stands for one
# What a checkpoint has under a name of its own, and what lasts a run or a round only
OWN = {"arrays", "own_arrays", "session", "central_noise", "robust"}
OWN |= {"_round", "_kept", "_config", "_evaluate_config", "best", "_outputs"}


class OneClientEach(Membership):
    """SuperNodes of one client each: it is answered with a model of its own."""

    def refusal(self, answer: Any) -> str:
        """Say why a SuperNode cannot be answered with its client's own model, or nothing."""
        count = len(answer.clients)
        if count == 1:
            return ""
        hosts = f"hosts {count} clients" if count else "does not say which client it hosts"
        return f"it {hosts}, and each is answered with its own model: it needs a SuperNode for each"


class ReportedFedAvg(RoundLoop, CheckedFedAvg):
    """Flower's ``FedAvg`` with a report a round.

    A subclass says what a report holds (``report_fields``) and may say what a run starts from
    (``first_arrays``). ``start`` runs the rounds; Flower's own loop can, too, without reports.

    Parameters
    ----------
    participation : float
        Share of the SuperNodes asked to train each round, above 0 and at most 1. All measure.
    min_nodes : int
        SuperNodes to wait for before an exchange, at least 1.
    seed : int
        Of the choice of SuperNodes.
    checkpoint_dir, checkpoint_every : Path or None, int
        Where and every how many rounds to save everything; 0 for never.
    **more
        Arguments of another strategy that a subclass puts in the place of ``FedAvg``.

    Attributes
    ----------
    arrays : ArrayRecord
        The model: what was sent last.
    best : BestRound
        The first round of the highest validation accuracy so far.
    own_arrays : dict of int to ArrayRecord
        With ``personal``: what each client was given last.

    Raises
    ------
    ValueError
        If an argument is impossible.
    """

    def __init__(
        self,
        *,
        participation: float = 1.0,
        min_nodes: int = 1,
        seed: int = 0,
        checkpoint_dir: Path | None = None,
        checkpoint_every: int = 0,
        **more: Any,
    ) -> None:
        # Whom to wait for and whom to ask is decided here; Flower takes all that it is shown.
        super().__init__(min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=1, **more)
        if checkpoint_every and self.fraction_evaluate < 1:
            raise ValueError(
                f"fraction_evaluate is {self.fraction_evaluate:g}: clients save a checkpoint when "
                "they measure, so all must be asked to; set it to 1, or checkpoint_every to 0"
            )
        self.session = Session(
            OneClientEach() if self.personal else Membership(),
            min_nodes=min_nodes,
            participation=participation,
            seed=seed,
            checkpoint_dir=checkpoint_dir,
            checkpoint_every=checkpoint_every,
        )
        self.central_noise: CentralNoise | None = None  # see ``flower_graph.privacy.central``
        self.robust: Robust | None = None  # see ``flower_graph.server.robust``
        self.arrays, self.own_arrays = ArrayRecord(), dict[int, ArrayRecord]()
        self.best = BestRound()
        self._round = SoFar()
        self._kept: StrategyState | None = None  # while ``start`` runs

    # What a method says

    def first_arrays(self) -> ArrayRecord:
        """Give what a run starts from whose caller does not say it."""
        raise ValueError("initial_arrays: a run needs a model to start from")

    def question(self) -> Mapping[str, Any]:
        """Give what every message says besides."""
        return {}

    def fixed_settings(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed; a subclass adds its own."""
        return {"strategy": type(self).__name__, "seed": self.session.seed}

    # What a run leaves

    @property
    def payload(self) -> dict[str, dict[str, int]]:
        """Payload bytes so far: direction to kind to bytes."""
        # What the clients would send and get to train if each had a SuperNode of its own. A
        # SuperNode that does not say whom it hosts counts as one client where it is silent.
        return self.session.ledger.payload

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return what the server holds after the last round.

        Returns
        -------
        dict of str to ndarray
            The model's arrays, named and shaped as ``first_arrays`` gives them; of a method with
            personal models those of each client, as ``"client-<number>.<name>"``.
        """
        models = {f"client-{client}.": local for client, local in sorted(self.own_arrays.items())}
        if not self.personal:
            models = {"": self.arrays}
        return {start + n: a.numpy() for start, local in models.items() for n, a in local.items()}

    def learnt(self) -> ArrayRecord:
        """Return the model."""
        return self.arrays

    # The loop

    def begin(self, initial_arrays: ArrayRecord | None) -> None:
        """Begin anew, as often as one likes."""
        self.arrays = self.first_arrays() if initial_arrays is None else initial_arrays
        self.own_arrays = {}
        self.session.renew(type(self.session.members)(self.question()))
        self._kept = StrategyState(self, OWN)
        self.summary()

    def round(self, server_round: int) -> RoundReport:
        """Run a round as Flower's ``start`` does, which can begin with the first alone."""
        session, said = self.session, self.question()
        grid, config = session.exchange.grid, ConfigRecord({**said, **self._config})
        messages = self.configure_train(server_round, self.arrays, config, grid)
        replies = session.relay(messages, server_round)
        self.arrays = self.aggregate_train(server_round, replies)[0] or self.arrays
        config = ConfigRecord({**said, **self._evaluate_config})
        messages = self.configure_evaluate(server_round, self.arrays, config, grid)
        self.aggregate_evaluate(server_round, session.relay(messages, server_round))
        report = self._round.report
        assert report is not None
        return report

    def trained(self, report: RoundReport) -> MetricRecord:
        """Give the round's losses beside Flower's means of what clients said."""
        return MetricRecord({**self._round.trained, **super().trained(report)})

    def measured(self, report: RoundReport) -> MetricRecord:
        """Give its accuracies beside Flower's means of what clients measured."""
        return MetricRecord({**self._round.evaluated, **super().measured(report)})

    def finish(self, server_round: int) -> None:
        """End: Flower's own loop saves nothing."""
        self._kept = None

    def summary(self) -> None:
        """Log the settings, Flower's and the choice of SuperNodes."""
        super().summary()
        how = self.session.min_nodes, self.session.share, self.session.seed
        LOG.info("SuperNodes: wait for %d, %g of them train, drawn by seed %d", *how)

    # Checkpoints

    def saves(self, server_round: int) -> bool:
        """Whether the clients are to save the round; never where Flower's own loop runs it."""
        return self._kept is not None and self.session.is_due(server_round)

    def is_due(self, server_round: int) -> bool:
        """Whether the clients were asked to save the round."""
        return self._round.saves

    def clients_save(self, server_round: int) -> dict[int, str]:
        """Say which SuperNodes have not written their part, and why."""
        came, missing = {one.metadata.src_node_id: one for one in self._round.measured}, {}
        for message in self._round.sent:
            node = message.metadata.dst_node_id
            why = "it did not answer"
            if (reply := came.get(node)) is not None:
                why = no_content(reply) or read_not_saved(reply.content)
            if why:
                missing[node] = why
        return missing

    def state(self) -> dict[str, Any]:
        """Return the models, who is known, and what the strategy keeps besides."""
        assert self._kept is not None
        local = {
            "arrays": values_of(self.arrays),
            "own-arrays": {client: values_of(one) for client, one in self.own_arrays.items()},
            "clients": self.session.members.everyone(),
        }
        return {"strategy": self._kept.state_dict(), **packed(local, "state")}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        assert self._kept is not None
        self._kept.load_state_dict(state["strategy"])
        local = unpacked({name: state[name] for name in ("arrays", "own-arrays")})
        self.arrays = arrays_like(self.arrays, local["arrays"])
        models = local["own-arrays"].items()
        self.own_arrays = {client: arrays_like(self.arrays, model) for client, model in models}
        self.session.members.absent |= set(state["clients"])


# What a strategy keeps ---------------------------------------------------------------------------

# Flower's strategies have no method for checkpoints. They keep what lasts, such as the moments of
# FedAdam, in attributes, so whatever attribute has changed since the run began is taken, if it is
# made of numbers and arrays; the rest is refused: a run that went on without it would take another
# course.


class StrategyState:
    """The attributes of a strategy that change during a run."""

    def __init__(self, strategy: object, others: Collection[str]) -> None:
        self._strategy, self._others = strategy, set(others)
        self._start = {name: _copied(value) for name, value in self._attributes().items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed, fit for ``torch.save``."""
        return {
            name: packed(value, f"{type(self._strategy).__name__}.{name}")
            for name, value in self._attributes().items()
            if name not in self._start or not _same(value, self._start[name])
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what ``state_dict`` returned; all else becomes what it was at first."""
        for name, value in self._start.items():
            setattr(self._strategy, name, _copied(value))
        for name, value in state.items():
            setattr(self._strategy, name, unpacked(value))

    def _attributes(self) -> dict[str, Any]:
        local = vars(self._strategy)
        return {name: value for name, value in local.items() if name not in self._others}


def _copied(value: Any) -> Any:
    """Copy what may be changed in place."""
    return copy.deepcopy(value) if type(value) in PLAIN else value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or type(one) not in PLAIN:
        return False
    if isinstance(one, ArrayRecord):
        return _same(values_of(one), values_of(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True)
    return bool(one == other) or (one != one and other != other)


def packed(value: Any, name: str) -> Any:
    """Turn arrays into tensors, which ``torch.load`` reads without running code."""
    if isinstance(value, ArrayRecord):
        return {RECORD: packed(values_of(value), name)}
    if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
        return {key: packed(entry, f"{name}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, list):
        return [packed(entry, f"{name}[{place}]") for place, entry in enumerate(value)]
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiub":
        return torch.from_numpy(np.array(value))
    if isinstance(value, SCALARS):
        return value
    raise CheckpointError(
        f"{name} has changed since the run began and is a {type(value).__name__}: a checkpoint "
        "takes numbers, strings, arrays, and lists and dicts of them; set checkpoint_every=0"
    )


def unpacked(value: Any) -> Any:
    """Give back what ``packed`` was given."""
    if isinstance(value, dict) and list(value) == [RECORD]:
        result = unpacked(value[RECORD])
        return ArrayRecord({name: Array(values) for name, values in result.items()})
    if isinstance(value, dict):
        return {key: unpacked(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [unpacked(entry) for entry in value]
    return value.numpy().copy() if isinstance(value, Tensor) else value


def arrays_like(model: ArrayRecord, found: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Make a model of saved arrays; ``ValueError`` if they are not the model's."""
    # Their type is the one that the averaging made: that of FedAdam is wider than the first
    # model's.
    forms = {name: tuple(array.shape) for name, array in model.items()}
    saved = {name: values.shape for name, values in found.items()}
    if list(forms.items()) != list(saved.items()):
        raise ValueError(f"its arrays are {saved}, this run's are {forms}")
    return ArrayRecord({name: Array(values) for name, values in found.items()})


def values_of(record: ArrayRecord) -> dict[str, Any]:
    """Give the arrays of a record by their names."""
    return {name: array.numpy() for name, array in record.items()}
