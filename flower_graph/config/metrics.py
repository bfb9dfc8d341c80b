"""The metrics that a run reports, and the counts that they need."""

from __future__ import annotations

from collections.abc import Sequence

from flower_graph.config.rules import Rule, require
from flower_graph.wire.keys import (
    ACCURACY,
    AP,
    AUC,
    CONFUSION,
    ERRORS,
    HISTOGRAMS,
    LINK_SCORES,
    NODE_SCORES,
    RANKED,
    RANKS,
    SCORES,
    VALUE_SCORES,
)

NODES, LINKS, VALUES = TASKS = ("nodes", "links", "values")

SOME = Rule(
    f"some of {', '.join(SCORES)}, none twice",
    lambda names: bool(names) and set(names) <= {*SCORES} and len(set(names)) == len(names),
)
HELP = (
    "what is reported of predictions; the first decides which round is the best. All but the "
    "accuracy are those of all clients' predictions together: `flower-graph docs outputs#metrics`"
)
WITHHELD = (
    "clients withhold what they measure; set metrics=[accuracy] or privacy.measurements=report"
)


def counting_of(metrics: Sequence[str]) -> str:
    """Return the kind of counts for some metrics: none for the accuracy alone."""
    if set(VALUE_SCORES) & set(metrics):
        return ERRORS
    if set(RANKED) & set(metrics):
        return RANKS
    return HISTOGRAMS if {AUC, AP} & set(metrics) else CONFUSION if {*metrics} - {ACCURACY} else ""


def refuse_metrics(metrics: Sequence[str], task: str) -> None:
    """Refuse metrics that a task's predictions do not have; ``ConfigError`` names them."""
    allowed = {NODES: NODE_SCORES, LINKS: LINK_SCORES, VALUES: VALUE_SCORES}.get(task, ())
    for name in metrics:
        require(name in allowed, "metrics", name, f"one of {', '.join(allowed)} with task={task}")


def learns_values(config: object) -> bool:
    """Whether the nodes of a run have numbers to learn instead of classes."""
    return getattr(config, "task", NODES) == VALUES
