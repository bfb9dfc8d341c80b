"""``flower-graph sweep --optuna N``: Optuna proposes settings instead of a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flower_graph.apps.sweep.trials import Sweep, Trial
from flower_graph.errors import ConfigError

# Trials proposed at a time: the same number on any machine, so that a sweep that was stopped
# proposes the same ones again, and finds their runs
BATCH = 4
LOGARITHMIC = 100  # ranges whose ends are this many times apart are searched by their logarithm


def search(sweep: Sweep, varied: Mapping[str, Sequence[str]], count: int) -> list[Trial]:
    """Try this many proposals of Optuna, each informed by the trials before it."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("--optuna: needs pip install 'flower-graph[optuna]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    trials = list[Trial]()
    while len(trials) < count:
        asked = [study.ask() for _ in range(min(BATCH, count - len(trials)))]
        batch = [
            sweep.trial([propose(one, key, values) for key, values in varied.items()])
            for one in asked
        ]
        if not trials:
            sweep.announce(batch, count)
        sweep.do(batch)
        for one, trial in zip(asked, batch, strict=True):
            value = trial.merit(sweep.seeds)
            failed = optuna.trial.TrialState.FAIL
            study.tell(one, *((value,) if math.isfinite(value) else (None, failed)))
        trials += batch
    return trials


# Any: optuna's trial, whose package may not be there
def propose(trial: Any, key: str, values: Sequence[str]) -> str:
    """Choose one of the values of a setting, or a number in its range LOW..HIGH."""
    if len(values) > 1 or ".." not in values[0]:
        return str(trial.suggest_categorical(key, values))
    low, high, is_whole = ends(values[0])
    by_logarithm = low > 0 and high >= LOGARITHMIC * low
    if is_whole:
        return f"{key}={trial.suggest_int(key, int(low), int(high), log=by_logarithm)}"
    return f"{key}={trial.suggest_float(key, low, high, log=by_logarithm):.4g}"


def ends(text: str) -> tuple[float, float, bool]:
    """Read a range, such as ``model.hidden=8..64``, and whether its numbers are whole."""
    words = text.partition("=")[2].split("..")
    try:
        low, high = map(float, words)
        if not low < high < math.inf:
            raise ValueError
    except ValueError:
        raise ConfigError(f"{text}: a range is LOW..HIGH, two numbers, such as 0.001..1") from None
    return low, high, all(word.strip().lstrip("-").isdigit() for word in words)
