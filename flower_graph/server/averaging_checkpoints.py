"""Checkpoints of strategies that average, both halves.

Clients write theirs when they have measured a round's model, which all do; then the server reports
the round and writes its own, if all clients have. Whoever comes to a resumed run is asked whom it
hosts, as always, and with that to go on from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

from flower_graph.messages.keys import (
    CHECKPOINT,
    NOT_SAVED,
    RESUME_ROUND,
    RUN_TOKEN,
    SERVER_ROUND,
)
from flower_graph.messages.resume import Resume, read_not_saved
from flower_graph.server.gathering import no_content
from flower_graph.server.session import RunCheckpoints
from flower_graph.server.strategy_state import StrategyState, packed, unpacked
from flower_graph.storage import checkpoint

SCALARS = (bool, int, float, str, type(None))
Measured = tuple[float, int, dict[str, Any]]


# Client ------------------------------------------------------------------------------------------


def save_if_asked(
    save: Callable[[int, str], str], config: Mapping[str, Any], answer: Measured
) -> Measured:
    """Write a checkpoint, if the server wants one, before measurements are sent."""
    if not config.get(CHECKPOINT):
        return answer
    loss, weight, metrics = answer
    why = save(int(config[SERVER_ROUND]), str(config[RUN_TOKEN]))
    return (loss, weight, metrics | {NOT_SAVED: why}) if why else answer


def restore_if_asked(restore: Callable[[Resume], object], config: Mapping[str, Any]) -> None:
    """Go on from the checkpoint that the server's ``query`` names, if it names one."""
    if config.get(RESUME_ROUND):
        restore(Resume.from_config(config))


# Server ------------------------------------------------------------------------------------------


class AveragingCheckpoints(RunCheckpoints):
    """When to save, and what; parameters as of ``RunCheckpoints``."""

    def __init__(self, folder: Path | None, every: int) -> None:
        super().__init__(folder, every)
        self._strategy: StrategyState | None = None

    def check_measuring(self, share: float) -> None:
        """Refuse checkpoints where not all SuperNodes measure: that is when clients save."""
        if self.every and share < 1:
            raise ValueError(
                f"fraction_evaluate is {share:g}: clients save a checkpoint when they measure, so "
                "all must be asked to; set it to 1, or checkpoint_every to 0"
            )

    def begin(self, strategy: StrategyState) -> None:
        """Begin a run; ``strategy`` is what a strategy keeps besides the model."""
        self._strategy, self._is_late = strategy, False
        self.resume = Resume(run=checkpoint.new_run())

    def is_due(self, server_round: int, rounds: int) -> bool:
        """Whether this round is to be saved; never where Flower's own loop runs the rounds."""
        return self._strategy is not None and super().is_due(server_round, rounds)

    def save(self, server_round: int, state: dict[str, Any], missing: Mapping[int, str]) -> None:
        """Complete a round's checkpoint; ``state`` may have arrays."""
        assert self._strategy is not None
        local = packed(state | {"settings": _plain(state["settings"])}, "state")
        super().save(server_round, {"strategy": self._strategy.state_dict(), **local}, missing)

    def go_on(
        self,
        rounds: int,
        settings: Mapping[str, Any],
        load: Callable[[Mapping[str, Any]], None],
        ask: Callable[[int], Sequence[str]],
    ) -> int:
        """Go on from the newest checkpoint that server and clients have; as ``RunCheckpoints``."""

        def take(state: Mapping[str, Any]) -> None:
            assert self._strategy is not None
            self._strategy.load_state_dict(state["strategy"])
            load(unpacked(dict(state)))

        return super().go_on(rounds, _plain(settings), take, ask)


def not_saved(asked: Iterable[int], replies: Iterable[Message]) -> dict[int, str]:
    """Say which SuperNodes have not written their part, and why."""
    came = {reply.metadata.src_node_id: reply for reply in replies}
    missing = {}
    for node in asked:
        if node not in came:
            missing[node] = "it did not answer"
        elif said := no_content(came[node]):
            missing[node] = said
        elif why := read_not_saved(came[node].content):
            missing[node] = why
    return missing


def arrays_like(model: ArrayRecord, found: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Make a model of saved arrays; ``ValueError`` if they are not the model's."""
    # Their type is the one that the averaging made: that of FedAdam is wider than the first
    # model's.
    forms = {name: tuple(array.shape) for name, array in model.items()}
    saved = {name: values.shape for name, values in found.items()}
    if list(forms.items()) != list(saved.items()):
        raise ValueError(f"its arrays are {saved}, this run's are {forms}")
    return ArrayRecord({name: Array(values) for name, values in found.items()})


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn settings into what a checkpoint can hold, one by one."""
    return {
        name: value if type(value) in SCALARS else repr(value) for name, value in settings.items()
    }
