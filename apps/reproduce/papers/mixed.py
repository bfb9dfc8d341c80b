"""FedProto and local training where clients have different networks, beside one network for all."""

from dataclasses import replace
from typing import Any

from flower_graph.apps.reproduce import table as t

LOCAL, PROTO = "local training", "FedProto"
MIXED = "mixed"  # a third of the clients has each of the others
NETWORKS = {"GCN": "gcn", "SAGE": "sage", "MLP": "mlp", MIXED: "[gcn,sage,mlp]"}
DECAYS = [["strategy.weight_decay=0"], ["strategy.weight_decay=5e-3"]]
METHODS: dict[str, dict[str, Any]] = {
    LOCAL: {"config": "local/{data}"},
    # Its own setting is 1 where it is not named
    PROTO: {
        "config": "fedproto/{data}",
        "tries": [*DECAYS, *([*DECAYS[1], f"strategy.prototype_weight={w}"] for w in (0.1, 10))],
    },
}
LINE = t.Line(
    table="Louvain communities",
    config="local/{data}",
    # As in the table of personalised methods, but with less patience
    settings=[
        *("device=cpu", "data.features=presence", "partition.ratios=[0.2,0.4,0.4]"),
        *("partition.method=louvain", "partition.every_node=true", "partition.clients=10"),
        *("model.hidden=64", "model.dropout=0.5", "model.input_dropout=0"),
        *("strategy.local_epochs=3", "strategy.learning_rate=0.01", "strategy.optimiser=keep"),
        "patience=20",
    ],
    seeds=(0, 1, 2),
    rounds=150,
    figures=[*t.PLAIN, *t.SPENT],
    tries=DECAYS,
    choosers=(10,),
)
GAINS = [
    t.gain(LOCAL, PROTO),
    t.gain(t.REGRESSION, LOCAL, PROTO, name="gain-over-regression"),
]


def lines(*data: str) -> list[t.Line]:
    """Make the lines of some data sets."""
    made = []
    for model, name in NETWORKS.items():
        own = replace(LINE, model=model)
        made += own.grid(data, METHODS, GAINS, last=[f"model.name={name}"])
    return made + replace(LINE, model="").grid(data, t.BASELINES)


PAPER = t.Paper(
    title="Networks that differ by client",
    tables={"mixed": lines("Cora", "CiteSeer"), "pubmed": lines("PubMed")},
    on_request=("pubmed",),  # GraphSAGE takes an hour of one core there
)
