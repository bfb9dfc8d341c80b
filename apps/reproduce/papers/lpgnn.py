"""LPGNN: accuracy against a budget, beside random features and what needs no features."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce import table as t

OTHER = "flower_graph.strategies.nfedgnn.method"
BUDGETS = {name: name for name in ("0.01", "0.1", "1", "2", "8")} | {"none": "null"}
LARGER = {name: name for name in ("32", "128", "512")}  # where features begin to tell; Cora alone
OURS = [f"LPGNN, epsilon {name}" for name in (*BUDGETS, *LARGER)]
RANDOM, CENTRAL = "LPGNN, epsilon 1, random features", "centralised GCN"
VALIDATED = "label propagation, validation labels too"
UNTRAINED: dict[str, dict[str, Any]] = {
    "commonest class": {"trained": "majority"},
    t.REGRESSION: {"trained": "logistic-regression"},
    t.PROPAGATION: {"trained": "label-propagation"},
    # All others choose their round by validation labels; so this one spreads them
    VALIDATED: {"trained": f"{OTHER}:propagate_labels"},
}


def methods(data: str) -> dict[str, dict[str, Any]]:
    """Return the methods with their settings, and those that each may try."""
    budgets = BUDGETS | (LARGER if data == "Cora" else {})
    untrained = {"figures": [t.TEST], "tries": [()]}
    return {
        **{
            f"LPGNN, epsilon {name}": {"settings": [f"privacy.epsilon={value}"]}
            for name, value in budgets.items()
        },
        RANDOM: {"settings": ["privacy.epsilon=1", "strategy.features=random"]},
        CENTRAL: {
            "config": "nfedgnn/{data}-summed",
            "trained": f"{OTHER}:train_centralised",
            "tries": [[f"strategy.weight_decay={decay}"] for decay in ("5e-4", "5e-3")],
            "tried_on": (),
        },
        **{name: {**how, **untrained} for name, how in UNTRAINED.items()},
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
LINES = [
    line
    for data in ("Cora", "CiteSeer", "PubMed")
    for table, settings in SPLITS.items()
    for line in replace(LINE, table=table, settings=[*settings, f"data.name={data}"]).grid(
        [data], methods, GAINS
    )
]
PAPER = t.Paper(
    title="LPGNN: accuracy against a budget",
    tables={  # training in one place takes the longest, and comes last
        **{
            data.lower(): [one for one in LINES if one.data == data and one.method != CENTRAL]
            for data in ("Cora", "CiteSeer", "PubMed")
        },
        "central": [one for one in LINES if one.method == CENTRAL],
    },
)
