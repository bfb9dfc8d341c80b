"""A number of each node: homicide rates of US counties; no paper's tables."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce import table as t

MSE, MAE, VALIDATION = "test-mse-at-best-val", "test-mae-at-best-val", "best-val-mse"
# The file is made by benchmarks/counties.py of commit cc717de4, in the folder in which this is run
MODEL = [
    *("data.name=counties.json", "device=cpu", "task=values", "metrics=[mse,mae]"),
    *("data.features=standardise", "model.hidden=64", "strategy.local_epochs=3"),
    *("strategy.learning_rate=0.01", "patience=20"),
]
WHOLE, INSIDE = "In one place", "Inside clients"
CUT = {
    WHOLE: ["partition.method=random", "partition.clients=1"],
    INSIDE: ["partition.method=louvain", "partition.every_node=true", "partition.clients=10"],
}
LINEAR, LOCAL = "linear model on all features", "local training"
ERRORS = [MSE, MAE, VALIDATION]
GUESS, REGRESSION = (
    {"config": "fedavg/own-graph", "figures": ERRORS, "tries": [()], "trained": trained}
    for trained in ("mean", "linear-regression")
)
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    WHOLE: {
        "centralised": {"config": "fedavg/own-graph"},
        "mean in one place": GUESS,
        "linear model in one place": REGRESSION,
    },
    INSIDE: {
        LOCAL: {"config": "local/own-graph"},
        "FedAvg": {"config": "fedavg/own-graph"},
        # Two have settings of their own, besides the four that each method may try
        "FedProx": {
            "config": "fedprox/own-graph",
            "alone": [[f"strategy.proximal={mu}"] for mu in (0.01, 0.1, 1)],
        },
        "Ditto": {
            "config": "ditto/own-graph",
            "alone": [[f"strategy.pull={pull}"] for pull in (0.1, 1, 10)],
        },
        "FED-PUB": {"config": "fedpub/own-graph"},
        "mean of the training nodes": GUESS,
        LINEAR: REGRESSION,
    },
}
CHANGE = "change-over-linear"
CHANGES = {
    WHOLE: [t.gain("linear model in one place", *METHODS[WHOLE], of=MSE, name=CHANGE)],
    INSIDE: [
        t.gain(LINEAR, *METHODS[INSIDE], of=MSE, name=CHANGE),
        t.gain(LOCAL, *[*METHODS[INSIDE]][1:], of=MSE, name="change-over-local"),
    ],
}
LINE = t.Line(
    table="",
    config="",
    seeds=(0, 1, 2, 3, 4),
    rounds=200,
    figures=[*ERRORS, "rounds"],
    tries=[
        [f"strategy.weight_decay={decay}", f"model.dropout={dropout}"]
        for decay in ("0", "5e-3")
        for dropout in (0, 0.5)
    ],
    choosers=(10,),
)
PAPER = t.Paper(
    title="Numbers of nodes",
    tables={
        "values": [
            line
            for table, methods in METHODS.items()
            for line in replace(LINE, table=table, settings=[*MODEL, *CUT[table]]).grid(
                ["US counties"], methods, CHANGES[table]
            )
        ]
    },
)
