"""FedSCem's ``table.md``: the rows of ``table.json`` for reading, the paper's figures beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flower_graph.apps.reproduce.experiments import Runs
from flower_graph.apps.reproduce.fedscem_cells import (
    FEDSCEM,
    GLOBAL,
    LONG_FEDAVG,
    MASKED,
    METHODS,
    MU,
    PAPERS_OWN,
    PER_CLIENT,
    ROUND_FACTOR,
    STRICT,
    TABLE_1_METHODS,
    TAU,
    Plan,
)
from flower_graph.apps.reproduce.fedscem_rows import GAIN, LAST_GAIN, MEMORY
from flower_graph.apps.reproduce.tables import show_pictures
from flower_graph.apps.reproduce.text import (
    LAST,
    NONE,
    SECONDS,
    TEST,
    VALIDATION,
    WHOLE,
    Row,
    accuracy,
    find,
    mean_of,
    number,
    paper_points,
    points,
)
from flower_graph.config.load import load_config
from flower_graph.strategies.masked_embedding_averaging.config import FedSCemConfig


def make_page(
    plan: Plan, runs: Runs, rows: Sequence[Row], left_out: Sequence[str], pictures: Sequence[str]
) -> str:
    """Write the whole page; a table without rows is not on it."""
    lines = _head(plan) + _masked(plan, runs)
    for data in plan.data:
        lines += _accuracies(rows, data)
        lines += _costs(rows, data)
    lines += _table_1(plan, rows)
    for data in plan.grid_data:
        lines += _grid(rows, data)
    lines += _sizes(rows)
    lines += show_pictures(pictures)
    if left_out:
        lines += ["\n## Not run\n", *(f"- {reason}" for reason in left_out)]
    return "\n".join(lines) + "\n"


def _head(plan: Plan) -> list[str]:
    seeds = ", ".join(map(str, plan.table_seeds))
    return [
        "# FedSCem: the paper's comparison\n",
        f"Seeds {seeds}: each draws other ego-networks, splits and weights. "
        "Mean ± sample deviation over the seeds. *Ours* is the test accuracy in the round with the "
        "best validation accuracy, *last* that after the last round. An accuracy is the mean over "
        "the clients that have such nodes.\n",
        "Split: 60, 20 and 20 % of a client's labelled nodes for training, validation and test; "
        "the paper leaves the ratio open. *Strict* is the split in which a node has one role at "
        "all clients, so that nobody trains on another's test label. *Gain* is the difference to "
        "Self-training with the same seed, ego-networks and split, averaged over the seeds, in "
        "points of accuracy.\n",
        "A round is one step for Self-training, FedAvg, FedProx and FedSCem-, and two steps for "
        "FedSCem and FedSCem_iter. How to read this: [README.md](README.md).\n",
        "| data | rounds | mu | tau | learning rate | projection | features |",
        "|---|---|---|---|---|---|---|",
        *(_settings(plan, data) for data in plan.data),
        "",
        *_not_the_papers(plan),
    ]


def _not_the_papers(plan: Plan) -> list[str]:
    """Explain the rows that the paper does not have."""
    lines = []
    if PAPERS_OWN in plan.methods:
        lines.append(
            f'"{PAPERS_OWN}" is FedSCem with the paper\'s mu, tau and projection of 32, all else '
            "as in the table above. The paper's figure beside both rows is the same one.\n"
        )
    if LONG_FEDAVG in plan.methods:
        lines.append(
            f'"{LONG_FEDAVG}" is FedAvg in {ROUND_FACTOR[LONG_FEDAVG]} times the rounds, because '
            "it takes one small step a round and is far from its end; the paper has no such row.\n"
        )
    return lines


def _settings(plan: Plan, data: str) -> str:
    """Say what the config of a data set has, as it is now."""
    cell = plan.cell(data, FEDSCEM)
    config = load_config(cell.config, cell.overrides)
    assert isinstance(config, FedSCemConfig)
    how = config.strategy
    features = "rows sum to one" if config.data.normalize else "as they are"
    return (
        f"| {data} | {plan.rounds_of(data)} | {how.mu:g} | {how.tau:g} | {how.learning_rate:g} "
        f"| {config.model.projection} | {features} |"
    )


def _masked(plan: Plan, runs: Runs) -> list[str]:
    """Say what the masked row is, and how far its test accuracy ever is from the plain run's."""
    seed, result = plan.table_seeds[0], []
    for data in plan.data:
        masked = runs.get(plan.cell(data, MASKED), {}).get(seed)
        plain = runs.get(plan.cell(data, FEDSCEM), {}).get(seed)
        if masked and plain:
            both = zip(masked.test_accuracy, plain.test_accuracy, strict=True)
            gaps = [abs(a - b) for a, b in both if math.isfinite(a) and math.isfinite(b)]
            rounds = f"{len(gaps)} of {len(masked.test_accuracy)} rounds"
            result.append(f"{max(gaps, default=math.nan):.4f} on {data} ({rounds})")
    if not result:
        return []
    return [
        f'The row "{MASKED}" is the whole method, blinded alignment and masks included, for seed '
        f"{seed}; the other rows of FedSCem are computed without. The two runs' test accuracies "
        f"differ in no round by more than {', '.join(result)}; a round that was skipped has none "
        "to compare.\n"
    ]


