"""LPGNN: accuracy against a budget, beside random features and what needs no features."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce import table as t

BUDGETS = {"0.01": "0.01", "0.1": "0.1", "1": "1", "2": "2", "8": "8", "none": "null"}
OURS = [f"LPGNN, epsilon {name}" for name in BUDGETS]
RANDOM, CENTRAL = "LPGNN, epsilon 1, random features", "centralised GCN"
VALIDATED, OTHER = (
    "label propagation, validation labels too",
    "flower_graph.strategies.nfedgnn.method",
)
UNTRAINED: dict[str, dict[str, Any]] = {
    "commonest class": {"trained": "majority"},
    t.REGRESSION: {"trained": "logistic-regression"},
    t.PROPAGATION: {"trained": "label-propagation"},
    # All others choose their round by validation labels; so this one spreads them
    VALIDATED: {"trained": f"{OTHER}:propagate_labels"},
}
METHODS: dict[str, dict[str, Any]] = {
    **{
        method: {"settings": [f"privacy.epsilon={value}"]}
        for method, value in zip(OURS, BUDGETS.values(), strict=True)
    },
    RANDOM: {"settings": ["privacy.epsilon=1", "strategy.features=random"]},
    CENTRAL: {
        "config": "nfedgnn/{data}-summed",
        "trained": f"{OTHER}:train_centralised",
        "tries": [[f"strategy.weight_decay={decay}"] for decay in ("5e-4", "5e-3")],
        "tried_on": (),
    },
    **{name: {**how, "figures": [t.TEST], "tries": [()]} for name, how in UNTRAINED.items()},
}
GAINS = [
    t.gain(RANDOM, *OURS, name="gain-over-random"),
    t.gain(t.PROPAGATION, *OURS, RANDOM, name="gain-over-propagation"),
    t.gain(VALIDATED, *OURS, RANDOM, name="gain-over-validated-propagation"),
    t.gain(t.REGRESSION, *OURS, name="gain-over-regression"),
    t.gain(CENTRAL, *OURS, name="gain-over-central"),
]
LINE = t.Line(
    table="",
    config="lpgnn/cora",
    seeds=(0, 1, 2, 3, 4),
    rounds=200,
    figures=[*t.PLAIN],
    tries=[
        ["strategy.hops=8", "strategy.weight_decay=0.01"],
        ["strategy.hops=32"],
        ["strategy.hops=2"],
    ],
    choosers=(10,),
    tried_on=["data.name=Cora"],  # what is chosen there is held on the other graphs
)
SPLITS = {
    "Public split": ["patience=30"],
    # A seed draws the split, the same for all methods
    "Half of the nodes train": [
        *("patience=30", "data.split=random", "data.ratios=[0.5,0.25,0.25]"),
        "data.split_seed=null",
    ],
}
PAPER = t.Paper(
    title="LPGNN: accuracy against a budget",
    tables={
        data.lower(): [
            line
            for table, settings in SPLITS.items()
            for line in replace(LINE, table=table, settings=[*settings, f"data.name={data}"]).grid(
                [data], METHODS, GAINS
            )
        ]
        for data in ("Cora", "CiteSeer", "PubMed")
    },
)
