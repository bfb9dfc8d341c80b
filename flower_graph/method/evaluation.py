"""Judges the models that a simulation leaves: on each client's own test nodes, and on all."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flower_graph.client.learner import weighed
from flower_graph.config.common import ALL, OWN
from flower_graph.config.foreign import OWN as OWN_RUN
from flower_graph.engine.cohort import GraphOnDevice
from flower_graph.method.run import Run
from flower_graph.outputs.build import build_module
from flower_graph.outputs.client import CLIENTS, read_table
from flower_graph.outputs.files import write_table

OWN_MODEL, COMMON_MODEL = "own-model", "common-model"  # in ``result.json``
COLUMN = "test-accuracy-all"  # of ``clients.csv``


class Judgement(NamedTuple):
    """The accuracies of one model, or of each client's own, ``[c]`` by client; NaN: none."""

    own: NDArray[np.float64]  # on a client's own test nodes
    all: NDArray[np.float64]  # on the test nodes of all clients together

    def to_result(self, rounds: Sequence[int]) -> dict[str, object]:
        """Return the means over clients, and the rounds that the models are of."""
        known = {OWN: self.own[np.isfinite(self.own)], ALL: self.all[np.isfinite(self.all)]}
        means = {name: one.mean().item() if one.size else math.nan for name, one in known.items()}
        return {"rounds": [*rounds], **means}


@torch.no_grad()
def _counts(module: nn.Module, graphs: Sequence[GraphOnDevice]) -> Tensor:
    """Count a module's right answers for each client's test nodes, and these nodes, ``[c, 2]``."""
    rows = []
    for graph in graphs:
        test = graph.masks["test"]
        logits = module(*weighed(module, graph))[test]
        right = float((logits.argmax(1) == graph.y[test]).sum())
        # What diverged has no accuracy
        rows.append([right if bool(logits.isfinite().all()) else math.nan, float(test.sum())])
    return torch.tensor(rows, dtype=torch.float64)


def judge_common(module: nn.Module, graphs: Sequence[GraphOnDevice]) -> Judgement:
    """Judge one model: each client's share of right answers, and that of all nodes together."""
    counts = _counts(module, graphs)
    own, (right, nodes) = counts[:, 0] / counts[:, 1], counts.sum(0)
    return Judgement(own.numpy(), (right / nodes).expand(len(graphs)).numpy())


def judge_own(modules: Sequence[nn.Module], graphs: Sequence[GraphOnDevice]) -> Judgement:
    """Judge each client's model, in the order of their graphs, at every client."""
    each = [judge_common(module, graphs) for module in modules]
    own = np.array([one.own[place] for place, one in enumerate(each)])
    return Judgement(own, np.array([one.all[0] for one in each]))


def judge_run(
    out: Path, graphs: Sequence[GraphOnDevice], common: nn.Module | None, last: int
) -> dict[str, object]:
    """Judge a run's models, for ``result.json``; write each client's into ``clients.csv``.

    ``common`` is a model of the server's after round ``last``, beside the clients' own. If clients
    keep one model, that is the common one. ``OutputError`` if the models are not here, or cannot be
    built.
    """
    run = Run(out, OWN_RUN)
    run.all_saved()
    rounds, result = run.kept_rounds, dict[str, object]()
    if len(graphs) == 1 or run.are_own:
        kept = judge_own([run.model(graph.client) for graph in graphs], graphs)
        result[OWN_MODEL] = kept.to_result(rounds)
    else:
        kept = judge_common(build_module(*run.saved()), graphs)
        result[COMMON_MODEL] = kept.to_result(rounds)
    if common is not None:
        result[COMMON_MODEL] = judge_common(common, graphs).to_result([last])
    if len(rounds) == 1:  # else a line does not say whether its client keeps that round
        table = read_table(out / CLIENTS, ["client", "round"])
        values = {str(g.client): one for g, one in zip(graphs, kept.all.tolist(), strict=True)}
        cells = table["client"].map(values).where(table["round"] == str(rounds[0]))
        write_table(out / CLIENTS, table.assign(**{COLUMN: cells}))
    return result
