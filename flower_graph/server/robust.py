"""Flower's averages that a few hostile clients cannot move far.

Each client's answer counts once, whatever its weight or SuperNode: SuperNodes send a row for each
client. A hostile SuperNode counts as many hostile clients as it hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, TypeVar

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum

from flower_graph.config.common import KRUM, MEDIAN, NO_DEFENCE, TRIMMED_MEAN, RobustSection
from flower_graph.server.averaging import ReportedFedAvg

LOG = logging.getLogger(__name__)
S = TypeVar("S", bound=ReportedFedAvg)
AVERAGES: dict[str, type[FedAvg]] = {KRUM: Krum, TRIMMED_MEAN: FedTrimmedAvg, MEDIAN: FedMedian}


class _Enough(FedAvg):
    robust: RobustSection
    _warned = 0  # number of answers at the last warning

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = list(replies)
        if (why := too_few(self.robust, len(result))) and len(result) != self._warned:
            self._warned = len(result)
            LOG.warning("round %d: no protection from hostile clients: %s", server_round, why)
        return super().aggregate_train(server_round, result)


# Any: each kind has options of its own
def make_robust(kind: type[S], how: RobustSection, *args: object, **options: Any) -> S:
    """Build a strategy with another average."""
    if how.robust == NO_DEFENCE:
        return kind(*args, **options)
    average = AVERAGES[how.robust]
    made: type[S] = type(f"{kind.__name__}With{average.__name__}", (kind, _Enough, average), {})
    strategy: Any = made(*args, **options)
    strategy.robust = how
    # Set here, since not every base class passes on unknown arguments.
    strategy.num_malicious_nodes, strategy.beta = how.num_malicious, how.beta
    result: S = strategy
    return result


def too_few(how: RobustSection, answers: int) -> str:
    """Return why an average of so few answers protects nobody, or an empty string."""
    if how.robust == KRUM and answers < (needed := 2 * how.num_malicious + 3):
        named = f"strategy.num_malicious={how.num_malicious}"
        return f"krum with {named} needs {needed} clients, {answers} answered"
    if how.robust == TRIMMED_MEAN and not int(how.beta * answers):
        return f"strategy.beta={how.beta:g} leaves out none of {answers} clients"
    if how.robust == MEDIAN and answers < 3:
        return f"the median of {answers} clients is their mean"
    return ""
