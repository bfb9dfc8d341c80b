"""Where each method gains, by homophily and signal; on graphs that nobody tuned for."""

from itertools import product

from flower_graph.apps.reproduce.table import TEST, Figure, Line, Paper, Picture

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
SUMMED, REGRESSION = "nFedGNN, summed", "Logistic regression"
# Each method's config for Cora as it ships, with its rounds: name, settings, and gain over what
METHODS = [
    ("nfedgnn/cora", "nFedGNN", [], ("gain-nfedgnn", REGRESSION)),
    ("nfedgnn/cora-summed", SUMMED, [], ("gain-summed", REGRESSION)),
    ("nfedgnn/cora", REGRESSION, [], None),
    (
        *("fedscem/cora", "FedSCem", [*PLAIN, "strategy.variant=full"]),
        ("gain-fedscem", "Self-training"),
    ),
    ("fedscem/cora", "Self-training", ["strategy.name=self-training"], None),
    (
        *("fedgls/cora", "FedGLS", ["strategy.name=structure-fedavg", *WHOLE]),
        ("gain-fedgls", "Local-GNN_k"),
    ),
    ("fedgls/cora", "Local-GNN_k", ["strategy.name=local-gnn-knn", *WHOLE], None),
    ("ppfl/cora-gat", "PPFL-GNN", ONCE, ("gain-ppfl", "LOC")),
    ("ppfl/cora-gat", "LOC", ["strategy.name=local", *ONCE], None),
]
HOMOPHILY, SIGNAL = [0.1, 0.3, 0.5, 0.7, 0.9], [0.05, 0.1, 0.2]


def figures(config: str, gain: tuple[str, str] | None) -> list[Figure]:
    """List the accuracy and the gain of a method."""
    name = "micro-f1" if config.startswith("ppfl") else TEST
    keys = {"classifier": "svc", "role": "test"} if config.startswith("ppfl") else {}
    tested = [Figure(gain[0], name, gain[1], keys)] if gain else []
    return [Figure(name, keys=keys), *tested]


PAPER = Paper(
    title="Gain by homophily and signal, on generated graphs",
    notes="""
Graphs of a stochastic block model with 600 nodes, 5 classes of equal size, 4 neighbours a node and
32 of 512 features; each seed draws another graph. *Homophily* is the share of edges inside a
class: 0.2 is chance. *Signal* is the chance of each of a node's features to be the one that its
class prefers. All settings are those of each method's config for Cora, and its rounds: nobody
tuned them for these graphs. nFedGNN: 20 training nodes of each class, 200 of validation, 300 of
test. FedSCem: 100 two-hop ego-networks, each split 60/20/20. FedGLS: 8 clients of whole Louvain
communities, half of them without edges, each split 60/20/20. PPFL-GNN: 4 clients with a GAT each,
their embeddings judged by an SVC: micro-F1. How to read this: [README.md](README.md).
""",
    tables={
        "gain": [
            Line(
                table="Gain",
                data="csbm",
                model="nfedgnn/cora" if method == SUMMED else config,
                method=method,
                config=config,
                settings=[*GRAPH, *own, f"data.homophily={homophily}", f"data.signal={signal}"],
                seeds=(0, 1),
                keys={"homophily": homophily, "signal": signal},
                figures=figures(config, gain),
                trained="logistic-regression" if method == REGRESSION else "",
            )
            for config, method, own, gain in METHODS
            for homophily, signal in product(HOMOPHILY, SIGNAL)
        ]
    },
    pictures=[
        Picture(
            *("heat-map.png", "matrices", "gain", {"Gain": None}),
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