def _accuracies(rows: Sequence[Row], data: str) -> list[str]:
    lines = []
    for method in (*METHODS, MASKED):
        name = {"data": data, "method": method}
        result = [name | {"table": t} for t in ("Table 3", "Table 3, strict split")]
        if not any(find(rows, metric=TEST, **key) for key in result):
            continue
        usual, strict = result
        cells = [
            accuracy(find(rows, metric=TEST, **usual)),
            _paper(find(rows, metric=TEST, **usual) or find(rows, metric=TEST, **strict)),
            points(find(rows, metric=GAIN, **usual)),
            paper_points(find(rows, metric=GAIN, **usual)),
            accuracy(find(rows, metric=LAST, **usual)),
            points(find(rows, metric=LAST_GAIN, **usual)),
            accuracy(find(rows, metric=TEST, **strict)),
            points(find(rows, metric=GAIN, **strict)),
            accuracy(find(rows, metric=LAST, **strict)),
            points(find(rows, metric=LAST_GAIN, **strict)),
        ]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    if not lines:
        return []
    return [
        f"\n## Table 3, {data}: accuracy\n",
        "| method | ours | paper | gain | paper's gain | last | gain, last "
        "| strict | strict gain | strict, last | strict gain, last |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *lines,
    ]


def _costs(rows: Sequence[Row], data: str) -> list[str]:
    lines = []
    for method in (*METHODS, MASKED):
        key = {"data": data, "method": method, "table": "Table 3"}
        seconds, whole, memory = (find(rows, metric=m, **key) for m in (SECONDS, WHOLE, MEMORY))
        if seconds is None:
            continue
        percent = None if memory is None else memory["paper-gpu-memory-percent"]
        lines.append(
            f"| {method} | {seconds['mean']:.3f} | {number(seconds['paper'], '.3f')} "
            f"| {number(mean_of(whole), '.1f')} | {number(mean_of(memory), '.0f')} "
            f"| {number(percent, '.2f')} |"
        )
    if not lines:
        return []
    return [
        f"\n## Table 3, {data}: cost\n",
        "All clients in one process with one thread, and other work on the same machine, so that "
        "seconds compare methods only roughly; docs/performance.md has those of an idle machine. "
        "The paper's are on a server with eight GPUs (LocalSage+: one client alone). Seconds of a "
        "round are the median; a whole run includes what goes before the first round, such as "
        "alignment or the training of generators. Memory is the most that the process held, "
        "libraries and graph included.\n",
        "| method | s a round | paper | s a run | memory, MiB | paper, % of GPU memory |",
        "|---|---|---|---|---|---|",
        *lines,
    ]


def _table_1(plan: Plan, rows: Sequence[Row]) -> list[str]:
    lines = []
    for data in plan.data:
        for method in (*TABLE_1_METHODS, GLOBAL):
            key = {"table": "Table 1", "data": data, "method": method, "metric": TEST}
            usual, strict = (find(rows, split=s, **key) for s in (PER_CLIENT, STRICT))
            if usual or strict:
                said = "Local" if method == TABLE_1_METHODS[0] else method
                lines.append(
                    f"| {data} | {said} | {accuracy(usual)} | {accuracy(strict)} "
                    f"| {_paper(strict or usual)} |"
                )
    if not lines:
        return []
    return [
        "\n## Table 1\n",
        "*Global* is the same model trained on the whole graph for as many steps, under the strict "
        "split, whose roles are a random 60/20/20 split of all nodes. It is judged as the clients "
        "are: by the mean over the ego-networks of the accuracy on their test nodes, with "
        "embeddings that know the whole graph. So compare it with the column *strict*.\n",
        "| data | method | per client | strict | paper |",
        "|---|---|---|---|---|",
        *lines,
    ]


def _grid(rows: Sequence[Row], data: str) -> list[str]:
    lines: list[str] = []
    for metric, name in ((VALIDATION, "best validation"), (TEST, "test")):
        fields = {
            (r["mu"], r["tau"]): r
            for r in rows
            if (r["table"], r["data"], r["metric"]) == ("Figure 6a", data, metric)
        }
        if fields:
            any_one = next(iter(fields.values()))
            seeds = ", ".join(str(s) for s in any_one["seeds"])
            lines += [
                f"\n## Figure 6a, {data}: {name} accuracy by mu and tau\n",
                f"Seed {seeds}; {any_one['settings']['rounds']} rounds, fewer than the other "
                "tables have.\n",
                "| mu | " + " | ".join(f"tau {tau:g}" for tau in TAU) + " |",
                "|---" * (len(TAU) + 1) + "|",
            ]
            for mu in MU:
                values = [mean_of(fields.get((mu, tau))) for tau in TAU]
                lines.append(f"| {mu:g} | " + " | ".join(number(v, ".3f") for v in values) + " |")
    return lines


def _sizes(rows: Sequence[Row]) -> list[str]:
    groups: dict[tuple[str, int], dict[str, Any]] = {}
    for r in rows:
        if r["table"] == "Figure 8":
            at = groups.setdefault((r["data"], r["group"]), {"clients": r["clients"]})
            at[r["metric"]] = r["mean"]
    if not groups:
        return []
    return [
        "\n## Figure 8: cost of a client by the size of its ego-network\n",
        "Clients of about equal size train together on one CPU core; a figure is a group's, "
        "divided by its clients. A round is FedSCem's at the client, without masks and messages; "
        "memory is that of its tensors: graph, weights, optimiser and what a round makes.\n",
        "| data | clients | nodes | edges | ms a round | memory, MiB |",
        "|---|---|---|---|---|---|",
        *(
            f"| {data} | {at['clients']} | {at['nodes']:.1f} | {at['edges']:.1f} "
            f"| {1000 * at[SECONDS]:.2f} | {at[MEMORY]:.2f} |"
            for (data, _), at in groups.items()
        ),
    ]


def _paper(r: Row | None) -> str:
    if r is None or r["paper"] is None:
        return NONE
    return f"{r['paper']:.4f} ± {r['paper-std']:.4f}"
