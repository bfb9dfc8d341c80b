"""nFedGNN with one first layer for all users: what it has of the centralised network."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce import table as t

SUMMED, CENTRAL, OWN = "nFedGNN, summed", "centralised", "nFedGNN, own layers"
TRIES = [
    [f"strategy.learning_rate={rate}", f"strategy.weight_decay={decay}"]
    for decay in ("5e-4", "5e-3")
    for rate in (0.01, 0.03)
]
LINE = t.Line(
    table="Accuracy",
    config="nfedgnn/{data}-summed",
    settings=["patience=50"],
    seeds=(0, 1, 2, 3, 4),
    rounds=500,
    figures=[*t.PLAIN, t.SPENT[1]],
)
METHODS: dict[str, dict[str, Any]] = {
    SUMMED: {"tries": TRIES},
    CENTRAL: {
        "tries": TRIES,
        "trained": "flower_graph.strategies.nfedgnn.method:train_centralised",
    },
    OWN: {"config": "nfedgnn/{data}"},
}
GAINS = [
    t.gain(CENTRAL, SUMMED, name="gain-over-central"),
    t.gain(CENTRAL, SUMMED, of=t.LAST, name="last-over-central"),
    t.gain(t.REGRESSION, SUMMED, name="gain-over-regression"),
    t.gain(t.PROPAGATION, SUMMED, name="gain-over-propagation"),
]
DATA = {"Cora": 4, "CiteSeer": 4, "PubMed": 2}  # settings tried
SCRAMBLED: t.Methods = {"nFedGNN, summed, scrambled features": {}}
UNTRAINED = {name: t.BASELINES[name] for name in (t.REGRESSION, t.PROPAGATION)}
# Each feature that is not 0 is another one
NOISE = ["data.feature_noise=1", "patience=50"]
BUCKETS: dict[object, str] = {name: str(name) for name in (64, 128, 256, 512)} | {"all": "null"}
PAPER = t.Paper(
    title="nFedGNN: one first layer for all users",
    tables={
        "accuracy": [
            line
            for data, tried in DATA.items()
            for line in (
                *LINE.grid({data: tried}, METHODS, GAINS),
                *replace(LINE, settings=NOISE).grid([data], SCRAMBLED),
                *replace(LINE, settings=[]).grid([data], UNTRAINED),
            )
        ],
        "sketch": replace(LINE, table="Sketch").grid(
            DATA,
            {"nFedGNN, summed, sketched": {}},
            over={"buckets": {k: [f"strategy.sketch={v}"] for k, v in BUCKETS.items()}},
        ),
    },
    pictures=[
        t.Picture("curves.png", {"Accuracy": [SUMMED, CENTRAL, OWN]}),
    ],
)
