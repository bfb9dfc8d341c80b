"""Where each method gains, by homophily and signal; on graphs that nobody tuned for."""

from typing import Any

from flower_graph.apps.reproduce import table as t

GRAPH = [
    *("device=cpu", "data.name=csbm", "data.nodes=600", "data.classes=5", "data.degree=4"),
    *("data.num_features=512", "data.active=32", "data.split=random", "data.num_val=200"),
    *("data.num_test=300", "data.split_seed=null"),
]
PLAIN = ["strategy.alignment=plain", "strategy.aggregation=plain"]
# With few edges between classes there are five communities, and nodes without any neighbour
WHOLE = ["partition.resolution=2", "partition.every_node=true"]
# Judged once, by the SVC alone: the MLP takes longer than all the rest
ONCE = ["judge.every=10", "judge.mlp=false"]
SVC = t.Figure("micro-f1", keys={"classifier": "svc", "role": "test"})
SUMMED, REGRESSION = "nFedGNN, summed", "Logistic regression"
# Each method's config for Cora as it ships, with its rounds
METHODS: dict[str, dict[str, Any]] = {
    "nFedGNN": {"config": "nfedgnn/cora"},
    SUMMED: {"config": "nfedgnn/cora-summed", "model": "nfedgnn/cora"},
    REGRESSION: {"config": "nfedgnn/cora", "trained": "logistic-regression"},
    "FedSCem": {"config": "fedscem/cora", "settings": [*PLAIN, "strategy.variant=full"]},
    "Self-training": {"config": "fedscem/cora", "settings": ["strategy.name=self-training"]},
    "FedGLS": {"config": "fedgls/cora", "settings": ["strategy.name=structure-fedavg", *WHOLE]},
    "Local-GNN_k": {"config": "fedgls/cora", "settings": ["strategy.name=local-gnn-knn", *WHOLE]},
    "PPFL-GNN": {
        "config": "ppfl/cora-gat",
        "settings": ONCE,
        "figures": [SVC, t.Figure("gain-ppfl", SVC.name, "LOC", SVC.keys)],
    },
    "LOC": {
        "config": "ppfl/cora-gat",
        "settings": ["strategy.name=local", *ONCE],
        "figures": [SVC],
    },
}
GAINS = [
    t.gain(REGRESSION, "nFedGNN", name="gain-nfedgnn"),
    t.gain(REGRESSION, SUMMED, name="gain-summed"),
    t.gain("Self-training", "FedSCem", name="gain-fedscem"),
    t.gain("Local-GNN_k", "FedGLS", name="gain-fedgls"),
]
LINE = t.Line(table="Gain", config="", settings=GRAPH, seeds=(0, 1), figures=[t.TEST])
OVER = {
    "homophily": {one: [f"data.homophily={one}"] for one in (0.1, 0.3, 0.5, 0.7, 0.9)},
    "signal": {one: [f"data.signal={one}"] for one in (0.05, 0.1, 0.2)},
}
PAPER = t.Paper(
    title="Gain by homophily and signal, on generated graphs",
    tables={
        "gain": [
            line
            for method, how in METHODS.items()
            for line in LINE.grid(
                ["csbm"], {method: {"model": how["config"], **how}}, GAINS, over=OVER
            )
        ]
    },
    pictures=[
        t.Picture(
            *("heat-map.png", "matrices", {"Gain": None}),
            options={
                "axes": ["homophily", "signal"],
                "label": "gain in test accuracy",
                "metrics": {
                    "gain-nfedgnn": "nFedGNN − regression on the labelled users' features",
                    "gain-summed": "nFedGNN, one layer for all − regression on the same features",
                    "gain-fedscem": "FedSCem − Self-training, with labels that travel",
                    "gain-fedgls": "FedGLS − local training, nearest-neighbour graphs",
                    "gain-ppfl": "PPFL-GNN − local training",
                },
            },
        )
    ],
)
