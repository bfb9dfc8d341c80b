"""nFedGNN with one first layer for all users: what it has of the centralised network."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce.table import (
    BASELINES,
    LAST,
    PLAIN,
    PROPAGATION,
    READ,
    REGRESSION,
    TEST,
    Figure,
    Line,
    Methods,
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
    figures=[*PLAIN, "MiB-a-client"],
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


SCRAMBLED: Methods = {"nFedGNN, summed, scrambled features": {}}
UNTRAINED = {name: BASELINES[name] for name in (REGRESSION, PROPAGATION)}
# Each feature that is not 0 is another one
NOISE = ["data.feature_noise=1", "patience=50"]
BUCKETS: dict[object, str] = {name: str(name) for name in (64, 128, 256, 512)} | {"all": "null"}
PAPER = Paper(
    title="nFedGNN: one first layer for all users",
    notes=READ,
    tables={
        "accuracy": [
            line
            for data, tried in DATA.items()
            for line in (
                *grid(LINE, {data: tried}, METHODS, GAINS),
                *grid(LINE, [data], SCRAMBLED, settings=NOISE),
                *grid(LINE, [data], UNTRAINED, settings=[]),
            )
        ],
        "sketch": [
            replace(line, shown=f"{line.method} to {line.keys['buckets']}")
            for line in grid(
                *(LINE, DATA, {"nFedGNN, summed, sketched": {}}),
                over={"buckets": {k: [f"strategy.sketch={v}"] for k, v in BUCKETS.items()}},
                table="Sketch",
            )
        ],
    },
    pictures=[
        Picture("axes-{data}.png", "axes", "sketch", {"Sketch": None}),
        Picture("curves.png", "curves", "accuracy", {"Accuracy": [SUMMED, CENTRAL, OWN]}),
    ],
)
