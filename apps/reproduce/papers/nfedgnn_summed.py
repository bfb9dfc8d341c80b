"""nFedGNN with one first layer for all users: what it has of the centralised network."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce.table import (
    BASELINES,
    LAST,
    PROPAGATION,
    READ,
    REGRESSION,
    TEST,
    VALIDATION,
    Figure,
    Line,
    Paper,
    Picture,
    grid,
)

SUMMED, CENTRAL, OWN = "nFedGNN, summed", "centralised", "nFedGNN, own layers"
TRIES = [
    [f"strategy.learning_rate={rate}", f"strategy.weight_decay={decay}"]
    for decay in ("5e-4", "5e-3")
    for rate in (0.01, 0.03)
]
LINE = Line(
    table="Accuracy",
    config="nfedgnn/{data}-summed",
    settings=["patience=50"],
    seeds=(0, 1, 2, 3, 4),
    rounds=500,
    figures=[TEST, LAST, VALIDATION, "rounds", "MiB-a-client"],
)
METHODS: dict[str, dict[str, Any]] = {
    SUMMED: {"tries": TRIES},
    CENTRAL: {
        "tries": TRIES,
        "trained": "flower_graph.strategies.nfedgnn.central:train_centralised",
    },
    OWN: {"config": "nfedgnn/{data}"},
}
GAINS = [
    (Figure(name, of, over), [SUMMED])
    for name, of, over in (
        ("gain-over-central", TEST, CENTRAL),
        ("last-over-central", LAST, CENTRAL),
        ("gain-over-regression", TEST, REGRESSION),
        ("gain-over-propagation", TEST, PROPAGATION),
    )
]
DATA = {"Cora": 4, "CiteSeer": 4, "PubMed": 2}  # settings tried


def accuracy(data: str) -> list[Line]:
    """Make the lines of a data set."""
    # Each feature that is not 0 is another one
    noise = replace(LINE, settings=["data.feature_noise=1", "patience=50"])
    untrained = {name: BASELINES[name] for name in (REGRESSION, PROPAGATION)}
    return [
        *grid(LINE, {data: DATA[data]}, METHODS, GAINS),
        *grid(noise, [data], {"nFedGNN, summed, scrambled features": {}}),
        *grid(replace(LINE, settings=[]), [data], untrained),
    ]


PAPER = Paper(
    title="nFedGNN: one first layer for all users",
    notes=READ,
    tables={
        "accuracy": [line for data in DATA for line in accuracy(data)],
        "sketch": [
            replace(
                line,
                shown=f"{line.method} to {buckets}",
                keys={"buckets": buckets},
                settings=[
                    *line.settings,
                    f"strategy.sketch={'null' if buckets == 'all' else buckets}",
                ],
            )
            for line in grid(replace(LINE, table="Sketch"), DATA, {"nFedGNN, summed, sketched": {}})
            for buckets in (64, 128, 256, 512, "all")
        ],
    },
    pictures=[
        Picture("axes-{data}.png", "axes", "sketch", {"Sketch": None}),
        Picture("curves.png", "curves", "accuracy", {"Accuracy": [SUMMED, CENTRAL, OWN]}),
    ],
)
