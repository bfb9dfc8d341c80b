"""Which metrics a run reports, and what must be counted for them."""

from __future__ import annotations

from collections.abc import Sequence

from flower_graph.config.rules import Rule
from flower_graph.wire.keys import ACCURACY, AUC, CONFUSION, HISTOGRAMS, SCORES

SOME = Rule(
    f"some of {', '.join(SCORES)}, none twice",
    lambda names: bool(names) and set(names) <= {*SCORES} and len(set(names)) == len(names),
)
HELP = (
    "what is reported of predictions; the first decides which round is the best. All but the "
    "accuracy are those of all clients' predictions together: docs/outputs.md"
)
WITHHELD = (
    "clients withhold what they measure; set metrics=[accuracy] or privacy.measurements=report"
)


def counting_of(metrics: Sequence[str]) -> str:
    """Return what must be counted for some metrics: nothing for the accuracy alone."""
    return HISTOGRAMS if AUC in metrics else CONFUSION if {*metrics} - {ACCURACY} else ""
